"""From samples to the proven step: planned, lowered for all ranks, proven together, and fitting with its buffers.

samples ─► StepPlanner.plan ─► StepPlan ─► lower ─► verify_step ─► ProvenStep

All who need instructions, or say what a step will be, come here: loader, planner processes, commands, traces. So what
is shown is what runs, and what would not run is refused in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from dynapipe_ext.batch.micro_batches import SampleLength, sample_pieces
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.errors import PlanError
from dynapipe_ext.executor.instructions import ExecutionPlan, RankPrograms, lower
from dynapipe_ext.executor.proof import verify, verify_step, with_collectives
from dynapipe_ext.schedules.step_plan import StepPlan

Plans = tuple[tuple[ExecutionPlan, ...], ...]  # indexed [replica][pp_rank]

PROVEN_RULE = "steps end under NCCL's rules, even where a rank runs its transfers and collectives one at a time"
_MOST_PLANS = 6  # of a step: less room makes fewer micro-batches wait; so a few rounds settle it


class StepPlanner(Protocol):
    """Plans one global batch as a pure function of its samples' lengths, the step and its own settings."""

    @property
    def topology(self) -> Topology: ...

    @property
    def memory_limit_bytes(self) -> float: ...

    @property
    def activation_format(self) -> ActivationFormat: ...

    @property
    def replica_collectives(self) -> ReplicaCollectives: ...

    def plan(self, samples: Sequence[SampleLength], *, step: int) -> StepPlan:
        """Return a plan within the limit. Raises PlanError if there is none."""
        ...

    def replan(self, plan: StepPlan, samples: Sequence[SampleLength], *, reserve_bytes: int) -> StepPlan:
        """Return a plan of the same samples and step that leaves `reserve_bytes` of the limit free on every rank.
        Raises PlanError if there is none."""
        ...

    def to_json(self) -> Mapping[str, Any]:
        """The settings from which the class's `from_json` makes an equal planner in another process."""
        ...


@dataclass(frozen=True, slots=True)
class ProvenStep:
    """A step and the proven instructions of all its ranks; what the latter promise counts buffers in flight as well.

    `in_flight_bytes` [replica][pp_rank] are the most bytes of such buffers that a rank holds at once.
    """

    step_plan: StepPlan
    plans: Plans
    in_flight_bytes: tuple[tuple[int, ...], ...]

    def plan_of(self, dp_rank: int, pp_rank: int) -> ExecutionPlan:
        """The plan of a rank: that of the block of its data parallel rank."""
        return self.plans[dp_rank // self.step_plan.width][pp_rank]

    @property
    def peak_bytes(self) -> int:
        """The largest predicted peak of any rank."""
        return max(replica[0].peak_bytes for replica in self.plans)


def prove_step(planner: StepPlanner, samples: Sequence[SampleLength], *, step: int) -> ProvenStep:
    """The proven step of one global batch, within the planner's memory limit.

    Buffers in flight may not fit beside what the planner has filled. Then the step is planned again with that many
    bytes reserved. If that is not enough, the reserve becomes the most that was ever in flight: this settles it at
    once, but may cost makespan. If no plan can spare that much, only the excess is added to the reserve.

    Raises PlanError or VerificationError; ConfigError if the planner does not know what a proof needs.
    """
    limit, reserve, most_in_flight = int(planner.memory_limit_bytes), 0, 0
    prove_plan = partial(prove, activation_format=planner.activation_format, collectives=planner.replica_collectives)
    first = proven = prove_plan(planner.plan(samples, step=step))
    for attempt in range(_MOST_PLANS):
        too_many = proven.peak_bytes - limit
        if too_many <= 0:
            return proven
        if attempt + 1 == _MOST_PLANS:
            break
        most_in_flight = max(most_in_flight, *(max(replica) for replica in proven.in_flight_bytes))
        reserve += too_many
        if reserve >= limit:  # with fewer micro-batches in flight buffers need less, too
            reserve = (reserve - too_many + limit) // 2
        replan = partial(planner.replan, first.step_plan, samples)
        step_plan = None
        if attempt and reserve < most_in_flight < limit:
            with suppress(PlanError):
                step_plan = replan(reserve_bytes=most_in_flight)
                reserve = most_in_flight
        proven = prove_plan(step_plan or replan(reserve_bytes=reserve), like=first)
    raise PlanError(
        f"step {step}: buffers in flight take a rank to {proven.peak_bytes} B but the limit is {limit} B: raise the"
        " limit, or cap micro-batches with max_tokens"
    )


def prove(
    step_plan: StepPlan,
    activation_format: ActivationFormat,
    collectives: ReplicaCollectives,
    *,
    like: ProvenStep | None = None,
) -> ProvenStep:
    """A step as planned, lowered and proven. The caller decides whether its peaks fit a limit.

    Replicas that have not changed since the step `like` this one, made alike, keep their instructions; all are proven
    anew. Raises VerificationError where ranks would wait for ever or disagree.
    """
    collectives = collectives.at_width(step_plan.width)
    replicas_meet = any(collectives.of_micro_batches)  # then one's times order the transfers of all
    unchanged = {} if like is None or replicas_meet else _unchanged(step_plan, like)
    lowered = lower(step_plan, activation_format, replicas_meet=replicas_meet, unchanged=unchanged)
    buffers = _in_flight_bytes(step_plan, lowered, collectives)
    plans = []
    for replica, in_flight in zip(lowered, buffers, strict=True):
        promised = replica[0].prediction
        peaks = tuple(sum(pair) for pair in zip(promised.peak_bytes, in_flight, strict=True))
        promised = replace(promised, peak_bytes=peaks)
        plans.append(tuple(replace(plan, prediction=promised) for plan in replica))
    return ProvenStep(step_plan, tuple(plans), tuple(tuple(replica) for replica in buffers))


def _in_flight_bytes(step_plan: StepPlan, plans: Plans, collectives: ReplicaCollectives) -> list[list[int]]:
    """The most bytes of buffers that each rank holds at once, [replica][pp_rank], of ranks proven to end together.

    Where replicas meet at the end of the step alone, each is proven by itself: behind its transfers all ranks that hold
    the same stages issue the same collectives in one order, and nothing follows.
    """
    programs, width = [[plan.instructions for plan in replica] for replica in plans], step_plan.batch.width
    counts = [len(replica.micro_batches) for replica in step_plan.batch.replicas]
    stage_ranks, forward_only = step_plan.schedules[0].stage_ranks, step_plan.forward_only
    pieces = [sample_pieces(replica.micro_batches) for replica in step_plan.batch.replicas]
    if width == 1 and not any(collectives.of_micro_batches):
        return [
            verify(ranks, stage_ranks, count, forward_only=forward_only, sample_pieces=of_replica)
            for ranks, count, of_replica in zip(programs, counts, pieces, strict=True)
        ]
    if forward_only:
        collectives = replace(collectives, at_end=())  # there are no gradients to reduce
    return verify_step(
        with_collectives(programs, collectives, width=width),
        stage_ranks,
        counts,
        forward_only=forward_only,
        sample_pieces=pieces,
        width=width,
    )[::width]


def _unchanged(step_plan: StepPlan, like: ProvenStep) -> dict[int, RankPrograms]:
    """Instructions of the replicas whose schedule and costs are the very objects of the step before."""
    before = like.step_plan
    return {
        dp_rank: tuple(plan.instructions for plan in replica)
        for dp_rank, replica in enumerate(like.plans)
        if step_plan.schedules[dp_rank] is before.schedules[dp_rank]
        and step_plan.costs[dp_rank] is before.costs[dp_rank]
    }
