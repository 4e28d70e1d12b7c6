"""The errors of this package, and what messages share: which known name somebody may have meant, bytes, bounds, and
types of fields."""

from __future__ import annotations

import difflib
import errno
import math
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

MOST_NAME_BYTES = 255  # of a file
# What numpy raises of a file that is no array, or ends within one; its reader of headers is Python's.
NO_ARRAY = (OSError, ValueError, EOFError, TypeError, OverflowError, SyntaxError, tokenize.TokenError, RecursionError)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
UNWRITABLE = (*NO_ROOM, *FORBIDDEN)  # now, or at another start
_ALIKE = 0.6  # share of letters in common, as difflib counts


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of a message that refuses `word`: the choice most like it, or nothing.

    >>> did_you_mean("zbv", ["zb-h1", "zb-v"]), did_you_mean("--stpes", ["--steps"]), did_you_mean("x", ["tp"])
    ("; did you mean 'zb-v'?", "; did you mean '--steps'?", '')
    """
    words = {choice.lower().lstrip("-"): choice for choice in choices}  # dashes make no two flags alike
    alike = difflib.get_close_matches(word.lower().lstrip("-"), words, n=1, cutoff=_ALIKE)
    return f"; did you mean {words[alike[0]]!r}?" if alike else ""


def install_advice(extra: str) -> str:
    """The command for what an extra needs. No index has this package, so it names the checkout, or a wheel.

    >>> install_advice("train")
    "pip install '.[train]' in the checkout of dynapipe-ext (of a wheel, 'FILE.whl[train]')"
    """
    return f"pip install '.[{extra}]' in the checkout of dynapipe-ext (of a wheel, 'FILE.whl[{extra}]')"


_MOST_SHOWN = 40
_BRACKETS: Mapping[Any, Sequence[str]] = {  # by how a class shows itself, and so its subclasses
    list.__repr__: "[]",
    tuple.__repr__: "()",
    dict.__repr__: "{}",
    set.__repr__: "{}",
    frozenset.__repr__: ("frozenset({", "})"),
}
_MOST_INT = 2**63 - 1  # what arrays hold
_KIND_WORDS = {bool: "true or false", int: "an integer of at most 64 bits", float: "a number", str: "a text"}
_OF_NO_TYPE = object()
_MOST_TIMEOUT_S = 10**9  # what clocks and locks can wait for


def reason(error: Exception) -> str:
    """Why a file cannot be read, in a message that names it.

    >>> reason(FileNotFoundError(2, "No such file or directory", "here.toml")), reason(ValueError("no number"))
    ('No such file or directory', 'no number')
    """
    if isinstance(error, RecursionError):
        return "it nests too deep to be read"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def writing_move(number: int | None, make_room: str = "make room there") -> str:
    """What to do where the operating system refused to write, by its error's number.

    >>> [writing_move(number) for number in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, None)]
    ['make room there', 'make it writable', 'make it writable', 'look there', 'look there']
    """
    return make_room if number in NO_ROOM else "make it writable" if number in FORBIDDEN else "look there"


def short(value: object) -> str:
    """Return `value` as messages show it, in at most 40 characters. No more of it is read than these show.

    >>> short("0F0"), short("7" * 5000), short(10**5000)
    ("'0F0'", "'777777777777777777777777777777777777...", 'an integer of 16610 bits')
    >>> import functools
    >>> nested = functools.reduce(lambda inner, _: [inner, inner], range(1000), ("a", {1: None}))
    >>> short(("a", {1: None})), short(nested)
    ("('a', {1: None})", '[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[...')
    """
    text = ""
    for part in _shown_parts(value):
        text += part
        if len(text) > _MOST_SHOWN:
            return text[: _MOST_SHOWN - 3] + "..."
    return text


def _shown_parts(value: Any) -> Iterator[str]:
    """Yield what `repr` gives, piece by piece: of lists that hold a list twice, again and again, no memory holds it."""
    kind = type(value)
    if isinstance(value, int) and value.bit_length() > 10_000:  # more digits than Python prints
        yield f"an integer of {value.bit_length()} bits"
    elif kind in (str, bytes):
        yield repr(value[: _MOST_SHOWN + 1])
    elif value and kind.__repr__ in _BRACKETS:
        opening, closing = _BRACKETS[kind.__repr__]
        yield opening
        for number, entry in enumerate(value):
            if number:
                yield ", "
            yield from _shown_parts(entry)
            if isinstance(value, dict):
                yield ": "
                yield from _shown_parts(value[entry])
        yield ",)" if isinstance(value, tuple) and len(value) == 1 else closing
    else:
        yield repr(value)


def format_bytes(num_bytes: int) -> str:
    """In units of ten, as limits are given.

    >>> format_bytes(900), format_bytes(1_500_000_000), format_bytes(64_250_000)
    ('900 B', '1.50 GB', '64.2 MB')
    """
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{num_bytes} B" if units[0] == "B" else f"{value:.{2 if value < 10 else 1}f} {units[0]}"


def in_one_line(error: BaseException) -> str:
    """An error's message with its notes, which say where it happened. Foreign errors begin with the name of their
    class.

    >>> error = MemoryError("no room")
    >>> error.add_note("on rank 6, step 3, 1F0")
    >>> in_one_line(error)
    'MemoryError: no room; on rank 6, step 3, 1F0'
    """
    message = str(error) if isinstance(error, DynaPipeError) else f"{type(error).__name__}: {error}"
    return " ".join("; ".join([message, *getattr(error, "__notes__", ())]).split())


class DynaPipeError(Exception):
    """Base of all errors raised for reasons outside this package's own code. `may_pass`: another start may succeed."""

    may_pass: ClassVar[bool] = False


