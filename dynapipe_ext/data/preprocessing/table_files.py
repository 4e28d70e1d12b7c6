"""Files whose records are no lines: JSON arrays, CSV and TSV, Parquet, Arrow; and folders of them.

A reader gives (records, bytes of the file read so far) again and again. Each record is an object as one line of JSON;
of Parquet and Arrow come batches of rows.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from dynapipe_ext.data.examples import PREFERENCE
from dynapipe_ext.data.preprocessing.file_heads import HEAD_BYTES, refuse_members
from dynapipe_ext.errors import ConfigError, DataError, install_advice

_ROWS = 256  # of Parquet and Arrow, read at a time
_SPACE = re.compile(r"\s*")
_SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test")
_SPLIT = re.compile(rf"(?:^|[-_./])({'|'.join(_SPLITS)})(?=[-_./]|$)")

PieceReader = Callable[[IO[bytes]], Iterator[bytes]]
ItemReader = Callable[[Path, IO[bytes], PieceReader], Iterator[tuple[bytes, int]]]


def array_items(file: Path, raw: IO[bytes], pieces: PieceReader, *, wrapper: str = "") -> Iterator[tuple[bytes, int]]:
    """The items of a JSON array, in the memory of the longest one: of the file's, or of the one that an object has as
    its member `wrapper`. Errors: DataError with the number of the item."""
    decoder, text, number, is_open = json.JSONDecoder(), "", 1, False
    place = least = 0
    stream = _texts(file, pieces(raw))
    stream = _from_member(stream, wrapper) if wrapper else stream

    def refused(reason: str) -> DataError:
        return DataError(f"{file}, item {number}: {reason}: write a JSON array of objects, or one object a line")

    for piece, is_last in stream:
        text, place = text[place:] + piece, 0
        if len(text) < least and not is_last:
            continue  # an item that was longer than all that was read: try again once there is twice as much
        while True:
            start = _after_space(text, place)
            if not is_open:
                if text[start : start + 1] != "[":
                    raise refused("no array begins here")
                is_open, place = True, start + 1
                continue
            if is_next := number > 1 and text[start : start + 1] == ",":
                start = _after_space(text, start + 1)
            elif number > 1 and start < len(text) and text[start] != "]":
                raise refused("a comma is missing before it")
            if text[start : start + 1] == "]":
                if is_next:
                    raise refused("the array ends after a comma")
                behind = itertools.chain([text[start + 1 :]], (rest for rest, _ in stream))
                if reason := _refused_end(behind, wrapper):
                    raise refused(reason)
                return
            try:
                _, end = decoder.raw_decode(text, start)
            except json.JSONDecodeError as error:
                is_whole = len(text) - error.pos > 8 and not error.msg.startswith("Unterminated string")
                if is_last or is_whole:
                    raise refused(f"not JSON ({error.msg})" if not is_last else "the file ends within it") from None
                break
            except (ValueError, RecursionError) as error:
                raise refused(f"JSON that cannot be read ({error})") from None
            if end == len(text) and not is_last:
                break  # a number may go on
            yield text[start:end].replace("\n", " ").replace("\r", " ").encode(), raw.tell()
            number, place, least = number + 1, end, 0
        least = 2 * (len(text) - place)
    raise refused("the file ends before the array does")


def _from_member(stream: Iterator[tuple[str, bool]], name: str) -> Iterator[tuple[str, bool]]:
    """What of a text of JSON begins with the value of an object's member, which begins within its head."""
    head, is_last = "", False
    member = re.compile(rf"[{{,]\s*{re.escape(json.dumps(name, ensure_ascii=False))}\s*:\s*(?=\[)")
    for piece, is_last in stream:
        head += piece
        for match in member.finditer(head):
            try:  # what stands before is whole members, and not a part of one
                json.loads(f"{head[: match.start()]}}}") if head[match.start()] == "," else None
            except ValueError:
                continue
            yield head[match.end() :], is_last
            yield from stream
            return
    yield head, is_last


