"""A run so far as figures over its steps, in a bounded number of values however long it runs: what its page draws.

events.jsonl ─► RunEvents ─► RunSoFar      all steps at once: of a run that has ended, or that a page begins with
                StepDone ──► RunSeries     one step more, in constant time: while the run goes on
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dynapipe_ext.executor.events import AllRanks, CostsFit, DriftingShape, EvalDone, StepDone
from dynapipe_ext.tools.account.report import RunFacts, least_evaluation
from dynapipe_ext.tools.account.run_events import RunEvents, VariantLabel

_MOST_RANGES = 300  # of steps that a figure is kept for
_MOST_KEPT = 50  # of the latest refused steps and fits
_MOST_SHAPES = 200  # whose prediction errors are summed


@dataclass(frozen=True, slots=True)
class Point:
    """A figure over steps `first` to `last` (numbers from 1): its mean, and the least and the most of one step."""

    first: int
    last: int
    mean: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2


class Thinned:
    """A figure over the steps of a run, as means over at most `most` ranges of equally many steps.

    The ranges double in length when they run out, so a step takes constant time, and a run of any length little room.

    >>> loss = Thinned(most=4)
    >>> for number in range(1, 10): loss.add(number, 10.0 - number)
    >>> [(point.first, point.last, point.mean, point.low) for point in loss.points()]
    [(1, 4, 7.5, 6.0), (5, 8, 3.5, 2.0), (9, 9, 1.0, 1.0)]
    """

    def __init__(self, most: int = _MOST_RANGES) -> None:
        self._most, self._width, self._first, self._last = most, 1, 0, 0
        self._ranges: list[tuple[float, float, float, float]] = []  # weight, total, low, high

    def add(self, number: int, total: float | None, weight: float = 1.0) -> None:
        """One step's figure, `total` / `weight`: a mean over steps is the sum of totals by that of weights. What is
        unknown or not finite is left out. Steps come in order."""
        if total is None or not math.isfinite(total) or not weight > 0:
            return
        if not self._ranges:
            self._first = number
        place = (number - self._first) // self._width
        while place >= self._most:
            self._halve()
            place = (number - self._first) // self._width
        while len(self._ranges) <= place:
            self._ranges.append(_NOTHING)
        self._ranges[place] = _joined(self._ranges[place], (weight, total, total / weight, total / weight))
        self._last = number

    def _halve(self) -> None:
        padded = [*self._ranges, _NOTHING]
        self._ranges = [_joined(*padded[i : i + 2]) for i in range(0, len(self._ranges), 2)]
        self._width *= 2

    def points(self) -> list[Point]:
        """Of the ranges that have any figure, in order."""
        return [
            Point(first := self._first + i * self._width, min(first + self._width - 1, self._last), t / w, low, high)
            for i, (w, t, low, high) in enumerate(self._ranges)
            if w > 0
        ]

    def at(self, number: int) -> float | None:
        """The mean around a step; None where nothing is known there."""
        place = (number - self._first) // self._width if self._ranges else -1
        weight, total, _, _ = self._ranges[place] if 0 <= place < len(self._ranges) else _NOTHING
        return total / weight if weight else None

    @property
    def mean(self) -> float | None:
        """Over all steps; None without any."""
        weight = math.fsum(one[0] for one in self._ranges)
        return math.fsum(one[1] for one in self._ranges) / weight if weight else None


_NOTHING = (0.0, 0.0, math.inf, -math.inf)


def _joined(
    one: tuple[float, float, float, float], other: tuple[float, float, float, float]
) -> tuple[float, float, float, float]:
    return one[0] + other[0], one[1] + other[1], min(one[2], other[2]), max(one[3], other[3])


@dataclass(slots=True)
class RunSeries:
    """One way of planning a run, step by step. `add` takes constant time; steps come in order.

    Thinned figures: `loss`, `learning_rate`, `grad_norm`, `tokens_per_s` and `padding` (share of positions) of all
    steps. Of those with figures of all ranks: bubbles, the `drift`, and the most bytes of any rank so far.
    """

    label: VariantLabel
    loss: Thinned = field(default_factory=Thinned)
    learning_rate: Thinned = field(default_factory=Thinned)
    grad_norm: Thinned = field(default_factory=Thinned)
    tokens_per_s: Thinned = field(default_factory=Thinned)
    padding: Thinned = field(default_factory=Thinned)
    measured_bubble: Thinned = field(default_factory=Thinned)
    predicted_bubble: Thinned = field(default_factory=Thinned)
    drift: Thinned = field(default_factory=Thinned)
    measured_bytes: Thinned = field(default_factory=Thinned)
    predicted_bytes: Thinned = field(default_factory=Thinned)
    validation: Thinned = field(default_factory=Thinned)
    margin: Thinned = field(default_factory=Thinned)
    accuracy: Thinned = field(default_factory=Thinned)
    num_steps: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    cpu_tokens: int = 0
    measured_s: float = 0.0
    predicted_s: float = 0.0
    num_refused: int = 0
    num_not_finite: int = 0
    first: StepDone | None = None
    last: StepDone | None = None
    gathered: AllRanks | None = None
    least_evaluation: EvalDone | None = None
    last_evaluation: EvalDone | None = None
    refused: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    fits: deque[tuple[int, CostsFit]] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    drifting: dict[tuple[int, str, tuple[int, int, int]], DriftingShape] = field(default_factory=dict)
    _since_gathering: tuple[int, int] = (0, 0)  # steps, real tokens

    def add(self, done: StepDone) -> None:
        number = done.number
        self.first, self.last = self.first or done, done
        self.num_steps += 1
        self.real_tokens += done.real_tokens
        self.padded_tokens += done.padded_tokens
        self.elapsed_s += done.step_s
        self.loss.add(number, done.loss)
        self.learning_rate.add(number, done.learning_rate)
        self.grad_norm.add(number, done.grad_norm)
        self.tokens_per_s.add(number, done.real_tokens, done.step_s)
        self.padding.add(number, done.padded_tokens - done.real_tokens, done.padded_tokens)
        self.num_not_finite += not math.isfinite(done.loss)
        if done.refused:
            self.num_refused += 1
            self.refused.append((number, done.refused))
        if done.fit is not None:
            self.fits.append((number, done.fit))
        if done.preferences is not None:
            self.margin.add(number, done.preferences.margin)
            self.accuracy.add(number, done.preferences.accuracy)
        if done.evaluation is not None:
            self._add_evaluation(done.evaluation)
        steps, tokens = self._since_gathering
        self._since_gathering = steps + 1, tokens + done.real_tokens
        if done.all_ranks is not None:
            self._add_gathered(number, done.all_ranks)

    def _add_evaluation(self, evaluation: EvalDone) -> None:
        self.validation.add(evaluation.number, evaluation.loss)
        self.last_evaluation = evaluation
        before = () if self.least_evaluation is None else (self.least_evaluation,)
        self.least_evaluation = least_evaluation((*before, evaluation))

    def _add_gathered(self, number: int, ranks: AllRanks) -> None:
        self.gathered = ranks
        steps, tokens = self._since_gathering
        self._since_gathering = (0, 0)
        if steps == ranks.num_steps:
            self.cpu_s += ranks.cpu_s
            self.cpu_tokens += tokens
        self.measured_bubble.add(number, ranks.bubble_ratio)
        if ranks.bubble_ratio is not None:  # so that both means are of the same steps
            self.predicted_bubble.add(number, ranks.predicted_bubble_ratio)
        if ranks.predicted_makespan_s > 0:
            self.drift.add(number, ranks.makespan_s - ranks.predicted_makespan_s, ranks.predicted_makespan_s)
            self.measured_s += ranks.makespan_s
            self.predicted_s += ranks.predicted_makespan_s
        self.measured_bytes.add(number, max(ranks.peak_bytes, default=None))
        self.predicted_bytes.add(number, max(ranks.predicted_peak_bytes, default=None))
        if (shape := ranks.furthest_off) is not None:
            self._add_drifting(shape)

    def _add_drifting(self, shape: DriftingShape) -> None:
        key = shape.stage, shape.letter, shape.shape
        if (before := self.drifting.get(key)) is not None:
            measured_s, predicted_s = before.measured_s + shape.measured_s, before.predicted_s + shape.predicted_s
            shape = replace(shape, measured_s=measured_s, predicted_s=predicted_s)
        self.drifting[key] = shape
        if len(self.drifting) > _MOST_SHAPES:
            furthest = self.furthest_off(_MOST_SHAPES // 2)
            self.drifting = {(one.stage, one.letter, one.shape): one for one in furthest}

    def furthest_off(self, most: int) -> list[DriftingShape]:
        """Of the shapes that were the furthest off in some step, those with the largest error in sum."""
        return sorted(self.drifting.values(), key=lambda one: one.difference_s, reverse=True)[:most]

    @property
    def real_tokens_per_s(self) -> float | None:
        return self.real_tokens / self.elapsed_s if self.elapsed_s > 0 else None

    @property
    def cpu_s_per_token(self) -> float | None:
        return self.cpu_s / self.cpu_tokens if self.cpu_tokens else None

    @property
    def padding_share(self) -> float | None:
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else None

    @property
    def drift_share(self) -> float | None:
        """By what part of the predictions steps took longer, over the gathered ones."""
        return self.measured_s / self.predicted_s - 1 if self.predicted_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSoFar:
    """A run of `num_steps` steps so far; the first variant is the job itself."""

    facts: RunFacts
    num_steps: int
    variants: tuple[RunSeries, ...]

    @property
    def own(self) -> RunSeries:
        return self.variants[0]

    @classmethod
    def of(cls, events: RunEvents) -> RunSoFar:
        return cls(facts=events.facts, num_steps=events.num_steps, variants=tuple(_series(events)))


def _series(events: RunEvents) -> Iterator[RunSeries]:
    for label, steps in events.variants:
        series = RunSeries(label)
        for done in steps:
            series.add(done)
        yield series
