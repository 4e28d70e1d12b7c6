"""One pass over a rank's instructions: what can be said of them without its peers, and what must be asked of peers.

Whether a buffer exists when it is sent, taken or waited for depends on the rank's own order alone, and so do the bytes
it holds: no interleaving changes them. What is left for `verify` are the queues on which the rank posts and the waits
that name a place on them. Buffers are keyed by one integer, because hashing a dataclass costs more than all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import assert_never

from dynapipe_ext.activations import DTYPE_BYTES, TensorSpec
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

_FORWARDED, _HALF, _DONE = 1, 2, 3  # a micro-batch on a stage: forward done, input gradient done, both gradients done


# Own side of the queue, the transfer's index on it, peer, bytes, and the buffer itself: a wait may name one that does
# not exist, whose key is that of one that does.
Posted = tuple["Lane", int, int, int, Buffer]


class Lane:
    """What one rank posts on one queue: the k-th transfer, and its place in the rank's program."""

    __slots__ = ("places", "transfers")

    def __init__(self) -> None:
        self.transfers: list[Send | Recv] = []
        self.places: list[int] = []


class RankTrace:
    """A rank's lanes, waits in program order and peak bytes in flight.

    `run` raises VerificationError for what is wrong with this rank alone, `check_end` for what it leaves behind.
    `bytes_of` maps ids of specs to bytes and is shared by the ranks of one proof, during which no specs are freed.
    """

    def __init__(
        self,
        rank: int,
        program: Sequence[Instruction],
        stage_ranks: Sequence[int],
        num_micro_batches: int,
        bytes_of: dict[int, int],
    ) -> None:
        self.rank, self.program = rank, program
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.waits: list[tuple[int, Posted]] = []  # place in the program, what is waited for
        self.peak_bytes = 0
        self._stage_ranks, self._num_stages, self._num_micro_batches = stage_ranks, len(stage_ranks), num_micro_batches
        self._bytes_of = bytes_of
        self._held_bytes = 0
        self._loaded: set[int] = set()
        self._progress: dict[int, int] = {}  # stage * micro-batches + micro-batch -> _FORWARDED, _HALF or _DONE
        self._present: dict[int, int] = {}  # what an action may take or a send may send -> bytes it holds
        self._sending: dict[int, Posted] = {}
        self._receiving: dict[int, Posted] = {}
        self._place = 0

    def run(self) -> None:
        waits, num_micro_batches = self.waits, self._num_micro_batches
        present, sending, receiving = self._present, self._sending, self._receiving
        for place, instruction in enumerate(self.program):
            self._place = place
            match instruction:
                case Send() | Recv():
                    self._post(instruction)
                case WaitRecv():
                    buffer = instruction.buffer
                    key = 2 * (buffer.stage * num_micro_batches + buffer.micro_batch) + (buffer.payload == "gradient")
                    posted = receiving.pop(key, None)
                    if posted is None or (posted[4] is not buffer and posted[4] != buffer):
                        raise self.fail("nothing under way to wait for")
                    waits.append((place, posted))
                    present[key] = posted[3]
                case WaitSend():
                    buffer = instruction.buffer
                    key = 2 * (buffer.stage * num_micro_batches + buffer.micro_batch) + (buffer.payload == "gradient")
                    posted = sending.pop(key, None)
                    if posted is None or (posted[4] is not buffer and posted[4] != buffer):
                        raise self.fail("nothing under way to wait for")
                    waits.append((place, posted))
                    self._held_bytes -= posted[3]
                case Load():
                    if instruction.micro_batch in self._loaded:
                        raise self.fail("loaded twice")
                    self._loaded.add(instruction.micro_batch)
                case Forward():
                    self._forward(instruction.stage, instruction.micro_batch)
                case Backward():
                    self._backward(instruction.stage, instruction.micro_batch, _DONE)
                case BackwardInput():
                    self._backward(instruction.stage, instruction.micro_batch, _HALF)
                case BackwardWeight():
                    self._weight(instruction.stage, instruction.micro_batch)
                case _:
                    assert_never(instruction)

    def fail(self, problem: str, place: int | None = None) -> VerificationError:
        place = self._place if place is None else place
        return VerificationError(f"rank {self.rank}, instruction {place} {self.program[place]}: {problem}")

    def _post(self, instruction: Send | Recv) -> None:
        buffer, peer, specs = instruction.buffer, instruction.peer, instruction.specs
        stage, micro_batch = buffer.stage, buffer.micro_batch
        if not 0 <= stage < self._num_stages:
            raise self.fail(f"stage {stage} does not exist")
        if not 0 <= micro_batch < self._num_micro_batches:
            raise self.fail(f"micro-batch {micro_batch} does not exist")
        key = 2 * (stage * self._num_micro_batches + micro_batch) + (buffer.payload == "gradient")
        if (num_bytes := self._bytes_of.get(id(specs))) is None:
            num_bytes = self._bytes_of[id(specs)] = _num_bytes(specs)
        if (lane := self.lanes.get((peer, instruction.channel))) is None:
            if peer == self.rank:
                raise self.fail("a rank cannot exchange buffers with itself")
            lane = self.lanes[peer, instruction.channel] = Lane()
        posted = (lane, len(lane.places), peer, num_bytes, buffer)
        if isinstance(instruction, Send):
            if key in self._sending:
                raise self.fail("posted twice")
            if self._present.pop(key, None) is None:
                raise self.fail("nothing to send: it has not been computed, or was sent before")
            self._sending[key] = posted
        else:
            if key in self._receiving:
                raise self.fail("posted twice")
            if key in self._present:
                raise self.fail("received twice")
            self._receiving[key] = posted
        lane.transfers.append(instruction)
        lane.places.append(self._place)
        self._held_bytes += num_bytes
        if self._held_bytes > self.peak_bytes:
            self.peak_bytes = self._held_bytes

    def _forward(self, stage: int, micro_batch: int) -> None:
        key = self._check_place(stage, micro_batch)
        if micro_batch not in self._loaded:
            raise self.fail("its micro-batch has not been loaded")
        if key in self._progress:
            raise self.fail("runs twice")
        if stage > 0:
            self._take(2 * (key - self._num_micro_batches))
        self._progress[key] = _FORWARDED
        if stage + 1 < self._num_stages:
            self._present[2 * key] = 0

    def _backward(self, stage: int, micro_batch: int, after: int) -> None:
        key = self._check_place(stage, micro_batch)
        if self._progress.get(key) != _FORWARDED:
            raise self.fail("its forward has not run, or a backward has run already")
        if stage + 1 < self._num_stages:
            if 2 * key in self._present:
                raise self.fail("its output has not been sent")
            self._take(2 * (key + self._num_micro_batches) + 1)
        self._progress[key] = after
        if stage > 0:
            self._present[2 * key + 1] = 0

    def _weight(self, stage: int, micro_batch: int) -> None:
        key = self._check_place(stage, micro_batch)
        if self._progress.get(key) != _HALF:
            raise self.fail("its input-gradient half has not run")
        self._progress[key] = _DONE

    def _check_place(self, stage: int, micro_batch: int) -> int:
        if not 0 <= stage < self._num_stages or self._stage_ranks[stage] != self.rank:
            raise self.fail(f"stage {stage} does not live on this rank")
        if not 0 <= micro_batch < self._num_micro_batches:
            raise self.fail(f"micro-batch {micro_batch} does not exist")
        return stage * self._num_micro_batches + micro_batch

    def _take(self, key: int) -> None:
        num_bytes = self._present.pop(key, None)
        if num_bytes is None:
            raise self.fail(f"needs the {self._buffer(key)}, which has not arrived")
        self._held_bytes -= num_bytes

    def check_end(self) -> None:
        for verb, posted in (("sending", self._sending), ("receiving", self._receiving)):
            for key in posted:
                raise VerificationError(f"rank {self.rank} never waits for {verb} the {self._buffer(key)}")
        for key in self._present:
            raise VerificationError(f"rank {self.rank} leaks the {self._buffer(key)}: nothing sends or takes it")
        count = self._num_micro_batches
        for stage, owner in enumerate(self._stage_ranks):
            if owner == self.rank:
                for micro_batch in range(count):
                    if self._progress.get(stage * count + micro_batch) != _DONE:
                        raise VerificationError(
                            f"rank {self.rank} ends without the whole backward of micro-batch {micro_batch},"
                            f" stage {stage}"
                        )
        if self._loaded != set(range(count)):
            raise VerificationError(f"rank {self.rank} loads micro-batches {sorted(self._loaded)} of {count}")

    def _buffer(self, key: int) -> Buffer:
        stage, micro_batch = divmod(key // 2, self._num_micro_batches)
        return Buffer("gradient" if key % 2 else "activation", stage, micro_batch)


def _num_bytes(specs: tuple[TensorSpec, ...]) -> int:
    num_bytes = 0
    for spec in specs:  # a loop takes half the time of a sum over num_bytes
        num_bytes += prod(spec.shape) * DTYPE_BYTES[spec.dtype]
    return num_bytes
