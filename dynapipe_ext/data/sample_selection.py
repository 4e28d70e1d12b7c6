"""Which samples of prepared data a run takes: a mixture by weights, and a part held out for evaluation."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray
from dynapipe_ext.data.batches import permutation
from dynapipe_ext.data.dataset import TokenDataset, TokenSample
from dynapipe_ext.data.length_bounds import SideBounds, TaskBounds
from dynapipe_ext.errors import ConfigError, DataError, check_integer, did_you_mean, reason, refuse_unknown, short
from dynapipe_ext.toml_text import parse_toml

_INPUT, _TARGET, _WEIGHT = "max_input_len", "max_target_len", "weight"


@dataclass(frozen=True, slots=True)
class Tasks:
    """The bounds of each task's sides, and the weights of all tasks where the file has weights."""

    bounds: TaskBounds = field(default_factory=TaskBounds)
    weights: Mapping[str, Fraction] = field(default_factory=dict)


def read_tasks(path: str, others: SideBounds) -> Tasks:
    """The tasks of a file (none for ""); `others` bounds the tasks and sides that it does not name.

    Errors: ConfigError naming file, task and value.
    """
    for name, most in _sides(others):
        check_integer(name, most, least=0)
    if not path:
        return Tasks(TaskBounds(others))
    named, weights = {}, {}
    for task, table in _tables(path).items():
        where = f"{path}: task {task!r}"
        if not isinstance(table, dict):
            raise ConfigError(f"{where} is {short(table)} but must be a table with {_INPUT}, {_TARGET} or {_WEIGHT}")
        refuse_unknown(table, (_INPUT, _TARGET, _WEIGHT), where)
        sides = {name: table.get(name, most) for name, most in _sides(others)}
        for name, most in sides.items():
            check_integer(f"{where}: {name}", most, least=0)
        named[task] = SideBounds(*sides.values())
        if _WEIGHT in table:
            weights[task] = _weight(table[_WEIGHT], f"{where}: {_WEIGHT}")
    if not named:
        raise ConfigError(f"{path} names no task: write a table for each, like [summarize], or leave it out")
    if without := [task for task in named if weights and task not in weights]:
        raise ConfigError(f"{path}: task {without[0]!r} has no {_WEIGHT} but other tasks have: give each one")
    return Tasks(TaskBounds(others, named), weights)


def unknown_tasks(tasks: Tasks, data_tasks: Iterable[str]) -> str:
    """A message about a task of the file that the data do not have; empty where there is none."""
    data_tasks = list(data_tasks)
    missing = [task for task in tasks.bounds.named if task not in data_tasks]
    if not missing:
        return ""
    shown = ", ".join(map(repr, data_tasks[:9])) + (", ..." if len(data_tasks) > 9 else "")
    return (
        f"the tasks file names {missing[0]!r} but the data have the tasks {shown}: correct it, or remove it there"
        f"{did_you_mean(missing[0], data_tasks)}"
    )


def check_tasks(tasks: Tasks, data: TokenDataset) -> None:
    """Errors: ConfigError for a task that the data do not have, or that lacks a weight where others have one; DataError
    for a prepared sample that has more tokens on a side than its task's bound, and for bounds on chats."""
    if fault := unknown_tasks(tasks, data.tasks):
        raise ConfigError(fault)
    if without := [task for task in data.tasks if tasks.weights and task not in tasks.weights]:
        raise ConfigError(f"the data have the task {without[0]!r}, but the tasks file gives it no {_WEIGHT}: add it")
    if not tasks.bounds.bind:
        return
    if data.targets is not None:
        raise DataError(
            f"{data.directory} holds chats, which have no input and target sides: leave out {_INPUT} and {_TARGET}"
        )
    targets = data.lengths[:, 0] + 1 - data.first_target
    sides = np.array([astuple(tasks.bounds.of(task)) for task in data.tasks], np.int64)[data.task_ids]
    for side, most, counts in zip(("input", "target"), sides.T, (data.first_target, targets), strict=True):
        for sample in np.flatnonzero((most > 0) & (counts > most))[:1]:
            raise DataError(
                f"{data.directory}: sample {sample} (task {data.tasks[data.task_ids[sample]]!r}) has"
                f" {counts[sample]} {side} tokens but max_{side}_len is {most[sample]}: raise it, or prepare the data"
                " again with it and --truncate"
            )


def _sides(others: SideBounds) -> tuple[tuple[str, int], tuple[str, int]]:
    return (_INPUT, others.input), (_TARGET, others.target)


