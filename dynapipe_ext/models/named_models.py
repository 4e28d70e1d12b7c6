"""Models by what people name: a preset, a file of Hugging Face or Megatron, a folder of transformers.

`read_model` gives a model that megatron-core can compute, `read_trainable` also one that transformers computes, by its
sizes alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

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
    """DeepSeek-V2 and V3: the same heads, and the same YaRN except for `mscale`."""
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
_STARCODER2 = {"model_type": "starcoder2", "vocab_size": 49_152, "max_position_embeddings": 16_384}
_GLM = {"vocab_size": 151_552, "max_position_embeddings": 131_072, "head_dim": 128}
_GLM_MOE = {**_GLM, "model_type": "glm4_moe", "rope_theta": 1e6, "num_experts_per_tok": 8, "n_shared_experts": 1}
_GEMMA = {"model_type": "gemma", "head_dim": 256, "vocab_size": 256_000, "max_position_embeddings": 8192}
_OLMO3_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
_KIMI_YARN = {"rope_type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
}
_MISTRAL = {"model_type": "mistral", "max_position_embeddings": 32_768}
_MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6}

# The published config.json of each. gpt3 follows Brown et al. 2020 (table 2.1), with the layers of GPT-2.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _llama(32, 4096, 32, 32, 11_008),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13_824),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28_672),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14_336, **_LLAMA3),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28_672, **_LLAMA3),
    "llama-3.1-405b": _llama(126, 16_384, 128, 8, 53_248, **{**_LLAMA3, "max_position_embeddings": 131_072}),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192,
        **{**_LLAMA3, "max_position_embeddings": 131_072, "tie_word_embeddings": True}),
    "mistral-7b": _llama(32, 4096, 32, 8, 14_336, **_MISTRAL),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14_336, **_MIXTRAL, max_position_embeddings=32_768),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16_384, **_MIXTRAL, max_position_embeddings=65_536),
    "qwen2-7b": _llama(28, 3584, 28, 4, 18_944, **_QWEN, **{"vocab_size": 152_064}),
    "qwen2-72b": _llama(80, 8192, 64, 8, 29_568, **_QWEN, **{"vocab_size": 152_064}),
    "qwen3-0.6b": _llama(28, 1024, 16, 8, 3072, **_QWEN3, tie_word_embeddings=True),
    "qwen3-8b": _llama(36, 4096, 32, 8, 12_288, **_QWEN3),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25_600, **_QWEN3),
    "qwen1.5-moe-a2.7b": _llama(24, 2048, 16, 16, 5632, **_QWEN2_MOE, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
    "qwen2-57b-a14b": _llama(28, 3584, 28, 4, 18_944, **_QWEN2_MOE, num_experts=64, num_experts_per_tok=8,
        moe_intermediate_size=2560, shared_expert_intermediate_size=20_480),
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
    "gemma-3-1b": _llama(26, 1152, 4, 1, 6912, **_GEMMA3, head_dim=256, sliding_window=512,
        max_position_embeddings=32_768, rms_norm_eps=1e-6),
    "deepseek-v2-lite": _deepseek(27, 2048, 16, 10_944, 1408, **_DEEPSEEK2, q_lora_rank=None, n_routed_experts=64,
        num_experts_per_tok=6, first_k_dense_replace=1),
    "deepseek-v2": _deepseek(60, 5120, 128, 12_288, 1536, **_DEEPSEEK2, n_routed_experts=160, num_experts_per_tok=6,
        first_k_dense_replace=1, routed_scaling_factor=16.0, topk_method="group_limited_greedy", n_group=8,
        topk_group=3),
    "deepseek-v3": _deepseek(61, 7168, 128, 18_432, 2048, model_type="deepseek_v3", vocab_size=129_280, mscale=1.0),
    "kimi-k2": _llama(61, 7168, 64, 64, 18_432, model_type="kimi_k2", rms_norm_eps=1e-6, vocab_size=163_840,
        max_position_embeddings=131_072, rope_theta=50_000.0,
        rope_scaling={**_KIMI_YARN, "original_max_position_embeddings": 4096}, moe_intermediate_size=2048,
        n_routed_experts=384, n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.827),
    "smollm3-3b": _llama(36, 2048, 16, 4, 11_008, model_type="smollm3", rms_norm_eps=1e-6, vocab_size=128_256,
        max_position_embeddings=65_536, rope_theta=5e6, tie_word_embeddings=True),
    "granite-3.1-8b": _llama(40, 4096, 32, 8, 12_800, model_type="granite", vocab_size=49_152,
        max_position_embeddings=131_072, rope_theta=1e7, tie_word_embeddings=True, embedding_multiplier=12.0,
        residual_multiplier=0.22, attention_multiplier=0.0078125, logits_scaling=16.0),
    "olmoe-1b-7b": _llama(16, 2048, 16, 16, 1024, model_type="olmoe", vocab_size=50_304),
    "olmo-3-7b": _llama(32, 4096, 32, 32, 11_008, model_type="olmo3", rms_norm_eps=1e-6, vocab_size=100_278,
        max_position_embeddings=65_536, rope_theta=5e5, rope_scaling=_OLMO3_YARN),
    "gemma-2b": _llama(18, 2048, 8, 1, 16_384, **_GEMMA, rms_norm_eps=1e-6, tie_word_embeddings=True),
    "gemma-7b": _llama(28, 3072, 16, 16, 24_576, **_GEMMA, rms_norm_eps=1e-6, tie_word_embeddings=True),
    "starcoder2-3b": _llama(30, 3072, 24, 2, 12_288, **_STARCODER2, sliding_window=4096,
        rope_theta=999_999.4420358813),
    "starcoder2-15b": _llama(40, 6144, 48, 4, 24_576, **_STARCODER2, sliding_window=4096, rope_theta=1e5,
        tie_word_embeddings=False),
    "glm-4-9b": _llama(40, 4096, 32, 2, 13_696, **_GLM, model_type="glm", rms_norm_eps=1.5625e-07,
        attention_bias=True),
    "glm-4-9b-0414": _llama(40, 4096, 32, 2, 13_696, **_GLM, model_type="glm4", attention_bias=False),
    "glm-4.5-air": _llama(46, 4096, 96, 8, 10_944, **_GLM_MOE, attention_bias=True, moe_intermediate_size=1408,
        n_routed_experts=128),
    "glm-4.5": _llama(92, 5120, 96, 8, 12_288, **_GLM_MOE, attention_bias=True, use_qk_norm=True,
        moe_intermediate_size=1536, n_routed_experts=160, first_k_dense_replace=3, routed_scaling_factor=2.5),
    "gpt-oss-20b": _llama(24, 2880, 64, 8, 2880, **_GPT_OSS, num_local_experts=32),
    "gpt-oss-120b": _llama(36, 2880, 64, 8, 2880, **_GPT_OSS, num_local_experts=128),
    "nemotron-4-340b": _llama(96, 18_432, 96, 8, 73_728, model_type="nemotron", vocab_size=256_000),
    "internlm2-7b": _llama(32, 4096, 32, 8, 14_336, model_type="internlm2", bias=False, vocab_size=92_544,
        max_position_embeddings=32_768, rope_theta=1e6),
    "mt5-small": {"model_type": "mt5", "tie_word_embeddings": False},
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
}  # fmt: skip


_ADAPTERS = "adapter_config.json"


def refuse_adapters(folder: Path) -> None:
    """Errors: DataError for a folder of peft's adapters without a model, naming the model that they stand beside."""
    config = folder / _ADAPTERS
    has_model = any((folder / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))
    if has_model or not config.is_file() or any(folder.glob("*.index.json")):
        return
    try:
        base = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        base = None
    base_name = base if isinstance(base, str) and base else "MODEL"
    raise DataError(
        f"{folder} holds adapters of peft beside {base_name}, not a model: merge them into it"
        f" (dynapipe convert {folder} --merge {base_name} --output MERGED) and give MERGED; or train new adapters by"
        f" dynapipe train --model {base_name} --lora, or go on with those of a run by --resume"
    )


