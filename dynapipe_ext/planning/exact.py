"""The best split of a few samples into padded micro-batches of any members, by dynamic programming over subsets."""

from __future__ import annotations

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
