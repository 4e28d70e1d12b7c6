"""A stage without layers: a part of the head alone."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule

from dynapipe_ext.executor.stages.chunk_runner import HeadSlices
from dynapipe_ext.executor.stages.megatron.head import part_message
from dynapipe_ext.executor.stages.spread_head import Message


class HeadPart(MegatronModule):  # type: ignore[misc] # megatron has no types
    """`num_rows` rows of the head, over all tensor parallel ranks; with what else Megatron asks of a GPTModel."""

    pre_process, post_process, share_embeddings_and_output_weights = False, True, False

    def __init__(self, config: Any, num_rows: int, *, is_last: bool) -> None:
        super().__init__(config=config)
        self.is_last = is_last
        self.output_layer = tensor_parallel.ColumnParallelLinear(
            config.hidden_size,
            num_rows,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
        )

    def forward(
        self, labels_SB: torch.Tensor, slices: HeadSlices | None, x_SBH: torch.Tensor, *before: torch.Tensor
    ) -> Message:
        return part_message(self.output_layer, x_SBH, before, labels_SB, slices)

    def sharded_state_dict(self, prefix: str = "", *arguments: Any, **options: Any) -> Any:
        state = super().sharded_state_dict(prefix, *arguments, **options)
        state.pop(f"{prefix}output_layer._extra_state", None)  # as of a GPTModel: it holds nothing
        return state