def preset(name: str) -> Architecture:
    """The published model of that name. Errors: ConfigError with the names that are known."""
    if name not in PRESETS:
        near = did_you_mean(name, PRESETS)
        raise ConfigError(
            f"model {short(name)} is no preset: give the path of a config.json, or {', '.join(PRESETS)}{near}"
        )
    return read_config(PRESETS[name], f"preset {name}")


def read_model(model: str) -> tuple[Architecture, str]:
    """A model, and its name for messages, from a preset's name, a JSON file or a folder with config.json.

    A file with "model_type" is Hugging Face's; one with "num_layers" or "encoder_num_layers" holds Megatron's
    arguments, by its names with underscores or dashes. Errors: ConfigError, DataError.
    """
    path = Path(model)
    if model in PRESETS and not path.is_file():
        return preset(model), model
    if not path.exists():
        return preset(model), model
    refuse_adapters(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
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


ENCODER_DECODERS = ("t5",)  # the transformers room knows where to cut these


def refuse_other_pairs(kind: object) -> None:
    """Errors: ConfigError for an encoder-decoder, by transformers' model_type, that cannot be cut into stages."""
    if kind not in ENCODER_DECODERS:
        raise ConfigError(
            f"{short(kind)} has an encoder and a decoder: of such models only {', '.join(ENCODER_DECODERS)} is"
            " supported, so give one, or a decoder-only model"
        )


Backend = Literal["auto", "megatron", "transformers"]

# Families give one size different names in config.json; the first name that is present counts.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "decoder_attention_heads")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
_ANY_LENGTH = 1 << 20  # of states, and of scores by distance, whose configurations have no positions
_OF_OTHER_HEADS = ("classifier", "summary")  # which no language model has
_DEFAULT_DROPOUTS = {  # the values that transformers takes for missing fields, of families with a twin in megatron-core
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "t5": {"dropout_rate": 0.1},
    "mt5": {"dropout_rate": 0.1},
}
_GATED = ("silu", "gelu_pytorch_tanh")


def read_trainable(model: str, backend: Backend) -> Architecture:
    """A model to train: one that megatron-core computes, or the sizes of one that transformers computes.

    The family of the latter is "transformers", but a T5 is always "t5". The backend "auto" takes transformers where
    megatron-core cannot compute a decoder. That it can be cut into stages is proven when a run starts.
    Errors: ConfigError, DataError.
    """
    path = config_file(model)
    refuse_adapters(Path(model))
    refusal: ConfigError | None = None
    if backend != "transformers":
        try:
            return read_model(model)[0]
        except ConfigError as error:
            if backend == "megatron" or not path.is_file() or not model_type(model):
                raise
            refusal = error
    if not path.is_file():
        raise ConfigError(f"{model} has no config.json, from which transformers could build a model: give its folder")
    raw = raw_config(model)
    if raw.get("is_encoder_decoder"):
        if refusal is not None:
            raise refusal
        refuse_other_pairs(model_type(model))
        return read_model(model)[0]
    try:
        return read_sizes(raw, str(path))
    except ConfigError:
        if refusal is not None:  # neither has its sizes
            raise refusal from None
        raise


def model_type(model: str) -> str:
    """Transformers' name of the family, from a model's config.json; empty where it has none."""
    return str(raw_config(model).get("model_type") or "")


def dropout_rates(model: str) -> dict[str, float]:
    """Return the dropout rates above 0 of a model's config.json, defaults included; none without such a file."""
    raw = raw_config(model)
    rates = _DEFAULT_DROPOUTS.get(str(raw.get("model_type")), {}) | rates_in(raw)
    return {name: rate for name, rate in rates.items() if rate}


def rates_in(raw: Mapping[str, Any]) -> dict[str, float]:
    """Return all rates of a configuration, those of parts within it too, by their names.

    >>> rates_in({"attn_pdrop": 0.1, "text_config": {"layerdrop": 0}, "classifier_dropout": 0.2, "drop_last": True})
    {'attn_pdrop': 0.1, 'layerdrop': 0}
    """
    rates: dict[str, float] = {}
    for name, value in raw.items():
        if isinstance(value, Mapping):
            rates |= rates_in(value)
        elif isinstance(name, str) and is_rate(name, value):  # labels have numbers for names
            rates[name] = value
    return rates


def is_rate(name: str, value: object) -> bool:
    """Return whether a field of a configuration is a rate at which training leaves values out, or disturbs them."""
    is_named_so = ("drop" in name or "jitter" in name) and not any(other in name for other in _OF_OTHER_HEADS)
    return is_named_so and isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def drops_values(name: str) -> bool:
    """Return whether a rate is one of dropout, by its name: not of layers left out, or of factors around 1."""
    return "jitter" not in name and "layer" not in name and "path" not in name


def raw_config(model: str) -> Mapping[str, Any]:
    """The object in a model's config.json, empty without such a file. Errors: ConfigError for a damaged file."""
    if not (path := config_file(model)).is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a model's configuration ({error})") from error
    return raw if isinstance(raw, dict) else {}


def is_float32_folder(model: str) -> bool:
    """Whether a model's folder says that its weights have 32 bits; its config.json without a type means that."""
    raw = raw_config(model)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return bool(raw) and dtype == "float32"


def document_attention_fault(model: str) -> str:
    """Why attention document by document differs from the model in a config.json; empty where it does not."""
    raw = raw_config(model)
    if cap := raw.get("attn_logit_softcapping"):
        return f"{raw.get('model_type')} caps its scores (attn_logit_softcapping {cap})"
    return ""


def carried_fault(model: str) -> str:
    """Why a model of transformers cannot attend from piece to piece of a cut sample; empty where it can."""
    raw = raw_config(model)
    kind, window = raw.get("model_type"), raw.get("sliding_window")
    fault = document_attention_fault(model)
    if window and raw.get("use_sliding_window", True):
        fault = f"{kind} has attention windows (sliding_window {window}), which do not go on from piece to piece"
    return f"{fault}: plan whole samples" if fault else ""


def config_file(model: str) -> Path:
    """The config.json of a model's folder, or the file itself."""
    return Path(model) / "config.json" if Path(model).is_dir() else Path(model)


def read_sizes(raw: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """A GPT of the sizes in a config.json, those of its text model where it also reads other data. Experts are counted;
    other parts of a family (norms, windows) are not. A state space family gets one head, as wide as the model.

    Errors: ConfigError naming a missing size, and for a model with an encoder.
    """
    if isinstance(raw.get("text_config"), Mapping):
        raw = {**raw, **raw["text_config"], "model_type": raw.get("model_type")}
    kind = short(raw.get("model_type"))
    if raw.get("is_encoder_decoder"):
        raise ConfigError(f"{where}: {kind} has an encoder and a decoder: give a decoder-only model")
    if raw.get("quantization_config") is not None:
        raise ConfigError(f"{where}: {kind} is quantized and cannot be trained: give the model in full precision")

    def size(names: tuple[str, ...], default: int | None = None) -> int:
        value = next((raw[name] for name in names if raw.get(name) is not None), default)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{where}: {' or '.join(names)} is {short(value)} but must be an integer above 0")
        return value

    kinds = raw.get("layers_block_type")  # Nemotron-H's configuration counts its layers there alone
    hidden, heads = size(_HIDDEN), size(_HEADS, 1)
    gpt = Architecture.gpt(
        num_layers=size(_LAYERS, len(kinds) if isinstance(kinds, list) else None),
        hidden_size=hidden,
        num_heads=heads,
        num_query_groups=size(("num_key_value_heads",), heads),
        head_dim=size(("head_dim",), max(1, hidden // heads)),
        ffn_hidden_size=size(_FFN, 4 * hidden),
        gated_mlp=(raw.get("hidden_activation") or raw.get("hidden_act")) in _GATED,
        vocab_size=size(("vocab_size",)),
        max_seq_len=size(_POSITIONS, _ANY_LENGTH),
        tied_embeddings=bool(raw.get("tie_word_embeddings", True)),
        position="rope",
        norm="rmsnorm",
        bias=False,
    )
    return replace(gpt, family="transformers", **_experts(raw))


def _experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What of an Architecture a mixture of experts has; nothing where the configuration names none."""

    def size(*names: str) -> int:
        return next((raw[name] for name in names if type(raw.get(name)) is int and raw[name] > 0), 0)

    num_experts, top_k = size(*_EXPERTS), size("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k")
    if num_experts < 2 or not 0 < top_k <= num_experts:
        return {}
    dense_ffn = size(*_FFN)
    ffn = size("moe_intermediate_size", *_FFN)
    shared = size("shared_expert_intermediate_size", "shared_intermediate_size")
    num_dense = size("first_k_dense_replace")
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "norm_topk_prob": top_k > 1,  # a single one's would always be 1, which megatron-core refuses to measure
        "ffn_hidden_size": ffn,
        "shared_ffn_hidden_size": shared or size("n_shared_experts", "num_shared_experts") * ffn,
    } | ({"num_dense_layers": num_dense, "dense_ffn_hidden_size": dense_ffn} if num_dense else {})


def rotary_settings(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a transformers configuration: one, or one for each kind of layers."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope] if "rope_type" in rope or "rope_theta" in rope else [r for r in rope.values() if isinstance(r, dict)]


def changing_lengths(config: Any, *, longest: int | None, row: int | None) -> dict[str, int]:
    """Lengths in positions at which a transformers model changes its arithmetic, by the setting's name: of those that
    documents of `longest` or rows of `row` positions (None: of any length) can exceed."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    limits: dict[str, int] = {}
    window = getattr(config, "sliding_window", None)
    if window and (not kinds or any("sliding" in kind for kind in kinds)):
        limits["sliding_window"] = int(window)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and (not kinds or "chunked_attention" in kinds):
        limits["attention_chunk_size"] = int(chunk)
    for rope in rotary_settings(config):
        if rope.get("rope_type") in ("dynamic", "longrope"):  # their frequencies follow the longest document of a row
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            limits["original_max_position_embeddings"] = int(original)
    limits = {name: value for name, value in limits.items() if longest is None or longest > value}
    scale = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and scale and (row is None or row > scale):
        limits["floor_scale"] = int(scale)  # counts positions of the row, not of documents
    return limits


def shorten(config: Any, limit: str, length: int) -> None:
    """Put one of `changing_lengths` of a configuration of text at so many positions."""
    if limit != "original_max_position_embeddings":
        setattr(config, limit, length)
        return
    for rope in rotary_settings(config):
        rope["original_max_position_embeddings"] = length
    if any(rope.get("rope_type") == "dynamic" for rope in rotary_settings(config)):
        config.max_position_embeddings = length
    if getattr(config, "original_max_position_embeddings", None):
        config.original_max_position_embeddings = length
