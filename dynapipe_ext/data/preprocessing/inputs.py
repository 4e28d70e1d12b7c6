"""Input files, cut into blocks of whole records. Every reader cuts the same blocks, so that finished ones can be kept.

A block of JSON lines or of text ends at the first line after a MiB, one of paragraphs at the first blank line, one of a
table at the first row.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, assert_never, get_args

from dynapipe_ext.data.preprocessing.compressed import (
    BYTE_ORDER_MARK,
    COMPRESSED,
    DAMAGE,
    MOST_RECORD_BYTES,
    check_readable,
    damaged,
    decompressed,
    refuse_foreign,
    too_long,
)
from dynapipe_ext.data.preprocessing.file_heads import DELIMITERS, HEAD_BYTES, delimiter_of, json_form
from dynapipe_ext.data.preprocessing.table_files import (
    ItemReader,
    array_items,
    as_arrow,
    files_of_folder,
    row_batches,
    table_rows,
)
from dynapipe_ext.errors import ConfigError, DataError, short

Form = Literal["jsonl", "json", "csv", "tsv", "parquet", "arrow", "text"]
TextUnit = Literal["line", "paragraph", "document"]
BLOCK_BYTES = 1 << 20
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_MAGIC = "*?["
_NEWLINE = b"\n"
_LINE_END, _BLANK_LINE = re.compile(rb"\n"), re.compile(rb"\n\r?\n")
_FORMS: dict[str, Form] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, what it holds, and its size on disk. Of JSON, `wrapper` is the member of the one object in it that holds
    the records; of a table, `delimiter` is what parts its columns."""

    path: Path
    form: Form
    stored_bytes: int
    wrapper: str = ""
    delimiter: str = ""

    @property
    def words(self) -> str:
        """Its form, for people."""
        if self.wrapper:
            return f"{self.form}, its records under {self.wrapper!r}"
        if self.delimiter not in ("", _DELIMITERS.get(self.form)):
            return f"{self.form} of {DELIMITERS[self.delimiter]}"
        return self.form


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
    """The files that paths, folders and globs (also `**`) name, in their order; those of one glob are sorted by name.

    The form follows from the suffix before .gz, .xz, .zst or .bz2, unless `form` names it: .parquet and .pq are
    Parquet; .arrow, .csv and .tsv their namesakes; .txt, .text and .md are text. All others are JSON: an array, an
    object that holds one, or an object a line. Of a folder come the files of `files_of_folder`.

    Errors: DataError for a path that is missing, unreadable or named twice, and for a glob without a match.
    """
    if form is not None and form not in get_args(Form):
        raise ConfigError(f"the input format is {short(form)}: choose from {', '.join(get_args(Form))}")
    files: list[InputFile] = []
    paths_seen: set[Path] = set()
    matches = (match for pattern in patterns for match in _matches(str(pattern)))
    for path in (path for match in matches for path in (files_of_folder(match) if match.is_dir() else [match])):
        check_readable(path)
        if (real := path.resolve()) in paths_seen:
            raise DataError(f"{path} is given twice: name every file once")
        paths_seen.add(real)
        files.append(_input_file(path, form))
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
    match file.form:
        case "parquet" | "arrow":
            return _batch_blocks(file, columns, block_bytes)
        case "json":
            return _item_blocks(file, partial(array_items, wrapper=file.wrapper), block_bytes)
        case "csv" | "tsv":
            delimiter = file.delimiter or _DELIMITERS[file.form]
            return _item_blocks(file, partial(table_rows, delimiter=delimiter), block_bytes)
        case "text" if unit == "document":
            return iter((_document(file),))
        case "text" | "jsonl":
            return _line_blocks(file, unit if file.form == "text" else "line", block_bytes)
        case _:
            assert_never(file.form)


def _matches(pattern: str) -> list[Path]:
    if os.path.exists(pattern) or not any(character in pattern for character in _MAGIC):
        return [Path(pattern)]
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path))
    if not paths:
        raise DataError(f"no file fits {pattern!r}: check the pattern")
    return [Path(path) for path in paths]


