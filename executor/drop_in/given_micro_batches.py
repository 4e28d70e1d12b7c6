"""Plans for micro-batches that a loop has cut itself: of one shape, as Megatron's samplers make them, or of any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.adjustments import adjust
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import check_same_plans
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import compute_peak_bytes
from dynapipe_ext.schedules.published.full_backward import interleaved_1f1b
from dynapipe_ext.schedules.search.flow_shop import forward_schedule
from dynapipe_ext.schedules.search.optimizer import NO_LIMIT_BYTES, optimize
from dynapipe_ext.schedules.step_plan import StepPlan, plan_of_schedule
from dynapipe_ext.settings.plan_rules import PlanRules


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenShapes:
    """Rows and positions of every micro-batch of a replica, in order of entry. `as_given` keeps that order whatever the
    plan; of one shape it is kept anyway."""

    shapes: tuple[tuple[int, int], ...]
    forward_only: bool = False
    as_given: bool = False

    @classmethod
    def alike(cls, count: int, *, rows: int, seq_len: int, forward_only: bool = False) -> GivenShapes:
        return cls(shapes=((rows, seq_len),) * count, forward_only=forward_only)

    @property
    def are_alike(self) -> bool:
        return len(set(self.shapes)) <= 1

    def __str__(self) -> str:
        count, (rows, seq_len) = len(self.shapes), self.shapes[0]
        if self.are_alike:
            return f"{count} micro-batches of {rows} x {seq_len} tokens"
        most = max(rows * seq_len for rows, seq_len in self.shapes)
        return f"{count} micro-batches of their own shapes, at most {most} tokens,"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPlanner:
    """StepPlanner of one replica whose micro-batches are given; replicas with the same run the same plan.

    Of one shape, micro-batches are numbered in the order in which every stage runs their forwards, so that the k-th
    `next` of each stage's data iterator is micro-batch k. Without `memory_limit_bytes` no rank holds more than under
    Megatron's own schedule ((interleaved) 1F1B), which is taken as it is for shapes of any kind `as_given`, and where
    replicas meet inside micro-batches: its order depends on no shape.
    """

    pipeline: MegatronPipeline
    given: GivenShapes
    split_backward: bool = False
    limit_bytes: int | None = None
    effort: int = PlanRules().effort

    @property
    def topology(self) -> Topology:
        return replace(self.pipeline.topology, dp=1, width=1)

    @property
    def memory_limit_bytes(self) -> float:
        return NO_LIMIT_BYTES if self.limit_bytes is None else self.limit_bytes

    @property
    def activation_format(self) -> ActivationFormat:
        return self.pipeline.activation_format

    @property
    def replica_collectives(self) -> ReplicaCollectives:
        """Of replicas that run one program, whatever they issue meets; what is left is the order at the end."""
        return ReplicaCollectives()

    def samples(self) -> list[SampleLength]:
        lengths = [seq_len for rows, seq_len in self.given.shapes for _ in range(rows)]
        return [SampleLength(i, length, 0, length) for i, length in enumerate(lengths)]

    def plan(self, samples: Any, *, step: int, reserve_bytes: int = 0) -> StepPlan:
        """Errors: PlanError where the micro-batches do not fit `limit_bytes`."""
        recompute = "none" if self.given.forward_only else self.pipeline.recompute or "none"
        rows, shapes = iter(samples), self.given.shapes
        micro_batches = tuple(MicroBatch(tuple(islice(rows, count)), recompute=recompute) for count, _ in shapes)
        model = adjust(self.pipeline.costs, forward_only=True) if self.given.forward_only else self.pipeline.costs
        costs = model.evaluate(micro_batches)
        return plan_of_schedule(self._scheduled(costs, reserve_bytes), micro_batches, costs, step=step)

    def replan(self, plan: StepPlan, samples: Any, *, reserve_bytes: int) -> StepPlan:
        return self.plan(samples, step=plan.batch.step, reserve_bytes=reserve_bytes)

    def to_json(self) -> Mapping[str, Any]:
        raise NotImplementedError("each rank plans the micro-batches of its loop for itself")

    def _scheduled(self, costs: MicroBatchCosts, reserve_bytes: int) -> PipelineSchedule:
        if self.given.forward_only:
            return forward_schedule(costs, self.topology.stage_ranks)
        pp = self.topology.pp
        of_megatron = interleaved_1f1b(pp, len(self.given.shapes), self.topology.num_stages // pp)
        if self._keeps_megatrons:
            return of_megatron
        if self.limit_bytes is not None:
            limit = self.limit_bytes - reserve_bytes
        elif self.pipeline.in_v:  # which is no schedule of Megatron's
            limit = self.pipeline.usable_bytes
        elif self.pipeline.counts_memory:
            limit = max(compute_peak_bytes(of_megatron, costs))
        else:
            return of_megatron  # where bytes are unknown, its order is the one that is known to fit
        best = optimize(
            costs,
            memory_limit_bytes=limit,
            split=self.split_backward,
            effort=self.effort,
            stage_ranks=self.topology.stage_ranks,
        )
        return in_forward_order(best) if self.given.are_alike else best

    @property
    def _keeps_megatrons(self) -> bool:
        """Errors: ConfigError for what it cannot have."""
        replicas_meet = any(self.pipeline.replica_collectives.of_micro_batches)
        if self.split_backward or self.pipeline.in_v or self.limit_bytes is not None:
            if not self.given.are_alike and replicas_meet:
                raise ConfigError(
                    "experts lie over replicas, which then need one order of micro-batches, but theirs are of any"
                    " shape: leave split_backward, placement v and memory_limit_gb out"
                )
            return False
        return self.given.as_given or replicas_meet


def in_forward_order(schedule: PipelineSchedule) -> PipelineSchedule:
    """The schedule with micro-batches numbered in the order in which they enter the first stage."""
    entered = [a.micro_batch for a in schedule.ranks[schedule.stage_ranks[0]] if (a.stage, a.kind) == (0, Kind.FORWARD)]
    number = {micro_batch: i for i, micro_batch in enumerate(entered)}
    ranks = tuple(tuple(replace(a, micro_batch=number[a.micro_batch]) for a in rank) for rank in schedule.ranks)
    return replace(schedule, ranks=ranks)


def given_plan(planner: GivenPlanner, group: Any, *, compare: bool = True) -> ExecutionPlan:
    """This rank's proven plan. With `compare` a collective call of its pipeline's ranks, `group`, which compare what
    they planned.

    Errors: PlanError, VerificationError; ExecutionError where ranks planned different steps.
    """
    proven, pipeline = prove_step(planner, planner.samples(), step=0), planner.pipeline
    if compare:
        check_same_plans(repr(proven.plans), pipeline.device, what=f"step of {planner.given}", pipeline=group)
    plan = proven.plans[0][pipeline.coordinates.pp_rank]
    count = plan.num_micro_batches * pipeline.topology.dp
    return replace(plan, dp_rank=pipeline.coordinates.dp_rank, num_micro_batches=count)
