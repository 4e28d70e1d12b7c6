"""Which batches to measure: texts x longest text, up to limits, by what the batches so far have shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.reproducible import exp, log

Choice = Literal["adaptive", "random"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
Shape = tuple[int, int]  # texts, tokens of the longest

_SPAN = 16  # the most texts of a length over the fewest to measure: smaller batches say little about large ones
_CLIMB = 2  # texts of a rung over those of the one below
_RUNGS_A_LENGTH = 6  # so many batches of the allowance make one length
_SETTLED = 1.15  # fewest texts out of memory over most that fit, where the search between them ends
_TRIES = 200  # draws before a random choice gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeLimits:
    """At most `max_rows` texts of `max_length` tokens, `max_tokens` with padding in a batch, `num_batches` batches."""

    max_rows: int
    max_length: int
    max_tokens: int
    num_batches: int

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_length", "max_tokens", "num_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: 1 or more is needed")
        if self.max_tokens < self.max_length:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, less than one text of max_length {self.max_length}: raise it"
            )

    def rows_at(self, longest: int) -> int:
        """The most texts of a batch of this length."""
        return max(1, min(self.max_rows, self.max_tokens // longest))


def next_memory_shape(done: Mapping[Shape, bool], limits: ShapeLimits, choice: Choice, seed: int) -> Shape | None:
    """The batch to measure next, or None at the end; a pure function, so that a series cut short goes on as it was.

    `done` maps each shape so far to whether it ran out of memory; no shape that holds one of those is chosen.
    "adaptive" climbs at each length of a geometric grid from a sixteenth of the limit to the limit, or to where memory
    ends, which it then brackets; the rest of the allowance is drawn log-uniformly over the same lengths and texts, as
    is all of "random" but for the corners.
    """
    if len(done) >= limits.num_batches:
        return None
    if choice == "adaptive":
        for longest in _lengths(limits):
            shape = _rung(done, limits, longest)
            if shape is not None:
                return shape
    corners = ((1, limits.max_length), (limits.rows_at(limits.max_length), limits.max_length), (limits.rows_at(1), 1))
    for shape in corners:  # the memory model holds no further than these
        if shape not in done and not _hopeless(done, shape):
            return shape
    generator = np.random.default_rng((seed, len(done)))
    for _ in range(_TRIES):
        longest = _log_uniform(generator, 1, limits.max_length)
        most = _room(done, limits, longest)
        shape = (_log_uniform(generator, max(1, most // _SPAN), most), longest)
        if shape not in done and not _hopeless(done, shape):
            return shape
    return None


def _lengths(limits: ShapeLimits) -> list[int]:
    """A geometric grid, longest first, then the shortest, then ever finer between them."""
    count = max(2, min(limits.num_batches // _RUNGS_A_LENGTH, limits.max_length))
    grid = np.unique(np.geomspace(1, limits.max_length, count).round().astype(int)).tolist()
    order, stride = [len(grid) - 1], len(grid)
    while stride > 1:
        stride = (stride + 1) // 2
        order += [place for place in range(0, len(grid), stride) if place not in order]
    return [grid[place] for place in order]


def _rung(done: Mapping[Shape, bool], limits: ShapeLimits, longest: int) -> Shape | None:
    """The next batch to try at a length."""
    most, fits, fails = limits.rows_at(longest), 0, limits.rows_at(longest) + 1
    for (some, length), failed in done.items():
        if failed and length <= longest:
            fails = min(fails, some)
        elif not failed and length == longest:
            fits = max(fits, some)
    rows = min(max(1, most // _SPAN), _room(done, limits, longest))
    while rows < most and (rows, longest) in done:
        rows = min(most, rows * _CLIMB)
    if rows < fails:
        return None if (rows, longest) in done else (rows, longest)
    if fails > most or fails <= max(fits + 1, _SETTLED * fits):
        return None
    middle = round(math.sqrt(fits * fails)) if fits else max(1, fails // 4)
    return (middle, longest) if fits < middle < fails else None


def _room(done: Mapping[Shape, bool], limits: ShapeLimits, longest: int) -> int:
    """The most texts worth a try: no more tokens than a batch of longer texts that ran out of memory."""
    most = limits.rows_at(longest)
    for (rows, length), failed in done.items():
        if failed:
            most = min(most, rows - 1 if length <= longest else rows * length // longest)
    return max(1, most)


def _hopeless(done: Mapping[Shape, bool], shape: Shape) -> bool:
    return any(failed and rows <= shape[0] and length <= shape[1] for (rows, length), failed in done.items())


def _log_uniform(generator: np.random.Generator, least: int, most: int) -> int:
    """`least` to `most`."""
    return min(most, int(exp(generator.uniform(log(least), log(most + 1)))))
