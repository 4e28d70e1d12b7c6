"""Proof that a step cannot hang: one order of all transfers, a rank, a replica, all replicas.

In: the instructions of all ranks. Out: bytes of buffers in flight on each, or a `VerificationError` that names both
ranks. Asked once for every plan, before anybody gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from dynapipe_ext.batch.micro_batches import PieceNeighbours, SamplePieces
from dynapipe_ext.batch.topology import DTYPE_BYTES, ReplicaCollectives, TensorSpec
from dynapipe_ext.core import native
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Instruction,
    Load,
    Program,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)


def check_one_order(replicas: Sequence[Sequence[Sequence[Operation]]], why: Callable[[int, int, int], str]) -> None:
    """Operations [dp_rank][pp_rank] in the order posted. A transfer has two ranks of one replica, a collective those of
    its group. Raises VerificationError with `why(dp_rank, pp_rank, i)` for the i-th of each rank that none can pass.
    """
    place = [[0] * len(ranks) for ranks in replicas]
    first_side: list[dict[int, int]] = [{} for _ in replicas]  # a transfer that one rank has come to -> that rank
    arrived: dict[Operation, int] = {}  # a collective -> how many members have come to it
    moving = [(dp, pp) for dp, ranks in enumerate(replicas) for pp in range(len(ranks))]
    while moving:
        dp, pp = moving.pop()
        operations, here, sides = replicas[dp][pp], place[dp], first_side[dp]
        while (at := here[pp]) < len(operations):
            operation = operations[at]
            if isinstance(operation, int):
                if (other := sides.pop(operation, None)) is None:
                    sides[operation] = pp
                    break
                here[pp] += 1
                here[other] += 1
                moving.append((dp, other))
            else:
                group = operation[0]
                arrived[operation] = arrived.get(operation, 0) + 1
                if arrived[operation] < len(group):
                    break
                for d, p in group:
                    place[d][p] += 1
                moving += [member for member in group if member != (dp, pp)]
    blocked = [
        why(dp, pp, place[dp][pp])
        for dp, ranks in enumerate(replicas)
        for pp, operations in enumerate(ranks)
        if place[dp][pp] < len(operations)
    ]
    if blocked:
        raise VerificationError("deadlock, as ranks post in orders that disagree: " + "; ".join(blocked))


_FORWARDED, _HALF, _DONE = 1, 2, 3  # a micro-batch on a stage: forward done, input gradient done, both gradients done


Member = tuple[int, int]  # (dp_rank, pp_rank)
Operation = int | tuple[tuple[Member, ...], int]  # a buffer that changes ranks; the k-th collective of a group


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's part in a rendezvous of all of `group`; members issue the same `name` at the same place."""

    group: tuple[Member, ...]
    name: str

    def __str__(self) -> str:
        return self.name


Event = Instruction | Collective


class Lane:
    """What one rank posts on one queue: the k-th transfer, and its place in the rank's program."""

    __slots__ = ("places", "transfers")

    def __init__(self) -> None:
        self.transfers: list[Send | Recv] = []
        self.places: list[int] = []


