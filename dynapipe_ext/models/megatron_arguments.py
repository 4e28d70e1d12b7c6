"""Megatron-LM's arguments, as its checkpoints keep them, to an `Architecture` and back. What makes another model than
the families here is refused by name, in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import MOST, Activation, Architecture, Family, RopeScaling

_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "relative": "relative"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
# Arguments that change the model in ways no family here has, with the values that leave it as it is.
_ABSENT: Mapping[str, tuple[Any, ...]] = {
    "rotary_percent": (1, 1.0),
    "rotary_interleaved": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "multi_latent_attention": (False,),
    "moe_layer_freq": (1, [1]),
    "moe_shared_expert_intermediate_size": (0,),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_pre_softmax": (False,),
    "mtp_num_layers": (0,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "is_hybrid_model": (False,),
    "hybrid_override_pattern": ("",),
    "heterogeneous_layers_config_path": ("",),
    "experimental_attention_variant": ("",),
    "softmax_type": ("vanilla",),
    "no_rope_freq": (0,),
}


class _Arguments:
    """Checked reading of a mapping of arguments; None counts as absent."""

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        self.given, self.where = given, where

    def refused(self, name: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {short(self.given.get(name))} but {wanted}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.given.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise self.refused(name, f"must be an integer of 1 to {MOST:,}: put the model's config.json beside it")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.given.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refused(name, "must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.given.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refused(name, "must be true or false")
        return value

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> Any:
        value = self.given.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            raise self.refused(name, f"only {', '.join(choices)} are of a family here")
        return choices[value]


def read_arguments(arguments: Mapping[str, Any], where: str = "Megatron arguments") -> Architecture:
    """`arguments` by Megatron's names with underscores. The family is the one whose layers these describe: Megatron
    does not record it. Errors: ConfigError naming the argument, its value and what is possible.
    """
    a = _Arguments(arguments, where)
    for name, fine in _ABSENT.items():
        if arguments.get(name) is not None and arguments[name] not in fine:
            raise a.refused(name, "models of the families here have none of it")
    family = _family(a)
    t5 = family == "t5"
    heads, hidden = a.integer("num_attention_heads"), a.integer("hidden_size")
    kv_channels = arguments.get("kv_channels")
    if kv_channels is None and hidden % heads:
        raise a.refused("num_attention_heads", f"must divide hidden_size {hidden} where kv_channels is absent")
    layers = a.integer("encoder_num_layers", arguments.get("num_layers")) if t5 else _layers(a)
    ffn = a.integer("ffn_hidden_size", 4 * hidden)
    gated = a.flag("swiglu") or a.flag("gated_linear_unit")
    bias = not a.flag("disable_bias_linear", not a.flag("add_bias_linear", True))
    scaling = RopeScaling("llama3", a.number("rope_scaling_factor", 8.0)) if a.flag("use_rope_scaling") else None
    experts = family == "mixtral"
    try:
        found = Architecture(
            family=family,
            num_layers=layers,
            num_decoder_layers=a.integer("decoder_num_layers", layers) if t5 else 0,
            hidden_size=hidden,
            num_heads=heads,
            num_query_groups=a.integer("num_query_groups", heads) if a.flag("group_query_attention") else heads,
            head_dim=a.integer("kv_channels", hidden // heads),
            ffn_hidden_size=a.integer("moe_ffn_hidden_size", ffn) if experts else ffn,
            vocab_size=_vocab_size(a),
            max_seq_len=a.integer("max_position_embeddings", arguments.get("seq_length") or 2048),
            tied_embeddings=not a.flag("untie_embeddings_and_output_weights"),
            gated_mlp=gated,
            activation=_activation(gated, family),
            position=a.choice("position_embedding_type", _POSITIONS, "learned_absolute"),
            norm=a.choice("normalization", _NORMS, "LayerNorm"),
            norm_eps=a.number("norm_epsilon", a.number("layernorm_epsilon", 1e-5)),
            qkv_bias=bias or a.flag("add_qkv_bias"),
            attention_output_bias=bias,
            mlp_bias=bias,
            qk_norm=a.flag("qk_layernorm"),
            num_experts=a.integer("num_experts") if experts else 0,
            top_k=a.integer("moe_router_topk", 2) if experts else 0,
            rope_theta=a.number("rotary_base", 10_000.0),
            rope_scaling=scaling,
            sliding_window=_window(a),
            relative_buckets=a.integer("relative_attention_num_buckets", 32),
            relative_max_distance=a.integer("relative_attention_max_distance", 128),
            dtype=next((dtype for dtype, flag in _DTYPES.items() if a.flag(flag)), "float32"),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
    _refuse_strange(found, a)
    return found


def _layers(a: _Arguments) -> int:
    if a.given.get("decoder_num_layers") is not None:
        raise a.refused("decoder_num_layers", "a model with an encoder needs position_embedding_type relative to be T5")
    return a.integer("num_layers", a.given.get("encoder_num_layers"))


def _family(a: _Arguments) -> Family:
    position = a.choice("position_embedding_type", _POSITIONS, "learned_absolute")
    norm = a.choice("normalization", _NORMS, "LayerNorm")
    if position == "relative":
        return "t5"
    if position == "learned" and norm == "layernorm":
        return "gpt2"
    if position == "learned" or norm == "layernorm":
        raise ConfigError(
            f"{a.where}: position_embedding_type {position} with normalization {norm} is of no family known here: put"
            " the model's config.json beside the checkpoint"
        )
    if a.given.get("num_experts"):
        return "mixtral"
    if a.flag("qk_layernorm"):
        return "qwen3"
    if a.flag("add_qkv_bias"):
        return "qwen2"
    return "mistral" if a.given.get("window_size") else "llama"


def _refuse_strange(found: Architecture, a: _Arguments) -> None:
    """What a family's layers never have, though the arguments of each are known."""
    families: dict[str, dict[str, Any]] = {
        "gpt2": {"gated_mlp": False, "qk_norm": False, "qkv_bias": True, "mlp_bias": True, "sliding_window": 0},
        "t5": {"qk_norm": False, "qkv_bias": False, "mlp_bias": False, "sliding_window": 0, "norm": "rmsnorm"},
    }
    plain = families.get(found.family, {"gated_mlp": True})
    strange = {name: getattr(found, name) for name, value in plain.items() if getattr(found, name) != value}
    if found.family in ("gpt2", "t5"):
        if found.num_query_groups != found.num_heads:
            strange["num_query_groups"] = found.num_query_groups
        if a.given.get("num_experts"):
            strange["num_experts"] = a.given["num_experts"]
    if found.family == "gpt2" and found.query_size != found.hidden_size:
        strange["kv_channels"] = found.head_dim
    if strange:
        shown = ", ".join(f"{name} {short(value)}" for name, value in strange.items())
        raise ConfigError(
            f"{a.where}: the arguments are those of {found.family} but for {shown}, which no model of the Hub's"
            f" {found.family} has: such a model is not supported"
        )


