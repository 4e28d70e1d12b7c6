"""Small lowered plans for tests of the proof: costs, then the programs of a schedule's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    ExecutionPlan,
    Instruction,
    lower_schedule,
)
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import simulate_ns

Programs = Sequence[Sequence[Instruction]]


def costs_of(forward_ns: IntArray, backward_ns: IntArray, transfer_ns: IntArray) -> MicroBatchCosts:
    """Costs that take time but no memory; half of a backward is its weight gradient."""
    zeros = np.zeros_like(forward_ns)
    return MicroBatchCosts(
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        weight_ns=backward_ns // 2,
        stored_bytes=zeros,
        working_bytes=zeros,
        transfer_ns=transfer_ns,
        transfer_bytes=zeros[:-1],
        static_bytes=zeros[:, :1].sum(axis=1),
    )


def uniform_costs(num_stages: int, num_micro_batches: int) -> MicroBatchCosts:
    """F = I = W = one transfer."""
    ones = np.ones((num_stages, num_micro_batches), np.int64)
    return costs_of(ones, 2 * ones, ones[:-1])


def lowered(
    schedule: PipelineSchedule, costs: MicroBatchCosts, seq_lens: Sequence[int] | None = None
) -> tuple[tuple[Instruction, ...], ...]:
    """The ranks' programs for one sample a micro-batch, of 1, 2, 3, … tokens where no lengths are given."""
    lens = range(1, costs.num_micro_batches + 1) if seq_lens is None else seq_lens
    micro_batches = [MicroBatch((SampleLength(i, length),)) for i, length in enumerate(lens)]
    times = simulate_ns(schedule, costs)
    return lower_schedule(schedule, times, micro_batches, ActivationFormat(2), costs.transfer_ns.tolist())


def forwards_of(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan without its backwards and their transfers."""

    def is_forward(instruction: Instruction) -> bool:
        if isinstance(instruction, Backward | BackwardInput | BackwardWeight):
            return False
        return not hasattr(instruction, "buffer") or instruction.buffer.payload == "activation"

    return replace(plan, instructions=tuple(filter(is_forward, plan.instructions)), forward_only=True)
