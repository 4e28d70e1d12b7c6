"""Published models by name, and a model read from a file or a name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError, DataError, did_you_mean, reason, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.megatron_arguments import read_arguments

_LLAMA: dict[str, Any] = {"model_type": "llama", "rms_norm_eps": 1e-5, "dtype": "bfloat16"}


def _llama(layers: int, hidden: int, heads: int, groups: int, ffn: int, **other: Any) -> dict[str, Any]:
    return {
        **_LLAMA,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        **other,
    }


def _gpt(layers: int, hidden: int, heads: int, positions: int = 1024) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": positions}


def _t5(layers: int, model: int, kv: int, ffn: int, heads: int) -> dict[str, Any]:
    sizes = {"num_layers": layers, "d_model": model, "d_kv": kv, "d_ff": ffn, "num_heads": heads}
    return {"model_type": "t5", "feed_forward_proj": "relu", "vocab_size": 32_128, **sizes}


_LLAMA3 = {"vocab_size": 128_256, "max_position_embeddings": 8192, "rope_theta": 500_000.0}
_QWEN = {"model_type": "qwen2", "max_position_embeddings": 32_768, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
_QWEN3 = {**_QWEN, "model_type": "qwen3", "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
_MOE = {"num_experts_per_tok": 8, "norm_topk_prob": True, "num_experts": 128}
_QWEN3_MOE = {**_QWEN3, "model_type": "qwen3_moe", **_MOE}
_QWEN2_MOE = {**_QWEN, "model_type": "qwen2_moe", "vocab_size": 151_936}
_PHI3 = {"model_type": "phi3", "vocab_size": 32_064}
_OLMO2 = {"model_type": "olmo2", "vocab_size": 100_352, "rope_theta": 5e5, "rms_norm_eps": 1e-6}
_GEMMA3 = {"model_type": "gemma3_text", "tie_word_embeddings": True, "vocab_size": 262_144}


def _gemma2(layers: int, hidden: int, heads: int, groups: int, ffn: int, head_dim: int, scalar: int) -> dict[str, Any]:
    sizes = {"model_type": "gemma2", "head_dim": head_dim, "query_pre_attn_scalar": scalar, "vocab_size": 256_000}
    positions = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6}
    return _llama(layers, hidden, heads, groups, ffn, **sizes, **positions)


def _deepseek(layers: int, hidden: int, heads: int, dense_ffn: int, ffn: int, **other: Any) -> dict[str, Any]:
    """DeepSeek's; both have the same heads and the same YaRN but for `mscale`."""
    mscale = other.pop("mscale")
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    return _llama(
        layers,
        hidden,
        heads,
        heads,
        dense_ffn,
        moe_intermediate_size=ffn,
        max_position_embeddings=163_840,
        rms_norm_eps=1e-6,
        rope_scaling={**yarn, "mscale": mscale, "mscale_all_dim": mscale},
        **other,
    )


_DEEPSEEK2 = {"model_type": "deepseek_v2", "vocab_size": 102_400, "n_shared_experts": 2, "mscale": 0.707}
_MISTRAL = {"model_type": "mistral", "max_position_embeddings": 32_768}
_MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6}

