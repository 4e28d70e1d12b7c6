"""Steps under schedules of a name, each on the placement that it needs: planned, proven, and refused elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology, place_stages
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns, compute_peak_bytes
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.published.by_name import PUBLISHED, make_published_schedule
from dynapipe_ext.schedules.published.cyclic import clustered_cyclic
from dynapipe_ext.settings.plan_rules import SPLIT_SCHEDULES, ScheduleName, own_placement
from dynapipe_ext.settings.train_config import TrainConfig

NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
LENGTHS = np.minimum(np.random.default_rng(5).lognormal(4, 1, 48), 700).astype(int).tolist()


def planner(schedule: ScheduleName, *, limit_bytes: float = 1e12, static_bytes: int = 0) -> Planner:
    """Of four ranks in two replicas; one stage a rank costs as much as two of half its layers."""
    name = own_placement(schedule)
    topology = Topology(pp=4, dp=2, placement=() if name == "linear" else place_stages(name, 4))
    half = topology.num_stages // 4
    costs = TokenCosts(
        topology.num_stages,
        ns_per_token=2000 // half,
        ns_per_token_squared=2 / half,
        overhead_ns=2000 // half,
        bytes_per_token=1000 // half,
        static_bytes=static_bytes // half,
        transfer_ns_per_token=5,
    )
    form, once = ActivationFormat(16), ReplicaCollectives()
    return Planner(topology, costs, limit_bytes, schedule=schedule, effort=50, format=form, collectives=once)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_under_every_name_is_proven_on_its_placement_and_any_process_makes_it_again(name: ScheduleName) -> None:
    made = planner(name)
    proven = prove_step(made, sample_lengths(LENGTHS), step=0)
    plan = proven.step_plan
    assert {schedule.stage_ranks for schedule in plan.schedules} == {made.topology.stage_ranks}
    assert all(schedule.is_split == (name in SPLIT_SCHEDULES) for schedule in plan.schedules)
    if name in PUBLISHED:
        counts = [len(replica.micro_batches) for replica in plan.batch.replicas]
        assert [one.ranks for one in plan.schedules] == [
            make_published_schedule(name, 4, count).ranks for count in counts
        ]
    again = prove_step(Planner.from_json(made.to_json()), sample_lengths(LENGTHS), step=0)
    assert again.plans == proven.plans


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpipe"])
def test_a_step_is_cut_until_it_fits_beside_the_static_bytes_of_all_stages_of_a_rank(name: ScheduleName) -> None:
    limit = 10_000_000 + 600_000  # less than each schedule takes with ample memory
    made = planner(name, limit_bytes=limit, static_bytes=10_000_000)
    plan = made.plan(LENGTHS)
    for schedule, costs in zip(plan.schedules, plan.costs, strict=True):
        assert max(compute_peak_bytes(schedule, costs)) <= limit
    roomy = replace(made, memory_limit_bytes=1e12).plan(LENGTHS)
    assert len(roomy.batch.micro_batches) < len(plan.batch.micro_batches)
    assert roomy.makespan_s < plan.makespan_s


def test_dynapipes_rule_and_order_make_its_plan() -> None:
    """Its split under its cyclic schedule, with the best of its injection orders of clusters."""
    made = replace(planner("cyclic", limit_bytes=20e6), split_policy="dynapipe")
    plan = made.plan(LENGTHS)
    for schedule, costs in zip(plan.schedules, plan.costs, strict=True):
        assert schedule == clustered_cyclic(costs, memory_limit_bytes=20_000_000)
        assert max(compute_peak_bytes(schedule, costs)) <= 20e6
    plain = replace(made, schedule="1f1b").plan(LENGTHS)
    assert [len(r.micro_batches) for r in plan.batch.replicas] == [len(r.micro_batches) for r in plain.batch.replicas]


def test_several_stages_a_rank_wait_less_than_one_at_equal_micro_batches() -> None:
    """Bubbles in the order of the papers: 1F1B, interleaved 1F1B, then V-Half and ZB-V."""
    spans = {}
    for name in ("1f1b", "interleaved-1f1b", "v-half", "zb-v"):
        made = planner(name)
        schedule = make_published_schedule(name, 4, 12)
        micro_batches = made.plan([100] * 24).batch.replicas[0].micro_batches[:1] * 12
        spans[name] = compute_makespan_ns(schedule, made.costs.evaluate(micro_batches))
    assert list(spans) == sorted(spans, key=lambda name: -spans[name])


@pytest.mark.parametrize(
    ("name", "placement", "says"),
    [
        ("zb-v", (), r"'zb-v' is for two stages a rank in a V, but the placement is \(0, 1, 2, 3\) \(linear\)"),
        ("v-half", (0, 1, 2, 3, 0, 1, 2, 3), r"\(interleaved, 2 stages a rank\): take placement 'v'"),
        ("zb-v", place_stages("v", 4, 4), r"two stages a rank in a V, but .*v, 4 stages a rank"),
        ("interleaved-1f1b", place_stages("v", 4), "take placement 'interleaved', or take the adaptive schedule"),
        ("cyclic", place_stages("v", 4), "'cyclic' is for one stage a rank"),
        ("zb-h1", (0, 1, 2, 3, 3), r"\(custom\): take placement 'linear'"),
    ],
)
def test_a_placement_that_a_schedule_does_not_have_is_refused(
    name: ScheduleName, placement: tuple[int, ...], says: str
) -> None:
    topology = Topology(pp=4, placement=placement)
    with pytest.raises(ConfigError, match=says):
        Planner(topology, TokenCosts(topology.num_stages), 1e12, schedule=name)


def test_interleaved_1f1b_takes_any_number_of_stages_a_rank() -> None:
    config = TrainConfig.from_json(
        {
            "topology": {"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [1] * 6},
            "model": {"num_layers": 6},
            "plan": {"schedule": "interleaved-1f1b"},
        }
    )
    topology = topology_of(config)
    assert topology.stage_ranks == (0, 1, 0, 1, 0, 1)
    plan = Planner(topology, TokenCosts(6), 1e12, schedule="interleaved-1f1b").plan(LENGTHS)
    count = len(plan.batch.replicas[0].micro_batches)
    assert plan.schedules == (make_published_schedule("interleaved-1f1b", 2, count, stages_per_rank=3),)


def test_the_plan_command_says_which_placement_a_schedule_brought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, LENGTHS)))
    arguments = ["plan", "--lengths", str(lengths), "--pp", "2", "--batch-size", "20", "--schedule"]
    assert cli.main([*arguments, "zb-v"]) == 0
    assert "placement: v, 2 stages a rank, which schedule zb-v needs" in capsys.readouterr().out
    assert cli.main([*arguments, "zb-v", "--placement", "v"]) == 0
    assert "placement: " not in capsys.readouterr().out
