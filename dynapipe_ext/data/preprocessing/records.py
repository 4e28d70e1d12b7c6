"""The records of a block: objects, rows and texts, each with its place in the words of messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, assert_never

from dynapipe_ext.data.examples import as_object, decoded, parse_line
from dynapipe_ext.data.preprocessing.inputs import Block, BlockStream, InputFile
from dynapipe_ext.data.preprocessing.record_forms import MESSAGES, is_message
from dynapipe_ext.errors import DataError

Record = Mapping[str, object]


def records(block: Block, *, text_key: str) -> Iterator[tuple[str, Record]]:
    """(place, record) for every record of the block. A record of a text file has the single field `text_key`.

    Blank lines are no records; they separate the paragraphs of a text. A list of messages is a record of these alone.

    Errors: DataError naming file and line for text that is not UTF-8, and for a line that is not a JSON object.
    """
    match block.form:
        case "jsonl":
            for number, line in enumerate(_lines(block.payload), block.first):
                if line.strip():
                    where = f"{block.file}, line {number}"
                    yield where, _record(line, where, "write one object a line")
        case "json" | "csv" | "tsv":
            unit = "item" if block.form == "json" else "row"
            for number, line in enumerate(_lines(block.payload), block.first):
                where = f"{block.file}, {unit} {number}"
                yield where, _record(line, where, "make each item an object")
        case "text":
            for where, text in _texts(block):
                yield where, {text_key: decoded(text, where=where)}
        case "parquet" | "arrow":
            yield from _rows(block)
        case _:
            assert_never(block.form)


def all_records(
    files: Iterable[InputFile], *, text_key: str, columns: Collection[str]
) -> Iterator[tuple[InputFile, str, Record]]:
    """(file, place, record) for every record of the files, in constant memory.

    Errors: as for `BlockStream` and `records`, when the record is reached; DataError for a file without records.
    """
    for file in files:
        has_records = False
        for block in BlockStream([file], columns=columns):
            for where, record in records(block, text_key=text_key):
                has_records = True
                yield file, where, record
        if not has_records:
            raise DataError(f"{file.path} is empty (it has no records): leave it out, or give it at least one")


def _record(line: bytes, where: str, fields: str) -> Record:
    value = parse_line(line, where=where)
    if isinstance(value, list) and value and all(map(is_message, value)):
        return {MESSAGES: value}
    return as_object(value, where=where, fields=fields)


def _lines(payload: bytes) -> list[bytes]:
    lines = payload.split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


def _texts(block: Block) -> Iterator[tuple[str, bytes]]:
    if block.unit == "document":
        if block.payload.strip():
            yield block.file, block.payload
        return
    lines = [line.removesuffix(b"\r") for line in _lines(block.payload)]
    if block.unit == "line":
        for number, line in enumerate(lines, block.first):
            if line.strip():
                yield f"{block.file}, line {number}", line
        return
    start = 0
    for place, line in enumerate([*lines, b""]):
        if line.strip():
            continue
        if place > start:
            yield f"{block.file}, line {block.first + start}", b"\n".join(lines[start:place])
        start = place + 1


def _rows(block: Block) -> Iterator[tuple[str, Record]]:
    import pyarrow

    number = block.first
    with pyarrow.ipc.open_stream(block.payload) as reader:
        for batch in reader:
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError as error:
                last = number + batch.num_rows - 1
                raise DataError(
                    f"{block.file}, rows {number} to {last}: a text is not UTF-8 ({error.reason}): "
                    "write the file again with UTF-8 strings"
                ) from None
            for row in rows:
                yield f"{block.file}, row {number}", {name: _without_nulls(value) for name, value in row.items()}
                number += 1


def _without_nulls(value: Any) -> Any:
    """The value of a column without members that are null, at any depth: all rows of Parquet and Arrow have the members
    of all. So a null that was written as one goes, too; in columns of JSON text it stays."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
