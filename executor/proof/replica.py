"""Proof that the instructions of one replica cannot deadlock, lose a message or leak a buffer.

The rules are NCCL's, not gloo's: one in-order queue for each unordered pair of ranks and communicator, which carries
both directions and has no tags. The k-th operation that one side posts meets the k-th of the other; a send ends only
with its receive. The tensors of one operation are one atomic group. The host blocks in WaitSend and WaitRecv only. And
a rank runs what it has posted one at a time, over all its communicators: NCCL promises no more where kernels of
several do not fit on a device together. Under these rules progress never depends on timing. What a rank holds and
takes depends on its own order alone (`rank.py`); here the queues of both sides are laid side by side, and `order.py`
finds the one order that all ranks post in.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynapipe_ext.executor.instructions import Instruction, Send
from dynapipe_ext.executor.proof.order import check_one_order
from dynapipe_ext.executor.proof.rank import Event, Lane, RankTrace
from dynapipe_ext.pieces import Chain, PieceNeighbours

_EMPTY = Lane()


def verify(
    programs: Sequence[Sequence[Instruction]],
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    *,
    forward_only: bool = False,
    chains: Sequence[Chain] = (),
) -> list[int]:
    """Peak bytes of buffers in flight per rank; raises VerificationError naming rank, instruction and reason.

    `programs[r]` are the instructions of pipeline rank r, `stage_ranks[stage]` the rank of each stage. On each stage
    every micro-batch must run its whole backward; under `forward_only` its forward, and no backward. Of `chains`,
    micro-batches that carry one sample, forwards must run from the first to the last, and backwards back.
    """
    traces = traced(programs, stage_ranks, num_micro_batches, forward_only=forward_only, chains=chains)
    check_one_order(
        [[trace.operations for trace in traces]],
        lambda _, rank, i: f"rank {rank} at its {traces[rank].program[traces[rank].places[i]]}",
    )
    for trace in traces:
        trace.check_end()
    return [trace.peak_bytes for trace in traces]


def traced(
    programs: Sequence[Sequence[Event]],
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    *,
    forward_only: bool,
    chains: Sequence[Chain],
) -> list[RankTrace]:
    """A replica's ranks, each proven by itself, and that the operations of every queue meet in one order."""
    bytes_of: dict[int, int] = {}
    keys: dict[int, int] = {}
    pieces = PieceNeighbours.of(chains)
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
