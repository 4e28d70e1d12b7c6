"""T5 of transformers, cut over pipeline stages, learns what the whole model learns one pair at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.costs.layers import first_decoder_stage, layers_of_stages
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.transformers_parts import parts_of_config, parts_of_folder, parts_of_model
from dynapipe_ext.executor.stages.transformers_saving import save_parts
from dynapipe_ext.executor.stages.transformers_stage import TransformersStage
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.packing.attention import register_document_attention
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.topology import Topology, placement_of
from tests.support.checkpoints import HIDDEN, tiny_variant
from tests.support.t5_ranks import NUM_PAIRS, length_of_pair, oracle_of, pair_tensors, pairs
from tests.support.tiny_steps import assert_same, learned

VARIANTS = ("t5", "t5-v1.1")  # tied and rectified, untied and gated
TOPOLOGIES = {
    "pp1": Topology(),
    "pp2 within the encoder": Topology(pp=2, layers_per_stage=(1, 4)),
    "pp2 between": Topology(pp=2, layers_per_stage=(3, 2)),
    "pp2 within the decoder": Topology(pp=2, layers_per_stage=(4, 1)),
    "pp4": Topology(pp=4),
    "v": Topology(pp=2, placement=placement_of("v", 2)),
    "interleaved": Topology(pp=2, placement=placement_of("interleaved", 2)),
}


def t5(variant: str, **changes: Any) -> Any:
    """Three layers that encode and two that decode."""
    return tiny_variant(variant, **{"num_layers": 3, "num_decoder_layers": 2} | changes)


def plans_of(topology: Topology, *, split: bool = False, **options: Any) -> Any:
    layers = layers_of_stages(3, 5, topology.num_stages, topology.layers_per_stage)
    form = ActivationFormat(HIDDEN, order="bsh", first_decoder_stage=first_decoder_stage(layers))
    options = {"layout": "padded", "max_tokens": 150, "split_backward": split, "pad_multiple": 4, "recompute": "none"} | options
    planner = Planner(topology, TokenCosts(topology.num_stages, overhead_ns=10**5), 10**9, format=form, **options)
    return prove_step(planner, [length_of_pair(pair) for pair in pairs()], step=0).plans[0]


def batches_of(plan: Any) -> list[Any]:
    return [pair_tensors(m, "tokens") for m in plan.micro_batches]


CASES = [(v, place, bool((n + t) % 2)) for n, v in enumerate(VARIANTS) for t, place in enumerate(TOPOLOGIES)]


@pytest.mark.parametrize(("variant", "topology", "split"), CASES)
def test_losses_and_gradients_are_those_of_the_whole_model(variant, topology, split):
    model, place = t5(variant), TOPOLOGIES[topology]
    loss, gradients = oracle_of(model, "tokens")
    plans = plans_of(place, split=split)
    assert 1 < len(plans[0].micro_batches) < NUM_PAIRS
    losses, found = learned(model, place, plans, batches=batches_of)
    assert losses == pytest.approx([loss] * place.pp, rel=1e-5)
    assert_same(found, gradients)
