"""Micro-batches over data-parallel replicas with the smallest largest load."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from dynapipe_ext.errors import PlanError

_ROUNDS_PER_ITEM = 4


def assign_replicas(
    costs_ns: Sequence[int], num_replicas: int, *, equal_counts: bool = False, seed: int = 0
) -> list[list[int]]:
    """Indices of the micro-batches of each replica, in the given order within each.

    Longest processing time first (Graham 1969: at most 4/3 - 1/(3m) of the optimum), then moves and swaps out of the
    most loaded replica while they lower it. Counts differ freely unless `equal_counts`; no replica is empty. The result
    is a function of the arguments; `seed` rotates which replica gets the heaviest, for steps to take turns.

    Raises PlanError for fewer micro-batches than replicas, or a number that does not divide under `equal_counts`.

    >>> assign_replicas([7, 5, 4, 4, 3, 1], 2)
    [[0, 3, 5], [1, 2, 4]]
    """
    if num_replicas < 1:
        raise PlanError(f"num_replicas is {num_replicas} but must be at least 1")
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
        raise PlanError(f"micro-batch {min(range(count), key=lambda i: costs_ns[i])} has a negative cost")
    groups = _longest_first(costs_ns, num_replicas, count // num_replicas if equal_counts else None)
    _refine(groups, costs_ns, equal_counts)
    shift = seed % num_replicas
    return [sorted(group) for group in groups[-shift:] + groups[:-shift]] if shift else [sorted(g) for g in groups]


def _longest_first(costs: Sequence[int], num_groups: int, most: int | None) -> list[list[int]]:
    """Each item, largest first, into the group of least load; the first `num_groups` items open one group each."""
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    groups: list[list[int]] = [[item] for item in order[:num_groups]]
    heap = [(costs[item], group) for group, item in enumerate(order[:num_groups]) if most != 1]
    heapq.heapify(heap)
    for item in order[num_groups:]:
        load, group = heapq.heappop(heap)
        groups[group].append(item)
        if most is None or len(groups[group]) < most:
            heapq.heappush(heap, (load + costs[item], group))
    return groups


def _refine(groups: list[list[int]], costs: Sequence[int], equal_counts: bool) -> None:
    """Lower the largest load in place: the best move or swap between its group and any other, until none helps."""
    loads = [sum(costs[i] for i in group) for group in groups]
    for _ in range(_ROUNDS_PER_ITEM * len(costs)):
        top = max(range(len(groups)), key=lambda g: (loads[g], -g))
        best: tuple[int, int, int, int] | None = None  # (larger of the two loads, other group, given, taken or -1)
        given = np.array([costs[i] for i in groups[top]], np.int64)
        for other in sorted(range(len(groups)), key=lambda g: (loads[g], g)):
            gap = loads[top] - loads[other]
            if other == top or gap <= 0 or (best and best[0] <= (loads[top] + loads[other] + 1) // 2):
                continue
            taken = np.array([costs[i] for i in groups[other]], np.int64)
            change = given[:, None] - taken[None, :]
            if not equal_counts and len(groups[top]) > 1:
                change = np.concatenate([change, given[:, None]], axis=1)
            larger = np.where((change > 0) & (change < gap), np.maximum(loads[top] - change, loads[other] + change), -1)
            if not (larger >= 0).any():
                continue
            larger = np.where(larger < 0, loads[top], larger)
            flat = int(larger.argmin())
            row, column = divmod(flat, larger.shape[1])
            value = int(larger[row, column])
            if value < loads[top] and (best is None or value < best[0]):
                best = (value, other, row, column if column < len(taken) else -1)
        if best is None:
            return
        _, other, row, column = best
        item = groups[top].pop(row)
        back = groups[other].pop(column) if column >= 0 else None
        groups[other].append(item)
        loads[top] -= costs[item]
        loads[other] += costs[item]
        if back is not None:
            groups[top].append(back)
            loads[top] += costs[back]
            loads[other] -= costs[back]
