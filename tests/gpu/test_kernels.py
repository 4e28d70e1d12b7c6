"""Each kernel beside the same arithmetic of torch in float64: values and gradients, of any shapes and strides.

Triton's interpreter runs them without a GPU: `TRITON_INTERPRET=1 pytest tests/gpu/test_kernels.py`, with triton
installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dynapipe_ext.batch.document_attention import register_document_attention
from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, SampleLength
from dynapipe_ext.data.batches import collate
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.executor.device import runs_kernels
from dynapipe_ext.executor.stages import sliced_head
from dynapipe_ext.executor.stages.kernels import (
    Columns,
    GatedActivation,
    gated,
    gated_pair,
    softmax_backward,
    softmax_stats,
    turn,
)
from dynapipe_ext.executor.stages.megatron import head, layers
from dynapipe_ext.executor.stages.transformers import few_passes, part
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.transformers.stage import token_loss_sum
from dynapipe_ext.models.architecture import Architecture
from tests.gpu import steps
from tests.gpu.steps import EXPERTS, SHAPE, Case, alone, learned, megatron_stage
from tests.support.checkpoints import tiny

triton_kernels: Any = pytest.importorskip("dynapipe_ext.executor.stages.triton_kernels")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU, or in Triton's interpreter"
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)
ACTIVATIONS: dict[GatedActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "gelu": F.gelu,
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) <= TOLERANCE[dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 700 * 2), (2, 1, 2 * 2049), (0, 8)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(activation: GatedActivation, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    y = random(*shape, dtype=dtype).requires_grad_()
    exact = y.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    out, expected = gated(y, activation), ACTIVATIONS[activation](gate) * up
    if not out.numel():
        assert out.shape == expected.shape
        return
    upstream = random(*out.shape, dtype=dtype, seed=1)
    assert_near(out, expected, dtype)
    assert_near(*torch.autograd.grad(out, y, upstream), *torch.autograd.grad(expected, exact, upstream.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "width", "turns"), [(3, 16, 16), (1, 24, 12), (20, 96, 32), (16, 128, 128)])
def test_turned_heads(heads: int, width: int, turns: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Of a slice of what a linear layer gives, whose positions are far; the gradient is not contiguous either."""
    from megatron.core.models.common.embeddings import rope_utils

    whole = random(7, 2, heads, 3 * width, dtype=dtype)
    x = whole[..., width : 2 * width].detach().requires_grad_()
    angles = 1e4 * torch.rand(7, 1, 1, turns // 2, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    exact = x.detach().double().requires_grad_()
    expected = rope_utils._apply_rotary_pos_emb_bshd(
        exact, angles.double(), rotary_interleaved=interleaved, mscale=1.25
    )
    out = turn(x, angles, interleaved=interleaved, factor=1.25)
    upstream = random(7, heads, 2, width, dtype=dtype, seed=1).transpose(1, 2)
    assert_near(out, expected, torch.bfloat16 if dtype != torch.float32 else dtype)
    found = torch.autograd.grad(out, x, upstream)
    assert_near(*found, *torch.autograd.grad(expected, exact, upstream.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "ids"), [(5000, 4900), (7, 7), (9000, 9000)])
def test_softmax_of_a_head(rows: int, ids: int, dtype: torch.dtype) -> None:
    """Of a middle part of a vocabulary, scaled, with padding behind its ids."""
    columns = Columns(ids, first_id=100, scale=0.5)
    products = random(9, rows, dtype=dtype)
    labels = torch.randint(0, ids, (9,), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    exact = products.double().requires_grad_()
    expected = F.cross_entropy(0.5 * exact[:, :ids], labels, reduction="none")
    most, sums, target = softmax_stats(products, labels + 100, columns, has_all=False)
    upstream = torch.rand(9, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    assert_near(sums.log() - (target - most), expected, torch.float32)
    (wanted,) = torch.autograd.grad(expected, exact, upstream.double())
    found = softmax_backward(products.clone(), labels + 100, most, sums, upstream, -upstream, columns)
    assert_near(found, wanted, dtype)


@pytest.fixture(scope="module")
def job() -> Iterator[None]:
    with alone(DEVICE):
        yield


HALF_TURNED = replace(SHAPE, activation="gelu_tanh", rotary_dim=32, tied_embeddings=False)


@pytest.mark.parametrize("shape", [SHAPE, HALF_TURNED, EXPERTS], ids=["llama", "half turned", "experts"])
@pytest.mark.parametrize("case", [Case("padded"), Case(pieces=True), Case("packed", "head")], ids=str)
def test_models_learn_with_kernels_what_they_learn_without(
    case: Case, shape: Architecture, job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "LENGTHS", (7, 130, 33, 2))  # the interpreter takes its time
    names = [name for name in vars(triton_kernels) if name.endswith("_kernel")]
    found = {}
    for takes in (False, True):
        for module in (sliced_head, layers, head):
            monkeypatch.setattr(module, "runs_kernels", lambda x, takes=takes: takes)
        ran = set[str]()
        with monkeypatch.context() as patched:
            for name in names:
                patched.setattr(triton_kernels, name, Recorded(getattr(triton_kernels, name), name, ran))
            found[takes] = learned(*megatron_stage("float32", DEVICE, shape=shape), case)
        assert ran == (set(names) if takes else set())
    for name, expected in found[False].items():
        assert float((found[True][name] - expected).abs().max() / expected.abs().max()) < 2e-4, name


@dataclass
class Recorded:
    """A kernel that leaves its name in `ran` when it is started."""

    kernel: Any
    name: str
    ran: set[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.ran.add(self.name)
        return self.kernel[grid]


def test_labels_elsewhere_and_labels_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    products, labels = random(4, 64), torch.tensor([-1, 64, 70, 1000], device=DEVICE)
    assert softmax_stats(products, labels, Columns(64), has_all=False)[2].tolist() == [0.0] * 4
    assert bool(softmax_stats(products, labels, Columns(64), has_all=True)[2].isnan().all())
    labels[1] = -100  # of a position without a loss
    assert softmax_stats(products, labels, Columns(64), has_all=True)[2].isnan().tolist() == [True, False, True, True]
    logits, wanted = (products.clone().requires_grad_() for _ in range(2))
    labels = torch.tensor([3, -100, 0, 63], device=DEVICE)
    monkeypatch.setattr(sliced_head, "runs_kernels", lambda x: True)
    losses = sliced_head.losses_of_whole_logits(logits, labels)
    expected = F.cross_entropy(wanted, labels, reduction="none")
    assert_near(losses, expected.double(), torch.float32)
    (grad,), (wanted_grad,) = (torch.autograd.grad(x.sum(), of) for x, of in ((losses, logits), (expected, wanted)))
    assert_near(grad, wanted_grad.double(), torch.float32)
    most, sums, _ = softmax_stats(products, labels, Columns(0), has_all=False)  # a part that is all padding
    assert set(most.tolist()) == {torch.finfo(torch.float32).min}
    assert set(sums.tolist()) == {64.0}


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_gradients_of_logits_take_the_place_of_those_that_no_backward_reads(
    cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced_head, "runs_kernels", lambda x: True)
    x, weight = random(2, 5, 8), random(64, 8, seed=1).requires_grad_()
    labels = torch.arange(10, device=DEVICE)
    logits = F.linear(x, weight)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    before = logits.detach().clone()
    losses = sliced_head.losses_of_whole_logits(logits.flatten(0, 1), labels)
    expected = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
    (wanted,) = torch.autograd.grad(expected.sum(), weight, retain_graph=True)
    version = logits._version
    (grad,) = torch.autograd.grad(losses.sum(), weight, retain_graph=True)
    assert_near(grad, wanted.double(), torch.float32)
    assert torch.equal(logits, before) == bool(cap) == (logits._version == version)
    if not cap:  # as after torch's own operations in place
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(losses.sum(), weight)


@pytest.mark.parametrize("by_kernels", [False, True])
def test_used_up_logits_raise_for_whoever_needs_them_by_kernels_and_without(
    by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits as tanh keeps them, and a second backward."""
    monkeypatch.setattr(sliced_head, "runs_kernels", lambda x: by_kernels)
    products, labels = random(4, 64).requires_grad_(), torch.arange(4, device=DEVICE)
    head = sliced_head.Head(weight=torch.zeros(64, 1, device=DEVICE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sliced_head.losses_of_logits(torch.tanh(products), labels, head).sum().backward()
    losses = sliced_head.losses_of_logits(2 * products, labels, head)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


@pytest.mark.parametrize("watched", ["lm_head", ""])
def test_logits_that_forward_hooks_keep_stay_as_they_are(watched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_head, "runs_kernels", lambda x: True)
    (one,) = parts_of_model(tiny("llama").to(DEVICE))
    kept: list[torch.Tensor] = []
    one.model.get_submodule(watched).register_forward_hook(
        lambda _module, _inputs, output: kept.append(getattr(output, "logits", output))
    )
    tokens = torch.arange(8, device=DEVICE)[None]
    micro_batch = MicroBatch((SampleLength(0, 8, 0, 8),))
    batch: Any = {"tokens": tokens, "labels": tokens, "loss_weights": torch.ones(1, 8, device=DEVICE)}
    batch["model_inputs"] = {name: x.to(DEVICE) for name, x in one.model_inputs(micro_batch).items()}
    loss: Any = token_loss_sum(one(tokens, batch=batch), batch)
    before = kept[0].detach().clone()
    loss.backward()
    assert torch.equal(kept[0], before)


def test_what_runs_by_kernels() -> None:
    assert not runs_kernels(torch.zeros(1))
    if not IS_INTERPRETED:
        assert runs_kernels(torch.zeros(1, device="cuda"))
        assert not runs_kernels(torch.zeros(1, device="cuda", dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_gated_by_another_tensor(activation: GatedActivation, dtype: torch.dtype) -> None:
    gate, up = (random(3, 1, 1300, dtype=dtype, seed=seed).requires_grad_() for seed in (0, 1))
    exact = [one.detach().double().requires_grad_() for one in (gate, up)]
    out, expected = gated_pair(gate, up, activation), ACTIVATIONS[activation](exact[0]) * exact[1]
    upstream = random(*out.shape, dtype=dtype, seed=2)
    assert_near(out, expected, dtype)
    grads = torch.autograd.grad(out, [gate, up], upstream)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert_near(grad, wanted, dtype)


# Modules that take kernels, of four layers: norms, MLPs and attention; norms of queries and keys, too; norms that are
# not known; experts, which are not; other MLPs and turns.
SETTLED = {"llama": 17, "qwen3": 25, "gemma3_text": 8, "mixtral": 13, "glm": 9}


@pytest.mark.parametrize("family", SETTLED)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_models_of_transformers_compute_the_same_in_few_passes(
    layout: Layout, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = register_document_attention() if layout == "packed" else "sdpa"
    lengths = (9, 30, 17)
    micro_batch = MicroBatch(tuple(SampleLength(i, n, 0, n) for i, n in enumerate(lengths)), layout)
    samples = [TokenSample(i, np.arange(n + 1) + 3 * i, 1) for i, n in enumerate(lengths)]
    batch: Any = {name: torch.from_numpy(x).to(DEVICE) for name, x in collate(micro_batch, samples).items()}

    def computed(*, by_kernels: bool) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        for module in (few_passes, part):
            monkeypatch.setattr(module, "runs_kernels", lambda x: by_kernels and x.device.type == DEVICE.type)
        model = tiny(family).to(DEVICE).train()
        model.set_attn_implementation(whole)
        (one,) = parts_of_model(model)
        inputs = one.model_inputs(micro_batch)
        inputs |= {name: x.to(DEVICE) for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        logits = one(batch["tokens"], batch=batch | {"model_inputs": inputs})
        logits.double().pow(2).mean().backward()
        changed = sum("forward" in vars(module) for module in one.modules())
        return logits, [p.grad for p in one.parameters() if p.grad is not None], changed

    logits, grads, changed = computed(by_kernels=True)
    expected, wanted, _ = computed(by_kernels=False)
    assert changed == SETTLED[family]
    assert_near(logits, expected.double(), torch.float32)
    assert len(grads) == len(wanted)
    for grad, own in zip(grads, wanted, strict=True):
        assert float((grad - own).norm()) <= 1e-4 * float(own.norm()) + 1e-9