class RankTrace:
    """A rank's lanes, all its operations in program order, and peak bytes in flight.

    `run` raises VerificationError for what is wrong with this rank alone, `check_end` for what it leaves behind.
    `bytes_of` (ids of specs -> bytes) and `keys` (ids of buffers -> keys) are shared by the ranks of one proof, during
    which no specs and no buffers are freed. `forward_only`: every micro-batch ends with its forward, and must.
    `pieces`: what micro-batches that carry a sample between them come after.
    """

    def __init__(
        self,
        rank: int,
        program: Sequence[Event],
        stage_ranks: Sequence[int],
        num_micro_batches: int,
        bytes_of: dict[int, int],
        keys: dict[int, int],
        *,
        forward_only: bool,
        pieces: PieceNeighbours,
    ) -> None:
        self.rank, self.program, self._forward_only, self._pieces = rank, program, forward_only, pieces
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.operations: list[Operation] = []
        self.places: list[int] = []  # of the operations
        self.issued: dict[tuple[Member, ...], list[Collective]] = {}  # by group
        self.peak_bytes = 0
        self._stage_ranks, self._num_stages, self._num_micro_batches = stage_ranks, len(stage_ranks), num_micro_batches
        self._bytes_of, self._keys = bytes_of, keys
        self._stages = {stage for stage, owner in enumerate(stage_ranks) if owner == rank}
        self._loaded: set[int] = set()
        self._progress: dict[int, int] = {}  # stage * micro-batches + micro-batch -> _FORWARDED, _HALF or _DONE
        self._present: dict[int, int] = {}  # what an action may take or a send may send -> bytes it holds
        self._sending: dict[int, int] = {}  # buffers under way -> their bytes
        self._receiving: dict[int, int] = {}
        self._place = 0

    def run(self) -> None:
        # Kinds of events are told by `type`, one by one: matching classes takes three times as long, and this loop is
        # most of a proof. No type checker follows `kind`.
        lanes, keys, bytes_of = self.lanes, self._keys, self._bytes_of
        operations, operation_places = self.operations, self.places
        present, sending, receiving = self._present, self._sending, self._receiving
        held_bytes = peak_bytes = 0
        event: Any
        for place, event in enumerate(self.program):
            kind = type(event)
            if kind is Send or kind is Recv:
                self._place, buffer, specs = place, event.buffer, event.specs
                if (key := keys.get(id(buffer))) is None:
                    key = self._key(buffer)
                if (lane := lanes.get((event.peer, event.channel))) is None:
                    lane = self._lane(event)
                if (num_bytes := bytes_of.get(id(specs))) is None:
                    num_bytes = bytes_of[id(specs)] = _num_bytes(specs)
                if kind is Send:
                    if key in sending:
                        raise self.fail("posted twice")
                    if present.pop(key, None) is None:
                        raise self.fail("nothing to send: it has not been computed, or was sent before")
                    sending[key] = num_bytes
                else:
                    if key in receiving:
                        raise self.fail("posted twice")
                    if key in present:
                        raise self.fail("received twice")
                    receiving[key] = num_bytes
                lane.transfers.append(event)
                lane.places.append(place)
                operations.append(key)
                operation_places.append(place)
                held_bytes += num_bytes
                if held_bytes > peak_bytes:
                    peak_bytes = held_bytes
            elif kind is WaitSend or kind is WaitRecv:
                self._place, buffer = place, event.buffer
                if (key := keys.get(id(buffer))) is None:
                    key = self._key(buffer)
                if (moved_bytes := (sending if kind is WaitSend else receiving).pop(key, None)) is None:
                    raise self.fail("nothing under way to wait for")
                if kind is WaitSend:
                    held_bytes -= moved_bytes
                else:
                    present[key] = moved_bytes
            else:
                self._place = place
                if kind is Load:
                    self._load(event.micro_batch)
                elif kind is Forward:
                    held_bytes -= self._forward(event.stage, event.micro_batch)
                elif kind is Backward:
                    held_bytes -= self._backward(event.stage, event.micro_batch, _DONE)
                elif kind is BackwardInput:
                    held_bytes -= self._backward(event.stage, event.micro_batch, _HALF)
                elif kind is BackwardWeight:
                    self._weight(event.stage, event.micro_batch)
                elif kind is Collective:
                    issued = self.issued.setdefault(event.group, [])
                    operations.append((event.group, len(issued)))
                    operation_places.append(place)
                    issued.append(event)
                else:
                    raise self.fail(f"is no instruction but a {kind.__qualname__}")
        self.peak_bytes = peak_bytes

    def fail(self, problem: str, place: int | None = None) -> VerificationError:
        place = self._place if place is None else place
        return VerificationError(f"rank {self.rank}, instruction {place} {self.program[place]}: {problem}")

    def _key(self, buffer: Buffer) -> int:
        """The buffer's number, which no other buffer that exists has."""
        stage, micro_batch = buffer.stage, buffer.micro_batch
        if not 0 <= stage < self._num_stages:
            raise self.fail(f"stage {stage} does not exist")
        if not 0 <= micro_batch < self._num_micro_batches:
            raise self.fail(f"micro-batch {micro_batch} does not exist")
        key = 2 * (stage * self._num_micro_batches + micro_batch) + (buffer.payload == "gradient")
        self._keys[id(buffer)] = key
        return key

    def _lane(self, transfer: Send | Recv) -> Lane:
        if transfer.peer == self.rank:
            raise self.fail("a rank cannot exchange buffers with itself")
        lane = self.lanes[transfer.peer, transfer.channel] = Lane()
        return lane

    def _load(self, micro_batch: int) -> None:
        if micro_batch in self._loaded:
            raise self.fail("loaded twice")
        self._loaded.add(micro_batch)

    def _forward(self, stage: int, micro_batch: int) -> int:
        key = self._check_place(stage, micro_batch)
        if micro_batch not in self._loaded:
            raise self.fail("its micro-batch has not been loaded")
        if key in self._progress:
            raise self.fail("runs twice")
        before = self._pieces.before.get(micro_batch)
        if before is not None and key - micro_batch + before not in self._progress:
            raise self.fail(f"the piece before it, micro-batch {before}, has not run forward on stage {stage}")
        num_bytes = self._taken(2 * (key - self._num_micro_batches)) if stage > 0 else 0
        self._progress[key] = _FORWARDED
        if stage + 1 < self._num_stages:
            self._present[2 * key] = 0
        return num_bytes

    def _backward(self, stage: int, micro_batch: int, after: int) -> int:
        key = self._check_place(stage, micro_batch)
        if self._forward_only:
            raise self.fail("a plan of forwards alone has no backward")
        if self._progress.get(key) != _FORWARDED:
            raise self.fail("its forward has not run, or a backward has run already")
        behind = self._pieces.behind.get(micro_batch)
        if behind is not None and self._progress.get(key - micro_batch + behind, _FORWARDED) == _FORWARDED:
            raise self.fail(
                f"the piece behind it, micro-batch {behind}, has not run backward on stage {stage}: gradients of keys"
                " and values would be missing"
            )
        num_bytes = 0
        if stage + 1 < self._num_stages:
            num_bytes = self._taken(2 * (key + self._num_micro_batches) + 1)
        self._progress[key] = after
        if stage > 0:
            self._present[2 * key + 1] = 0
        return num_bytes

    def _weight(self, stage: int, micro_batch: int) -> None:
        key = self._check_place(stage, micro_batch)
        if self._progress.get(key) != _HALF:
            raise self.fail("its input-gradient half has not run")
        self._progress[key] = _DONE

    def _check_place(self, stage: int, micro_batch: int) -> int:
        if stage not in self._stages:
            raise self.fail(f"stage {stage} does not live on this rank")
        if not 0 <= micro_batch < self._num_micro_batches:
            raise self.fail(f"micro-batch {micro_batch} does not exist")
        return stage * self._num_micro_batches + micro_batch

    def _taken(self, key: int) -> int:
        num_bytes = self._present.pop(key, None)
        if num_bytes is None:
            raise self.fail(f"needs the {self._buffer(key)}, which has not arrived")
        return num_bytes

    def check_end(self) -> None:
        for verb, posted in (("sending", self._sending), ("receiving", self._receiving)):
            for key in posted:
                raise VerificationError(f"rank {self.rank} never waits for {verb} the {self._buffer(key)}")
        for key in self._present:
            raise VerificationError(f"rank {self.rank} leaks the {self._buffer(key)}: nothing sends or takes it")
        count, last = self._num_micro_batches, _FORWARDED if self._forward_only else _DONE
        for stage, owner in enumerate(self._stage_ranks):
            if owner == self.rank:
                for micro_batch in range(count):
                    if self._progress.get(stage * count + micro_batch) != last:
                        what = "forward" if self._forward_only else "whole backward"
                        raise VerificationError(
                            f"rank {self.rank} ends without the {what} of micro-batch {micro_batch}, stage {stage}"
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


_EMPTY = Lane()


def verify(
    programs: Sequence[Sequence[Instruction]],
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    *,
    forward_only: bool = False,
    sample_pieces: Sequence[SamplePieces] = (),
) -> list[int]:
    """Peak bytes of buffers in flight per rank; raises VerificationError naming rank, instruction and reason.

    `programs[r]` are the instructions of pipeline rank r, `stage_ranks[stage]` the rank of each stage. On each stage
    every micro-batch must run its whole backward; under `forward_only` its forward, and no backward. The
    forwards of a sample's pieces must run from the first to the last, and their input gradients from the last to the
    first. The native core proves programs of its own in a tenth of the time.
    """
    arguments: Any = (programs, stage_ranks, num_micro_batches)
    peaks = peaks_by_core(*arguments, forward_only=forward_only, sample_pieces=sample_pieces)
    if peaks is None:  # something is wrong, and is named here
        return verified_in_python(*arguments, forward_only=forward_only, sample_pieces=sample_pieces)
    return peaks


def verified_in_python(
    programs: Sequence[Sequence[Instruction]],
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    *,
    forward_only: bool,
    sample_pieces: Sequence[SamplePieces],
) -> list[int]:
    """What `verify` says, without the native core."""
    traces = traced(programs, stage_ranks, num_micro_batches, forward_only=forward_only, sample_pieces=sample_pieces)
    check_one_order(
        [[trace.operations for trace in traces]],
        lambda _, rank, i: f"rank {rank} at its {traces[rank].program[traces[rank].places[i]]}",
    )
    for trace in traces:
        trace.check_end()
    return [trace.peak_bytes for trace in traces]


def peaks_by_core(
    programs: Sequence[Sequence[Instruction]],
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    *,
    forward_only: bool,
    sample_pieces: Sequence[SamplePieces],
) -> list[int] | None:
    """What `verify` gives; None where it may raise: something is wrong, or there are no tables for the native core."""
    made = [one for one in programs if isinstance(one, Program)]
    if len(made) < len(programs) or any(one.specs is not made[0].specs for one in made):
        return None
    pieces = PieceNeighbours.from_pieces(sample_pieces)
    peaks = native.peaks_of_proven(
        [one.table for one in made],
        list(stage_ranks),
        num_micro_batches,
        list(map(_num_bytes, made[0].specs)),
        forward_only,
        *([links.get(m, -1) for m in range(num_micro_batches)] for links in (pieces.before, pieces.behind)),
    )
    return list(peaks) or None


def traced(
    programs: Sequence[Sequence[Event]],
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    *,
    forward_only: bool,
    sample_pieces: Sequence[SamplePieces],
) -> list[RankTrace]:
    """A replica's ranks, each proven by itself, and that the operations of every queue meet in one order."""
    bytes_of: dict[int, int] = {}
    keys: dict[int, int] = {}
    pieces = PieceNeighbours.from_pieces(sample_pieces)
    traces = [
        RankTrace(
            rank, program, stage_ranks, num_micro_batches, bytes_of, keys, forward_only=forward_only, pieces=pieces
        )
        for rank, program in enumerate(programs)
    ]
    for trace in traces:
        trace.run()
    for trace in traces:
        _check_meetings(trace, traces)
    return traces


def _check_meetings(trace: RankTrace, traces: Sequence[RankTrace]) -> None:
    """The k-th operations of both sides of a queue are a send and a receive of one buffer with one shape."""
    for (peer, channel), lane in trace.lanes.items():
        if not 0 <= peer < len(traces):
            raise trace.fail(f"rank {peer} does not exist", lane.places[0])
        theirs = traces[peer].lanes.get((trace.rank, channel), _EMPTY)
        if peer < trace.rank and theirs is not _EMPTY:
            continue  # seen from the other side
        for k, (mine, other) in enumerate(zip(lane.transfers, theirs.transfers, strict=False)):
            sends = isinstance(mine, Send)
            if isinstance(other, Send) == sends:
                kind = "sends" if sends else "receives"
                queue = (trace.rank, peer, channel)
                raise trace.fail(
                    f"both sides of communicator {queue} have {kind} at place {k}: they never meet", lane.places[k]
                )
            if mine.buffer is not other.buffer and mine.buffer != other.buffer:
                raise trace.fail(
                    f"meets the {other.buffer} of rank {peer}: the two ranks disagree on the order", lane.places[k]
                )
            if mine.specs is not other.specs and mine.specs != other.specs:
                raise trace.fail(f"shapes differ: {mine.specs} here, {other.specs} on rank {peer}", lane.places[k])
        ours, others = len(lane.places), len(theirs.places)
        if ours > others:
            raise trace.fail(
                f"never meets an operation of rank {peer}, which posts {others} there", lane.places[others]
            )
        if ours < others:
            raise traces[peer].fail(
                f"never meets an operation of rank {trace.rank}, which posts {ours} there", theirs.places[ours]
            )


def with_collectives(
    replicas: Sequence[Sequence[Sequence[Instruction]]], collectives: ReplicaCollectives, *, width: int = 1
) -> tuple[tuple[tuple[Event, ...], ...], ...]:
    """Programs [dp_rank][pp_rank] of the ranks of all replicas, programs [replica][pp_rank], with their collectives:
    over all data parallel ranks that hold the same stages, and over those of one replica, of which each has `width`.

    Joined ranks run one program; it is given for each of them. A group of tensor parallel ranks issues the same on
    every member by construction.
    """
    issued: list[tuple[tuple[Event, ...], ...]] = []
    plane = range(width * len(replicas))
    for replica, programs in enumerate(replicas):
        joined = plane[replica * width : (replica + 1) * width]
        ranks = []
        for pp_rank, program in enumerate(programs):
            everywhere = tuple((dp_rank, pp_rank) for dp_rank in plane)
            of_replica = tuple((dp_rank, pp_rank) for dp_rank in joined) if width > 1 else ()
            events: Sequence[Event] = program
            if of_replica or collectives.inside or collectives.with_gradients:
                events = [e for one in program for e in (one, *_issued(one, everywhere, of_replica, collectives))]
            ranks.append((*events, *(Collective(everywhere, name) for name in collectives.at_end)))
        issued += [tuple(ranks)] * width
    return tuple(issued)


def _issued(
    instruction: Instruction,
    everywhere: tuple[Member, ...],
    of_replica: tuple[Member, ...],
    collectives: ReplicaCollectives,
) -> list[Collective]:
    """What an instruction issues, after it in the program: its output leaves when they have ended.

    One stands for all exchanges of joined ranks (`of_replica`) within an action: nothing comes between them.
    """
    inside, with_gradients = collectives.inside, collectives.with_gradients
    match instruction:
        case Forward(stage):
            names, action = inside, f"a forward of stage {stage}"
        case Backward(stage):
            names, action = (*inside, *with_gradients), f"a backward of stage {stage}"
        case BackwardInput(stage):
            names, action = inside, f"a backward of stage {stage}"
        case BackwardWeight(stage):
            return [Collective(everywhere, f"{name} in a weight gradient of stage {stage}") for name in with_gradients]
        case _:
            return []
    exchanged = [Collective(of_replica, f"exchange of slices in {instruction}")] if of_replica else []
    return exchanged + [Collective(everywhere, f"{name} in {action}") for name in names]


def verify_step(
    replicas: Sequence[Sequence[Sequence[Event]]],
    stage_ranks: Sequence[int],
    num_micro_batches: Sequence[int],
    *,
    forward_only: bool = False,
    sample_pieces: Sequence[Sequence[SamplePieces]] | None = None,
    width: int = 1,
) -> list[list[int]]:
    """Peak bytes of buffers in flight [dp_rank][pp_rank], as `verify` gives them, once the collectives are proven too.

    `num_micro_batches` has one count a replica, `sample_pieces` (None: no sample is cut) the pieces of each; of a
    replica there are the programs of `width` data parallel ranks. Raises VerificationError naming both ranks and the
    first difference.
    """
    pieces: Sequence[Sequence[SamplePieces]] = [()] * len(num_micro_batches) if sample_pieces is None else sample_pieces
    traces: list[list[RankTrace]] = []
    for dp_rank, programs in enumerate(replicas):
        replica, number = divmod(dp_rank, width)
        if number and programs is replicas[dp_rank - 1]:  # the very program of the rank before, which it is joined with
            traces.append(traces[-1])
            continue
        count, of_replica = num_micro_batches[replica], pieces[replica]
        traces.append(traced(programs, stage_ranks, count, forward_only=forward_only, sample_pieces=of_replica))
    members = {(dp, pp): trace for dp, ranks in enumerate(traces) for pp, trace in enumerate(ranks)}
    _check_agreement(members, width)

    def why(dp_rank: int, pp_rank: int, i: int) -> str:
        trace = traces[dp_rank][pp_rank]
        return f"{_name((dp_rank, pp_rank), width)} at its {trace.program[trace.places[i]]}"

    check_one_order([[trace.operations for trace in ranks] for ranks in traces], why)
    for trace in members.values():
        trace.check_end()
    return [[trace.peak_bytes for trace in ranks] for ranks in traces]


def _check_agreement(members: dict[Member, RankTrace], width: int) -> None:
    """All of a group issue the same collectives in the same order."""
    groups: dict[tuple[Member, ...], None] = {}
    for member, trace in members.items():
        for group, issued in trace.issued.items():
            groups[group] = None
            for other in group:
                if other not in members:
                    raise VerificationError(f"the group of the {issued[0]} names {_name(other, width)}: none")
            if member not in group:
                raise VerificationError(
                    f"{_name(member, width)} issues the {issued[0]} on a group that it is not a member of"
                )
    for group in groups:
        first = members[group[0]]
        ours = [str(one) for one in first.issued.get(group, [])]
        for member in group[1:]:
            if members[member] is first:
                continue
            theirs = [str(one) for one in members[member].issued.get(group, [])]
            if ours != theirs:
                names = _name(group[0], width), _name(member, width)
                raise _disagreement(
                    names, ours, theirs, is_joined=width > 1 and len({d // width for d, _ in group}) == 1
                )


def _disagreement(names: tuple[str, str], ours: list[str], theirs: list[str], *, is_joined: bool) -> VerificationError:
    longest = max(len(ours), len(theirs))
    mine, met = (names + ["nothing"] * (longest - len(names)) for names in (ours, theirs))
    k = next(k for k in range(longest) if mine[k] != met[k])
    move = (
        'a collective inside micro-batches that crosses replicas needs replica_counts = "equal" and one order: take a'
        " published schedule (1f1b, gpipe, zb-h1, zb-h2)"
    )
    if is_joined:
        move = "joined ranks run one program: give all of a block the same plan"
    return VerificationError(
        f"{names[0]} and {names[1]} disagree on collective {k} of their group: {mine[k]} meets {met[k]}"
        f" ({len(ours)} and {len(theirs)} in all); {move}"
    )


def _name(member: Member, width: int) -> str:
    dp_rank, pp_rank = member
    if width == 1:
        return f"pipeline rank {pp_rank} of replica {dp_rank}"
    return f"pipeline rank {pp_rank} of replica {dp_rank // width}, slice {dp_rank % width}"
