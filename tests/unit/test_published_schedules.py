"""The published schedules: their tables run, and they keep what their papers promise."""

from __future__ import annotations

import numpy as np
import pytest

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns, compute_peak_bytes, simulate_ns, validate
from dynapipe_ext.schedules.published.by_name import PUBLISHED, make_published_schedule
from dynapipe_ext.schedules.published.full_backward import interleaved_1f1b, one_f_one_b
from dynapipe_ext.schedules.published.v_shape import v_half, zb_v
from dynapipe_ext.schedules.published.zero_bubble import zb_h1, zb_h2
from dynapipe_ext.schedules.search.optimizer import optimize

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
    assert compute_makespan_ns(schedule, costs) - work == (p - 1) * (forward + gradient - weight)
    assert compute_peak_bytes(schedule, costs) == (p,) * p
    assert max(compute_peak_bytes(one_f_one_b(p, m), costs)) == p


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
def test_zb_h2_never_idles_between_its_first_and_last_action_in_2p_minus_1(
    num_ranks: int, num_micro_batches: int
) -> None:
    schedule = zb_h2(num_ranks, num_micro_batches)
    costs = uniform(schedule)
    assert num_micro_batches >= 2 * num_ranks - 1
    assert idle_inside(schedule, costs) == [0] * num_ranks
    assert compute_makespan_ns(schedule, costs) == 3 * num_micro_batches + num_ranks - 1
    assert compute_peak_bytes(schedule, costs) == (2 * num_ranks - 1,) * num_ranks


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
def test_zb_v_never_idles_in_the_memory_of_1f1b(num_ranks: int, num_micro_batches: int) -> None:
    schedule = zb_v(num_ranks, num_micro_batches)
    costs = uniform(schedule)
    assert schedule.stage_ranks == (*range(num_ranks), *reversed(range(num_ranks)))
    assert idle_inside(schedule, costs) == [0] * num_ranks
    assert compute_makespan_ns(schedule, costs) == 6 * num_micro_batches + num_ranks - 1
    assert max(compute_peak_bytes(schedule, costs)) <= 2 * num_ranks  # stages of half a rank's size


@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_v_half_takes_half_the_memory_of_1f1b_and_half_its_bubble(num_ranks: int) -> None:
    """(p + 2) // 2 micro-batches, as its authors give it; the bubble of 1F1B in this unit is 6 (p - 1)."""
    for num_micro_batches in (1, 2, num_ranks, 4 * num_ranks):
        schedule = v_half(num_ranks, num_micro_batches)
        costs = uniform(schedule)
        assert max(compute_peak_bytes(schedule, costs)) <= 2 * ((num_ranks + 2) // 2)
    assert compute_makespan_ns(schedule, costs) - 6 * num_micro_batches <= 3 * num_ranks


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(4, 8), (4, 16), (8, 16)])
def test_at_uniform_costs_the_search_takes_no_longer_in_the_same_memory(
    name: str, num_ranks: int, num_micro_batches: int
) -> None:
    published = make_published_schedule(name, num_ranks, num_micro_batches)
    costs = uniform(published)
    found = optimize(
        costs,
        memory_limit_bytes=max(compute_peak_bytes(published, costs)),
        split=published.is_split,
        effort=0,
        stage_ranks=published.stage_ranks,
    )
    assert compute_makespan_ns(found, costs) <= compute_makespan_ns(published, costs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_schedule_runs_for_all_ranks_and_micro_batches(name: str) -> None:
    for num_ranks in range(1, 9):
        for num_micro_batches in (*range(1, 20), 33):
            for stages in (1, 2, 3, 4) if name == "interleaved-1f1b" else (None,):
                schedule = make_published_schedule(name, num_ranks, num_micro_batches, stages_per_rank=stages)
                validate(schedule, num_micro_batches)
                assert schedule.name == name
                assert len(schedule.ranks) == num_ranks


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
def test_interleaving_has_the_papers_bubble_for_any_number_of_micro_batches(stages_per_rank: int) -> None:
    """Narayanan et al. 2021, sec. 2.2.2: that of 1F1B over v, so (p - 1)(F + B) of one stage."""
    for num_ranks in (2, 3, 4, 8):
        for num_micro_batches in range(num_ranks, 5 * num_ranks):
            schedule = interleaved_1f1b(num_ranks, num_micro_batches, stages_per_rank)
            bubble = compute_makespan_ns(schedule, uniform(schedule)) - 3 * num_micro_batches * stages_per_rank
            assert bubble == 3 * (num_ranks - 1), (num_ranks, num_micro_batches)


def test_v_half_has_the_bubble_that_its_authors_reordering_gives() -> None:
    """In passes of half a rank: 3p - 7 for even p, 3p - 4 for odd, at any number of micro-batches from p on."""
    for num_ranks in range(3, 13):
        for num_micro_batches in (num_ranks, 2 * num_ranks + 1, 4 * num_ranks):
            schedule = make_published_schedule("v-half", num_ranks, num_micro_batches)
            bubble = compute_makespan_ns(schedule, uniform(schedule)) - 6 * num_micro_batches
            assert bubble == 3 * num_ranks - (4 if num_ranks % 2 else 7)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half"])
def test_few_micro_batches_are_no_slower_than_in_1f1b(name: str) -> None:
    for num_ranks in range(2, 9):
        for num_micro_batches in range(1, 2 * num_ranks):
            schedule = make_published_schedule(name, num_ranks, num_micro_batches)
            plain = one_f_one_b(num_ranks, num_micro_batches)
            stages_a_rank = schedule.num_stages // num_ranks
            ours = compute_makespan_ns(schedule, uniform(schedule))
            assert ours <= stages_a_rank * compute_makespan_ns(plain, uniform(plain)), (num_ranks, num_micro_batches)


def test_zb_h2_with_fewer_micro_batches_than_it_needs_is_no_slower_than_zb_h1() -> None:
    for num_ranks in range(1, 9):
        for num_micro_batches in range(1, 2 * num_ranks):
            h1, h2 = (make_published_schedule(name, num_ranks, num_micro_batches) for name in ("zb-h1", "zb-h2"))
            assert compute_makespan_ns(h2, uniform(h2)) <= compute_makespan_ns(h1, uniform(h1))


def test_one_rank_never_waits() -> None:
    for name in PUBLISHED:
        schedule = make_published_schedule(name, 1, 5)
        (spans,) = simulate_ns(schedule, uniform(schedule))
        assert spans[-1][1] == sum(end - start for start, end in spans)


def test_only_zero_bubble_and_v_schedules_split_the_backward() -> None:
    for name in PUBLISHED:
        kinds = {action.kind for rank in make_published_schedule(name, 4, 8).ranks for action in rank}
        split = {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
        assert kinds == (split if name.startswith(("zb", "v")) else {Kind.FORWARD, Kind.BACKWARD})


def test_what_cannot_be_built_is_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match=r"'zbh1' is not known: choose one of gpipe, 1f1b, .*v-half"):
        make_published_schedule("zbh1", 4, 8)
    with pytest.raises(ConfigError, match="zb-v has 2 stages per rank, not 3"):
        make_published_schedule("zb-v", 4, 8, stages_per_rank=3)
    with pytest.raises(PlanError, match="with 0 ranks"):
        make_published_schedule("1f1b", 0, 8)
    with pytest.raises(PlanError, match="0 stages-per-rank"):
        make_published_schedule("interleaved-1f1b", 4, 8, stages_per_rank=0)
    with pytest.raises(PlanError, match="at least 1"):
        PUBLISHED["zb-h1"](4, 0)
