"""Placements of stages on ranks by name, and the search for the best one with the best layers on every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import SampleLength, sample_lengths
from dynapipe_ext.batch.topology import PlacementName, Topology, place_stages
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.placements import PlacementSearch, PlacementTrial, sample_batches
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan

NUM_LAYERS = 16
EFFORT = 60
SHAPE = Architecture.gpt(
    num_layers=NUM_LAYERS,
    hidden_size=256,
    num_heads=8,
    num_query_groups=8,
    ffn_hidden_size=1024,
    gated_mlp=False,
    tied_embeddings=True,
    vocab_size=16_384,  # its head costs as much as some layers
    max_seq_len=2048,
)
BASE = Topology(pp=4, dp=1)
NAMES: tuple[PlacementName, ...] = ("linear", "interleaved", "v")


def planned(planner: Planner, samples: Sequence[SampleLength]) -> StepPlan:
    return planner.plan(samples)


def search(limit_bytes: float = 60e9, architecture: Architecture = SHAPE, *, halves: bool = False) -> PlacementSearch:
    rng = np.random.default_rng(0)
    batches = [sample_lengths(rng.integers(20, 900, 16).tolist())]

    def planner_over(topology: Topology) -> Planner:
        costs = AnalyticCosts(architecture, topology, flops_per_s=1e12, overhead_ns=2000)
        return Planner(topology, costs, limit_bytes, effort=EFFORT)

    return PlacementSearch(BASE, planner_over, planned, architecture.num_layers, batches, halves)


@pytest.fixture(scope="module")
def trials() -> tuple[PlacementTrial, ...]:
    return search().list_trials(NAMES)


@pytest.mark.parametrize(
    ("name", "stages", "ranks"),
    [
        ("linear", None, (0, 1, 2)),
        ("interleaved", 3, (0, 1, 2, 0, 1, 2, 0, 1, 2)),
        ("v", None, (0, 1, 2, 2, 1, 0)),
        ("v", 4, (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)),
    ],
)
def test_a_named_placement_is_this_and_its_name_comes_back(
    name: PlacementName, stages: int | None, ranks: tuple[int, ...]
) -> None:
    assert place_stages(name, 3, stages) == ranks
    assert Topology(pp=3, placement=ranks).placement_name.startswith(name)


@pytest.mark.parametrize(
    ("name", "pp", "stages", "says"),
    [
        ("v", 4, 3, "even number"),
        ("v", 1, 2, "2 ranks or more"),
        ("interleaved", 4, 1, "interleaved 2 or more"),
        ("linear", 4, 2, "linear has 1 stage"),
        ("w", 4, None, "must be one of linear, interleaved, v"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(name: PlacementName, pp: int, stages: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place_stages(name, pp, stages)


def test_the_best_placement_comes_first_and_all_layers_lie_somewhere(trials: tuple[PlacementTrial, ...]) -> None:
    spans = [trial.makespan_s for trial in trials]
    assert spans == sorted(spans)
    assert {trial.topology.placement_name.split(",")[0] for trial in trials} == set(NAMES)
    for trial in trials:
        assert sum(trial.topology.layers_per_stage) == NUM_LAYERS
        assert min(trial.topology.layers_per_stage) >= 1


def test_a_trial_says_what_a_planner_of_its_topology_plans(trials: tuple[PlacementTrial, ...]) -> None:
    tried = search()
    best = trials[0]
    planner = tried.planner_over(best.topology)
    assert best.makespan_s == sum(planner.plan(samples).makespan_s for samples in tried.batches)


def test_the_stage_of_an_expensive_head_gets_fewer_layers_and_steps_get_shorter(
    trials: tuple[PlacementTrial, ...],
) -> None:
    linear = next(trial for trial in trials if trial.topology.placement_name == "linear")
    assert linear.topology.layers_per_stage[-1] < NUM_LAYERS // 4
    tried = search()
    even = tried.planner_over(BASE.with_layers(NUM_LAYERS))
    assert linear.makespan_s < 0.97 * sum(even.plan(samples).makespan_s for samples in tried.batches)


def test_half_layers_make_stages_more_even_where_they_may(trials: tuple[PlacementTrial, ...]) -> None:
    whole = next(trial for trial in trials if trial.topology.placement_name == "linear")
    (half,) = search(halves=True).list_trials(("linear",))
    assert half.topology.has_half_layers
    assert not any(trial.topology.has_half_layers for trial in trials)
    assert sum(half.topology.layers_per_stage) == NUM_LAYERS
    assert half.makespan_s < 0.99 * whole.makespan_s


def test_layers_that_only_looked_best_with_little_effort_leave_the_place_to_even_ones() -> None:
    tried, even = search(), BASE.with_layers(NUM_LAYERS)

    def step_of(planner: Planner, samples: Sequence[SampleLength]) -> StepPlan:
        if planner.effort == EFFORT and planner.topology != even:
            raise PlanError("this one only looked best")
        return planner.plan(samples)

    (best,), (unspoilt,) = replace(tried, step_of=step_of).list_trials(("linear",)), tried.list_trials(("linear",))
    assert best.topology == even != unspoilt.topology


def test_few_micro_batches_get_four_stages_a_rank_where_that_is_faster_and_many_do_not_try() -> None:
    light_head = replace(SHAPE, vocab_size=512)
    few = replace(search(architecture=light_head), batches=[sample_lengths([900] * 3)])
    named = {trial.topology.num_stages // BASE.pp: trial.makespan_s for trial in reversed(few.list_trials(NAMES))}
    assert set(named) == {1, 2, 4}
    assert named[4] < 0.97 * named[2]
    many = replace(search(architecture=light_head), batches=[sample_lengths([900] * 48)])
    assert max(trial.topology.num_stages for trial in many.list_trials(NAMES)) == 8


def test_placements_that_the_layers_cannot_fill_are_left_out_and_none_at_all_is_refused() -> None:
    few = search(architecture=replace(SHAPE, num_layers=4))
    (only,) = few.list_trials(NAMES)
    assert only.topology.placement_name == "linear"
    with pytest.raises(ConfigError, match="4 layers cannot fill 8 stages"):
        few.list_trials(("v",))


def test_a_limit_that_no_placement_keeps_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="no placement of stages has a plan: "):
        search(limit_bytes=1e6).list_trials(NAMES)


def test_sampled_batches_are_spread_over_the_epoch() -> None:
    assert sample_batches(1) == (0,)
    assert sample_batches(10) == (0, 3, 6)


def test_a_topology_takes_lists_and_arrays_of_numpy() -> None:
    topology = Topology(pp=np.int64(2), placement=[0, 1], layers_per_stage=np.array([3, 2.5]))  # type: ignore[arg-type]
    assert topology == Topology(pp=2, placement=(0, 1), layers_per_stage=(3, 2.5))
    assert hash(topology) == hash(Topology(pp=2, placement=(0, 1), layers_per_stage=(3, 2.5)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"placement": 3}, "placement is 3 but must be a list"),
        ({"placement": "01"}, "placement is '01' but must be a list"),
        ({"layers_per_stage": ("a", 1)}, r"layers_per_stage is \('a', 1\) but must be a list, each a number"),
        ({"tp": 1.5}, "tp is 1.5 but must be an integer"),
        ({"dp": 0}, "dp is 0 but must be an integer of at least 1, and at most 1,048,576"),
        ({"dp": 1 << 21}, "dp is 2097152 but must be an integer of at least 1, and at most 1,048,576"),
    ],
)
def test_a_topology_of_other_values_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(**{"pp": 2, **values})
