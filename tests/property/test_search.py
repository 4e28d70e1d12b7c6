"""The search: what it finds keeps every promise."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.partitioning.padded import Cut
from dynapipe_ext.reproducible import splitmix64
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import bound_replica
from dynapipe_ext.schedules.evaluation.simulate import (
    compute_makespan_ns,
    compute_mean_makespan_ns,
    compute_peak_bytes,
    validate,
)
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.published.full_backward import one_f_one_b
from dynapipe_ext.schedules.search import optimizer
from dynapipe_ext.schedules.search.optimizer import SearchSettings, Start, optimize, optimize_best
from tests.property.test_certificate import shortest_ns

PLACEMENTS = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 0)]


def random_costs(rng: np.random.Generator, stages: int, count: int, working_in: str = "FBI") -> MicroBatchCosts:
    def table(low: int, high: int, rows: int = stages) -> np.ndarray:
        return rng.integers(low, high, (rows, count))

    weight = table(0, 30)
    return MicroBatchCosts(
        forward_ns=table(1, 40),
        backward_ns=weight + table(1, 40),
        weight_ns=weight,
        stored_bytes=table(0, 20),
        working_bytes=table(0, 6),
        transfer_ns=table(0, 5, stages - 1),
        transfer_bytes=table(0, 5, stages - 1),
        static_bytes=rng.integers(0, 9, stages),
        working_in=working_in,  # type: ignore[arg-type]
    )


def least_limit(costs: MicroBatchCosts, stage_ranks: tuple[int, ...]) -> int:
    """The smallest limit under which every micro-batch fits alone."""
    ranks = np.array(stage_ranks)
    need = [
        costs.stored_bytes[ranks == r].sum(axis=0)
        + costs.working_bytes[ranks == r].max(axis=0)
        + costs.static_bytes[ranks == r].sum()
        for r in range(max(stage_ranks) + 1)
    ]
    return int(np.max(need))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Start, int]:
    """A placement, a start and a limit: micro-batches as they are, or cuts of items that may be cut elsewhere."""
    stage_ranks = draw(st.sampled_from(PLACEMENTS))
    items, dp, width = draw(st.integers(1, 8)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shapes = np.full((items, width), -1, np.int32)
    for end in range(items):
        for r in range(min(width, end + 1)):
            shapes[end, r] = end * width + r if r == 0 or rng.random() < 0.8 else -1
    first = random_costs(rng, len(stage_ranks), items * width, draw(st.sampled_from(["FBI", "F"])))
    kinds = [first]
    if draw(st.booleans()):
        less = replace(first, stored_bytes=first.stored_bytes // 2, backward_ns=first.backward_ns + 7)
        if draw(st.booleans()):
            never = less.forward_ns.copy()
            never[:, rng.random(items * width) < 0.2] = INFEASIBLE
            less = replace(less, forward_ns=never)
        kinds.append(less)
    cuts, at = [], 0
    while at < items:
        possible = [end for end in range(at + 1, min(items, at + width) + 1) if shapes[end - 1, end - at - 1] >= 0]
        end = int(rng.choice(possible))
        cuts.append(Cut(at, end, 0))
        at = end
    order = rng.permutation(len(cuts)).tolist()
    bounds = sorted(rng.integers(0, len(cuts) + 1, dp - 1).tolist())
    groups = tuple(tuple(order[a:b]) for a, b in zip([0, *bounds], [*bounds, len(cuts)], strict=True))
    used = first.take([int(shapes[end - 1, end - a - 1]) for a, end, _ in cuts])
    limit = least_limit(used, stage_ranks) + draw(st.integers(0, 60))
    return stage_ranks, Start(kind_costs=tuple(kinds), shapes=shapes, cuts=tuple(cuts), groups=groups), limit


def mean_over_disturbed_times_ns(schedule: PipelineSchedule, costs: MicroBatchCosts, noise: float) -> int:
    """By hand: eight draws of a share for each action, once added to its time and once taken off it."""
    stages, count = costs.forward_ns.shape
    most = round(noise * 1024)
    predicted = {"F": costs.forward_ns, "B": costs.backward_ns, "I": costs.input_ns, "W": costs.weight_ns}
    letters = "FIW" if schedule.is_split else "FB"
    total = 0
    for draw in range(8):
        for sign in (1, -1):
            times = {letter: predicted[letter].copy() for letter in letters}
            for (stage, m), (place, letter) in product(np.ndindex(stages, count), enumerate(letters)):
                number = splitmix64(((m * stages + stage) * 3 + place) * 8 + draw)[1]
                share = number % (2 * most + 1) - most
                times[letter][stage, m] += sign * (int(predicted[letter][stage, m]) * share // 1024)
            backward = times["I"] + times["W"] if schedule.is_split else times["B"]
            weight = times.get("W", 0 * backward)
            turned_out = replace(costs, forward_ns=times["F"], backward_ns=backward, weight_ns=weight)
            total += compute_makespan_ns(schedule, turned_out)
    return total // 16


@settings(max_examples=60)
@given(case=cases(), split=st.booleans(), effort=st.integers(0, 300), noise=st.sampled_from([0.1, 0.5]))
def test_under_noise_the_mean_over_disturbed_times_counts_and_predicted_times_hardly_grow(
    case, split, effort, noise
) -> None:
    stage_ranks, start, limit = case
    asked = SearchSettings(memory_limit_bytes=limit, split=split, effort=effort, stage_ranks=stage_ranks)
    means, predicted = [], []
    for one in (asked, replace(asked, noise=noise)):
        _, found = optimize_best([start], one)
        priced = [costs_of(start, replica) for replica in found.replicas]
        replicas = list(zip(found.schedules, priced, strict=True))
        means.append([mean_over_disturbed_times_ns(schedule, costs, noise) for schedule, costs in replicas])
        predicted.append([compute_makespan_ns(schedule, costs) for schedule, costs in replicas])
        assert means[-1] == [compute_mean_makespan_ns(*replica, noise) for replica in replicas]
        if one.noise:
            assert list(found.makespan_ns) == means[-1]
        else:
            allowed_ns = max(found.makespan_ns) * 257 // 256
        assert all(mean >= time for mean, time in zip(means[-1], predicted[-1], strict=True))
        assert max(max(compute_peak_bytes(schedule, costs)) for schedule, costs in replicas) <= limit
    assert max(means[1]) <= max(means[0])
    assert max(predicted[1]) <= allowed_ns


def costs_of(start: Start, replica: tuple[Cut, ...]) -> MicroBatchCosts:
    """Of a replica's cuts, in its order of injection."""
    columns = [start.shapes[end - 1, end - first - 1] for first, end, _ in replica]
    kinds = [kind for _, _, kind in replica]
    return MicroBatchCosts.choose(start.kind_costs, np.array(kinds, np.int64), np.array(columns, np.int64))


