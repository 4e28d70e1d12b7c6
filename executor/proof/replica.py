"""Proof that the instructions of one replica cannot deadlock, lose a message or leak a buffer.

The rules are NCCL's, not gloo's: one in-order queue for each unordered pair of ranks and communicator, which carries
both directions and has no tags. The k-th operation that one side posts meets the k-th of the other; a transfer starts
when both are posted and all before it on that queue have ended; a send ends only with its receive. The tensors of one
operation are one atomic group. The host blocks in WaitSend and WaitRecv only. Under these rules progress never depends
on timing (posting is monotone, and an operation that both sides have posted ends), so running the ranks once to a
fixed point decides for all interleavings. What a rank holds and takes depends on its own order alone (`verify_rank`);
here the queues of both sides are laid side by side, and the waits alone are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import Instruction, Send, WaitRecv, WaitSend
from dynapipe_ext.executor.proof.rank import Event, Lane, RankTrace

NEVER = 1 << 62
_EMPTY = Lane(-1)

Need = tuple[int, int, int]  # place of a wait, the rank waited for, the place beyond which that one must have come


def verify(
    programs: Sequence[Sequence[Instruction]],
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    *,
    forward_only: bool = False,
) -> list[int]:
    """Peak bytes of buffers in flight per rank; raises VerificationError naming rank, instruction and reason.

    `programs[r]` are the instructions of pipeline rank r, `stage_ranks[stage]` the rank of each stage. On each stage
    every micro-batch must run its whole backward; under `forward_only` its forward, and no backward.
    """
    traces = traced(programs, stage_ranks, num_micro_batches, forward_only=forward_only)
    check_progress([[*needs_of(trace), (NEVER, trace.rank, NEVER)] for trace in traces], partial(_why_blocked, traces))
    for trace in traces:
        trace.check_end()
    return [trace.peak_bytes for trace in traces]


def traced(
    programs: Sequence[Sequence[Event]], stage_ranks: Sequence[int], num_micro_batches: int, *, forward_only: bool
) -> list[RankTrace]:
    """A replica's ranks, each proven by itself, and that the operations of every queue meet in one order."""
    bytes_of: dict[int, int] = {}
    keys: dict[int, int] = {}
    traces = [
        RankTrace(rank, program, stage_ranks, num_micro_batches, bytes_of, keys, forward_only=forward_only)
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
        lane.met_at = theirs.places
        if peer < trace.rank:
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


def needs_of(trace: RankTrace, first: int = 0) -> list[Need]:
    """What each wait for a transfer needs, in program order: the peer beyond the place where it posts its side.

    `first` is the number of the replica's first rank among all.
    """
    return [
        (place, first + lane.peer, lane.met_at[k] if k < len(lane.met_at) else NEVER)
        for place, (lane, k, _) in trace.waits
    ]


def check_progress(needs: Sequence[Sequence[Need]], why: Callable[[int, int], str]) -> None:
    """Run the waits of all ranks to a fixed point; raises VerificationError where some never end.

    Each rank's needs are in program order and end with one at NEVER. `why(rank, i)` says what the i-th waits for.
    """
    reached = [waits[0][0] for waits in needs]  # the place at which each rank stands: always a wait, or the end
    next_wait = [0] * len(needs)
    waiting = list(range(len(needs)))
    while waiting:
        blocked = []
        moved = False
        for rank in waiting:
            waits, i = needs[rank], next_wait[rank]
            place, peer, beyond = waits[i]
            if reached[peer] <= beyond:
                if place < NEVER:
                    blocked.append(rank)
                continue
            moved = True
            while reached[peer] > beyond:
                i += 1
                place, peer, beyond = waits[i]
            reached[rank], next_wait[rank] = place, i
            if place < NEVER:
                blocked.append(rank)
        if blocked and not moved:
            raise VerificationError("deadlock: " + "; ".join(why(rank, next_wait[rank]) for rank in blocked))
        waiting = blocked


def _why_blocked(traces: Sequence[RankTrace], rank: int, i: int) -> str:
    trace = traces[rank]
    place, (lane, k, _) = trace.waits[i]
    instruction = trace.program[place]
    assert isinstance(instruction, WaitSend | WaitRecv)
    verb = "sending" if isinstance(instruction, WaitSend) else "receiving"
    return f"rank {trace.rank} waits for {verb} the {instruction.buffer} (operation {k} with rank {lane.peer})"
