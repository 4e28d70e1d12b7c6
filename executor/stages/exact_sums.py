"""Sums of gradients in fixed point: the same bits in every order and every grouping, over ranks as on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from dynapipe_ext.errors import ExecutionError

Sum = Callable[[torch.Tensor], None]  # over ranks, in place

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
        found = [self._of.get(parameter, self._nothing(parameter)) for parameter in parameters]
        for parts in zip(*found, strict=True):
            whole = torch.cat([part.reshape(-1) for part in parts])
            ranks(whole)
            for part, summed in zip(parts, torch.split(whole, [part.numel() for part in parts]), strict=True):
                part.copy_(summed.view(part.shape))

    def _nothing(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(parameter, dtype=torch.int64), self._bounds.new_zeros(())

    def check(self) -> None:
        """Errors: ExecutionError where a sum may have left the range of fixed point."""
        too_large = self._bounds[self._bounds.isfinite() & (self._bounds >= _LIMIT)]
        if too_large.numel():
            raise ExecutionError(
                f"gradients as large as {float(too_large.max()):.3g} leave the fixed-point range {_LIMIT:.3g} of exact"
                " sums: lower the learning rate, clip, or sum without deterministic mode (the plain accumulator)"
            )

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """The sum in float64, to be rounded once; NaN where a gradient was not finite."""
        total, bound = self._of[parameter]
        value = total.double().div_(_SCALE)
        return torch.where(bound.isfinite(), value, torch.nan)
