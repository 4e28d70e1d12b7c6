"""Causal models of transformers, cut over pipeline stages, learn what the whole model learns one sample at a time."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any

import pytest
import torch

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.collate import collate
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.transformers_parts import parts_of_model
from dynapipe_ext.executor.stages.transformers_stage import TransformersStage
from dynapipe_ext.executor.transport.inline import InlineHub, InlineReductions
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.topology import Topology, placement_of
from tests.support.tiny_models import CONFIGS, one_by_one, samples_of, tiny_model

SAMPLES = samples_of((3, 12, 7, 20, 5, 9, 14, 4))
TOPOLOGIES = {
    "pp1": Topology(),
    "pp2": Topology(pp=2),
    "pp4": Topology(pp=4),
    "v": Topology(pp=2, placement=placement_of("v", 2)),
}


def plans_of(topology: Topology, layout: str, *, split: bool, recompute: str = "none", step: int = 0):
    """The plans of all ranks for one global batch."""
    lengths = [SampleLength(s.index, s.positions, target=s.target) for s in SAMPLES]
    costs, form = TokenCosts(topology.num_stages, overhead_ns=10**5), ActivationFormat(16, order="bsh")
    planner = Planner(
        topology, costs, 10**9, format=form, layout=layout, max_tokens=40, split_backward=split, recompute=recompute
    )
    return prove_step(planner, lengths, step=step).plans[0]


def batches_of(plan) -> list[dict[str, torch.Tensor]]:
    return [
        {k: torch.from_numpy(v) for k, v in collate(m, [SAMPLES[s.index] for s in m.samples]).items()}
        for m in plan.micro_batches
    ]


def learned(model: Any, topology: Topology, plans) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each rank's loss, and all gradients by the whole model's names; ranks are threads, each with a model of its own."""
    hub, parallel = InlineHub(), InlineReductions(topology)
    models = [copy.deepcopy(model) for _ in range(topology.pp)]
    losses: dict[int, float] = {}
    gradients: dict[str, torch.Tensor] = {}

    def rank(number: int) -> None:
        parts = parts_of_model(models[number], topology, number)
        executor = PipelineExecutor(TransformersStage(parts, parallel=parallel), hub.transport(number))
        losses[number] = executor.execute(plans[number], batches_of(plans[number]))
        for part in parts:
            for name, weight in part.model.named_parameters():
                if weight.grad is not None:
                    assert torch.equal(gradients.setdefault(name, weight.grad), weight.grad), name

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(topology.pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [losses[number] for number in range(topology.pp)], gradients


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()), msg=name)


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
