"""The best contiguous partition of a sequence under a sum-and-maximum objective, by dynamic programming."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.errors import PlanError

_UNREACHED = 1 << 61  # above any sum of feasible costs, and still addable to one cost
_CANDIDATES_AT_ONCE = 12


@dataclass(frozen=True, slots=True)
class Partition:
    """Contiguous cuts: `ends[k]` is the end of part k; `sum_ns` and `max_ns` of the parts' costs."""

    ends: tuple[int, ...]
    sum_ns: int
    max_ns: int

    def value(self, weight: int) -> int:
        """The objective: sum + weight x max."""
        return self.sum_ns + weight * self.max_ns


def best_partition(costs: IntArray, weight: int, thinning_ns: int = 0) -> Partition:
    """The contiguous partition that minimises sum + weight x max of its parts' costs, exactly.

    `costs[j, r - 1]`: cost of the part of r items that ends at item j; each part of one item must be feasible.
    Candidate bounds are the distinct costs; with S(t) the least sum under the bound t, a gap of candidates between two
    solved ones is left out once S(upper) + weight x (smallest in the gap) cannot beat the best, as S falls with t.
    """
    candidates = np.unique(costs[costs < INFEASIBLE])
    if thinning_ns:
        intervals = candidates // thinning_ns
        candidates = candidates[np.append(np.flatnonzero(np.diff(intervals)), len(candidates) - 1)]
    candidates = candidates[candidates >= _least_maximum(costs)]
    last = len(candidates) - 1
    solved: dict[int, Partition] = {}
    queue = [last, 0] if weight else [last]
    best: Partition | None = None
    while queue:
        width = _useful_width(costs, int(candidates[max(queue)]))
        for index, parts in zip(queue, _solve(costs[:, :width], candidates[queue]), strict=True):
            solved[index] = parts
            if best is None or (parts.value(weight), parts.ends) < (best.value(weight), best.ends):
                best = parts
        assert best is not None
        known = sorted(solved)
        gaps: list[tuple[int, int, int]] = []
        for low, high in itertools.pairwise(known):
            # Below the largest part of the bound's own optimum every bound changes the optimum; between, none does.
            top = int(np.searchsorted(candidates, solved[high].max_ns))
            low_bound = solved[high].sum_ns + weight * int(candidates[min(low + 1, last)])
            if min(top, high) > low + 1 and low_bound < best.value(weight):
                room = (best.value(weight) - solved[high].sum_ns) // weight  # only bounds up to here can win
                top = min(top, int(np.searchsorted(candidates, room, side="right")))
                if top > low + 1:
                    gaps.append((low_bound, low, min(top, high)))
        gaps.sort()
        gaps = gaps[:_CANDIDATES_AT_ONCE]
        share = max(1, _CANDIDATES_AT_ONCE // max(1, len(gaps)))
        fresh: set[int] = set()
        for _, low, high in gaps:
            steps = min(share, high - low - 1)
            fresh |= {low + (high - low) * k // (steps + 1) for k in range(1, steps + 1)} - {low, high}
        queue = sorted(fresh - solved.keys())
    assert best is not None
    return best


def _useful_width(costs: IntArray, bound: int) -> int:
    """Row counts up to the last that some run reaches under the bound."""
    return int(np.flatnonzero((costs <= bound).any(axis=0))[-1]) + 1


def _least_maximum(costs: IntArray) -> int:
    """The smallest bound under which a partition exists."""
    num_items, width = costs.shape
    least = np.full(num_items + 1, INFEASIBLE, np.int64)
    least[0] = 0
    for end in range(1, num_items + 1):
        most = min(width, end)
        least[end] = np.maximum(least[end - most : end][::-1], costs[end - 1, :most]).min()
    return int(least[-1])


def _solve(costs: IntArray, bounds: IntArray) -> list[Partition]:
    """For every bound, the partition of least sum with no part above it; equal sums go to fewer rows at the end."""
    num_items, width = costs.shape
    num_bounds = len(bounds)
    sums = np.full((num_bounds, num_items + 1), _UNREACHED, np.int64)
    sums[:, 0] = 0
    rows = np.zeros((num_items + 1, num_bounds), np.int64)
    every = np.arange(num_bounds)
    for end in range(1, num_items + 1):
        most = min(width, end)
        part = costs[end - 1, :most]
        total = sums[:, end - most : end][:, ::-1] + part
        np.copyto(total, _UNREACHED, where=part > bounds[:, None])
        chosen = total.argmin(axis=1)
        rows[end] = chosen + 1
        sums[:, end] = np.minimum(total[every, chosen], _UNREACHED)
    found = []
    for k in range(num_bounds):
        ends, end, most_ns = [], num_items, 0
        while end > 0:
            r = int(rows[end, k])
            ends.append(end)
            most_ns = max(most_ns, int(costs[end - 1, r - 1]))
            end -= r
        found.append(Partition(tuple(reversed(ends)), int(sums[k, -1]), most_ns))
    return found


def cut_again(costs: IntArray, parts: Partition, wanted: int) -> Partition:
    """At least `wanted` parts: the dearest that has two rows is cut where its dearer half costs least, in turn."""
    ends = list(parts.ends)
    if wanted > costs.shape[0]:
        raise PlanError(
            f"{costs.shape[0]} samples cannot make {wanted} micro-batches, the next multiple of the number of replicas:"
            " enlarge the global batch or let counts differ"
        )
    while len(ends) < wanted:
        bounds = list(itertools.pairwise([0, *ends]))
        splittable = [k for k, (a, b) in enumerate(bounds) if b - a > 1]
        a, b = bounds[max(splittable, key=lambda k: (costs[bounds[k][1] - 1, bounds[k][1] - bounds[k][0] - 1], -k))]
        at = min(range(a + 1, b), key=lambda c: (max(costs[c - 1, c - a - 1], costs[b - 1, b - c - 1]), c))
        ends = sorted([*ends, at])
    each = [int(costs[b - 1, b - a - 1]) for a, b in itertools.pairwise([0, *ends])]
    return Partition(tuple(ends), sum(each), max(each))
