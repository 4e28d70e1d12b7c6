"""Plans for times that are not as predicted: from the flag to the order, and what they lose under other draws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.launch import cli
from dynapipe_ext.schedules.candidates import reorder_in_rounds
from dynapipe_ext.schedules.evaluation.simulate import (
    compute_makespan_ns,
    compute_mean_makespan_ns,
)
from dynapipe_ext.schedules.placements import PlacementSearch
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from tests.bench.noise import Noise, noisy_costs

LENGTHS = [int(n) for n in np.minimum(2048, np.random.default_rng(1).lognormal(5.0, 1.0, 120).astype(int) + 8)]
NOISE = 0.2


def planner(placement: tuple[int, ...] = (), **rules: Any) -> Planner:
    topology = Topology(pp=4, dp=2, placement=placement)
    stages = topology.num_stages
    costs = TokenCosts(stages, ns_per_token=18_000, ns_per_token_squared=2.0, overhead_ns=300_000, bytes_per_token=1000)
    needed: Any = {"format": ActivationFormat(4), "collectives": ReplicaCollectives()}
    return Planner(topology, costs, 1e9, **{"effort": 2000, **needed, **rules})


def seconds_under_noise(plan: StepPlan) -> float:
    """The mean step over draws that no search has seen."""
    priced = list(zip(plan.schedules, plan.costs, strict=True))
    return fmean(
        max(
            compute_makespan_ns(schedule, noisy_costs(costs, Noise(NOISE), seed=2 * seed + d, split=schedule.is_split))
            for d, (schedule, costs) in enumerate(priced)
        )
        for seed in range(30)
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("placement", [(), (0, 1, 2, 3, 3, 2, 1, 0)], ids=["linear", "v"])
def test_a_plan_for_noise_ends_earlier_under_draws_it_has_not_seen_and_hardly_later_without(
    placement: tuple[int, ...], split: bool
) -> None:
    plain = planner(placement, split_backward=split)
    plan, steady = plain.plan(LENGTHS), replace(plain, noise=NOISE).plan(LENGTHS)
    assert seconds_under_noise(steady) < 0.999 * seconds_under_noise(plan)
    assert steady.makespan_s < 1.004 * plan.makespan_s
    assert steady.mean_makespan_ns(NOISE) < plan.mean_makespan_ns(NOISE)
    assert plan.mean_makespan_ns(0.0) == plan.makespan_ns
    assert steady.lower_bound_s <= steady.makespan_s


def test_a_plan_for_noise_is_proven_and_made_again_by_its_description() -> None:
    asked = planner(split_backward=True, noise=NOISE, effort=300)
    proven = prove_step(asked, sample_lengths(LENGTHS), step=0)
    again = Planner.from_json(json.loads(json.dumps(asked.to_json())))
    assert again == asked
    assert prove_step(again, sample_lengths(LENGTHS), step=0).plans == proven.plans
    assert asked.plan(LENGTHS).schedules != replace(asked, noise=0.0).plan(LENGTHS).schedules


def test_pairs_of_draws_are_as_far_above_as_below_the_predicted_times() -> None:
    """So that they cancel out on one rank, which never waits; among several the mean step is later, as it is convex."""
    for split in (False, True):
        for asked, waits in ((planner(split_backward=split), True), (Planner(Topology(), TokenCosts(1), 1e9), False)):
            plan = asked.plan(LENGTHS)
            for schedule, costs in zip(plan.schedules, plan.costs, strict=True):
                mean, predicted = (compute_mean_makespan_ns(schedule, costs, noise) for noise in (NOISE, 0.0))
                assert predicted == compute_makespan_ns(schedule, costs)
                assert 1.01 < mean / predicted < 1 + NOISE if waits else mean == predicted


def test_rounds_replace_an_order_only_where_they_are_better_in_the_mean() -> None:
    """Orders are those of searches that knew no noise, so that rounds are better in one way and worse in the other."""
    differ = 0
    for seed in range(8):
        lengths = np.random.default_rng(seed).integers(300, 500 + 50 * seed, 40).tolist()
        plan = planner((0, 1, 2, 3, 0, 1, 2, 3), effort=200, pad_multiple=1).plan(lengths)
        pairs = list(zip(plan.schedules, plan.costs, strict=True))
        chosen = {noise: [reorder_in_rounds(*pair, 10**9, noise) for pair in pairs] for noise in (0.0, NOISE)}
        differ += chosen[0.0] != chosen[NOISE]
        for noise, schedules in chosen.items():
            for before, after, costs in zip(plan.schedules, schedules, plan.costs, strict=True):
                means = [compute_mean_makespan_ns(one, costs, noise) for one in (after, before)]
                assert means[0] < means[1] or after == before
    assert differ


def test_placements_are_compared_by_the_mean_where_plans_are() -> None:
    asked, batch = planner(noise=NOISE, effort=100), sample_lengths(LENGTHS[:40])
    search = PlacementSearch(
        asked.topology,
        lambda topology: replace(asked, topology=topology),
        lambda one, samples: one.plan(samples),
        8,
        [batch],
    )
    (trial,) = search.list_trials(["linear"])
    own = replace(asked, topology=trial.topology).plan(batch)
    assert trial.makespan_s == own.mean_makespan_ns(NOISE) / 1e9 > own.makespan_s


def test_noise_is_refused_where_no_order_is_searched() -> None:
    with pytest.raises(ConfigError, match=r"noise is 0\.2 with schedule '1f1b', whose order is given"):
        planner(noise=NOISE, schedule="1f1b")
    forwards = planner(noise=NOISE).for_forwards()
    assert forwards.noise == 0.0
    with pytest.raises(ConfigError, match=r"noise is 0\.2 but forward-only steps"):
        replace(forwards, noise=NOISE)


def test_the_flag_changes_the_order_that_plan_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, ranks = tmp_path / "lengths.txt", {}
    lengths.write_text("\n".join(map(str, LENGTHS)))
    asked = ["--lengths", str(lengths), "--pp", "4", "--tp", "1", "--dp", "1", "--effort", "300", "--split-backward"]
    for noise in ("0", "0.2"):
        path = tmp_path / f"plan-{noise}.json"
        assert cli.main(["plan", *asked, "--noise", noise, "--json", str(path)]) == 0
        assert cli.main(["check-plan", str(path), "--lengths", str(lengths)]) == 0
        ranks[noise] = json.loads(path.read_text())["replicas"]
    assert ranks["0"] != ranks["0.2"]
    capsys.readouterr()
    assert cli.main(["plan", *asked[:-1], "--noise", "0.2", "--forward-only"]) == 2
    assert "--noise has nothing to change in forwards alone" in capsys.readouterr().err
