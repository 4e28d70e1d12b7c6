"""Tiny causal models of transformers, one a family, and what one sample at a time gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from dynapipe_ext.data.dataset import TokenSample

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES | WINDOW, use_sliding_window=True, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=False),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=4, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "gemma": lambda: transformers.GemmaConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES | WINDOW, query_pre_attn_scalar=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES | WINDOW, query_pre_attn_scalar=8),
    "phi": lambda: transformers.PhiConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "phi3": lambda: transformers.Phi3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, sliding_window=5),
}


def tiny_model(family: Any) -> Any:
    """A model of a family, or of a config, that evaluates; weights are far from zero: attention shows in the loss."""
    config = CONFIGS[family]() if isinstance(family, str) else family
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 2.0 / parameter.shape[-1] ** 0.5)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def samples_of(lengths: Sequence[int]) -> list[TokenSample]:
    """Samples of so many positions, whose first third is a prompt."""
    generator = np.random.default_rng(5)
    return [
        TokenSample(index, generator.integers(1, VOCAB, n + 1).astype(np.int64), max(1, n // 3))
        for index, n in enumerate(lengths)
    ]


def one_by_one(model: Any, samples: Sequence[TokenSample]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of a global batch and all gradients by the model alone: a sample at a time, sum over target tokens."""
    model.zero_grad()
    targets = sum(sample.target for sample in samples)
    total = 0.0
    for sample in samples:
        tokens = torch.from_numpy(np.asarray(sample.tokens)).long()
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        first = sample.first_target - 1
        loss = torch.nn.functional.cross_entropy(logits[first:], tokens[first + 1 :], reduction="sum") / targets
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
