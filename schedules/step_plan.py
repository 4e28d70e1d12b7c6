"""A planned step: micro-batches, a schedule for each replica, and what both promise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from dynapipe_ext.batch.micro_batches import GlobalBatchPlan, MicroBatch, sample_pieces
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.judge.bounds import Certificate
from dynapipe_ext.schedules.judge.simulate import (
    SharedCores,
    SpanNs,
    bubble_ratio,
    last_end_ns,
    peak_bytes,
    simulate_ns,
    simulate_shared_ns,
    trace_of,
    validate,
)
from dynapipe_ext.timeline import Trace

ReplicaCosts = tuple[MicroBatchCosts, ...]  # of each replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is promised of one replica's step; `peak_bytes` is per pipeline rank."""

    makespan_ns: int
    lower_bound_ns: int
    peak_bytes: tuple[int, ...]
    bubble_ratio: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a Planner returns for one global batch; entry d of each tuple belongs to data-parallel rank d.

    `costs` are those of the replica's micro-batches, evaluated once for all who judge, lower or show the plan. The
    predictions are of the schedule alone: buffers in flight come with its instructions. `certificate` holds the bounds
    of the whole step; None where nobody asked for them (see `certify`). Predictions are of ranks that share
    `cores`; None: each has one or a device.

    Errors: PlanError where some replicas run forwards alone and others do not.
    """

    batch: GlobalBatchPlan
    schedules: tuple[PipelineSchedule, ...]
    predictions: tuple[Prediction, ...]
    costs: ReplicaCosts = field(repr=False, compare=False)  # follow from the batch
    cores: SharedCores | None = None
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        if len({schedule.forward_only for schedule in self.schedules}) > 1:
            raise PlanError("some replicas run forwards alone and others do not: plan all of a step alike")

    @property
    def forward_only(self) -> bool:
        """Whether the step is one of forwards alone, on all replicas."""
        return self.schedules[0].forward_only

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Each replica's step, simulated; one track a pipeline rank."""
        spans = step_spans(self.schedules, self.costs, self.cores)
        return tuple(trace_of(*replica) for replica in zip(self.schedules, self.costs, spans, strict=True))

    @property
    def makespan_ns(self) -> int:
        """Predicted makespan of the slowest replica."""
        return max(p.makespan_ns for p in self.predictions)

    @property
    def makespan_s(self) -> float:
        return self.makespan_ns / 1e9

    @property
    def lower_bound_s(self) -> float:
        """No order of these micro-batches can be faster: the bound of the replica with the largest one."""
        return max(p.lower_bound_ns for p in self.predictions) / 1e9

    @property
    def peak_bytes(self) -> int:
        return max(b for p in self.predictions for b in p.peak_bytes)

    @property
    def bubble_ratio(self) -> float:
        """Idle over (ranks x makespan of the slowest replica), all replicas together."""
        busy_ns = sum((1 - p.bubble_ratio) * p.makespan_ns * len(p.peak_bytes) for p in self.predictions)
        whole_ns = max(p.makespan_ns for p in self.predictions) * sum(len(p.peak_bytes) for p in self.predictions)
        return 1.0 - busy_ns / whole_ns if whole_ns > 0 else 0.0


def replica_costs(costs: CostModel, replicas: Iterable[Sequence[MicroBatch]]) -> ReplicaCosts:
    """Costs of every replica's micro-batches, priced all at once. Errors: PlanError for one that has no price."""
    ends = [0, *accumulate(map(len, replicas := list(replicas)))]
    priced = costs.evaluate([m for replica in replicas for m in replica])
    return tuple(priced.take(range(first, end)) for first, end in pairwise(ends))


def shared_by_twins(
    replicas: Sequence[Sequence[MicroBatch]], schedules: Sequence[PipelineSchedule], costs: ReplicaCosts
) -> tuple[tuple[PipelineSchedule, ...], ReplicaCosts]:
    """Equal schedules and costs, where replicas do the same in one order, as one object each: a costs object is of one
    schedule, and who judges replicas may do so once for each."""
    first: dict[tuple[object, ...], list[tuple[PipelineSchedule, MicroBatchCosts]]] = {}
    found = []
    for micro_batches, schedule, priced in zip(replicas, schedules, costs, strict=True):
        twins = first.setdefault((priced.digest(), sample_pieces(micro_batches)), [])
        twin = next((one for one in twins if one[0] == schedule), None)
        if twin is None:
            twins.append(twin := (schedule, priced))
        found.append(twin)
    return tuple(schedule for schedule, _ in found), tuple(priced for _, priced in found)


def predicted(
    replicas: Sequence[Sequence[MicroBatch]],
    schedules: Sequence[PipelineSchedule],
    costs: Sequence[MicroBatchCosts],
    *,
    cores: SharedCores | None,
    memory_limit_bytes: int,
    like: StepPlan | None = None,
) -> tuple[Prediction, ...]:
    """What each replica's step will be, validated and simulated apart from what made it; without lower bounds. Twins
    share their costs (`shared_by_twins`).

    Where each rank has a core of its own, replicas whose schedule and costs are the very objects of a plan `like` this
    one have its predictions. Errors: PlanError for a schedule that cannot run, or exceeds the limit.
    """
    told: dict[int, Prediction] = {}
    if like is not None and cores is None:
        before = enumerate(zip(like.schedules, like.costs, like.predictions, strict=True))
        told = {d: one for d, (order, priced, one) in before if order is schedules[d] and priced is costs[d]}
    fresh = [dp_rank for dp_rank in range(len(schedules)) if dp_rank not in told]
    peaks: dict[int, tuple[int, ...]] = {}  # by costs, which twins share
    for d in fresh:
        if id(costs[d]) in peaks:
            continue
        validate(schedules[d], len(replicas[d]), sample_pieces(replicas[d]))
        held = peaks[id(costs[d])] = peak_bytes(schedules[d], costs[d])
        if max(held) > memory_limit_bytes:
            raise PlanError(
                f"replica {d}: {schedules[d].name} needs {max(held)} B on pipeline rank {held.index(max(held))} but the"
                f" limit is {memory_limit_bytes} B: use the adaptive schedule, smaller micro-batches, recomputation or"
                " more tp"
            )
    known: dict[int, Prediction] = {}  # by spans, which twins share unless they share cores
    timed = step_spans([schedules[d] for d in fresh], [costs[d] for d in fresh], cores)
    for d, spans in zip(fresh, timed, strict=True):
        if id(spans) not in known:
            end_ns, bubble, peak = last_end_ns(spans), bubble_ratio(spans), peaks[id(costs[d])]
            known[id(spans)] = Prediction(makespan_ns=end_ns, lower_bound_ns=0, peak_bytes=peak, bubble_ratio=bubble)
        told[d] = known[id(spans)]
    return tuple(told[d] for d in range(len(schedules)))


def step_spans(
    schedules: Sequence[PipelineSchedule], costs: Sequence[MicroBatchCosts], cores: SharedCores | None
) -> tuple[list[list[SpanNs]], ...]:
    """When each replica's actions run (`simulate_ns`), on ranks that share `cores` or (None) have one each."""
    replicas = list(zip(schedules, costs, strict=True))
    if cores is not None:
        return simulate_shared_ns(replicas, cores)
    known: dict[tuple[int, int], list[list[SpanNs]]] = {}
    for schedule, priced in replicas:
        if (pair := (id(schedule), id(priced))) not in known:
            known[pair] = simulate_ns(schedule, priced)
    return tuple(known[id(schedule), id(priced)] for schedule, priced in replicas)
