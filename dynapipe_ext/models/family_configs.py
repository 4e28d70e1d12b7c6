"""Checked reading of a config.json, and the fields of the families that have more of them: DeepSeek and Gemma."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import MOST, Activation, Architecture, LatentAttention, Yarn

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class ConfigFields:
    """Checked reading of a raw config; `where` names it in errors. Every method may raise ConfigError."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing: give it as an integer of at least 1")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise ConfigError(f"{self.where}: {name} is {short(value)} but must be an integer of 1 to {MOST:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing: give it as a number above 0")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{self.where}: {name} is {short(value)} but must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} is {short(value)} but must be true or false")
        return value

    def activation(self, name: str, default: str) -> Activation:
        value = self.raw.get(name) or default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ConfigError(f"{self.where}: {name} is {short(value)}: known are {', '.join(sorted(ACTIVATIONS))}")
        return ACTIVATIONS[value]

    def refuse(self, name: str, *fine: Any) -> None:
        """Errors: ConfigError where the field is present with another value than those of `fine`."""
        value = self.raw.get(name)
        if value is not None and value not in fine:
            raise ConfigError(
                f"{self.where}: {name} is {short(value)}: only {fine[0] if fine else None!r} is supported"
            )


def rope_fields(fields: ConfigFields) -> ConfigFields:
    """The fields of rotary frequencies: `rope_parameters` (transformers 5) or the older `rope_scaling`."""
    ropes = {name: fields.raw[name] for name in ("rope_parameters", "rope_scaling") if fields.raw.get(name)}
    for name, rope in ropes.items():
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{fields.where}: {name} is {short(rope)} but must be an object")
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ConfigError(
                f"{fields.where}: {name} is {short(rope)}, but all layers of such a model have the same frequencies"
            )
    if len(ropes) == 2 and len({_scaling(fields, rope) for rope in ropes.values()}) == 2:
        shown = " and ".join(f"{name} {short(rope)}" for name, rope in ropes.items())
        raise ConfigError(f"{fields.where}: {shown} contradict each other: leave one out")
    return ConfigFields(next(iter(ropes.values()), {}), f"{fields.where}: rope")


