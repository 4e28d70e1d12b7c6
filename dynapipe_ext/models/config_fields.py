"""Checked reading of the fields of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import MOST, Activation

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class ConfigFields:
    """A raw config with checked reading; `where` names it in errors. Errors of all: ConfigError."""

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
        """Errors: ConfigError where the field is there and none of `fine`."""
        value = self.raw.get(name)
        if value is not None and value not in fine:
            raise ConfigError(
                f"{self.where}: {name} is {short(value)}: only {fine[0] if fine else None!r} is supported"
            )


def rope_fields(fields: ConfigFields) -> ConfigFields:
    """What is said of rotary frequencies: in `rope_parameters` (transformers 5) or `rope_scaling`, before it."""
    said = {name: fields.raw[name] for name in ("rope_parameters", "rope_scaling") if fields.raw.get(name)}
    for name, rope in said.items():
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{fields.where}: {name} is {short(rope)} but must be an object")
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ConfigError(f"{fields.where}: {name} is {short(rope)}, but all layers of such a model turn alike")
    if len(said) == 2 and len({_scaling(fields, rope) for rope in said.values()}) == 2:
        shown = " and ".join(f"{name} {short(rope)}" for name, rope in said.items())
        raise ConfigError(f"{fields.where}: {shown} say different things of one: leave one out")
    return ConfigFields(next(iter(said.values()), {}), f"{fields.where}: rope")


def _scaling(fields: ConfigFields, rope: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Comparable: the base may stand beside it, a type under either name."""
    said = {"rope_type": rope.get("type", "default"), "rope_theta": fields.raw.get("rope_theta"), **rope}
    said.pop("type", None)
    return tuple(sorted((name, repr(value)) for name, value in said.items() if value is not None))
