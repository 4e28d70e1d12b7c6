"""Made-up multi-task text whose lengths vary by more than a factor of a hundred.

Every family has a short prefix that names it and a target that follows from its input by a fixed rule, over a small
vocabulary, so that a tiny model learns the form of the answers within a few dozen steps. One example in eight is a
long document; these hold about half of all tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from dynapipe_ext.data.reading import Example
from dynapipe_ext.errors import ConfigError

GENERATOR_VERSION = 1  # raise it with every change of the text, so that prepared data is not reused

_T = TypeVar("_T")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NOUNS = ("sun", "moon", "tree", "river", "stone", "bird", "fish", "house", "road", "lamp",
    "door", "cup", "book", "ship", "bell", "hill", "rain", "snow", "wind", "star")  # fmt: skip
_VERBS = ("sees", "finds", "holds", "moves", "keeps", "takes", "likes", "meets")
_COLOURS = ("red", "blue", "green", "white", "black", "gold")
_NAMES = ("anna", "ben", "carla", "david", "emma", "frank", "gina", "hugo")


class Draw:
    """Choices that come out the same under every Python version: only `Random.random` is promised to be stable."""

    def __init__(self, key: str) -> None:
        self._random = random.Random(key).random

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self._random() * (high - low + 1))

    def skewed(self, low: int, high: int) -> int:
        """An integer from low to high, short ones far more often (density falls as one over the square root)."""
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
    """A long target as well: every colour of a document, in order."""
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


_SHORT, _LONG = 8, 4  # weights: eight short or middling examples of a family for four long ones
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

    Example i depends on the seed, the families and i alone, so a longer run starts with the shorter one.

    Errors: ConfigError for an unknown family or fewer than one sample.

    >>> next(generate_examples(num_samples=1, seed=3, families=["add"]))
    Example(task='add', input='add 16 53', target='69')
    """
    chosen = _checked(num_samples, families)
    return _generate(num_samples, seed, chosen)


def generator_settings(*, num_samples: int, seed: int, families: Sequence[str] | None = None) -> dict[str, object]:
    """All that the text of `generate_examples` depends on, for a fingerprint."""
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
