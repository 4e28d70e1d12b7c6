"""Assignment of numbers to groups of nearly equal sums: micro-batches to replicas, by their times."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

from dynapipe_ext.errors import PlanError

_ROUNDS_PER_ITEM = 4
_NONE = -1  # no item
_BOTH_WAYS = 128  # items up to which the largest differencing method is tried as a second start


def assign_replicas(
    costs_ns: Sequence[int], num_replicas: int, *, equal_counts: bool = False, seed: int = 0
) -> list[list[int]]:
    """Return the indices of the micro-batches of each replica, ascending; `costs_ns` are their times.

    Longest processing time first (Graham 1969: at most 4/3 - 1/(3m) of the optimum), or the largest differencing method
    of Karmarkar and Karp (1982) if that is better. Then the most and the least loaded replica exchange micro-batches
    while that brings their loads closer. No replica is empty; with `equal_counts` all have equally many. The result is
    a function of the arguments; `seed` rotates which replica gets the largest load, for steps to take turns.

    Raises PlanError for fewer micro-batches than replicas, a negative time, or counts that cannot be equal.

    >>> assign_replicas([7, 5, 4, 4, 3, 1], 2)
    [[0, 3, 5], [1, 2, 4]]
    """
    count = len(costs_ns)
    if count < num_replicas:
        raise PlanError(
            f"{count} micro-batches cannot feed {num_replicas} replicas: split the batch further or enlarge it"
        )
    if equal_counts and count % num_replicas:
        raise PlanError(
            f"{count} micro-batches do not divide over {num_replicas} replicas of equal counts:"
            f" split the batch into {-(-count // num_replicas) * num_replicas}"
        )
    if min(costs_ns) < 0:
        raise PlanError(f"micro-batch {costs_ns.index(min(costs_ns))} has a negative cost: check the cost model")
    groups = _deal_longest_first(costs_ns, num_replicas, count // num_replicas if equal_counts else count)
    if num_replicas > 1:
        groups = _exchange(groups, costs_ns, equal_counts=equal_counts)
        if count <= _BOTH_WAYS and not equal_counts:
            other = _exchange(karmarkar_karp(costs_ns, num_replicas), costs_ns)
            groups = min(groups, other, key=lambda one: max(sum(costs_ns[i] for i in group) for group in one))
    shift = seed % num_replicas
    return [sorted(group) for group in groups[-shift:] + groups[:-shift]]


def _deal_longest_first(costs: Sequence[int], num_groups: int, most_items: int) -> list[list[int]]:
    """Put each item, largest first, into the least loaded group with fewer than `most_items`; no group stays empty."""
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    groups = [[item] for item in order[:num_groups]]
    heap = [(costs[item], group) for group, item in enumerate(order[:num_groups]) if most_items > 1]
    heapq.heapify(heap)
    for item in order[num_groups:]:
        load, group = heap[0]
        groups[group].append(item)
        if len(groups[group]) < most_items:
            heapq.heapreplace(heap, (load + costs[item], group))
        else:
            heapq.heappop(heap)
    return groups


def _exchange(groups: list[list[int]], costs: Sequence[int], *, equal_counts: bool = False) -> list[list[int]]:
    """Let the most loaded group give an item to the least loaded one, or exchange one for a smaller one, as long as
    that brings the two closer together. Of all pairs the one whose difference is nearest to half of the gap goes."""
    loads = [sum(costs[i] for i in group) for group in groups]
    for _ in range(_ROUNDS_PER_ITEM * len(costs)):
        most, least = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[most] - loads[least]
        taken = sorted((costs[j], j) for j in groups[least])
        if not equal_counts and len(groups[most]) > 1:
            taken.insert(0, (0, _NONE))
        pairs = []
        for i in groups[most]:
            at = bisect_left(taken, (costs[i] - gap // 2,))
            pairs += [(abs(2 * (costs[i] - cost) - gap), i, j) for cost, j in taken[max(0, at - 1) : at + 2]]
        off, i, j = min(pairs)
        if off >= gap:
            break
        groups[most].remove(i)
        groups[least].append(i)
        if j != _NONE:
            groups[least].remove(j)
            groups[most].append(j)
        moved = costs[i] - (0 if j == _NONE else costs[j])
        loads[most], loads[least] = loads[most] - moved, loads[least] + moved
    return groups


def karmarkar_karp(
    costs: Sequence[int], num_groups: int, starts: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """Return item indices in `num_groups` groups by the largest differencing method; none is empty if items are enough.

    Each partial partition has `num_groups` groups. The two whose heaviest and lightest groups differ most are merged,
    the heaviest group of one with the lightest of the other, until one is left. At first each has one item (default),
    or the items of one of `starts`: at most `num_groups`, the heaviest first, each in a group of its own.

    >>> karmarkar_karp([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    >>> karmarkar_karp([9, 1, 1, 1], 2), karmarkar_karp([9, 1, 1, 1], 2, [[0, 1], [2, 3]])
    ([[0], [1, 2, 3]], [[0, 3], [1, 2]])
    """
    partitions: list[list[tuple[int, list[int]]]] = [  # of (load, items), heaviest first
        [(costs[i], [i]) for i in items] + [(0, [])] * (num_groups - len(items))
        for items in (starts if starts is not None else [[i] for i in range(len(costs))])
    ]
    heap = [(groups[-1][0] - groups[0][0], number, groups) for number, groups in enumerate(partitions)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = sorted(
            ((x + y, xs + ys) for (x, xs), (y, ys) in zip(a, reversed(b), strict=True)),
            key=lambda group: (-group[0], group[1]),
        )
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(num_groups)]
