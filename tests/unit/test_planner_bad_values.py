"""Values that are no lengths, costs or settings: a planner refuses them by name, and always ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import SampleLength, check_cover, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError, DynaPipeError, PlanError
from dynapipe_ext.partitioning.packing import RowPackingPolicy, compute_document_costs, make_evaluate
from dynapipe_ext.schedules.planner import Planner

PLANNER = Planner(Topology(pp=2, dp=2), TokenCosts(2), 1e12, effort=1)
NAN = float("nan")


@pytest.mark.parametrize(
    "changed",
    [
        *({"encoder": n} for n in (0, -1, -(10**6), 2.5, NAN, "5", None, 2**31 + 1, 2**70)),
        *({"decoder": n} for n in (-1, NAN, 2**40)),
        *({"target": n} for n in (-1, 99, 1.5)),
        *({"start": n} for n in (-3, 1.5)),
        *({"index": n} for n in (-1, "a")),
    ],
    ids=str,
)
def test_a_sample_that_cannot_be_is_refused_with_its_numbers(changed: dict[str, Any]) -> None:
    sample = SampleLength(**{"index": 5, "encoder": 7, "target": 7, **changed})
    with pytest.raises(DataError, match=r"a sample is \(index, .* = \(.*, 7.*\): give integers, 1 <= encoder <= 2\^31"):
        PLANNER.plan([SampleLength(0, 9, 0, 9), sample])


@pytest.mark.parametrize(
    "lengths",
    [
        "abc",
        None,
        5,
        {1: 2},
        {5, 6},
        iter([4]),
        np.array(5),
        [SampleLength(0, 5), 7],
        [7, SampleLength(0, 5)],
        [[1, 2], [3]],
        *([number] for number in (5.0, NAN, None, 2**70)),
        np.array([2**63], np.uint64),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_are_no_lengths_is_refused(lengths: Any) -> None:
    with pytest.raises(DataError):
        PLANNER.plan(lengths)


@pytest.mark.parametrize("value", ["a", -1, 1.5, True, NAN])
def test_a_step_or_reserve_that_is_no_count_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"step is .* must be an integer from 0 on"):
        PLANNER.plan([5, 6, 7], step=value)
    with pytest.raises(ConfigError, match=r"reserve_bytes is .* must be an integer from 0 on"):
        PLANNER.replan(PLANNER.plan([5, 6, 7]), [5, 6, 7], reserve_bytes=value)


@pytest.mark.parametrize("name", ["topology", "format", "collectives", "split_backward"])
def test_a_setting_of_another_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'no' but must be of type"):
        replace(PLANNER, **{name: "no"})


def test_costs_that_price_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="give a cost model"):
        replace(PLANNER, costs="costs.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, NAN, float("inf"), "a", None, 2**70])
@pytest.mark.parametrize("name", ["ns_per_token", "bytes_per_token", "overhead_ns", "backward_ratio", "stage_scale"])
def test_token_costs_that_are_no_usable_numbers_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .* but costs are numbers of 0 to"):
        TokenCosts(2, **{name: (value, 1.0) if name == "stage_scale" else value})


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("bytes_per_token", [0, 1000])
def test_where_nothing_takes_time_any_plan_is_as_good_and_one_is_found(layout: Any, bytes_per_token: int) -> None:
    costs = TokenCosts(2, ns_per_token=0, bytes_per_token=bytes_per_token, overhead_ns=0)
    plan = replace(PLANNER, costs=costs, layout=layout).plan([5, 6, 7, 8])
    check_cover(plan.batch, sample_lengths([5, 6, 7, 8]))
    assert plan.makespan_s == 0


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_times_that_overflow_are_refused() -> None:
    costs = TokenCosts(2, ns_per_token=2**31, backward_ratio=2.0**30)
    with pytest.raises(DynaPipeError, match="overflow"):
        replace(PLANNER, costs=costs).plan([40, 50])


@pytest.mark.parametrize("longest", [10**6, 2**31])
def test_documents_are_priced_in_rows_of_bounded_number_beside_a_very_long_one(longest: int) -> None:
    priced = 0

    def counting(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def count(micro_batches: Any) -> Any:
            nonlocal priced
            priced += sum(len(m.samples) for m in micro_batches)
            return evaluate(micro_batches)

        return count

    samples = sample_lengths([longest, *range(10, 400)])
    costs = compute_document_costs(
        samples, counting(make_evaluate(TokenCosts(2))), RowPackingPolicy(max_tokens=longest)
    )
    assert priced <= 2**18 + len(samples)
    assert costs[1:] == sorted(costs[1:])
    assert costs[0] > costs[-1]


@settings(max_examples=60, deadline=2000)
@given(
    samples=st.lists(
        st.builds(
            SampleLength,
            st.integers(-1, 5) | st.floats(),
            st.integers() | st.integers(1, 50) | st.floats() | st.none(),
            st.integers(-1, 50),
            st.integers(-1, 60),
            st.integers(-1, 1),
        ),
        max_size=5,
    ),
    ns_per_token=st.integers(0, 10) | st.integers() | st.floats(),
    layout=st.sampled_from(["padded", "packed"]),
)
def test_any_samples_and_costs_are_planned_whole_or_refused_by_name(
    samples: list[SampleLength], ns_per_token: Any, layout: Any
) -> None:
    try:
        costs = TokenCosts(2, ns_per_token=ns_per_token)
        plan = replace(PLANNER, costs=costs, layout=layout).plan(samples)
    except DynaPipeError:
        return
    check_cover(plan.batch, samples)


def test_published_schedules_that_do_not_fit_say_what_would() -> None:
    planner = Planner(Topology(pp=2), TokenCosts(2, bytes_per_token=100), 1300, pad_multiple=1, schedule="gpipe")
    with pytest.raises(PlanError, match=r"gpipe needs \d+ B on pipeline rank 0 .*: use the adaptive schedule"):
        planner.plan([9, 11, 4, 9, 12, 10])
