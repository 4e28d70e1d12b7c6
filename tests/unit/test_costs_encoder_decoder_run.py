"""Costs of an encoder-decoder in a run: what they add to the count, and what they offer a planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of, configured_format, topology_of, variants
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig

T5 = Architecture.t5(
    num_layers=4, num_decoder_layers=4, hidden_size=64, num_heads=4, ffn_hidden_size=128, gated_mlp=True,
    vocab_size=512, max_seq_len=128, tied_embeddings=True,
)  # fmt: skip
COSTS = AnalyticCosts(overhead_ns=0, architecture=T5, topology=Topology(pp=4), flops_per_s=1e12)
PAIRS = tuple(SampleLength(i, 20 + i, 5 + i, 5 + i) for i in range(4))


def test_costs_cross_as_json_and_go_over_other_topologies() -> None:
    again = cost_model_from_json(cost_model_to_json(COSTS))
    assert again == COSTS
    assert again.fingerprint() == COSTS.fingerprint()
    moved, topology = COSTS.with_topology(Topology(tp=2, pp=2, layers_per_stage=(5, 3)))
    assert topology.layers_per_stage == (5, 3)
    assert moved.facts.activation_format == ActivationFormat(64, "bfloat16", first_decoder_stage=0)
    with pytest.raises(ConfigError, match="8 layers cannot fill 9 stages"):
        COSTS.with_topology(Topology(pp=9))
    with pytest.raises(ConfigError, match="ep is 2 but experts lie on replicas"):
        replace(COSTS, ep=2, topology=Topology(pp=4, dp=2))


def test_shapes_cost_what_micro_batches_of_them_do_and_never_without_a_decoder_side() -> None:
    micro_batch = MicroBatch((SampleLength(0, 24, 8, 8),) * 3, recompute="selective")
    one, shape = COSTS.evaluate([micro_batch]), COSTS.evaluate_shapes([3], [24], [8], "selective")
    for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes", "working_bytes", "transfer_bytes"):
        assert np.array_equal(getattr(one, name), getattr(shape, name)), name
    assert (COSTS.evaluate_shapes([3], [24], [0]).forward_ns == INFEASIBLE).all()


def test_dropout_and_what_w_waits_for_are_stored_but_not_where_all_is_recomputed() -> None:
    split = {"split_backward": True, "sequence_parallel": True}
    for more in ({"dropout": True}, {**split, "topology": Topology(tp=2, pp=4)}):
        less = {**more, "dropout": False, "split_backward": False}
        for kind, is_more in (("none", True), ("selective", True), ("full", False)):
            batch = [MicroBatch(PAIRS, recompute=kind)]
            with_it, without = (replace(COSTS, **one).evaluate(batch).stored_bytes for one in (more, less))
            assert (with_it > without).all() == is_more, (more, kind)
            assert (with_it >= without).all()


def test_ranks_hold_deterministic_modes_sums_of_gradients_whole() -> None:
    costs = replace(COSTS, topology=Topology(pp=4, dp=2), distributed_optimizer=True)
    more = replace(costs, exact_sums=True).states.device.total - costs.states.device.total
    assert more.tolist() == (8 * count_parameters(T5, costs.topology).total).tolist()


def test_a_run_of_its_own_sizes_plans_its_pairs_with_the_messages_of_its_border() -> None:
    model = {"num_layers": 2, "num_decoder_layers": 2, "tied_embeddings": False, "gated_mlp": True}
    config = TrainConfig.from_json({"topology": {"tp": 1, "pp": 4, "dp": 1}, "model": model})
    architecture = architecture_of(config, 300)
    assert (architecture.family, architecture.position, architecture.activation) == ("t5", "relative", "gelu_tanh")
    costs = analytic_costs(config, architecture, flops_per_s=1e11, overhead_ns=1000)
    form = configured_format(config)
    assert form.first_decoder_stage == 2
    assert form == costs.facts.activation_format
    planner = Planner(topology_of(config), costs, memory_limit_bytes=1e9, format=form, layout="packed", effort=0)
    assert {s.index for m in planner.plan(list(PAIRS)).batch.micro_batches for s in m.samples} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="would mix the inputs of an encoder-decoder: leave --compare out"):
        variants(config, compare=True)
