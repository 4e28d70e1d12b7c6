"""Tiny models of every published family, with weights that no default hides, and their files.

Import this at the top of a test module: transformers is imported once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint import CheckpointReader

HIDDEN, HEADS, GROUPS, LAYERS, VOCAB, FFN = 64, 8, 4, 4, 131, 96  # TP 4 and PP 4 divide them; 128 not the vocabulary

_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_EVERY_THIRD = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_GPT2: dict[str, Any] = {
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
_T5: dict[str, Any] = {
    "d_model": HIDDEN,
    "d_kv": 8,
    "num_heads": HEADS,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "d_ff": FFN,
    "vocab_size": VOCAB,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_DEEPSEEK = {
    **_LLAMA_LIKE,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.5,
}
_MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, _LLAMA_LIKE),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, _LLAMA_LIKE),
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, _LLAMA_LIKE),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        {
            **_LLAMA_LIKE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {**_LLAMA_LIKE, "head_dim": 16}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {**_LLAMA_LIKE, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, _LLAMA_LIKE),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, _LLAMA_LIKE),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {**_LLAMA_LIKE, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24},
    ),
    "gemma3_text": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {**_LLAMA_LIKE, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24, "layer_types": _EVERY_THIRD},
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        transformers.DeepseekV2ForCausalLM,
        {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "first_k_dense_replace": 1},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {**_DEEPSEEK, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0},
    ),
    "smollm3": (
        transformers.SmolLM3Config,
        transformers.SmolLM3ForCausalLM,
        {**_LLAMA_LIKE, "no_rope_layer_interval": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "granite": (
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        {
            **_LLAMA_LIKE,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "olmoe": (
        transformers.OlmoeConfig,
        transformers.OlmoeForCausalLM,
        {**_LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo3": (
        transformers.Olmo3Config,
        transformers.Olmo3ForCausalLM,
        {**_LLAMA_LIKE, "sliding_window": 7, "layer_types": _EVERY_THIRD},
    ),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM, {**_LLAMA_LIKE, "head_dim": 16}),
    "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM, _LLAMA_LIKE),
    "glm": (transformers.GlmConfig, transformers.GlmForCausalLM, {**_LLAMA_LIKE, "head_dim": 16}),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM, {**_LLAMA_LIKE, "head_dim": 16}),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {
            **_LLAMA_LIKE,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
        },
    ),
    "nemotron": (transformers.NemotronConfig, transformers.NemotronForCausalLM, {**_LLAMA_LIKE, "head_dim": 16}),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {
            **_LLAMA_LIKE,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "swiglu_limit": 0.2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "beta_fast": 4.0,
                "truncate": False,  # of 8 frequencies the limits are 2.8 and 5.2
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "llama4_text": (
        transformers.Llama4TextConfig,
        transformers.Llama4ForCausalLM,
        {
            **_LLAMA_LIKE,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 160,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 7,
            "floor_scale": 5,
            "attn_scale": 0.3,
        },
    ),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, _GPT2),
    "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration, _T5),
    "mt5": (transformers.MT5Config, transformers.MT5ForConditionalGeneration, _T5),
}

# Every family, and what changes its set of tensors: a name for the test, the family, changes of its configuration.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-key": ("llama", {"num_key_value_heads": 1}),  # which tensor parallel ranks share
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {}),
    "deepseek-v2-lite": ("deepseek_v2", {}),
    "deepseek-v3": ("deepseek_v3", {}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {}),
    "olmoe": ("olmoe", {}),
    "olmo3": ("olmo3", {}),
    "gemma": ("gemma", {}),
    "starcoder2": ("starcoder2", {}),
    "glm4": ("glm4", {}),
    "glm4-moe": ("glm4_moe", {"use_qk_norm": True}),
    "nemotron": ("nemotron", {}),
    "gpt-oss": ("gpt_oss", {}),
    "maverick": ("llama4_text", {}),
    "gpt2": ("gpt2", {}),
    "t5": ("t5", {}),
    "t5-mt5": ("mt5", {}),
    "t5-v1.1": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}
_TWO_LAYERS: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), 2),
    "layer_types": _EVERY_THIRD[1:3],
    "first_k_dense_replace": 1,
}


def tiny_config(family: str) -> Any:
    """The configuration of `tiny(family)`, as transformers has it."""
    config_class, _, defaults = _MODELS[family]
    return config_class(**defaults)


def tiny(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A transformers model of `family` in evaluation mode; `changes` are fields of its configuration.

    All weights are random and different: norms are not 1, biases not 0, and the vocabulary is no multiple of 128.
    """
    config_class, model_class, defaults = _MODELS[family]
    model = model_class(config_class(**{**defaults, **changes}, attn_implementation="eager"))
    if family in ("t5", "mt5") and not changes.get("tie_word_embeddings", True):
        # T5Config ties whatever it is told; published untied ones have a head of their own, and say false.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        model.config.tie_word_embeddings = False
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + noise if is_norm else noise)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model.to(dtype).eval()


def tiny_variant(name: str, **changes: Any) -> Any:
    """The model of a name in VARIANTS."""
    family, own = VARIANTS[name]
    return tiny(family, **{**own, **changes})


def two_layers(name: str) -> dict[str, Any]:
    """Changes for `tiny_variant`: every kind of tensor that a name in VARIANTS has, in half the layers."""
    defaults = _MODELS[VARIANTS[name][0]][2]
    return {field: value for field, value in _TWO_LAYERS.items() if field in defaults}


def saved(model: Any, folder: Path, *, shard_size: str = "100KB", tokenizer: bool = False) -> Path:
    """`folder` with what `save_pretrained` writes, in several shards; `tokenizer` adds a tokenizer's files."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> dict[str, bytes]:
    """A whole word tokenizer's files in `folder`; their names and bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    before = set(folder.iterdir())
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return {file.name: file.read_bytes() for file in sorted(set(folder.iterdir()) - before)}


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors, read by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                assert name not in found, f"{name} is in two shards"
                found[name] = shard.get_tensor(name)
    return found


def differences(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are absent on one side or differ in shape, dtype or any bit."""
    found = sorted(left.keys() ^ right.keys())
    for name in sorted(left.keys() & right.keys()):
        one, two = left[name], right[name]
        if one.dtype != two.dtype or one.shape != two.shape or not torch.equal(bits(one), bits(two)):
            found.append(name)
    return found


def unequal(left: CheckpointReader, right: CheckpointReader) -> list[str]:
    """Names and kinds of tensors that are not the same bits in two checkpoints, of whatever formats."""
    assert tensor_groups(left.architecture) == tensor_groups(right.architecture)
    assert left.kinds == right.kinds
    found = []
    for group in tensor_groups(left.architecture):
        for kind in left.kinds if not group.is_buffer else ("weight",):
            found += [f"{name} ({kind})" for name in differences(left.read(group, kind), right.read(group, kind))]
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaN equals itself, and -0 is not 0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def logits(model: Any, *, length: int = 24, rows: int = 2) -> torch.Tensor:
    """What `model` says of fixed tokens, in evaluation mode; shape (rows, length, vocabulary)."""
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
    inputs: dict[str, Any] = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens.flip(1)
    with torch.no_grad():
        result: torch.Tensor = model(**inputs, use_cache=False).logits
    return result


def edit_json(path: Path, **changes: Any) -> None:
    """Replace fields of a JSON object in a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2))
