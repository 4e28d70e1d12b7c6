"""The steps that benches time: proven ones only. A makespan of a plan that could not run says nothing.

    samples ─► planned_step ─────────────────┐
    given micro-batches ─► step_of_replicas ─┴─► prove ─► ProvenStep within the limit, or the PlanError of why not

A plan that the proof rejects (VerificationError) ends a bench: it is a fault of the bench or of the planner.
`tests/repo/test_benches.py` holds that no bench plans or simulates a step by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from dynapipe_ext.batch.micro_batches import GlobalBatchPlan, MicroBatch, ReplicaPlan, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.executor.instructions import lower_schedule
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.executor.proven_step import ProvenStep, prove, prove_step
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import simulate_ns
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.published.by_name import make_schedule_of_costs
from dynapipe_ext.schedules.step_plan import StepPlan, predict, price_replicas
from dynapipe_ext.settings.plan_rules import ScheduleName

FEW_BYTES = ActivationFormat(4)  # per token of a message, so that buffers in flight hardly count
Replicas = Sequence[Sequence[MicroBatch]]
MakeSchedule = Callable[[MicroBatchCosts], PipelineSchedule]


def planned_step(planner: Planner, samples: Sequence[SampleLength], *, step: int = 0) -> ProvenStep:
    """Plan and prove one step. A planner without an activation format gets FEW_BYTES; one whose costs do not say what
    replicas issue together inside micro-batches issues nothing there. Raises PlanError if nothing fits."""
    if planner.format is None:
        planner = replace(planner, format=FEW_BYTES)
    if planner.collectives is None and planner.costs.facts.replica_collectives is None:
        planner = replace(planner, collectives=ReplicaCollectives())
    return prove_step(planner, samples, step=step)


def step_of_replicas(
    replicas: Replicas, schedules: MakeSchedule | Sequence[PipelineSchedule], costs: CostModel, limit_bytes: int
) -> ProvenStep:
    """Prove a step of given micro-batches, each replica's under a schedule that is given or made of its costs.

    Raises PlanError for what the schedule, the costs or the limit do not allow.
    """
    replicas = [list(micro_batches) for micro_batches in replicas]
    priced = price_replicas(costs, replicas)
    made = tuple(map(schedules, priced)) if callable(schedules) else tuple(schedules)
    predictions = predict(replicas, made, priced, cores=None, memory_limit_bytes=limit_bytes)
    plans = tuple(ReplicaPlan(dp_rank, tuple(micro_batches)) for dp_rank, micro_batches in enumerate(replicas))
    step_plan = StepPlan(GlobalBatchPlan(step=0, replicas=plans), made, predictions, priced)
    return proven(step_plan, costs, limit_bytes)


def proven(step_plan: StepPlan, costs: CostModel, limit_bytes: int | None = None) -> ProvenStep:
    """Prove a step as it is planned. Raises PlanError if it is above the limit with its buffers in flight."""
    collectives = costs.facts.replica_collectives or ReplicaCollectives()
    step = prove(step_plan, FEW_BYTES, collectives)
    if limit_bytes is not None and step.peak_bytes > limit_bytes:
        raise PlanError(f"the step needs {step.peak_bytes} B but the limit is {limit_bytes} B: take another")
    return step


def under_schedule(
    name: ScheduleName, replicas: Replicas, costs: CostModel, stage_ranks: Sequence[int], limit_bytes: int
) -> ProvenStep:
    """Prove a step of given micro-batches in their order, under a published schedule."""
    named = partial(make_schedule_of_costs, name, stage_ranks, limit_bytes)
    return step_of_replicas(replicas, named, costs, limit_bytes)


def in_best_orders_s(
    name: ScheduleName, replicas: Replicas, costs: CostModel, stage_ranks: Sequence[int], limit_bytes: int
) -> float | None:
    """Return seconds of a step under a published schedule, each replica in the best of three orders: its own, the
    shortest first, the longest first. None if a replica fits in none. Replicas must meet at the end of the step only,
    so that each is proven by itself."""
    assert not any((costs.facts.replica_collectives or ReplicaCollectives()).of_micro_batches)
    ends = []
    for replica in filter(None, replicas):
        work = costs.evaluate(replica).forward_ns.sum(axis=0).tolist()
        ascending = sorted(range(len(replica)), key=work.__getitem__)
        best = fastest(
            partial(under_schedule, name, [[replica[m] for m in order]], costs, stage_ranks, limit_bytes)
            for order in (range(len(replica)), ascending, ascending[::-1])
        )
        if best is None:
            return None
        ends.append(best.step_plan.makespan_s)
    return max(ends)


def prove_schedule(schedule: PipelineSchedule, costs: MicroBatchCosts) -> None:
    """Prove a schedule of micro-batches that are only known by their costs. Raises VerificationError."""
    count = costs.num_micro_batches
    micro_batches = [MicroBatch((SampleLength(i, 1),)) for i in range(count)]
    times = simulate_ns(schedule, costs)
    programs = lower_schedule(schedule, times, micro_batches, FEW_BYTES, costs.transfer_ns.tolist())
    verify(programs, schedule.stage_ranks, count)


def fastest(makers: Iterable[Callable[[], ProvenStep]]) -> ProvenStep | None:
    """Return the proven step that ends first, the first of equals; those that do not fit are left out, and None says
    that none does."""
    best: ProvenStep | None = None
    for make in makers:
        try:
            step = make()
        except PlanError:
            continue
        if best is None or step.step_plan.makespan_s < best.step_plan.makespan_s:
            best = step
    return best