def _refused_end(rest: Iterable[str], wrapper: str) -> str:
    """Why what follows an array cannot be read; empty where nothing does, or what an object has beside its records."""
    text_behind, limit = "", HEAD_BYTES
    for piece in rest:
        text_behind += piece.lstrip() if not text_behind else piece
        if text_behind and not wrapper:
            return "text follows the array"
        if len(text_behind) > limit:
            return f"more than {limit:,} characters follow the records in {wrapper!r}"
    if not wrapper or text_behind.strip() == "}":
        return ""
    try:
        members = json.loads("{" + text_behind.removeprefix(","))
    except (ValueError, RecursionError):
        return f"the object does not end behind the records in {wrapper!r}"
    return refuse_members(members)


def table_rows(file: Path, raw: IO[bytes], pieces: PieceReader, delimiter: str) -> Iterator[tuple[bytes, int]]:
    """The rows of a table whose first row has the names of its columns. All values are strings.

    Errors: DataError for names that are missing or given twice, and for a row with more or fewer values.
    """
    csv.field_size_limit(sys.maxsize)  # by default a text of 128 KiB ends the reading
    rows = csv.reader(_lines(_texts(file, pieces(raw))), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            break
        except csv.Error as error:
            move = "end lines by LF, not by CR alone" if "new-line" in str(error) else "check its quotes"
            raise DataError(f"{file}, row {number + 1}: not read as a table ({error}): {move}") from None
        if not row or (names is None and row == ["sep=", ""]):  # as Excel is told the delimiter
            continue
        if names is None:
            names = [name.strip() for name in row]
            names[0] = names[0] or "index"  # as pandas writes it
            if len(set(names)) < len(names) or not all(names):
                raise DataError(
                    f"{file}: its first row must name each column once, but is {', '.join(map(repr, row[:9]))}: add"
                    " such a row, or give each column a name of its own"
                )
            continue
        number += 1
        if len(row) != len(names):
            is_short = len(row) < len(names)
            move = "write the missing ones" if is_short else f"quote values that hold the delimiter {delimiter!r}"
            raise DataError(
                f"{file}, row {number} (up to line {rows.line_num}): it has {len(row)} values for the"
                f" {len(names)} columns {', '.join(map(repr, names[:9]))}: {move}"
            )
        yield json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False).encode(), raw.tell()
    if not number:
        raise DataError(f"{file} has no rows below the names of its columns: leave it out")


def row_batches(file: Path, form: str, columns: Collection[str]) -> Iterator[tuple[Any, int]]:
    """The rows of a Parquet or Arrow file, record batches of pyarrow with only `columns`, and the bytes read so far.

    Errors: DataError for a file that lacks all of the columns, has no rows or is damaged; ConfigError without pyarrow.
    """
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"reading {form} needs the package pyarrow: {install_advice('data')}") from None

    try:
        names, batches = _opened(file, form)
        columns_read = {*columns, *(PREFERENCE if set(names) >= PREFERENCE else ())}  # a kind of their own
        chosen = [name for name in names if name in columns_read]
        if not chosen:
            raise DataError(
                f"{file} has the columns {', '.join(map(repr, names[:9]))} but none of "
                f"{', '.join(map(repr, sorted(columns)))}: name the right ones"
            )
        has_rows = False
        for batch, upto_bytes in batches(chosen):
            for first in range(0, batch.num_rows, _ROWS):
                has_rows = True
                yield batch.slice(first, _ROWS), upto_bytes
        if not has_rows:
            raise DataError(f"{file} has no rows: leave it out")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as {form.capitalize()} ({error}): write or copy it again") from None


def _opened(file: Path, form: str) -> tuple[list[str], Callable[[list[str]], Iterator[tuple[Any, int]]]]:
    """The names of the columns, and from some of them to their record batches with the bytes read so far."""
    import pyarrow
    import pyarrow.parquet

    if form == "parquet":
        table, stored_bytes = pyarrow.parquet.ParquetFile(file), file.stat().st_size

        def parquet_batches(chosen: list[str]) -> Iterator[tuple[Any, int]]:
            end = 0
            for batch in table.iter_batches(batch_size=_ROWS, columns=chosen):
                end += batch.num_rows
                yield batch, stored_bytes * end // table.metadata.num_rows

        return list(table.schema_arrow.names), parquet_batches
    source = pyarrow.memory_map(str(file))
    try:
        stream = pyarrow.ipc.open_stream(source)
        all_batches: Iterator[Any] = iter(stream)
    except pyarrow.ArrowInvalid:  # a file of batches with an index at its end
        stream = pyarrow.ipc.open_file(source)
        all_batches = (stream.get_batch(place) for place in range(stream.num_record_batches))
    return list(stream.schema.names), lambda chosen: ((batch.select(chosen), source.tell()) for batch in all_batches)


