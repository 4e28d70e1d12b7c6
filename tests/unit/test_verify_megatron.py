"""Two faults of Megatron-LM's pipeline with variable sequence lengths, written as plans, are refused.

There, every buffer is preceded by a message with its shape; here the shape is the first tensor of the same operation.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynapipe_ext.batch.topology import TensorSpec
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import (
    Backward,
    Buffer,
    Forward,
    Instruction,
    Load,
    Payload,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)
from dynapipe_ext.executor.proof import verify

SEQ_LENS = (5, 9, 3, 8, 6, 7, 4, 2)  # of the micro-batches


def specs(micro_batch: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec((3,), "int64"), TensorSpec((SEQ_LENS[micro_batch], 1, 8), "bfloat16"))


class Program:
    """One rank's instructions; `batch` posts its operations in the order given and then waits for all of them."""

    def __init__(self, rank: int, num_micro_batches: int) -> None:
        self.rank = rank
        self.instructions: list[Instruction] = [Load(m) for m in range(num_micro_batches)]

    def run(self, *instructions: Instruction) -> None:
        self.instructions += instructions

    def batch(self, *posts: Send | Recv | None) -> None:
        made = [post for post in posts if post is not None]
        self.instructions += made
        self.instructions += [WaitSend(x.buffer) if isinstance(x, Send) else WaitRecv(x.buffer) for x in made]


def megatron_1f1b(
    num_ranks: int, num_micro_batches: int, sends_first: Callable[[int], bool]
) -> list[list[Instruction]]:
    """Megatron's 1F1B on one communicator a pair: in the steady state a send and a receive share each batch."""
    programs = []
    for rank in range(num_ranks):
        program = Program(rank, num_micro_batches)

        def send(payload: Payload, m: int, rank: int = rank) -> Send | None:
            peer = rank + 1 if payload == "activation" else rank - 1
            return Send(Buffer(payload, rank, m), peer, 0, specs(m)) if 0 <= peer < num_ranks else None

        def recv(payload: Payload, m: int, rank: int = rank) -> Recv | None:
            peer = rank - 1 if payload == "activation" else rank + 1
            return Recv(Buffer(payload, peer, m), peer, 0, specs(m)) if 0 <= peer < num_ranks else None

        warm_up = min(num_ranks - rank - 1, num_micro_batches)
        num_steady = num_micro_batches - warm_up
        for m in range(warm_up):
            program.batch(recv("activation", m))
            program.run(Forward(rank, m))
            program.batch(send("activation", m))
        program.batch(recv("activation", warm_up))
        for i in range(num_steady):
            program.run(Forward(rank, warm_up + i))
            pair = send("activation", warm_up + i), recv("gradient", i)
            program.batch(*(pair if sends_first(rank) else pair[::-1]))
            program.run(Backward(rank, i))
            more = recv("activation", warm_up + i + 1) if i + 1 < num_steady else None
            program.batch(*((send("gradient", i), more) if sends_first(rank) else (more, send("gradient", i))))
        for m in range(num_steady, num_micro_batches):
            program.batch(recv("gradient", m))
            program.run(Backward(rank, m))
            program.batch(send("gradient", m))
        programs.append(program.instructions)
    return programs


@pytest.mark.parametrize("num_ranks", [4, 6])
def test_one_order_of_sends_and_receives_on_all_ranks_is_refused_as_in_megatron_5100(num_ranks):
    """NVIDIA/Megatron-LM#5100: with variable_seq_lengths, training over 4 pipeline stages hangs in its first step.

    The reporter found all ranks in the exchange of shapes, which posts its operations in one fixed order (send to and
    receive from the previous rank, then the next) whatever the rank, while the exchange of buffers alternates between
    even and odd ranks. With the fixed order both sides of a pair have a send at the head of the queue they share, and
    each send waits for a receive behind the other. A library may break up such a batch; the rules here do not count on
    it. The alternating order is proven.
    """
    stage_ranks = range(num_ranks)
    verify(megatron_1f1b(num_ranks, 8, lambda rank: rank % 2 == 0), stage_ranks, 8)
    with pytest.raises(VerificationError, match=r"both sides of communicator \(\d, \d, 0\) have sends"):
        verify(megatron_1f1b(num_ranks, 8, lambda rank: True), stage_ranks, 8)


