"""Proof that the instructions of one replica cannot deadlock, lose a message or leak a buffer.

The rules are NCCL's, not gloo's: one in-order queue for each unordered pair of ranks and communicator, which carries
both directions and has no tags. The k-th operation that one side posts meets the k-th of the other; a transfer starts
when both are posted and all before it on that queue have ended; a send ends only with its receive. The host blocks in
WaitSend and WaitRecv only. Under these rules progress never depends on timing (posting is monotone), so running the
ranks once to a fixed point decides for all interleavings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

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

_Queue = tuple[int, int, int]  # lower rank, higher rank, communicator
_Sides = dict[tuple[_Queue, int], list[Send | Recv]]  # what each side (queue, rank) has posted, in order


@dataclass(slots=True)
class _Rank:
    """One rank's progress and the buffers it holds."""

    rank: int
    program: Sequence[Instruction]
    pc: int = 0
    loaded: set[int] = field(default_factory=set)
    forwarded: dict[tuple[int, int], str] = field(default_factory=dict)  # (stage, micro-batch) -> "F" | "I" | "done"
    present: dict[Buffer, int] = field(default_factory=dict)  # buffers that an action may take, or a send may send
    posted: dict[tuple[Buffer, bool], tuple[_Queue, int, int]] = field(
        default_factory=dict
    )  # in flight: queue, k, bytes
    held_bytes: int = 0
    peak_bytes: int = 0

    def fail(self, problem: str) -> VerificationError:
        return VerificationError(f"rank {self.rank}, instruction {self.pc} {self.program[self.pc]}: {problem}")

    def hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


def verify(programs: Sequence[Sequence[Instruction]], stage_ranks: Sequence[int], num_micro_batches: int) -> list[int]:
    """Peak bytes of buffers in flight per rank; raises VerificationError naming rank, instruction and reason.

    `programs[r]` are the instructions of pipeline rank r, `stage_ranks[stage]` the rank of each stage.
    """
    ranks = [_Rank(rank, program) for rank, program in enumerate(programs)]
    sides: _Sides = {}
    waiting = set(range(len(ranks)))
    while waiting:
        before = [rank.pc for rank in ranks]
        for i in sorted(waiting):
            rank = ranks[i]
            while rank.pc < len(rank.program) and _step(rank, sides, stage_ranks):
                rank.pc += 1
            if rank.pc == len(rank.program):
                waiting.discard(i)
        if waiting and before == [rank.pc for rank in ranks]:
            stuck = "; ".join(_why_blocked(ranks[i], sides) for i in sorted(waiting))
            raise VerificationError(f"deadlock: {stuck}")
    for rank in ranks:
        _check_end(rank, stage_ranks, num_micro_batches)
    return [rank.peak_bytes for rank in ranks]


def _step(rank: _Rank, sides: _Sides, stage_ranks: Sequence[int]) -> bool:
    """Run one instruction; False if it must wait."""
    instruction = rank.program[rank.pc]
    match instruction:
        case Load(micro_batch):
            if micro_batch in rank.loaded:
                raise rank.fail("loaded twice")
            rank.loaded.add(micro_batch)
        case Forward(stage, micro_batch):
            _forward(rank, stage, micro_batch, stage_ranks)
        case Backward(stage, micro_batch):
            _backward(rank, stage, micro_batch, stage_ranks, "done")
        case BackwardInput(stage, micro_batch):
            _backward(rank, stage, micro_batch, stage_ranks, "I")
        case BackwardWeight(stage, micro_batch):
            if rank.forwarded.get((stage, micro_batch)) != "I":
                raise rank.fail("its input-gradient half has not run")
            rank.forwarded[stage, micro_batch] = "done"
        case Send() | Recv():
            _post(rank, instruction, sides, len(stage_ranks))
        case WaitSend(buffer):
            return _wait(rank, buffer, True, sides)
        case WaitRecv(buffer):
            return _wait(rank, buffer, False, sides)
        case _:
            assert_never(instruction)
    return True


def _forward(rank: _Rank, stage: int, micro_batch: int, stage_ranks: Sequence[int]) -> None:
    _check_place(rank, stage, stage_ranks)
    if micro_batch not in rank.loaded:
        raise rank.fail("its micro-batch has not been loaded")
    if (stage, micro_batch) in rank.forwarded:
        raise rank.fail("runs twice")
    if stage > 0:
        _take(rank, Buffer("activation", stage - 1, micro_batch))
    rank.forwarded[stage, micro_batch] = "F"
    if stage + 1 < len(stage_ranks):
        rank.present[Buffer("activation", stage, micro_batch)] = 0


