"""The published schedules have the papers' bubbles and memory at uniform costs."""

from __future__ import annotations

import numpy as np
import pytest

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.judge.simulate import makespan_ns, peak_bytes, simulate_ns
from dynapipe_ext.schedules.search.optimizer import optimize
from dynapipe_ext.schedules.tables.interleaved import interleaved_1f1b
from dynapipe_ext.schedules.tables.one_f_one_b import one_f_one_b
from dynapipe_ext.schedules.tables.published import published_schedule
from dynapipe_ext.schedules.tables.v_shape import v_half, zb_v
from dynapipe_ext.schedules.tables.zero_bubble import zb_h1, zb_h2

SIZES = [(2, 3), (2, 8), (3, 7), (4, 8), (5, 9), (8, 16), (8, 40)]


def uniform(schedule: PipelineSchedule, forward: int = 1, gradient: int = 1, weight: int = 1) -> MicroBatchCosts:
    """The same times everywhere, one byte a stage and micro-batch, so that bytes count what is in flight."""
    ones = np.ones((schedule.num_stages, schedule.num_micro_batches), np.int64)
    none = np.zeros_like(ones)
    return MicroBatchCosts(
        forward_ns=forward * ones,
        backward_ns=(gradient + weight) * ones,
        weight_ns=weight * ones,
        stored_bytes=ones,
        working_bytes=none,
        transfer_ns=none[1:],
        transfer_bytes=none[1:],
        static_bytes=none[:, 0],
    )


def idle_inside(schedule: PipelineSchedule, costs: MicroBatchCosts) -> list[int]:
    """Per rank, the time between its first start and its last end in which it does nothing."""
    return [
        spans[-1][1] - spans[0][0] - sum(end - start for start, end in spans) for spans in simulate_ns(schedule, costs)
    ]


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
@pytest.mark.parametrize("times", [(1, 1, 1), (5, 5, 5), (4, 5, 3)])
def test_zb_h1_has_the_paper_s_bubble_in_the_memory_of_1f1b(
    num_ranks: int, num_micro_batches: int, times: tuple[int, int, int]
) -> None:
    p, m = num_ranks, max(num_ranks, num_micro_batches)
    schedule = zb_h1(p, m)
    costs = uniform(schedule, *times)
    forward, gradient, weight = times
    work = m * (forward + gradient + weight)
    assert makespan_ns(schedule, costs) - work == (p - 1) * (forward + gradient - weight)
    assert peak_bytes(schedule, costs) == (p,) * p
    assert max(peak_bytes(one_f_one_b(p, m), costs)) == p


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
def test_zb_h2_never_idles_between_its_first_and_last_action_in_2p_minus_1(
    num_ranks: int, num_micro_batches: int
) -> None:
    schedule = zb_h2(num_ranks, num_micro_batches)
    costs = uniform(schedule)
    assert num_micro_batches >= 2 * num_ranks - 1
    assert idle_inside(schedule, costs) == [0] * num_ranks
    assert makespan_ns(schedule, costs) == 3 * num_micro_batches + num_ranks - 1
    assert peak_bytes(schedule, costs) == (2 * num_ranks - 1,) * num_ranks


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
def test_zb_v_never_idles_in_the_memory_of_1f1b(num_ranks: int, num_micro_batches: int) -> None:
    schedule = zb_v(num_ranks, num_micro_batches)
    costs = uniform(schedule)
    assert schedule.stage_ranks == (*range(num_ranks), *reversed(range(num_ranks)))
    assert idle_inside(schedule, costs) == [0] * num_ranks
    assert makespan_ns(schedule, costs) == 6 * num_micro_batches + num_ranks - 1
    assert max(peak_bytes(schedule, costs)) <= 2 * num_ranks  # stages of half a rank's size


@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_v_half_takes_half_the_memory_of_1f1b_and_half_its_bubble(num_ranks: int) -> None:
    """(p + 2) // 2 micro-batches, as its authors give it; the bubble of 1F1B in this unit is 6 (p - 1)."""
    for num_micro_batches in (1, 2, num_ranks, 4 * num_ranks):
        schedule = v_half(num_ranks, num_micro_batches)
        costs = uniform(schedule)
        assert max(peak_bytes(schedule, costs)) <= 2 * ((num_ranks + 2) // 2)
    assert makespan_ns(schedule, costs) - 6 * num_micro_batches <= 3 * num_ranks


def test_interleaving_of_one_stage_a_rank_is_1f1b() -> None:
    assert interleaved_1f1b(4, 7, 1).ranks == one_f_one_b(4, 7).ranks


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(4, 8), (4, 16), (8, 16)])
def test_at_uniform_costs_the_search_takes_no_longer_in_the_same_memory(
    name: str, num_ranks: int, num_micro_batches: int
) -> None:
    published = published_schedule(name, num_ranks, num_micro_batches)
    costs = uniform(published)
    found = optimize(
        costs,
        memory_limit_bytes=max(peak_bytes(published, costs)),
        split=published.is_split,
        effort=0,
        stage_ranks=published.stage_ranks,
    )
    assert makespan_ns(found, costs) <= makespan_ns(published, costs)
