"""What torch does on a GPU in many passes over memory, in one pass each: gated activations, turned queries and keys,
the softmax of a head.

The kernels are Triton's (`triton_kernels.py`): in float32 inside, the same bits in every run, compiled once and not
once a shape, as shapes change with every micro-batch. On one H100 torch's own passes took a third of a step.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import torch

GatedActivation = Literal["silu", "gelu_tanh", "gelu"]
_COLUMNS = 1024  # of a gated activation that a program has
_LOGITS = 4096  # of a head
# Angles, the factor, their cosines and sines: layers with windows may turn by angles of their own.
_KEPT: deque[tuple[weakref.ref[torch.Tensor], float, torch.Tensor, torch.Tensor]] = deque(maxlen=2)


def gated(y: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """activation(gate) x up of y = [gate, up], (…, 2F) -> (…, F)."""
    out: torch.Tensor = _Gated.apply(y, activation)  # type: ignore[no-untyped-call]
    return out


def gated_pair(gate: torch.Tensor, up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """activation(gate) x up, of tensors of one shape and type."""
    out: torch.Tensor = _GatedPair.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        y: torch.Tensor = inputs[0].contiguous()
        ctx.activation = inputs[1]
        ctx.save_for_backward(y)
        gate, up = y.chunk(2, dim=-1)
        return _activated_product(gate, up, y.shape[-1], ctx.activation)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        y_grad = torch.empty_like(y)
        (gate, up), (gate_grad, up_grad) = (x.chunk(2, dim=-1) for x in (y, y_grad))
        _gate_grads(grads[0], gate, up, gate_grad, up_grad, y.shape[-1], ctx.activation)
        return y_grad, None


class _GatedPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        gate, up, ctx.activation = inputs[0].contiguous(), inputs[1].contiguous(), inputs[2]
        ctx.save_for_backward(gate, up)
        return _activated_product(gate, up, gate.shape[-1], ctx.activation)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        _gate_grads(grads[0], gate, up, gate_grad, up_grad, gate.shape[-1], ctx.activation)
        return gate_grad, up_grad, None


def _activated_product(gate: torch.Tensor, up: torch.Tensor, stride: int, activation: GatedActivation) -> torch.Tensor:
    """Of halves of a contiguous tensor, or of two such, whose rows are `stride` apart."""
    from dynapipe_ext.executor.stages.triton_kernels import gated_kernel

    width, out = gate.shape[-1], gate.new_empty(gate.shape)
    if out.numel():
        grid = (out.numel() // width, -(-width // _COLUMNS))
        gated_kernel[grid](gate, up, out, width, stride, KIND=activation, BLOCK=_COLUMNS)
    return out


def _gate_grads(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_grad: torch.Tensor,
    up_grad: torch.Tensor,
    stride: int,
    activation: GatedActivation,
) -> None:
    """Written into the last two tensors, which are laid out as the two before."""
    from dynapipe_ext.executor.stages.triton_kernels import gated_backward_kernel

    width, grad = gate.shape[-1], grad.contiguous()
    if grad.numel():
        grid = (grad.numel() // width, -(-width // _COLUMNS))
        tensors = (grad, gate, up, gate_grad, up_grad)
        gated_backward_kernel[grid](*tensors, width, stride, KIND=activation, BLOCK=_COLUMNS)


def turn(x_SBHD: torch.Tensor, angles: torch.Tensor, *, interleaved: bool, factor: float = 1.0) -> torch.Tensor:
    """Queries or keys (S, B, heads, D), the first R of their D values turned by `angles` (S, 1, 1, R), of which cosines
    and sines are multiplied by `factor`. In pairs (i, i + R/2), or (2i, 2i + 1) where `interleaved`."""
    out: torch.Tensor = _Turned.apply(x_SBHD, *_cosines(angles, factor), interleaved)  # type: ignore[no-untyped-call]
    return out


def turn_rows(x_BHSD: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Queries or keys (B, heads, S, D), turned in pairs (i, i + D/2) by angles whose `cosines` and `sines`, (B or 1, S,
    D), are given."""
    batch, heads, length, width = x_BHSD.shape
    x = x_BHSD.transpose(1, 2).reshape(batch * length, 1, heads, width)
    wide = (one.expand(batch, length, width).reshape(batch * length, width) for one in (cosines, sines))
    out: torch.Tensor = _Turned.apply(x, *wide, False)  # type: ignore[no-untyped-call]
    return out.view(batch, length, heads, width).transpose(1, 2)


