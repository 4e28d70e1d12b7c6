"""Causal models of transformers, cut over pipeline stages, learn what the whole model learns one sample at a time."""

from __future__ import annotations

import copy
import itertools
from random import Random
from typing import Any

import pytest
import torch

from dynapipe_ext.batch.document_attention import register_document_attention
from dynapipe_ext.batch.topology import ActivationFormat, Topology, place_stages
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import lower
from dynapipe_ext.executor.stages.accumulator import ExactAccumulator
from dynapipe_ext.executor.stages.position_losses import weighted_sum
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.transformers.stage import LossOfLogits, TransformersStage
from dynapipe_ext.executor.transport.inline import InlineHub
from tests.support.pieces import hand_made, pieced_replicas, random_legal_schedule
from tests.support.tiny_models import CONFIGS, one_by_one, tiny_model
from tests.support.tiny_steps import SAMPLES, assert_same, batches_of, learned, plans_of

TOPOLOGIES = {
    "pp1": Topology(),
    "pp2": Topology(pp=2),
    "pp4": Topology(pp=4),
    "v": Topology(pp=2, placement=place_stages("v", 2)),
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
def test_the_loss_of_a_run_is_made_of_each_position_s_negative_log_probability(layout):
    model = tiny_model("llama")
    seen: list[tuple[torch.Tensor, dict[str, Any]]] = []

    def doubled(losses: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        seen.append((losses.detach(), batch))
        return 2 * weighted_sum(losses, batch)

    plan = plans_of(Topology(), layout, split=False)[0]
    losses = []
    for loss in (LossOfLogits(), LossOfLogits(doubled)):
        stage = TransformersStage(parts_of_model(copy.deepcopy(model)), loss=loss)
        losses.append(PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches_of(plan)))
    assert losses[1] == 2 * losses[0]
    assert all(of_position.shape == batch["labels"].shape for of_position, batch in seen)
    total = sum(float((of_position * batch["loss_weights"]).sum()) for of_position, batch in seen)
    assert total / plan.loss_divisor == pytest.approx(one_by_one(model, SAMPLES)[0], rel=1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_kernel_that_runs_documents_one_by_one_learns_the_same(layout):
    model = tiny_model("qwen2")
    loss, gradients = one_by_one(model, SAMPLES)
    model.set_attn_implementation(register_document_attention())
    losses, found = learned(model, TOPOLOGIES["pp2"], plans_of(TOPOLOGIES["pp2"], layout, split=False))
    assert losses == pytest.approx([loss] * 2, rel=1e-5)
    assert_same(found, gradients)


@pytest.mark.parametrize(
    ("family", "topology", "recompute", "split"),
    [
        ("llama", "pp2", "none", True),
        ("gpt2", "v", "full", False),
        ("qwen3", "pp1", "selective", False),
        ("llama", "v", "stage", True),
    ],
)
def test_cut_samples_learn_what_whole_ones_learn(family, topology, recompute, split):
    """Rows mix a piece and whole documents, orders are random; a piece that was given no earlier keys would show."""
    model, place, random = tiny_model(family).train(), TOPOLOGIES[topology], Random(family)
    loss, gradients = one_by_one(model, SAMPLES)
    model.set_attn_implementation(register_document_attention())
    (rows,) = replicas = pieced_replicas(SAMPLES, 1, recompute, random, cut_from=9)
    assert sum(row.attention == "carried" for row in rows) > 6
    schedule = random_legal_schedule(place, rows, random, split=split)
    (plans,) = lower(hand_made(place, replicas, [schedule]), ActivationFormat(16, order="bsh"))
    losses, found = learned(model, place, plans)
    assert losses == pytest.approx([loss] * place.pp, rel=1e-6)
    assert_same(found, gradients)


def test_pieces_are_refused_where_attention_is_not_ours_or_has_windows():
    random = Random(0)
    (rows,) = replicas = pieced_replicas(SAMPLES, 1, "none", random)
    schedule = random_legal_schedule(Topology(), rows, random)
    ((plan,),) = lower(hand_made(Topology(), replicas, [schedule]), ActivationFormat(16, order="bsh"))
    windowed = tiny_model("mistral")
    windowed.set_attn_implementation(register_document_attention())
    linear = TorchStage(torch.nn.Linear(1, 1), lambda output, _: output.sum(), restarts_attention=True)
    for stage, says in (
        (TransformersStage(parts_of_model(tiny_model("llama"))), "attends by sdpa, which knows no keys of earlier"),
        (TransformersStage(parts_of_model(windowed)), r"MistralAttention attends in windows \(5\)"),
        (linear, "a piece of sample .*, whose attention to earlier pieces torch modules do not have"),
    ):
        with pytest.raises(ConfigError, match=says):
            PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches_of(plan))


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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
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


def test_layers_and_stages_that_are_recomputed_draw_and_learn_the_same_and_layers_keep_less():
    model = tiny_model("phi").train()
    for layer in model.model.layers:
        layer.resid_dropout.p = 0.2
    found, kept = [], []
    for recompute, split in (("none", False), ("full", False), ("selective", True), ("stage", False)):
        own = copy.deepcopy(model)
        (plan,) = plans_of(Topology(), "padded", split=split, recompute=recompute)
        saved = Counted()
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
            loss = PipelineExecutor(TransformersStage(parts_of_model(own)), InlineHub().transport(0)).execute(
                plan, batches_of(plan)
            )
        found.append((loss, {name: weight.grad for name, weight in own.named_parameters()}))
        kept.append(saved.num_bytes)
    assert len({loss for loss, _ in found}) == 1
    assert found[0][0] != pytest.approx(one_by_one(model.eval(), SAMPLES)[0], rel=1e-4)
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
        plans = plans_of(place, "packed", split=split, split_policy="packed-balanced")
        cuts.add(frozenset(plans[0].micro_batches))
        found.append(learned(model, place, plans, accumulator=ExactAccumulator))
    assert len(cuts) == 1
    for losses, gradients in found:
        assert set(losses) == set(found[0][0])
        assert [name for name, gradient in found[0][1].items() if not torch.equal(gradient, gradients[name])] == []
