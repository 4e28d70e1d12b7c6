"""The best splits of a few samples into micro-batches of any members, by enumeration."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from dynapipe_ext.costs.grid import INFEASIBLE

MOST_SAMPLES = 9


def good_partitions(costs: Sequence[int], weights: Sequence[int], most: int) -> list[list[int]]:
    """For each weight the `most` partitions of least sum + weight x max of their parts' costs, without repetition.

    `costs[mask]` prices the subset with the samples of the bits of `mask` (INFEASIBLE: cannot run); a partition is a
    list of masks. All partitions are looked at: 21,147 of 9 samples. None is good where some sample fits nowhere.

    >>> good_partitions([0, 5, 5, 6, 5, 50, 50, 60], [1], 1)
    [[3, 4]]
    """
    count = len(costs).bit_length() - 1

    def partitions(rest: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(sum, max, parts) of the partitions of the samples in `rest`."""
        if not rest:
            yield 0, 0, ()
            return
        lowest = rest & -rest
        others = rest ^ lowest
        part = others
        while True:
            cost = costs[part | lowest]
            if cost < INFEASIBLE:
                for total, largest, parts in found(others ^ part):
                    yield total + cost, max(largest, cost), (part | lowest, *parts)
            if not part:
                break
            part = (part - 1) & others

    known: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}

    def found(rest: int) -> list[tuple[int, int, tuple[int, ...]]]:
        if rest not in known:
            known[rest] = list(partitions(rest))
        return known[rest]

    whole = found((1 << count) - 1)
    chosen: dict[tuple[int, ...], None] = {}
    for weight in weights:
        for _, _, parts in heapq.nsmallest(most, whole, key=lambda one: (one[0] + weight * one[1], one[2])):
            chosen[parts] = None
    return [list(parts) for parts in chosen]
