"""The best contiguous partition of a sequence under a sum-and-maximum objective, by dynamic programming."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.errors import PlanError

_UNREACHED = 1 << 61  # above any sum of feasible costs, and still addable to one cost
_BOUNDS_AT_ONCE = 12


@dataclass(frozen=True, slots=True)
class Partition:
    """Contiguous cuts: `ends[k]` is the end of part k; `sum_ns` and `max_ns` of the parts' costs."""

    ends: tuple[int, ...]
    sum_ns: int
    max_ns: int

    def value(self, weight: int) -> int:
        """The objective: sum + weight x max."""
        return self.sum_ns + weight * self.max_ns


def best_partition(costs: IntArray, weight: int, thinning_ns: int = 0, *, use_native: bool = True) -> Partition:
    """The contiguous partition that minimises sum + weight x max of its parts' costs, exactly.

    `costs[j, r - 1]`: cost of the part of r items that ends at item j; each part of one item must be feasible. Bounds
    on the parts that may give the optimum are the distinct costs from the least maximum there is up to the room that
    the least sum leaves. With S(t) the least sum under the bound t, which falls with t, a gap between two solved bounds
    is left out once S(upper) + weight x (smallest in the gap) cannot beat the best. `thinning_ns` above 0 tries only
    bounds that far apart.
    """
    costs = np.ascontiguousarray(costs, np.int64)
    feasible = costs < INFEASIBLE
    widths = (costs.shape[1] - feasible[:, ::-1].argmax(axis=1)).astype(np.int32)

    def solve(bounds: Sequence[int]) -> list[Partition]:
        return _solve(costs, widths, bounds, use_native)

    loosest = solve([INFEASIBLE - 1])[0]
    if not weight:
        return loosest
    least = native.least_bound(costs, widths) if native is not None and use_native else _least_maximum(costs)
    tightest = solve([least])[0]
    best = min((tightest, loosest), key=lambda parts: (parts.value(weight), parts.ends))
    room = min(loosest.max_ns, (best.value(weight) - loosest.sum_ns) // weight)
    if thinning_ns:
        bounds = np.append(np.arange(least, room, thinning_ns, dtype=np.int64), room)
    else:
        bounds = np.unique(costs[(costs >= least) & (costs <= room)])
    solved: dict[int, Partition] = {-1: tightest, len(bounds): loosest}
    while queue := _open_bounds(bounds, solved, weight, best.value(weight)):
        for index, parts in zip(queue, solve([int(bounds[k]) for k in queue]), strict=True):
            solved[index] = parts
            best = min(best, parts, key=lambda found: (found.value(weight), found.ends))
    return best


def _open_bounds(bounds: IntArray, solved: dict[int, Partition], weight: int, best: int) -> list[int]:
    """Bounds to solve next, spread over the gaps that may still hold the optimum."""
    gaps: list[tuple[int, int, int]] = []
    for low, high in itertools.pairwise(sorted(solved)):
        # Below the largest part of the bound's own optimum every bound changes the optimum; between, none does.
        above = solved[high]
        room = (best - above.sum_ns) // weight  # only bounds up to here can win
        top = min(
            high,
            int(np.searchsorted(bounds, above.max_ns)),
            int(np.searchsorted(bounds, room, side="right")),
        )
        if top > low + 1 and above.sum_ns + weight * int(bounds[low + 1]) < best:
            gaps.append((above.sum_ns + weight * int(bounds[low + 1]), low, top))
    gaps = sorted(gaps)[:_BOUNDS_AT_ONCE]
    share = max(1, _BOUNDS_AT_ONCE // max(1, len(gaps)))
    fresh: set[int] = set()
    for _, low, top in gaps:
        steps = min(share, top - low - 1)
        fresh |= {low + (top - low) * k // (steps + 1) for k in range(1, steps + 1)} - {low, top}
    return sorted(fresh - solved.keys())


def _solve(costs: IntArray, widths: npt.NDArray[np.int32], bounds: Sequence[int], use_native: bool) -> list[Partition]:
    """For every bound, the partition of least sum with no part above it; equal sums go to fewer rows at the end."""
    if native is not None and use_native:
        solved = native.cheapest_cuts(costs, widths, list(bounds))
    else:
        solved = _cheapest_cuts(costs[:, : int(widths.max())], np.array(bounds, np.int64))
    found = []
    for total, ends in solved:
        last = np.array(ends, np.int64)
        parts = costs[last - 1, np.diff(last, prepend=0) - 1]
        found.append(Partition(tuple(ends), int(total), int(parts.max())))
    return found


def _least_maximum(costs: IntArray) -> int:
    """The smallest bound under which a partition exists."""
    num_items, width = costs.shape
    least = np.full(num_items + 1, INFEASIBLE, np.int64)
    least[0] = 0
    for end in range(1, num_items + 1):
        most = min(width, end)
        least[end] = np.maximum(least[end - most : end][::-1], costs[end - 1, :most]).min()
    return int(least[-1])


def _cheapest_cuts(costs: IntArray, bounds: IntArray) -> list[tuple[int, list[int]]]:
    """The twin of the native core's: for every bound, the sum of the cheapest cuts and their ends."""
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
        ends, end = [], num_items
        while end > 0:
            ends.append(end)
            end -= int(rows[end, k])
        found.append((int(sums[k, -1]), ends[::-1]))
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
