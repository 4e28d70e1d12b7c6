"""A plan that names a buffer or an action that does not exist is refused, even where its number is that of another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import Instruction, Load, Recv, Send, WaitRecv, WaitSend
from dynapipe_ext.executor.lowering import lower_schedule
from dynapipe_ext.executor.verify import verify
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import MicroBatch
from dynapipe_ext.schedules.one_f_one_b import one_f_one_b
from dynapipe_ext.schedules.simulate import simulate_ns

NUM_RANKS, NUM_MICRO_BATCHES = 3, 2


@pytest.fixture(scope="module")
def programs() -> tuple[tuple[Instruction, ...], ...]:
    schedule = one_f_one_b(NUM_RANKS, NUM_MICRO_BATCHES)
    ones = np.ones((NUM_RANKS, NUM_MICRO_BATCHES), np.int64)
    costs = MicroBatchCosts(
        forward_ns=ones,
        backward_ns=2 * ones,
        weight_ns=ones,
        stored_bytes=ones,
        working_bytes=ones,
        transfer_ns=ones[:-1],
        transfer_bytes=ones[:-1],
        static_bytes=ones[:, 0],
    )
    micro_batches = [MicroBatch((SampleLength(i, 4),)) for i in range(NUM_MICRO_BATCHES)]
    return lower_schedule(schedule, simulate_ns(schedule, costs), micro_batches, ActivationFormat(2))


def misnamed(instruction: Instruction, stages: int, micro_batches: int) -> Instruction:
    """The same instruction, that many stages and micro-batches away."""
    if isinstance(instruction, Send | Recv | WaitSend | WaitRecv):
        buffer = instruction.buffer
        moved = replace(buffer, stage=buffer.stage + stages, micro_batch=buffer.micro_batch + micro_batches)
        return replace(instruction, buffer=moved)
    if isinstance(instruction, Load):
        return replace(instruction, micro_batch=instruction.micro_batch + micro_batches)
    return replace(instruction, stage=instruction.stage + stages, micro_batch=instruction.micro_batch + micro_batches)


@pytest.mark.parametrize("stages", [-1, 1])
def test_a_stage_up_and_all_micro_batches_down_is_another_name_and_refused(programs, stages):
    """Counted through, micro-batch 2 of 2 on stage 0 has the number of micro-batch 0 on stage 1."""
    tried = 0
    for rank, program in enumerate(programs):
        for place, instruction in enumerate(program):
            wrong = misnamed(instruction, stages, -stages * NUM_MICRO_BATCHES)
            changed = [list(p) for p in programs]
            changed[rank][place] = wrong
            with pytest.raises(VerificationError):
                verify(changed, range(NUM_RANKS), NUM_MICRO_BATCHES)
            tried += 1
    assert tried == sum(map(len, programs)) >= 50
    verify(programs, range(NUM_RANKS), NUM_MICRO_BATCHES)
