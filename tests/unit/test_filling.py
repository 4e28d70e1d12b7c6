"""Weight gradients in the gaps: what moves, what cannot, and that order, memory and gradients are those of the plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.judge.filling import (
    filling_makespan_ns,
    latest_weights,
    simulate_filling,
    with_room_to_fill,
)
from dynapipe_ext.schedules.judge.simulate import peak_bytes, simulate_ns
from dynapipe_ext.schedules.search.optimizer import optimize
from dynapipe_ext.schedules.tables.one_f_one_b import one_f_one_b
from dynapipe_ext.schedules.tables.v_shape import zb_v
from dynapipe_ext.schedules.tables.zero_bubble import zb_h1, zb_h2
from tests.bench.noise import Noise, noisy_costs

W = Kind.BACKWARD_WEIGHT


def uneven_costs(seed: int, num_stages: int, num_micro_batches: int) -> MicroBatchCosts:
    draw = np.random.default_rng(seed)
    unit = draw.lognormal(0, 0.7, num_micro_batches)
    stage = draw.uniform(0.8, 1.2, (num_stages, 1))
    forward_ns = (1e6 * unit * stage).astype(np.int64)
    return MicroBatchCosts(
        forward_ns=forward_ns,
        backward_ns=forward_ns * 2,
        weight_ns=forward_ns * draw.integers(70, 110, forward_ns.shape) // 100,
        stored_bytes=forward_ns // 1000,
        working_bytes=forward_ns // 5000,
        transfer_ns=forward_ns[:-1] // 20,
        transfer_bytes=forward_ns[:-1] // 100,
        static_bytes=np.full(num_stages, 1000, np.int64),
    )


def searched(seed: int) -> tuple[PipelineSchedule, MicroBatchCosts]:
    costs = uneven_costs(seed, 4, 12)
    limit = 1000 + int((costs.stored_bytes + costs.working_bytes).max() * 4)
    return optimize(costs, memory_limit_bytes=limit, split=True, effort=200, seed=seed), costs


CASES = {
    **{f"searched {seed}": searched(seed) for seed in range(4)},
    "zb-h1": (zb_h1(4, 8), uneven_costs(9, 4, 8)),
    "zb-h2": (zb_h2(4, 9), uneven_costs(10, 4, 9)),
    "zb-v": (zb_v(3, 8), uneven_costs(11, 6, 8)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[PipelineSchedule, MicroBatchCosts]:
    return CASES[request.param]


def without_weights(rank: tuple[Action, ...] | list[Action]) -> list[Action]:
    return [action for action in rank if action.kind is not W]


def weights_of(rank: tuple[Action, ...] | list[Action]) -> list[Action]:
    return [action for action in rank if action.kind is W]


def test_late_weights_keep_every_other_order_and_every_rank_s_peak(case):
    schedule, costs = case
    late = latest_weights(schedule, costs)
    for before, after in zip(schedule.ranks, late.ranks, strict=True):
        assert without_weights(before) == without_weights(after)
        assert weights_of(before) == weights_of(after)
    assert all(a <= b for a, b in zip(peak_bytes(late, costs), peak_bytes(schedule, costs), strict=True))


def test_no_weight_gradient_could_stand_later(case):
    """Behind the action that it stands before, each would raise its rank's peak over that of the schedule."""
    schedule, costs = case
    late, room = latest_weights(schedule, costs), peak_bytes(schedule, costs)
    num_moved = 0
    for rank, actions in enumerate(late.ranks):
        for i, (weight, following) in enumerate(itertools.pairwise(actions)):
            if weight.kind is W and following.kind is not W:
                swapped = (*actions[:i], following, weight, *actions[i + 2 :])
                ranks = (*late.ranks[:rank], swapped, *late.ranks[rank + 1 :])
                assert peak_bytes(replace(late, ranks=ranks), costs)[rank] > room[rank]
                num_moved += 1
    assert num_moved or late.ranks == tuple((*without_weights(r), *weights_of(r)) for r in schedule.ranks)


