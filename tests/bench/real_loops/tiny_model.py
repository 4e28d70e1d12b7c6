"""The model that loops of their own Hugging Face folders train."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.support.model_folders import write_model_tokenizer


def write_tiny_qwen2(folder: Path, vocab_size: int) -> None:
    """A tiny Qwen2 with random weights, and a tokenizer, under `folder` / "model"."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.Qwen2Config(
        vocab_size=vocab_size, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, **sizes
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    write_model_tokenizer(folder / "model")