@settings(max_examples=60)
@given(
    case=cases(),
    split=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    efforts=st.lists(st.integers(0, 3000), min_size=2, max_size=4),
    trial=st.sampled_from([20, 500]),
)
def test_more_effort_never_ends_worse_and_goes_the_same_way_at_first(case, split, seed, efforts, trial) -> None:
    stage_ranks, start, limit = case
    other = replace(start, groups=(tuple(m for group in start.groups for m in group), *((),) * (len(start.groups) - 1)))
    values = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "TRIAL", trial)
        for effort in sorted(efforts):
            asked = SearchSettings(
                memory_limit_bytes=limit, split=split, effort=effort, seed=seed, stage_ranks=stage_ranks
            )
            _, found = optimize_best([start, other], asked)
            values.append((max(found.makespan_ns), sum(found.makespan_ns)))
    assert values == sorted(values, reverse=True)


@settings(max_examples=50)
@given(
    case=cases(), split=st.booleans(), effort=st.integers(0, 400), equal=st.booleans(),
    short=st.sets(st.integers(0, 5)),
)  # fmt: skip
def test_what_is_found_is_valid_within_the_limit_and_as_fast_as_it_says(case, split, effort, equal, short) -> None:
    stage_ranks, start, limit = case
    short_stages = [stage for stage in range(len(stage_ranks)) if stage in short]
    asked = SearchSettings(
        memory_limit_bytes=limit, split=split, effort=effort, stage_ranks=stage_ranks, short_stages=short_stages,
        equal_counts=equal,
    )  # fmt: skip
    _, found = optimize_best([start], asked)
    items = sorted((first, end) for replica in found.replicas for first, end, _ in replica)
    assert [item for first, end in items for item in range(first, end)] == list(range(len(start.shapes)))
    if equal:
        assert [len(replica) for replica in found.replicas] == [len(group) for group in start.groups]
    for replica, schedule, makespan in zip(found.replicas, found.schedules, found.makespan_ns, strict=True):
        costs = costs_of(start, replica)
        validate(schedule, len(replica))
        assert max(compute_peak_bytes(schedule, costs)) <= limit
        assert {a.kind.value for rank in schedule.ranks for a in rank} <= set("FIW" if split else "FB")
        assert compute_makespan_ns(schedule, costs) <= makespan
        bound = bound_replica(stage_ranks, costs, split=split, memory_limit_bytes=limit).best_ns
        assert bound <= compute_makespan_ns(schedule, costs)
    _, before = optimize_best([start], replace(asked, effort=0))
    values = [(max(one.makespan_ns), sum(one.makespan_ns)) for one in (found, before)]
    assert values[0] <= values[1], "more effort made it worse"


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 2000), min_size=40, max_size=90),
    placement=st.sampled_from([(), (0, 1, 1, 0)]),
    dp=st.integers(2, 4),
    split=st.booleans(),
    limit=st.sampled_from([30e6, 64e9]),
)
def test_a_planner_with_more_effort_plans_no_longer_steps(lengths, placement, dp, split, limit) -> None:
    topology = Topology(tp=1, pp=2, dp=dp, placement=placement)
    stages = topology.num_stages
    costs = TokenCosts(
        stages, ns_per_token=1_000, ns_per_token_squared=2, bytes_per_token=4_096 // stages, overhead_ns=50_000
    )
    planner = Planner(topology, costs, limit, split_backward=split)
    times = [
        replace(planner, effort=effort).plan(lengths).makespan_s for effort in (200, 400, 600, 700, 800, 900, 1000)
    ]
    assert times == sorted(times, reverse=True)


