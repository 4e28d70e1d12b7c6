"""The training loop: steps, updates, evaluations, and one `StepDone` for each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Protocol

from dynapipe_ext.data.sample_selection import format_ranges
from dynapipe_ext.errors import ConfigError, DataError, NotFiniteError
from dynapipe_ext.evaluating import ModuleWithModes, evaluating
from dynapipe_ext.executor.drift import CostWatch
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.events import (
    AllRanks,
    DriftingShape,
    EvalDone,
    Listener,
    PreferenceFigures,
    RankFigures,
    StepDone,
)
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.loader import DynaPipeDataLoader, LoadedStep
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.models.flops import Work, work_of
from dynapipe_ext.settings.tables import EvalSettings
from dynapipe_ext.timeline import Span

NanPolicy = Literal["stop", "skip"]
_MOST_FAULTS = 3  # that a message names


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """What a step has come to on this rank: the loss of the global batch, and each micro-batch's share of it where the
    last stage runs. `describe_samples` names samples of the plan as the user knows them."""

    plan: ExecutionPlan
    loss: float
    losses: Mapping[int, float] = field(default_factory=dict)
    describe_samples: Callable[[Iterable[int]], str] = format_ranges

    def loss_faults(self) -> Iterator[str]:
        """A sentence for each micro-batch of this rank whose loss is not finite, with all of its samples."""
        for micro_batch, loss in self.losses.items():
            if not math.isfinite(loss):
                samples = self.plan.micro_batches[micro_batch].samples
                shown = self.describe_samples(sample.index for sample in samples)
                where = f"micro-batch {micro_batch} of replica {self.plan.dp_rank}"
                yield f"the loss of {where} (samples {shown}) is {loss:g}"


def joined_faults(of_ranks: Iterable[Iterable[str]]) -> str:
    """What ranks say of a step, each sentence once, and of many the first."""
    faults = list(dict.fromkeys(fault for rank in of_ranks for fault in rank))
    more = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
    return "; ".join(faults[:_MOST_FAULTS]) + more


@dataclass(frozen=True, slots=True)
class Refused:
    """A step that changed nothing, neither weights nor moments nor the learning rate, and why."""

    reason: str


class SkipPolicy:
    """What becomes of steps that are not finite. "stop": a NotFiniteError; "skip": up to `max_skips` of them in a row
    are left out, then the error."""

    def __init__(self, policy: NanPolicy = "stop", max_skips: int = 0) -> None:
        self._max_skips = max_skips if policy == "skip" else 0
        self._skips = 0

    def passed(self) -> None:
        """A step was finite."""
        self._skips = 0

    def refused(self, reason: str) -> Refused:
        """The step is left out. Errors: NotFiniteError where it may not be."""
        if self._skips == self._max_skips:
            before, move = "", 'let single steps pass with [optimizer] nan_policy = "skip"'
            if self._skips:
                before, move = f", after {self._skips} steps that were skipped in a row", "raise [optimizer] max_skips"
            raise NotFiniteError(
                f"{reason}{before}; no weight was changed: lower lr or look at these samples, or {move}"
            )
        self._skips += 1
        return Refused(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """`loss`: over all steps as over one batch, the sum of losses by what they are divided by (target tokens, or
    samples). `real_tokens` of all replicas; `seconds` of this rank, planning that was waited for included."""

    loss: float
    real_tokens: int
    num_steps: int
    seconds: float


def evaluate(
    executor: PipelineExecutor,
    loader: Iterable[LoadedStep],
    num_steps: int | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> EvalResult:
    """Run up to `num_steps` steps of the loader (None: one whole epoch) and add up their losses.

    All ranks call it alike, with models in evaluation mode. Whatever the plans, the loss is that of one sample at a
    time, up to floating-point reordering; global batches without targets do not count. Errors: ConfigError for a plan
    with backwards, which would train, and for no steps; DataError for a loader without any, and for no targets.
    """
    if num_steps is not None and num_steps < 1:
        raise ConfigError(f"num_steps is {num_steps} but must be at least 1, or None for the whole epoch")
    start_s = clock()
    losses, weights, real_tokens = [], [], 0
    for micro_batches, plan in islice(loader, num_steps):
        if not plan.forward_only:
            raise ConfigError(
                f"the plan of step {plan.step} has backwards, which would change gradients: give the loader"
                " of evaluation planner.for_forwards()"
            )
        losses.append(executor.execute(plan, micro_batches))
        weights.append(plan.loss_weight)
        real_tokens += plan.real_tokens
    if not losses:
        raise DataError("the evaluation's loader has no steps: give it more samples, or smaller global batches")
    if not any(weights):
        raise DataError(
            f"the evaluation's {len(losses)} global batches have no target tokens, so they have no loss: hold out more"
            " samples, or evaluate more steps"
        )
    loss = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    return EvalResult(loss=loss, real_tokens=real_tokens, num_steps=len(losses), seconds=clock() - start_s)


class PeriodicEvaluation:
    """Called after each step of a run, by all ranks alike; evaluates when `settings` have it so, else gives None.

    Every evaluation takes the same global batches by the same plans: the loader, its own, starts from its first place
    each time. `modules` are in evaluation mode (no dropout) meanwhile; afterwards each layer is in the mode it was in.
    After each batch all ranks ask `is_ending(step)`, which all answer alike: where the run is to end, the evaluation is
    left out.
    """

    def __init__(
        self,
        executor: PipelineExecutor,
        loader: DynaPipeDataLoader,
        modules: Sequence[ModuleWithModes],
        settings: EvalSettings,
        *,
        num_steps: int,
        validated_on: str = "",
        is_ending: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._executor, self._loader, self._modules = executor, loader, modules
        self._settings, self._num_steps, self._validated_on = settings, num_steps, validated_on
        self._is_ending = is_ending
        self._start = loader.state_dict()

    def __call__(self, step: int) -> EvalDone | None:
        """`step` is the number from 0 of the step that the weights come from."""
        number = step + 1
        if not self._settings.every or (number % self._settings.every and number < self._num_steps):
            return None
        self._loader.load_state_dict(self._start)
        left_out = False

        def until_the_end() -> Iterator[LoadedStep]:
            nonlocal left_out
            for loaded in self._loader:
                yield loaded
                if left_out := self._is_ending(step):
                    return

        with evaluating(*self._modules):
            result = evaluate(self._executor, until_the_end(), self._settings.steps or None)
        if left_out:
            return None
        epoch = self._start["epoch"]
        return EvalDone(
            step=step,
            loss=result.loss,
            real_tokens=result.real_tokens,
            num_samples=sum(self._loader.num_samples(epoch, batch) for batch in range(result.num_steps)),
            seconds=result.seconds,
            validated_on=self._validated_on,
        )


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

    def of(self, *, is_recorded: bool) -> PipelineExecutor:
        return self.traced if is_recorded else self.plain


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopHooks:
    """What the loop calls on this rank beside executors, optimizer and listeners; the defaults are of a lone process.

    `gather(figures, name)` returns the figures of all ranks in rank order. `own_bytes(activation_bytes)` is the most
    that this rank held, where its activations took so much. `counts_work(plan)` on one rank of each replica.
    `micro_batch_losses()` are the stage's, of the step that has run: they name a loss that is not finite;
    `preferences()` are the whole step's.
    `describe_samples(indices)` names samples in messages.
    `begins(plan)` is called before each step runs, since a step that hangs has no end to listen to. `evaluate(step)` is
    called after each step's update, before the listeners, which receive its result. `stops(place, why)` is called on
    all ranks where a step that is not finite ends the run, with the loader's state before it. `watch` compares plans
    with measured times, and may have the loader plan with other costs from the next step on.
    """

    gather: Callable[[RankFigures, str], list[RankFigures]] = lambda figures, name: [figures]
    own_bytes: Callable[[int], int] = lambda activation_bytes: activation_bytes
    counts_work: Callable[[ExecutionPlan], bool] = lambda plan: True
    micro_batch_losses: Callable[[], Mapping[int, float]] = dict
    preferences: Callable[[], PreferenceFigures | None] = lambda: None
    describe_samples: Callable[[Iterable[int]], str] = format_ranges
    begins: Callable[[ExecutionPlan], None] = lambda plan: None
    evaluate: Callable[[int], EvalDone | None] = lambda step: None
    stops: Callable[[Mapping[str, Any], str], None] = lambda place, why: None
    watch: CostWatch | None = None


def train_steps(
    loader: DynaPipeDataLoader,
    executors: StepExecutors,
    optimizer: Optimizer,
    settings: LoopSettings,
    listeners: Sequence[Listener],
    hooks: LoopHooks = LoopHooks(),
) -> Iterator[StepDone]:
    """Run the steps from the loader's place on, one each time the caller asks for the next.

    Every rank calls this alike, with its own place. No figure has the time that the caller takes between two steps.
    """
    if loader_step(loader) >= settings.num_steps:
        return
    totals, begun = _Totals(), _Moment.now()
    for place, micro_batches, plan in _steps(loader):
        is_recorded = settings.is_traced(plan.step) or (hooks.watch is not None and hooks.watch.records(plan.step))
        hooks.begins(plan)
        ran = _run_step(executors.of(is_recorded=is_recorded), optimizer, hooks, place, plan, micro_batches)
        spans = executors.recorder.take()
        actions = () if hooks.watch is None else hooks.watch.seen(plan, spans)
        totals = totals.and_step(
            ran.end.cpu_s - begun.cpu_s,
            work_of(plan.micro_batches) if hooks.counts_work(plan) else Work(),
            hooks.own_bytes(max((span.num_bytes for span in spans), default=0)),
            plan.prediction.peak_bytes[plan.pp_rank],
        )
        everyone: list[RankFigures] = []
        if settings.gathers(plan.step):
            offset_s = executors.recorder.clock_offset_s
            interval = (ran.start_s - offset_s, ran.executed_s - offset_s)
            drifting = DriftingShape.furthest(actions)
            own_figures = _figures(totals, spans, interval, plan, loader.exposed_planning_s, drifting)
            everyone = hooks.gather(own_figures, f"step {plan.step}, figures of all ranks")
        traced = spans if settings.is_traced(plan.step) else ()
        done = replace(
            _step_done(plan, place, ran, begun, totals, everyone, traced),
            evaluation=hooks.evaluate(plan.step),
            fit=None if hooks.watch is None else hooks.watch.fit(plan.step),
        )
        if everyone:
            totals = totals.after_gathering()
        begun = ran.end if done.evaluation is None and done.fit is None else _Moment.now()
        for listener in listeners:
            listener.step_done(done)
        paused = _Moment.now()
        yield done
        if done.number >= settings.num_steps:
            return
        begun = begun.later_by(paused, _Moment.now())


@dataclass(frozen=True, slots=True)
class _Moment:
    """What `perf_counter` and `process_time` say at one moment."""

    s: float
    cpu_s: float

    @classmethod
    def now(cls) -> _Moment:
        return cls(time.perf_counter(), time.process_time())

    def later_by(self, start: _Moment, end: _Moment) -> _Moment:
        """This moment moved by the time from `start` to `end`."""
        return _Moment(self.s + end.s - start.s, self.cpu_s + end.cpu_s - start.cpu_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RanStep:
    """A step that has run and updated the weights, or refused to. Times are of `perf_counter`."""

    loss: float
    preferences: PreferenceFigures | None
    updated: float | Refused
    learning_rate: float
    start_s: float
    executed_s: float
    end: _Moment


def _step_done(
    plan: ExecutionPlan,
    place: Mapping[str, Any],
    ran: _RanStep,
    begun: _Moment,
    totals: _Totals,
    everyone: Sequence[RankFigures],
    traced: Sequence[Span],
) -> StepDone:
    """A step that has `ran` since it had `begun`; nobody has evaluated its weights yet. `everyone`: the figures of all
    ranks, where they were gathered."""
    origin_s = min((rank.start_s for rank in everyone), default=0.0)
    return StepDone(
        step=plan.step,
        epoch=place["epoch"],
        epoch_step=place["step"],
        loss=ran.loss,
        grad_norm=math.nan if isinstance(ran.updated, Refused) else ran.updated,
        refused=ran.updated.reason if isinstance(ran.updated, Refused) else "",
        learning_rate=ran.learning_rate,
        preferences=ran.preferences,
        real_tokens=plan.real_tokens,
        padded_tokens=plan.padded_tokens,
        num_micro_batches=plan.num_micro_batches,
        step_s=ran.end.s - begun.s,
        executed_s=ran.executed_s - ran.start_s,
        cpu_s=ran.end.cpu_s - begun.cpu_s,
        peak_bytes=totals.peak_bytes,
        predicted_makespan_s=plan.makespan_s,
        predicted_bubble_ratio=plan.prediction.bubble_ratio,
        predicted_peak_bytes=totals.predicted_peak_bytes,
        all_ranks=AllRanks.of(everyone, num_steps=totals.num_steps) if everyone else None,
        spans=tuple(moved(span, origin_s) for span in traced),
    )


def _run_step(
    executor: PipelineExecutor,
    optimizer: Optimizer,
    hooks: LoopHooks,
    place: Mapping[str, Any],
    plan: ExecutionPlan,
    micro_batches: Sequence[Batch],
) -> _RanStep:
    """`place`: the loader's state before the step."""
    start_s, learning_rate = time.perf_counter(), optimizer.lr
    loss = executor.execute(plan, micro_batches)
    executed_s = time.perf_counter()
    try:
        updated = optimizer.step(ExecutedStep(plan, loss, hooks.micro_batch_losses(), hooks.describe_samples))
    except NotFiniteError as error:
        hooks.stops(place, str(error))
        raise
    return _RanStep(
        loss=loss,
        preferences=hooks.preferences(),
        updated=updated,
        learning_rate=learning_rate,
        start_s=start_s,
        executed_s=executed_s,
        end=_Moment.now(),
    )


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

    def after_gathering(self) -> _Totals:
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
