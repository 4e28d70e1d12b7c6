"""Training texts, one at a time: from JSON Lines files, plain or compressed, or made up by a generator."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TypeVar

from dynapipe_ext.errors import ConfigError, DataError, install_advice

_READ_BYTES = 1 << 20
_ZSTANDARD_READ_BYTES = 1 << 10  # its decoder returns everything these bytes expand to, up to 10,000 times as much
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, OSError)  # what `decompressed` raises
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PREFERENCE = frozenset(("chosen", "rejected"))
_FIELDS = 'give {"input", "target"} or {"text"}'


@dataclass(frozen=True, slots=True)
class Example:
    """One training text: `input` is the prompt, and only `target` carries loss. Plain text has an empty input. `file`
    and `line` are its place in a file, if it came from one."""

    task: str
    input: str
    target: str
    file: str = field(default="", compare=False, repr=False)
    line: int = field(default=0, compare=False, repr=False)

    @property
    def where(self) -> str:
        """Its place in the words of messages, or nothing."""
        return f"{self.file}, line {self.line}: " if self.file else ""


def read_examples(
    path: str | Path, *, pair: tuple[str, str] | None = ("input", "target"), text: str = "text"
) -> Iterator[Example]:
    """The records of a JSON Lines file in order, in constant memory (one line at a time).

    Names ending in `.gz`, `.xz`, `.zst` and `.bz2` are decompressed; other files are plain text. A record is an object
    with the two fields of `pair`, else with the field `text`, all of which is target. With `pair` None every record is
    a text. "task" is an optional name. Other fields, blank lines and a byte order mark are ignored.

    Errors: DataError with file and line number: at once for a missing file, else when the line is reached.
    """
    file = Path(path)
    if file.is_dir():
        raise DataError(f"{file} is a folder: name one .jsonl file (.gz, .xz, .zst or .bz2 if compressed)")
    check_readable(file)
    if file.is_file() and file.stat().st_size == 0:
        raise _empty(file)  # lzma would call it cut short
    return _examples(file, pair, text)


def check_readable(file: Path) -> None:
    """Errors: DataError for a path that is missing or that this user may not read."""
    if not file.exists():
        raise DataError(f"{file} does not exist: check the path given for the data")
    if not (file.is_file() or file.is_dir()):
        raise DataError(f"{file} is a pipe or a device, but data are read several times: write them to a file first")
    if not os.access(file, os.R_OK):
        raise DataError(f"{file} may not be read by this user: check its permissions")


def _examples(file: Path, pair: tuple[str, str] | None, text: str) -> Iterator[Example]:
    has_records = False
    for number, line in _numbered_lines(file):
        if line.strip():
            has_records = True
            example = parse_record(line, where=f"{file}, line {number}", pair=pair, text=text)
            yield replace(example, file=str(file), line=number)
    if not has_records:
        raise _empty(file)


def _empty(file: Path) -> DataError:
    return DataError(f"{file} is empty: it needs at least one record a line, {_FIELDS}")


def parse_record(
    line: bytes, *, where: str, pair: tuple[str, str] | None = ("input", "target"), text: str = "text"
) -> Example:
    """The example in one line of JSON; `where` opens the message of a DataError."""
    return example_of(parse_object(line, where=where, fields=_FIELDS), where=where, pair=pair, text=text)


def parse_object(line: bytes, *, where: str, fields: str = "write one object a line") -> dict[str, object]:
    """The object in one line of JSON. Errors: DataError that begins with `where`; for other values it ends with
    `fields`."""
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
        raise lacking(record, [text], where=where, fields="all records must have the field named by --text-key")
    else:
        missing = [name for name in pair if name not in record]
        fields = f'give {{"{pair[0]}", "{pair[1]}"}} or {{"{text}"}}'
        raise lacking(record, missing, where=where, fields=fields)
    if not prompt and not target and not may_be_empty:
        raise DataError(f"{where}: the record is empty (no characters to train on): remove it or fill it")
    return Example(string_field(record, "task", where=where) if "task" in record else "unnamed", prompt, target)


def lacking(record: Mapping[str, object], missing: Sequence[str], *, where: str, fields: str) -> DataError:
    """The error for a record without the fields `missing`; it ends with the advice `fields`. Preference data, which
    people mistake for training data, are called by their name."""
    present = ", ".join(map(repr, list(record)[:9])) or "no fields"
    if record.keys() >= PREFERENCE:
        return DataError(
            f"{where}: preference data are not trained here: the record has a 'chosen' and a 'rejected' answer (of"
            f" {present}), of which loss would fall on both alike. To train on the chosen ones, write them under"
            ' "messages", or under "response" beside their "prompt", and leave out the rejected ones'
        )
    return DataError(f"{where}: the record lacks {' and '.join(map(repr, missing))} (it has {present}): {fields}")


def string_field(record: Mapping[str, object], field: str, *, where: str) -> str:
    """The text in a field. Errors: DataError for another type and for half of a surrogate pair."""
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
    """The lines of the decompressed file, each with its number from 1 and without its end."""
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
    """The error for a file whose stream raised one of `DAMAGE` after `line` whole lines."""
    reason = "ends too early" if isinstance(error, EOFError) else f"cannot be read ({error})"
    place = f" after line {line}" if line else ""
    return DataError(f"{file} {reason}{place}: copy or compress it again")


def decompressed(raw: IO[bytes], suffix: str) -> Iterator[bytes]:
    """The decompressed blocks of a file with this suffix. A truncated or damaged one raises one of `DAMAGE`."""
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
    """Decompress frame by frame, since zstandard's own stream reader does not notice a truncated file."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"reading .zst needs the package zstandard: {install_advice('train')}") from None

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


