"""The records in a block, each with the place that an error about it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dynapipe_ext.data.preprocessing.inputs import Block
from dynapipe_ext.data.reading import parse_object
from dynapipe_ext.errors import DataError

TextRecord = Mapping[str, object]


def records(block: Block, *, text_key: str) -> Iterator[tuple[str, TextRecord]]:
    """(place, record) for every record of the block; one of a text file has the single field `text_key`.

    Blank lines are no records; the paragraphs of a text are what blank lines part.

    Errors: DataError naming file and line for text that is not UTF-8, or a line that is not a JSON object.
    """
    match block.form:
        case "jsonl":
            for number, line in enumerate(_lines(block.payload), block.first):
                if line.strip():
                    where = f"{block.file}, line {number}"
                    yield where, parse_object(line, where=where)
        case "text":
            for where, text in _texts(block):
                yield where, {text_key: _decoded(text, where)}
        case "parquet":
            yield from _rows(block)


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


def _decoded(text: bytes, where: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise DataError(
            f"{where}: byte {error.start + 1} (0x{byte:02x}) is not UTF-8: convert the file to UTF-8"
        ) from None


def _rows(block: Block) -> Iterator[tuple[str, TextRecord]]:
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
                yield f"{block.file}, row {number}", row
                number += 1
