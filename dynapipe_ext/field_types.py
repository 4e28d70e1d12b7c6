"""Values of a dataclass against the types that it declares: what a file may have in their place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dynapipe_ext.errors import ConfigError, short

_WORDS = {bool: "true or false", int: "an integer of at most 64 bits", float: "a number", str: "a text"}
_MOST_INT = 2**63 - 1


def check_field_types(values: Any) -> None:
    """Errors: ConfigError for a field that is not of its type. NaN and integers of more than 64 bits are of none;
    integers pass for floats, and numpy's numbers for Python's."""
    for name, kind in _kinds(values.__class__).items():
        if not _is_of(value := getattr(values, name), kind):
            raise ConfigError(f"{name} is {short(value)} but must be {_words(kind)}")


@cache
def _kinds(owner: type) -> Mapping[str, Any]:
    hints = get_type_hints(owner)
    return {field.name: hints[field.name] for field in fields(owner)}


def _is_of(value: object, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(one, get_args(kind)[0]) for one in value)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, Integral) and abs(int(value)) <= _MOST_INT
    if kind is float:
        return _is_of(value, int) if isinstance(value, Integral) else isinstance(value, Real) and not math.isnan(value)
    return isinstance(value, origin or kind)


def _words(kind: Any) -> str:
    match get_origin(kind):
        case None:
            return _WORDS.get(kind, f"of type {getattr(kind, '__name__', kind)}")
        case origin if origin is Literal:
            return f"one of {', '.join(map(str, get_args(kind)))}"
        case origin if origin in (Union, UnionType):
            return " or ".join("nothing" if one is type(None) else _words(one) for one in get_args(kind))
        case origin if origin is tuple:
            return f"a list, each {_words(get_args(kind)[0])}"
        case origin:
            return f"of type {origin.__name__}"