GENERATOR_VERSION = 1  # raise it with every change of the text, so that prepared data are not reused

_T = TypeVar("_T")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NOUNS = ("sun", "moon", "tree", "river", "stone", "bird", "fish", "house", "road", "lamp",
    "door", "cup", "book", "ship", "bell", "hill", "rain", "snow", "wind", "star")  # fmt: skip
_VERBS = ("sees", "finds", "holds", "moves", "keeps", "takes", "likes", "meets")
_COLOURS = ("red", "blue", "green", "white", "black", "gold")
_NAMES = ("anna", "ben", "carla", "david", "emma", "frank", "gina", "hugo")


class Draw:
    """Random choices that are equal under every Python version: Python promises that only for `Random.random`."""

    def __init__(self, key: str) -> None:
        self._random = random.Random(key).random

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self._random() * (high - low + 1))

    def skewed(self, low: int, high: int) -> int:
        """An integer from low to high. Small ones are far more frequent: the density falls as one over the square
        root."""
        share = self._random()
        return low + int(share * share * (high - low + 1))

    def pick(self, choices: Sequence[_T]) -> _T:
        return choices[self.between(0, len(choices) - 1)]

    def some(self, choices: Sequence[_T], count: int) -> list[_T]:
        """`count` draws, repeats allowed."""
        return [self.pick(choices) for _ in range(count)]

    def distinct(self, choices: Sequence[_T], count: int) -> list[_T]:
        """`count` draws without repeats."""
        left = list(choices)
        return [left.pop(self.between(0, len(left) - 1)) for _ in range(count)]

    def digits(self, count: int) -> list[str]:
        return self.some("0123456789", count)


def _copy(draw: Draw) -> tuple[str, str]:
    words = " ".join(draw.some(_NOUNS, draw.between(2, 12)))
    return f"copy {words}", words


def _reverse(draw: Draw) -> tuple[str, str]:
    words = draw.some(_NOUNS, draw.between(2, 12))
    return f"reverse {' '.join(words)}", " ".join(reversed(words))


def _sort(draw: Draw) -> tuple[str, str]:
    digits = draw.digits(draw.between(3, 16))
    return f"sort {' '.join(digits)}", " ".join(sorted(digits))


def _add(draw: Draw) -> tuple[str, str]:
    left, right = draw.between(0, 99), draw.between(0, 99)
    return f"add {left} {right}", str(left + right)


def _largest(draw: Draw) -> tuple[str, str]:
    digits = draw.digits(draw.between(2, 20))
    return f"max {' '.join(digits)}", max(digits)


def _parity(draw: Draw) -> tuple[str, str]:
    bits = draw.some("01", draw.between(1, 8))
    return f"odd {' '.join(bits)}", "yes" if bits.count("1") % 2 else "no"


def _majority(draw: Draw) -> tuple[str, str]:
    bits = draw.some("01", 2 * draw.between(1, 12) + 1)
    return f"most {' '.join(bits)}", max("01", key=bits.count)


def _caesar(draw: Draw) -> tuple[str, str]:
    shift = draw.between(1, 3)
    letters = draw.some(_LETTERS, draw.between(6, 30))
    moved = [_LETTERS[(_LETTERS.index(letter) + shift) % 26] for letter in letters]
    return f"shift {shift} {' '.join(letters)}", " ".join(moved)


def _count(draw: Draw) -> tuple[str, str]:
    letters = draw.some("abcd", draw.between(8, 40))
    wanted = draw.pick("abcd")
    return f"count {wanted} in {' '.join(letters)}", str(letters.count(wanted))


def _repeat(draw: Draw) -> tuple[str, str]:
    pattern, times = draw.distinct(_NOUNS, draw.between(2, 4)), draw.between(3, 40)
    return f"repeat {times} {' '.join(pattern)}", " ".join(pattern * times)


