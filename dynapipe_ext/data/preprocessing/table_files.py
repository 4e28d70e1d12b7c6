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
from dynapipe_ext.data.preprocessing.compressed import MOST_RECORD_BYTES, too_long
from dynapipe_ext.data.preprocessing.file_heads import HEAD_BYTES, refuse_members
from dynapipe_ext.errors import ConfigError, DataError, install_advice

_MOST_ROW_CHARACTERS = 64 << 20  # of a table: its reader takes several bytes for each
_THRIFT_I32, _DICTIONARY_PAGE = 0x15, 2
_INDEX_BYTES = 8  # at most of a value's index into a dictionary, with its place in lists
_MOST_PART_BYTES = 32 << 20  # of rows that are decoded at a time
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
    stream = _from_member(file, stream, wrapper) if wrapper else stream

    def refused(reason: str) -> DataError:
        return DataError(f"{file}, item {number}: {reason}: write a JSON array of objects, or one object a line")

    for piece, is_last in stream:
        text, place = text[place:], 0
        text += piece  # in place
        if len(text) > MOST_RECORD_BYTES:
            raise too_long(file, f"item {number}")
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
                behind = itertools.chain([text[start + 1 :]], (rest for rest, _ in stream))
                if reason := "the array ends after a comma" if is_next else _refused_end(behind, wrapper):
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


def _from_member(file: Path, stream: Iterator[tuple[str, bool]], name: str) -> Iterator[tuple[str, bool]]:
    """What of a text of JSON begins with the value of an object's member, which begins within its head."""
    head, is_last = "", False
    member = re.compile(rf"[{{,]\s*{re.escape(json.dumps(name, ensure_ascii=False))}\s*:\s*(?=\[)")
    for piece, is_last in stream:
        head += piece
        if len(head) > MOST_RECORD_BYTES:
            raise too_long(file, f"before {name!r}")
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
    names: list[str] | None = None
    number = row_characters = 0

    def lines() -> Iterator[str]:
        nonlocal row_characters
        for line in _lines(file, _texts(file, pieces(raw))):
            row_characters += len(line)
            if row_characters > _MOST_ROW_CHARACTERS:  # as where a quote is not closed
                raise too_long_row(file, number + 1)
            yield line

    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        row_characters = 0
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


def too_long_row(file: Path, number: int) -> DataError:
    return DataError(
        f"{file}, row {number}: longer than {_MOST_ROW_CHARACTERS >> 20} Mi characters: close its quotes, or write JSON"
    )


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
        has_rows, number = False, 1
        for batch, upto_bytes in batches(chosen):
            for first in range(0, batch.num_rows, _ROWS):
                has_rows = True
                for part in _decoded(batch.slice(first, _ROWS), file, number):
                    yield part, upto_bytes
                    number += part.num_rows
        if not has_rows:
            raise DataError(f"{file} has no rows: leave it out")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as {form.capitalize()} ({error}): write or copy it again") from None


def _opened(file: Path, form: str) -> tuple[list[str], Callable[[list[str]], Iterator[tuple[Any, int]]]]:
    """The names of the columns, and from some of them to their record batches with the bytes read so far."""
    import pyarrow
    import pyarrow.parquet

    if form == "parquet":
        names, stored_bytes = list(pyarrow.parquet.read_schema(file).names), file.stat().st_size

        def parquet_batches(chosen: list[str]) -> Iterator[tuple[Any, int]]:
            num_rows, indexed = _reading(file, chosen)
            table, end = pyarrow.parquet.ParquetFile(file, read_dictionary=indexed), 0
            for batch in table.iter_batches(batch_size=num_rows, columns=chosen):
                end += batch.num_rows
                yield batch, stored_bytes * end // table.metadata.num_rows

        return names, parquet_batches
    source = pyarrow.memory_map(str(file))
    try:
        stream = pyarrow.ipc.open_stream(source)
        all_batches: Iterator[Any] = iter(stream)
    except pyarrow.ArrowInvalid:  # a file of batches with an index at its end
        stream = pyarrow.ipc.open_file(source)
        all_batches = (stream.get_batch(place) for place in range(stream.num_record_batches))
    return list(stream.schema.names), lambda chosen: ((batch.select(chosen), source.tell()) for batch in all_batches)


