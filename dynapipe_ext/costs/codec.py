"""Dataclasses as JSON, field by field, and back by the declared types of the fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.models.architecture import Architecture

Value = TypeVar("Value")


def to_json(value: Any) -> Any:
    """Return a value made of plain types, mappings, tuples and dataclasses as JSON."""
    match value:
        case Architecture() | Grid():
            return to_json(value.to_json())
        case Mapping():
            return {str(name): to_json(one) for name, one in value.items()}
        case list() | tuple():
            return [to_json(one) for one in value]
        case _:
            return dump_fields(value) if is_dataclass(value) else value


def dump_fields(value: Any, later: Collection[str] = (), *, skip: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON, without those in `skip`. Fields that older versions did not have (those
    in `later` and in the class's LATER_FIELDS) are left out if they have their default."""
    later = {*later, *getattr(value, "LATER_FIELDS", ())}
    raw = {}
    for field in fields(value):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in skip and (field.name not in later or getattr(value, field.name) != default):
            raw[field.name] = to_json(getattr(value, field.name))
    return raw


def from_json(kind: type[Value], raw: Mapping[str, Any]) -> Value:
    """Return the dataclass that `dump_fields` wrote. Raises KeyError, TypeError or ValueError for other content."""
    owner: Any = kind
    kinds = _list_field_kinds(owner)
    return kind(**{name: _read(kinds.get(name), value) for name, value in raw.items()})


@cache
def _list_field_kinds(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, raw: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return raw if raw is None else _read(arguments[0], raw)
    if kind is Architecture:
        return Architecture.from_json(raw)
    if origin is tuple:
        return tuple(_read(arguments[0], one) for one in raw)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {int(name) if arguments[0] is int else name: _read(arguments[1], one) for name, one in raw.items()}
    is_described = isinstance(kind, type) and is_dataclass(kind) and not isinstance(raw, kind)
    return from_json(kind, raw) if is_described else raw
