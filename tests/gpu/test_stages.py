"""Stages of torch modules and of transformers models on a GPU, beside the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynapipe_ext.batch.document_attention import register_document_attention
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage
from dynapipe_ext.executor.transport.inline import InlineHub
from tests.support.tiny_models import VOCAB, one_by_one, tiny_model
from tests.support.tiny_steps import SAMPLES, batches_of, plans_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU alone")

KINDS = [("padded", False, "none"), ("packed", True, "none"), ("packed", False, "full"), ("packed", True, "stage")]


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    error = float((found.float().cpu() - expected).abs().max() / expected.abs().max())
    assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize(("layout", "split", "recompute"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2"])
def test_models_of_transformers_learn_what_they_learn_on_the_cpu(
    family: str, dtype: torch.dtype, layout: str, split: bool, recompute: str
) -> None:
    model = tiny_model(family)
    loss, gradients = one_by_one(model, SAMPLES)
    if family in ("llama", "qwen3"):
        model.set_attn_implementation(register_document_attention())
    model = model.to("cuda", dtype).train()
    model.zero_grad()
    (plan,) = plans_of(Topology(), layout, split=split, recompute=recompute)
    stage = TransformersStage(parts_of_model(model))
    found = PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches_of(plan))
    if dtype == torch.bfloat16:  # weights are large and scores sharp: rounding shows, a wrong mask by much more
        assert found == pytest.approx(loss, rel=0.1)
        own, wanted = (
            torch.cat([g.flatten().cpu().float() for g in one])
            for one in (
                [weight.grad for _, weight in model.named_parameters()],
                [gradients[n] for n, _ in model.named_parameters()],
            )
        )
        assert float(torch.cosine_similarity(own, wanted, dim=0)) > 0.95
        return
    assert found == pytest.approx(loss, rel=1e-3)
    for name, weight in model.named_parameters():
        assert_near(weight.grad, gradients[name], 1e-3, name)


def test_torch_modules_are_given_batches_on_their_device() -> None:
    def loss_sum(logits: Any, batch: Any) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return (losses * batch["loss_weights"].flatten()).sum()

    found = []
    (plan,) = plans_of(Topology(), "padded", split=True)
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 64), torch.nn.Linear(64, VOCAB)).to(device)
        loss = PipelineExecutor(TorchStage(model, loss_sum), InlineHub().transport(0)).execute(plan, batches_of(plan))
        found.append((loss, [weight.grad for weight in model.parameters()]))
    (expected, gradients), (loss, own) = found
    assert loss == pytest.approx(expected, rel=1e-5)
    for gradient, wanted in zip(own, gradients, strict=True):
        assert_near(gradient, wanted, 1e-5, "gradient")
