"""Proof that there is one order of all operations of a step in which every rank posts its own.

Then the step ends however ranks run what they have posted: one at a time over all communicators, which is what NCCL's
guide has callers be ready for, or side by side. For of the operations that have not ended, the first in that order is
the first of each of its ranks, and every wait before it in their programs is for one that has ended. Where there is no
such order, ranks that run one at a time wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.proof.rank import Operation


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
