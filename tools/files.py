"""JSON and TOML files: errors name the place of a mistake, and a file is written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from dynapipe_ext.durable_files import replace_file
from dynapipe_ext.errors import NO_ROOM, DataError, short, writing_move

_T = TypeVar("_T")
_N = TypeVar("_N", int, float)
ALONE = "-"  # the place of JSON that stands alone on standard output
_MOST_INT = 1 << 63  # integers beyond it break other programs and float()


_READERS = {"dynapipe-plan/1": "dynapipe plan --show", "dynapipe-dump/1": "dynapipe replay"}


def read_json(path: str | Path, file_format: str, what: str) -> dict[str, Any]:
    """The object in a JSON file of this "format". Errors: DataError for other files, naming the line where JSON
    breaks."""
    try:
        data = parse_json(Path(path).read_text(encoding="utf-8"), str(path), f"{what} that a run wrote")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): give {what} that a run wrote") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): give {what} that a run wrote") from error
    actual = data.get("format") if isinstance(data, dict) else None
    if actual != file_format:
        if isinstance(data, dict) and data.keys() == {"error", "status"}:
            raise DataError(f"{path} says why a command failed, {short(data['error'])}: run that again, or give {what}")
        reader = f", which {_READERS[actual]} reads," if isinstance(actual, str) and actual in _READERS else ""
        raise DataError(
            f"{path} has format {short(actual)}{reader} but {file_format!r} is needed: give {what}, or write it again"
        )
    return dict(data)


def parse_json(text: str, where: str, expected: str) -> Any:
    """The value in a JSON text. Errors: DataError that names `where` and the mistake, and asks for `expected`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON (line {error.lineno}: {error.msg}): give {expected}") from error
    except RecursionError as error:
        raise DataError(f"{where} nests lists or objects too deep to be read: give {expected}") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise DataError(f"{where} has a number too long to be read: give {expected}") from error


def write_data(text: str) -> None:
    """Write what a program reads to standard output, every character as it is."""
    getattr(sys.stdout, "rich_proxied_file", sys.stdout).write(text)


def deliver_error(where: str | None, message: str, status: int) -> None:
    """What --json gets from a command that fails: {"error", "status"}, alone on standard output, or in a file that is
    not there yet. A file with an earlier result keeps it."""
    if where is None or (where != ALONE and Path(where).exists()):
        return
    text = json.dumps({"error": message, "status": status}, indent=1) + "\n"
    if where == ALONE:
        write_data(text)
        return
    with contextlib.suppress(DataError):  # the error that is being reported matters more
        write_output(where, text)


def write_atomic(path: str | Path, text: str) -> None:
    """Replace a file by `text` in one step, which a crash leaves whole, and create its folder. A link is replaced, and
    what it points to stays. Errors: DataError where the place cannot be written."""
    target = Path(path)
    if target.is_dir():
        raise DataError(f"{target} is a folder: name another file, or move it away")
    try:
        replace_file(target, text.encode())
    except OSError as error:
        move = "make room there" if error.errno in NO_ROOM else "choose another directory"
        raise DataError(f"{target} cannot be written ({error.strerror}): {move}") from error


def write_output(path: str | Path, text: str) -> None:
    """Write a file that a user has named: as `write_atomic` does, but a path such as /dev/null or a pipe is written to
    directly, though through a link only if the link is the system's. Errors: DataError where the place cannot be
    written."""
    target = Path(path)
    if str(path) == "-":
        raise DataError("- is standard output, which --json alone writes to: name a file (one of that name is ./-)")
    is_planted = target.is_symlink() and target.absolute().parts[1] not in ("dev", "proc")
    if is_planted or not target.exists() or target.is_file() or target.is_dir():
        write_atomic(path, text)
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{target} cannot be written ({error.strerror}): choose another file") from error


class Fields:
    """Checked access to a JSON object; `where` names it in errors."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise DataError(f"{where} is {type(data).__name__}: expected an object")
        self._data, self._where = data, where

    def only(self, names: Iterable[str]) -> None:
        """Errors: DataError for fields other than `names`."""
        expected = sorted(names)
        if unknown := sorted(self._data.keys() - set(expected)):
            shown = ", ".join(map(short, unknown[:5])) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            raise DataError(f"{self._where} has unknown {shown}: known are {', '.join(expected)}; take the others out")

    def has(self, name: str) -> bool:
        return name in self._data

    def raw(self, name: str) -> Any:
        if name not in self._data:
            raise DataError(f"{self._where} has no field {name!r}: it was cut or written by another version; run again")
        return self._data[name]

    def one(self, name: str, kind: type[_T], default: _T | None = None) -> _T:
        """Returns the field, or `default` (None: there must be one) where it is left out."""
        return default if default is not None and not self.has(name) else self.check(name, self.raw(name), kind)

    def many(self, name: str, kind: type[_T], default: list[_T] | None = None) -> tuple[_T, ...]:
        return tuple(self.check(f"{name}[{i}]", value, kind) for i, value in enumerate(self.one(name, list, default)))

    def sub(self, name: str) -> Fields:
        return Fields(self.raw(name), f"{self._where}: {name}")

    def within(self, name: str, value: _N, least: _N, most: _N) -> _N:
        """Returns `value`; NaN passes. Errors: DataError where it lies outside `least` to `most`."""
        if value < least or value > most:
            bounds = f"{least:,} to {most:,}"
            raise DataError(f"{self._where}: {name} is {short(value)} but must lie within {bounds}: correct it")
        return value

    def check(self, name: str, value: Any, kind: type[_T]) -> _T:
        if type(value) is int and not -_MOST_INT <= value < _MOST_INT:
            raise DataError(
                f"{self._where}: {name} is {short(value)} but integers here have at most 64 bits: correct it"
            )
        if kind is float and type(value) is int:
            value = float(value)
        # bool is a subclass of int, but true is not a count.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise DataError(
                f"{self._where}: {name} is {short(value)}, expected {kind.__name__}; run again to rewrite it"
            )
        return value


def toml_of(tables: Mapping[str, Mapping[str, Any]], *comments: str) -> str:
    """TOML text: the comments, then the tables one after the other.

    >>> print(toml_of({"run": {"steps": 2, "run_dir": ""}, "job": {"strict": True}}, "made by hand"))
    # made by hand
    <BLANKLINE>
    [run]
    steps = 2
    run_dir = ""
    <BLANKLINE>
    [job]
    strict = true
    <BLANKLINE>
    """
    lines = [f"# {comment}" for comment in comments]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)  # a basic string of TOML escapes as JSON does
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return repr(value)


@contextmanager
def writing_in(place: str | Path) -> Iterator[None]:
    """A block that writes to `place`. Errors: DataError where the operating system refuses to write."""
    try:
        yield
    except OSError as error:  # errors of shutil.copytree have no strerror
        why = error.strerror or error
        move = writing_move(error.errno)
        raise DataError(f"{place} cannot be written ({why}): {move}, or choose another directory") from error
