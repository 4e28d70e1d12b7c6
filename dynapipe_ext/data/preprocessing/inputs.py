"""Input files, cut into blocks of whole records. Every reader cuts the same blocks, so that finished ones can be kept.

A block of JSON lines or of text ends at the first line after a MiB, one of paragraphs at the first blank line. Parquet
is cut into batches of rows.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, get_args

from dynapipe_ext.data.examples import (
    BYTE_ORDER_MARK,
    COMPRESSED,
    DAMAGE,
    PREFERENCE,
    check_readable,
    damaged,
    decompressed,
)
from dynapipe_ext.errors import ConfigError, DataError, install_advice, short

Form = Literal["jsonl", "parquet", "text"]
TextUnit = Literal["line", "paragraph", "document"]
BLOCK_BYTES = 1 << 20
_PARQUET_ROWS = 256
_MAGIC = "*?["
_LINE_END, _BLANK_LINE = re.compile(rb"\n"), re.compile(rb"\n\r?\n")
_FORMS: dict[str, Form] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, what it holds, and its size on disk."""

    path: Path
    form: Form
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive whole records of one file: lines, paragraphs, a document, or an Arrow stream of rows.

    `first` is the number, from 1, of its first line or row. `upto_bytes` is how much of the file on disk had been read
    when the block was complete.
    """

    file: str
    form: Form
    unit: TextUnit
    first: int
    payload: bytes
    upto_bytes: int

    def digest(self) -> str:
        """sha256 of everything that determines the block's records."""
        return hashlib.sha256(f"{self.form}/{self.unit}/".encode() + self.payload).hexdigest()


def find_inputs(patterns: Iterable[str | Path], form: Form | None = None) -> tuple[InputFile, ...]:
    """The files that paths and globs (also `**`) name, in their order; those of one glob are sorted by name.

    The suffix before .gz, .xz, .zst or .bz2 tells the form, unless `form` does: .parquet and .pq are Parquet; .txt,
    .text and .md are text; all others are JSON Lines.

    Errors: DataError for a path that is missing, a folder, unreadable or named twice, and for a glob without a match.
    """
    if form is not None and form not in get_args(Form):
        raise ConfigError(f"the input format is {short(form)}: choose from {', '.join(get_args(Form))}")
    files: list[InputFile] = []
    seen: set[Path] = set()
    for path in (path for pattern in patterns for path in _matches(str(pattern))):
        if path.is_dir():
            raise DataError(f"{path} is a folder: name files, for example {str(path / '*.jsonl')!r}")
        check_readable(path)
        if (real := path.resolve()) in seen:
            raise DataError(f"{path} is given twice: name every file once")
        seen.add(real)
        files.append(InputFile(path, form or _form_of(path), path.stat().st_size))
    if not files:
        raise ConfigError("no input: name at least one file, for example data/*.jsonl.gz")
    return tuple(files)