def _activation(gated: bool, family: Family) -> Activation:
    if gated:
        return "gelu_tanh" if family == "t5" else "silu"
    return "relu" if family == "t5" else "gelu_tanh"


def _vocab_size(a: _Arguments) -> int:
    """The unpadded one, which only arguments that name it can tell."""
    for name in ("vocab_size", "padded_vocab_size"):
        if a.given.get(name) is not None:
            return a.integer(name)
    raise ConfigError(f"{a.where}: neither vocab_size nor padded_vocab_size is there: pass the model's config.json")


def _window(a: _Arguments) -> int:
    window = a.given.get("window_size")
    if window is None:
        return 0
    match window:
        case [int(left), int(right)] if right == 0 and 0 <= left <= MOST:
            return left + 1  # Megatron leaves the token itself out
    raise a.refused("window_size", "only windows to the left, like (4095, 0), are known")


def write_arguments(architecture: Architecture) -> dict[str, Any]:
    """What Megatron-LM needs to build the same model, by its names. They cannot say all of it (linear RoPE scaling,
    T5's scaled output, biases in some projections, other activation functions): checkpoints carry config.json for it.
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
        "position_embedding_type": {kind: name for name, kind in _POSITIONS.items()}[a.position],
        "normalization": {kind: name for name, kind in _NORMS.items()}[a.norm],
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


def run_arguments(architecture: Architecture, dtype: str) -> dict[str, Any]:
    """The same of a model in training, with the rows that its embedding has; `dtype` is torch's name."""
    written = write_arguments(replace(architecture, dtype=dtype))
    return written | {"padded_vocab_size": architecture.padded_vocab_size()}
