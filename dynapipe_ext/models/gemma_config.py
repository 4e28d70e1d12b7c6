"""What config.json of Gemma 2 and of Gemma 3's text models says beyond Llama's: windows in some layers, caps, scales.

A pattern of windows is kept as the distance of the layers without one; any other list of layer types is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.config_fields import ConfigFields

_WINDOWED, _FULL = "sliding_attention", "full_attention"
# What transformers takes for a field that is left out.
_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_CAPS: Mapping[str, tuple[float, float]] = {"gemma2": (50.0, 30.0), "gemma3_text": (0.0, 0.0)}  # attention's, logits'


def as_llama(fields: ConfigFields, family: str) -> ConfigFields:
    """The fields that Llama has, too, under its names."""
    fields.refuse("use_bidirectional_attention", False)
    raw = {**_DEFAULTS, **{name: value for name, value in fields.raw.items() if value is not None}}
    raw["hidden_act"] = raw["hidden_activation"]
    if family == "gemma3_text":
        raw["rope_parameters"] = _rope_of(fields, _FULL) or None
    return ConfigFields(raw, fields.where)


def gemma_values(fields: ConfigFields, family: str) -> dict[str, Any]:
    """The rest, as fields of an Architecture."""
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
    """The same fields of config.json."""
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
    """Of layers of one type, from `rope_parameters` (transformers 5); before it there was one `rope_scaling`."""
    rope = fields.raw.get("rope_parameters") or {}
    known = isinstance(rope, Mapping) and set(rope) <= {_FULL, _WINDOWED}
    if not known or not isinstance(found := rope.get(layer_type) or {}, Mapping):
        raise ConfigError(
            f"{fields.where}: rope_parameters is {short(rope)} but must be objects under {_FULL} and {_WINDOWED}"
        )
    return found


def _cap(fields: ConfigFields, name: str, default: float) -> float:
    if name in fields.raw and fields.raw[name] is None:
        return 0.0
    return fields.number(name, default) if default or fields.raw.get(name) is not None else 0.0


def _full_attention_every(fields: ConfigFields, default: int) -> int:
    """Which layers have no window: every n-th. 1: all; 0: none."""
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
            f"{fields.where}: layer_types is {short(types)}: only every n-th layer without a window, from the n-th on,"
            " is supported"
        )
    return every