class BlockStream:
    """An iterator over the blocks of files in order. `left` tells what remains, so that others can read it.

    `unit` is one record of a text file. Of Parquet only `columns` are read.

    Errors: DataError naming a file that is empty, damaged or lacks all columns, when it is reached.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        *,
        unit: TextUnit = "line",
        columns: Collection[str] = (),
    ) -> None:
        self.unit: TextUnit = unit
        self.block_bytes = BLOCK_BYTES  # least size of a block, uncompressed; the last of a file may be smaller
        self.columns = frozenset(columns)
        self._left = deque((file, 0) for file in files)  # each file with the number of its blocks taken so far
        self._reading: Iterator[Block] | None = None
        self._put_back: list[Block] = []

    def __iter__(self) -> Iterator[Block]:
        return self

    def __next__(self) -> Block:
        if self._put_back:
            block: Block | None = self._put_back.pop()
        else:
            block = None
        while block is None:
            if not self._left:
                raise StopIteration
            file, _ = self._left[0]
            self._reading = self._reading or file_blocks(file, self.unit, self.columns, self.block_bytes)
            block = next(self._reading, None)
            if block is None:
                self._left.popleft()
                self._reading = None
        file, num_taken = self._left[0]
        self._left[0] = file, num_taken + 1
        return block

    def put_back(self, block: Block) -> None:
        """Put the last block back; it comes next again."""
        file, num_taken = self._left[0]
        self._left[0] = file, num_taken - 1
        self._put_back.append(block)

    def left(self) -> tuple[tuple[InputFile, int], ...]:
        """Files not yet read to their end, each with the number of its blocks taken so far."""
        return tuple(self._left)


def file_blocks(file: InputFile, unit: TextUnit, columns: Collection[str], block_bytes: int) -> Iterator[Block]:
    """The blocks of one file, at least one. Errors: as for `BlockStream`."""
    if file.stored_bytes == 0:
        raise DataError(f"{file.path} is empty: leave it out")
    if file.form == "parquet":
        return _parquet_blocks(file, columns, block_bytes)
    if file.form == "text" and unit == "document":
        return iter((_document(file),))
    return _line_blocks(file, unit if file.form == "text" else "line", block_bytes)


def _matches(pattern: str) -> list[Path]:
    if os.path.exists(pattern) or not any(character in pattern for character in _MAGIC):
        return [Path(pattern)]
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path))
    if not paths:
        raise DataError(f"no file fits {pattern!r}: check the pattern")
    return [Path(path) for path in paths]


def _form_of(path: Path) -> Form:
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix
    form = _FORMS.get(inner, "jsonl")
    if form == "parquet" and inner != suffix:
        raise DataError(f"{path} is a Parquet file inside {suffix}: decompress it (Parquet compresses by itself)")
    return form


def _line_blocks(file: InputFile, unit: TextUnit, block_bytes: int) -> Iterator[Block]:
    """Blocks that end at the first border of lines, or of paragraphs, after `block_bytes`; at least one.

    Only the content decides where they end, not how much is read or decompressed at a time.
    """
    border = _BLANK_LINE if unit == "paragraph" else _LINE_END
    rest, first, has_begun = bytearray(), 1, False
    searched = start = block_bytes - 1
    with file.path.open("rb") as raw:
        for piece in _pieces(file, raw):
            rest += piece
            if not has_begun and len(rest) >= len(BYTE_ORDER_MARK):
                has_begun = True
                if rest.startswith(BYTE_ORDER_MARK):
                    del rest[: len(BYTE_ORDER_MARK)]
            while has_begun and (match := border.search(rest, searched)):
                payload = bytes(rest[: match.end()])
                del rest[: match.end()]
                yield Block(str(file.path), file.form, unit, first, payload, raw.tell())
                first, searched = first + payload.count(b"\n"), start
            searched = max(start, len(rest) - 2)  # a border may begin with the last two bytes
    if rest or first == 1:
        yield Block(str(file.path), file.form, unit, first, bytes(rest), file.stored_bytes)


def _document(file: InputFile) -> Block:
    with file.path.open("rb") as raw:
        text = b"".join(_pieces(file, raw))
    text = text.removeprefix(BYTE_ORDER_MARK)
    return Block(str(file.path), "text", "document", 1, text, file.stored_bytes)


def _pieces(file: InputFile, raw: IO[bytes]) -> Iterator[bytes]:
    num_lines = 0
    try:
        for piece in decompressed(raw, file.path.suffix):
            num_lines += piece.count(b"\n")
            yield piece
    except DAMAGE as error:
        raise damaged(file.path, error, line=num_lines) from None


def _parquet_blocks(file: InputFile, columns: Collection[str], block_bytes: int) -> Iterator[Block]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"reading Parquet needs the package pyarrow: {install_advice('data')}") from None

    try:
        table = pyarrow.parquet.ParquetFile(file.path)
        names = table.schema_arrow.names
        read = {*columns, *(PREFERENCE if set(names) >= PREFERENCE else ())}  # what makes them a kind of their own
        chosen = [name for name in names if name in read]
        if not chosen:
            raise DataError(
                f"{file.path} has the columns {', '.join(map(repr, names[:9]))} but none of "
                f"{', '.join(map(repr, sorted(columns)))}: name the right ones"
            )
        num_rows = table.metadata.num_rows
        if num_rows == 0:
            raise DataError(f"{file.path} has no rows: leave it out")
        first, held, held_bytes, num_held = 1, [], 0, 0
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=chosen):
            held.append(batch)
            held_bytes, num_held = held_bytes + batch.nbytes, num_held + batch.num_rows
            end = first - 1 + num_held
            if held_bytes < block_bytes and end < num_rows:
                continue
            sink = io.BytesIO()
            with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
                for rows in held:
                    writer.write_batch(rows)
            upto_bytes = file.stored_bytes * end // num_rows
            yield Block(str(file.path), "parquet", "line", first, sink.getvalue(), upto_bytes)
            first, held, held_bytes, num_held = end + 1, [], 0, 0
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file.path} cannot be read as Parquet ({error}): write or copy it again") from None
