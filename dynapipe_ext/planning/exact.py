"""The best splits of a few samples into padded micro-batches of any members, by subsets and by enumeration."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray

MOST_SAMPLES = 9
_UNREACHED = 1 << 61


def best_subsets(costs: IntArray, weight: int) -> list[list[int]] | None:
    """Disjoint subsets that hold every sample and minimise sum + weight x max of their costs; None where none fits.

    `costs[mask]` prices the subset with the samples of the bits of `mask` (INFEASIBLE: cannot run). Every distinct cost
    is tried as a bound on the largest, as in `best_partition`; 3^n steps for n samples.

    >>> best_subsets(np.array([0, 5, 5, 6, 5, 50, 50, 60]), 1)
    [[0, 1], [2]]
    """
    count = len(costs).bit_length() - 1
    bounds = np.unique(costs[1:][costs[1:] < INFEASIBLE])
    if not len(bounds):
        return None
    sums = np.full((len(costs), len(bounds)), _UNREACHED, np.int64)
    sums[0] = 0
    chosen = np.zeros((len(costs), len(bounds)), np.int64)
    for mask in range(1, len(costs)):
        lowest = mask & -mask
        rest = mask ^ lowest
        others = rest
        while True:  # every subset that has the lowest sample
            part = others | lowest
            if costs[part] < INFEASIBLE:
                total = np.where(costs[part] <= bounds, sums[mask ^ part] + costs[part], _UNREACHED)
                better = total < sums[mask]
                sums[mask][better] = total[better]
                chosen[mask][better] = part
            if not others:
                break
            others = (others - 1) & rest
    values = np.where(sums[-1] < _UNREACHED, sums[-1] + weight * bounds, 1 << 62)
    best = int(values.argmin())
    if sums[-1, best] >= _UNREACHED:
        return None
    parts = []
    mask = len(costs) - 1
    while mask:
        part = int(chosen[mask, best])
        parts.append([i for i in range(count) if part >> i & 1])
        mask ^= part
    return parts


def good_partitions(costs: Sequence[int], weights: Sequence[int], most: int) -> list[list[int]]:
    """For each weight the `most` partitions of least sum + weight x max of their parts' costs, without repetition.

    `costs[mask]` as in `best_subsets`; a partition is a list of masks. All partitions are looked at: 21,147 of 9
    samples.
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