def _tables(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        tables = json.loads(text) if Path(path).suffix.lower() == ".json" else parse_toml(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a file of tasks: {reason(error)}") from error
    if not isinstance(tables, dict):
        raise ConfigError(f"{path} must hold an object of tasks, but holds {short(tables)}")
    return tables


def _weight(value: object, where: str) -> Fraction:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{where} is {short(value)} but must be a number above 0, like 0.7")
    return Fraction(str(value))


_MOST_TIMES = 10_000  # of one sample in an epoch: more is a mistake in the weights
_WEIGHTED = re.compile(r"(.+)=([0-9.]+(?:[eE][-+]?[0-9]+)?)")
_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WeightedFile:
    """A file and its weight in a mixture; 0 where it has none."""

    path: str
    weight: Fraction

    @classmethod
    def parse(cls, text: str) -> WeightedFile:
        """Parse a path, or PATH=WEIGHT where no file has the whole text as its name. Errors: ConfigError for a bad
        weight.

        >>> WeightedFile.parse("en.jsonl=0.7"), WeightedFile.parse("de.jsonl").weight
        (WeightedFile(path='en.jsonl', weight=Fraction(7, 10)), Fraction(0, 1))
        """
        match = _WEIGHTED.fullmatch(text)
        if match is None or Path(text).exists():
            return cls(text, Fraction(0))
        try:
            weight = Fraction(match[2])
        except ValueError:
            weight = Fraction(0)
        if weight <= 0:
            raise ConfigError(f"{short(text)} gives the weight {match[2]} but it must be above 0, like 0.7")
        return cls(match[1], weight)


def weighted_files(texts: Iterable[str]) -> tuple[WeightedFile, ...]:
    """The files that `--data` and [data] mixture name. Errors: ConfigError for weights on some of them only, or a file
    named twice."""
    files = tuple(map(WeightedFile.parse, texts))
    without = [file.path for file in files if not file.weight]
    if 0 < len(without) < len(files):
        raise ConfigError(f"{without[0]} has no weight but other files have: give each one, like {without[0]}=0.5")
    paths = [file.path for file in files]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ConfigError(f"{twice[0]} is given twice: name every file once, with the sum of its weights")
    return files


def data_settings(texts: Sequence[str]) -> dict[str, Any]:
    """The settings under [data] for the values of `--data`. Errors: as for `weighted_files`."""
    files = weighted_files(texts)
    return {"path": files[0].path, "mixture": ()} if len(files) == 1 else {"path": "", "mixture": tuple(texts)}


def samples_of_epoch(
    parts: Sequence[_Indices], weights: Sequence[Fraction], *, names: Sequence[str], seed: int
) -> _Indices:
    """Indices of an epoch in which each part has its weight's share of the samples, to the nearest sample.

    The epoch is the shortest that leaves no sample out. The part that is largest for its weight occurs once. The others
    are repeated; `seed` draws the samples of an incomplete pass.

    >>> parts = np.arange(4), np.arange(4, 6)
    >>> samples_of_epoch(parts, (Fraction(1, 2), Fraction(1, 2)), names="ab", seed=0).tolist()
    [0, 1, 2, 3, 4, 4, 5, 5]

    Errors: ConfigError where a part would be repeated more than 10,000 times.
    """
    per_weight = max(len(part) / weight for part, weight in zip(parts, weights, strict=True))
    indices = []
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        times, rest = divmod(max(len(part), round(per_weight * weight)), len(part))
        if times >= _MOST_TIMES:
            raise ConfigError(
                f"{names[number]} has {len(part)} samples, of which each would be trained {times:,}"
                f" times an epoch but at most {_MOST_TIMES:,} are allowed: lower its weight, or leave out samples of"
                " the other files"
            )
        drawn = part[permutation(len(part), seed=seed, epoch=number)[:rest]]
        indices.append(np.sort(np.concatenate([np.repeat(part, times), drawn])))
    return np.concatenate(indices)


@dataclass(frozen=True, slots=True, eq=False)
class SampleSubset:
    """The samples of `whole` that `indices` name, numbered from 0 here, with their `lengths`."""

    whole: TokenDataset
    indices: npt.NDArray[np.int64]
    lengths: LengthArray

    @classmethod
    def of(cls, whole: TokenDataset, indices: npt.NDArray[np.int64]) -> SampleSubset:
        return cls(whole, indices, whole.lengths[indices])

    @property
    def samples_fingerprint(self) -> str | None:
        """sha256 of the whole data's fingerprint and of the indices; None where the whole has no fingerprint."""
        if (whole := self.whole.samples_fingerprint) is None:
            return None
        return hashlib.sha256(whole.encode() + np.ascontiguousarray(self.indices, "<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> TokenSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside of the {len(self)} chosen ones of {self.whole.directory}")
        return replace(self.whole[int(self.indices[index])], index=int(index))


def format_ranges(numbers: Iterable[int]) -> str:
    """Return the numbers in ascending order, neighbours as a range.

    >>> format_ranges([12, 3, 4, 5, 3, 8])
    '3-5, 8, 12'
    """
    ranges: list[list[int]] = []
    for number in sorted({*numbers}):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def describe_samples(whole: TokenDataset, selected: _Indices, paths: Sequence[str], indices: Iterable[int]) -> str:
    """Return which samples of the `whole` data `indices` into those `selected` from it are: their numbers from 0, in
    each file for data of several. `paths` name the files, if they are files."""
    numbers = sorted({int(selected[index]) for index in indices})
    sizes = whole.file_sizes
    if len(sizes) < 2:
        return format_ranges(numbers)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    of_file: dict[int, list[int]] = {}
    for number in numbers:
        file = int(np.searchsorted(starts, number, side="right")) - 1
        of_file.setdefault(file, []).append(number - int(starts[file]))
    names = paths if len(paths) == len(sizes) else [f"file {file + 1}" for file in range(len(sizes))]
    return "; ".join(f"{format_ranges(own)} of {names[file]}" for file, own in of_file.items())


def hold_out(whole: TokenDataset, fraction: float, *, seed: int) -> tuple[SampleSubset, SampleSubset]:
    """(training part, held-out part). `seed` draws the held-out samples, a fraction of all, rounded.

    Both parts keep the order of the data. Errors: ConfigError where one of them would be empty.
    """
    num_samples = len(whole)
    num_held = round(fraction * num_samples)
    if not 0 < num_held < num_samples:
        raise ConfigError(
            f"a fraction of {fraction:g} of {num_samples} samples holds out {num_held}, but must leave at least one on"
            " each side: change it, or evaluate on other data"
        )
    order = permutation(num_samples, seed=seed, epoch=0)
    held, trained = np.sort(order[:num_held]), np.sort(order[num_held:])
    return SampleSubset.of(whole, trained), SampleSubset.of(whole, held)