class ConfigError(DynaPipeError):
    """A setting, flag or topology that cannot work."""


def check_timeout(timeout_s: float) -> None:
    """Errors: ConfigError for a limit that would end a wait at once or never."""
    if not isinstance(timeout_s, Real) or not 0 < timeout_s <= _MOST_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s is {short(timeout_s)} but must be positive and at most {_MOST_TIMEOUT_S:,}: give seconds, such"
            " as 60, so that no wait is endless"
        )


def check_integer(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Errors: ConfigError for anything but an integer of `least` to `most` (None: the largest that arrays hold)."""
    bounds = range(least, (_MOST_INT if most is None else most) + 1)
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) in bounds:
        return
    wording = f"of at least {least}" if most is None else f"of {least} to {most}"
    raise ConfigError(f"{name} is {short(value)} but must be an integer {wording}")


def settle_field_types(values: Any) -> None:
    """Have every field of a frozen dataclass be of its declared type: numpy's numbers, and fractions, become Python's,
    lists tuples. Errors: ConfigError for a field of another type; NaN and integers of more than 64 bits are of none."""
    for name, (kind, words) in _kinds(values.__class__).items():
        value = getattr(values, name)
        if words:
            if type(value) is str and value in words:
                continue
        elif type(value) is kind and (kind not in (int, float) or -_MOST_INT <= value <= _MOST_INT):
            continue  # what most are, in a fraction of the time
        settled = _settled(value, kind)
        if settled is _OF_NO_TYPE:
            raise ConfigError(f"{name} is {short(value)} but must be {_words(kind)}")
        if settled is not value:
            object.__setattr__(values, name, settled)


@cache
def _kinds(owner: type) -> Mapping[str, tuple[Any, frozenset[str]]]:
    """The declared type of each field, and its words where it is a choice of some."""
    hints = get_type_hints(owner)
    kinds = {field.name: hints[field.name] for field in fields(owner)}
    choices = {name: get_args(kind) if get_origin(kind) is Literal else () for name, kind in kinds.items()}
    return {name: (kind, frozenset(filter(_is_text, choices[name]))) for name, kind in kinds.items()}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _settled(value: Any, kind: Any) -> Any:
    """The value as one of that kind, or `_OF_NO_TYPE`."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        settled = (_settled(value, one) for one in get_args(kind))
        return next((one for one in settled if one is not _OF_NO_TYPE), _OF_NO_TYPE)
    if origin is Literal:
        same = (one for one in get_args(kind) if isinstance(value, bool) == isinstance(one, bool))
        is_plain = isinstance(value, str | Real)
        return next((one for one in same if is_plain and value == one), _OF_NO_TYPE)
    if origin is tuple:
        if getattr(value, "ndim", 0) == 1:
            value = value.tolist()
        listed = value if isinstance(value, tuple | list | range) else [_OF_NO_TYPE]
        member = get_args(kind)[0]
        if member is int and type(value) is tuple and {*map(type, value)} == {int} and max(map(abs, value)) < _MOST_INT:
            return value  # what most are, in a fraction of the time
        members = tuple(_settled(one, member) for one in listed)
        return _OF_NO_TYPE if any(one is _OF_NO_TYPE for one in members) else members
    if isinstance(value, Real) and not isinstance(value, bool) and kind in (int, float):
        return _settled_number(value, kind)
    return value if isinstance(value, origin or kind) and (kind is bool or not isinstance(value, bool)) else _OF_NO_TYPE


def _settled_number(value: Real, kind: Any) -> Any:
    if isinstance(value, Integral) or (kind is int and isinstance(value, float) and value.is_integer()):
        whole = int(value)
        if abs(whole) <= _MOST_INT:
            return value if isinstance(value, int) else whole
        return float(whole) if kind is float and abs(whole) < 1e300 else _OF_NO_TYPE
    if kind is int or math.isnan(value):
        return _OF_NO_TYPE
    return value if isinstance(value, float) else float(value)


def _words(kind: Any) -> str:
    match get_origin(kind):
        case None:
            return _KIND_WORDS.get(kind, f"of type {getattr(kind, '__name__', kind)}")
        case origin if origin is Literal:
            return f"one of {', '.join(map(str, get_args(kind)))}"
        case origin if origin in (Union, UnionType):
            return " or ".join("nothing" if one is type(None) else _words(one) for one in get_args(kind))
        case origin if origin is tuple:
            return f"a list, each {_words(get_args(kind)[0])}"
        case origin:
            return f"of type {origin.__name__}"


def refuse_unknown(
    values: Mapping[str, object], known: Iterable[str], where: str, elsewhere: Mapping[str, Iterable[str]] | None = None
) -> None:
    """Errors: ConfigError naming what is not `known`, and what may be meant: a name like it, or a table `elsewhere` (by
    its name, what it has) that has it."""
    if unknown := sorted(values.keys() - set(known)):
        tables = [table for table, names in (elsewhere or {}).items() if unknown[0] in names]
        near = f"; {unknown[0]} belongs in [{tables[0]}]" if tables else did_you_mean(unknown[0], known)
        raise ConfigError(f"{where}: unknown {unknown}; known are {sorted(known)}{near}")


class DataError(DynaPipeError):
    """A file, sample or field that cannot be used."""


class NoRoomError(DynaPipeError):
    """A place that is full, read-only or another user's: whoever starts again meets it again. `problem` says what, and
    `remedy` how to mend it."""

    def __init__(self, problem: str, remedy: str = "", then: str = "") -> None:
        super().__init__(problem + (remedy and f": {remedy}") + (then and f", then {then}"))
        self.problem, self.remedy = problem, remedy


class PlanError(DynaPipeError):
    """No valid plan exists for this batch under these limits."""


class LowMemoryError(PlanError):
    """A job that needs more than the memory that is free now, on a machine that has as much."""


class VerificationError(DynaPipeError):
    """A plan that would deadlock, leak a buffer or lose a message."""


class StoreError(DynaPipeError):
    """The store is absent, refuses, timed out, or holds a message that this job did not sign."""

    may_pass = True


class StoreRefusedError(StoreError):
    """The store, or what protects it, refuses this job: another try would end the same way."""

    may_pass = False


class ExecutionError(DynaPipeError):
    """A rank that cannot go on: a peer is late, dead or out of step."""

    may_pass = True


class NotFiniteError(ExecutionError):
    """A step's loss or gradients are not finite, and the settings allow no such step."""

    may_pass = False


# What gloo and NCCL say of a peer that is late or gone; both raise plain RuntimeErrors (torch 2.6 to 2.13).
_SIGNS = ("timed out", "timeout", "connection closed", "connection reset", "gloo", "nccl", "broken pipe", "socket")


class named_collectives(ContextDecorator):  # noqa: N801 (read as a function, as contextlib's own are)
    """Within, or over a function: a backend's error becomes an ExecutionError that says what this rank was doing.

    Collectives inside a stage (tensor and data parallel) have no instruction that could name them when they fail.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS):
            raise ExecutionError(
                f"{self._what}: another rank that takes part in it is late or gone ({str(error).splitlines()[0]}):"
                " look at the first message of the other ranks"
            ) from error
