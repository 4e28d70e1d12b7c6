"""A proven plan of micro-batches that a loop has cut itself, by their shapes alone."""

from __future__ import annotations

from dataclasses import replace

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Coordinates, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.proven_step import prove
from dynapipe_ext.schedules.search.optimizer import optimize
from dynapipe_ext.schedules.step_plan import plan_of_schedule

_EFFORT = 500
_NS_A_TOKEN = 1_000  # only ratios matter
RowsPositions = tuple[int, int]


def plan_of_shapes(
    shapes: tuple[RowsPositions, ...],
    topology: Topology,
    activation_format: ActivationFormat,
    here: Coordinates,
    *,
    split: bool,
) -> ExecutionPlan:
    """The plan of the rank `here`. Replicas run their own: none meets another before the end of a step."""
    lengths = iter(range(sum(rows for rows, _ in shapes)))
    micro_batches = tuple(
        MicroBatch(tuple(SampleLength(next(lengths), length, 0, length) for _ in range(rows)), recompute="none")
        for rows, length in shapes
    )
    costs = TokenCosts(topology.num_stages, ns_per_token=_NS_A_TOKEN).evaluate(micro_batches)
    schedule = optimize(
        costs, memory_limit_bytes=1 << 60, split=split, effort=_EFFORT, stage_ranks=topology.stage_ranks
    )
    proven = prove(plan_of_schedule(schedule, micro_batches, costs), activation_format, ReplicaCollectives())
    return replace(proven.plans[0][here.pp_rank], dp_rank=here.dp_rank)
