"""The result of a training step, as one value, and who receives it.

    every rank: StepDone ─► listeners          every `log_every` steps: RankFigures of each rank ─► AllRanks in StepDone

A listener may be the user's progress bar, a file, a checkpoint: the loop knows none of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from dynapipe_ext.costs.adjustments import LETTERS
from dynapipe_ext.costs.fitting import MeasuredAction
from dynapipe_ext.models.flops import Work
from dynapipe_ext.timeline import Span


@dataclass(frozen=True, slots=True)
class DriftingShape:
    """Actions of one letter on one stage and shape (rows, encoder_len, decoder_len): their measured and their predicted
    seconds, summed over a step."""

    stage: int
    letter: str
    shape: tuple[int, int, int]
    measured_s: float
    predicted_s: float

    def __str__(self) -> str:
        rows, encoder_len, decoder_len = self.shape
        return f"{self.letter} of {rows} x {encoder_len}{f' + {decoder_len}' * (decoder_len > 0)} on stage {self.stage}"

    @property
    def difference_s(self) -> float:
        return abs(self.measured_s - self.predicted_s)

    @classmethod
    def furthest(cls, actions: Iterable[MeasuredAction]) -> DriftingShape | None:
        """The shape whose measured time differs most from the prediction; None without actions."""
        sums: dict[tuple[int, str, tuple[int, int, int]], list[int]] = defaultdict(lambda: [0, 0])
        for action in actions:
            of = sums[action.stage, action.letter, action.shape]
            of[0] += action.measured_ns
            of[1] += action.predicted_ns
        return furthest_off(cls(*key, measured / 1e9, predicted / 1e9) for key, (measured, predicted) in sums.items())

    def numbers(self) -> list[float]:
        return [self.stage, LETTERS.index(self.letter), *self.shape, self.measured_s, self.predicted_s]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> DriftingShape:
        stage, letter, rows, encoder_len, decoder_len = map(int, numbers[:5])
        return cls(stage, LETTERS[letter], (rows, encoder_len, decoder_len), *numbers[5:])


def furthest_off(shapes: Iterable[DriftingShape | None]) -> DriftingShape | None:
    """The one of the largest difference; None of none."""
    return max((one for one in shapes if one), key=lambda one: one.difference_s, default=None)


@dataclass(frozen=True, slots=True)
class CostsFit:
    """Costs were fitted, and hold from the next step on. Errors are relative, of predicted times of actions: with the
    costs before, and with the new ones."""

    error_before: float
    error_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """A rank's figures of a step, for all ranks.

    Times are seconds on rank 0's clock. A rank whose replica has no micro-batch has neither start nor end (infinities).
    Without recorded spans `busy_s` is not a number and `furthest_off` is None. `cpu_s` and `work` are sums over the
    steps since figures were gathered last; one rank of each replica counts `work`. Bytes are the most so far.
    """

    busy_s: float
    start_s: float
    end_s: float
    cpu_s: float
    predicted_makespan_s: float
    predicted_bubble_ratio: float
    predicted_peak_bytes: int
    peak_bytes: int
    exposed_planning_s: float
    work: Work = field(default_factory=Work)
    furthest_off: DriftingShape | None = None

    def numbers(self) -> list[float]:
        """As many float64 for every rank, so that they can be gathered; exact for integers below 2^53."""
        own = [float(getattr(self, name)) for name in _own_figures()]
        drift = self.furthest_off.numbers() if self.furthest_off else [math.nan] * _NUM_OF_DRIFT
        return [*own, *drift, *map(float, self.work.numbers())]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> RankFigures:
        names = _own_figures()
        own = {
            name: int(number) if name.endswith("_bytes") else number
            for name, number in zip(names, numbers, strict=False)
        }
        drift, work = numbers[len(names) :][:_NUM_OF_DRIFT], numbers[len(names) + _NUM_OF_DRIFT :]
        return cls(
            **own,  # type: ignore[arg-type]
            furthest_off=None if math.isnan(drift[0]) else DriftingShape.from_numbers(drift),
            work=Work.from_numbers([int(n) for n in work]),
        )


_NUM_OF_DRIFT = 7


def _own_figures() -> list[str]:
    return [f.name for f in fields(RankFigures) if f.name not in ("work", "furthest_off")]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllRanks:
    """A step over all ranks. `cpu_s` and `work` are sums over the last `num_steps` steps, this one included.

    `makespan_s` is from the first start to the last end. `bubble_ratio` is None where a rank recorded no spans. The
    predictions are the plan's; `furthest_off` is the shape whose measured time differs most from them on any rank (None
    without spans). `predicted_peak_bytes` and `peak_bytes` are the most so far of each rank, in rank order.
    `exposed_planning_s` is that of the rank that has waited longest.
    """

    num_steps: int
    makespan_s: float
    bubble_ratio: float | None
    cpu_s: float
    work: Work
    predicted_makespan_s: float
    predicted_bubble_ratio: float
    predicted_peak_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    exposed_planning_s: float
    furthest_off: DriftingShape | None = None

    @property
    def drift(self) -> float:
        """By what part of the predicted makespan the measured one is longer; below 0 where it is shorter."""
        return self.makespan_s / self.predicted_makespan_s - 1 if self.predicted_makespan_s > 0 else 0.0

    @classmethod
    def of(cls, ranks: Sequence[RankFigures], *, num_steps: int) -> AllRanks:
        """From every rank's figures, in rank order."""
        makespan_s = max(r.end_s for r in ranks) - min(r.start_s for r in ranks)
        bubble_ratio = _bubble_ratio(sum(r.busy_s for r in ranks), len(ranks), makespan_s)
        predicted_s = max(r.predicted_makespan_s for r in ranks)
        predicted_busy_s = sum(r.predicted_makespan_s * (1 - r.predicted_bubble_ratio) for r in ranks)
        return cls(
            num_steps=num_steps,
            makespan_s=makespan_s,
            bubble_ratio=bubble_ratio if math.isfinite(bubble_ratio) else None,
            cpu_s=sum(r.cpu_s for r in ranks),
            work=sum((r.work for r in ranks), Work()),
            predicted_makespan_s=predicted_s,
            predicted_bubble_ratio=_bubble_ratio(predicted_busy_s, len(ranks), predicted_s),
            predicted_peak_bytes=tuple(r.predicted_peak_bytes for r in ranks),
            peak_bytes=tuple(r.peak_bytes for r in ranks),
            exposed_planning_s=max(r.exposed_planning_s for r in ranks),
            furthest_off=furthest_off(r.furthest_off for r in ranks),
        )


