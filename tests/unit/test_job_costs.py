"""Cost files of every kind, laid out over the topology that is asked for, or refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adjustments import FittedTimes, FrozenWeights, TimeCorrection, adjust
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json, read_cost_file
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.job.configured import (
    analytic_costs,
    architecture_of,
    configured_costs,
    make_planner,
    topology_of,
)
from dynapipe_ext.launch.job.run_costs import settle_costs
from dynapipe_ext.settings.train_config import TrainConfig

CONFIG = TrainConfig().with_values(topology={"tp": 2, "pp": 2, "dp": 2})
CONFIG_TOPOLOGY, VOCABULARY = topology_of(CONFIG), 256
COUNTED = analytic_costs(CONFIG, architecture_of(CONFIG, VOCABULARY), flops_per_s=1e12, overhead_ns=50_000)


def padded(rows: int, length: int) -> MicroBatch:
    return MicroBatch(tuple(SampleLength(i, length) for i in range(rows)))


def written(folder: Path, costs: Any) -> Path:
    path = folder / "costs.json"
    path.write_text(json.dumps(cost_model_to_json(costs)))
    return path


def measured_table(**changes: Any) -> CostTable:
    """Of CONFIG's model."""
    point = {name: {(1, 8): 1.0} for name in ("forward_ms", "backward_ms", "stored_mb", "peak_mb")}
    fields: dict[str, Any] = {
        "grids": {("none", kind): Grid.from_points(point) for kind in ("encoder", "postprocess")},
        "parameter_bytes": {"encoder": 4 * 50.0, "embedding": 4 * 7.0},
        "hidden_size": CONFIG.model.hidden_size,
        "num_layers": 4,
        "topology": replace(CONFIG_TOPOLOGY, layers_per_stage=()),
        "value_bytes": 4,
        "provenance": {"model": asdict(architecture_of(CONFIG, VOCABULARY))},
        "state_parts": (4.0, 0.0),
    }
    return CostTable(**fields | changes)


def test_costs_are_read_over_their_own_topology_or_the_one_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, COUNTED)
    assert read_cost_file(path).with_topology(None) == (COUNTED, COUNTED.topology)
    wider, topology = read_cost_file(path).with_topology(Topology(pp=4))
    assert (wider.num_stages, topology.layers_per_stage) == (4, (1, 1, 1, 1))


def test_a_file_that_holds_no_costs_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "dynapipe-plan/1"}')
    with pytest.raises(ConfigError, match=r"cost file .*plan\.json: cost model has kind None: expected analytic"):
        read_cost_file(tmp_path / "plan.json")


def test_token_costs_know_their_stages_alone(tmp_path: Path) -> None:
    path = written(tmp_path, TokenCosts(2))
    assert read_cost_file(path).with_topology(None)[1] == Topology(pp=2)
    assert read_cost_file(path).with_topology(Topology(tp=4, pp=2))[1] == Topology(tp=4, pp=2)


