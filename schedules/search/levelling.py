"""Cuts and replicas made even by what every rank has to do, before any order is simulated.

A step takes at least the work of its busiest rank, plus the first micro-batch's way to that rank and the last one's way
back. The larger the largest micro-batch is, the longer ranks wait. So cuts and replicas can be judged without an order,
in much less time than a simulation takes. Memory is not judged: the search that follows simulates it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynapipe_ext.core import native
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.partitioning.padded import ShapeIndex
from dynapipe_ext.schedules.search.optimizer import drop_merged, make_records


def balance_loads(
    costs: MicroBatchCosts,
    stage_ranks: Sequence[int],
    shapes: ShapeIndex,
    cuts: Sequence[tuple[int, int]],
    groups: Sequence[Sequence[int]],
    *,
    split: bool,
    moves: int,
    seed: int,
    equal_counts: bool = False,
) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Return the best cuts of the items in turn, and the indices of each replica's cuts, after `moves` random moves.

    A cut has the items first .. end - 1. `shapes[j, r - 1]` is the shape of the r items that end at item j, or -1 if
    they may not be a micro-batch (each of `cuts` may). `costs` are those of every shape. `groups`: indices of each
    replica's `cuts`. The result is a function of the arguments; the first of equals is returned.
    """
    records = make_records([costs], split=split)
    ranges, new_groups = native.levelled(
        records, stage_ranks, split, np.ascontiguousarray(shapes), list(cuts), groups, moves, seed, equal_counts
    )
    left, new_groups = drop_merged(ranges, new_groups)
    return left, list(map(sorted, new_groups))
