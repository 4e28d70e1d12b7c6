"""Encoder-decoders, adapters, DeepSpeed's engines and steps that are not finite, on a GPU beside the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch

from dynapipe_ext.batch.document_attention import register_document_attention
from dynapipe_ext.batch.micro_batches import Layout, Recompute
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import lower
from dynapipe_ext.executor.stages import chunk_runner
from dynapipe_ext.executor.stages.deepspeed.engine import DeepSpeedOptimizer, gathered, make_engine
from dynapipe_ext.executor.stages.deepspeed.stage import engine_model, engine_stage
from dynapipe_ext.executor.stages.megatron.model import (
    build_model,
    fill_weights,
    held_weights,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron.optimizer import MegatronOptimizer
from dynapipe_ext.executor.stages.megatron.stage import wrap_ddp
from dynapipe_ext.executor.stages.megatron.t5 import t5_stage
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage
from dynapipe_ext.executor.training_loop import ExecutedStep, Refused
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from dynapipe_ext.settings.tables import LoraSettings, OptimizerSettings
from tests.gpu import steps
from tests.support.checkpoints import tiny_variant
from tests.support.limits import LIMIT_S
from tests.support.t5_ranks import (
    PairCase,
    described,
    in_megatrons_names,
    oracle_of,
    pair_format,
    pair_step_plan,
    pair_tensors,
)
from tests.support.tiny_models import one_by_one, tiny_model
from tests.support.tiny_steps import SAMPLES, batches_of, plans_of

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cpu", reason="runs on a GPU alone")

DTYPES = (torch.float32, torch.bfloat16)
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    """A job of this process alone, as DeepSpeed's engines ask for one, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        if DEVICE.type == "cuda":
            torch.cuda.set_device(DEVICE)
        with steps.alone(DEVICE):
            yield


@pytest.fixture(autouse=True)
def few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_runner, "HEAD_SLICE", 5)


def cosine(found: Tensors, wanted: Tensors) -> float:
    """Of all entries together."""
    mine, theirs = (
        torch.cat([one[name].double().cpu().flatten() for name in sorted(wanted)]) for one in (found, wanted)
    )
    return float(torch.cosine_similarity(mine, theirs, dim=0))


def assert_learned(
    found: tuple[float, Tensors], expected: tuple[float, Tensors], dtype: torch.dtype, *, tolerance: float
) -> None:
    """Loss and gradients of a step. Those of 16 bits are those of 32 up to rounding, which a wrong mask is far from."""
    (loss, own), (wanted_loss, wanted) = found, expected
    assert own.keys() == wanted.keys()
    if dtype == torch.bfloat16:
        print(f"bfloat16: loss {loss / wanted_loss - 1:+.1e}, cosine {cosine(own, wanted):.5f}")
        assert loss == pytest.approx(wanted_loss, rel=0.05)
        assert cosine(own, wanted) > 0.95
        return
    errors = {
        name: float((own[name].float().cpu() - x).abs().max() / x.abs().max().clamp(min=1e-12))
        for name, x in wanted.items()
    }
    worst = max(errors, key=errors.__getitem__)
    print(f"float32: loss {loss / wanted_loss - 1:+.1e}, {worst} {errors[worst]:.1e}")
    assert loss == pytest.approx(wanted_loss, rel=tolerance)
    assert errors[worst] < tolerance, worst


def executed(stage: Any, plan: Any, batches: Any) -> float:
    loss: float = PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches)
    return loss


ALONE = Topology()
PAIRS = [
    PairCase(ALONE),
    PairCase(ALONE, "packed", weights_lag=1),
    PairCase(ALONE, variant="t5-v1.1", recompute="full"),
    PairCase(ALONE, "packed", "t5-v1.1", recompute="head+selective"),
]


