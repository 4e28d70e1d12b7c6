"""Sums of gradients that lose nothing on the way: in float32, and exact in fixed point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.stages.chunk_runner import (
    NO_COPIES,
    Copies,
    GradientAccumulator,
    Sum,
    find_used,
    gradient_of,
    sum_over_copies,
)

_SCALE_BITS = 44
_SCALE, _LIMIT = float(2**_SCALE_BITS), float(2 ** (62 - _SCALE_BITS))


class ExactSums:
    """For each parameter the sum of the gradients that are added to it, as int64 with 44 bits behind the point.

    What is below 2^-45 rounds away, far under the 1e-8 that Adam adds to its denominators. Costs 8 bytes a value.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = tuple(parameters)
        device = self.parameters[0].device if self.parameters else None
        sizes = [parameter.numel() for parameter in self.parameters]
        self._flat = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        # Of the magnitudes of all sums on the way: no order of theirs comes to more than the sum of largest entries.
        self._bounds = torch.zeros(len(sizes), dtype=torch.float64, device=device)
        parts = zip(self.parameters, torch.split(self._flat, sizes), self._bounds, strict=True)
        self._of = {parameter: (part.view(parameter.shape), bound) for parameter, part, bound in parts}

    def clear(self) -> None:
        self._flat.zero_()
        self._bounds.zero_()

    @torch.no_grad()
    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.numel():
            total, bound = self._of[parameter]
            bound += torch.linalg.vector_norm(gradient, torch.inf)
            total += gradient.double().mul_(_SCALE).round_().long()

    def sum_all(self, ranks: Sum) -> None:
        """Add up the sums of ranks that hold the same parameters."""
        ranks(self._flat)
        ranks(self._bounds)

    def sum_over(self, ranks: Sum, parameters: Sequence[torch.Tensor]) -> None:
        """Add up the sums of some parameters. All ranks give those of one order; what one has no sum of, a parameter
        that does not train or a stand-in of its shape, counts nothing."""
        sums = [self._of.get(parameter, self._nothing(parameter)) for parameter in parameters]
        for parts in zip(*sums, strict=True):
            whole = torch.cat([part.reshape(-1) for part in parts])
            ranks(whole)
            for part, summed in zip(parts, torch.split(whole, [part.numel() for part in parts]), strict=True):
                part.copy_(summed.view(part.shape))

    def _nothing(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(parameter, dtype=torch.int64), self._bounds.new_zeros(())

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """The sum in float64, to be rounded once. NaN where a gradient was not finite; infinite where the sum may have
        left the range of fixed point (`gradient_fault` says so)."""
        total, bound = self._of[parameter]
        value = total.double().div_(_SCALE)
        value = torch.where(bound < _LIMIT, value, torch.inf)
        return torch.where(bound.isfinite(), value, torch.nan)


MAX_GRADIENT_NORM = 1.8e19  # float32 holds its square, which clipping and Adam's second moments are made of


def describe_norm_fault(norm: float, gradient: str = "the gradient") -> str:
    """Return why no step may be taken with a gradient of this norm; empty if one may. With a larger norm clipping would
    make every gradient 0, or Adam would make second moments infinite, and the step would count."""
    if norm <= MAX_GRADIENT_NORM:
        return ""
    if math.isfinite(norm):
        return f"the norm of {gradient} is {norm:.3g}, above {MAX_GRADIENT_NORM:.2g}, whose square float32 cannot hold"
    return f"{gradient} is not finite"


def gradient_fault(name: str, gradient: torch.Tensor, *, is_exact: bool) -> str:
    """What is wrong with the gradient of the weight `name`; empty for a sound one. `is_exact`: `ExactSums` made it."""
    if torch.isfinite(gradient).all():
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        return describe_norm_fault(norm, f"the gradient of {name}")
    if is_exact and not torch.isnan(gradient).any():
        return f"the gradient of {name} is above {_LIMIT:.3g}, which exact sums do not hold (leave out --deterministic)"
    return f"the gradient of {name} is not finite"


class Float32Accumulator(GradientAccumulator):
    """Sums in float32, in arrival order, left in `parameter.main_grad`: for weights of 16 bits."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        sum_over_replicas: Sum | None = None,
        *,
        copies: Copies = NO_COPIES,
    ) -> None:
        self._parameters, self._copies = list(parameters), copies
        self._sum_over_replicas = sum_over_replicas
        sizes = [parameter.numel() for parameter in self._parameters]
        device = self._parameters[0].device if sizes else None
        self._sums = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self._parts = torch.split(self._sums, sizes)
        self._hand_out()

    def begin(self, plan: ExecutionPlan) -> None:
        self._sums.zero_()
        self._hand_out()  # another stage may have been made of the same weights
        for parameter in self._parameters:
            parameter.grad = None

    def _hand_out(self) -> None:
        for parameter, own in zip(self._parameters, self._parts, strict=True):
            parameter.main_grad = own.view_as(parameter)  # type: ignore[attr-defined]

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
        sum_over_copies(self._copies)


class ExactAccumulator(GradientAccumulator):
    """Sums that do not depend on order or grouping: `ExactSums`, converted once.

    The same micro-batch gradients give the same bits in every order, on every split over replicas, whether the uses of
    a weight lie on one rank or on two. `in_float32` leaves them in `parameter.main_grad`, for weights of 16 bits.
    Otherwise a weight that no micro-batch used has the gradient None.
    """

    by_use = True

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        sum_over_replicas: Sum | None = None,
        *,
        copies: Copies = NO_COPIES,
        in_float32: bool = False,
    ) -> None:
        self._sums, self._copies = ExactSums(parameters), copies
        self._sum_over_replicas, self._in_float32 = sum_over_replicas, in_float32
        self._parameters, self._used = list(parameters), set[torch.Tensor]()

    def begin(self, plan: ExecutionPlan) -> None:
        self._sums.clear()
        self._used.clear()
        for parameter in self._sums.parameters:
            parameter.grad = None

    def add(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                self.add_weight(parameter, parameter.grad)
                parameter.grad = None

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        self._used.add(weight)
        self._sums.add(weight, gradient)

    def reduce(self) -> None:
        used = {*find_used(self._parameters, self._used | {*self._copies}, self._sum_over_replicas)}
        if self._sum_over_replicas is not None:
            self._sums.sum_all(self._sum_over_replicas)
        for weight, over_copies in self._copies.items():
            self._sums.sum_over(over_copies, [weight])
        for parameter in self._parameters:
            if self._in_float32:
                parameter.main_grad = self._sums.value(parameter).float()  # type: ignore[attr-defined]
            elif parameter in used:
                parameter.grad = self._sums.value(parameter).to(parameter.dtype)