def two_ranks_four_stages(*, fixed_order: bool) -> list[list[Instruction]]:
    """Stages 0..3 on ranks 0, 1, 0, 1. Once rank 0 sends a gradient to its previous stage and an activation to its next

    stage in one batch; both live on rank 1. In a batch sends do not wait for receives, so each direction is a queue of
    its own (two communicators); but operations of one direction meet in the order in which they were enqueued.
    """
    stage_ranks = (0, 1, 0, 1)

    def send(payload: Payload, stage: int, m: int) -> Send:
        peer = stage_ranks[stage + (1 if payload == "activation" else -1)]
        return Send(Buffer(payload, stage, m), peer, int(stage_ranks[stage] > peer), specs(m))

    def recv(payload: Payload, stage: int, m: int) -> Recv:
        sent = send(payload, stage, m)
        return Recv(sent.buffer, stage_ranks[stage], sent.channel, sent.specs)

    first, second = Program(0, 2), Program(1, 2)
    first.run(Forward(0, 0))
    first.batch(send("activation", 0, 0))
    first.batch(recv("activation", 1, 0))
    first.run(Forward(2, 0))
    first.batch(send("activation", 2, 0))
    first.batch(recv("gradient", 3, 0))
    first.run(Backward(2, 0), Forward(0, 1))
    first.batch(send("gradient", 2, 0), send("activation", 0, 1))  # previous, then next
    first.batch(recv("gradient", 1, 0))
    first.run(Backward(0, 0))
    first.batch(recv("activation", 1, 1))
    first.run(Forward(2, 1))
    first.batch(send("activation", 2, 1))
    first.batch(recv("gradient", 3, 1))
    first.run(Backward(2, 1))
    first.batch(send("gradient", 2, 1))
    first.batch(recv("gradient", 1, 1))
    first.run(Backward(0, 1))

    second.batch(recv("activation", 0, 0))
    second.run(Forward(1, 0))
    second.batch(send("activation", 1, 0))
    second.batch(recv("activation", 2, 0))
    second.run(Forward(3, 0), Backward(3, 0))
    second.batch(send("gradient", 3, 0))
    from_previous, from_next = recv("activation", 0, 1), recv("gradient", 2, 0)
    second.batch(*((from_previous, from_next) if fixed_order else (from_next, from_previous)))
    second.run(Backward(1, 0), Forward(1, 1))
    second.batch(send("gradient", 1, 0))
    second.batch(send("activation", 1, 1))
    second.batch(recv("activation", 2, 1))
    second.run(Forward(3, 1), Backward(3, 1))
    second.batch(send("gradient", 3, 1))
    second.batch(recv("gradient", 2, 1))
    second.run(Backward(1, 1))
    second.batch(send("gradient", 1, 1))
    return [first.instructions, second.instructions]


def test_swapped_buffers_between_two_ranks_are_refused_as_in_megatron_5271():
    """NVIDIA/Megatron-LM#5271: on 2 ranks with several stages each, the received shapes change places.

    With two ranks the previous and the next rank are one peer. Both enqueue their batch in the same order (previous,
    then next), but one rank's previous is the other's next, and messages carry no tag: what was meant for the next
    stage is taken for that of the previous. Nothing hangs and the sizes on the wire agree; a backward fails much later,
    or trains on the wrong tensors. Here the first operation of the pair is refused, with both names of the buffer.
    """
    verify(two_ranks_four_stages(fixed_order=False), (0, 1, 0, 1), 2)
    with pytest.raises(
        VerificationError,
        match=r"rank 0.*gradient.*meets the activation of micro-batch 1 from stage 0 of rank 1.*disagree on the order",
    ):
        verify(two_ranks_four_stages(fixed_order=True), (0, 1, 0, 1), 2)