def _bubble_ratio(busy_s: float, num_ranks: int, makespan_s: float) -> float:
    return 1 - busy_s / (num_ranks * makespan_s) if makespan_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceFigures:
    """Of a step that learns preferences, means over its pairs: the rewards of chosen and of rejected answers, and the
    share of pairs of which the chosen one has the higher."""

    chosen_reward: float
    rejected_reward: float
    accuracy: float

    @property
    def margin(self) -> float:
        """By how much the chosen answers' rewards are higher."""
        return self.chosen_reward - self.rejected_reward

    @classmethod
    def of_sums(cls, num_pairs: float, chosen: float, rejected: float, num_right: float) -> PreferenceFigures:
        return cls(
            chosen_reward=chosen / num_pairs, rejected_reward=rejected / num_pairs, accuracy=num_right / num_pairs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDone:
    """An evaluation of the weights after step `step` (a plan's number, from 0), on all ranks.

    `loss` is over the whole set as over one batch: the sum of losses by what they are divided by (target tokens, or
    samples). `real_tokens` and `num_samples` of all replicas; `seconds` of this rank. `validated_on` names the samples
    and the kind of loss: losses of two names do not compare.
    """

    step: int
    loss: float
    real_tokens: int
    num_samples: int
    seconds: float
    validated_on: str = ""

    @property
    def number(self) -> int:
        """How many steps the evaluated weights have been trained."""
        return self.step + 1


def losses_compare(one: str, other: str) -> bool:
    """Whether validation losses of two names (`validated_on`) are of the same, as far as both are known."""
    return not one or not other or one == other


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The end of a step, as one rank saw it.

    `step` is the plan's number, from 0 (people read `number`, from 1); `epoch_step` is its place within the epoch.
    `loss`, `grad_norm` (before clipping), `learning_rate`, tokens and the number of micro-batches of each replica are
    those of the global batch, equal on all ranks. The rest is the rank's own: `step_s` from the end of the step before,
    `executed_s` of that in the executor, CPU seconds of this process, the most bytes held so far, and what its plan
    predicted. `refused` says why a step changed no weights (its `grad_norm` is then not a number). `all_ranks` is
    None where figures were not gathered, `evaluation` where the step was not followed by one, `fit` where costs go on
    as they were; the time of either is in no step's figures. `preferences` are those of a step that learns them.
    `spans` are those of a traced step, seconds from the first
    start on any rank, else none.
    """

    step: int
    epoch: int
    epoch_step: int
    loss: float
    grad_norm: float
    learning_rate: float
    real_tokens: int
    padded_tokens: int
    num_micro_batches: tuple[int, ...]
    step_s: float
    executed_s: float
    cpu_s: float
    peak_bytes: int
    predicted_makespan_s: float
    predicted_bubble_ratio: float
    predicted_peak_bytes: int
    refused: str = ""
    preferences: PreferenceFigures | None = None
    all_ranks: AllRanks | None = None
    evaluation: EvalDone | None = None
    fit: CostsFit | None = None
    spans: tuple[Span, ...] = ()

    @property
    def number(self) -> int:
        """How many steps the run has done, this one included."""
        return self.step + 1

    @property
    def real_tokens_per_s(self) -> float:
        return self.real_tokens / self.step_s if self.step_s > 0 else 0.0


class Listener(Protocol):
    """Receives every step of a run, on the ranks that it was given to.

    A listener that communicates (a checkpoint) must be on all ranks, at the same place of their lists: the loop calls
    listeners in the order of its list, before the next step begins. An exception ends the run.
    """

    def step_done(self, done: StepDone) -> None: ...

    def close(self) -> None:
        """The run is over, well or not."""
