"""Settings, each declared once, where its field is: from there come its TOML key, type, bounds, flag and errors.

Below, the values of flags whose words mean something else than their type does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dynapipe_ext.errors import ConfigError, did_you_mean, short

Value = TypeVar("Value")
_MOST = 10**15  # of any number whose declaration names no bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A declared field: `kind` is its type, `flag` its name on command lines (empty: it has none), `alias` its short
    form. `nargs` and `parse` are argparse's, where the kind does not say them."""

    name: str
    kind: Any
    default: Any
    flag: str = ""
    alias: str = ""
    help: str = ""
    metavar: str = ""
    nargs: str = ""
    parse: Callable[[str], object] | None = None
    at_least: float = -_MOST
    above: float = -math.inf
    at_most: float = _MOST
    below: float = math.inf
    hint: str = ""  # the next move, where a value breaks its bounds

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, next to or instead of numbers, or of a list; empty if any value is allowed."""
        kinds = get_args(self.kind) if get_origin(self.kind) in (UnionType, Union, tuple) else (self.kind,)
        return tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))

    @property
    def bounds(self) -> str:
        """The bounds in words.

        >>> Setting(name="steps", kind=int, default=1, at_least=1, at_most=65536).bounds
        'at least 1 and at most 65,536'
        """
        least = f"at least {self.at_least:,.15g}" if self.at_least > -_MOST else ""
        above = f"above {self.above:g}" if self.above > -math.inf else ""
        most = f"at most {self.at_most:,.15g}" if self.at_most < _MOST else ""
        below = f"below {self.below:g}" if self.below < math.inf else ""
        return " and ".join(filter(None, (least, above, most, below)))

    def check_value(self, value: Any, where: str = "") -> Any:
        """Return the value in the declared type: integers pass for floats, lists for tuples.

        Raises ConfigError with `where`, name, value, and the type, choices or bounds that it breaks.
        """
        subject = f"{where}{self.name} is {short(value)}"
        if get_origin(self.kind) is tuple:
            return self._check_list(value, subject)
        if self.choices:
            return self._check_choice(value, subject)
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            bounds = f", {self.bounds}" if self.bounds else ""
            raise ConfigError(f"{subject} but must be of type {self.kind.__name__}{bounds}")
        if self.kind in (int, float):
            self._refuse_out_of_bounds(value, subject)
        _refuse_nul(value, subject)
        return value

    def _refuse_out_of_bounds(self, value: float, subject: str) -> None:
        if not math.isfinite(value):
            raise ConfigError(f"{subject} but must be a finite number")
        if not (self.at_least <= value <= self.at_most and self.above < value < self.below):
            bounds = f"at most {_MOST:,}" if value > self.at_most == _MOST or not self.bounds else self.bounds
            raise ConfigError(f"{subject} but must be {bounds}" + (f": {self.hint}" if self.hint else ""))

    def _check_choice(self, value: Any, subject: str) -> Any:
        kinds = {*get_args(self.kind)} & {int, float}
        if kinds and type(value) in (int, *kinds):
            self._refuse_out_of_bounds(value, subject)
            return float(value) if float in kinds else value
        if value in self.choices:
            return value
        number = ", or a whole number" if int in kinds else ", or a number" if kinds else ""
        choices = ", ".join(word or '""' for word in self.choices) + number
        raise ConfigError(f"{subject}: choose from {choices}{did_you_mean(str(value), self.choices)}")

    def _check_list(self, value: Any, subject: str) -> tuple[Any, ...]:
        kind = float if float in get_args(self.kind) else str
        members, allowed = ("numbers", (int, float)) if kind is float else ("strings that are not empty", (str,))
        listed: Any = value if isinstance(value, list | tuple) else [None]
        if any(not isinstance(member, allowed) or isinstance(member, bool) or member == "" for member in listed):
            raise ConfigError(f"{subject} but must be a list of {members}")
        for member in listed:
            _refuse_nul(member, subject)
            if self.choices:
                self._check_choice(member, subject)
        return tuple(kind(member) for member in listed)

    @property
    def flag_options(self) -> dict[str, Any]:
        """The keywords of argparse's `add_argument` for the flag; a flag that is left out leaves None."""
        if self.kind is bool:
            return {"action": "store_true", "default": None}
        options: dict[str, Any] = {"default": None}
        if self.metavar or self.kind is int:
            options["metavar"] = self.metavar or "N"
        if self.parse or self.kind in (int, float):
            options["type"] = self.parse or self.kind
        if self.choices and get_origin(self.kind) in (Literal, tuple):
            options["choices"] = tuple(filter(None, self.choices))
        if self.nargs or (get_origin(self.kind) is tuple and not self.parse):
            options |= {"nargs": self.nargs or "+", "action": "extend"}  # given twice, it has the values of both
        return options


def _refuse_nul(value: object, subject: str) -> None:
    """Reject a text that no path, address or argument of a program can hold. Raises ConfigError."""
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{subject} but must not hold the character NUL (\\0): leave it out")


def setting(default: Value, flag: str = "", help: str = "", metavar: str = "", **declared: Any) -> Value:
    """Declare a field of a dataclass as a setting; `declared` are other fields of `Setting`."""
    return field(default=default, metadata={"flag": flag, "help": help, "metavar": metavar, **declared})


@cache
def list_settings(owner: type) -> Mapping[str, Setting]:
    """List the settings of a dataclass by name, without its other fields."""
    kinds = get_type_hints(owner)
    settings = [f for f in fields(owner) if f.metadata]
    assert all(f.default is not MISSING for f in settings)
    return {f.name: Setting(name=f.name, kind=kinds[f.name], default=f.default, **f.metadata) for f in settings}


def check_declared(values: Any, where: str = "") -> None:
    """Reject a dataclass with a setting of another type or out of bounds. Raises ConfigError."""
    for name, one in list_settings(values.__class__).items():
        one.check_value(getattr(values, name), where)


def parse_dtype(text: str) -> str:
    """Return torch's name of a type of weights.

    >>> parse_dtype("bf16"), parse_dtype("float16")
    ('bfloat16', 'float16')
    """
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(text, text)


def parse_layer_counts(text: str) -> tuple[float, ...]:
    """Parse numbers of layers with commas, in whole or half layers. On a command line spaces do as well.

    >>> parse_layer_counts("8.5,8, 8.5,7")
    (8.5, 8, 8.5, 7)
    """
    parts = [part.strip().removesuffix(".0") for part in text.split(",")]
    wholes = [part.removesuffix(".5") for part in parts]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in wholes):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of layers, whole or in halves, like 8.5,7.5")
    counts = tuple(float(part) if "." in part else int(part) for part in parts)
    if not all(counts):
        raise argparse.ArgumentTypeError(f"{text!r} has a stage without layers: give each at least 0.5, like 8.5,7.5")
    return counts


def parse_number_or_word(text: str) -> float | str:
    """Return the number that a flag's text spells, or the text. Python's 1_0 is not a number.

    >>> parse_number_or_word("4"), parse_number_or_word("2.5"), parse_number_or_word("1_0")
    (4, 2.5, '1_0')
    """
    for kind in () if "_" in text else (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def parse_betas(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be two numbers of 0 to below 1, like 0.9,0.999") from None
