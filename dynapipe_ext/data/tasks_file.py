"""A file of tasks: the bounds of their inputs and targets, and their shares of the samples that training sees.

    [summarize]
    max_input_len = 2048
    max_target_len = 256
    weight = 2

TOML, or JSON of the same form by its suffix. A sample's task is its record's field "task", else "unnamed". A bound that
is not given is that of all tasks.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from dynapipe_ext.config_values import refuse_unknown
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.length_bounds import SideBounds, TaskBounds
from dynapipe_ext.errors import ConfigError, DataError, check_integer, reason, short
from dynapipe_ext.suggestion import did_you_mean

_INPUT, _TARGET, _WEIGHT = "max_input_len", "max_target_len", "weight"


@dataclass(frozen=True, slots=True)
class Tasks:
    """The bounds of each task's sides; and where the file has weights, those of all its tasks."""

    bounds: TaskBounds = field(default_factory=TaskBounds)
    weights: Mapping[str, Fraction] = field(default_factory=dict)


def read_tasks(path: str, others: SideBounds) -> Tasks:
    """What the file says, `others` being the bounds of all tasks; without a file ("") these alone.

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


def unknown_tasks(tasks: Tasks, known: Iterable[str]) -> str:
    """What to say of a task that the file names and the data do not have; empty where there is none."""
    known = list(known)
    missing = [task for task in tasks.bounds.named if task not in known]
    if not missing:
        return ""
    has = ", ".join(map(repr, known[:9])) + (", ..." if len(known) > 9 else "")
    return (
        f"the tasks file names {missing[0]!r} but the data have the tasks {has}: correct it, or remove it there"
        f"{did_you_mean(missing[0], known)}"
    )


def check_tasks(tasks: Tasks, data: TokenDataset) -> None:
    """Errors: ConfigError for tasks that the data do not have, or that have no weight beside others; DataError for a
    sample that was prepared with more tokens on a side than its task's bound, or that has no two sides."""
    if said := unknown_tasks(tasks, data.tasks):
        raise ConfigError(said)
    if without := [task for task in data.tasks if tasks.weights and task not in tasks.weights]:
        raise ConfigError(f"the data have the task {without[0]!r}, to which the tasks file gives no {_WEIGHT}: add it")
    if not tasks.bounds.bind:
        return
    if data.targets is not None:
        raise DataError(
            f"{data.directory} holds chats, whose turns are no input and target: leave out {_INPUT} and {_TARGET}"
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
        tables = json.loads(text) if Path(path).suffix.lower() == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a file of tasks: {reason(error)}") from error
    if not isinstance(tables, dict):
        raise ConfigError(f"{path} must hold an object of tasks, but holds {short(tables)}")
    return tables


def _weight(value: object, where: str) -> Fraction:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{where} is {short(value)} but must be a number above 0, like 0.7")
    return Fraction(str(value))