def as_arrow(batches: Sequence[Any]) -> bytes:
    """Record batches as a stream of Arrow's."""
    import pyarrow

    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


_RECORD_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".arrow", ".txt", ".gz", ".zst", ".bz2", ".xz")


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of Hugging Face datasets wrote the folder."""
    return "splits" in _json(folder / "dataset_dict.json") or "_data_files" in _json(folder / "state.json")


def files_of_folder(folder: Path) -> list[Path]:
    """The data files of a folder: what `save_to_disk` of Hugging Face datasets lists, else its Parquet files.

    Errors: DataError for a folder with several splits, or with other files.
    """
    if (splits := _json(folder / "dataset_dict.json").get("splits")) is not None:
        names = [str(name) for name in splits] if isinstance(splits, list) else []
        if len(names) != 1:
            choices = ", ".join(str(folder / name) for name in names)
            raise DataError(f"{folder} holds the splits {', '.join(names)}: name the one to train on: {choices}")
        return files_of_folder(_inside(folder, names[0]))
    state = _json(folder / "state.json")
    if isinstance(listed := state.get("_data_files"), list):
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise DataError(f"{folder} is a selection of its rows: save it again after flatten_indices()")
        return [_inside(folder, str(entry.get("filename"))) for entry in listed if isinstance(entry, dict)]
    hidden = ((path, path.relative_to(folder)) for path in sorted(folder.rglob("*")))
    places = {path: place for path, place in hidden if not any(part.startswith(".") for part in place.parts)}
    files = [path for path in places if path.suffix.lower() in (".parquet", ".pq") and path.is_file()]
    if not files:
        suffixes = Counter(
            "**/" * (place.parent != Path()) + f"*{path.suffix}"
            for path, place in places.items()
            if path.is_file() and path.suffix.lower() in _RECORD_SUFFIXES
        )
        (pattern, _), *_ = [*suffixes.most_common(1), ("*.jsonl", 0)]
        raise DataError(
            f"{folder} is a folder without Parquet files, and none that `save_to_disk` of datasets wrote: name files,"
            f" for example {str(folder / pattern)!r}"
        )
    splits_of = {path: match.group(1) for path in files if (match := _SPLIT.search(places[path].as_posix().lower()))}
    if len(names := sorted(set(splits_of.values()))) > 1:
        first = {name: next(path for path in files if splits_of.get(path) == name) for name in names}
        patterns = ", ".join(repr(_pattern(first[name], name)) for name in names)
        raise DataError(f"{folder} holds the splits {', '.join(names)}: name the files of one: {patterns}")
    return files


def _pattern(path: Path, split: str) -> str:
    """A glob for the files of a split, from one of them."""
    if split in path.name.lower():
        return str(path.with_name(path.name[: path.name.lower().index(split) + len(split)] + f"*{path.suffix}"))
    return str(path.with_name(f"*{path.suffix}"))


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _inside(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise DataError(f"{folder} lists {name!r}, which lies outside of it: name the files themselves")
    return folder / name


def _texts(file: Path, pieces: Iterator[bytes]) -> Iterator[tuple[str, bool]]:
    """The pieces of a file as text, without a byte order mark, and whether each is the last."""
    decoder, num_bytes, is_first = codecs.getincrementaldecoder("utf-8")(), 0, True
    try:
        for piece in pieces:
            text = decoder.decode(piece)
            num_bytes += len(piece)
            yield (text.removeprefix("\ufeff") if is_first else text), False
            is_first = is_first and not text
        yield decoder.decode(b"", final=True), True
    except UnicodeDecodeError as error:
        place = num_bytes + error.start + 1
        raise DataError(f"{file}: near byte {place:,}: not UTF-8 ({error.reason}): convert the file to UTF-8") from None


def _after_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    assert match is not None
    return match.end()


def _lines(texts: Iterator[tuple[str, bool]]) -> Iterator[str]:
    """The lines of a text with their ends."""
    rest = ""
    for text, is_last in texts:
        *whole, rest = (rest + text).split("\n")
        yield from (f"{line}\n" for line in whole)
        if is_last and rest:
            yield rest
