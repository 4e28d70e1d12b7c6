"""Several files as one data set, each with its share of the samples that training sees."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.data.batches import permutation
from dynapipe_ext.errors import ConfigError, short

_MOST_TIMES = 10_000  # a sample in an epoch: more is a mistake in the weights
_WEIGHTED = re.compile(r"(.+)=([0-9.]+(?:[eE][-+]?[0-9]+)?)")
_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WeightedFile:
    """A file and its weight among others; 0 where none is given."""

    path: str
    weight: Fraction

    @classmethod
    def parse(cls, text: str) -> WeightedFile:
        """A path, or PATH=WEIGHT where no file has that whole name. Errors: ConfigError for a weight that is none.

        >>> WeightedFile.parse("en.jsonl=0.7"), WeightedFile.parse("de.jsonl").weight
        (WeightedFile(path='en.jsonl', weight=Fraction(7, 10)), Fraction(0, 1))
        """
        found = _WEIGHTED.fullmatch(text)
        if found is None or Path(text).exists():
            return cls(text, Fraction(0))
        try:
            weight = Fraction(found[2])
        except ValueError:
            weight = Fraction(0)
        if weight <= 0:
            raise ConfigError(f"{short(text)} gives the weight {found[2]} but it must be above 0, like 0.7")
        return cls(found[1], weight)


def weighted_files(texts: Iterable[str]) -> tuple[WeightedFile, ...]:
    """What `--data` and [data] mixture name. Errors: ConfigError for weights on some of them, or a file named twice."""
    files = tuple(map(WeightedFile.parse, texts))
    without = [file.path for file in files if not file.weight]
    if 0 < len(without) < len(files):
        raise ConfigError(f"{without[0]} has no weight but other files have: give each one, like {without[0]}=0.5")
    paths = [file.path for file in files]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ConfigError(f"{twice[0]} is given twice: name every file once, with the sum of its weights")
    return files


def data_settings(texts: Sequence[str]) -> dict[str, Any]:
    """The settings under [data] that the words of `--data` stand for. Errors: as `weighted_files`."""
    files = weighted_files(texts)
    return {"path": files[0].path, "mixture": ()} if len(files) == 1 else {"path": "", "mixture": tuple(texts)}


def samples_of_epoch(
    parts: Sequence[_Indices], weights: Sequence[Fraction], *, names: Sequence[str], seed: int
) -> _Indices:
    """Indices of an epoch in which part k has its weight's share of the samples, to the nearest one.

    An epoch is just as long as one that leaves no sample out: the part that is largest for its weight goes in once, the
    others as many times as that needs, with the rest of a pass drawn by `seed`.

    >>> parts = np.arange(4), np.arange(4, 6)
    >>> samples_of_epoch(parts, (Fraction(1, 2), Fraction(1, 2)), names="ab", seed=0).tolist()
    [0, 1, 2, 3, 4, 4, 5, 5]

    Errors: ConfigError where a part would go in more than 10,000 times.
    """
    per_weight = max(len(part) / weight for part, weight in zip(parts, weights, strict=True))
    chosen = []
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        times, rest = divmod(max(len(part), round(per_weight * weight)), len(part))
        if times >= _MOST_TIMES:
            raise ConfigError(
                f"{names[number]} has {len(part)} samples, of which each would be trained {times:,}"
                f" times an epoch but at most {_MOST_TIMES:,} are taken: lower its weight, or leave the others' samples"
                " out"
            )
        drawn = part[permutation(len(part), seed=seed, epoch=number)[:rest]]
        chosen.append(np.sort(np.concatenate([np.repeat(part, times), drawn])))
    return np.concatenate(chosen)
