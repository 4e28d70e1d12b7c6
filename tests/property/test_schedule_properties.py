"""Schedules over random costs, placements and orders, against slow and independent definitions of the same things."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.core import native
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import bound_replica
from dynapipe_ext.schedules.evaluation.simulate import (
    SharedCores,
    compute_makespan_ns,
    compute_peak_bytes,
    simulate,
    simulate_ns,
    simulate_shared_ns,
    sum_static_bytes,
    validate,
)
from dynapipe_ext.schedules.notation import format_lines, parse_lines
from dynapipe_ext.schedules.published.cyclic import clustered_cyclic, cyclic
from dynapipe_ext.schedules.published.full_backward import gpipe
from dynapipe_ext.schedules.search.optimizer import NEVER, list_policies, optimize
from dynapipe_ext.timeline import Trace
from tests.bench.noise import dispatch

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741 torch's letters


def shared_traces(replicas: list[tuple[PipelineSchedule, MicroBatchCosts]], cores: SharedCores) -> list[Trace]:
    found = simulate_shared_ns(replicas, cores)
    return [simulate(*replica, spans) for replica, spans in zip(replicas, found, strict=True)]


@st.composite
def random_costs(draw: st.DrawFn, max_stages: int = 6, max_micro_batches: int = 12) -> MicroBatchCosts:
    """Even and heavy-tailed costs, with stages that differ, zeros, ties, and transfers from none to dominant."""
    stages = draw(st.integers(1, max_stages))
    num = draw(st.integers(0 if draw(st.booleans()) else 1, max_micro_batches))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread, zeros = draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])), draw(st.sampled_from([0.0, 0.0, 0.3]))
    scale, transfer = draw(st.sampled_from([3, 1000])), draw(st.sampled_from([0, 1, 50]))

    def table(rows: int, mean: float) -> np.ndarray:
        sizes = np.exp(rng.normal(0, spread, num)) * np.exp(rng.normal(0, spread / 3, (rows, 1)))
        return np.where(rng.random((rows, num)) < zeros, 0, np.ceil(mean * sizes)).astype(np.int64)

    backward = table(stages, 2 * scale)
    return MicroBatchCosts(
        forward_ns=table(stages, scale),
        backward_ns=backward,
        weight_ns=(backward * rng.random(backward.shape)).astype(np.int64),
        stored_bytes=table(stages, 100),
        working_bytes=table(stages, draw(st.sampled_from([0, 10, 300]))),
        transfer_ns=table(stages - 1, transfer) if transfer else np.zeros((stages - 1, num), np.int64),
        transfer_bytes=np.zeros((stages - 1, num), np.int64),
        static_bytes=rng.integers(0, 500, stages),
    )


def random_schedule(seed: int, stages: int, num: int, *, split: bool, linear: bool = False) -> PipelineSchedule:
    """Any valid schedule: a random placement, random split backwards, actions in a random order that respects them."""
    rng = random.Random(seed)
    num_ranks = stages if linear else rng.randint(1, stages)
    placement = list(range(num_ranks)) + [rng.randrange(num_ranks) for _ in range(stages - num_ranks)]
    if not linear:
        rng.shuffle(placement)
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    ready = [Action(0, F, m) for m in range(num)]
    while ready:
        action = ready.pop(rng.randrange(len(ready)))
        s, m = action.stage, action.micro_batch
        ranks[placement[s]].append(action)
        if action.kind is F and s < stages - 1:
            ready.append(Action(s + 1, F, m))
        elif action.kind is F or (action.kind in (B, I) and s > 0):
            target = s if action.kind is F else s - 1
            ready.append(Action(target, I if split and rng.random() < 0.5 else B, m))
        if action.kind is I:
            ready.append(Action(s, W, m))
    return PipelineSchedule("random", tuple(map(tuple, ranks)), tuple(placement))


def fixpoint_ends(schedule: PipelineSchedule, costs: MicroBatchCosts) -> dict[Action, int] | None:
    """End of every action by repeating the definition until nothing changes; None for a deadlock. Slow and plain."""
    table = {F: costs.forward_ns, B: costs.backward_ns, I: costs.input_ns, W: costs.weight_ns}
    last, where = schedule.num_stages - 1, schedule.stage_ranks
    ends: dict[Action, int] = {}

    def gradient(stage: int, m: int) -> int | None:
        return next((ends[a] for k in (B, I) if (a := Action(stage, k, m)) in ends), None)

    def moved(time: int | None, s: int, t: int, m: int) -> int | None:
        if time is None or where[s] == where[t]:
            return time
        return time + int(costs.transfer_ns[min(s, t), m])

    def starts(rank: int, index: int) -> list[int | None]:
        a = schedule.ranks[rank][index]
        s, m = a.stage, a.micro_batch
        needs: list[int | None] = [ends.get(schedule.ranks[rank][index - 1]) if index else 0]
        if a.kind is F and s > 0:
            needs.append(moved(ends.get(Action(s - 1, F, m)), s - 1, s, m))
        if a.kind in (B, I):
            needs.append(ends.get(Action(s, F, m)))
            if s < last:
                needs.append(moved(gradient(s + 1, m), s + 1, s, m))
        if a.kind is W:
            needs.append(ends.get(Action(s, I, m)))
        return needs

    while True:
        before = len(ends)
        for rank, actions in enumerate(schedule.ranks):
            for index, a in enumerate(actions):
                needs = starts(rank, index)
                if a not in ends and None not in needs:
                    ends[a] = max(n for n in needs if n is not None) + int(table[a.kind][a.stage, a.micro_batch])
        if len(ends) == before:
            break
    return ends if len(ends) == sum(map(len, schedule.ranks)) else None


@given(random_costs(), st.integers(0, 2**32), st.booleans())
def test_the_simulation_agrees_to_the_digit_with_a_fixpoint_of_the_rules(
    costs: MicroBatchCosts, seed: int, split: bool
) -> None:
    schedule = random_schedule(seed, costs.num_stages, costs.num_micro_batches, split=split)
    ends = fixpoint_ends(schedule, costs)
    assert ends is not None
    spans = simulate_ns(schedule, costs)
    assert [[end for _, end in rank] for rank in spans] == [[ends[a] for a in rank] for rank in schedule.ranks]
    assert compute_makespan_ns(schedule, costs) == max(ends.values(), default=0)


@given(random_costs(4, 4), st.integers(0, 2**32), st.booleans())
def test_shuffled_lists_deadlock_in_the_simulation_exactly_where_the_fixpoint_and_the_validator_say(
    costs: MicroBatchCosts, seed: int, split: bool
) -> None:
    valid = random_schedule(seed, costs.num_stages, costs.num_micro_batches, split=split)
    rng = random.Random(seed)
    ranks = [list(rank) for rank in valid.ranks]
    for rank in ranks:
        for _ in range(rng.randint(0, 3) if len(rank) > 1 else 0):
            i, j = rng.sample(range(len(rank)), 2)
            rank[i], rank[j] = rank[j], rank[i]
    schedule = PipelineSchedule("shuffled", tuple(map(tuple, ranks)), valid.stage_ranks)
    ends = fixpoint_ends(schedule, costs)
    if ends is None:
        with pytest.raises(PlanError, match="deadlocks: rank"):
            simulate_ns(schedule, costs)
        with pytest.raises(PlanError, match=r"deadlocks: rank|must run FB or FIW"):
            validate(schedule, costs.num_micro_batches)
    else:
        spans = simulate_ns(schedule, costs)
        assert [[end for _, end in rank] for rank in spans] == [[ends[a] for a in rank] for rank in schedule.ranks]
        validate(schedule, costs.num_micro_batches)


@given(random_costs(), st.integers(0, 2**32), st.integers(1, 6))
def test_ranks_that_share_cores_are_never_faster_and_waste_nothing(
    costs: MicroBatchCosts, seed: int, cores: int
) -> None:
    schedule = random_schedule(seed, costs.num_stages, costs.num_micro_batches, split=True)
    alone, (shared,) = simulate(schedule, costs), shared_traces([(schedule, costs)], SharedCores(cores))
    assert shared.makespan_s >= alone.makespan_s
    assert {s.label: s.cpu_s for s in shared.spans} == {s.label: s.cpu_s for s in alone.spans}
    work_ns = sum(s.cpu_s for s in alone.spans) * 1e9
    assert shared.makespan_s * 1e9 >= work_ns / cores * (1 - 1e-9)
    if cores == 1 and not costs.transfer_ns.any():
        assert shared.makespan_s * 1e9 <= work_ns + len(shared.spans) + 1  # each end is rounded up by less than 1 ns


@given(random_costs(), st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 3))
def test_replicas_that_share_cores_take_their_work_over_the_cores_and_their_tp_ranks_count(
    costs: MicroBatchCosts, seed: int, cores: int, tp: int
) -> None:
    schedule = random_schedule(seed, costs.num_stages, costs.num_micro_batches, split=True)
    idle = random_schedule(seed, costs.num_stages, 0, split=True)
    shared = SharedCores(cores, tp)
    one, other, nothing = shared_traces([(schedule, costs), (schedule, costs), (idle, costs.take([]))], shared)
    assert one == other  # whoever is alike waits alike
    assert not nothing.spans
    work_ns = 2 * sum(round(s.cpu_s * 1e9) for s in one.spans)
    assert one.makespan_s * 1e9 >= shared.floor_ns(work_ns) - 1e-3
    (same,) = shared_traces([(schedule, costs)], SharedCores(2 * tp * cores * len(schedule.ranks), tp))
    assert same == simulate(schedule, costs)


@given(random_costs(), st.integers(0, 2**32), st.sampled_from(["FBI", "F"]))
def test_peak_bytes_are_the_largest_sum_over_what_is_held_at_any_action(
    costs: MicroBatchCosts, seed: int, kinds: Literal["FBI", "F"]
) -> None:
    schedule = random_schedule(seed, costs.num_stages, costs.num_micro_batches, split=True)
    expected = []
    for rank, actions in enumerate(schedule.ranks):
        static = sum(int(b) for b, r in zip(costs.static_bytes, schedule.stage_ranks, strict=True) if r == rank)
        peak, inside = 0, set()
        for a in actions:
            key = (a.stage, a.micro_batch)
            inside.add(key)
            extra = int(costs.working_bytes[key]) if a.kind.value in kinds else 0
            peak = max(peak, extra + sum(int(costs.stored_bytes[k]) for k in inside))
            if a.kind in (B, W):
                inside.remove(key)
        expected.append(static + peak)
    assert compute_peak_bytes(schedule, replace(costs, working_in=kinds)) == tuple(expected)
    last = {span.rank: span.num_bytes for span in simulate(schedule, costs).spans}
    assert last == {rank: held for rank, held in enumerate(sum_static_bytes(schedule, costs)) if schedule.ranks[rank]}


@settings(max_examples=120)
@given(random_costs(), st.integers(0, 2**32), st.booleans())
def test_no_schedule_beats_the_lower_bound_of_its_placement(costs: MicroBatchCosts, seed: int, split: bool) -> None:
    schedule = random_schedule(seed, costs.num_stages, costs.num_micro_batches, split=split)
    makespan, limit = compute_makespan_ns(schedule, costs), max(compute_peak_bytes(schedule, costs), default=0)
    for allowed in {True, split}:
        assert bound_replica(schedule, costs, split=allowed).best_ns <= makespan
        assert bound_replica(schedule.stage_ranks, costs, split=allowed, memory_limit_bytes=limit).best_ns <= makespan
    assert bound_replica(schedule, costs, split=True).best_ns <= bound_replica(schedule, costs, split=False).best_ns


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=6))
def test_the_preemptive_bound_is_the_largest_over_subsets_of_head_work_and_tail(
    jobs: list[tuple[int, int, int]],
) -> None:
    jobs = [(head, max(1, work), tail) for head, work, tail in jobs]
    subsets = (c for size in range(1, len(jobs) + 1) for c in itertools.combinations(jobs, size))
    expected = max(min(h for h, _, _ in c) + sum(w for _, w, _ in c) + min(t for _, _, t in c) for c in subsets)
    heads, works, tails = (np.array(numbers, np.int64) for numbers in zip(*jobs, strict=True))
    assert native.preemptive_ns(heads, works, tails) == expected


def test_sums_that_do_not_fit_in_64_bits_are_refused_with_the_units() -> None:
    costs = MicroBatchCosts(
        **{name: np.full((1, 4096), 1 << 49) for name in ("forward_ns", "backward_ns", "stored_bytes")},
        **{name: np.zeros((1, 4096), np.int64) for name in ("weight_ns", "working_bytes")},
        transfer_ns=np.zeros((0, 4096), np.int64), transfer_bytes=np.zeros((0, 4096), np.int64),
        static_bytes=np.zeros(1, np.int64),
    )  # fmt: skip
    schedule = gpipe(1, 4096)
    for judge in (simulate_ns, compute_peak_bytes, partial(bound_replica, split=False)):
        with pytest.raises(PlanError, match=r"add up to .* but must stay below .*: check the units"):
            judge(schedule, costs)


def needed_bytes(costs: MicroBatchCosts) -> int:
    """The least limit under which any schedule exists: the largest micro-batch alone."""
    alone = costs.static_bytes[:, None] + costs.stored_bytes + costs.working_bytes
    return int(max(costs.static_bytes.max(), alone.max(initial=0)))


@settings(max_examples=80)
@given(random_costs(), st.floats(0, 1), st.integers(0, 2**32), st.sampled_from(["FBI", "F"]))
def test_cyclic_is_a_whole_order_that_keeps_the_limit_and_the_injection_order(
    costs: MicroBatchCosts, slack: float, seed: int, working_in: Literal["FBI", "F"]
) -> None:
    costs = replace(costs, working_in=working_in)
    stages, num = costs.num_stages, costs.num_micro_batches
    least = needed_bytes(costs)
    most = max(compute_peak_bytes(gpipe(stages, num), costs)) if num else least
    limit = least + int(slack * max(0, most - least))
    order = random.Random(seed).sample(range(num), num)
    found = cyclic(costs, memory_limit_bytes=limit, order=order)
    validate(found, num)
    assert max(compute_peak_bytes(found, costs)) <= limit
    assert all([a.micro_batch for a in rank if a.kind is F] == order for rank in found.ranks)
    assert found == cyclic(costs, memory_limit_bytes=limit, order=order)
    for stage, rank in enumerate(cyclic(costs, memory_limit_bytes=most + 10**6, order=order).ranks):
        inside = itertools.accumulate(1 if a.kind is F else -1 for a in rank)
        assert max(inside, default=0) <= 2 * (stages - stage) - 1


@given(random_costs(), st.floats(0, 1))
def test_the_best_order_of_clusters_is_no_slower_than_any_of_them(costs: MicroBatchCosts, slack: float) -> None:
    """Three parts of the micro-batches by their time on the stage where it is largest, as even as can be."""
    num, limit = costs.num_micro_batches, needed_bytes(costs) + int(slack * 500)
    times = (costs.forward_ns + costs.backward_ns).max(axis=0).tolist()
    ascending = sorted(range(num), key=lambda m: (times[m], m))
    first, second = -(-num // 3), -(-num // 3) + -(-(num - 1) // 3)
    clusters = ascending[:first], ascending[first:second], ascending[second:]
    orders = [list(itertools.chain(*chosen)) for chosen in itertools.permutations(clusters)]
    possible = [cyclic(costs, memory_limit_bytes=limit, order=order) for order in orders]
    found = clustered_cyclic(costs, memory_limit_bytes=limit)
    assert found in possible
    assert compute_makespan_ns(found, costs) == min(compute_makespan_ns(schedule, costs) for schedule in possible)


@given(random_costs(), st.floats(0, 1), st.booleans())
def test_every_dispatch_rule_makes_a_whole_order_within_the_limit(
    costs: MicroBatchCosts, slack: float, split: bool
) -> None:
    limit, stages = needed_bytes(costs) + int(slack * 500), range(costs.num_stages)
    if not costs.num_micro_batches:
        return
    free = [limit - num_bytes for num_bytes in costs.static_bytes.tolist()]
    for rule in list_policies(split=split):
        makespan, found = dispatch(replace(costs, working_in="FBI"), rule, stages, free, split=split)
        if makespan >= NEVER and rule.rhythm == 2:
            continue  # 1F1B's order waits for forwards that memory may not admit
        validate(found, costs.num_micro_batches)
        assert max(compute_peak_bytes(found, costs)) <= limit
        assert compute_makespan_ns(found, costs) <= makespan < NEVER  # a rule may wait where the order alone would not
        assert split or rule.rhythm == 2 or compute_makespan_ns(found, costs) == makespan


@given(random_costs())
def test_a_micro_batch_that_does_not_fit_alone_is_refused_and_one_that_just_does_is_taken(
    costs: MicroBatchCosts,
) -> None:
    if not costs.num_micro_batches:
        return
    least = needed_bytes(costs)
    for make in (cyclic, partial(optimize, split=False, effort=0), partial(optimize, split=True, effort=0)):
        make(costs, memory_limit_bytes=least)
        with pytest.raises(
            PlanError, match=rf"alone needs {least} B on (stage|rank) \d+ but the limit is {least - 1} B: "
        ):
            make(costs.take([_largest(costs)]), memory_limit_bytes=least - 1)


def _largest(costs: MicroBatchCosts) -> int:
    need = costs.static_bytes[:, None] + costs.stored_bytes + costs.working_bytes
    return int(np.unravel_index(need.argmax(), need.shape)[1])


@settings(max_examples=25)
@given(random_costs(), st.floats(0, 1), st.integers(0, 2**64 - 1), st.integers(0, 12), st.booleans())
def test_the_search_is_repeatable_and_never_worse_than_its_start(
    costs: MicroBatchCosts, slack: float, seed: int, effort: int, split: bool
) -> None:
    limit = needed_bytes(costs) + int(slack * 500)
    find = partial(optimize, costs, memory_limit_bytes=limit, split=split)
    found = find(effort=effort, seed=seed)
    assert found == find(effort=effort, seed=seed)
    assert compute_makespan_ns(found, costs) <= compute_makespan_ns(find(effort=0), costs)
    assert (
        compute_makespan_ns(found, costs) >= bound_replica(found, costs, split=split, memory_limit_bytes=limit).best_ns
    )


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 12))
def test_lines_of_actions_round_trip(seed: int, stages: int, num: int) -> None:
    schedule = random_schedule(seed, stages, num, split=True)
    assert parse_lines(format_lines(schedule), schedule.name) == schedule