def _scaling(fields: ConfigFields, rope: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The frequencies in a form to compare: the base may stand outside, and the type has two possible names."""
    scaling = {"rope_type": rope.get("type", "default"), "rope_theta": fields.raw.get("rope_theta"), **rope}
    scaling.pop("type", None)
    return tuple(sorted((name, repr(value)) for name, value in scaling.items() if value is not None))


LATENT_NORM_EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps says
# The values that transformers takes for missing fields.
_DEEPSEEK_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        "max_position_embeddings": 2048, "q_lora_rank": 1536, "n_routed_experts": 64, "moe_intermediate_size": 1407,
        "n_shared_experts": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "num_experts_per_tok": None,
        "n_group": None, "topk_group": None,
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096, "q_lora_rank": 1536, "n_routed_experts": 256, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4,
    },
}  # fmt: skip


def deepseek_values(fields: ConfigFields, family: str) -> dict[str, Any]:
    """The fields of an Architecture. Errors: ConfigError naming a field whose value no layer of Megatron computes."""
    raw = {**_DEEPSEEK_DEFAULTS[family], **fields.raw}
    fields = ConfigFields(raw, fields.where)
    for name, fine in (("attention_bias", False), ("mlp_bias", False), ("partial_rotary_factor", 1.0)):
        fields.refuse(name, fine)
    fields.refuse("rope_interleave", True)
    fields.refuse("moe_layer_freq", 1)
    heads, latent = fields.integer("num_attention_heads"), _latent(fields)
    fields.refuse("num_key_value_heads", heads)
    theta, yarn = _rope(fields)
    ffn, num_layers = fields.integer("moe_intermediate_size"), fields.integer("num_hidden_layers")
    dense = _count(fields, "first_k_dense_replace")
    if dense >= num_layers:
        raise ConfigError(
            f"{fields.where}: first_k_dense_replace is {dense} of {num_layers} layers: a {family} without experts is"
            " not supported"
        )
    return {
        "num_layers": num_layers,
        "hidden_size": fields.integer("hidden_size"),
        "num_heads": heads,
        "num_query_groups": heads,
        "head_dim": latent.plain_dim + latent.rotary_dim,
        "ffn_hidden_size": ffn,
        "vocab_size": fields.integer("vocab_size"),
        "max_seq_len": fields.integer("max_position_embeddings"),
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "activation": fields.activation("hidden_act", "silu"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": yarn,
        "latent": latent,
        "num_experts": fields.integer("n_routed_experts"),
        "shared_ffn_hidden_size": ffn * _count(fields, "n_shared_experts"),
        "num_dense_layers": dense,
        "dense_ffn_hidden_size": fields.integer("intermediate_size") if dense else 0,
        "router_scale": fields.number("routed_scaling_factor", 1.0),
    } | _router(fields, family)


def deepseek_config(a: Architecture) -> dict[str, Any]:
    """The fields of config.json that Llama lacks or names otherwise."""
    assert a.latent is not None
    rope: dict[str, Any] = {"rope_theta": a.rope_theta, "rope_type": "default"}
    if isinstance(yarn := a.rope_scaling, Yarn):
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_seq_len,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    config: dict[str, Any] = {
        "head_dim": a.latent.rotary_dim,
        "intermediate_size": a.dense_ffn_hidden_size or a.ffn_hidden_size,
        "moe_intermediate_size": a.ffn_hidden_size,
        "q_lora_rank": a.latent.q_rank or None,
        "kv_lora_rank": a.latent.kv_rank,
        "qk_nope_head_dim": a.latent.plain_dim,
        "qk_rope_head_dim": a.latent.rotary_dim,
        "v_head_dim": a.latent.value_dim,
        "rope_parameters": rope,
        "rope_scaling": {**rope, "type": "yarn"} if yarn else None,
        "first_k_dense_replace": a.num_dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": a.num_experts,
        "n_shared_experts": a.shared_ffn_hidden_size // a.ffn_hidden_size,
        "num_experts_per_tok": a.top_k,
        "n_group": a.router_num_groups or 1,
        "topk_group": a.router_group_topk or 1,
        "norm_topk_prob": a.norm_topk_prob,
        "routed_scaling_factor": a.router_scale,
        "attention_bias": False,
        "pad_token_id": None,
    }
    if a.family == "deepseek_v2":
        grouped = "group_limited_greedy" if a.router_num_groups else "greedy"
        return config | {"topk_method": grouped, "scoring_func": "softmax", "mlp_bias": False}
    return config | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    }


def router_fault(a: Architecture) -> str:
    """Why megatron-core 0.16 would choose other experts than this model; empty where it chooses the same.

    It scores a group by the sum of its best top_k // router_group_topk experts; DeepSeek-V2 by its best one, V3 by its
    best two.
    """
    best = 2 if a.router_score == "sigmoid" else 1
    if not a.router_num_groups or a.top_k // a.router_group_topk == best:
        return ""
    return (
        f"{a.family} scores a group of experts by its best {best}, megatron-core by its best num_experts_per_tok"
        f" {a.top_k} // topk_group {a.router_group_topk} = {a.top_k // a.router_group_topk}: it chooses others"
    )


def _latent(fields: ConfigFields) -> LatentAttention:
    return LatentAttention(
        q_rank=0 if fields.raw["q_lora_rank"] is None else fields.integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank", 512),
        plain_dim=fields.integer("qk_nope_head_dim", 128),
        rotary_dim=fields.integer("qk_rope_head_dim", 64),
        value_dim=fields.integer("v_head_dim", 128),
    )


def _router(fields: ConfigFields, family: str) -> dict[str, Any]:
    """DeepSeek-V2 scores by softmax, V3 by sigmoid with a bias. A limit that admits all groups is no limit."""
    is_v3, top_k = family == "deepseek_v3", fields.integer("num_experts_per_tok")
    fields.refuse("scoring_func", "sigmoid" if is_v3 else "softmax")
    groups, best = _count(fields, "n_group"), _count(fields, "topk_group")
    if is_v3:
        fields.refuse("topk_method", "noaux_tc")
        if fields.flag("norm_topk_prob", True) != (top_k > 1):
            raise ConfigError(
                f"{fields.where}: norm_topk_prob is {top_k <= 1} with num_experts_per_tok {top_k}: Megatron's sigmoid"
                " router makes weights sum to 1 where a token has several experts, and only there"
            )
    else:
        method = fields.raw.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise ConfigError(f"{fields.where}: topk_method is {short(method)}: give greedy or group_limited_greedy")
        fields.refuse("norm_topk_prob", False)
        groups, best = (groups, best) if method == "group_limited_greedy" else (0, 0)
    if groups <= 1 or best == groups:
        groups, best = 0, 0
    return {
        "top_k": top_k,
        "norm_topk_prob": is_v3 and top_k > 1,
        "router_score": "sigmoid" if is_v3 else "softmax",
        "router_bias": is_v3,
        "router_num_groups": groups,
        "router_group_topk": best,
    }


def _rope(fields: ConfigFields) -> tuple[float, Yarn | None]:
    inner = rope_fields(fields)
    rope = inner.raw
    inner.refuse("partial_rotary_factor", 1.0)
    theta = inner.number("rope_theta", fields.number("rope_theta", 1e4))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "yarn"):
        raise ConfigError(f"{inner.where}_type is {short(kind)}: Megatron's latent attention has default and yarn")
    if kind == "default":
        return theta, None
    inner.refuse("attention_factor")
    inner.refuse("truncate", True)
    longest = fields.integer("max_position_embeddings")
    original = inner.integer("original_max_position_embeddings", longest)
    mscale, all_dim = (float(inner.raw.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    if all_dim and not mscale:
        raise ConfigError(f"{inner.where}: mscale_all_dim is {all_dim:g} without mscale, which Megatron cannot express")
    return theta, Yarn(
        factor=inner.number("factor", longest / original),
        original_max_seq_len=original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        mscale=mscale if all_dim else 1.0,  # mscale counts only beside mscale_all_dim
        mscale_all_dim=all_dim,
    )


def _count(fields: ConfigFields, name: str) -> int:
    """An integer of at least 0; null is 0."""
    return fields.integer(name) if fields.raw.get(name) else 0


_WINDOWED, _FULL = "sliding_attention", "full_attention"
# The values that transformers takes for missing fields.
_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_CAPS: Mapping[str, tuple[float, float]] = {"gemma2": (50.0, 30.0), "gemma3_text": (0.0, 0.0)}  # attention's, logits'


def as_llama(fields: ConfigFields, family: str) -> ConfigFields:
    """The fields that Gemma shares with Llama, under Llama's names."""
    fields.refuse("use_bidirectional_attention", False)
    raw = {**_GEMMA_DEFAULTS, **{name: value for name, value in fields.raw.items() if value is not None}}
    raw["hidden_act"] = raw["hidden_activation"]
    if family == "gemma3_text":
        raw["rope_parameters"] = _rope_of(fields, _FULL) or None
    return ConfigFields(raw, fields.where)


def gemma_values(fields: ConfigFields, family: str) -> dict[str, Any]:
    """The fields of an Architecture that only Gemma has."""
    if family == "gemma2":
        fields.refuse("sliding_window_pattern", 2)
    every = _full_attention_every(fields, 2 if family == "gemma2" else 6)
    local_theta = 0.0
    if family == "gemma3_text":
        local = ConfigFields(_rope_of(fields, _WINDOWED), f"{fields.where}: rope of windows")
        local.refuse("rope_type", "default")
        local_theta = local.number("rope_theta", fields.number("rope_local_base_freq", 1e4))
    attention_cap, logit_cap = _CAPS[family]
    return {
        "norm_placement": "both",
        "zero_centered_norm": True,
        "scaled_embedding": True,
        "qk_norm": family == "gemma3_text",
        "query_pre_attn_scalar": fields.integer("query_pre_attn_scalar", 256),
        "attention_softcap": _cap(fields, "attn_logit_softcapping", attention_cap),
        "logit_softcap": _cap(fields, "final_logit_softcapping", logit_cap),
        "sliding_window": 0 if every == 1 else fields.integer("sliding_window", 4096),
        "full_attention_every": 0 if every == 1 else every,
        "local_rope_theta": 0.0 if every == 1 else local_theta,
    }


def gemma_config(a: Architecture) -> dict[str, Any]:
    """The fields of config.json that only Gemma has."""
    config: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh" if a.activation == "gelu_tanh" else a.activation,
        "query_pre_attn_scalar": a.query_pre_attn_scalar,
        "attn_logit_softcapping": a.attention_softcap or None,
        "final_logit_softcapping": a.logit_softcap or None,
        "sliding_window": a.sliding_window or 4096,
        "layer_types": [_WINDOWED if a.has_window(layer) else _FULL for layer in range(a.num_layers)],
    }
    if a.family == "gemma3_text":
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rope_theta}
        if a.rope_scaling is not None:
            rope |= {"rope_type": a.rope_scaling.kind, "factor": a.rope_scaling.factor}
        local = {"rope_type": "default", "rope_theta": a.local_rope_theta or 1e4}
        config |= {"rope_parameters": {_FULL: rope, _WINDOWED: local}, "rope_local_base_freq": local["rope_theta"]}
    return config


