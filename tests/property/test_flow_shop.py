"""Forwards only: orders against all orders, makespans against the simulator, bounds below everything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.evaluation.bounds import bound_replica
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns, compute_peak_bytes, simulate_ns, validate
from dynapipe_ext.schedules.search.flow_shop import find_forward_order, forward_schedule
from dynapipe_ext.tools.check.recomputed_bounds import replica_bounds_ns

PLACEMENTS = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1)]


def forward_costs(seed: int, num_stages: int, count: int) -> MicroBatchCosts:
    """Uneven stages, micro-batches and transfers."""
    rng = np.random.default_rng(seed)

    def table(high: int, rows: int = num_stages) -> np.ndarray:
        return rng.integers(0, high, (rows, count))

    return MicroBatchCosts(
        forward_ns=1 + table(60) * rng.integers(1, 4, (num_stages, 1)),
        backward_ns=table(90),
        weight_ns=table(30),
        stored_bytes=table(50),
        working_bytes=table(9),
        transfer_ns=table(int(rng.integers(1, 50)), num_stages - 1),
        transfer_bytes=table(5, num_stages - 1),
        static_bytes=rng.integers(0, 9, num_stages),
    ).drop_backwards()


def ends_at(costs: MicroBatchCosts, placement: tuple[int, ...], order: Sequence[int]) -> int:
    """The makespan of an injection order, by the simulator."""
    ordered = costs.take(order)
    return compute_makespan_ns(forward_schedule(ordered, placement), ordered)


def best_of_all_orders(costs: MicroBatchCosts) -> int:
    """The least makespan over all permutations on stages with a rank each, by the recurrence of flow shops."""
    orders = np.array(list(permutations(range(costs.num_micro_batches))))
    free = np.zeros((costs.num_stages, len(orders)), np.int64)
    for m in orders.T:
        arrived = np.zeros(len(orders), np.int64)
        for stage in range(costs.num_stages):
            free[stage] = np.maximum(free[stage], arrived) + costs.forward_ns[stage, m]
            arrived = free[stage] + (costs.transfer_ns[stage, m] if stage + 1 < costs.num_stages else 0)
    return int(free[-1].min())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), num_stages=st.integers(2, 4), count=st.integers(1, 7))
def test_no_order_ends_earlier_on_two_stages_and_none_by_half_on_more(seed: int, num_stages: int, count: int) -> None:
    costs, placement = forward_costs(seed, num_stages, count), tuple(range(num_stages))
    found, best = ends_at(costs, placement, find_forward_order(costs, placement)[0]), best_of_all_orders(costs)
    assert best <= found <= (1.5 if num_stages > 2 else 1) * best


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), placement=st.sampled_from(PLACEMENTS), count=st.integers(0, 14))
def test_an_order_is_a_permutation_that_is_valid_holds_one_forward_at_a_time_and_keeps_above_its_bounds(
    seed: int, placement: tuple[int, ...], count: int
) -> None:
    costs = forward_costs(seed, len(placement), count)
    order, schedule = find_forward_order(costs, placement)
    assert sorted(order) == list(range(count))
    assert compute_makespan_ns(schedule, costs.take(order)) <= ends_at(costs, placement, range(count))
    costs = costs.take(order)
    validate(schedule, count)
    for stage, rank in enumerate(placement):
        assert [a.micro_batch for a in schedule.ranks[rank] if a.stage == stage] == list(range(count))
    for rank, peak in enumerate(compute_peak_bytes(schedule, costs)):
        mine = [stage for stage, owner in enumerate(placement) if owner == rank]
        assert peak == costs.static_bytes[mine].sum() + max(costs.working_bytes[mine].max(axis=0), default=0)
    bounds = bound_replica(schedule, costs, split=False, memory_limit_bytes=1000)
    assert bounds.best_ns <= compute_makespan_ns(schedule, costs)
    again = replica_bounds_ns(costs, placement, split=False, limit_bytes=1000, forward_only=True)
    assert (bounds.stage_ns, bounds.chain_ns, bounds.heads_tails_ns, bounds.byte_time_ns) == (
        again["stage"], again["chain"], again["heads_tails"], None,
    )  # fmt: skip


def test_the_bound_holds_for_stages_in_any_order_and_counts_no_way_back() -> None:
    """Three stages of one micro-batch each in turn: the chain is F and transfers downwards, once."""
    costs = forward_costs(5, 3, 1)
    schedule = forward_schedule(costs, (0, 1, 2))
    chain = int(costs.forward_ns.sum() + costs.transfer_ns.sum())
    assert bound_replica(schedule, costs, split=False).best_ns == chain == simulate_ns(schedule, costs)[2][0][1]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), num_stages=st.integers(2, 5), count=st.integers(7, 12))
def test_micro_batches_alike_take_what_the_bound_says(seed: int, num_stages: int, count: int) -> None:
    costs = forward_costs(seed, num_stages, 1).take([0] * count)
    _, schedule = find_forward_order(costs, range(num_stages))
    assert compute_makespan_ns(schedule, costs) == bound_replica(schedule, costs, split=False).best_ns


@pytest.mark.parametrize("num_stages", [3, 5])
def test_stages_alike_take_what_any_order_does_and_uneven_ones_come_near_the_bound(num_stages: int) -> None:
    costs, placement = forward_costs(1, num_stages, 30), tuple(range(num_stages))
    costs.forward_ns[:] = costs.forward_ns[0]
    costs.transfer_ns[:] = 0
    order, _ = find_forward_order(costs, placement)
    sizes = costs.forward_ns[0]
    assert ends_at(costs, placement, order) == sizes.sum() + (num_stages - 1) * sizes.max()
    ends = bounds = given_ends = 0
    for seed in range(10):
        costs = forward_costs(seed, num_stages, 30)
        order, schedule = find_forward_order(costs, placement)
        ends += compute_makespan_ns(schedule, costs.take(order))
        bounds += bound_replica(schedule, costs.take(order), split=False).best_ns
        given_ends += ends_at(costs, placement, range(30))
    assert bounds <= ends <= 1.04 * bounds
    assert ends < 0.97 * given_ends
