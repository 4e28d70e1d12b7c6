"""Cost files of every kind, laid out over the topology that is asked for, or refused by name."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.fitted import FittedCosts, fit_costs, observations
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch.job import analytic_costs, architecture_of, configured_costs, read_costs
from dynapipe_ext.launch.train import settle_costs
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import MicroBatch
from dynapipe_ext.schedules.judge.simulate import simulate
from dynapipe_ext.schedules.tables.one_f_one_b import one_f_one_b
from dynapipe_ext.topology import Topology

CONFIG = TrainConfig().with_values(topology={"tp": 2, "pp": 2, "dp": 2})
VOCABULARY = 256
COUNTED = analytic_costs(CONFIG, architecture_of(CONFIG, VOCABULARY), flops_per_s=1e12, overhead_ns=50_000)


def padded(rows: int, length: int) -> MicroBatch:
    return MicroBatch(tuple(SampleLength(i, length) for i in range(rows)))


def fitted(base: Any = COUNTED) -> FittedCosts:
    """Costs fitted to a step that took twice what the base says."""
    chance = random.Random(1)
    batch = [padded(chance.randint(1, 8), chance.randint(16, 1000)) for _ in range(30)]
    trace = simulate(one_f_one_b(2, len(batch)), COUNTED.evaluate(batch))
    slow = replace(
        trace, spans=tuple(replace(s, start_s=2 * s.start_s, end_s=2 * s.end_s) for s in trace.spans)
    ).with_shapes([(m.rows, m.encoder_len, 0) for m in batch])
    return fit_costs(observations(slow), base)


def written(folder: Path, costs: Any) -> Path:
    path = folder / "costs.json"
    path.write_text(json.dumps(cost_model_to_json(costs)))
    return path


def test_fitted_costs_are_read_as_they_were_written_with_the_topology_of_their_runs(tmp_path: Path) -> None:
    costs = fitted()
    read, topology = read_costs(written(tmp_path, costs), None)
    assert isinstance(read, FittedCosts)
    assert read.fingerprint() == costs.fingerprint()
    assert topology == Topology(tp=2, pp=2, dp=2, layers_per_stage=(2, 2))
    one = [padded(2, 300)]
    assert read.evaluate(one).forward_ns.tolist() == costs.evaluate(one).forward_ns.tolist()
    assert read.evaluate(one).forward_ns[0, 0] == pytest.approx(2 * COUNTED.evaluate(one).forward_ns[0, 0], rel=0.05)


def test_fitted_costs_go_over_other_numbers_of_replicas(tmp_path: Path) -> None:
    base = replace(COUNTED, distributed_optimizer=True)
    read, topology = read_costs(written(tmp_path, fitted(base)), Topology(tp=2, pp=2, dp=8))
    assert (topology.dp, topology.layers_per_stage) == (8, (2, 2))
    static = read.evaluate([padded(1, 64)]).static_bytes
    assert (static < base.static_bytes()).all()  # eight replicas share the optimizer's states that two did


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (Topology(tp=4, pp=2), "2 stages of 2, 2 layers on tp 4 x pp 2"),
        (Topology(tp=2, pp=4), "4 stages of 1, 1, 1, 1 layers on tp 2 x pp 4"),
        (Topology(tp=2, pp=2, layers_per_stage=(1, 3)), "2 stages of 1, 3 layers"),
    ],
    ids=["tp", "pp", "layers"],
)
def test_fitted_costs_of_other_stages_are_refused(tmp_path: Path, topology: Topology, words: str) -> None:
    path = written(tmp_path, fitted())
    with pytest.raises(ConfigError, match=f"fitted to runs of 2 stages of 2, 2 layers on tp 2 x pp 2 but {words}"):
        read_costs(path, topology)


def test_fitted_costs_over_token_costs_know_their_stages_alone(tmp_path: Path) -> None:
    path = written(tmp_path, fitted(TokenCosts(2)))
    assert read_costs(path, None)[1] == Topology(pp=2)
    assert read_costs(path, Topology(tp=4, pp=2))[1] == Topology(tp=4, pp=2)


def test_fitted_costs_without_a_base_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**cost_model_to_json(fitted()), "base": None}))
    with pytest.raises(DataError, match="base None, not a cost model: fit them again"):
        read_costs(path, None)


def test_a_job_takes_times_from_fitted_costs_and_widths_and_sharding_from_its_settings(tmp_path: Path) -> None:
    config = CONFIG.with_values(
        plan={"costs": str(written(tmp_path, fitted()))}, model={"dtype": "bfloat16"}, optimizer={"distributed": True}
    )
    costs = settle_costs(config, VOCABULARY)
    assert isinstance(costs, FittedCosts)
    assert isinstance(costs.base, AnalyticCosts)
    assert (costs.base.param_bytes, costs.base.distributed_optimizer) == (2, True)
    assert costs.fits == fitted().fits
    other = config.with_values(model={"hidden_size": 256})
    with pytest.raises(ConfigError, match="those of another model"):
        settle_costs(other, VOCABULARY)


def test_what_the_trainer_does_not_shard_is_not_counted_as_sharded() -> None:
    """ZeRO stages above 1 and expert parallelism are of other trainers, whatever a cost file says."""
    costs = configured_costs(CONFIG, replace(COUNTED, zero_stage=3))
    assert costs.static_bytes().tolist() == COUNTED.static_bytes().tolist()


@pytest.mark.parametrize(
    ("plan", "is_split"),
    [({}, False), ({"split_backward": True}, True), ({"schedule": "zb-h1"}, True), ({"schedule": "1f1b"}, False)],
    ids=["adaptive", "adaptive-split", "zb-h1", "1f1b"],
)
def test_bytes_that_wait_for_w_are_counted_where_backwards_are_split(plan: dict[str, Any], is_split: bool) -> None:
    config = CONFIG.with_values(plan=plan, topology={"sequence_parallel": True})
    one = [padded(1, 64)]
    stored = configured_costs(config, COUNTED).evaluate(one).stored_bytes
    plain = replace(configured_costs(config, COUNTED), split_backward=False).evaluate(one).stored_bytes
    assert bool((stored > plain).all()) == is_split
