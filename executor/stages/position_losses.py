"""What a last stage makes of its positions' losses, the negative log probabilities of their labels: the run chooses.

Whatever computes those losses, whole logits or a head in chunks, hands them to a PositionLoss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dynapipe_ext.executor.protocols import Batch

NUM_FIGURES = 4  # of LossOfPairs


@dataclass(frozen=True, slots=True)
class LossOfPairs:
    """The sum of a micro-batch's losses, and `figures`, without gradients: the number of its pairs, and sums over them
    of the chosen answers' rewards, of the rejected ones', and of how often the chosen one's is higher."""

    total: torch.Tensor
    figures: torch.Tensor


# Of (losses in float32, shaped as the batch's "labels"; the batch): the sum that a step divides by its loss divisor.
PositionLoss = Callable[[torch.Tensor, Batch], torch.Tensor | LossOfPairs]


def weighted_sum(losses: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Every position's loss times its weight, summed."""
    total: torch.Tensor = (losses * batch["loss_weights"]).sum()
    return total
