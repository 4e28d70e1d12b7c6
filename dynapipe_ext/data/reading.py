"""Examples out of the user's own JSON Lines files, plain or compressed, one at a time."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from dynapipe_ext.errors import ConfigError, DataError

_READ_BYTES = 1 << 20
_ZSTANDARD_READ_BYTES = 1 << 10  # its decoder returns all that these unfold to, which can be 10,000 times as much
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, OSError)  # what `decompressed` raises
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FIELDS = 'give {"input", "target"} or {"text"}'


@dataclass(frozen=True, slots=True)
class Example:
    """One training text: `input` is the prompt, loss falls on `target` alone; plain text has an empty input. `file` and
    `line` say where it was read, if it was."""

    task: str
    input: str
    target: str
    file: str = field(default="", compare=False, repr=False)
    line: int = field(default=0, compare=False, repr=False)

    @property
    def where(self) -> str:
        """As messages name it, before its number among all samples."""
        return f"{self.file}, line {self.line}: " if self.file else ""


def read_examples(
    path: str | Path, *, pair: tuple[str, str] | None = ("input", "target"), text: str = "text"
) -> Iterator[Example]:
    """The records of a JSON Lines file in order, in constant memory (one line at a time).

    `.gz`, `.xz`, `.zst` and `.bz2` are decompressed; any other name is plain text. A record is an object with "input"
    and "target", or with "text" (then everything is target), or with the fields named instead; "task" is an optional
    name, other fields are ignored, as are blank lines and a byte order mark. A record with all three of them is an
    input and a target, or a text where `pair` is None.

    Errors: DataError with file and line number, at the call for a missing file, else when the line is reached.
    """
    file = Path(path)
    if file.is_dir():
        raise DataError(f"{file} is a folder: name one .jsonl file (.gz, .xz, .zst or .bz2 if compressed)")
    check_readable(file)
    if file.is_file() and file.stat().st_size == 0:
        raise _empty(file)  # no stream at all: lzma would call it cut short
    return _examples(file, pair, text)


def check_readable(file: Path) -> None:
    """Errors: DataError for a path that is missing, or that this user may not read."""
    if not file.exists():
        raise DataError(f"{file} does not exist: check the path given for the data")
    if not (file.is_file() or file.is_dir()):
        raise DataError(f"{file} is a pipe or a device, but data are read several times: write them to a file first")
    if not os.access(file, os.R_OK):
        raise DataError(f"{file} may not be read by this user: check its permissions")


def _examples(file: Path, pair: tuple[str, str] | None, text: str) -> Iterator[Example]:
    found = False
    for number, line in _numbered_lines(file):
        if line.strip():
            found = True
            example = parse_record(line, where=f"{file}, line {number}", pair=pair, text=text)
            yield replace(example, file=str(file), line=number)
    if not found:
        raise _empty(file)


def _empty(file: Path) -> DataError:
    return DataError(f"{file} is empty: it needs at least one record a line, {_FIELDS}")


def parse_record(
    line: bytes, *, where: str, pair: tuple[str, str] | None = ("input", "target"), text: str = "text"
) -> Example:
    """The example in one line of JSON; `where` opens the message of a DataError."""
    return example_of(parse_object(line, where=where, fields=_FIELDS), where=where, pair=pair, text=text)


def parse_object(line: bytes, *, where: str, fields: str = "write one object a line") -> dict[str, object]:
    """The object in one line of JSON. Errors: DataError, opening with `where`, ending in `fields` for no object."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise DataError(
            f"{where}: byte {error.start + 1} (0x{byte:02x}) is not UTF-8: convert the file to UTF-8"
        ) from None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}, column {error.colno}: not JSON ({error.msg}): write one object a line") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: JSON that cannot be read ({error}): write one flat object a line") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: the record is {_json_type(record)}, not an object: {fields}")
    return record


