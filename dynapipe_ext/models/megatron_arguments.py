"""Megatron-LM's arguments, as its checkpoints keep them, to an `Architecture` and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import Activation, Architecture, Family, RopeScaling

_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}


def read_arguments(arguments: Mapping[str, Any], where: str = "Megatron arguments") -> Architecture:
    """`arguments` by Megatron's names with underscores. The family is the one whose layers these describe: Megatron
    does not record it. Errors: ConfigError naming the argument, its value and what is possible.
    """

    def integer(name: str, default: int | None = None) -> int:
        value = arguments.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{where}: {name} is {short(value)} but must be an integer: pass the model's config.json")
        return value

    family = _family(arguments, where)
    heads, hidden = integer("num_attention_heads"), integer("hidden_size")
    groups = integer("num_query_groups", 1) if arguments.get("group_query_attention") else heads
    gated = bool(arguments.get("swiglu")) or bool(arguments.get("gated_linear_unit"))
    bias = not arguments.get("disable_bias_linear", not arguments.get("add_bias_linear", True))
    encoder = arguments.get("encoder_num_layers") if family == "t5" else None
    layers = integer("num_layers", encoder)
    scaling = None
    if arguments.get("use_rope_scaling"):
        scaling = RopeScaling("llama3", float(arguments.get("rope_scaling_factor") or 8.0))
    try:
        return Architecture(
            family=family,
            num_layers=layers if encoder is None else encoder,
            num_decoder_layers=integer("decoder_num_layers", layers) if family == "t5" else 0,
            hidden_size=hidden,
            num_heads=heads,
            num_query_groups=groups,
            head_dim=integer("kv_channels", hidden // heads),
            ffn_hidden_size=integer("moe_ffn_hidden_size", integer("ffn_hidden_size", 4 * hidden))
            if family == "mixtral"
            else integer("ffn_hidden_size", 4 * hidden),
            vocab_size=_vocab_size(arguments, where),
            max_seq_len=integer("max_position_embeddings", 2048),
            tied_embeddings=not arguments.get("untie_embeddings_and_output_weights", False),
            gated_mlp=gated,
            activation=_activation(arguments, gated, family),
            position="learned" if family == "gpt2" else "relative" if family == "t5" else "rope",
            norm="layernorm" if arguments.get("normalization", "LayerNorm") == "LayerNorm" else "rmsnorm",
            norm_eps=float(arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon") or 1e-5),
            qkv_bias=bias or bool(arguments.get("add_qkv_bias")),
            attention_output_bias=bias,
            mlp_bias=bias,
            qk_norm=bool(arguments.get("qk_layernorm")),
            num_experts=integer("num_experts") if family == "mixtral" else 0,
            top_k=integer("moe_router_topk", 2) if family == "mixtral" else 0,
            rope_theta=float(arguments.get("rotary_base") or 10_000),
            rope_scaling=scaling,
            sliding_window=_window(arguments, where),
            relative_buckets=integer("relative_attention_num_buckets", 32),
            relative_max_distance=integer("relative_attention_max_distance", 128),
            dtype=next((dtype for dtype, flag in _DTYPES.items() if arguments.get(flag)), "float32"),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _family(arguments: Mapping[str, Any], where: str) -> Family:
    learned = arguments.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    layer_norm = arguments.get("normalization", "LayerNorm") == "LayerNorm"
    if arguments.get("position_embedding_type") == "relative":
        return "t5"
    if learned and layer_norm:
        return "gpt2"
    if learned or layer_norm:
        raise ConfigError(
            f"{where}: position_embedding_type {short(arguments.get('position_embedding_type'))} with normalization"
            f" {short(arguments.get('normalization'))} is of no family known here: put the model's config.json beside"
            " the checkpoint"
        )
    if arguments.get("num_experts"):
        return "mixtral"
    if arguments.get("qk_layernorm"):
        return "qwen3"
    if arguments.get("add_qkv_bias"):
        return "qwen2"
    return "mistral" if arguments.get("window_size") else "llama"


def _activation(arguments: Mapping[str, Any], gated: bool, family: Family) -> Activation:
    if gated:
        return "gelu_tanh" if family == "t5" else "silu"
    return "relu" if family == "t5" else "gelu_tanh"


def _vocab_size(arguments: Mapping[str, Any], where: str) -> int:
    """The unpadded one, which only arguments that name it can tell."""
    for name in ("vocab_size", "padded_vocab_size"):
        value = arguments.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise ConfigError(f"{where}: neither vocab_size nor padded_vocab_size is there: pass the model's config.json")


def _window(arguments: Mapping[str, Any], where: str) -> int:
    window = arguments.get("window_size")
    if window is None:
        return 0
    try:
        left, right = window
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: window_size is {short(window)} but must be a pair like (4095, 0)") from error
    if right != 0 or not isinstance(left, int) or left < 0:
        raise ConfigError(f"{where}: window_size is {short(window)}: only windows to the left, like (4095, 0)")
    return left + 1  # Megatron leaves the token itself out


def write_arguments(architecture: Architecture) -> dict[str, Any]:
    """What Megatron-LM needs to build the same model, by its names. `read_arguments` gives the architecture back where
    Megatron can say it: RoPE scaling has the factor alone.
    """
    a = architecture
    arguments: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_heads,
        "group_query_attention": a.num_query_groups != a.num_heads,
        "num_query_groups": a.num_query_groups,
        "kv_channels": a.head_dim,
        "ffn_hidden_size": a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_seq_len,
        "untie_embeddings_and_output_weights": not a.tied_embeddings,
        "swiglu": a.gated_mlp and a.activation == "silu",
        "gated_linear_unit": a.gated_mlp,
        "position_embedding_type": {"rope": "rope", "learned": "learned_absolute", "relative": "relative"}[a.position],
        "normalization": "LayerNorm" if a.norm == "layernorm" else "RMSNorm",
        "norm_epsilon": a.norm_eps,
        "add_bias_linear": a.mlp_bias,
        "add_qkv_bias": a.qkv_bias,
        "qk_layernorm": a.qk_norm,
        "rotary_base": int(a.rope_theta) if a.rope_theta.is_integer() else a.rope_theta,
        "use_rope_scaling": a.rope_scaling is not None,
        "rope_scaling_factor": a.rope_scaling.factor if a.rope_scaling else 8.0,
        "window_size": (a.sliding_window - 1, 0) if a.sliding_window else None,
    }
    if a.family == "t5":
        arguments |= {
            "encoder_num_layers": a.num_layers,
            "decoder_num_layers": a.num_decoder_layers,
            "relative_attention_num_buckets": a.relative_buckets,
            "relative_attention_max_distance": a.relative_max_distance,
        }
    if a.num_experts:
        arguments |= {
            "num_experts": a.num_experts,
            "moe_router_topk": a.top_k,
            "moe_ffn_hidden_size": a.ffn_hidden_size,
        }
    return arguments | {flag: a.dtype == dtype for dtype, flag in _DTYPES.items()}
