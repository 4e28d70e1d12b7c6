"""Examples out of the user's own JSON Lines files, plain or compressed, one at a time."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dynapipe_ext.errors import ConfigError, DataError

_READ_BYTES = 1 << 20
_ZSTANDARD_READ_BYTES = 1 << 10  # its decoder returns all that these unfold to, which can be 10,000 times as much
_FIELDS = 'give {"input", "target"} or {"text"}'


@dataclass(frozen=True, slots=True)
class Example:
    """One training text: `input` is the prompt, loss falls on `target` alone; plain text has an empty input."""

    task: str
    input: str
    target: str


def read_examples(path: str | Path) -> Iterator[Example]:
    """The records of a JSON Lines file in order, in constant memory (one line at a time).

    `.gz`, `.xz` and `.zst` are decompressed; any other name is read as plain text. A record is an object with "input"
    and "target", or with "text" (then everything is target); "task" is an optional name, other fields are ignored, as
    are blank lines and a byte order mark. A record with all three of them is an input and a target.

    Errors: DataError with file and line number, at the call for a missing file, else when the line is reached.
    """
    file = Path(path)
    if file.is_dir():
        raise DataError(f"{file} is a folder: name one .jsonl file (.gz, .xz or .zst if compressed)")
    if not file.exists():
        raise DataError(f"{file} does not exist: check the path given as --data")
    if file.is_file() and file.stat().st_size == 0:
        raise _empty(file)  # no stream at all: lzma would call it cut short
    if not os.access(file, os.R_OK):
        raise DataError(f"{file} may not be read by this user: check its permissions")
    return _examples(file)


def _examples(file: Path) -> Iterator[Example]:
    found = False
    for number, line in _numbered_lines(file):
        if line.strip():
            found = True
            yield parse_record(line, where=f"{file}, line {number}")
    if not found:
        raise _empty(file)


def _empty(file: Path) -> DataError:
    return DataError(f"{file} is empty: it needs at least one record a line, {_FIELDS}")


def parse_record(line: bytes, *, where: str) -> Example:
    """The example in one line of JSON; `where` opens the message of a DataError."""
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
        raise DataError(f"{where}: the record is a {_json_type(record)}, not an object: {_FIELDS}")
    if "input" in record and "target" in record:
        prompt, target = _string(record, "input", where), _string(record, "target", where)
    elif "text" in record:
        prompt, target = "", _string(record, "text", where)
    else:
        missing = [name for name in ("input", "target") if name not in record]
        has = ", ".join(map(repr, list(record)[:9])) or "no fields"
        raise DataError(f"{where}: the record lacks {' and '.join(map(repr, missing))} (it has {has}): {_FIELDS}")
    if not prompt and not target:
        raise DataError(f"{where}: the record is empty (no characters to train on): remove it or fill it")
    return Example(_string(record, "task", where) if "task" in record else "unnamed", prompt, target)


def _string(record: dict[str, object], field: str, where: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise DataError(f"{where}: field {field!r} is a {_json_type(value)} but must be a string")
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
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return names[type(value)]


def _numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, the line without its end) of the decompressed file."""
    number, rest = 0, bytearray()
    blocks = _blocks(file)
    while True:
        try:
            block = next(blocks, b"")
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            reason = "ends too early" if isinstance(error, EOFError) else f"cannot be read ({error})"
            raise DataError(f"{file} {reason} after line {number}: copy or compress it again") from None
        if not block:
            break
        if number == 0 and not rest and block.startswith(b"\xef\xbb\xbf"):
            block = block[3:]
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


def _blocks(file: Path) -> Iterator[bytes]:
    """Decompressed bytes; a truncated file raises EOFError, a damaged one OSError, LZMAError or zlib.error."""
    with file.open("rb") as raw:
        match file.suffix.lower():
            case ".gz":
                with gzip.open(raw, "rb") as stream:
                    yield from iter(lambda: stream.read(_READ_BYTES), b"")
            case ".xz":
                with lzma.open(raw, "rb") as stream:
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
