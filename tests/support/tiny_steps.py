"""Steps of tiny transformers models whose ranks are threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import collate
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.chunk_runner import PlainAccumulator
from dynapipe_ext.executor.stages.torch_stage import MakeAccumulator
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage
from dynapipe_ext.executor.transport.inline import InlineHub, InlineReductions
from dynapipe_ext.schedules.planner import Planner
from tests.support.limits import LIMIT_S
from tests.support.tiny_models import samples_of

SAMPLES = samples_of((3, 12, 7, 20, 5, 9, 14, 4))


def plans_of(topology: Topology, layout: str, *, split: bool, recompute: str = "none", step: int = 0, **options: Any):
    """The plans of all ranks for one global batch."""
    lengths = [SampleLength(s.index, s.positions, target=s.target) for s in SAMPLES]
    costs, form = TokenCosts(topology.num_stages, overhead_ns=10**5), ActivationFormat(16, order="bsh")
    options |= {"layout": layout, "max_tokens": 40, "split_backward": split, "recompute": recompute}
    planner = Planner(topology, costs, 10**9, format=form, **options)
    return prove_step(planner, lengths, step=step).plans[0]


def batches_of(plan) -> list[dict[str, torch.Tensor]]:
    return [
        {k: torch.from_numpy(v) for k, v in collate(m, [SAMPLES[s.index] for s in m.samples]).items()}
        for m in plan.micro_batches
    ]


def learned(
    model: Any,
    topology: Topology,
    plans,
    *,
    batches: Callable[[Any], list[Any]] = batches_of,
    accumulator: MakeAccumulator = PlainAccumulator,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each rank's loss, and all gradients by the whole model's names; ranks are threads with a model each."""
    hub, parallel = InlineHub(), InlineReductions(topology)
    models = [copy.deepcopy(model) for _ in range(topology.pp)]
    losses: dict[int, float] = {}
    gradients: dict[str, torch.Tensor] = {}

    def rank(number: int) -> None:
        parts = parts_of_model(models[number], topology, number, **options)
        executor = PipelineExecutor(
            TransformersStage(parts, accumulator=accumulator, parallel=parallel), hub.transport(number)
        )
        losses[number] = executor.execute(plans[number], batches(plans[number]))
        for part in parts:
            for name, weight in part.model.named_parameters():
                if weight.grad is not None:
                    assert torch.equal(gradients.setdefault(name, weight.grad), weight.grad), name

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(topology.pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [losses[number] for number in range(topology.pp)], gradients


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        largest, said = float(gradient.abs().max()), partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * largest, msg=said)
