"""A plan that names a buffer or an action that does not exist is refused, even where its number is that of another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import pytest

from dynapipe_ext.batch.topology import TensorSpec
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Instruction,
    Load,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.schedules.published.full_backward import one_f_one_b
from tests.support.lowered import lowered, uniform_costs

NUM_RANKS, NUM_MICRO_BATCHES = 3, 2
SPECS = (TensorSpec((4, 1, 2), "float32"),)


@pytest.fixture(scope="module")
def programs() -> tuple[tuple[Instruction, ...], ...]:
    schedule = one_f_one_b(NUM_RANKS, NUM_MICRO_BATCHES)
    return lowered(schedule, uniform_costs(NUM_RANKS, NUM_MICRO_BATCHES), [4] * NUM_MICRO_BATCHES)


def misnamed(instruction: Instruction, stages: int, micro_batches: int) -> Instruction:
    """The same instruction, that many stages and micro-batches away."""
    if isinstance(instruction, Send | Recv | WaitSend | WaitRecv):
        buffer = instruction.buffer
        moved = buffer._replace(stage=buffer.stage + stages, micro_batch=buffer.micro_batch + micro_batches)
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


def test_the_buffer_of_a_wait_that_is_left_out_is_named(programs):
    for rank, program in enumerate(programs):
        for wait in program:
            if not isinstance(wait, WaitSend | WaitRecv):
                continue
            changed = [[one for one in p if one is not wait] for p in programs]
            kind = "never waits for sending" if isinstance(wait, WaitSend) else "needs"
            with pytest.raises(VerificationError, match=f"rank {rank}.*{kind} the {wait.buffer}(,|$)"):
                verify(changed, range(NUM_RANKS), NUM_MICRO_BATCHES)


def test_a_buffer_may_come_back_but_not_while_the_rank_still_has_it():
    """Rank 0 lends its output to rank 1, which returns it before it gets it for good."""
    activation, gradient = Buffer("activation", 0, 0), Buffer("gradient", 1, 0)
    send, back = Send(activation, 1, 0, SPECS), Recv(activation, 1, 1, SPECS)
    end = [WaitSend(activation), WaitRecv(activation), send, WaitSend(activation)]
    end += [Recv(gradient, 1, 1, SPECS), WaitRecv(gradient), Backward(0, 0)]
    get = [Recv(activation, 0, 0, SPECS), WaitRecv(activation)]
    second = [Load(0), *get, Send(activation, 0, 1, SPECS), WaitSend(activation), *get, Forward(1, 0), Backward(1, 0)]
    second += [Send(gradient, 0, 1, SPECS), WaitSend(gradient)]
    verify([[Load(0), Forward(0, 0), send, back, *end], second], range(2), 1)
    with pytest.raises(VerificationError, match=r"rank 0, instruction 2 Recv.*: received twice"):
        verify([[Load(0), Forward(0, 0), back, send, *end], second], range(2), 1)


def test_a_backward_before_its_output_is_sent_is_a_deadlock():
    """No other rank can have made the gradient that it takes."""
    activation, gradient = Buffer("activation", 0, 0), Buffer("gradient", 1, 0)
    send, get = Send(activation, 1, 0, SPECS), [Recv(gradient, 1, 1, SPECS), WaitRecv(gradient)]
    second = [Load(0), Recv(activation, 0, 0, SPECS), WaitRecv(activation), Forward(1, 0), Backward(1, 0)]
    second += [Send(gradient, 0, 1, SPECS), WaitSend(gradient)]
    late = [Load(0), Forward(0, 0), *get, Backward(0, 0), send, WaitSend(activation)]
    with pytest.raises(VerificationError, match=r"deadlock.*: rank 0 at its Recv of the gradient .*; rank 1 at"):
        verify([late, second], range(2), 1)


def test_what_is_no_instruction_is_refused():
    """The proof tells kinds apart one by one: it must know all of them."""

    @dataclass(frozen=True)
    class Forwards(Forward):
        """Not the instruction that the engine runs, whatever it inherits."""

    with pytest.raises(VerificationError, match=r"instruction 1 0F0: is no instruction but a .*Forwards"):
        verify([[Load(0), Forwards(0, 0), Backward(0, 0)]], range(1), 1)
    halves = [Load(0), Forward(0, 0), BackwardInput(0, 0), BackwardWeight(0, 0)]
    assert verify([halves], range(1), 1) == verify([[Load(0), Forward(0, 0), Backward(0, 0)]], range(1), 1) == [0]
    known = {type(one) for one in (*halves, Backward(0, 0))} | {Send, Recv, WaitSend, WaitRecv}
    assert known == set(get_args(Instruction))


ACTIVATION, GRADIENT = Buffer("activation", 0, 0), Buffer("gradient", 1, 0)
SEND, RECV = Send(ACTIVATION, 1, 0, SPECS), Recv(GRADIENT, 1, 1, SPECS)
GET, END = [RECV, WaitRecv(GRADIENT)], WaitSend(ACTIVATION)
FIRST = [Load(0), Forward(0, 0), SEND, END, *GET, Backward(0, 0)]
SECOND = [Load(0), Recv(ACTIVATION, 0, 0, SPECS), WaitRecv(ACTIVATION), Forward(1, 0), Backward(1, 0)]
SECOND += [Send(GRADIENT, 0, 1, SPECS), WaitSend(GRADIENT)]
BACK = Recv(ACTIVATION, 1, 1, SPECS)
FAULTS: dict[str, tuple[list[Instruction], str]] = {
    "a wait of no stage": ([*FIRST, WaitRecv(Buffer("activation", 2, 0))], "stage 2 does not exist"),
    "a wait of no micro-batch": ([*FIRST, WaitSend(Buffer("activation", 0, 1))], "micro-batch 1 does not exist"),
    "a send to itself": ([*FIRST[:2], replace(SEND, peer=0)], "a rank cannot exchange buffers with itself"),
    "a send to nobody": ([*FIRST[:2], replace(SEND, peer=7), END, *FIRST[4:]], "rank 7 does not exist"),
    "a send to less than nobody": ([*FIRST[:2], replace(SEND, peer=-1), END, *FIRST[4:]], "rank -1 does not exist"),
    "another rank's stage": ([Load(0), Forward(1, 0)], "stage 1 does not live on this rank"),
    "no such micro-batch": ([Load(0), Forward(0, 1)], "micro-batch 1 does not exist"),
    "a load too many": ([Load(1), *FIRST], r"loads micro-batches \[0, 1\] of 1"),
    "a load twice": ([Load(0), *FIRST], "loaded twice"),
    "no load": (FIRST[1:], "its micro-batch has not been loaded"),
    "a forward twice": ([*FIRST[:2], *FIRST[1:]], "runs twice"),
    "a backward first": ([Load(0), Backward(0, 0)], "its forward has not run"),
    "a weight gradient of nothing": ([*FIRST, BackwardWeight(0, 0)], "its input-gradient half has not run"),
    "half a backward": (
        [*FIRST[:-1], BackwardInput(0, 0)],
        "ends without the whole backward of micro-batch 0, stage 0",
    ),
    "an input that is not there": ([*FIRST[:4], RECV, Backward(0, 0)], "needs the gradient .* has not arrived"),
    "a send twice": ([*FIRST[:4], SEND], "nothing to send"),
    "a send again before its end": ([*FIRST[:3], BACK, WaitRecv(ACTIVATION), SEND], "posted twice"),
    "a receive twice": ([*FIRST[:4], RECV, RECV], "posted twice"),
    "a wait twice": ([*FIRST[:4], END], "nothing under way to wait for"),
    "a receive that is never awaited": ([*FIRST[:4], RECV, *FIRST[6:]], "which has not arrived"),
    "a send that is never awaited": ([*FIRST[:3], *FIRST[4:]], "never waits for sending the activation"),
    "a gradient that is never taken": (FIRST[:-1], "leaks the gradient"),
    "a receive that nobody sends": ([*FIRST, BACK], "never meets an operation of rank 1, which posts 1 there"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_rank_is_named(fault):
    verify([FIRST, SECOND], range(2), 1)
    program, message = FAULTS[fault]
    with pytest.raises(VerificationError, match=f"rank 0.*{message}"):
        verify([program, SECOND], range(2), 1)
