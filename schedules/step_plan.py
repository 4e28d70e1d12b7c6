"""A planned step: micro-batches, a schedule for each replica, and the predictions of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from dynapipe_ext.batch.micro_batches import GlobalBatchPlan, MicroBatch, ReplicaPlan, SampleLength, sample_pieces
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import Certificate, bound_replica, find_batch_floor
from dynapipe_ext.schedules.evaluation.simulate import (
    SharedCores,
    SpanNs,
    compute_bubble_ratio,
    compute_mean_makespan_ns,
    compute_peak_bytes,
    find_last_end_ns,
    simulate,
    simulate_ns,
    simulate_shared_ns,
    validate,
)
from dynapipe_ext.timeline import Trace

ReplicaCosts = tuple[MicroBatchCosts, ...]  # of each replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted step of one replica. `peak_bytes`: the most that each pipeline rank holds at any time.
    `lower_bound_ns`: of its makespan, in any order of its micro-batches; 0 before `certify`."""

    makespan_ns: int
    lower_bound_ns: int
    peak_bytes: tuple[int, ...]
    bubble_ratio: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A planned global batch; entry d of each tuple belongs to replica d.

    `costs`: of the replica's micro-batches, priced once for all that judge, lower or show the plan. `predictions`: of
    the schedule only, without buffers of messages in flight, which come with its instructions. `cores`: those that the
    predicted ranks share; None: each has one, or a device, of its own. `certificate`: the bounds of the step; None
    before `certify`.

    Raises PlanError if some replicas are forward-only and others are not.
    """

    batch: GlobalBatchPlan
    schedules: tuple[PipelineSchedule, ...]
    predictions: tuple[Prediction, ...]
    costs: ReplicaCosts = field(repr=False, compare=False)  # follow from the batch
    cores: SharedCores | None = None
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        if len({schedule.forward_only for schedule in self.schedules}) > 1:
            raise PlanError("some replicas are forward-only and others are not: plan all of a step alike")

    @property
    def forward_only(self) -> bool:
        return self.schedules[0].forward_only

    @property
    def width(self) -> int:
        """Number of data parallel ranks of each replica: the context-parallel degree."""
        return self.batch.width

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The simulated step of each replica: one track per pipeline rank."""
        spans = simulate_step(self.schedules, self.costs, self.cores)
        return tuple(simulate(*replica) for replica in zip(self.schedules, self.costs, spans, strict=True))

    @property
    def makespan_ns(self) -> int:
        """Predicted makespan of the slowest replica."""
        return max(p.makespan_ns for p in self.predictions)

    @property
    def makespan_s(self) -> float:
        return self.makespan_ns / 1e9

    def mean_makespan_ns(self, noise: float) -> int:
        """Return the largest of the replicas' mean makespans under timing noise; `noise` 0: `makespan_ns`."""
        if not noise:
            return self.makespan_ns
        priced = zip(self.schedules, self.costs, strict=True)
        return max(compute_mean_makespan_ns(schedule, costs, noise) for schedule, costs in priced)

    @property
    def lower_bound_s(self) -> float:
        """Lower bound of the step under any order of these micro-batches: the largest bound of a replica."""
        return max(p.lower_bound_ns for p in self.predictions) / 1e9

    @property
    def peak_bytes(self) -> int:
        return max(b for p in self.predictions for b in p.peak_bytes)

    @property
    def bubble_ratio(self) -> float:
        """Idle time divided by (ranks of all replicas x makespan of the slowest replica)."""
        busy_ns = sum((1 - p.bubble_ratio) * p.makespan_ns * len(p.peak_bytes) for p in self.predictions)
        whole_ns = max(p.makespan_ns for p in self.predictions) * sum(len(p.peak_bytes) for p in self.predictions)
        return 1.0 - busy_ns / whole_ns if whole_ns > 0 else 0.0


def price_replicas(costs: CostModel, replicas: Iterable[Sequence[MicroBatch]]) -> ReplicaCosts:
    """Return the costs of every replica's micro-batches, priced in one call. Raises PlanError for one without price."""
    ends = [0, *accumulate(map(len, replicas := list(replicas)))]
    priced = costs.evaluate([m for replica in replicas for m in replica])
    return tuple(priced.take(range(first, end)) for first, end in pairwise(ends))