def _backward(rank: _Rank, stage: int, micro_batch: int, stage_ranks: Sequence[int], after: str) -> None:
    _check_place(rank, stage, stage_ranks)
    if rank.forwarded.get((stage, micro_batch)) != "F":
        raise rank.fail("its forward has not run, or a backward has run already")
    if stage + 1 < len(stage_ranks):
        if Buffer("activation", stage, micro_batch) in rank.present:
            raise rank.fail("its output has not been sent")
        _take(rank, Buffer("gradient", stage + 1, micro_batch))
    rank.forwarded[stage, micro_batch] = after
    if stage > 0:
        rank.present[Buffer("gradient", stage, micro_batch)] = 0


def _check_place(rank: _Rank, stage: int, stage_ranks: Sequence[int]) -> None:
    if not 0 <= stage < len(stage_ranks) or stage_ranks[stage] != rank.rank:
        raise rank.fail(f"stage {stage} does not live on this rank")


def _take(rank: _Rank, buffer: Buffer) -> None:
    if buffer not in rank.present:
        raise rank.fail(f"needs the {buffer}, which has not arrived")
    rank.held_bytes -= rank.present.pop(buffer)


def _post(
    rank: _Rank,
    instruction: Send | Recv,
    sides: _Sides,
    num_stages: int,
) -> None:
    buffer, peer, sends = instruction.buffer, instruction.peer, isinstance(instruction, Send)
    if peer == rank.rank:
        raise rank.fail("a rank cannot exchange buffers with itself")
    if not 0 <= buffer.stage < num_stages:
        raise rank.fail(f"stage {buffer.stage} does not exist")
    if (buffer, sends) in rank.posted:
        raise rank.fail("posted twice")
    num_bytes = sum(spec.num_bytes for spec in instruction.specs)
    if sends:
        if buffer not in rank.present:
            raise rank.fail("nothing to send: it has not been computed, or was sent before")
        del rank.present[buffer]
    elif buffer in rank.present:
        raise rank.fail("received twice")
    rank.hold(num_bytes)
    queue = (min(rank.rank, peer), max(rank.rank, peer), instruction.channel)
    mine = sides.setdefault((queue, rank.rank), [])
    rank.posted[buffer, sends] = (queue, len(mine), num_bytes)
    mine.append(instruction)
    theirs = sides.get((queue, peer), [])
    if len(theirs) >= len(mine):
        other = theirs[len(mine) - 1]
        if isinstance(other, Send) == sends:
            kind = "sends" if sends else "receives"
            raise rank.fail(f"both sides of communicator {queue} have {kind} at place {len(mine) - 1}: they never meet")
        if other.buffer != buffer:
            raise rank.fail(f"meets the {other.buffer} of rank {peer}: the two ranks disagree on the order")
        if other.specs != instruction.specs:
            raise rank.fail(f"shapes differ: {instruction.specs} here, {other.specs} on rank {peer}")


def _wait(rank: _Rank, buffer: Buffer, sends: bool, sides: _Sides) -> bool:
    if (buffer, sends) not in rank.posted:
        raise rank.fail("nothing under way to wait for")
    queue, place, num_bytes = rank.posted[buffer, sends]
    peer = queue[0] + queue[1] - rank.rank
    if len(sides.get((queue, peer), [])) <= place:
        return False
    del rank.posted[buffer, sends]
    if sends:
        rank.held_bytes -= num_bytes
    else:
        rank.present[buffer] = num_bytes
    return True


def _why_blocked(rank: _Rank, sides: _Sides) -> str:
    instruction = rank.program[rank.pc]
    assert isinstance(instruction, WaitSend | WaitRecv)
    queue, place, _ = rank.posted[instruction.buffer, isinstance(instruction, WaitSend)]
    peer = queue[0] + queue[1] - rank.rank
    verb = "sending" if isinstance(instruction, WaitSend) else "receiving"
    return f"rank {rank.rank} waits for {verb} the {instruction.buffer} (operation {place} with rank {peer})"


def _check_end(rank: _Rank, stage_ranks: Sequence[int], num_micro_batches: int) -> None:
    if rank.posted:
        buffer, sends = next(iter(rank.posted))
        raise VerificationError(f"rank {rank.rank} never waits for {'sending' if sends else 'receiving'} the {buffer}")
    if rank.present:
        raise VerificationError(f"rank {rank.rank} leaks the {next(iter(rank.present))}: nothing sends or takes it")
    for stage, owner in enumerate(stage_ranks):
        if owner == rank.rank:
            for micro_batch in range(num_micro_batches):
                if rank.forwarded.get((stage, micro_batch)) != "done":
                    raise VerificationError(
                        f"rank {rank.rank} ends without the whole backward of micro-batch {micro_batch}, stage {stage}"
                    )
    if len(rank.loaded) != num_micro_batches or (rank.loaded and max(rank.loaded) >= num_micro_batches):
        raise VerificationError(f"rank {rank.rank} loads micro-batches {sorted(rank.loaded)} of {num_micro_batches}")
