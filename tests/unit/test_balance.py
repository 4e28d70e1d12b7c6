"""Loads over replicas: heavy tails, hard caps and equal counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from dynapipe_ext.partitioning.balance import assign_replicas, karmarkar_karp


def heavy_tail(name: str, num_items: int, num_replicas: int, seed: int) -> list[int]:
    """Costs of which none exceeds the mean load: the tail is cut there, again and again as the mean falls."""
    rng = np.random.default_rng(seed)
    kind, parameter = name.split()
    draw = (
        rng.lognormal(0, float(parameter), num_items)
        if kind == "lognormal"
        else rng.pareto(float(parameter), num_items)
    )
    for _ in range(100):
        draw = np.minimum(draw, 0.999 * draw.sum() / num_replicas)
    costs: list[int] = (1e6 * draw / draw.mean()).astype(np.int64).tolist()
    assert max(costs) * num_replicas <= sum(costs)
    return costs


def equal_counts_floor(costs: Sequence[int], num_replicas: int) -> int:
    """No assignment of equal counts has a smaller largest load: the j largest items lie in some g <= j replicas, with
    at least the smallest items that make their counts up."""
    falling, count = sorted(costs, reverse=True), len(costs) // num_replicas
    sums = [0, *itertools.accumulate(falling)]
    return max(
        -(-sums[-1] // num_replicas),
        *(
            min(-(-(sums[j] + sums[-1] - sums[-1 - max(0, g * count - j)]) // g) for g in range(1, j + 1))
            for j in range(1, num_replicas + 1)
        ),
    )


def loads(costs: Sequence[int], shares: Sequence[Sequence[int]]) -> list[int]:
    return [sum(costs[i] for i in share) for share in shares]


TAILS = ["lognormal 1.0", "lognormal 1.5", "lognormal 2.0", "lognormal 2.5", "pareto 1.1", "pareto 1.5", "pareto 2.0"]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("num_items", "num_replicas"), [(256, 8), (1024, 64), (4096, 64)])
def test_heavy_tails_stay_within_one_percent_of_the_mean(tail: str, num_items: int, num_replicas: int) -> None:
    for seed in range(8):
        costs = heavy_tail(tail, num_items, num_replicas, seed)
        shares = assign_replicas(costs, num_replicas)
        assert sorted(i for share in shares for i in share) == list(range(num_items))
        assert 100 * max(loads(costs, shares)) * num_replicas <= 101 * sum(costs), (tail, seed)


@pytest.mark.parametrize("tail", ["lognormal 1.0", "lognormal 2.5", "pareto 1.5"])
def test_equal_counts_come_within_one_percent_of_the_floor_of_heavy_tails(tail: str) -> None:
    """The floor, not the mean: the replica with the largest item must take its share of the others as well."""
    for seed, (num_items, num_replicas) in itertools.product(range(2), [(256, 8), (1024, 64)]):
        costs = heavy_tail(tail, num_items, num_replicas, seed)
        shares = assign_replicas(costs, num_replicas, equal_counts=True)
        assert {len(share) for share in shares} == {num_items // num_replicas}
        assert 100 * max(loads(costs, shares)) <= 101 * equal_counts_floor(costs, num_replicas)


def test_items_that_cost_nothing_still_leave_no_replica_empty() -> None:
    assert all(assign_replicas([0, 0, 0], 2))
    assert assign_replicas([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]


def test_the_floor_knows_what_the_mean_does_not() -> None:
    assert equal_counts_floor([20, 1, 1, 1, 1, 2], 2) == 22


def test_six_items_a_replica_change_places_until_loads_are_even_within_half_a_percent() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        costs = rng.integers(50, 1000, 24).tolist()
        assert max(loads(costs, assign_replicas(costs, 4))) * 4 <= 1.005 * sum(costs)


def test_karmarkar_karp_of_equal_counts_has_equal_counts_and_beats_dealing() -> None:
    rng = np.random.default_rng(0)
    costs = np.exp(rng.normal(5, 1, 96)).astype(np.int64).tolist()
    order = sorted(range(96), key=lambda i: -costs[i])
    groups = karmarkar_karp(costs, 8, [order[at : at + 8] for at in range(0, 96, 8)])
    assert {len(group) for group in groups} == {12}
    assert sorted(i for group in groups for i in group) == list(range(96))
    assert max(loads(costs, groups)) < max(loads(costs, [list(range(k, 96, 8)) for k in range(8)]))
