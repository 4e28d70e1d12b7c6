"""What planned steps gained, for the log of a training loop: their micro-batches, padding and bubbles, and how long the
same samples would take in the loop's own micro-batches."""

from __future__ import annotations

import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import DynaPipeError
from dynapipe_ext.executor.device import gather_json
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.schedules.evaluation.simulate import simulate
from dynapipe_ext.schedules.published.full_backward import interleaved_1f1b

_MOST_STEPS = 10_000  # At most so many steps are kept for a log, since some loops never write one.


class ActionClock:
    """Times the actions of a rank's step. On an accelerator it puts events into the queue; the next step reads them, so
    that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def action(self, _label: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks.append((start, self._mark()))

    def take(self) -> tuple[float, float]:
        """Seconds within actions, and from the first one's start to the last one's end; since the last take."""
        marks, self._marks = self._marks, []
        if not marks:
            return 0.0, 0.0
        if self._on_cuda:
            marks[-1][1].synchronize()
        busy_s = math.fsum(self._between(start, end) for start, end in marks)
        return busy_s, self._between(marks[0][0], marks[-1][1])

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._on_cuda else float(end - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """A rank's view of a planned step. Micro-batches and tokens are those of all replicas, predictions those of its own
    replica, and measured seconds those of the rank (`busy_s` within actions, `span_s` from the first action to the
    last)."""

    num_micro_batches: int
    real_tokens: int
    padded_tokens: int
    predicted_s: float
    predicted_bubble: float
    busy_s: float
    span_s: float

    @property
    def of_rank(self) -> list[float]:
        """What differs from rank to rank."""
        return [self.predicted_s, self.predicted_bubble, self.busy_s, self.span_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalFigures:
    """Means over the steps of an interval. Bubbles are idle time over (ranks x the longest rank's time)."""

    num_micro_batches: float
    padding: float
    predicted_bubble: float
    measured_bubble: float
    predicted_s: float

    @classmethod
    def of(cls, steps: Sequence[StepFigures], ranks: Sequence[Sequence[Sequence[float]]]) -> IntervalFigures:
        """From this rank's view of each step and every rank's `of_rank` of each."""
        predicted_s = predicted_busy_s = span_s = busy_s = 0.0
        for figures in zip(*ranks, strict=True):
            longest_s = max(one[0] for one in figures)
            predicted_s += longest_s
            predicted_busy_s += math.fsum(one[0] * (1 - one[1]) for one in figures) / len(figures)
            busy_s += math.fsum(one[2] for one in figures) / len(figures)
            span_s += max(one[3] for one in figures)
        return cls(
            num_micro_batches=sum(step.num_micro_batches for step in steps) / len(steps),
            padding=1 - sum(step.real_tokens for step in steps) / max(1, sum(step.padded_tokens for step in steps)),
            predicted_bubble=1 - predicted_busy_s / predicted_s if predicted_s else 0.0,
            measured_bubble=1 - busy_s / span_s if span_s else 0.0,
            predicted_s=predicted_s / len(steps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRows:
    """The loop's own micro-batches: `micro_batch_size` rows of `seq_len` positions, dealt to `dp` replicas, in
    (interleaved) 1F1B of as many stages a rank as the model has."""

    costs: CostModel
    pp: int
    dp: int
    micro_batch_size: int
    seq_len: int
    recompute: Any
    _seconds_by_count: dict[int, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, pipeline: MegatronPipeline, args: Any) -> StockRows:
        topology = pipeline.topology
        return cls(
            costs=pipeline.costs,
            pp=topology.pp,
            dp=topology.dp,
            micro_batch_size=args.micro_batch_size,
            seq_len=args.seq_length,
            recompute=pipeline.recompute or "none",
        )

    def padded_s(self, lengths: Sequence[int]) -> float | None:
        """A row a sample. None where the costs do not know such rows."""
        return self._step_s(len(lengths))

    def packed_s(self, lengths: Sequence[int]) -> float | None:
        """As few rows as hold the samples' positions, were they cut at the ends of rows."""
        return self._step_s(-(-sum(lengths) // self.seq_len))

    def _step_s(self, num_rows: int) -> float | None:
        count = -(-num_rows // (self.micro_batch_size * self.dp))  # of each replica
        if count not in self._seconds_by_count:
            self._seconds_by_count[count] = self._simulated_s(count)
        return self._seconds_by_count[count]

    def _simulated_s(self, count: int) -> float | None:
        rows = tuple(SampleLength(row, self.seq_len, 0, self.seq_len) for row in range(self.micro_batch_size))
        try:
            costs = self.costs.evaluate([MicroBatch(rows, recompute=self.recompute)] * count)
            if costs.infeasible.any():
                return None
            return simulate(interleaved_1f1b(self.pp, count, costs.num_stages // self.pp), costs).makespan_s
        except DynaPipeError:
            return None


class GainLog:
    """Collects the planned steps of a training, and reports each interval of its log."""

    def __init__(self) -> None:
        self._steps: deque[StepFigures] = deque(maxlen=_MOST_STEPS)
        self._stock: deque[tuple[float | None, float | None]] = deque(maxlen=_MOST_STEPS)
        self._rows: StockRows | None = None
        self._clock: ActionClock | None = None
        self._untimed: ExecutionPlan | None = None

    def timed(self, plan: ExecutionPlan, pipeline: MegatronPipeline) -> Callable[[str], Any]:
        """The context of each action of the step that begins."""
        self._end_step()
        self._clock = self._clock or ActionClock(pipeline.device)
        self._untimed = plan
        return self._clock.action

    def count(self, lengths: Sequence[int], pipeline: MegatronPipeline, args: Any) -> None:
        """The samples of a step. The last rank, which reports, prices them in the loop's own micro-batches."""
        if dist.get_rank() == dist.get_world_size() - 1:
            self._rows = self._rows or StockRows.of(pipeline, args)
            self._stock.append((self._rows.padded_s(lengths), self._rows.packed_s(lengths)))

    def report(self, iteration: int, *, writers: Sequence[Any] = ()) -> str:
        """A line for the log, of the steps since the last one; on the last rank, elsewhere and without planned steps
        empty. Figures go to `writers` that there are, TensorBoard's and Weights & Biases'. A collective call."""
        self._end_step()
        if not self._steps or self._clock is None:
            return ""
        steps, stock = list(self._steps), list(self._stock)
        self._steps.clear()
        self._stock.clear()
        device = torch.device("cuda", torch.cuda.current_device()) if self._clock._on_cuda else torch.device("cpu")
        ranks = gather_json([step.of_rank for step in steps], device)
        if not stock:
            return ""
        figures = IntervalFigures.of(steps, ranks)
        padded_s, packed_s = (_mean([one[kind] for one in stock]) for kind in (0, 1))
        _write(figures, padded_s, packed_s, iteration, writers)
        shared = " (ranks share this machine's cores)" if device.type == "cpu" else ""
        return (
            f"dynapipe: iteration {iteration} | micro-batches a step: {figures.num_micro_batches:.1f} | padding:"
            f" {figures.padding:.1%} | bubble: {figures.predicted_bubble:.1%} predicted, {figures.measured_bubble:.1%}"
            f" measured{shared} | predicted step: {_ms(figures.predicted_s)} | the same samples in stock's"
            f" micro-batches under 1F1B (simulated): {_ms(padded_s)} padded, {_ms(packed_s)} in full rows"
        )

    def _end_step(self) -> None:
        plan, self._untimed = self._untimed, None
        if plan is None or self._clock is None:
            return
        busy_s, span_s = self._clock.take()
        self._steps.append(
            StepFigures(
                num_micro_batches=sum(plan.num_micro_batches),
                real_tokens=plan.real_tokens,
                padded_tokens=plan.padded_tokens,
                predicted_s=plan.makespan_s,
                predicted_bubble=plan.prediction.bubble_ratio,
                busy_s=busy_s,
                span_s=span_s,
            )
        )


def log_gains(gains: GainLog, training: Any) -> Callable[..., Any]:
    """Megatron-LM's `training_log`, which prints what was gained after its own line; `training` is its module."""
    original = training.training_log
    parameters = inspect.signature(original)

    def training_log(*values: Any, **keywords: Any) -> Any:
        result = original(*values, **keywords)
        iteration, args = parameters.bind(*values, **keywords).arguments["iteration"], training.get_args()
        if iteration % args.log_interval == 0:
            writers = (training.get_tensorboard_writer(), training.get_wandb_writer())
            if line := gains.report(iteration, writers=writers):
                print(line, flush=True)
        return result

    return training_log


def _write(
    figures: IntervalFigures, padded_s: float | None, packed_s: float | None, iteration: int, writers: Sequence[Any]
) -> None:
    scalars = {
        "micro-batches": figures.num_micro_batches,
        "padding": figures.padding,
        "bubble predicted": figures.predicted_bubble,
        "bubble measured": figures.measured_bubble,
        "step predicted (s)": figures.predicted_s,
        "step of stock, padded (s)": padded_s,
        "step of stock, full rows (s)": packed_s,
    }
    logged = {f"dynapipe/{name}": value for name, value in scalars.items() if value is not None}
    tensorboard, wandb = (*writers, None, None)[:2]
    if tensorboard is not None:
        for name, value in logged.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(logged, iteration)


def _mean(seconds: Sequence[float | None]) -> float | None:
    known_s = [one for one in seconds if one is not None]
    return math.fsum(known_s) / len(known_s) if len(known_s) == len(seconds) else None


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "unknown to these costs"
    return f"{1e3 * seconds:,.1f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.3g} ms"
