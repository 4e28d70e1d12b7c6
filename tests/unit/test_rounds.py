"""Plans of interleaved stages are no slower than interleaved 1F1B of the same micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynapipe_ext.batch.topology import Topology, place_stages
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.evaluation.simulate import validate
from dynapipe_ext.schedules.planner import Planner

LLAMA = preset("llama-2-7b")


def planner(pp: int, stages: int, *, dp: int = 1, limit: float = 400e9, **rules: object) -> Planner:
    placed = Topology(tp=8, pp=pp, dp=dp, placement=place_stages("interleaved", pp, stages))
    topology = placed.with_layers(LLAMA.num_layers)
    costs = AnalyticCosts(LLAMA, topology, flops_per_s=400e12, sequence_parallel=True)
    return Planner(topology, costs, limit, recompute="none", max_tokens=4096, effort=200, **rules)


@pytest.mark.parametrize(("pp", "stages", "count"), [(8, 2, 8), (8, 4, 8), (4, 2, 16), (4, 4, 7), (2, 2, 5)])
def test_equal_micro_batches_take_no_longer_than_under_interleaved_1f1b(pp: int, stages: int, count: int) -> None:
    ours = planner(pp, stages)
    published = replace(ours, schedule="interleaved-1f1b")
    lengths = [4096] * count
    assert ours.plan(lengths).makespan_ns <= published.plan(lengths).makespan_ns


def test_replicas_of_unlike_micro_batches_keep_their_cuts_and_take_no_longer_either() -> None:
    ours = planner(4, 2, dp=2)
    lengths = [4096, 3000, 2000, 4000, 4096, 1000, 2500, 4096, 3500, 4096, 4000, 600, 4096, 4096, 2048, 4096]
    plan = ours.plan(lengths)
    assert plan.makespan_ns <= replace(ours, schedule="interleaved-1f1b").plan(lengths).makespan_ns
    assert sorted(s.index for m in plan.batch.micro_batches for s in m.samples) == list(range(len(lengths)))
    for replica, schedule in zip(plan.batch.replicas, plan.schedules, strict=True):
        validate(schedule, len(replica.micro_batches))


def test_rounds_that_do_not_fit_are_not_taken() -> None:
    """Interleaved 1F1B of these micro-batches exceeds a limit within which the search finds a plan."""
    lengths = [4096] * 16
    needed = replace(planner(4, 4), schedule="interleaved-1f1b").plan(lengths).peak_bytes
    tight = planner(4, 4, limit=needed - 1)
    with pytest.raises(PlanError):
        replace(tight, schedule="interleaved-1f1b").plan(lengths)
    assert tight.plan(lengths).peak_bytes < needed


def test_weight_gradients_of_their_own_are_left_to_the_search() -> None:
    plan = planner(4, 2, split_backward=True).plan([4096] * 8)
    assert plan.schedules[0].is_split
    assert plan.makespan_ns <= planner(4, 2).plan([4096] * 8).makespan_ns
