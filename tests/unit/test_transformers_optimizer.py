"""One optimizer for parts of any width: masters, the guard, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.stages.accumulator import Float32Accumulator
from dynapipe_ext.executor.stages.chunk_runner import PlainAccumulator
from dynapipe_ext.executor.stages.guarded_optimizer import make_learning_rates
from dynapipe_ext.executor.stages.transformers.optimizer import TransformersOptimizer
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage
from dynapipe_ext.executor.training_loop import ExecutedStep, Refused
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.settings.tables import OptimizerSettings
from tests.support.tiny_models import tiny_model
from tests.support.tiny_steps import batches_of, plans_of

CONSTANT = {"lr_schedule": "constant", "min_lr": 0.0, "warmup_steps": 0}


def optimizer_of(parts, **settings) -> TransformersOptimizer:
    return TransformersOptimizer(parts, OptimizerSettings(**CONSTANT | settings), num_steps=100)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_a_warm_up_rises_as_it_is_said_also_where_the_run_ends_before_it(schedule):
    found = {}
    for num_steps in (3, 100):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
        settings = OptimizerSettings(lr=0.5, min_lr=0.0, lr_schedule=schedule, warmup_steps=5)
        rates = make_learning_rates(optimizer, settings, num_steps=num_steps)
        found[num_steps] = []
        for _ in range(3):
            found[num_steps].append(optimizer.param_groups[0]["lr"])
            rates.step(1)
    assert found[3] == found[100] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("split", [False, True])
def test_gradients_of_16_bit_weights_add_up_in_32(split):
    (plan,) = plans_of(Topology(), "padded", split=split)
    assert len(plan.micro_batches) > 1
    found = {}
    for accumulator in (PlainAccumulator, Float32Accumulator):
        (part,) = parts_of_model(tiny_model("llama").bfloat16())
        stage = TransformersStage([part], accumulator=accumulator)
        PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches_of(plan))
        found[accumulator] = {n: getattr(p, "main_grad", p.grad) for n, p in part.named_parameters()}
    for name, gradient in found[Float32Accumulator].items():
        assert gradient.dtype == torch.float32
        rounded = found[PlainAccumulator][name].float()
        torch.testing.assert_close(rounded, gradient, rtol=0.05, atol=0.02 * float(gradient.abs().max()))
    assert any(not torch.equal(g, g.bfloat16().float()) for g in found[Float32Accumulator].values())


def test_masters_keep_steps_that_16_bits_would_lose():
    (part,) = parts_of_model(tiny_model("llama").bfloat16())
    part.model.lm_head.requires_grad_(False)
    trained = [p for p in part.parameters() if p.requires_grad]
    optimizer = optimizer_of([part], lr=3e-4, clip_grad=0.0, weight_decay=0.0)
    assert optimizer.state_bytes() == 12 * sum(p.numel() for p in trained)
    norm, head = part.model.model.norm.weight, part.model.lm_head.weight.clone()
    before, moved = norm.detach().clone(), []
    (plan,) = plans_of(Topology(), "padded", split=False)
    for _ in range(30):
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        assert optimizer.step(ExecutedStep(plan, 1.0)) == pytest.approx(sum(p.numel() for p in trained) ** 0.5)
        moved.append(float((before - norm.detach()).abs().max()))
    assert moved[0] < 4e-3  # half a unit in the last place, or nothing
    assert moved[-1] == pytest.approx(30 * 3e-4, abs=5e-3)
    assert moved[-1] > 4e-3
    assert torch.equal(part.model.lm_head.weight, head)


def test_a_step_that_is_not_finite_changes_nothing_and_is_left_out_as_the_policy_says():
    (part,) = parts_of_model(tiny_model("llama"))
    optimizer = optimizer_of([part], nan_policy="skip", max_skips=1)
    (plan,) = plans_of(Topology(), "padded", split=False)
    before = [p.detach().clone() for p in part.parameters()]
    for parameter in part.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    refused = optimizer.step(ExecutedStep(plan, 1.0, {0: torch.inf}))
    assert isinstance(refused, Refused)
    assert "the loss of micro-batch 0 of replica 0" in refused.reason
    assert "gradient of model.embed_tokens.weight is not finite" in refused.reason
    for parameter in part.parameters():
        parameter.grad = torch.full_like(parameter, 1e19)  # each may be, all together may not
    with pytest.raises(ExecutionError, match=r"the norm of the gradient .* after 1 steps that were skipped in a row"):
        optimizer.step(ExecutedStep(plan, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, part.parameters(), strict=True))
