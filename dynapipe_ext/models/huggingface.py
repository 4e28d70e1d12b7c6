"""Hugging Face's config.json to an `Architecture` and back. Unsupported values of fields are refused, never ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynapipe_ext.errors import ConfigError, did_you_mean, short
from dynapipe_ext.models.architecture import FAMILIES, Architecture
from dynapipe_ext.models.config_fields import ConfigFields, read_rope, rope_config, rope_fields
from dynapipe_ext.models.families import FORMS, published_form
from dynapipe_ext.models.family_configs import FULL, WINDOWED, rope_of_type, windows_by_layer
from dynapipe_ext.models.forms import PublishedForm
from dynapipe_ext.models.rope_scaling import LongRope

# Families that resemble supported ones, and why they are refused.
_REFUSED = {
    "gemma3": "it has a vision tower; give its text_config, of model_type gemma3_text, and the weights of that",
    "llama4": "it has a vision tower; give its text_config, of model_type llama4_text, and the weights of that",
    "olmo": "its norms have no weights",
    "qwen2_vl": "it has a vision tower",
    "qwen3_next": "its linear attention has no equal in Megatron",
}
_DEQUANTISED = ("fp8", "mxfp4")  # what readers of checkpoints turn into plain weights


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
    form = FORMS[family]
    fields = ConfigFields(_by_first_names(raw, form.aliases, where), where)
    quantisation_of(raw, where)
    try:
        return Architecture(family=family, **_values(form, fields), dtype=_dtype(fields))
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error


def quantisation_of(raw: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """How a config.json says that its weights are quantised. Errors: ConfigError naming a method whose weights no
    reader turns into plain ones."""
    quantisation: Mapping[str, Any] | None = raw.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    if quantisation is not None and method not in _DEQUANTISED:
        raise ConfigError(
            f"{where}: quantization_config is {short(quantisation)}: weights of quant_method {short(method)} are not"
            f" read, only those of {' and '.join(_DEQUANTISED)}, as bfloat16: give the model in full precision"
        )
    return quantisation


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


def _values(form: PublishedForm, fields: ConfigFields) -> dict[str, Any]:
    """The parts of an Architecture that a config.json of this form says."""
    for name, fine in form.refused.items():
        fields.refuse(name, *fine)
    values = dict(form.traits)
    for field in form.fields:
        values[field.part] = field.read(fields, values)
    values |= form.read(fields, values)
    if form.ropes:
        values |= _rope(form, fields, values)
    return values | _window(form, fields, values)


def _window(form: PublishedForm, fields: ConfigFields, values: Mapping[str, Any]) -> dict[str, Any]:
    if form.windows == "by_layer":
        assert form.default_window is not None
        windows: dict[str, Any] = windows_by_layer(
            fields, values["num_layers"], default=form.default_window, every=form.full_attention_every
        )
        if form.window_rope and windows["sliding_window"]:
            local = ConfigFields(rope_of_type(fields, WINDOWED), f"{fields.where}: rope of windows")
            local.refuse("rope_type", "default")
            windows["local_rope_theta"] = local.number("rope_theta", form.window_rope.read(fields, values))
        return windows
    if form.windows == "refused" and fields.flag("use_sliding_window"):
        raise ConfigError(
            f"{fields.where}: use_sliding_window is true: windows in some layers only are not supported; set it to"
            " false"
        )
    window = fields.raw.get("sliding_window", form.default_window)
    return {"sliding_window": fields.integer("sliding_window", window)} if form.windows == "all" and window else {}


def _rope(form: PublishedForm, fields: ConfigFields, values: Mapping[str, Any]) -> dict[str, Any]:
    """The base of the rotary frequencies, how they are stretched, and the part of a head that turns."""
    if form.window_rope:
        fields = ConfigFields({**fields.raw, "rope_parameters": rope_of_type(fields, FULL) or None}, fields.where)
    inner = rope_fields(fields)
    outside = fields.raw.get("original_max_position_embeddings") or form.trained_len
    if outside and not form.window_rope:  # transformers reads it first, where all layers have the same frequencies
        inner = ConfigFields({**inner.raw, "original_max_position_embeddings": outside}, inner.where)
    rope = {
        "rope_theta": inner.number("rope_theta", fields.number("rope_theta", form.rope_theta)),
        "rope_scaling": read_rope(inner, form.ropes, max_seq_len=values["max_seq_len"]),
    }
    if form.rotary_share is None:
        inner.refuse("partial_rotary_factor", 1.0)
        return rope
    share = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", form.rotary_share))
    turned = int(values["head_dim"] * share)
    if not 2 <= turned <= values["head_dim"]:
        raise ConfigError(
            f"{inner.where}: partial_rotary_factor is {share:g} of heads of {values['head_dim']}: give a part that"
            " holds at least two values, up to 1"
        )
    if isinstance(scaling := rope["rope_scaling"], LongRope):
        for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
            if len(factors) != turned // 2:
                raise ConfigError(
                    f"{inner.where}: {name} has {len(factors)} numbers but {turned} values of a head turn"
                )
    return rope | {"rotary_dim": turned if turned < values["head_dim"] else 0}


def write_config(architecture: Architecture) -> dict[str, Any]:
    """A config.json from which transformers builds the same model; `read_config` inverts it."""
    a = architecture
    if a.family in ("gpt", "transformers"):
        raise ConfigError(
            "a model in custom sizes has no config.json, since transformers does not know it: give a published model"
        )
    form = published_form(a)
    config: dict[str, Any] = {
        "architectures": [form.model_class],
        "model_type": a.family,
        "dtype": a.dtype,
        "torch_dtype": a.dtype,
        **form.written,
        **{field.name: field.write(a) for field in form.fields if field.name},
    }
    if form.ropes:
        config |= _written_rope(form, a)
    if form.windows == "all":
        config["sliding_window"] = a.sliding_window or None
    if form.windows == "by_layer":
        config["sliding_window"] = a.sliding_window or form.default_window
        config["layer_types"] = [WINDOWED if a.has_window(layer) else FULL for layer in range(a.num_layers)]
    return {**config, **form.write(a)}


def _written_rope(form: PublishedForm, a: Architecture) -> dict[str, Any]:
    rope = rope_config(a.rope_scaling, a.rope_theta)
    config: dict[str, Any] = {"rope_theta": a.rope_theta}
    if isinstance(a.rope_scaling, LongRope):
        config["original_max_position_embeddings"] = a.rope_scaling.original_max_seq_len
    if form.rotary_share is not None:
        rope["partial_rotary_factor"] = _share(a)
    if form.window_rope is None:
        older = {**rope, "type": "yarn"} if rope["rope_type"] == "yarn" else rope  # as DeepSeek's own code reads it
        scaling = {"rope_scaling": older} if a.rope_scaling else {}
        return config | {"rope_parameters": rope} | scaling
    theta = a.local_rope_theta or form.window_rope.default
    config["rope_parameters"] = {FULL: rope, WINDOWED: {"rope_type": "default", "rope_theta": theta}}
    return config | ({form.window_rope.name: theta} if form.window_rope.name else {})


def _share(a: Architecture) -> float:
    """The part of a head that turns, such that the whole part of its product with the width is `rotary_dim`."""
    share = (a.rotary_dim or a.head_dim) / a.head_dim
    return share if int(a.head_dim * share) == (a.rotary_dim or a.head_dim) else math.nextafter(share, 1.0)