def predict(
    replicas: Sequence[Sequence[MicroBatch]],
    schedules: Sequence[PipelineSchedule],
    costs: Sequence[MicroBatchCosts],
    *,
    cores: SharedCores | None,
    memory_limit_bytes: int | None,
) -> tuple[Prediction, ...]:
    """Return the prediction of each replica, validated and simulated, without lower bounds.

    Raises PlanError for a schedule that cannot run, or exceeds the limit (None: there is none).
    """
    peaks = []
    for d, (micro_batches, schedule, priced) in enumerate(zip(replicas, schedules, costs, strict=True)):
        validate(schedule, len(micro_batches), sample_pieces(micro_batches), progress=False)
        peaks.append(held := compute_peak_bytes(schedule, priced))
        if memory_limit_bytes is not None and max(held) > memory_limit_bytes:
            raise PlanError(
                f"replica {d}: {schedule.name} needs {max(held)} B on pipeline rank {held.index(max(held))} but the"
                f" limit is {memory_limit_bytes} B: use the adaptive schedule, smaller micro-batches, recomputation or"
                " more tp"
            )
    return tuple(
        Prediction(
            makespan_ns=find_last_end_ns(spans),
            lower_bound_ns=0,
            peak_bytes=held,
            bubble_ratio=compute_bubble_ratio(spans),
        )
        for spans, held in zip(simulate_step(schedules, costs, cores), peaks, strict=True)
    )


def plan_of_schedule(
    schedule: PipelineSchedule, micro_batches: Sequence[MicroBatch], costs: MicroBatchCosts, *, step: int = 0
) -> StepPlan:
    """Return the plan of a step of one replica under a given schedule, without lower bounds."""
    predictions = predict([micro_batches], [schedule], [costs], cores=None, memory_limit_bytes=None)
    batch = GlobalBatchPlan(step=step, replicas=(ReplicaPlan(0, tuple(micro_batches)),))
    return StepPlan(batch, (schedule,), predictions, (costs,))


def simulate_step(
    schedules: Sequence[PipelineSchedule], costs: Sequence[MicroBatchCosts], cores: SharedCores | None
) -> tuple[list[list[SpanNs]], ...]:
    """Return each replica's spans (`simulate_ns`), on ranks that share `cores` or (None) have one each."""
    replicas = list(zip(schedules, costs, strict=True))
    return tuple(simulate_ns(*one) for one in replicas) if cores is None else simulate_shared_ns(replicas, cores)


def certify(
    step_plan: StepPlan, costs: CostModel, samples: Sequence[SampleLength], *, memory_limit_bytes: int | None = None
) -> Certificate:
    """Return the bounds of a plan of `samples` under `costs`. Without a limit there is no byte-time bound, and the
    batch bound is that of plans without a limit.

    Raises PlanError if the weights exceed the limit, or if a bound is above the makespan (a defect, never a plan).
    """
    pairs = zip(step_plan.schedules, step_plan.costs, strict=True)
    limit, ranks, dp = memory_limit_bytes, step_plan.schedules[0].stage_ranks, len(step_plan.schedules)
    certificate = Certificate(
        makespan_ns=step_plan.makespan_ns,
        replicas=tuple(bound_replica(*pair, split=pair[0].is_split, memory_limit_bytes=limit) for pair in pairs),
        batch_ns=bound_batch_ns(step_plan, costs, samples, ranks, dp, limit),
    )
    for name, bound_ns in (("these micro-batches", certificate.bound_ns), ("this batch", certificate.batch_ns or 0)):
        if bound_ns > certificate.makespan_ns:
            raise PlanError(
                f"the plan of step {step_plan.batch.step} takes {certificate.makespan_ns} ns but no plan of {name} can"
                f" take less than {bound_ns} ns: it was priced by another cost model or limit; plan it again"
            )
    return certificate


def free_batch_ns(step_plan: StepPlan, costs: CostModel, samples: Sequence[SampleLength]) -> int | None:
    """Return a certificate's `free_batch_ns`: the least work of the samples divided by the number of ranks, or None."""
    ranks = step_plan.schedules[0].stage_ranks
    work_ns = bound_batch_ns(step_plan, costs, samples, (0,) * len(ranks), 1, None)
    return None if work_ns is None else work_ns // (len(set(ranks)) * len(step_plan.schedules))


def bound_batch_ns(
    step_plan: StepPlan,
    costs: CostModel,
    samples: Sequence[SampleLength],
    stage_ranks: Sequence[int],
    dp: int,
    memory_limit_bytes: int | None,
) -> int | None:
    """Return the lower bound in ns of all plans like this one (see `Certificate.batch_ns`) on `dp` replicas with these
    ranks; `costs` are those of one rank of a replica. None if no bound is known."""
    micro_batches = step_plan.batch.micro_batches
    pieces = any(m.attention == "carried" for m in micro_batches)
    if not pieces and sum(len(m.samples) for m in micro_batches) != len(samples):
        return None
    floor = find_batch_floor(
        costs,
        samples,
        stage_ranks,
        split=any(schedule.is_split for schedule in step_plan.schedules),
        packed=any(m.layout == "packed" for m in micro_batches),
        pieces=pieces,
        memory_limit_bytes=memory_limit_bytes,
    )
    return None if floor is None else floor.bound_ns(dp)
