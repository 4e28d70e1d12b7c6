"""Cuts and replicas made even by what every rank has to do, before any order is simulated.

A step takes at least what its busiest rank has to do, after the first micro-batch's way to it and before the last one's
way back; and ranks wait the longer, the larger the largest micro-batch is. So cuts and replicas can be judged without
an order, at a fraction of what a simulation takes. Memory is not judged: the search that follows simulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.core import native
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.partitioning.padded import ShapeIndex

Range = tuple[int, int]  # items first .. end - 1; (-1, -1): merged away
CutGroups = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTimes:
    """Of every shape, ns (shapes, ranks): a rank's work, the least time before its first stage (head) and after it
    (tail; 0 where a W may come last). `total_ns` (shapes,): the work of all ranks."""

    work_ns: IntArray
    head_ns: IntArray
    tail_ns: IntArray
    total_ns: IntArray

    @classmethod
    def of(cls, costs: MicroBatchCosts, stage_ranks: Sequence[int], *, split: bool) -> RankTimes:
        work, head, tail = np.zeros((3, costs.num_micro_batches, max(stage_ranks) + 1), np.int64)
        gradient = costs.input_ns if split else costs.backward_ns
        down, up = np.zeros((2, costs.num_micro_batches), np.int64)
        for stage, rank in enumerate(stage_ranks):
            if rank not in stage_ranks[:stage]:
                head[:, rank], tail[:, rank] = down, 0 if split else up
            work[:, rank] += costs.forward_ns[stage] + costs.backward_ns[stage]
            crosses = stage + 1 < len(stage_ranks) and stage_ranks[stage + 1] != rank
            transfer = costs.transfer_ns[stage] if crosses else 0
            down = down + costs.forward_ns[stage] + transfer
            up = up + gradient[stage] + transfer
        return cls(work_ns=work, head_ns=head, tail_ns=tail, total_ns=work.sum(axis=1))


def levelled(
    times: RankTimes,
    shapes: ShapeIndex,
    cuts: Sequence[Range],
    groups: Sequence[Sequence[int]],
    *,
    moves: int,
    seed: int,
    equal_counts: bool = False,
) -> tuple[list[Range], CutGroups]:
    """Cuts of the items in turn, and their indices of each replica, after so many random moves: the best of all.

    `shapes[j, r - 1]`: the shape of the r items that end at item j, or -1 where they may not be a micro-batch; `cuts`
    may all be. A function of its arguments; of equals the first stays.
    """
    tables = (times.work_ns, times.head_ns, times.tail_ns, times.total_ns, shapes)
    ranges, new_groups = native.levelled(
        *map(np.ascontiguousarray, tables), list(cuts), [list(g) for g in groups], moves, seed, equal_counts
    )
    left = sorted((cut, m) for m, cut in enumerate(ranges) if cut[0] >= 0)
    place = {m: i for i, (_, m) in enumerate(left)}
    return [cut for cut, _ in left], [sorted(place[m] for m in group) for group in new_groups]
