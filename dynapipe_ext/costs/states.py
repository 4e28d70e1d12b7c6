"""Bytes of weights, gradients and optimizer states of one rank under ZeRO: what its device holds before any
micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from dynapipe_ext.costs.grid import IntArray
from dynapipe_ext.errors import ConfigError

StateRecipe = Literal["megatron", "mixed", "fp32", "deepspeed"]
ZeroStage = Literal[0, 1, 2, 3]
Offload = Literal["none", "optimizer", "weights", "all"]
RECIPES: tuple[StateRecipe, ...] = get_args(StateRecipe)
ZERO_STAGES: tuple[ZeroStage, ...] = get_args(ZeroStage)
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
# Bytes of one parameter's weight, gradient and optimizer states (Adam's two moments, 8, and 4 for an fp32 master of
# 16-bit weights), undivided.
BYTES_PER_PARAMETER: Mapping[StateRecipe, tuple[int, int, int]] = {
    "megatron": (2, 4, 12),  # gradients accumulate in fp32: 18 in all
    "mixed": (2, 2, 12),  # 16 in all (Rajbhandari et al. 2020, sec. 3.1)
    "fp32": (4, 4, 8),
    "deepspeed": (2, 2, 16),  # "mixed" and an fp32 copy of the gradients beside the master, as its estimators count
}
EXACT_SUM_BYTES = 8  # of a parameter's sum of gradients in fixed point, which every replica holds whole


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes on one rank of every stage, arrays of shape (S,). `optimizer`: master weights and moments."""

    weights: IntArray
    gradients: IntArray
    optimizer: IntArray

    @property
    def total(self) -> IntArray:
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )


def check_states(recipe: str, zero_stage: int, offload: str = "none") -> None:
    """Refuse a recipe, a ZeRO stage or an offload that is not known, and an offload that its stage does not have."""
    if recipe not in RECIPES:
        raise ConfigError(f"states recipe {recipe!r} is not known: give one of {', '.join(RECIPES)}")
    if zero_stage not in ZERO_STAGES:
        raise ConfigError(f"ZeRO stage {zero_stage!r} is not known: give 0 (nothing divided), 1, 2 or 3")
    if offload not in OFFLOADS:
        raise ConfigError(f"offload is {offload!r}: give one of {', '.join(OFFLOADS)}")
    if offload in ("weights", "all") and zero_stage != 3:
        raise ConfigError(
            f"offload {offload!r} moves weights, which zero_stage {zero_stage} does not divide: give stage 3"
        )


def state_bytes(
    parameters: int | IntArray,
    recipe: StateRecipe = "megatron",
    *,
    zero_stage: int = 0,
    dp: int = 1,
    gathered_parameters: int | IntArray = 0,
    frozen_parameters: int | IntArray = 0,
    exact_sums: bool = False,
    offload: Offload = "none",
) -> StateBytes:
    """States on the device of one rank with `parameters` in all (of every stage, if an array) and `dp` replicas.

    ZeRO stage 1 divides the optimizer over replicas, 2 gradients too, 3 weights too (Rajbhandari et al. 2020, fig. 1);
    Megatron's distributed optimizer is stage 1. Shares are rounded up. DeepSpeed's stage 2 frees no gradient memory at
    its peak, so its estimator counts 4 + 16 / dp; its stage 3 keeps 16-bit gradients of the gathered layer only, 18 /
    dp. At stage 3 the weights and gradients of `gathered_parameters`, those whole while one layer runs, come on top;
    `frozen_parameters` beside the others are weights alone; `exact_sums` of gradients come on top of these, whole.

    What is offloaded lies on the host (Ren et al. 2021, sec. 4): "optimizer" its states, and from stage 2 on the
    gradients, which leave the device as they are reduced; "weights" (ZeRO-Infinity, stage 3) those; "all" both. What is
    gathered is on the device all the same.
    Errors: ConfigError.

    >>> [int(state_bytes(24, recipe="mixed", zero_stage=stage, dp=24).total[0]) for stage in ZERO_STAGES]
    [384, 108, 62, 16]
    """
    check_states(recipe, zero_stage, offload)
    if dp < 1:
        raise ConfigError(f"states are divided over dp {dp}: give at least 1")
    count = np.atleast_1d(np.asarray(parameters, np.int64))
    gathered, frozen = (np.asarray(number, np.int64) for number in (gathered_parameters, frozen_parameters))
    if (count < 0).any() or (gathered < 0).any():
        raise ConfigError(f"parameters {count.min()} or gathered parameters {gathered.min()} cannot be negative")
    per_weight, per_gradient, per_optimizer = BYTES_PER_PARAMETER[recipe]

    def share(num_bytes: IntArray, *, divided: bool) -> IntArray:
        result: IntArray = -(-num_bytes // dp) if divided else num_bytes
        return result

    whole_at_once = gathered if zero_stage == 3 else 0 * gathered
    moves_optimizer, moves_weights = offload in ("optimizer", "all"), offload in ("weights", "all")
    weights = share((count + frozen) * per_weight, divided=zero_stage == 3)
    gradients = share(count * per_gradient, divided=zero_stage >= (3 if recipe == "deepspeed" else 2))
    if (recipe == "deepspeed" and zero_stage == 3) or (moves_optimizer and zero_stage >= 2):
        gradients = 0 * count
    return StateBytes(
        weights=weights * (not moves_weights) + whole_at_once * per_weight,
        gradients=gradients + whole_at_once * per_gradient + EXACT_SUM_BYTES * exact_sums * count,
        optimizer=share(count * per_optimizer, divided=zero_stage >= 1) * (not moves_optimizer),
    )
