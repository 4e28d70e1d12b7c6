"""The search: the native core and its twin agree to the last number, and what they find keeps every promise."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.schedules.bounds import lower_bound_ns
from dynapipe_ext.schedules.memory import peak_bytes
from dynapipe_ext.schedules.one_f_one_b import one_f_one_b
from dynapipe_ext.schedules.optimizer import optimize, optimize_replicas
from dynapipe_ext.schedules.simulate import makespan_ns
from dynapipe_ext.schedules.validate import validate

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
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[MicroBatchCosts], list[list[int]], list[int], int]:
    stage_ranks = draw(st.sampled_from(PLACEMENTS))
    count, dp = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    first = random_costs(rng, len(stage_ranks), count, draw(st.sampled_from(["FBI", "F"])))
    kinds = [first]
    if draw(st.booleans()):
        less = replace(first, stored_bytes=first.stored_bytes // 2, backward_ns=first.backward_ns + 7)
        if draw(st.booleans()):
            never = less.forward_ns.copy()
            never[:, rng.integers(count)] = INFEASIBLE
            less = replace(less, forward_ns=never)
        kinds.append(less)
    order = rng.permutation(count).tolist()
    cuts = sorted(rng.integers(0, count + 1, dp - 1).tolist())
    groups = [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    limit = least_limit(first, stage_ranks) + draw(st.integers(0, 60))
    return stage_ranks, kinds, groups, [0] * count, limit


@pytest.mark.skipif(native is None, reason="a pure build was asked for")
@settings(max_examples=150, deadline=None)
@given(
    case=cases(), split=st.booleans(), effort=st.integers(0, 40), seed=st.integers(0, 2**64 - 1), equal=st.booleans()
)
def test_the_native_core_finds_what_its_twin_finds(case, split, effort, seed, equal) -> None:
    stage_ranks, kind_costs, groups, kinds, limit = case

    def found(use_native: bool):
        return optimize_replicas(
            kind_costs,
            groups,
            kinds,
            memory_limit_bytes=limit,
            split=split,
            effort=effort,
            seed=seed,
            stage_ranks=stage_ranks,
            equal_counts=equal,
            use_native=use_native,
        )

    assert found(True) == found(False)


@settings(max_examples=200, deadline=None)
@given(case=cases(), split=st.booleans(), effort=st.integers(0, 60), equal=st.booleans())
def test_what_is_found_is_valid_within_the_limit_and_as_fast_as_it_says(case, split, effort, equal) -> None:
    stage_ranks, kind_costs, groups, kinds, limit = case
    settings_ = {"memory_limit_bytes": limit, "split": split, "stage_ranks": stage_ranks, "equal_counts": equal}
    found = optimize_replicas(kind_costs, groups, kinds, effort=effort, **settings_)
    assert sorted(m for group in found.groups for m in group) == list(range(len(kinds)))
    if equal:
        assert [len(group) for group in found.groups] == [len(group) for group in groups]
    for group, schedule, makespan in zip(found.groups, found.schedules, found.makespan_ns, strict=True):
        costs = MicroBatchCosts.join([kind_costs[found.kinds[m]].take([m]) for m in group], like=kind_costs[0])
        place = {m: i for i, m in enumerate(group)}
        ranks = tuple(tuple(replace(a, micro_batch=place[a.micro_batch]) for a in rank) for rank in schedule.ranks)
        local = replace(schedule, ranks=ranks)
        validate(local, len(group))
        assert max(peak_bytes(local, costs)) <= limit
        assert {a.kind.value for rank in local.ranks for a in rank} <= set("FIW" if split else "FB")
        assert makespan_ns(local, costs) <= makespan
        bound = lower_bound_ns(stage_ranks, costs, split=split, memory_limit_bytes=limit)
        assert bound <= makespan_ns(local, costs)
    start = optimize_replicas(kind_costs, groups, kinds, effort=0, **settings_)
    assert max(found.makespan_ns) <= max(start.makespan_ns)


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
    limit = peak_bytes(natural, costs)[0]
    found = {
        (split, effort): makespan_ns(optimize(costs, memory_limit_bytes=limit, split=split, effort=effort), costs)
        for split in (False, True)
        for effort in (0, 400)
    }
    plain = makespan_ns(natural, costs)
    assert found[False, 400] < found[False, 0] < plain
    assert found[True, 400] < found[False, 400]
    work = int(3 * times[0].sum())
    assert found[True, 400] - work < 0.4 * (plain - work)


def test_bad_input_is_refused_by_value_and_bound() -> None:
    costs = random_costs(np.random.default_rng(0), 2, 3)
    limit = least_limit(costs, (0, 1))
    with pytest.raises(PlanError, match=r"micro-batch \d alone needs \d+ B on rank \d but the limit is"):
        optimize(costs, memory_limit_bytes=limit - 1, split=True, effort=3)
    with pytest.raises(ConfigError, match="effort is -1"):
        optimize(costs, memory_limit_bytes=limit, split=True, effort=-1)
    with pytest.raises(ConfigError, match=r"placement \(0, 2\)"):
        optimize(costs, memory_limit_bytes=limit, split=True, effort=1, stage_ranks=(0, 2))
