"""Training texts, one at a time: out of records, or made up by a generator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dynapipe_ext.errors import ConfigError, DataError

PREFERENCE = frozenset(("chosen", "rejected"))  # the fields of data for preferences


@dataclass(frozen=True, slots=True)
class Example:
    """One training text: `input` is the prompt, and only `target` carries loss. Plain text has an empty input. `file`
    is where it came from, if from a file, and `place` its place there in the words of messages."""

    task: str
    input: str
    target: str
    file: str = field(default="", compare=False, repr=False)
    place: str = field(default="", compare=False, repr=False)

    @property
    def where(self) -> str:
        """The beginning of a message about it; empty where it came from no file."""
        return f"{self.place}: " if self.place else ""


def decoded(text: bytes, *, where: str) -> str:
    """Errors: DataError that begins with `where` for bytes that are not UTF-8."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise DataError(
            f"{where}: byte {error.start + 1} (0x{byte:02x}) is not UTF-8: convert the file to UTF-8"
        ) from None


class RepeatedKeyError(ValueError):
    """An object of JSON has a key twice, of which readers would take the last value without a word."""


def parsed_json(text: str) -> object:
    """The value that a text of JSON stands for. Errors: those of `json.loads`; RepeatedKeyError at any depth."""
    return _DECODER.decode(text)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RepeatedKeyError(f"an object has the key {twice[:80]!r} twice")
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def parse_line(line: bytes, *, where: str) -> object:
    """The value in one line of JSON. Errors: DataError that begins with `where`."""
    text = decoded(line, where=where)
    try:
        return parsed_json(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}, column {error.colno}: not JSON ({error.msg}): write one object a line") from None
    except RepeatedKeyError as error:
        raise DataError(f"{where}: {error}: keep one of the two") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: JSON that cannot be read ({error}): write one flat object a line") from None


def as_object(record: object, *, where: str, fields: str = "write one object a line") -> dict[str, object]:
    """The record, which is an object. Errors: DataError that begins with `where` and ends with `fields`."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: the record is {json_type(record)}, not an object: {fields}")
    return record


def lacking(record: Mapping[str, object], missing: Sequence[str], *, where: str, fields: str) -> DataError:
    """The error for a record without the fields `missing`; it ends with the advice `fields`. Preference data, which
    people mistake for training data, are called by their name."""
    present = ", ".join(map(repr, list(record)[:9])) or "no fields"
    if record.keys() >= PREFERENCE:
        return DataError(
            f"{where}: preference data: the record has a 'chosen' and a 'rejected' answer (of {present}), of which loss"
            " would fall on both alike. To learn which is the better one, train with --preferences dpo (or prepare them"
            ' by --template preference). To train on the chosen ones alone, write them under "messages", or under'
            ' "response" beside their "prompt", and leave out the rejected ones'
        )
    return DataError(f"{where}: the record lacks {' and '.join(map(repr, missing))} (it has {present}): {fields}")


def string_field(record: Mapping[str, object], field: str, *, where: str) -> str:
    """The text in a field. Errors: DataError for another type and for half of a surrogate pair."""
    value = record[field]
    if not isinstance(value, str):
        raise DataError(
            f"{where}: field {field!r} is {json_type(value)} but must be a string: write its text, or remove the record"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(value[error.start]):04x}"
        raise DataError(
            f"{where}: field {field!r} holds half of a surrogate pair ({code}): write whole characters"
        ) from None
    return value


def json_type(value: object) -> str:
    if value is None:
        return "a null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")


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
    answer_letter = draw.pick("abcd")
    return f"count {answer_letter} in {' '.join(letters)}", str(letters.count(answer_letter))


def _repeat(draw: Draw) -> tuple[str, str]:
    pattern, times = draw.distinct(_NOUNS, draw.between(2, 4)), draw.between(3, 40)
    return f"repeat {times} {' '.join(pattern)}", " ".join(pattern * times)


def _lookup(draw: Draw) -> tuple[str, str]:
    keys = [f"{colour} {noun}" for colour in _COLOURS for noun in _NOUNS]
    chosen = draw.distinct(keys, draw.skewed(2, 60))
    values = draw.digits(len(chosen))
    index = draw.between(0, len(chosen) - 1)
    table = "\n".join(f"{key} is {value}" for key, value in zip(chosen, values, strict=True))
    return f"look up {chosen[index]}\n{table}", values[index]


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