def test_moves_of_single_items_find_the_cuts_that_balance_two_stages() -> None:
    """Twelve equal items, time in proportion to the cut but for an overhead: more, smaller runs shorten the ends."""
    rows = np.arange(1, 13)
    times = np.tile(10 + 40 * rows, (2, 1))
    zero = np.zeros((1, 12), np.int64)
    costs = MicroBatchCosts(
        forward_ns=times, backward_ns=2 * times, weight_ns=times, stored_bytes=times, working_bytes=0 * times,
        transfer_ns=zero, transfer_bytes=zero, static_bytes=np.zeros(2, np.int64),
    )  # fmt: skip
    shapes = np.array([[r if r <= end else -1 for r in range(12)] for end in range(12)], np.int32)
    start = Start(kind_costs=(costs,), shapes=shapes, cuts=(Cut(0, 12, 0),), groups=((0,),))
    asked = SearchSettings(memory_limit_bytes=10**6, split=False, effort=3000)
    _, found = optimize_best([start], asked)
    best = 1 << 62
    for cut in compositions(12):
        half = len(cut) // 2
        if cut == (*sorted(cut[:half]), *sorted(cut[half:], reverse=True)):
            parts = costs.take([rows - 1 for rows in cut])
            schedule = optimize(parts, memory_limit_bytes=10**6, split=False, effort=200)
            best = min(best, compute_makespan_ns(schedule, parts))
    assert found.makespan_ns[0] <= best


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    if not total:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 6), st.sampled_from(["FBI", "F"]))
def test_what_is_found_is_never_slower_than_1f1b_in_natural_order(seed, stages, count, working_in) -> None:
    costs = random_costs(np.random.default_rng(seed), stages, count, working_in)
    natural = one_f_one_b(stages, count)
    found = optimize(costs, memory_limit_bytes=max(compute_peak_bytes(natural, costs)), split=False, effort=0)
    assert compute_makespan_ns(found, costs) <= compute_makespan_ns(natural, costs)


