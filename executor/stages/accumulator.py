"""How the gradients of a step's micro-batches are summed: the seam that deterministic mode swaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.instructions import ExecutionPlan

Sum = Callable[[torch.Tensor], None]  # over ranks, in place


class GradientAccumulator(Protocol):
    """Sums gradients over micro-batches and replicas; after `reduce` the sums are where the optimizer expects them.

    That is `parameter.grad`, in the parameter's dtype, as torch wants it, or Megatron's `main_grad`; what an
    implementation adds up in is its own choice.
    """

    def begin(self, plan: ExecutionPlan) -> None:
        """Start a step: no gradient is held."""

    def backward(self, outputs: Sequence[torch.Tensor], output_grads: Sequence[torch.Tensor] | None) -> None:
        """Run the backward of `outputs`; where they are a loss, `output_grads` is None."""
        torch.autograd.backward(outputs, output_grads)

    def add(self) -> None:
        """Take in what the backward that just ran has produced."""

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take in a gradient that a split backward had put off; `add` follows."""

    def reduce(self) -> None:
        """Sum over replicas, once a step."""


class PlainAccumulator(GradientAccumulator):
    """Floating-point sums in arrival order, replicas in one flat sum.

    Micro-batches add up in the parameter's dtype, replicas in float32: with bfloat16 weights and many micro-batches
    a step, small gradients are lost in the first sum.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], sum_over_replicas: Sum | None = None) -> None:
        self._parameters = list(parameters)
        self._sum_over_replicas = sum_over_replicas

    def begin(self, plan: ExecutionPlan) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def add(self) -> None:
        """Autograd has already added into `parameter.grad`."""

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        _add_to_grad(weight, gradient)

    def reduce(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._sum_over_replicas is not None and self._parameters:
            flat = torch.cat([_grad(parameter).reshape(-1).float() for parameter in self._parameters])
            self._sum_over_replicas(flat)
            _scatter(flat, self._parameters)


class Float32Accumulator(GradientAccumulator):
    """Sums in float32, in arrival order, left in `parameter.main_grad`: for weights of 16 bits."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], sum_over_replicas: Sum | None = None) -> None:
        self._parameters = list(parameters)
        self._sum_over_replicas = sum_over_replicas
        sizes = [parameter.numel() for parameter in self._parameters]
        device = self._parameters[0].device if sizes else None
        self._sums = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        for parameter, own in zip(self._parameters, torch.split(self._sums, sizes), strict=True):
            parameter.main_grad = own.view_as(parameter)  # type: ignore[attr-defined]

    def begin(self, plan: ExecutionPlan) -> None:
        self._sums.zero_()
        for parameter in self._parameters:
            parameter.grad = None

    def add(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                gradient_of(parameter).add_(parameter.grad)
                parameter.grad = None

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.main_grad.add_(gradient)  # type: ignore[attr-defined]

    def reduce(self) -> None:
        if self._sum_over_replicas is not None and self._parameters:
            self._sum_over_replicas(self._sums)


class ExactAccumulator(GradientAccumulator):
    """Sums that do not depend on order or grouping: int64 fixed point with `scale_bits` fractional bits.

    The same micro-batch gradients give the same bits in every order, on every split over replicas. Costs 8 bytes a
    parameter. Raises ExecutionError where a sum leaves the range of 2^(62 - scale_bits).
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        sum_over_replicas: Sum | None = None,
        *,
        scale_bits: int = 44,
    ) -> None:
        self._parameters = list(parameters)
        self._sum_over_replicas = sum_over_replicas
        self._scale = float(2**scale_bits)
        self._limit = float(2 ** (62 - scale_bits))
        self._sums = [torch.zeros(p.shape, dtype=torch.int64, device=p.device) for p in self._parameters]
        self._largest = 0.0

    def begin(self, plan: ExecutionPlan) -> None:
        self._largest = 0.0
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.grad = None
            total.zero_()

    def add(self) -> None:
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if parameter.grad is not None:
                grad = parameter.grad.double()
                self._largest += float(grad.abs().max()) if grad.numel() else 0.0
                total += torch.round(grad * self._scale).long()
                parameter.grad = None

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        _add_to_grad(weight, gradient)

    def reduce(self) -> None:
        device = self._sums[0].device if self._sums else None
        largest = torch.tensor([self._largest], dtype=torch.float64, device=device)
        if self._sum_over_replicas is not None:
            self._sum_over_replicas(largest)
        if not float(largest) < self._limit:
            raise ExecutionError(
                f"gradients as large as {float(largest):.3g} leave the fixed-point range {self._limit:.3g}:"
                " lower the learning rate, clip, or use the plain accumulator"
            )
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if self._sum_over_replicas is not None:
                self._sum_over_replicas(total)
            parameter.grad = (total.double() / self._scale).to(parameter.dtype)


def gradient_of(weight: torch.Tensor) -> torch.Tensor:
    """The sum that an accumulator left, whichever it is."""
    gradient = getattr(weight, "main_grad", None)
    found = weight.grad if gradient is None else gradient
    assert found is not None
    return found


def _add_to_grad(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _scatter(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
    offset = 0
    for parameter in parameters:
        size = parameter.numel()
        parameter.grad = flat[offset : offset + size].view_as(parameter).to(parameter.dtype)
        offset += size