def _rope_of(fields: ConfigFields, layer_type: str) -> Mapping[str, Any]:
    """The frequencies of one type of layer, from `rope_parameters` (transformers 5; older files had one for all)."""
    rope = fields.raw.get("rope_parameters") or {}
    is_by_type = isinstance(rope, Mapping) and set(rope) <= {_FULL, _WINDOWED}
    if not is_by_type or not isinstance(of_type := rope.get(layer_type) or {}, Mapping):
        raise ConfigError(
            f"{fields.where}: rope_parameters is {short(rope)} but must be objects under {_FULL} and {_WINDOWED}"
        )
    return of_type


def _cap(fields: ConfigFields, name: str, default: float) -> float:
    if name in fields.raw and fields.raw[name] is None:
        return 0.0
    return fields.number(name, default) if default or fields.raw.get(name) is not None else 0.0


def _full_attention_every(fields: ConfigFields, default: int) -> int:
    """n, where every n-th layer has no window. 1: no layer has one; 0: all layers have one."""
    num_layers = fields.integer("num_hidden_layers")
    types = fields.raw.get("layer_types")
    if types is None:
        every = fields.integer("sliding_window_pattern", default)
        return every if every <= num_layers else 0
    if not isinstance(types, Sequence) or len(types) != num_layers or set(types) - {_WINDOWED, _FULL}:
        raise ConfigError(
            f"{fields.where}: layer_types is {short(types)} but must be {num_layers} of {_WINDOWED} and {_FULL}"
        )
    every = types.index(_FULL) + 1 if _FULL in types else 0
    if any((kind == _FULL) != bool(every and (layer + 1) % every == 0) for layer, kind in enumerate(types)):
        raise ConfigError(
            f"{fields.where}: layer_types is {short(types)}: exactly every n-th layer, from the n-th on, must be"
            " without a window"
        )
    return every