def test_small_problems_end_at_the_optimum_of_all_orders_or_a_little_later() -> None:
    ratios = []
    for stages, count, split, number in (
        (2, 3, False, 8),
        (3, 3, False, 8),
        (4, 3, False, 6),
        (2, 3, True, 6),
        (3, 2, True, 8),
    ):
        for seed in range(number):
            costs = random_costs(np.random.default_rng(seed), stages, count)
            found = optimize(costs, memory_limit_bytes=10**6, split=split, effort=1000)
            ratios.append(compute_makespan_ns(found, costs) / shortest_ns(costs, split=split))
    assert min(ratios) >= 1
    assert max(ratios) < 1.1
    assert np.mean(ratios) < 1.02
    assert sum(ratio == 1 for ratio in ratios) > len(ratios) / 2


def test_more_effort_finds_a_better_schedule_than_1f1b_for_uneven_micro_batches() -> None:
    factor = np.random.default_rng(3).lognormal(0, 0.6, 24)
    times = np.rint(np.tile(factor, (4, 1)) * 1e6).astype(np.int64)
    zero = np.zeros((3, 24), np.int64)
    costs = MicroBatchCosts(
        forward_ns=times,
        backward_ns=2 * times,
        weight_ns=times,
        stored_bytes=times,
        working_bytes=np.zeros_like(times),
        transfer_ns=zero,
        transfer_bytes=zero,
        static_bytes=np.zeros(4, np.int64),
    )
    natural = one_f_one_b(4, 24)
    limit = compute_peak_bytes(natural, costs)[0]
    found = {
        (split, effort): compute_makespan_ns(
            optimize(costs, memory_limit_bytes=limit, split=split, effort=effort), costs
        )
        for split in (False, True)
        for effort in (0, 400)
    }
    plain = compute_makespan_ns(natural, costs)
    assert found[False, 400] < found[False, 0] < plain
    assert found[True, 400] < found[False, 400]
    work = int(3 * times[0].sum())
    assert found[True, 400] - work < 0.4 * (plain - work)


def test_a_start_that_does_not_fit_hides_none_behind_it() -> None:
    costs = random_costs(np.random.default_rng(0), 2, 3)
    fits = Start.from_micro_batches([costs], [range(3)], [0, 0, 0])
    large = replace(fits, kind_costs=(replace(costs, stored_bytes=costs.stored_bytes + 10**6),))
    settings = SearchSettings(stage_ranks=(0, 1), memory_limit_bytes=least_limit(costs, (0, 1)), split=False, effort=0)
    assert optimize_best([large, fits], settings) == (1, optimize_best([fits], settings)[1])


def test_bad_input_is_refused_by_value_and_bound() -> None:
    costs = random_costs(np.random.default_rng(0), 2, 3)
    limit = least_limit(costs, (0, 1))
    with pytest.raises(PlanError, match=r"micro-batch \d alone needs \d+ B on rank \d but the limit is"):
        optimize(costs, memory_limit_bytes=limit - 1, split=True, effort=3)
    with pytest.raises(ConfigError, match="effort is -1"):
        optimize(costs, memory_limit_bytes=limit, split=True, effort=-1)
    with pytest.raises(ConfigError, match=r"placement \(0, 2\)"):
        optimize(costs, memory_limit_bytes=limit, split=True, effort=1, stage_ranks=(0, 2))
