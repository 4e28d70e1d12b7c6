"""Plans for micro-batches of one shape: those that Megatron's own datasets and samplers make."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dynapipe_ext.batch.micro_batches import GlobalBatchPlan, MicroBatch, ReplicaPlan, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.adjustments import ForwardsAlone, adjusted
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.collectives import gather_json
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.judge.simulate import peak_bytes, simulate
from dynapipe_ext.schedules.search.flow_shop import forward_schedule
from dynapipe_ext.schedules.search.optimizer import optimize
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan
from dynapipe_ext.schedules.tables.interleaved import interleaved_1f1b

_EFFORT = 8000  # moves, as a Planner's default
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformShape:
    """`num_micro_batches` of `rows` samples of `seq_len` positions each, in every replica."""

    num_micro_batches: int
    rows: int
    seq_len: int
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformPlanner:
    """StepPlanner of one replica whose micro-batches are given; all replicas run the same plan.

    Micro-batches are numbered in the order in which every stage runs their forwards, so that the k-th `next` of each
    stage's data iterator is micro-batch k. Without `memory_limit_bytes` no rank holds more than under Megatron's own
    schedule ((interleaved) 1F1B).
    """

    pipeline: MegatronPipeline
    shape: UniformShape
    split_backward: bool = False
    limit_bytes: int | None = None
    fill_waits: bool = field(default=False, init=False)

    @property
    def topology(self) -> Topology:
        return replace(self.pipeline.topology, dp=1)

    @property
    def memory_limit_bytes(self) -> float:
        return _NO_LIMIT if self.limit_bytes is None else self.limit_bytes

    @property
    def activation_format(self) -> ActivationFormat:
        return self.pipeline.activation_format

    @property
    def replica_collectives(self) -> ReplicaCollectives:
        """Of replicas that run one program, whatever they issue meets; what is left is the order at the end."""
        return ReplicaCollectives()

    def samples(self) -> list[SampleLength]:
        count = self.shape.num_micro_batches * self.shape.rows
        return [SampleLength(i, self.shape.seq_len, 0, self.shape.seq_len) for i in range(count)]

    def plan(self, samples: Any, *, step: int, reserve_bytes: int = 0, unreserved: StepPlan | None = None) -> StepPlan:
        """Errors: PlanError where the micro-batches do not fit `limit_bytes`."""
        rows = self.shape.rows
        recompute = "none" if self.shape.forward_only else self.pipeline.recompute or "none"
        micro_batches = tuple(
            MicroBatch(tuple(samples[i : i + rows]), recompute=recompute) for i in range(0, len(samples), rows)
        )
        costs_of = self.pipeline.costs
        model = adjusted(costs_of, ForwardsAlone()) if self.shape.forward_only else costs_of
        costs = model.evaluate(micro_batches)
        schedule = self._scheduled(costs, reserve_bytes)
        trace = simulate(schedule, costs)
        prediction = Prediction(
            makespan_ns=round(trace.makespan_s * 1e9),
            lower_bound_ns=0,
            peak_bytes=peak_bytes(schedule, costs),
            bubble_ratio=trace.bubble_ratio,
        )
        batch = GlobalBatchPlan(step=step, replicas=(ReplicaPlan(0, micro_batches),))
        return StepPlan(batch, (schedule,), (prediction,), (costs,))

    def to_json(self) -> Mapping[str, Any]:
        raise NotImplementedError("each rank plans uniform micro-batches for itself")

    def _scheduled(self, costs: MicroBatchCosts, reserve_bytes: int) -> PipelineSchedule:
        stage_ranks = self.topology.stage_ranks
        if self.shape.forward_only:
            return forward_schedule(costs, stage_ranks)
        limit = _NO_LIMIT
        if self.limit_bytes is not None:
            limit = self.limit_bytes - reserve_bytes
        elif self.pipeline.in_v:  # which is no schedule of Megatron's
            limit = self.pipeline.usable_bytes
        elif self.pipeline.counts_memory:
            limit = max(peak_bytes(self._of_megatron(), costs))
        else:
            return self._of_megatron()  # where bytes are unknown, its order is the one that is known to fit
        return in_forward_order(
            optimize(
                costs, memory_limit_bytes=limit, split=self.split_backward, effort=_EFFORT, stage_ranks=stage_ranks
            )
        )

    def _of_megatron(self) -> PipelineSchedule:
        pp = self.topology.pp
        return interleaved_1f1b(pp, self.shape.num_micro_batches, self.topology.num_stages // pp)


def in_forward_order(schedule: PipelineSchedule) -> PipelineSchedule:
    """The schedule with micro-batches numbered in the order in which they enter the first stage."""
    entered = [a.micro_batch for a in schedule.ranks[schedule.stage_ranks[0]] if (a.stage, a.kind) == (0, Kind.FORWARD)]
    number = {micro_batch: i for i, micro_batch in enumerate(entered)}
    ranks = tuple(tuple(replace(a, micro_batch=number[a.micro_batch]) for a in rank) for rank in schedule.ranks)
    return replace(schedule, ranks=ranks)


def uniform_plan(planner: UniformPlanner, *, compare: bool = True) -> ExecutionPlan:
    """This rank's proven plan. With `compare` a collective call: ranks compare what they planned.

    Errors: PlanError, VerificationError; ExecutionError where ranks planned different steps.
    """
    proven = prove_step(planner, planner.samples(), step=0)
    if compare:
        check_same_on_all_ranks(repr(proven.plans), planner.pipeline.device, what=f"step of {planner.shape}")
    here = planner.pipeline.coordinates
    plan, dp = proven.plans[0][here.pp_rank], planner.pipeline.topology.dp
    return replace(plan, dp_rank=here.dp_rank, num_micro_batches=plan.num_micro_batches * dp)


def check_same_on_all_ranks(text: str, device: Any, *, what: str) -> None:
    """Errors: ExecutionError, on every rank, where the texts differ."""
    digests = gather_json(hashlib.sha256(text.encode()).hexdigest(), device)
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise ExecutionError(
            f"ranks 0 and {other} planned the {what} differently: start all ranks with the same arguments, the same"
            " cost file and the same version of dynapipe-ext"
        )