@pytest.mark.parametrize("seed", range(5))
def test_filling_ranks_never_hold_more_than_the_schedule_and_keep_both_orders(case, seed):
    schedule, costs = case
    late = latest_weights(schedule, costs)
    noisy = noisy_costs(costs, Noise(slow_stage=seed % costs.num_stages), seed=seed, split=True)
    ran = simulate_filling(late, noisy)
    orders = tuple(tuple(action for action, _, _ in rank) for rank in ran)
    for order, planned in zip(orders, schedule.ranks, strict=True):
        assert without_weights(order) == without_weights(planned)
        assert weights_of(order) == weights_of(planned)
    peaks = peak_bytes(replace(late, ranks=orders), costs)
    assert all(peak <= room for peak, room in zip(peaks, peak_bytes(schedule, costs), strict=True))
    assert all(a[2] <= b[1] for rank in ran for a, b in itertools.pairwise(rank))


@pytest.mark.parametrize("seed", range(5))
def test_what_filling_ranks_did_is_an_order_that_simulates_to_the_same_times(case, seed):
    """An oracle for the times: the exact simulation of the order that was chosen, which knows nothing of choices."""
    schedule, costs = case
    noisy = noisy_costs(costs, Noise(slow_stage=0), seed=seed, split=True)
    ran = simulate_filling(latest_weights(schedule, costs), noisy)
    order = replace(schedule, ranks=tuple(tuple(action for action, _, _ in rank) for rank in ran))
    assert simulate_ns(order, noisy) == [[(start, end) for _, start, end in rank] for rank in ran]


def test_a_rank_never_waits_while_its_next_weight_gradient_could_run(case):
    schedule, costs = case
    noisy = noisy_costs(costs, Noise(slow_stage=1), seed=3, split=True)
    num_gaps = 0
    for rank in simulate_filling(latest_weights(schedule, costs), noisy):
        ended: dict[Action, int] = {}
        for i, (action, start, end) in enumerate(rank):
            free_at = rank[i - 1][2] if i else 0
            left = weights_of([later for later, _, _ in rank[i:]])
            if start > free_at and left:
                num_gaps += 1
                assert replace(left[0], kind=Kind.BACKWARD_INPUT) not in ended, (action, left[0])
            ended[action] = end
    assert num_gaps


def test_whole_backwards_run_as_they_stand():
    costs = uneven_costs(1, 4, 10)
    schedule = one_f_one_b(4, 10)
    assert with_room_to_fill(schedule, costs) is schedule
    spans = [[(start, end) for _, start, end in rank] for rank in simulate_filling(schedule, costs)]
    assert spans == simulate_ns(schedule, costs)


def test_the_order_to_fill_is_the_faster_of_the_late_one_and_the_plan_s_own(case):
    schedule, costs = case
    chosen = with_room_to_fill(schedule, costs)
    assert chosen in (schedule, latest_weights(schedule, costs))
    candidates = (schedule, latest_weights(schedule, costs))
    assert filling_makespan_ns(chosen, costs) == min(filling_makespan_ns(order, costs) for order in candidates)


def test_a_w_is_put_off_for_what_is_ready_and_brought_forward_into_a_wait():
    """Rank 0 plans 0W0 before 0I1: it keeps that place where the gradient is late, and gives way where it is early."""
    schedule = PipelineSchedule(
        "small",
        (
            tuple(map(Action.parse, ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"])),
            tuple(map(Action.parse, ["1F0", "1B0", "1F1", "1B1"])),
        ),
        (0, 1),
    )
    ones = np.ones((2, 2), np.int64)
    costs = MicroBatchCosts(
        forward_ns=10 * ones,
        backward_ns=20 * ones,
        weight_ns=10 * ones,
        stored_bytes=ones,
        working_bytes=0 * ones,
        transfer_ns=0 * ones[:1],
        transfer_bytes=0 * ones[:1],
        static_bytes=np.zeros(2, np.int64),
    )
    late = latest_weights(schedule, costs)
    assert [str(a) for a in late.ranks[0]] == ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]
    assert [str(a) for a, _, _ in simulate_filling(late, costs)[0]] == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]
    early = replace(costs, backward_ns=np.array([[50, 50], [20, 20]]), weight_ns=np.array([[10, 10], [10, 10]]))
    assert [str(a) for a, _, _ in simulate_filling(late, early)[0]] == ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]


def test_an_order_that_waits_for_itself_is_named():
    schedule = PipelineSchedule("stuck", ((Action.parse("0W0"), Action.parse("0F0"), Action.parse("0I0")),), (0,))
    costs = uneven_costs(0, 1, 1)
    with pytest.raises(PlanError, match="deadlocks: rank 0 at 0W0"):
        simulate_filling(schedule, costs)
