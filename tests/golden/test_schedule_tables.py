"""Schedules as tables: what each rank does, column by column, where every forward takes 1 and every backward 2."""

from __future__ import annotations

from textwrap import dedent

import numpy as np

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import bound_replica
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns, compute_peak_bytes, simulate
from dynapipe_ext.schedules.notation import draw, format_lines, parse_lines
from dynapipe_ext.schedules.published.cyclic import clustered_cyclic, cyclic
from dynapipe_ext.schedules.published.full_backward import one_f_one_b
from dynapipe_ext.schedules.search.optimizer import optimize


def proportional(num_stages: int, sizes: list[int]) -> MicroBatchCosts:
    """F = size, B = 2 x size, W = size, stored bytes = size; the same on all stages, transfers free."""
    row = np.tile(np.array(sizes, np.int64), (num_stages, 1))
    none = np.zeros_like(row)
    return MicroBatchCosts(
        forward_ns=row,
        backward_ns=2 * row,
        weight_ns=row,
        stored_bytes=row,
        working_bytes=none,
        transfer_ns=none[1:],
        transfer_bytes=none[1:],
        static_bytes=none[:, 0],
    )


def picture(schedule: PipelineSchedule, costs: MicroBatchCosts, columns: int = 3) -> str:
    """One unit of time is three columns."""
    return "\n" + draw(schedule, simulate(schedule, costs), width=columns * compute_makespan_ns(schedule, costs))


def test_1f1b_in_time_looks_like_the_textbook() -> None:
    assert picture(one_f_one_b(3, 4), proportional(3, [1] * 4)) == dedent("""
        0 |0--1--2--............0'====3--1'====...2'====...3'====|
        1 |...0--1--......0'====2--1'====3--2'====...3'====......|
        2 |......0--0'====1--1'====2--2'====3--3'====............|
        """)


def test_a_split_backward_on_virtual_stages_is_drawn_with_its_stage() -> None:
    schedule = parse_lines("0: 0F0 2F0 2I0 2W0 0B0\n1: 1F0 1B0")
    assert picture(schedule, proportional(3, [1]), columns=4) == dedent("""
        0 |0.0-....2.0-2.0i2.0w....0.0'====|
        1 |....1.0-........1.0'====........|
        """)


def searched(costs: MicroBatchCosts, limit_bytes: int, *, effort: int = 0) -> PipelineSchedule:
    return optimize(costs, memory_limit_bytes=limit_bytes, split=False, effort=effort, seed=7)


def entered(schedule: PipelineSchedule) -> list[int]:
    """Micro-batches in the order of their first forwards."""
    return [action.micro_batch for action in schedule.ranks[0] if action.kind is Kind.FORWARD]


def test_at_uniform_costs_and_the_memory_of_1f1b_the_search_is_as_good_as_1f1b_and_optimal() -> None:
    for stages, num in ((1, 3), (2, 5), (4, 8), (8, 16)):
        costs, plain = proportional(stages, [7] * num), one_f_one_b(stages, num)
        limit = max(compute_peak_bytes(plain, costs))
        found = searched(costs, limit)
        assert compute_makespan_ns(found, costs) == compute_makespan_ns(plain, costs) == (num + stages - 1) * 21
        assert max(compute_peak_bytes(found, costs)) <= limit == 7 * min(stages, num)
        assert bound_replica(found, costs, split=False).best_ns == compute_makespan_ns(found, costs)


def test_cyclic_runs_a_backward_and_a_forward_of_what_was_there_when_the_cycle_began() -> None:
    """With room for all of them stage s holds 2 (S - s) - 1 micro-batches; at even costs that takes 1F1B's time."""
    costs = proportional(3, [1] * 6)
    found = cyclic(costs, memory_limit_bytes=6)
    assert picture(found, costs) == dedent("""
        0 |0--1--2--3--4--......0'====5--1'====...2'====...3'====...4'====...5'====|
        1 |...0--1--2--...0'====3--1'====4--2'====5--3'====...4'====...5'====......|
        2 |......0--0'====1--1'====2--2'====3--3'====4--4'====5--5'====............|
        """)
    assert compute_peak_bytes(found, costs) == (5, 3, 1)


