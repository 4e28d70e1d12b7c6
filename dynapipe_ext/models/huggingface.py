"""Hugging Face's config.json to an `Architecture` and back. Unsupported values of fields are refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynapipe_ext.errors import ConfigError, did_you_mean, short
from dynapipe_ext.models.architecture import FAMILIES, Architecture, RopeScaling
from dynapipe_ext.models.family_configs import (
    ACTIVATIONS,
    ConfigFields,
    as_llama,
    deepseek_config,
    deepseek_values,
    gemma_config,
    gemma_values,
    rope_fields,
)

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
}
# The values that transformers takes for missing fields: (rms_norm_eps, max positions, rope_theta).
_DEFAULTS = {
    "llama": (1e-6, 2048, 1e4),
    "mistral": (1e-6, 131_072, 1e4),
    "mixtral": (1e-5, 131_072, 1e6),
    "qwen2": (1e-6, 32_768, 1e4),
    "qwen2_moe": (1e-6, 32_768, 1e4),
    "qwen3": (1e-6, 32_768, 1e4),
    "qwen3_moe": (1e-6, 32_768, 1e4),
    "phi3": (1e-5, 4096, 1e4),
    "olmo2": (1e-5, 2048, 1e4),
    "gemma2": (1e-6, 8192, 1e4),
    "gemma3_text": (1e-6, 131_072, 1e6),
}
# Families that resemble supported ones, and why they are refused.
_REFUSED = {
    "gemma3": "it has a vision tower; give its text_config, of model_type gemma3_text, and the weights of that",
    "olmo": "its norms have no weights",
    "qwen2_vl": "it has a vision tower",
    "qwen3_next": "its linear attention has no equal in Megatron",
}
_GEMMAS = ("gemma2", "gemma3_text")
_DEEPSEEKS = ("deepseek_v2", "deepseek_v3")
_WITH_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe", "olmo2", *_GEMMAS)
_WITHOUT_GROUPS = ("llama", "phi3", "olmo2")  # unless config.json gives them
_DEQUANTISED = ("fp8", "mxfp4")  # what readers of checkpoints turn into plain weights
# Second names of fields; transformers accepts both.
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    },
    "t5": {
        "hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},  # transformers 5 writes it
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
}  # fmt: skip


def read_config(raw: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """The architecture in a config.json. Errors: ConfigError naming the field, its value and the possible ones."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: must be an object with model_type, hidden_size and so on, but is {short(raw)}")
    family = raw.get("model_type")
    if family not in FAMILIES:
        reason = _REFUSED.get(family) if isinstance(family, str) else None
        families = f"known are {', '.join(FAMILIES)}"
        advice = f"{reason}; {families}" if reason else f"{families}{did_you_mean(str(family), FAMILIES)}"
        raise ConfigError(f"{where}: model_type is {short(family)}: {advice}")
    fields = ConfigFields(_by_first_names(raw, _ALIASES.get(family, {}), where), where)
    _refuse_quantisation(fields)
    if family in _GEMMAS:
        values = _read_llama(as_llama(fields, family), family) | gemma_values(fields, family)
    elif family in _DEEPSEEKS:
        values = deepseek_values(fields, family)
    else:
        values = {"gpt2": _read_gpt2, "t5": _read_t5}.get(family, _read_llama)(fields, family)
    values["dtype"] = _dtype(fields)
    try:
        return Architecture(family=family, **values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _refuse_quantisation(fields: ConfigFields) -> None:
    """Errors: ConfigError naming a method whose weights no reader turns into plain ones."""
    quantisation = fields.raw.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    if quantisation is not None and method not in _DEQUANTISED:
        raise ConfigError(
            f"{fields.where}: quantization_config is {short(quantisation)}: weights of quant_method {short(method)} are"
            f" not read, only those of {' and '.join(_DEQUANTISED)}, as bfloat16: give the model in full precision"
        )


def _by_first_names(raw: Mapping[str, Any], aliases: Mapping[str, str], where: str) -> dict[str, Any]:
    renamed = dict(raw)
    for alias, name in aliases.items():
        value = renamed.pop(alias, None)
        if value is None:
            continue
        if renamed.get(name, value) != value:
            raise ConfigError(
                f"{where}: {alias} is {short(value)} but {name} {short(renamed[name])}: they are one thing, leave one"
                " out"
            )
        renamed[name] = value
    return renamed


def _dtype(fields: ConfigFields) -> str:
    dtype = fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"
    return str(dtype).removeprefix("torch.")


def _read_llama(fields: ConfigFields, family: str) -> dict[str, Any]:
    norm_eps, max_positions, rope_theta = _DEFAULTS[family]
    fields.refuse("partial_rotary_factor", 1.0)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if not fields.raw.get("head_dim") and family != "qwen3" and hidden % heads:
        raise ConfigError(f"{fields.where}: hidden_size {hidden} must be a multiple of num_attention_heads {heads}")
    theta, scaling = _rope(fields, rope_theta)
    attention_bias = fields.flag("attention_bias") and family in _WITH_ATTENTION_BIAS
    mlp_bias = fields.flag("mlp_bias") and family == "llama"
    return {
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_query_groups": fields.integer("num_key_value_heads", heads if family in _WITHOUT_GROUPS else None),
        "head_dim": fields.integer("head_dim", 128 if family == "qwen3" else hidden // heads),
        "ffn_hidden_size": fields.integer("intermediate_size"),
        "vocab_size": fields.integer("vocab_size"),
        "max_seq_len": fields.integer("max_position_embeddings", max_positions),
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "activation": fields.activation("hidden_act", "silu"),
        "norm_eps": fields.number("rms_norm_eps", norm_eps),
        "qkv_bias": attention_bias or family == "qwen2" or (family == "qwen2_moe" and fields.flag("qkv_bias", True)),
        "attention_output_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "norm_placement": "post" if family == "olmo2" else "pre",
        "qk_norm": family in ("qwen3", "qwen3_moe", "olmo2"),
        "qk_norm_whole": family == "olmo2",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "sliding_window": _window(fields, family),
    } | _mixture(fields, family)


def _mixture(fields: ConfigFields, family: str) -> dict[str, Any]:
    """The fields of mixtures of experts; they replace those of plain models."""
    if family == "mixtral":
        return {
            "num_experts": fields.integer("num_local_experts", 8),
            "top_k": fields.integer("num_experts_per_tok", 2),
        }
    if family not in ("qwen2_moe", "qwen3_moe"):
        return {}
    fields.refuse("decoder_sparse_step", 1)
    fields.refuse("mlp_only_layers", [])
    experts, top_k, ffn = (60, 4, 1408) if family == "qwen2_moe" else (128, 8, 768)
    values: dict[str, Any] = {
        "num_experts": fields.integer("num_experts", experts),
        "top_k": fields.integer("num_experts_per_tok", top_k),
        "ffn_hidden_size": fields.integer("moe_intermediate_size", ffn),
        "norm_topk_prob": fields.flag("norm_topk_prob"),
    }
    if family == "qwen2_moe":
        values["shared_ffn_hidden_size"] = fields.integer("shared_expert_intermediate_size", 5632)
        values["shared_expert_gate"] = True
    return values


def _window(fields: ConfigFields, family: str) -> int:
    raw = fields.raw
    window = raw.get("sliding_window", 4096 if family == "mistral" or family.startswith("qwen") else None)
    if family in ("llama", "olmo2") or window is None:
        return 0
    if family.startswith("qwen"):
        if fields.flag("use_sliding_window"):
            raise ConfigError(
                f"{fields.where}: use_sliding_window is true: windows in some layers only are not supported; set it"
                " to false"
            )
        return 0
    return fields.integer("sliding_window", window)


def _rope(fields: ConfigFields, default: float) -> tuple[float, RopeScaling | None]:
    """The base of the rotary frequencies, and how they are stretched."""
    inner = rope_fields(fields)
    rope = inner.raw
    inner.refuse("partial_rotary_factor", 1.0)
    theta = inner.number("rope_theta", fields.number("rope_theta", default))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kinds = ["default"] if fields.raw.get("model_type") == "phi3" else ["default", "linear", "llama3"]
    if kind not in kinds:
        raise ConfigError(
            f"{fields.where}: rope_type is {short(kind)}: known are {', '.join(kinds)} (longrope's frequencies depend"
            " on the length of the row, Megatron's do not)"
        )
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", inner.number("factor"))
    return theta, RopeScaling(
        "llama3",
        inner.number("factor"),
        inner.number("low_freq_factor"),
        inner.number("high_freq_factor"),
        inner.integer("original_max_position_embeddings"),
    )


def _read_gpt2(fields: ConfigFields, _: str) -> dict[str, Any]:
    fields.refuse("scale_attn_weights", True)
    fields.refuse("scale_attn_by_inverse_layer_idx", False)
    fields.refuse("add_cross_attention", False)
    hidden, heads = fields.integer("n_embd", 768), fields.integer("n_head", 12)
    if hidden % heads:
        raise ConfigError(f"{fields.where}: n_embd {hidden} must be a multiple of n_head {heads}")
    return {
        "num_layers": fields.integer("n_layer", 12),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_query_groups": heads,
        "head_dim": hidden // heads,
        "ffn_hidden_size": fields.integer("n_inner", 4 * hidden),
        "vocab_size": fields.integer("vocab_size", 50_257),
        "max_seq_len": fields.integer("n_positions", 1024),
        "tied_embeddings": fields.flag("tie_word_embeddings", True),
        "gated_mlp": False,
        "activation": fields.activation("activation_function", "gelu_new"),
        "position": "learned",
        "norm": "layernorm",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }


def _read_t5(fields: ConfigFields, _: str) -> dict[str, Any]:
    """transformers 5 writes tie_word_embeddings true for every T5: only the weight files tell whether a head is
    tied."""
    kind = fields.raw.get("feed_forward_proj") or "relu"
    gated, _dash, name = str(kind).rpartition("-")
    if gated not in ("", "gated") or name not in ACTIVATIONS:
        raise ConfigError(f"{fields.where}: feed_forward_proj is {short(kind)}: give relu, gated-gelu or gated-silu")
    tied = fields.flag("tie_word_embeddings", True)
    if start := fields.raw.get("decoder_start_token_id"):
        raise ConfigError(f"{fields.where}: decoder_start_token_id is {short(start)} but every T5 starts with 0")
    layers, heads = fields.integer("num_layers", 6), fields.integer("num_heads", 8)
    return {
        "num_layers": layers,
        "num_decoder_layers": fields.integer("num_decoder_layers", layers),
        "hidden_size": fields.integer("d_model", 512),
        "num_heads": heads,
        "num_query_groups": heads,
        "head_dim": fields.integer("d_kv", 64),
        "ffn_hidden_size": fields.integer("d_ff", 2048),
        "vocab_size": fields.integer("vocab_size", 32_128),
        "max_seq_len": fields.integer("n_positions", 512),
        "tied_embeddings": tied,
        "gated_mlp": bool(gated),
        "activation": "gelu_tanh" if kind == "gated-gelu" else ACTIVATIONS[name],
        "position": "relative",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-6),
        "relative_buckets": fields.integer("relative_attention_num_buckets", 32),
        "relative_max_distance": fields.integer("relative_attention_max_distance", 128),
        "scaled_output": fields.flag("scale_decoder_outputs", tied),
    }


def write_config(architecture: Architecture) -> dict[str, Any]:
    """A config.json from which transformers builds the same model; `read_config` inverts it."""
    a = architecture
    if a.family in ("gpt", "transformers"):
        raise ConfigError(
            "a model in custom sizes has no config.json, since transformers does not know it: give a published model"
        )
    common: dict[str, Any] = {
        "architectures": [_CLASSES[a.family]],
        "model_type": a.family,
        "dtype": a.dtype,
        "torch_dtype": a.dtype,
        "tie_word_embeddings": a.tied_embeddings,
        "vocab_size": a.vocab_size,
    }
    if a.family == "gpt2":
        return common | {
            "n_layer": a.num_layers,
            "n_embd": a.hidden_size,
            "n_head": a.num_heads,
            "n_inner": a.ffn_hidden_size,
            "n_positions": a.max_seq_len,
            "layer_norm_epsilon": a.norm_eps,
            "activation_function": "gelu_new" if a.activation == "gelu_tanh" else a.activation,
        }
    if a.family == "t5":
        activation = "gelu" if a.gated_mlp and a.activation == "gelu_tanh" else a.activation
        return common | {
            "num_layers": a.num_layers,
            "num_decoder_layers": a.num_decoder_layers,
            "d_model": a.hidden_size,
            "d_kv": a.head_dim,
            "d_ff": a.ffn_hidden_size,
            "num_heads": a.num_heads,
            "n_positions": a.max_seq_len,
            "layer_norm_epsilon": a.norm_eps,
            "feed_forward_proj": f"gated-{activation}" if a.gated_mlp else activation,
            "relative_attention_num_buckets": a.relative_buckets,
            "relative_attention_max_distance": a.relative_max_distance,
            "is_encoder_decoder": True,
            "scale_decoder_outputs": a.scaled_output,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }
    return common | _llama_config(a)


def _llama_config(a: Architecture) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if isinstance(a.rope_scaling, RopeScaling):
        rope = {"rope_type": a.rope_scaling.kind, "factor": a.rope_scaling.factor}
        if a.rope_scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": a.rope_scaling.low_freq_factor,
                "high_freq_factor": a.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": a.rope_scaling.original_max_seq_len,
            }
    config: dict[str, Any] = {
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_query_groups,
        "head_dim": a.head_dim,
        "intermediate_size": a.ffn_hidden_size,
        "max_position_embeddings": a.max_seq_len,
        "hidden_act": a.activation if a.activation != "gelu_tanh" else "gelu_pytorch_tanh",
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope_theta,
        "rope_parameters": rope | {"rope_theta": a.rope_theta},
    }
    if a.rope_scaling:
        config["rope_scaling"] = rope
    if a.family in _WITH_ATTENTION_BIAS:
        config["attention_bias"] = a.attention_output_bias
    if a.family == "llama":
        config["mlp_bias"] = a.mlp_bias
    if a.family in ("mistral", "mixtral", "phi3"):
        config["sliding_window"] = a.sliding_window or None
    if a.family == "phi3":
        config["pad_token_id"] = None  # transformers' default would lie outside a small vocabulary
    if a.num_experts:
        name = "num_local_experts" if a.family == "mixtral" else "num_experts"
        config |= {name: a.num_experts, "num_experts_per_tok": a.top_k}
    if a.family in ("qwen2_moe", "qwen3_moe"):
        config |= {"moe_intermediate_size": a.ffn_hidden_size, "norm_topk_prob": a.norm_topk_prob}
    if a.family == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": a.shared_ffn_hidden_size, "qkv_bias": a.qkv_bias}
    if a.family in _GEMMAS:
        config |= gemma_config(a)
    if a.family in _DEEPSEEKS:
        config |= deepseek_config(a)
    return config