def example_of(
    record: Mapping[str, object],
    *,
    where: str,
    pair: tuple[str, str] | None = ("input", "target"),
    text: str = "text",
    may_be_empty: bool = False,
) -> Example:
    """The example in a record: the two fields of `pair`, else the field `text` as target. Errors: DataError."""
    if pair is not None and all(name in record for name in pair):
        prompt, target = (string_field(record, name, where=where) for name in pair)
    elif text in record:
        prompt, target = "", string_field(record, text, where=where)
    elif pair is None:
        raise lacking(record, [text], where=where, fields="all records must have the field that is named for texts")
    else:
        missing = [name for name in pair if name not in record]
        given = f'{{"{pair[0]}", "{pair[1]}"}} or {{"{text}"}}'
        raise lacking(record, missing, where=where, fields=f"give {given}")
    if not prompt and not target and not may_be_empty:
        raise DataError(f"{where}: the record is empty (no characters to train on): remove it or fill it")
    return Example(string_field(record, "task", where=where) if "task" in record else "unnamed", prompt, target)


def lacking(record: Mapping[str, object], missing: Sequence[str], *, where: str, fields: str) -> DataError:
    """What to tell about a record without the fields `missing`."""
    has = ", ".join(map(repr, list(record)[:9])) or "no fields"
    return DataError(f"{where}: the record lacks {' and '.join(map(repr, missing))} (it has {has}): {fields}")


def string_field(record: Mapping[str, object], field: str, *, where: str) -> str:
    """The text in a field. Errors: DataError for another type, or for half of a surrogate pair."""
    value = record[field]
    if not isinstance(value, str):
        raise DataError(f"{where}: field {field!r} is {_json_type(value)} but must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(value[error.start]):04x}"
        raise DataError(
            f"{where}: field {field!r} holds half of a surrogate pair ({code}): write whole characters"
        ) from None
    return value


def _json_type(value: object) -> str:
    if value is None:
        return "a null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")


def _numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, the line without its end) of the decompressed file."""
    number, rest = 0, bytearray()
    with file.open("rb") as raw:
        blocks = decompressed(raw, file.suffix)
        while True:
            try:
                block = next(blocks, b"")
            except DAMAGE as error:
                raise damaged(file, error, line=number) from None
            if not block:
                break
            if number == 0 and not rest and block.startswith(BYTE_ORDER_MARK):
                block = block[len(BYTE_ORDER_MARK) :]
            head, newline, tail = block.rpartition(b"\n")
            if newline:
                rest += head
                for line in bytes(rest).split(b"\n"):
                    number += 1
                    yield number, line
                rest = bytearray(tail)
            else:
                rest += block
    if rest:
        yield number + 1, bytes(rest)


def damaged(file: Path, error: BaseException, *, line: int) -> DataError:
    """What to tell about a file whose stream raised one of `DAMAGE` after `line` whole lines."""
    reason = "ends too early" if isinstance(error, EOFError) else f"cannot be read ({error})"
    place = f" after line {line}" if line else ""
    return DataError(f"{file} {reason}{place}: copy or compress it again")


def decompressed(raw: IO[bytes], suffix: str) -> Iterator[bytes]:
    """Blocks of what a file of this suffix holds; a truncated or damaged one raises one of `DAMAGE`."""
    match suffix.lower():
        case ".gz":
            with gzip.open(raw, "rb") as stream:
                yield from iter(lambda: stream.read(_READ_BYTES), b"")
        case ".xz":
            with lzma.open(raw, "rb") as stream:
                yield from iter(lambda: stream.read(_READ_BYTES), b"")
        case ".bz2":
            with bz2.open(raw, "rb") as stream:
                yield from iter(lambda: stream.read(_READ_BYTES), b"")
        case ".zst":
            yield from _zstandard_blocks(raw)
        case _:
            yield from iter(lambda: raw.read(_READ_BYTES), b"")


def _zstandard_blocks(raw: IO[bytes]) -> Iterator[bytes]:
    """Frame by frame, because zstandard's own stream reader takes a truncated file for a whole one."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError('reading .zst needs the package zstandard: pip install "dynapipe-ext[train]"') from None

    frame = None
    while compressed := raw.read(_ZSTANDARD_READ_BYTES):
        while compressed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                if block := frame.decompress(compressed):
                    yield block
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            compressed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError
