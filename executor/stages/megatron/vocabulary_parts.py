"""Weights of which pipeline ranks have rows: part k of n is on pipeline rank k, and cut once more over tensor parallel
ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_PART = "dynapipe_vocabulary_part"  # attribute of a weight


def mark_part(weight: torch.Tensor, part: int, num_parts: int) -> None:
    setattr(weight, _PART, (part, num_parts))


def part_of(weight: torch.Tensor) -> tuple[int, int] | None:
    """Its number, and how many there are; None of a weight that one pipeline rank has whole."""
    part: tuple[int, int] | None = getattr(weight, _PART, None)
    return part


def block_of_rows(weight: torch.Tensor, tp_rank: int, tp: int) -> tuple[int, int]:
    """Which of how many equal blocks of a vocabulary's rows a rank has.

    >>> weight = torch.zeros(4, 2)
    >>> mark_part(weight, part=2, num_parts=4)
    >>> block_of_rows(weight, tp_rank=1, tp=2), block_of_rows(torch.zeros(4, 2), tp_rank=1, tp=2)
    ((5, 8), (1, 2))
    """
    part, num_parts = part_of(weight) or (0, 1)
    return part * tp + tp_rank, num_parts * tp


def save_by_rows(model: Any, key: str, weight: torch.Tensor, part: int, num_parts: int) -> None:
    """Mark a weight of a stage as a part, and have it saved as rows of the whole: any cut takes what another saved.

    `key` is the weight's among the stage's. Megatron knows tensor parallel ranks' rows alone.
    """
    mark_part(weight, part, num_parts)
    model.__dict__["sharded_state_dict"] = partial(_state_of_part, model, key, model.sharded_state_dict)


def _state_of_part(
    model: Any, key: str, state_of: Callable[..., Any], prefix: str = "", *arguments: Any, **options: Any
) -> Any:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    state = state_of(prefix, *arguments, **options)
    shard, weight = state[prefix + key], model.get_parameter(key)
    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    rows = (0, *block_of_rows(weight, tp_rank, tp))
    state[prefix + key] = ShardedTensor.from_rank_offsets(shard.key, shard.data, rows, replica_id=shard.replica_id)
    return state