def _dictionary_bytes(raw: IO[bytes], column: Any) -> int:
    """The size of the dictionary with which a column chunk of a Parquet file begins; 0 without one. It is in the page's
    header: Thrift's compact fields 1, the kind of page (2: a dictionary), and 2, its bytes."""
    raw.seek(column.dictionary_page_offset or column.data_page_offset)
    head = iter(raw.read(16))
    values = []
    for _ in range(2):
        if next(head, 0) != _THRIFT_I32:
            return int(column.total_uncompressed_size)  # no more is known
        value = shift = 0
        for byte in head:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        values.append(value >> 1)  # zigzag, of numbers that are not negative
    kind, size = values
    return size if kind == _DICTIONARY_PAGE else 0


def _reading(file: Path, names: Collection[str]) -> tuple[int, list[str]]:
    """How many rows of some columns of a Parquet file take bounded memory, and the columns that are to be read as
    indices into dictionaries: a file of some hundred bytes may repeat one long text in each row, or in the lists of
    one. Errors: DataError for rows of which none does."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(file)
    num_rows, indexed = _ROWS, set[str]()
    with file.open("rb") as raw:
        for group_number in range(metadata.num_row_groups):
            group = metadata.row_group(group_number)
            row_bytes = 0
            for place in range(group.num_columns):
                column = group.column(place)
                if column.path_in_schema.partition(".")[0] not in names or column.physical_type != "BYTE_ARRAY":
                    continue
                size, rest = _dictionary_bytes(raw, column), column.total_uncompressed_size
                own_bytes = rest // max(1, group.num_rows)
                is_nested = metadata.schema.column(place).max_repetition_level > 0
                if size and is_nested and rest - size <= _INDEX_BYTES * (column.num_values + 1024):
                    indexed.add(column.path_in_schema)
                elif size:
                    own_bytes += size * -(-column.num_values // max(1, group.num_rows))
                row_bytes += own_bytes
                if own_bytes > MOST_RECORD_BYTES:
                    raise too_long(file, f"a row of group {group_number + 1}")
            num_rows = min(num_rows, max(1, _MOST_PART_BYTES // max(1, row_bytes)))
    return num_rows, sorted(indexed)


def _decoded(batch: Any, file: Path, number: int) -> Iterator[Any]:
    """The rows of a batch without dictionaries, in parts that take bounded memory; `number` is that of its first row.
    Errors: DataError for a row that takes too much by itself."""
    import pyarrow

    plain = pyarrow.schema([field.with_type(_plain_type(field.type)) for field in batch.schema])
    if plain.equals(batch.schema):
        yield batch
        return
    num_bytes = sum(map(_num_bytes, batch.columns))
    if num_bytes > _MOST_PART_BYTES and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _decoded(batch.slice(0, half), file, number)
        yield from _decoded(batch.slice(half), file, number + half)
        return
    if num_bytes > MOST_RECORD_BYTES:
        raise too_long(file, f"row {number}")
    yield pyarrow.Table.from_batches([batch]).cast(plain).combine_chunks().to_batches()[0]


def _plain_type(kind: Any) -> Any:
    """The type of the same values without dictionaries, at any depth."""
    import pyarrow

    if pyarrow.types.is_dictionary(kind):
        return kind.value_type
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pyarrow.types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_plain_type(field.type)) for field in kind])
    return kind


def _num_bytes(array: Any) -> int:
    """The bytes of an array's values without dictionaries."""
    import pyarrow
    import pyarrow.compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        if not (pyarrow.types.is_string(kind.value_type) or pyarrow.types.is_large_string(kind.value_type)):
            return len(array) * max(1, int(array.dictionary.nbytes))
        sizes = pyarrow.compute.binary_length(array.dictionary).cast(pyarrow.int64())
        return int(pyarrow.compute.sum(sizes.take(array.indices)).as_py() or 0)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return _num_bytes(array.flatten())
    if pyarrow.types.is_struct(kind):
        return sum(map(_num_bytes, array.flatten()))
    return int(array.nbytes)


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


def _lines(file: Path, texts: Iterator[tuple[str, bool]]) -> Iterator[str]:
    """The lines of a text with their ends."""
    rest, number = "", 0  # the first line is that of names
    for text, is_last in texts:
        if len(rest) > _MOST_ROW_CHARACTERS:
            raise too_long_row(file, number)
        number += text.count("\n")
        *whole, rest = (rest + text).split("\n")
        yield from (f"{line}\n" for line in whole)
        if is_last and rest:
            yield rest
