"""The loop of a training run: take a plan, execute it, update, tell the listeners; from any step on.

It knows loader, executor and optimizer by what it calls; processes and models are wired to it from above.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dynapipe_ext.executor.drift import CostWatch
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.events import AllRanks, DriftingShape, EvalDone, Listener, RankFigures, StepDone
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.update import ExecutedStep, Refused
from dynapipe_ext.models.flops import Work, work_of
from dynapipe_ext.timeline import Span


class Optimizer(Protocol):
    def step(self, executed: ExecutedStep) -> float | Refused:
        """Update the weights; the gradient norm before clipping, or why nothing was changed."""
        ...

    @property
    def lr(self) -> float:
        """Of the step that comes next."""
        ...


class SpanRecorder:
    """Keeps spans until they are taken; `clock_offset_s` is how far this rank's clock is ahead of rank 0's."""

    def __init__(self, clock_offset_s: float = 0.0) -> None:
        self.clock_offset_s = clock_offset_s
        self._spans: list[Span] = []

    def record(self, span: Span) -> None:
        self._spans.append(span)

    def take(self) -> tuple[Span, ...]:
        """The spans since the last take, on rank 0's clock."""
        taken = tuple(moved(span, self.clock_offset_s) for span in self._spans)
        self._spans.clear()
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExecutors:
    """`traced` runs the traced steps and records into `recorder`; `plain` runs the others, and may be the same."""

    plain: PipelineExecutor
    traced: PipelineExecutor
    recorder: SpanRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The run ends with step `num_steps` - 1. Figures of all ranks are gathered every `log_every` steps, at the last
    `traced_steps` and at the last one."""

    num_steps: int
    log_every: int = 1
    traced_steps: int = 0

    def is_traced(self, step: int) -> bool:
        return step >= self.num_steps - self.traced_steps

    def gathers(self, step: int) -> bool:
        return (step + 1) % self.log_every == 0 or self.is_traced(step) or step + 1 == self.num_steps


def train_steps(
    loader: DynaPipeDataLoader,
    executors: StepExecutors,
    optimizer: Optimizer,
    settings: LoopSettings,
    listeners: Sequence[Listener],
    *,
    gather: Callable[[RankFigures, str], list[RankFigures]] = lambda mine, name: [mine],
    own_bytes: Callable[[int], int] = lambda activation_bytes: activation_bytes,
    counts_work: bool = True,
    micro_batch_losses: Callable[[], Mapping[int, float]] = dict,
    evaluate: Callable[[int], EvalDone | None] | None = None,
    begins: Callable[[ExecutionPlan], None] = lambda plan: None,
    watch: CostWatch | None = None,
) -> Iterator[StepDone]:
    """Run the steps from the loader's place on, one each time the caller asks for the next.

    Every rank calls this alike, with its own place. What the caller does between two steps is in no figure.

    `gather(mine, name)` returns the figures of all ranks in rank order (default: one process). `own_bytes` makes what
    this rank held at most of the most that its activations took. `counts_work`: on one rank of each replica.
    `micro_batch_losses` are the stage's of the step that it has run, to name one that is not finite. `evaluate(step)`
    is called after each step's update, before the listeners, which are told what it gives. `begins(plan)` is called
    before each step is run: of one that hangs there is no end to listen to. `watch` says what plans were off by, and
    may have the loader plan with other costs from the next step on.
    """
    if loader_step(loader) >= settings.num_steps:
        return
    totals, offset_s = _Totals(), executors.recorder.clock_offset_s
    step_start_s, cpu_start_s = time.perf_counter(), time.process_time()
    for place, micro_batches, plan in _steps(loader):
        is_traced = settings.is_traced(plan.step)
        is_recorded = is_traced or (watch is not None and watch.records(plan.step))
        begins(plan)
        start_s, learning_rate = time.perf_counter(), optimizer.lr
        loss = (executors.traced if is_recorded else executors.plain).execute(plan, micro_batches)
        executed_s = time.perf_counter()
        updated = optimizer.step(ExecutedStep(plan, loss, micro_batch_losses()))
        end_s, cpu_end_s = time.perf_counter(), time.process_time()
        spans = executors.recorder.take()
        actions = () if watch is None else watch.seen(plan, spans)
        held_bytes = own_bytes(max((span.num_bytes for span in spans), default=0))
        work = work_of(plan.micro_batches) if counts_work else Work()
        totals = totals.and_step(cpu_end_s - cpu_start_s, work, held_bytes, plan.prediction.peak_bytes[plan.pp_rank])
        all_ranks, origin_s = None, 0.0
        if settings.gathers(plan.step):
            interval = (start_s - offset_s, executed_s - offset_s)
            drifting = DriftingShape.furthest(actions)
            mine = _figures(totals, spans, interval, plan, loader.exposed_planning_s, drifting)
            everyone = gather(mine, f"step {plan.step}, figures of all ranks")
            all_ranks = AllRanks.of(everyone, num_steps=totals.num_steps)
            origin_s, totals = min(rank.start_s for rank in everyone), totals.told()
        done = StepDone(
            step=plan.step,
            epoch=place["epoch"],
            epoch_step=place["step"],
            loss=loss,
            grad_norm=math.nan if isinstance(updated, Refused) else updated,
            refused=updated.reason if isinstance(updated, Refused) else "",
            learning_rate=learning_rate,
            real_tokens=plan.real_tokens,
            padded_tokens=plan.padded_tokens,
            num_micro_batches=plan.num_micro_batches,
            step_s=end_s - step_start_s,
            executed_s=executed_s - start_s,
            cpu_s=cpu_end_s - cpu_start_s,
            peak_bytes=totals.peak_bytes,
            predicted_makespan_s=plan.makespan_s,
            predicted_bubble_ratio=plan.prediction.bubble_ratio,
            predicted_peak_bytes=totals.predicted_peak_bytes,
            all_ranks=all_ranks,
            evaluation=None if evaluate is None else evaluate(plan.step),
            fit=None if watch is None else watch.fit(plan.step),
            spans=tuple(moved(span, origin_s) for span in spans) if is_traced else (),
        )
        step_start_s, cpu_start_s = end_s, cpu_end_s
        if done.evaluation is not None or done.fit is not None:
            step_start_s, cpu_start_s = time.perf_counter(), time.process_time()
        for listener in listeners:
            listener.step_done(done)
        if done.number >= settings.num_steps:
            yield done
            return
        paused_s, paused_cpu_s = time.perf_counter(), time.process_time()
        yield done
        step_start_s += time.perf_counter() - paused_s
        cpu_start_s += time.process_time() - paused_cpu_s


@dataclass(frozen=True, slots=True)
class _Totals:
    """Sums over the `num_steps` steps since figures were gathered last, and the most bytes of the whole run."""

    num_steps: int = 0
    cpu_s: float = 0.0
    work: Work = field(default_factory=Work)
    peak_bytes: int = 0
    predicted_peak_bytes: int = 0

    def and_step(self, cpu_s: float, work: Work, held_bytes: int, predicted_bytes: int) -> _Totals:
        return _Totals(
            self.num_steps + 1,
            self.cpu_s + cpu_s,
            self.work + work,
            max(self.peak_bytes, held_bytes),
            max(self.predicted_peak_bytes, predicted_bytes),
        )

    def told(self) -> _Totals:
        return _Totals(peak_bytes=self.peak_bytes, predicted_peak_bytes=self.predicted_peak_bytes)


def loader_step(loader: DynaPipeDataLoader) -> int:
    """The number of the step that the loader gives next."""
    step: int = loader.state_dict()["global_step"]
    return step


def _steps(loader: DynaPipeDataLoader) -> Iterator[tuple[dict[str, Any], list[Batch], ExecutionPlan]]:
    """(loader's state at its start, micro-batches, plan) of each step, epoch after epoch."""
    while True:
        place = loader.state_dict()
        for micro_batches, plan in loader:
            yield place, micro_batches, plan
            place = loader.state_dict()


def _figures(
    totals: _Totals,
    spans: Sequence[Span],
    interval: tuple[float, float],
    plan: ExecutionPlan,
    exposed_planning_s: float,
    drifting: DriftingShape | None,
) -> RankFigures:
    """A step without spans lasted for `interval`; how much of that was work is then unknown."""
    first_s, last_s = interval if plan.micro_batches else (math.inf, -math.inf)
    return RankFigures(
        busy_s=sum(span.duration_s for span in spans) if spans or not plan.micro_batches else math.nan,
        start_s=min((span.start_s for span in spans), default=first_s),
        end_s=max((span.end_s for span in spans), default=last_s),
        cpu_s=totals.cpu_s,
        predicted_makespan_s=plan.makespan_s,
        predicted_bubble_ratio=plan.prediction.bubble_ratio,
        predicted_peak_bytes=totals.predicted_peak_bytes,
        peak_bytes=totals.peak_bytes,
        exposed_planning_s=exposed_planning_s,
        work=totals.work,
        furthest_off=drifting,
    )


def moved(span: Span, origin_s: float) -> Span:
    """The same span, `origin_s` earlier."""
    return replace(span, start_s=span.start_s - origin_s, end_s=span.end_s - origin_s)