def _cosines(angles: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """And sines, (S, R), made once for layers that turn by the same angles one after the other."""
    for kept, kept_factor, cosines, sines in _KEPT:
        if kept() is angles and kept_factor == factor:
            return cosines, sines
    wide = angles.detach().float().reshape(len(angles), -1)
    cosines, sines = (wide.cos(), wide.sin()) if factor == 1.0 else (wide.cos() * factor, wide.sin() * factor)
    _KEPT.append((weakref.ref(angles), factor, cosines, sines))
    return cosines, sines


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        x, cosines, sines, ctx.interleaved = inputs
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines, interleaved=ctx.interleaved, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _turned(grads[0], *ctx.saved_tensors, interleaved=ctx.interleaved, back=True), None, None, None


def _turned(
    x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, interleaved: bool, back: bool
) -> torch.Tensor:
    from dynapipe_ext.executor.stages.triton_kernels import turned_kernel

    x = x if x.stride(-1) == 1 else x.contiguous()
    positions, rows, heads, width = x.shape
    half, out = cosines.shape[-1] // 2, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    turned_kernel[(positions * rows,)](
        x, cosines, sines, out, rows, *x.stride()[:3], heads, width, half,
        BACK=back,
        INTERLEAVED=interleaved,
        HEADS=min(16, _power_of_two(heads)),
        HALF=_power_of_two(half),
        REST=_power_of_two(width - 2 * half) if width > 2 * half else 0,
    )  # fmt: skip
    return out


def _power_of_two(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Columns:
    """What the columns of a head's products are: ids from `first_id` on, from column `num_ids` on padding, which no
    softmax sees; logits are the products times `scale`."""

    num_ids: int
    first_id: int = 0
    scale: float = 1.0


def softmax_stats(
    products_NV: torch.Tensor, labels_N: torch.Tensor, columns: Columns, *, has_all: bool
) -> torch.Tensor:
    """Shape (3, N), float32: the largest logit, the sum of exp(logit - largest), and the label's logit. A label without
    a column gives 0; with `has_all`, which says that all columns are here, it gives NaN, but 0 for -100."""
    from dynapipe_ext.executor.stages.triton_kernels import softmax_stats_kernel

    num_positions, num_rows = products_NV.shape
    stats = torch.empty(3, num_positions, dtype=torch.float32, device=products_NV.device)
    if num_positions:
        softmax_stats_kernel[(num_positions,)](
            products_NV, labels_N, stats, num_positions, num_rows, columns.num_ids, columns.first_id, columns.scale,
            HAS_ALL=has_all, BLOCK=min(_LOGITS, _power_of_two(num_rows)), num_warps=8,
        )  # fmt: skip
    return stats


def softmax_backward(
    products_NV: torch.Tensor,
    labels_N: torch.Tensor,
    most_N: torch.Tensor,
    sums_N: torch.Tensor,
    sums_grad_N: torch.Tensor,
    target_grad_N: torch.Tensor,
    columns: Columns,
) -> torch.Tensor:
    """The gradient of products, in their place, of those of the logarithms of the sums and of the labels' logits.

    Their version rises, as torch's own operations in place raise it: a backward that still needs them raises.
    """
    from dynapipe_ext.executor.stages.triton_kernels import softmax_backward_kernel

    num_positions, num_rows = products_NV.shape
    if num_positions:
        block = min(_LOGITS, _power_of_two(num_rows))
        softmax_backward_kernel[(num_positions, -(-num_rows // block))](
            products_NV, labels_N, most_N, sums_N, sums_grad_N.contiguous(), target_grad_N.contiguous(),
            num_rows, columns.num_ids, columns.first_id, columns.scale,
            BLOCK=block, num_warps=8,
        )  # fmt: skip
        torch.autograd.graph.increment_version(products_NV)
    return products_NV
