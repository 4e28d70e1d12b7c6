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

from collections.abc import Sequence

from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import Instruction, Send, WaitRecv, WaitSend
from dynapipe_ext.executor.verify_rank import Lane, RankTrace

_NEVER = 1 << 62
_EMPTY = Lane()


def verify(programs: Sequence[Sequence[Instruction]], stage_ranks: Sequence[int], num_micro_batches: int) -> list[int]:
    """Peak bytes of buffers in flight per rank; raises VerificationError naming rank, instruction and reason.

    `programs[r]` are the instructions of pipeline rank r, `stage_ranks[stage]` the rank of each stage.
    """
    bytes_of: dict[int, int] = {}
    traces = [
        RankTrace(rank, program, stage_ranks, num_micro_batches, bytes_of) for rank, program in enumerate(programs)
    ]
    for trace in traces:
        trace.run()
    for trace in traces:
        _check_meetings(trace, traces)
    _check_progress(traces)
    for trace in traces:
        trace.check_end()
    return [trace.peak_bytes for trace in traces]


def _check_meetings(trace: RankTrace, traces: Sequence[RankTrace]) -> None:
    """The k-th operations of both sides of a queue are a send and a receive of one buffer with one shape."""
    for (peer, channel), lane in trace.lanes.items():
        if not 0 <= peer < len(traces):
            raise trace.fail(f"rank {peer} does not exist", lane.places[0])
        if peer < trace.rank:
            continue  # seen from the other side
        theirs = traces[peer].lanes.get((trace.rank, channel), _EMPTY).transfers
        for k, (mine, other) in enumerate(zip(lane.transfers, theirs, strict=False)):
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


def _check_progress(traces: Sequence[RankTrace]) -> None:
    """A wait ends once the peer has run past the place where it posts its side; some rank can always go on."""
    needs = [_needs(trace, traces) for trace in traces]
    reached = [waits[0][0] for waits in needs]  # the place at which each rank stands: always a wait, or the end
    next_wait = [0] * len(traces)
    waiting = list(range(len(traces)))
    while waiting:
        blocked = []
        moved = False
        for rank in waiting:
            waits, i = needs[rank], next_wait[rank]
            place, peer, posted_at = waits[i]
            if reached[peer] <= posted_at:
                if place < _NEVER:
                    blocked.append(rank)
                continue
            moved = True
            while reached[peer] > posted_at:
                i += 1
                place, peer, posted_at = waits[i]
            reached[rank], next_wait[rank] = place, i
            if place < _NEVER:
                blocked.append(rank)
        if blocked and not moved:
            raise VerificationError("deadlock: " + "; ".join(_why_blocked(traces[r], next_wait[r]) for r in blocked))
        waiting = blocked


def _needs(trace: RankTrace, traces: Sequence[RankTrace]) -> list[tuple[int, int, int]]:
    """Per wait: its place, the peer, and the place at which the peer posts its side; at the end one that never ends."""
    rank, found = trace.rank, []
    theirs = {
        lane: traces[peer].lanes.get((rank, channel), _EMPTY).places for (peer, channel), lane in trace.lanes.items()
    }
    for place, (lane, k, peer, *_) in trace.waits:
        places = theirs[lane]
        found.append((place, peer, places[k] if k < len(places) else _NEVER))
    found.append((_NEVER, rank, _NEVER))
    return found


def _why_blocked(trace: RankTrace, i: int) -> str:
    place, (_, k, peer, *_) = trace.waits[i]
    instruction = trace.program[place]
    assert isinstance(instruction, WaitSend | WaitRecv)
    verb = "sending" if isinstance(instruction, WaitSend) else "receiving"
    return f"rank {trace.rank} waits for {verb} the {instruction.buffer} (operation {k} with rank {peer})"
