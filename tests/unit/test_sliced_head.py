"""The head and its loss in slices of positions, beside whole logits in float64 and Megatron's own cross-entropy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.accumulator import ExactAccumulator
from dynapipe_ext.executor.stages.chunk_runner import DeferredGradients
from dynapipe_ext.executor.stages.sliced_head import Head, losses_in_slices


def whole_losses(x: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    """By torch's own operators, written down anew."""
    logits = x @ head.weight.t() + (0 if head.bias is None else head.bias)
    logits = logits * head.scale
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    if head.num_ids is not None:
        logits = logits[:, : head.num_ids]
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


@settings(deadline=None, max_examples=30)
@given(
    num_positions=st.integers(0, 23),
    slice_len=st.integers(1, 25),
    softcap=st.sampled_from([0.0, 2.0]),
    has_bias=st.booleans(),
    num_ids=st.sampled_from([None, 7]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_losses_and_gradients_are_those_of_whole_logits(
    num_positions: int, slice_len: int, softcap: float, has_bias: bool, num_ids: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_positions)
    x, weight, bias = (torch.randn(size, dtype=torch.float64) for size in ((num_positions, 5), (9, 5), (9,)))
    labels, weights = torch.randint(0, 7, (num_positions,)), torch.rand(num_positions, dtype=torch.float64)
    results = []
    for kind in (torch.float64, dtype):
        leaves = [t.detach().clone().to(kind).requires_grad_() for t in (x, weight, bias)]
        head = Head(weight=leaves[1], bias=leaves[2] if has_bias else None, scale=0.5, softcap=softcap, num_ids=num_ids)
        if results:
            losses = losses_in_slices(leaves[0], labels, head, slice_len=slice_len)
        else:
            losses = whole_losses(leaves[0], labels, head)
        (losses * weights.to(kind)).sum().backward()
        results.append([losses, *(leaf.grad for leaf in leaves[: 2 + has_bias])])
    for whole, sliced in zip(*results, strict=True):
        assert sliced.dtype == dtype
        torch.testing.assert_close(sliced.double(), whole, rtol=1e-6, atol=1e-6)


def test_exact_sums_have_the_same_bits_whole_backward_or_split_and_are_taken_slice_by_slice() -> None:
    x, weight, labels = torch.randn(50, 8), torch.nn.Parameter(torch.randn(11, 8)), torch.randint(0, 11, (50,))
    taken: list[torch.Tensor] = []
    accumulator = ExactAccumulator([weight])

    def add(to: torch.Tensor, gradient: torch.Tensor) -> None:
        taken.append(gradient)
        accumulator.add_weight(to, gradient)

    queue = DeferredGradients([weight], add, takes_all=True)
    queue.take_over()
    sums = []
    for positions in (slice(0, 50), slice(16, 50), slice(0, 16)):  # the slices are of 16: the last two make the first
        if positions.stop == 50:
            accumulator.begin(None)  # type: ignore[arg-type]
        losses = losses_in_slices(x[positions], labels[positions], Head(weight=weight), slice_len=16)
        with queue.taking():
            losses.sum().backward()
        assert weight.grad is None
        accumulator.add()
        if positions != slice(16, 50):
            accumulator.reduce()
            sums.append(weight.grad.clone())
            weight.grad = None
    assert len(taken) == 4 + 3 + 1
    assert torch.equal(*sums)


def test_a_frozen_head_makes_no_weight_gradient_and_narrow_weights_add_up_in_float32() -> None:
    x, labels = torch.randn(600, 8).bfloat16().requires_grad_(), torch.randint(0, 11, (600,))
    weight = torch.nn.Parameter(torch.randn(11, 8).bfloat16())
    losses_in_slices(x, labels, Head(weight=weight), slice_len=4).sum().backward()
    narrow, weight.grad = weight.grad, None
    assert narrow is not None
    assert narrow.dtype == torch.bfloat16
    whole_losses(x.detach().float(), labels, Head(weight=weight.float())).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(narrow.float(), weight.grad.float(), rtol=2e-2, atol=2e-1)
    weight.grad = None
    weight.requires_grad_(False)
    losses_in_slices(x, labels, Head(weight=weight), slice_len=4).sum().backward()
    assert weight.grad is None


def test_slices_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="slices are of 0 positions"):
        losses_in_slices(torch.zeros(1, 2), torch.zeros(1).long(), Head(weight=torch.zeros(3, 2)), slice_len=0)


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="this torch has no linear_cross_entropy in chunks"
)
def test_torchs_own_loop_over_chunks_is_the_same_function() -> None:
    """Which has no part of a vocabulary, no cap and no exact sums; where they need none, both agree."""
    torch.manual_seed(1)
    labels, weights = torch.randint(0, 11, (40,)), torch.rand(40)
    given = torch.randn(40, 8), torch.randn(11, 8)
    results = []
    for is_own in (True, False):
        x, weight = (one.clone().requires_grad_() for one in given)
        if is_own:
            losses = losses_in_slices(x, labels, Head(weight=weight), slice_len=16)
        else:
            options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)
            losses = torch.nn.functional.linear_cross_entropy(x, weight, labels, reduction="none", options=options)
        (losses * weights).sum().backward()
        results.append([losses, x.grad, weight.grad])
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-6)