def test_a_job_takes_rates_from_its_cost_file_and_widths_and_sharding_from_its_settings(tmp_path: Path) -> None:
    config = CONFIG.with_values(
        plan={"costs": str(written(tmp_path, replace(COUNTED, flops_per_s=3e12)))},
        model={"dtype": "bfloat16"},
        optimizer={"distributed": True},
    )
    costs = settle_costs(config, VOCABULARY)
    assert isinstance(costs, AnalyticCosts)
    assert (costs.flops_per_s, costs.param_bytes, costs.distributed_optimizer) == (3e12, 2, True)
    other = config.with_values(model={"hidden_size": 256})
    with pytest.raises(ConfigError, match="those of another model"):
        settle_costs(other, VOCABULARY)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_run_has_fitted_to_a_file_of_costs_stays_where_it_resumes_with_that_file(
    frozen: bool, tmp_path: Path
) -> None:
    of_file = adjust(COUNTED, frozen=FrozenWeights((0.5,) * COUNTED.num_stages)) if frozen else COUNTED
    config = CONFIG.with_values(plan={"costs": str(written(tmp_path, of_file))})
    began = settle_costs(config, VOCABULARY)
    assert began == COUNTED  # what trains is said by the settings
    fit = FittedTimes(({"F": TimeCorrection(2.0)},) * COUNTED.num_stages)
    saved = adjust(of_file, fitted=fit)
    assert settle_costs(config, VOCABULARY, saved) == adjust(COUNTED, fitted=fit)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 2}, "num_layers 2, not 4"),
        ({"hidden_size": 64}, "hidden_size 64, not 128"),
        ({"value_bytes": 2}, "dtype bfloat16, not float32"),
        ({"ffn_hidden_size": 64}, "ffn_hidden_size 64, not 512"),
        ({"vocab_size": 128}, "vocab_size 128, not 256"),
        (
            {"state_parts": (2.0, 2.0)},
            "divides optimizer states over replicas and this run",
        ),
    ],
    ids=str,
)
def test_a_table_of_another_model_is_refused_before_it_plans_too_few_bytes(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = asdict(architecture_of(CONFIG, VOCABULARY))
    own = {name: value for name, value in changes.items() if name not in model or name in ("num_layers", "hidden_size")}
    table = measured_table(**own, provenance={"model": model | changes})
    for costs in (table, adjust(table, fitted=FittedTimes(({},) * table.num_stages))):
        config = CONFIG.with_values(plan={"costs": str(written(tmp_path, costs))})
        with pytest.raises(ConfigError, match=said):
            settle_costs(config, VOCABULARY)


@pytest.mark.parametrize("provenance", [{}, {"model": "gpt"}, measured_table().provenance], ids=["", "name", "sizes"])
def test_a_table_of_the_configured_model_is_taken(provenance: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIG.with_values(plan={"costs": str(written(tmp_path, measured_table(provenance=provenance)))})
    for vocabulary in (VOCABULARY, VOCABULARY - 100):  # a head that was measured larger counts too much, not too little
        assert settle_costs(config, vocabulary).num_stages == 2


def test_what_the_trainer_does_not_shard_is_not_counted_as_sharded() -> None:
    """ZeRO stages above 1 and expert parallelism are of other trainers, whatever a cost file says."""
    costs = configured_costs(CONFIG, replace(COUNTED, zero_stage=3))
    assert costs.evaluate_shapes([1], [1]).static_bytes.tolist() == COUNTED.states.device.total.tolist()


def test_plans_of_deterministic_mode_count_8_bytes_a_parameter_more() -> None:
    exact, pairs = {"optimizer": {"deterministic": True}}, CONFIG.with_values(model={"num_decoder_layers": 4})
    of_pairs = analytic_costs(pairs, architecture_of(pairs, VOCABULARY), flops_per_s=1e12, overhead_ns=0)
    table = measured_table()
    for config, costs, counted in (
        (CONFIG, COUNTED, count_parameters(COUNTED.architecture, CONFIG_TOPOLOGY).total),
        (CONFIG, table, [2 * 50 + 7, 2 * 50]),
        (
            pairs.with_values(plan={"recompute": "none"}),
            of_pairs,
            count_parameters(of_pairs.architecture, topology_of(pairs)).total,
        ),
    ):
        found = make_planner(config.with_values(**exact), costs).costs
        with_sums, without = (one.evaluate_shapes([1], [1]).static_bytes for one in (found, costs))
        assert (with_sums - without).tolist() == [8 * int(number) for number in counted]
        assert cost_model_from_json(cost_model_to_json(found)).fingerprint() == found.fingerprint()
        assert make_planner(config, costs).costs == costs
    view, exactly = adjust(COUNTED, fitted=FittedTimes(({}, {}))), replace(COUNTED, exact_sums=True)
    assert make_planner(CONFIG.with_values(**exact), view).costs == replace(view, prices=exactly)
    assert "exact_sums" not in COUNTED.to_json()  # costs have the fingerprint of before where they are the same


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


def test_rows_that_a_published_model_has_too_few_positions_for_are_refused_with_what_works(tmp_path: Path) -> None:
    raw = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 20}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = CONFIG.with_values(model={"architecture": str(tmp_path)}, plan={"pad_multiple": 8})
    with pytest.raises(ConfigError, match=r"to 24 positions of which only 20 are learned: make max_seq_len 16, or pad"):
        topology_of(config)
    topology_of(config.with_values(model={"max_seq_len": 16}))
    with pytest.raises(ConfigError, match=r"to 32 positions of which only 20 are learned: make pad_multiple 20"):
        topology_of(config.with_values(plan={"pad_multiple": 32}))
    topology_of(config.with_values(plan={"pad_multiple": 20}))


def test_what_dropout_keeps_is_counted_if_it_is_set_whatever_the_configuration_says(tmp_path: Path) -> None:
    counted = {}
    for said, rate in ((0.1, 0.0), (0.0, 0.0), (0.0, 0.1)):
        raw = {"model_type": "t5", "is_encoder_decoder": True, "num_layers": 2, "vocab_size": 61, "dropout_rate": said}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        model = {"architecture": str(tmp_path), "backend": "transformers", "dropout": rate}
        config = TrainConfig().with_values(model=model, topology={"tp": 1, "pp": 1, "dp": 1})
        costs = analytic_costs(config, architecture_of(config, 61), flops_per_s=1e12, overhead_ns=0)
        pair = MicroBatch((SampleLength(0, 64, 64, 64),))
        counted[said, rate] = int(costs.evaluate([pair]).stored_bytes[0, 0])
    assert counted[0.1, 0.0] == counted[0.0, 0.0]
    assert counted[0.0, 0.1] > 1.2 * counted[0.0, 0.0]