# Their published config.json; gpt3 by Brown et al. 2020 (table 2.1), in the layers of GPT-2.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _llama(32, 4096, 32, 32, 11_008),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13_824),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28_672),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14_336, **_LLAMA3),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28_672, **_LLAMA3),
    "llama-3.1-405b": _llama(126, 16_384, 128, 8, 53_248, **{**_LLAMA3, "max_position_embeddings": 131_072}),
    "llama-3.2-1b": _llama(
        16, 2048, 32, 8, 8192, **{**_LLAMA3, "max_position_embeddings": 131_072, "tie_word_embeddings": True}
    ),
    "mistral-7b": _llama(32, 4096, 32, 8, 14_336, **_MISTRAL),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14_336, **_MIXTRAL, max_position_embeddings=32_768),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16_384, **_MIXTRAL, max_position_embeddings=65_536),
    "qwen2-7b": _llama(28, 3584, 28, 4, 18_944, **_QWEN, **{"vocab_size": 152_064}),
    "qwen2-72b": _llama(80, 8192, 64, 8, 29_568, **_QWEN, **{"vocab_size": 152_064}),
    "qwen3-0.6b": _llama(28, 1024, 16, 8, 3072, **_QWEN3, tie_word_embeddings=True),
    "qwen3-8b": _llama(36, 4096, 32, 8, 12_288, **_QWEN3),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25_600, **_QWEN3),
    "qwen1.5-moe-a2.7b": _llama(
        24,
        2048,
        16,
        16,
        5632,
        **_QWEN2_MOE,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "qwen2-57b-a14b": _llama(
        28,
        3584,
        28,
        4,
        18_944,
        **_QWEN2_MOE,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20_480,
    ),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 4, 6144, **_QWEN3_MOE, moe_intermediate_size=768),
    "qwen3-235b-a22b": _llama(94, 4096, 64, 4, 12_288, **_QWEN3_MOE, moe_intermediate_size=1536),
    "phi-3-mini": _llama(32, 3072, 32, 32, 8192, **_PHI3, sliding_window=2047),
    "phi-3-medium": _llama(40, 5120, 40, 10, 17_920, **_PHI3, sliding_window=2047),
    "olmo-2-7b": _llama(32, 4096, 32, 32, 11_008, **_OLMO2),
    "olmo-2-13b": _llama(40, 5120, 40, 40, 13_824, **_OLMO2),
    "olmo-2-32b": _llama(64, 5120, 40, 8, 27_648, **_OLMO2),
    "gemma-2-2b": _gemma2(26, 2304, 8, 4, 9216, 256, 256),
    "gemma-2-9b": _gemma2(42, 3584, 16, 8, 14_336, 256, 256),
    "gemma-2-27b": _gemma2(46, 4608, 32, 16, 36_864, 128, 144),
    "gemma-3-1b": _llama(
        26,
        1152,
        4,
        1,
        6912,
        **_GEMMA3,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-6,
    ),
    "deepseek-v2-lite": _deepseek(
        27,
        2048,
        16,
        10_944,
        1408,
        **_DEEPSEEK2,
        q_lora_rank=None,
        n_routed_experts=64,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
    ),
    "deepseek-v2": _deepseek(
        60,
        5120,
        128,
        12_288,
        1536,
        **_DEEPSEEK2,
        n_routed_experts=160,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        routed_scaling_factor=16.0,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
    ),
    "deepseek-v3": _deepseek(61, 7168, 128, 18_432, 2048, model_type="deepseek_v3", vocab_size=129_280, mscale=1.0),
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-6.7b": _gpt(32, 4096, 32, 2048),
    "gpt3-175b": _gpt(96, 12_288, 96, 2048),
    "t5-small": _t5(6, 512, 64, 2048, 8),
    "t5-base": _t5(12, 768, 64, 3072, 12),
    "t5-large": _t5(24, 1024, 64, 4096, 16),
    "t5-3b": _t5(24, 1024, 128, 16_384, 32),
    "t5-11b": _t5(24, 1024, 128, 65_536, 128),
}


def preset(name: str) -> Architecture:
    """The published model of that name. Errors: ConfigError with the names that are known."""
    if name not in PRESETS:
        near = did_you_mean(name, PRESETS)
        raise ConfigError(
            f"model {short(name)} is no preset: give the path of a config.json, or {', '.join(PRESETS)}{near}"
        )
    return read_config(PRESETS[name], f"preset {name}")


def read_model(model: str) -> tuple[Architecture, str]:
    """A model and what to call it: of a preset's name, or of a JSON file or the folder with its config.json.

    A file with "model_type" is Hugging Face's; one with "num_layers" or "encoder_num_layers" holds Megatron's
    arguments, by its names with underscores or dashes. Errors: ConfigError, DataError.
    """
    path = Path(model)
    if model in PRESETS and not path.is_file():
        return preset(model), model
    if not path.exists():
        return preset(model), model
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: cannot be read as a model's configuration ({reason(error)}): give its config.json"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be an object of a model's sizes, but is {short(raw)}: give its config.json")
    where = str(path)
    if "model_type" in raw:
        return read_config(raw, where), where
    arguments = {name.removeprefix("--").replace("-", "_"): value for name, value in raw.items()}
    if not {"num_layers", "encoder_num_layers"} & arguments.keys():
        raise ConfigError(
            f"{where}: has neither model_type (Hugging Face) nor num_layers (Megatron's arguments): give one of them"
        )
    return read_arguments(arguments, where), where