@cache
def published(variant: str) -> tuple[Any, Tensors, float, Tensors]:
    """A T5 of transformers: what it is, its weights, and the loss and gradients of a step, all as Megatron has them."""
    model = tiny_variant(variant)
    architecture = described(model)
    loss, gradients = oracle_of(model, "tokens")
    return (
        architecture,
        in_megatrons_names(architecture, model.state_dict()),
        loss,
        in_megatrons_names(architecture, gradients),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_encoder_decoders_learn_what_transformers_says_on_the_cpu(case: PairCase, dtype: torch.dtype) -> None:
    architecture, weights, loss, gradients = published(case.variant)
    config = transformer_config(architecture, ALONE, dtype=str(dtype).removeprefix("torch."))
    model = build_model(architecture, ALONE, 0, config, seed=None, device=DEVICE)
    fill_weights(model, weights.items())
    ddp = wrap_ddp(model, config)
    ((plan,),) = lower(pair_step_plan(case), pair_format(case, architecture))
    batches = [pair_tensors(m, case.loss_norm) for m in plan.micro_batches]
    found = executed(t5_stage([ddp], measure_bytes=False), plan, batches)
    weights_held: Any = held_weights(ddp.module)
    own = {name: weight.main_grad for name, weight in weights_held if weight.requires_grad}
    padding = {name: own[name][len(gradients[name]) :] for name in own}  # rows behind the vocabulary
    assert not any(rows.any() for rows in padding.values())
    own = {name: gradient[: len(gradients[name])] for name, gradient in own.items()}
    assert_learned((found, own), (loss, {name: gradients[name] for name in own}), dtype, tolerance=2e-4)


ADAPTED: list[tuple[str, Layout, bool, Recompute]] = [
    ("llama", "packed", True, "none"),
    ("llama", "padded", False, "head+full"),
    ("gpt2", "padded", False, "selective"),
]


def adapted(family: str) -> tuple[Any, Any]:
    """A model with adapters that have an effect, and its part."""
    adapters = pytest.importorskip("dynapipe_ext.executor.stages.transformers.adapters", exc_type=ImportError)
    model = tiny_model(family).train()
    (part,) = parts_of_model(model)
    adapters.add_adapters([part], LoraSettings(enabled=True, r=4, lora_alpha=16.0), seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if ".lora_B." in name:  # which begin as zeros
                weight.normal_(0.0, 0.3, generator=generator)
    return model, part


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "layout", "split", "recompute"), ADAPTED)
def test_adapters_alone_learn_and_what_they_learn_on_the_cpu(
    family: str, layout: Layout, split: bool, recompute: Recompute, dtype: torch.dtype
) -> None:
    expected = one_by_one(adapted(family)[0], SAMPLES)
    assert all(".lora_" in name for name in expected[1])
    model, part = adapted(family)
    if layout == "packed":
        model.set_attn_implementation(register_document_attention())
    part.to(DEVICE, dtype)
    (plan,) = plans_of(ALONE, layout, split=split, recompute=recompute)
    loss = executed(TransformersStage([part]), plan, batches_of(plan))
    own = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert_learned((loss, own), expected, dtype, tolerance=1e-3)


LR, DECAY, CLIP, STEPS = 1e-2, 0.1, 0.5, 2
SIXTEEN_BITS = {"bf16": {"enabled": True}}
WIDE_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}  # which an engine of ZeRO 0 does not have


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().float().cpu().clone() for name, weight in model.named_parameters()}


