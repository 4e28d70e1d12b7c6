"""What the validator, the simulator, the memory rule and the bounds say about small cases worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.schedules.actions import PipelineSchedule, make_linear_schedule
from dynapipe_ext.schedules.evaluation.bounds import bound_replica
from dynapipe_ext.schedules.evaluation.simulate import (
    SharedCores,
    StageMemory,
    compute_makespan_ns,
    compute_peak_bytes,
    simulate,
    simulate_ns,
    simulate_shared_ns,
    sum_static_bytes,
    validate,
)
from dynapipe_ext.schedules.notation import parse_lines
from dynapipe_ext.schedules.published.cyclic import clustered_cyclic, cyclic
from dynapipe_ext.schedules.published.full_backward import gpipe, one_f_one_b
from dynapipe_ext.schedules.search.optimizer import optimize
from dynapipe_ext.timeline import Trace


def shared_traces(replicas: list[tuple[PipelineSchedule, MicroBatchCosts]], cores: SharedCores) -> list[Trace]:
    found = simulate_shared_ns(replicas, cores)
    return [simulate(*replica, spans) for replica, spans in zip(replicas, found, strict=True)]


def costs_of(
    forward: list[list[int]],
    backward: list[list[int]],
    *,
    transfer: int = 0,
    stored: int = 0,
    working: int = 0,
    static: int = 0,
) -> MicroBatchCosts:
    """W is half of the backward; the other tables are constant."""
    shape = np.array(forward, np.int64).shape
    return MicroBatchCosts(
        forward_ns=np.array(forward, np.int64),
        backward_ns=np.array(backward, np.int64),
        weight_ns=np.array(backward, np.int64) // 2,
        stored_bytes=np.full(shape, stored, np.int64),
        working_bytes=np.full(shape, working, np.int64),
        transfer_ns=np.full((shape[0] - 1, shape[1]), transfer, np.int64),
        transfer_bytes=np.zeros((shape[0] - 1, shape[1]), np.int64),
        static_bytes=np.full(shape[0], static, np.int64),
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0: 0F0\n1: 1F0 1B0", "micro-batch 0 on stage 0 runs F but must run FB or FIW"),
        ("0: 0F0 0B0\n1: 1F0 1B0 1B0", "micro-batch 0 on stage 1 runs FBB"),
        ("0: 0B0 0F0\n1: 1F0 1B0", "micro-batch 0 on stage 0 runs BF"),
        ("0: 0F0 0W0 0I0\n1: 1F0 1B0", "micro-batch 0 on stage 0 runs FWI"),
        ("0: 0F0 0I0\n1: 1F0 1B0", "micro-batch 0 on stage 0 runs FI but"),
        ("0: 0F0 0B0\n1: 1F0 1B0 1F1 1B1", "action 1F1 names a micro-batch outside 0..0"),
    ],
)
def test_the_validator_names_an_action_that_is_missing_doubled_or_misplaced(lines: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(parse_lines(lines), 1)


CYCLE = parse_lines("0: 0F1 0F0 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n2: 2F1 2B1 2F0 2B0")
CYCLE_COSTS = costs_of([[1, 1]] * 3, [[2, 2]] * 3)
BLOCKED = "rank 0 at 0B0, rank 1 at 1B0, rank 2 at 2F1"
GPIPE = gpipe(2, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: validate(one_f_one_b(2, 2), 3), "micro-batch 2 on stage 0 runs nothing"),
        (lambda: validate(replace(GPIPE, ranks=GPIPE.ranks[::-1]), 1), "1F0 is on rank 0 but stage 1 is placed on ran"),
        (
            lambda: validate(replace(GPIPE, ranks=GPIPE.ranks[1:], stage_ranks=(0,)), 1),
            r"1F0 names a stage outside 0\.\.0",
        ),
        (lambda: validate(replace(GPIPE, stage_ranks=(0, 0)), 1), "must place at least one stage on each of the 2 ran"),
        (lambda: validate(parse_lines("0: 0F999999999 0B999999999"), 10**9), "micro-batch 0 on stage 0 runs nothing"),
        (lambda: validate(CYCLE, 2), f"deadlocks: {BLOCKED}"),
        (lambda: simulate(CYCLE, CYCLE_COSTS), f"deadlocks: {BLOCKED}"),
        (lambda: shared_traces([(CYCLE, CYCLE_COSTS)], SharedCores(1)), f"deadlocks: {BLOCKED}"),
        (lambda: simulate_ns(parse_lines("0: 0F0 0W0 0I0"), costs_of([[1]], [[2]])), "rank 0 at 0W0"),
        (lambda: simulate_ns(GPIPE, costs_of([[1]] * 3, [[1]] * 3)), "has 2 stages but the costs have 3"),
        (
            lambda: compute_peak_bytes(gpipe(2, 2), costs_of([[1]] * 2, [[1]] * 2)),
            "0F1 is outside.* 2 stages and 1 micro-bat",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_action_and_reason(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call()


def test_transfers_delay_both_directions_between_ranks_and_nothing_within_one() -> None:
    costs = costs_of([[10], [10]], [[20], [20]], transfer=3)
    assert simulate_ns(gpipe(2, 1), costs) == [[(0, 10), (46, 66)], [(13, 23), (23, 43)]]
    assert compute_makespan_ns(parse_lines("0: 0F0 1F0 1B0 0B0"), costs) == 60


def test_transfers_neither_queue_nor_block_the_sender() -> None:
    """Both activations are under way at once, and rank 0 computes meanwhile."""
    costs = costs_of([[1, 1], [1, 1]], [[1, 1], [1, 1]], transfer=100)
    assert simulate_ns(gpipe(2, 2), costs)[0][:2] == [(0, 1), (1, 2)]
    assert simulate_ns(gpipe(2, 2), costs)[1] == [(101, 102), (102, 103), (103, 104), (104, 105)]


def test_a_split_backward_sends_its_gradient_before_its_weight_gradient_runs() -> None:
    costs = costs_of([[10], [10]], [[20], [20]])
    assert compute_makespan_ns(parse_lines("0: 0F0 0B0\n1: 1F0 1I0 1W0"), costs) == 50
    assert compute_makespan_ns(parse_lines("0: 0F0 0B0\n1: 1F0 1B0"), costs) == 60


def test_the_trace_has_one_track_a_rank_in_order_of_time_with_bytes_and_cpu_seconds() -> None:
    trace = simulate(gpipe(2, 1), costs_of([[10], [10]], [[20], [20]], stored=5, static=100))
    assert [(s.rank, s.label, s.start_s, s.end_s, s.cpu_s, s.num_bytes, s.shape) for s in trace.spans] == [
        (0, "0F0", 0.0, 1e-8, 1e-8, 105, ()),
        (1, "1F0", 1e-8, 2e-8, 1e-8, 105, ()),
        (1, "1B0", 2e-8, 4e-8, 2e-8, 100, ()),
        (0, "0B0", 4e-8, 6e-8, 2e-8, 100, ()),
    ]
    assert trace.name == "gpipe"


def test_two_busy_ranks_on_one_core_run_at_half_speed_and_keep_their_cpu_seconds() -> None:
    costs = costs_of([[12, 12], [12, 12]], [[12, 12], [12, 12]])
    (trace,) = shared_traces([(gpipe(2, 2), costs)], SharedCores(1))
    ends = {span.label: round(span.end_s * 1e9) for span in trace.spans}
    assert ends == {"0F0": 12, "0F1": 36, "1F0": 36, "1F1": 48, "1B0": 60, "0B0": 84, "1B1": 84, "0B1": 96}
    assert {round(span.cpu_s * 1e9) for span in trace.spans} == {12}


def test_three_busy_ranks_on_two_cores_run_at_two_thirds() -> None:
    lines = "0: 0F0 0F1 0F2 0B0 0B1 0B2\n1: 1F0 1F1 1F2 1B0 1B1 1B2\n2: 2F0 2F1 2F2 2B0 2B1 2B2"
    (trace,) = shared_traces([(parse_lines(lines), costs_of([[6] * 3] * 3, [[6] * 3] * 3))], SharedCores(2))
    ends = {span.label: round(span.end_s * 1e9) for span in trace.spans}
    assert [ends[label] for label in ("0F0", "0F1", "1F0", "0F2", "1F1", "2F0")] == [6, 12, 12, 21, 21, 21]


def test_peaks_count_working_bytes_in_forward_and_backward_unless_forwards_alone_are_known() -> None:
    costs = costs_of([[1, 1]], [[2, 2]], stored=10, working=4, static=100)
    schedule = parse_lines("0: 0F0 0F1 0I0 0B1 0W0")
    assert compute_peak_bytes(schedule, costs) == (124,)
    assert [span.num_bytes for span in simulate(schedule, costs).spans] == [110, 120, 120, 110, 100]
    one = parse_lines("0: 0F0 0B0 0F1 0B1")
    assert compute_peak_bytes(one, costs) == compute_peak_bytes(one, replace(costs, working_in="F")) == (114,)
    late = parse_lines("0: 0F0 0F1 0B0 0B1")
    grown = replace(costs, working_bytes=np.array([[9, 0]]))
    assert (compute_peak_bytes(late, grown), compute_peak_bytes(late, replace(grown, working_in="F"))) == (
        (129,),
        (120,),
    )


def test_a_split_backward_holds_its_bytes_until_the_weight_gradient() -> None:
    costs = costs_of([[1, 1]], [[2, 2]], stored=10)
    assert compute_peak_bytes(parse_lines("0: 0F0 0I0 0F1 0W0 0B1"), costs) == (20,)
    assert compute_peak_bytes(parse_lines("0: 0F0 0I0 0W0 0F1 0B1"), costs) == (10,)


def test_a_micro_batch_enters_where_the_backwards_of_all_that_are_inside_fit_as_far_as_they_need_working_bytes() -> (
    None
):
    """Micro-batch 0 needs 30 while it runs, forward and backward, or forward alone; 1 and 2 need nothing."""
    costs = costs_of([[1, 1, 1]], [[2, 2, 2]], stored=10, static=100)
    costs = replace(costs, working_bytes=np.array([[30, 0, 0]]))
    for working_in, inside in (("FBI", [True, True, False]), ("F", [True, True, True])):
        memory = StageMemory(replace(costs, working_in=working_in), 0, 150)
        assert [memory.admit(m) for m in range(3)] == inside
        memory.release(0)
        assert memory.admit(2) or working_in == "F"


def test_static_bytes_of_all_stages_of_a_rank_add_up() -> None:
    schedule = parse_lines("0: 0F0 2F0 2B0 0B0\n1: 1F0 1B0")
    costs = costs_of([[1]] * 3, [[1]] * 3, static=7, stored=1)
    assert sum_static_bytes(schedule, costs) == (14, 7)
    assert compute_peak_bytes(schedule, costs) == (16, 8)


def test_an_empty_schedule_takes_no_time_and_static_bytes_only() -> None:
    costs = costs_of([[], []], [[], []], static=3)
    schedule = make_linear_schedule("none", [[], []])
    validate(schedule, 0)
    assert (compute_makespan_ns(schedule, costs), compute_peak_bytes(schedule, costs)) == (0, (3, 3))
    assert simulate(schedule, costs).makespan_s == bound_replica(schedule, costs, split=True).best_ns == 0
    for made in (
        optimize(costs, memory_limit_bytes=3, split=False, effort=5),
        clustered_cyclic(costs, memory_limit_bytes=3),
    ):
        validate(made, 0)


def test_the_bound_is_met_by_a_single_stage_a_single_micro_batch_and_uniform_1f1b() -> None:
    for forward, backward in (([[3, 5, 8]], [[6, 10, 16]]), ([[3], [5], [8]], [[6], [10], [16]])):
        costs = costs_of(forward, backward, transfer=2)
        schedule = one_f_one_b(len(forward), len(forward[0]))
        assert bound_replica(schedule, costs, split=False).best_ns == compute_makespan_ns(schedule, costs)
    costs = costs_of([[4] * 6] * 4, [[8] * 6] * 4)
    assert (
        bound_replica(range(4), costs, split=False).best_ns == compute_makespan_ns(one_f_one_b(4, 6), costs) == 9 * 12
    )


def test_the_bound_counts_the_way_down_and_back_after_the_forwards_of_an_early_stage() -> None:
    """Both forwards of stage 0 take 20; after the second come two transfers of 100, and F, B and B of 1 each."""
    costs = costs_of([[10, 10], [1, 1]], [[1, 1], [1, 1]], transfer=100)
    assert bound_replica(range(2), costs, split=False).best_ns == compute_makespan_ns(one_f_one_b(2, 2), costs) == 223


def test_a_split_backward_needs_no_tail_after_its_weight_gradients() -> None:
    costs = costs_of([[4] * 6] * 4, [[8] * 6] * 4)
    assert bound_replica(range(4), costs, split=True).best_ns == 6 * 12 + 3 * 4


def test_weight_gradients_run_beside_the_gradients_way_up_and_the_bound_knows_both() -> None:
    """F0 10, F1 10, I1 10, then W1 beside I0 and W0: 50, whatever bound is asked."""
    costs = costs_of([[10], [10]], [[20], [20]], stored=5)
    schedule = parse_lines("0: 0F0 0I0 0W0\n1: 1F0 1I0 1W0")
    assert compute_makespan_ns(schedule, costs) == bound_replica(schedule, costs, split=True).best_ns == 50
    assert bound_replica(schedule, costs, split=True, memory_limit_bytes=5).best_ns == 50


def test_one_micro_batch_in_memory_at_a_time_makes_the_byte_time_bound_the_whole_truth() -> None:
    costs = costs_of([[4] * 5] * 2, [[8] * 5] * 2, stored=10, static=7)
    searched = optimize(costs, memory_limit_bytes=17, split=False, effort=0)
    for found in (searched, cyclic(costs, memory_limit_bytes=17)):
        bound = bound_replica(found, costs, split=False, memory_limit_bytes=17).best_ns
        assert bound == compute_makespan_ns(found, costs) == 5 * 24 > bound_replica(found, costs, split=False).best_ns
    with pytest.raises(PlanError, match="rank 0 holds 7 B of weights and states"):
        bound_replica(found, costs, split=False, memory_limit_bytes=7)


def test_the_bound_knows_that_stages_on_one_rank_share_it_and_need_no_transfer() -> None:
    costs = costs_of([[10], [10]], [[20], [20]], transfer=3)
    assert bound_replica((0, 0), costs, split=False).best_ns == 60
    assert bound_replica((0, 1), costs, split=False).best_ns == 66
    with pytest.raises(PlanError, match="the placement has 3 stages but the costs have 2"):
        bound_replica((0, 1, 2), costs, split=False)


def test_impossible_arguments_are_refused_with_their_bound() -> None:
    costs = costs_of([[1, 1]], [[1, 1]], stored=10, working=5, static=100)
    with pytest.raises(PlanError, match="micro-batch 0 alone needs 115 B on stage 0 but the limit is 114 B: make"):
        cyclic(costs, memory_limit_bytes=114)
    with pytest.raises(PlanError, match="micro-batch 0 alone needs 115 B on rank 0 but the limit is 114 B: make"):
        optimize(costs, memory_limit_bytes=114, split=False, effort=0)
    with pytest.raises(ConfigError, match="effort is -1"):
        optimize(costs, memory_limit_bytes=200, split=False, effort=-1)
    for make, what in ((gpipe, "stages"), (one_f_one_b, "ranks")):
        with pytest.raises(PlanError, match=f"with 0 {what}: give at least 1"):
            make(0, 1)
