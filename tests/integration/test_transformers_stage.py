"""Causal models of transformers, cut over pipeline stages, learn what the whole model learns one sample at a time."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.stages.accumulator import ExactAccumulator
from dynapipe_ext.executor.stages.split_linear import trained_share
from dynapipe_ext.executor.stages.transformers_parts import parts_of_model
from dynapipe_ext.executor.stages.transformers_stage import TransformersStage
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.packing.attention import register_document_attention
from dynapipe_ext.topology import Topology, placement_of
from tests.support.tiny_models import CONFIGS, one_by_one, tiny_model
from tests.support.tiny_steps import SAMPLES, assert_same, batches_of, learned, plans_of

TOPOLOGIES = {
    "pp1": Topology(),
    "pp2": Topology(pp=2),
    "pp4": Topology(pp=4),
    "v": Topology(pp=2, placement=placement_of("v", 2)),
}


# Every family under every topology; layouts and kinds of backward take turns, so that all pairs occur.
CASES = [
    (family, topology, ("padded", "packed")[(n + t) % 2], bool((n // 2 + t // 2) % 2))
    for (n, family), (t, topology) in itertools.product(enumerate(CONFIGS), enumerate(TOPOLOGIES))
]


@pytest.mark.parametrize(("family", "topology", "layout", "split"), CASES)
def test_losses_and_gradients_are_those_of_the_whole_model(family, topology, layout, split):
    model = tiny_model(family)
    loss, gradients = one_by_one(model, SAMPLES)
    place = TOPOLOGIES[topology]
    losses, found = learned(model, place, plans_of(place, layout, split=split))
    assert losses == pytest.approx([loss] * place.pp, rel=1e-5)
    assert_same(found, gradients)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_kernel_that_runs_documents_one_by_one_learns_the_same(layout):
    model = tiny_model("qwen2")
    loss, gradients = one_by_one(model, SAMPLES)
    model.set_attn_implementation(register_document_attention())
    losses, found = learned(model, TOPOLOGIES["pp2"], plans_of(TOPOLOGIES["pp2"], layout, split=False))
    assert losses == pytest.approx([loss] * 2, rel=1e-5)
    assert_same(found, gradients)


class Adapter(torch.nn.Module):
    """A low-rank adapter beside a frozen linear layer, as peft makes them."""

    def __init__(self, base_layer: torch.nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted(family: str) -> Any:
    """A tiny model that is frozen but for adapters of two layers in each block."""
    model = tiny_model(family).requires_grad_(False)
    for block in model.model.layers:
        block.self_attn.q_proj = Adapter(block.self_attn.q_proj)
        block.mlp.down_proj = Adapter(block.mlp.down_proj)
    return model


@pytest.mark.parametrize(("topology", "split"), [("pp1", True), ("pp2", False), ("v", True)])
def test_adapters_learn_what_they_learn_in_the_whole_model_and_frozen_weights_nothing(topology, split):
    model = adapted("gemma2")
    loss, gradients = one_by_one(model, SAMPLES)
    assert len(gradients) == 4 * 2 * 2
    place = TOPOLOGIES[topology]
    losses, found = learned(model, place, plans_of(place, "packed", split=split))
    assert losses == pytest.approx([loss] * place.pp, rel=1e-5)
    assert_same(found, gradients)
    (part,) = parts_of_model(model)
    assert 0 < trained_share(part) < 0.3


def test_layers_that_are_recomputed_draw_and_learn_the_same_and_keep_less():
    model = tiny_model("phi").train()
    for layer in model.model.layers:
        layer.resid_dropout.p = 0.2
    found, kept = [], []
    for recompute, split in (("none", False), ("full", False), ("selective", True)):
        own = copy.deepcopy(model)
        (plan,) = plans_of(Topology(), "padded", split=split, recompute=recompute)
        saved = Counted()
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
            loss = PipelineExecutor(TransformersStage(parts_of_model(own)), InlineHub().transport(0)).execute(
                plan, batches_of(plan)
            )
        found.append((loss, {name: weight.grad for name, weight in own.named_parameters()}))
        kept.append(saved.num_bytes)
    assert found[0][0] == found[1][0] == found[2][0] != pytest.approx(one_by_one(model.eval(), SAMPLES)[0], rel=1e-4)
    for _, gradients in found[1:]:
        assert_same(gradients, found[0][1])
    assert kept[1] < kept[0] / 1.5


class Counted:
    num_bytes = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.num_bytes += x.nbytes
        return x


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma3", "phi"])
def test_exact_sums_of_the_same_micro_batches_have_the_same_bits_on_every_placement(family):
    """Tied ends lie on one rank, on two, or on one rank in two stages; phi's are not tied."""
    model, found, cuts = tiny_model(family), [], set()
    for split, place in zip((False, True, False, True), TOPOLOGIES.values(), strict=True):
        plans = plans_of(place, "packed", split=split, rule="packed-balanced")
        cuts.add(frozenset(plans[0].micro_batches))
        found.append(learned(model, place, plans, accumulator=ExactAccumulator))
    assert len(cuts) == 1
    for losses, gradients in found:
        assert set(losses) == set(found[0][0])
        assert [name for name, gradient in found[0][1].items() if not torch.equal(gradient, gradients[name])] == []