@cache
def plain_loop() -> tuple[list[float], list[float], Tensors]:
    """Losses and norms of steps, and by how much the weights have changed, of torch's AdamW on the CPU."""
    model = tiny_model("llama")
    before = weights_of(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(one_by_one(model, SAMPLES)[0])
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms, {name: weight - before[name] for name, weight in weights_of(model).items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_deepspeed_engines_take_the_steps_of_a_plain_loop_on_the_cpu(zero_stage: int, dtype: torch.dtype) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True}},
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    if dtype == torch.bfloat16:
        config |= SIXTEEN_BITS | (WIDE_SUMS if zero_stage else {})
    parallel = ParallelContext(ALONE, device=DEVICE, timeout_s=LIMIT_S)
    model = tiny_model("llama").to(DEVICE).train()
    before = weights_of(model)
    parts = parts_of_model(model)
    engine = make_engine(engine_model(parts), config, parallel)
    stage = engine_stage(engine, parts, parallel=parallel)
    settings = OptimizerSettings(lr=LR, min_lr=LR, lr_schedule="constant", warmup_steps=0, weight_decay=DECAY)
    optimizer = DeepSpeedOptimizer(engine, settings, num_steps=STEPS, parallel=parallel, device=DEVICE)
    executor = PipelineExecutor(stage, parallel.transport)
    losses, norms = [], []
    for step in range(STEPS):
        (plan,) = plans_of(ALONE, "padded", split=False, schedule="1f1b", step=step)
        losses.append(executor.execute(plan, batches_of(plan)))
        norm = optimizer.step(ExecutedStep(plan, losses[-1]))
        assert isinstance(norm, float), norm
        norms.append(norm)
    with gathered(engine):
        changes = {name: weight - before[name] for name, weight in weights_of(model).items()}
    engine.destroy()
    wanted_losses, wanted_norms, wanted = plain_loop()
    print(f"losses {losses} beside {wanted_losses}, norms {norms} beside {wanted_norms}")
    print(f"cosine of changes {cosine(changes, wanted):.6f}")
    is_exact = dtype == torch.float32
    assert losses == pytest.approx(wanted_losses, rel=1e-3 if is_exact else 0.1)
    num_compared = STEPS if is_exact else 1  # later ones are of other weights
    assert norms[:num_compared] == pytest.approx(wanted_norms[:num_compared], rel=1e-3 if is_exact else 0.1)
    # An update is about a gradient's sign: where that is nearly 0, rounding turns it.
    assert cosine(changes, wanted) > (0.999 if is_exact else 0.8)


CULPRIT = "decoder.layers.1.mlp.linear_fc1.weight"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_is_not_finite_changes_nothing_and_says_where(dtype: str) -> None:
    stage, ddp = steps.megatron_stage(dtype, DEVICE)
    plan = steps.plan_of(steps.Case("packed"))
    optimizer = MegatronOptimizer(
        [ddp], ddp.config, OptimizerSettings(nan_policy="skip", max_skips=1, warmup_steps=0), num_steps=20
    )

    def step(*, spoils_loss: bool = False) -> Any:
        batches = steps.batches_of(plan)
        if spoils_loss:
            batches[-1]["loss_weights"][0, :2] = torch.nan
        loss = executed(stage, plan, batches)
        try:
            return optimizer.step(ExecutedStep(plan, loss, stage.losses()))
        except ExecutionError as error:
            return str(error)

    def held() -> list[torch.Tensor]:
        """Weights, their float32 copies and moments."""
        inner = optimizer._optimizer.chained_optimizers[0].optimizer
        moments = [value.clone() for state in inner.state.values() for value in state.values()]
        copies = [weight.detach().clone() for group in inner.param_groups for weight in group["params"]]
        return [*weights_of(ddp.module).values(), *copies, *moments]

    def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    assert isinstance(step(), float)
    before = held()
    skipped = step(spoils_loss=True)
    assert isinstance(skipped, Refused)
    last = len(plan.micro_batches) - 1
    samples = ", ".join(str(sample.index) for sample in plan.micro_batches[last].samples)
    assert f"the loss of micro-batch {last} of replica 0 (samples {samples}) is nan" in str(skipped)
    assert same(before, held())
    assert isinstance(step(), float)
    assert not same(before, held())
    before = held()
    (culprit,) = (weight for name, weight in ddp.module.named_parameters() if name == CULPRIT)
    hook = culprit.register_hook(lambda gradient: gradient * torch.inf)
    assert CULPRIT in str(step())  # skipped
    said = step()
    hook.remove()
    assert "after 1 steps that were skipped in a row" in said
    assert same(before, held())