def test_uneven_micro_batches_enter_early_where_memory_is_slack() -> None:
    """1F1B idles behind the long micro-batch 1; with 2 more units of memory two short ones fill part of the wait."""
    costs = proportional(3, [1, 4, 1, 1, 1, 1])
    plain = one_f_one_b(3, 6)
    found = cyclic(costs, memory_limit_bytes=8)
    assert picture(plain, costs, columns=1) == dedent("""
        0 |01---2.....0'3...............1'======42'53'.4'.5'|
        1 |.0...1---0'2.........1'======32'......43'54'.5'..|
        2 |..00'....1---1'======22'......33'......44'55'....|
        """)
    assert picture(found, costs, columns=1) == dedent("""
        0 |01---234....0'5..............1'======2'3'4'5'|
        1 |.0...1---20'3........1'======42'53'4'5'......|
        2 |..00'....1---1'======22'33'...44'55'.........|
        """)
    assert (compute_makespan_ns(plain, costs), compute_makespan_ns(found, costs)) == (49, 45)
    assert (compute_peak_bytes(plain, costs), compute_peak_bytes(found, costs)) == ((6, 5, 4), (8, 6, 4))


def test_orders_of_clusters_and_the_search_put_the_long_micro_batch_where_it_waits_least() -> None:
    costs = proportional(3, [1, 4, 1, 1, 1, 1])
    clustered, best = clustered_cyclic(costs, memory_limit_bytes=8), searched(costs, 8)
    assert entered(clustered) == [0, 2, 5, 1, 3, 4]  # of the clusters 0 2, 3 4 and 5 1: the second goes last
    assert (compute_makespan_ns(clustered, costs), compute_makespan_ns(best, costs)) == (43, 43)
    assert max(compute_peak_bytes(best, costs)) <= 8


def test_where_memory_leaves_no_slack_the_search_is_as_good_as_1f1b_and_better_with_effort() -> None:
    costs = proportional(3, [1, 4, 1, 1, 1, 1])
    assert compute_makespan_ns(searched(costs, 6), costs) == compute_makespan_ns(one_f_one_b(3, 6), costs) == 49
    assert compute_makespan_ns(searched(costs, 6, effort=60), costs) < 49


def test_there_is_a_schedule_where_one_micro_batch_at_a_time_fits() -> None:
    costs = proportional(2, [2, 3, 2])
    for found in (cyclic(costs, memory_limit_bytes=3), searched(costs, 3)):
        assert format_lines(found) == dedent("""\
            0: 0F0 0B0 0F1 0B1 0F2 0B2
            1: 1F0 1B0 1F1 1B1 1F2 1B2
            """)


def test_without_search_steps_the_best_of_the_starting_orders_is_taken_here_cheap_at_both_ends() -> None:
    costs = proportional(4, [9, 2, 4, 1, 7, 3, 3, 8, 1, 5])
    found = searched(costs, 40)
    assert costs.forward_ns[0, entered(found)].tolist() == [1, 2, 3, 5, 8, 9, 7, 4, 3, 1]
    assert compute_makespan_ns(found, costs) < compute_makespan_ns(
        clustered_cyclic(costs, memory_limit_bytes=40), costs
    )


def test_a_searched_order_is_the_same_on_every_machine() -> None:
    costs = proportional(4, [9, 2, 4, 1, 7, 3, 3, 8, 1, 5])
    start, found = searched(costs, 24), searched(costs, 24, effort=60)
    assert [compute_makespan_ns(s, costs) for s in (one_f_one_b(4, 10), start, found)] == [284, 197, 191]
    assert format_lines(found) == dedent("""\
        0: 0F3 0F1 0F9 0F7 0B3 0F0 0B1 0B9 0F4 0B7 0F6 0F8 0F5 0B0 0F2 0B4 0B6 0B8 0B5 0B2
        1: 1F3 1F1 1F9 1B3 1F7 1B1 1F0 1B9 1F4 1B7 1B0 1F6 1B4 1F8 1F5 1B6 1F2 1B8 1B5 1B2
        2: 2F3 2F1 2B3 2F9 2B1 2F7 2B9 2F0 2B7 2F4 2B0 2B4 2F6 2B6 2F8 2F5 2B8 2F2 2B5 2B2
        3: 3F3 3B3 3F1 3B1 3F9 3B9 3F7 3B7 3F0 3B0 3F4 3B4 3F6 3B6 3F8 3B8 3F5 3B5 3F2 3B2
        """)
    assert max(compute_peak_bytes(found, costs)) == 24
