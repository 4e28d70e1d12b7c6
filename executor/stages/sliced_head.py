"""A language model's head and its loss, a slice of positions at a time: at most one slice of logits exists.

Forwards keep two numbers a position (the largest logit, and the sum of exponentials above it), of which backwards make
the gradients of a slice after its product is computed again: one more product of the head than with whole logits.
Where tensor parallel ranks share the vocabulary, all slices of a forward exchange these numbers in one message, and
backwards sum the gradient of the input once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import runs_kernels
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages import kernels
from dynapipe_ext.executor.stages.chunk_runner import (
    HEAD_SLICE_KEY,
    DeferredGradients,
    HeadSlices,
    deferred_of,
)

_LEFT_ASIDE = -100  # a label of torch's cross-entropy: of a position without a loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """What makes logits of hidden states: softcap x tanh(scale x (x W^T + b) / softcap), without softcap where it is 0.

    `weight` (V, H) and `bias` (V,) are a rank's rows of the vocabulary, from `first_id` on; from row `num_ids` on
    (None: no row) they are padding, which no softmax sees. `group`: the ranks that share the vocabulary, in its order;
    where `divides_sequence`, each of them has an equal part of the hidden states, along their first dimension.
    `is_part`: other rows are elsewhere, even of all ranks of the group, and so may be those of the labels.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    first_id: int = 0
    num_ids: int | None = None
    group: Any = None
    divides_sequence: bool = False
    is_part: bool = False

    @property
    def has_all(self) -> bool:
        """Whether every label is one of these rows."""
        return (self.group is None or self.group.size() == 1) and not self.is_part

    @property
    def columns(self) -> kernels.Columns:
        """Of its products."""
        num_rows = len(self.weight)
        num_ids = num_rows if self.num_ids is None else max(0, min(self.num_ids, num_rows))
        return kernels.Columns(num_ids, self.first_id, self.scale)

    def product(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Of positions and rows, a tensor of its own."""
        return torch.nn.functional.linear(x_NH, self.weight.to(x_NH.dtype), self.bias)

    def logits(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Of positions, a tensor of its own, in float32 or, of float64 values, in these."""
        return self.logits_of(self.product(x_NH))

    def logits_of(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The same, out of the products of positions and rows."""
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        if self.num_ids is not None and self.num_ids < logits_NV.shape[-1]:
            logits_NV[:, max(self.num_ids, 0) :] = torch.finfo(logits_NV.dtype).min
        return logits_NV


def losses_in_slices(x: torch.Tensor, labels: torch.Tensor, head: Head, *, slice_len: int) -> torch.Tensor:
    """Cross-entropy of every position, of the shape of `labels`, in float32 (float64 of such values).

    `x` is (*labels.shape, hidden size), its first dimension divided where the head says so. The gradient of the weight
    goes where those of linear layers go. Where sums are exact, each slice adds its own: the sum has the same bits for
    any number of slices, if all of them have `slice_len` positions.
    """
    most, log_sums, target = head_stats_in_slices(x, labels, head, slice_len=slice_len)
    return log_sums - (target - most)


def head_stats_in_slices(
    x: torch.Tensor, labels: torch.Tensor, head: Head, *, slice_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three numbers of every position, as of `stats_of_logits`, of the shape of `labels`."""
    if slice_len < 1:
        raise ConfigError(f"the head's slices are of {slice_len} positions but must be of at least 1: give more")
    stats: Any = _SlicedHead.apply(x, head.weight, head.bias, labels, head, slice_len)  # type: ignore[no-untyped-call]
    most, log_sums, target = (one.view(labels.shape) for one in stats)
    return most, log_sums, target


def stats_of_logits(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of logits, scaled and capped, over the ranks of `head.group`: the largest, without a gradient, the log of the sum
    of exponentials above it, and the target's, 0 where none of these rows is the target's.

    The logits' place is used up: backwards make the gradient in it.
    """
    most, log_sums, target = _StatsOfLogits.apply(logits_NV, labels_N, head)  # type: ignore[no-untyped-call]
    return most, log_sums, target


def losses_of_logits(logits_NV: torch.Tensor, labels_N: torch.Tensor, head: Head) -> torch.Tensor:
    """Cross-entropy of every position, of logits whose place is used up (`stats_of_logits`)."""
    most, log_sums, target = stats_of_logits(logits_NV, labels_N, head)
    return log_sums - (target - most)


def losses_of_whole_logits(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every position, in float32, of logits of a whole vocabulary; 0 where the label is -100, as of
    torch's. The caller has no more use for the logits: of those that no backward reads, the place is used up, unless
    they come from `keep_readable`."""
    if not runs_kernels(logits_NV):
        return torch.nn.functional.cross_entropy(logits_NV.float(), labels_N, reduction="none")
    losses: torch.Tensor = _LossesOfWholeLogits.apply(logits_NV, labels_N, _is_read_by_none(logits_NV))  # type: ignore[no-untyped-call]
    return losses


def keep_readable(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits for a loss that leaves their values as they are, since someone else may have kept them."""
    readable: torch.Tensor = _Readable.apply(logits)  # type: ignore[no-untyped-call]
    return readable


class _Readable(torch.autograd.Function):
    """The identity: its backward is not one of those whose output may be used up."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0].view_as(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


_VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
_READ_BY_NONE = ("MmBackward0", "AddmmBackward0", "ToCopyBackward0")  # their backwards need no output


def _is_read_by_none(x: torch.Tensor) -> bool:
    """Whether the values were made by an operation whose backward does not read them (that of tanh, a cap, does)."""
    node = x.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _READ_BY_NONE


class _LossesOfWholeLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        (logits_NV, labels_N), ctx.in_place = (one.contiguous() for one in inputs[:2]), inputs[2]
        ctx.columns = kernels.Columns(logits_NV.shape[-1])
        most_N, sums_N, target_N = kernels.softmax_stats(logits_NV, labels_N, ctx.columns, has_all=True)
        ctx.save_for_backward(logits_NV, labels_N, most_N, sums_N)
        losses_N: torch.Tensor = (sums_N.log() - (target_N - most_N)).masked_fill_(labels_N == _LEFT_ASIDE, 0.0)
        return losses_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, labels_N, most_N, sums_N = ctx.saved_tensors
        grad_N = grads[0].masked_fill(labels_N == _LEFT_ASIDE, 0.0)
        place_NV = logits_NV if ctx.in_place else logits_NV.clone()
        return kernels.softmax_backward(place_NV, labels_N, most_N, sums_N, grad_N, -grad_N, ctx.columns), None, None


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStates:
    """What a last stage gives its loss in the place of logits: (rows, length, hidden size), and the head."""

    x: torch.Tensor
    head: Head
    slice_len: int

    def losses(self, labels: torch.Tensor) -> torch.Tensor:
        """Of every position, of the shape of `labels` (rows, length)."""
        return losses_in_slices(self.x, labels, self.head, slice_len=self.slice_len)


def head_loss_sum(
    x: torch.Tensor, weight: torch.Tensor, batch: Batch, *, bias: torch.Tensor | None = None, softcap: float = 0.0
) -> torch.Tensor:
    """The weighted sum of cross-entropies that a last stage returns, out of hidden states (rows, length, hidden size).

    A loss function of TorchStage whose module leaves the head to it: logits are whole, or in slices where the plan
    says so. `weight` is (vocabulary, hidden size), of a torch.nn.Linear.
    """
    head = Head(weight=weight, bias=bias, softcap=softcap)
    labels, weights = batch["labels"].flatten(), batch["loss_weights"].flatten()
    x_NH = x.reshape(-1, x.shape[-1])
    slices: HeadSlices | None = batch.get(HEAD_SLICE_KEY)
    if slices is not None:
        losses = losses_in_slices(x_NH, labels, head, slice_len=slices.take())
    else:
        losses = losses_of_whole_logits(head.logits(x_NH), labels)
    total: torch.Tensor = (losses * weights).sum()
    return total


class _StatsOfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        logits_NV, labels_N, head = inputs
        ctx.head, ctx.by_kernel = head, runs_kernels(logits_NV)
        if ctx.by_kernel:
            logits_NV, labels_N = logits_NV.contiguous(), labels_N.contiguous()
            ctx.columns = kernels.Columns(logits_NV.shape[-1], head.first_id)
            stats_3N = kernels.softmax_stats(logits_NV, labels_N, ctx.columns, has_all=head.has_all)
            most_N, sums_N, target_N = _over_vocabulary(stats_3N, head)
            ctx.save_for_backward(logits_NV, labels_N, most_N, sums_N)
        else:
            ctx.dtype = logits_NV.dtype
            logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
            stats_3N = _stats_in_place(head, logits_NV, labels_N)
            most_N, sums_N, target_N = _over_vocabulary(stats_3N, head)
            ctx.save_for_backward(logits_NV, labels_N, (stats_3N[0] - most_N).exp_().div_(sums_N))
        ctx.mark_non_differentiable(most_N)
        return most_N, sums_N.log(), target_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _most_grad, sums_grad_N, target_grad_N = grads
        if ctx.by_kernel:
            grads_of = (*ctx.saved_tensors, sums_grad_N, target_grad_N, ctx.columns)
            return kernels.softmax_backward(*grads_of), None, None
        grad_NV, labels_N, share_N = ctx.saved_tensors
        own_N, is_own_N = _own_labels(ctx.head, labels_N)
        grad_NV.mul_((sums_grad_N * share_N)[:, None])
        grad_NV.scatter_add_(1, own_N[:, None], (target_grad_N * is_own_N)[:, None])
        return grad_NV.to(ctx.dtype), None, None


class _SlicedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        _weight, _bias, labels, head, slice_len = others
        x_NH, labels_N = _whole(x, head), labels.reshape(-1)
        stats_3N = torch.cat([_stats(head, x_NH[at], labels_N[at]) for at in _slices(len(labels_N), slice_len)], dim=1)
        most_N, sums_N, target_N = _over_vocabulary(stats_3N, head)
        ctx.save_for_backward(x, labels_N, most_N, sums_N)
        ctx.head, ctx.slice_len = head, slice_len
        ctx.mark_non_differentiable(most_N)
        return most_N, sums_N.log(), target_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, labels_N, most_N, sums_N = ctx.saved_tensors
        head: Head = ctx.head
        x_NH, (_most_grad, sums_grad_N, target_grad_N) = _whole(x, head), grads
        sums = _WeightGradient(head) if ctx.needs_input_grad[1] else None
        bias = head.bias if ctx.needs_input_grad[2] else None
        bias_grad = None if bias is None else torch.zeros_like(bias)
        x_grad_NH = torch.empty_like(x_NH)
        for at in _slices(len(labels_N), ctx.slice_len):
            of_slice = (x_NH[at], labels_N[at], most_N[at], sums_N[at], sums_grad_N[at], target_grad_N[at])
            grad_NV = _product_grads(head, *of_slice).to(x_NH.dtype)
            x_grad_NH[at] = grad_NV.matmul(head.weight.to(grad_NV.dtype))
            if sums is not None:
                sums.add(grad_NV, x_NH[at])
            if bias_grad is not None:
                bias_grad += grad_NV.sum(dim=0)
        x_grad = _summed(x_grad_NH.view(-1, *x.shape[1:]), head) if ctx.needs_input_grad[0] else None
        return x_grad, sums.value() if sums else None, bias_grad, None, None, None


def _slices(num_positions: int, slice_len: int) -> Iterator[slice]:
    """At least one."""
    for start in range(0, max(num_positions, 1), slice_len):
        yield slice(start, min(start + slice_len, num_positions))


def _stats(head: Head, x_NH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Of this rank's part of the vocabulary, (3, N): the largest logit, the sum of exponentials above it, and the
    target's logit, 0 where another rank has it."""
    if not head.softcap and runs_kernels(x_NH):
        return kernels.softmax_stats(head.product(x_NH), labels_N, head.columns, has_all=head.has_all)
    return _stats_in_place(head, head.logits(x_NH), labels_N)


def _stats_in_place(head: Head, logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """The same of logits, which become exponentials above the largest of their own."""
    if not len(labels_N):
        return logits_NV.new_zeros(3, 0)
    own_N, is_own_N = _own_labels(head, labels_N)
    target_N = logits_NV.gather(1, own_N[:, None])[:, 0].masked_fill_(~is_own_N, 0.0)
    most_N = logits_NV.amax(dim=1)
    return torch.stack([most_N, logits_NV.sub_(most_N[:, None]).exp_().sum(dim=1), target_N])


def _own_labels(head: Head, labels_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of this rank's weight, and which of them are the labels': of the others row 0 stands in."""
    own_N = labels_N - head.first_id
    is_own_N = (own_N >= 0) & (own_N < len(head.weight))
    if head.group is None and not head.is_part:
        return own_N, is_own_N  # a label that is no id fails in gathering
    return own_N.masked_fill(~is_own_N, 0), is_own_N


def _over_vocabulary(stats_3N: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same three over all ranks' parts."""
    if head.group is None or head.group.size() == 1:
        return stats_3N[0], stats_3N[1], stats_3N[2]
    of_ranks = stats_3N.new_empty((head.group.size() * len(stats_3N), stats_3N.shape[1]))
    dist.all_gather_into_tensor(of_ranks, stats_3N, group=head.group)
    most_RN, sums_RN, target_RN = of_ranks.view(-1, *stats_3N.shape).unbind(dim=1)
    most_N = most_RN.amax(dim=0)
    return most_N, (sums_RN * (most_RN - most_N).exp()).sum(dim=0), target_RN.sum(dim=0)


def _product_grads(
    head: Head,
    x_NH: torch.Tensor,
    labels_N: torch.Tensor,
    most_N: torch.Tensor,
    sums_N: torch.Tensor,
    sums_grad_N: torch.Tensor,
    target_grad_N: torch.Tensor,
) -> torch.Tensor:
    """Of a slice's products of positions and rows, which are computed again."""
    if not head.softcap and runs_kernels(x_NH):
        stats = (labels_N, most_N, sums_N, sums_grad_N, target_grad_N)
        return kernels.softmax_backward(head.product(x_NH), *stats, head.columns)
    shares_NV, slope_NV = _shares(head, x_NH, most_N, sums_N)
    return _logit_grads(head, shares_NV, slope_NV, labels_N, sums_grad_N, target_grad_N)


def _shares(
    head: Head, x_NH: torch.Tensor, most_N: torch.Tensor, sums_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of each logit in the sum of exponentials, and the slope of its cap, where it has one."""
    logits_NV = head.logits(x_NH)
    slope_NV = 1.0 - (logits_NV / head.softcap).square() if head.softcap else None
    return logits_NV.sub_(most_N[:, None]).exp_().div_(sums_N[:, None]), slope_NV


def _logit_grads(
    head: Head,
    grad_NV: torch.Tensor,
    slope_NV: torch.Tensor | None,
    labels_N: torch.Tensor,
    sums_grad_N: torch.Tensor,
    target_grad_N: torch.Tensor,
) -> torch.Tensor:
    """Of the product's outputs, before scale and cap, in the place of the logits' shares."""
    own_N, is_own_N = _own_labels(head, labels_N)
    grad_NV.mul_(sums_grad_N[:, None]).scatter_add_(1, own_N[:, None], (target_grad_N * is_own_N)[:, None])
    if head.scale != 1.0:
        grad_NV.mul_(head.scale)
    if slope_NV is not None:
        grad_NV.mul_(slope_NV)
        if head.num_ids is not None:
            grad_NV[:, max(head.num_ids, 0) :] = 0.0  # whose slope is none
    return grad_NV


class _WeightGradient:
    """The sum over slices: each a use of its own where sums are exact, else one gradient, of 16-bit weights in
    float32 on the way."""

    def __init__(self, head: Head) -> None:
        self._weight, queue = head.weight, deferred_of(head.weight)
        self._uses: DeferredGradients | None = queue if queue is not None and queue.takes_all else None
        self._sum: torch.Tensor | None = None
        if self._uses is None:
            narrow = self._weight.element_size() < 4
            self._sum = torch.zeros_like(self._weight, dtype=torch.float32 if narrow else None)

    def add(self, grad_NV: torch.Tensor, x_NH: torch.Tensor) -> None:
        product = grad_NV.t().matmul(x_NH)
        if self._uses is not None:
            self._uses.take_whole(self._weight, product.to(self._weight.dtype))
        elif self._sum is not None:
            self._sum += product

    def value(self) -> torch.Tensor | None:
        """For autograd."""
        return None if self._sum is None else self._sum.to(self._weight.dtype)


def _whole(x: torch.Tensor, head: Head) -> torch.Tensor:
    """All positions, one a row; gathered where ranks have parts of the sequence."""
    if head.divides_sequence:
        whole = x.new_empty((x.shape[0] * head.group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous(), group=head.group)
        x = whole
    return x.reshape(-1, x.shape[-1])


def _summed(x_grad: torch.Tensor, head: Head) -> torch.Tensor:
    """Over the parts of the vocabulary; of the sequence, this rank's part."""
    if head.group is None:
        return x_grad
    if not head.divides_sequence:
        dist.all_reduce(x_grad, group=head.group)
        return x_grad
    own = x_grad.new_empty((x_grad.shape[0] // head.group.size(), *x_grad.shape[1:]))
    dist.reduce_scatter_tensor(own, x_grad, group=head.group)
    return own
