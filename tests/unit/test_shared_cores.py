"""Ranks that share cores: a step takes its work over the cores, so the plan of least work is the one to take."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.schedules.evaluation.simulate import SharedCores
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan

COSTS = TokenCosts(2, overhead_ns=40_000)
TOPOLOGY = Topology(tp=2, pp=2, dp=2)
LENGTHS = [12, 7, 350, 41, 9, 1024, 88, 16, 240, 5, 61, 130]


def planner(num_cores: int | None, **options: object) -> Planner:
    return Planner(TOPOLOGY, COSTS, 1e9, num_cores=num_cores, pad_multiple=1, **options)  # type: ignore[arg-type]


def work_ns(plan: StepPlan) -> int:
    return sum(int((costs.forward_ns + costs.backward_ns).sum()) for costs in plan.costs)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=8))
def test_no_cut_of_the_sorted_samples_has_much_less_work(lengths: list[int]) -> None:
    samples = sorted(sample_lengths(lengths), key=lambda sample: sample.encoder)
    least = min(
        int((priced.forward_ns + priced.backward_ns).sum())
        for num_cuts in range(1, len(samples))  # every replica has a micro-batch
        for cuts in combinations(range(1, len(samples)), num_cuts)
        for parts in ([MicroBatch(tuple(samples[a:b])) for a, b in pairwise((0, *cuts, len(samples)))],)
        for priced in (COSTS.evaluate([replace(m, pad_multiple=1) for m in parts]),)
    )
    assert work_ns(planner(1).plan(lengths)) <= 1.05 * least


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_shared_cores_take_less_work_and_a_core_a_rank_changes_nothing(layout: str) -> None:
    lengths = [90, 130, 60] * 20
    alone, shared = planner(None, layout=layout).plan(lengths), planner(2, layout=layout).plan(lengths)
    assert planner(TOPOLOGY.world_size, layout=layout).plan(lengths) == alone
    assert work_ns(shared) < work_ns(alone)
    assert len(shared.batch.micro_batches) < len(alone.batch.micro_batches)


@pytest.mark.parametrize("schedule", ["adaptive", "1f1b"])
def test_the_prediction_is_that_of_the_shared_timeline_and_never_under_the_work(schedule: str) -> None:
    made = planner(2, schedule=schedule)
    plan = made.plan(LENGTHS)
    assert [round(trace.makespan_s * 1e9) for trace in plan.traces] == [p.makespan_ns for p in plan.predictions]
    floor_ns = SharedCores(2, tp=2).floor_ns(work_ns(plan))
    assert floor_ns <= round(plan.makespan_s * 1e9) <= 2 * floor_ns
    assert Planner.from_json(made.to_json()).plan(LENGTHS) == plan


def test_what_shared_cores_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match=r"share 2 cores, but the format's figures .* plan without num_cores"):
        plan_json(planner(2).plan(LENGTHS), TOPOLOGY)
    for wrong in (0, 2.0, True):
        with pytest.raises(ConfigError, match=r"num_cores is .* but must be a number of at least 1, or None"):
            planner(wrong)  # type: ignore[arg-type]
