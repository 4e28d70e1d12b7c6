"""What of a Megatron chunk's activations is recomputed, from micro-batch to micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dynapipe_ext.executor.stages.random_state import Replay, replay_torch
from dynapipe_ext.plan import Recompute


class RecomputeSwitch:
    """Of one model chunk's layers. Megatron reads these settings at run time: "full" in its block's forward,
    "selective" in each attention layer's."""

    def __init__(self, chunk: Any) -> None:
        from megatron.core.transformer.attention import Attention
        from megatron.core.transformer.transformer_block import TransformerBlock

        modules = list(chunk.modules())
        self._blocks = [module for module in modules if isinstance(module, TransformerBlock)]
        self._attentions = [module for module in modules if isinstance(module, Attention)]

    def set(self, recompute: Recompute) -> None:
        """For the forwards to come."""
        full = recompute == "full"
        for block in self._blocks:
            block.config.recompute_granularity = "full" if full else None
            block.config.recompute_method = "uniform" if full else None
            block.config.recompute_num_layers = 1 if full else None
        for attention in self._attentions:
            attention.checkpoint_core_attention = recompute == "selective"


def replay_megatron(device: torch.device) -> Replay:
    """As `replay_torch`, with the generators that Megatron keeps for its tensor parallel ranks."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    replayed, tracker = replay_torch(device), get_cuda_rng_tracker()
    states = tracker.get_states()

    @contextmanager
    def replay() -> Iterator[None]:
        before = tracker.get_states()
        tracker.set_states(states)
        try:
            with replayed():
                yield
        finally:
            tracker.set_states(before)

    return replay