def _input_file(path: Path, form: Form | None) -> InputFile:
    """The file, whose form its name says unless `form` does, and else how it begins."""
    form, wrapper, delimiter = form or _form_of(path), "", ""
    if form in _DELIMITERS:
        delimiter = delimiter_of(_head(path), _DELIMITERS[form])
    elif form in (None, "json"):
        begun, wrapper = json_form(_head(path))
        form = form or begun
    return InputFile(path, form, path.stat().st_size, wrapper, delimiter)


def _form_of(path: Path) -> Form | None:
    """The form that a name says; None for JSON of any kind."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix
    form = _FORMS.get(inner)
    if form in ("parquet", "arrow") and inner != suffix:
        raise DataError(f"{path} is a {form.capitalize()} file inside {suffix}: decompress it")
    return form


def _head(path: Path) -> str:
    """The beginning of a file's text; empty of a damaged one, which is refused when it is read."""
    head = bytearray()
    with path.open("rb") as raw:
        try:
            for piece in _pieces(path, raw):
                head += piece
                if len(head) > HEAD_BYTES:
                    break
        except DataError:
            return ""
    return head[:HEAD_BYTES].removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="ignore")


def _line_blocks(file: InputFile, unit: TextUnit, block_bytes: int) -> Iterator[Block]:
    """Blocks that end at the first border of lines, or of paragraphs, after `block_bytes`; at least one.

    Only the content decides where they end, not how much is read or decompressed at a time.
    """
    border = _BLANK_LINE if unit == "paragraph" else _LINE_END
    rest, first, has_begun = bytearray(), 1, False
    searched = start = block_bytes - 1
    with file.path.open("rb") as raw:
        for piece in _pieces(file.path, raw):
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
            if len(rest) > block_bytes + MOST_RECORD_BYTES:
                raise too_long(file.path, f"line {first + rest.count(_NEWLINE)}")
    if rest or first == 1:
        yield Block(str(file.path), file.form, unit, first, bytes(rest), file.stored_bytes)


def _item_blocks(file: InputFile, reader: ItemReader, block_bytes: int) -> Iterator[Block]:
    """Blocks of one object a line, at least one."""
    held, held_bytes, first, upto_bytes = list[bytes](), 0, 1, 0
    with file.path.open("rb") as raw:
        for item, upto_bytes in reader(file.path, raw, partial(_pieces, file.path)):
            held.append(item)
            held_bytes += len(item) + 1
            if held_bytes >= block_bytes:
                yield Block(str(file.path), file.form, "line", first, b"\n".join(held) + b"\n", upto_bytes)
                first, held, held_bytes = first + len(held), [], 0
    if held or first == 1:
        yield Block(str(file.path), file.form, "line", first, b"\n".join(held), file.stored_bytes)


def _document(file: InputFile) -> Block:
    text = bytearray()
    with file.path.open("rb") as raw:
        for piece in _pieces(file.path, raw):
            text += piece
            if len(text) > MOST_RECORD_BYTES:
                raise too_long(file.path, "a document")
    return Block(str(file.path), "text", "document", 1, bytes(text.removeprefix(BYTE_ORDER_MARK)), file.stored_bytes)


def _pieces(path: Path, raw: IO[bytes]) -> Iterator[bytes]:
    num_lines, is_first = 0, True
    try:
        for piece in decompressed(raw, path.suffix):
            if is_first:
                refuse_foreign(path, piece)
                is_first = False
            num_lines += piece.count(b"\n")
            yield piece
    except DAMAGE as error:
        raise damaged(path, error, line=num_lines) from None


def _batch_blocks(file: InputFile, columns: Collection[str], block_bytes: int) -> Iterator[Block]:
    """Blocks of rows in Arrow's own stream, at least one."""
    first, end, upto_bytes = 1, 0, 0
    held, held_bytes = list[Any](), 0
    for batch, upto_bytes in row_batches(file.path, file.form, columns):
        held.append(batch)
        held_bytes, end = held_bytes + batch.nbytes, end + batch.num_rows
        if held_bytes >= block_bytes:
            yield Block(str(file.path), file.form, "line", first, as_arrow(held), upto_bytes)
            first, held, held_bytes = end + 1, [], 0
    if held:
        yield Block(str(file.path), file.form, "line", first, as_arrow(held), file.stored_bytes)
