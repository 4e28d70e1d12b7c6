"""Checked reading of a config.json: fields one by one, and rotary frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import MOST, Activation
from dynapipe_ext.models.rope_scaling import LongRope, RopeScaling, Yarn

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ACTIVATION_NAMES: Mapping[Activation, str] = {"gelu_tanh": "gelu_pytorch_tanh"}  # where it differs from ours


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

    def count(self, name: str, default: int | None = 0) -> int:
        """An integer of at least 0; null is 0."""
        value = self.raw.get(name, default)
        return self.integer(name, default) if value else 0

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing: give it as a number above 0")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{self.where}: {name} is {short(value)} but must be a number above 0")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        values = self.raw.get(name)
        if not isinstance(values, list | tuple) or not all(
            isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf for value in values
        ):
            raise ConfigError(f"{self.where}: {name} is {short(values)} but must be a list of numbers above 0")
        return tuple(map(float, values))

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


def read_rope(inner: ConfigFields, kinds: tuple[str, ...], *, max_seq_len: int) -> RopeScaling | Yarn | LongRope | None:
    """How frequencies are stretched, from their own fields. Errors: ConfigError for a kind that is not of `kinds`.

    A missing trained length is `max_seq_len`, as in transformers (`standardize_rope_params`).
    """
    kind = inner.raw.get("rope_type") or inner.raw.get("type") or "default"
    if kind in ("su", "yarn") and "longrope" in kinds:  # older names of it
        kind = "longrope"
    if kind not in kinds:
        raise ConfigError(f"{inner.where}_type is {short(kind)}: known here are {' and '.join(kinds)}")
    match kind:
        case "linear":
            return RopeScaling("linear", inner.number("factor"))
        case "dynamic":
            return RopeScaling("dynamic", inner.number("factor"), original_max_seq_len=max_seq_len)
        case "llama3":
            return RopeScaling(
                "llama3",
                inner.number("factor"),
                inner.number("low_freq_factor"),
                inner.number("high_freq_factor"),
                inner.integer("original_max_position_embeddings", max_seq_len),
            )
        case "yarn":
            return _yarn(inner, max_seq_len)
        case "longrope":
            return _longrope(inner, max_seq_len)
    return None


def _longrope(inner: ConfigFields, max_seq_len: int) -> LongRope:
    original = inner.integer("original_max_position_embeddings", max_seq_len)
    factor = inner.number("factor", max_seq_len / original)
    stretched = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRope(
        short_factors=inner.numbers("short_factor"),
        long_factors=inner.numbers("long_factor"),
        factor=factor,
        attention_factor=inner.number("attention_factor", stretched),
        original_max_seq_len=original,
    )


def _yarn(inner: ConfigFields, max_seq_len: int) -> Yarn:
    original = inner.integer("original_max_position_embeddings", max_seq_len)
    mscale, all_dim = (float(inner.raw.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    if all_dim and not mscale:
        raise ConfigError(f"{inner.where}: mscale_all_dim is {all_dim:g} without mscale, which Megatron cannot express")
    yarn = Yarn(
        factor=inner.number("factor", max_seq_len / original),
        original_max_seq_len=original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        mscale=mscale if all_dim else 1.0,  # mscale counts only beside mscale_all_dim
        mscale_all_dim=all_dim,
        truncate=inner.flag("truncate", True),
    )
    if inner.raw.get("attention_factor") is not None:
        factor = inner.number("attention_factor")
        if not math.isclose(factor, yarn.concentration, rel_tol=1e-9):
            raise ConfigError(
                f"{inner.where}: attention_factor is {factor:g}: only {yarn.concentration:g}, which follows from factor"
                f" {yarn.factor:g}, is supported"
            )
    return yarn


def rope_config(scaling: RopeScaling | Yarn | LongRope | None, theta: float) -> dict[str, Any]:
    """The fields that `read_rope` reads, and the base."""
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": scaling.kind if scaling else "default"}
    match scaling:
        case RopeScaling(kind="linear" | "dynamic"):
            rope |= {"factor": scaling.factor}
        case RopeScaling():
            rope |= {
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
        case Yarn():
            rope |= {
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
            }
            if not scaling.truncate:
                rope["truncate"] = False
            if (scaling.mscale, scaling.mscale_all_dim) != (1.0, 0.0):
                rope |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
        case LongRope():
            rope |= {
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                "factor": scaling.factor,
                "attention_factor": scaling.attention_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
    return rope