def _lookup(draw: Draw) -> tuple[str, str]:
    keys = [f"{colour} {noun}" for colour in _COLOURS for noun in _NOUNS]
    chosen = draw.distinct(keys, draw.skewed(2, 60))
    values = draw.digits(len(chosen))
    wanted = draw.between(0, len(chosen) - 1)
    table = "\n".join(f"{key} is {value}" for key, value in zip(chosen, values, strict=True))
    return f"look up {chosen[wanted]}\n{table}", values[wanted]


def _needle(draw: Draw) -> tuple[str, str]:
    sentences = _document(draw, draw.skewed(120, 680))
    name, code = draw.pick(_NAMES), " ".join(draw.digits(4))
    sentences.insert(draw.between(0, len(sentences)), f"the code of {name} is {code} .")
    return f"find the code of {name}\n{' '.join(sentences)}", code


def _first_sentence(draw: Draw) -> tuple[str, str]:
    sentences = _document(draw, draw.skewed(60, 680))
    return f"first sentence\n{' '.join(sentences)}", sentences[0]


def _extract(draw: Draw) -> tuple[str, str]:
    """A long input with a long target: every colour of a document, in order."""
    sentences = _document(draw, draw.skewed(60, 500))
    colours = [word for sentence in sentences for word in sentence.split() if word in _COLOURS]
    return f"list the colours\n{' '.join(sentences)}", " ".join(colours)


def _document(draw: Draw, num_words: int) -> list[str]:
    """Sentences of eight words (the full stop counts) that hold at most `num_words`, and at least one sentence."""
    return [
        f"{draw.pick(_NAMES)} {draw.pick(_VERBS)} the {draw.pick(_COLOURS)} {draw.pick(_NOUNS)} "
        f"by {draw.pick(_NOUNS)} ."
        for _ in range(max(1, num_words // 8))
    ]


_SHORT, _LONG = 8, 4  # weights of families: those with short or middling examples are twice as frequent
_FAMILIES: dict[str, tuple[int, Callable[[Draw], tuple[str, str]]]] = {
    "copy": (_SHORT, _copy),
    "reverse": (_SHORT, _reverse),
    "sort": (_SHORT, _sort),
    "add": (_SHORT, _add),
    "largest": (_SHORT, _largest),
    "parity": (_SHORT, _parity),
    "majority": (_SHORT, _majority),
    "caesar": (_SHORT, _caesar),
    "count": (_SHORT, _count),
    "repeat": (_SHORT, _repeat),
    "lookup": (_SHORT, _lookup),
    "needle": (_LONG, _needle),
    "first_sentence": (_LONG, _first_sentence),
    "extract": (_LONG, _extract),
}
FAMILY_NAMES: tuple[str, ...] = tuple(_FAMILIES)


def generate_examples(*, num_samples: int, seed: int, families: Sequence[str] | None = None) -> Iterator[Example]:
    """`num_samples` examples of a mixture of `families` (all by default), the same on every machine.

    Lengths vary by more than a factor of a hundred. Each family has a short prefix and a target that follows from its
    input by a fixed rule, so that a tiny model learns the form of answers within a few dozen steps. One example in
    eight is a long document; these hold about half of all tokens. Example i depends on the seed, the families and i
    alone, so a longer run starts with the shorter one.

    Errors: ConfigError for an unknown family or fewer than one sample.

    >>> next(generate_examples(num_samples=1, seed=3, families=["add"]))
    Example(task='add', input='add 16 53', target='69')
    """
    chosen = _checked(num_samples, families)
    return _generate(num_samples, seed, chosen)


def generator_settings(*, num_samples: int, seed: int, families: Sequence[str] | None = None) -> dict[str, object]:
    """The settings that determine the text of `generate_examples`, for a fingerprint."""
    chosen = _checked(num_samples, families)
    return {"generator": GENERATOR_VERSION, "num_samples": num_samples, "seed": seed, "families": list(chosen)}


def _checked(num_samples: int, families: Sequence[str] | None) -> tuple[str, ...]:
    if num_samples < 1:
        raise ConfigError(f"num_samples is {num_samples} but must be at least 1")
    chosen = FAMILY_NAMES if families is None else tuple(families)
    if not chosen or (unknown := [name for name in chosen if name not in _FAMILIES]):
        got = repr(unknown[0]) if chosen else "an empty list"
        raise ConfigError(f"families has {got}: choose from {', '.join(FAMILY_NAMES)}")
    return chosen


def _generate(num_samples: int, seed: int, families: tuple[str, ...]) -> Iterator[Example]:
    wheel = [name for name in families for _ in range(_FAMILIES[name][0])]
    for index in range(num_samples):
        draw = Draw(f"{GENERATOR_VERSION}/{seed}/{index}")
        task = draw.pick(wheel)
        prompt, target = _FAMILIES[task][1](draw)
        yield Example(task, prompt, target)
