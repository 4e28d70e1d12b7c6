"""Parts of the word embedding: stages without layers that add their rows, and the first layers' own part.

Of each position one part has the row and the others add zeros, so that the sum has the bits of one whole table.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule

from dynapipe_ext.executor.stages.megatron.head import block_of_rows
from dynapipe_ext.executor.stages.replaced_forward import replace_forward

_RECEIVED = "dynapipe_received"  # attribute of a GPTModel: the sum over the parts before its own


class EmbeddingPart(MegatronModule):  # type: ignore[misc] # megatron has no types
    """`num_rows` rows of the embedding, over all tensor parallel ranks; with what else Megatron asks of a GPTModel."""

    pre_process, post_process, share_embeddings_and_output_weights = True, False, False

    def __init__(self, config: Any, num_rows: int) -> None:
        super().__init__(config=config)
        self.embedding = MegatronModule(config=config)  # by whose name the whole model has it
        self.embedding.word_embeddings = tensor_parallel.VocabParallelEmbedding(
            num_rows,
            config.hidden_size,
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
        )

    def forward(self, tokens_BS: torch.Tensor, received_SBH: torch.Tensor | None = None) -> torch.Tensor:
        layer = self.embedding.word_embeddings
        words: torch.Tensor = layer(tokens_BS)
        own_SBH = words if layer.reduce_scatter_embeddings else words.transpose(0, 1).contiguous()
        return own_SBH if received_SBH is None else received_SBH + own_SBH


def look_up_own_rows(layer: Any) -> None:
    """Have a VocabParallelEmbedding whose weight is a part give zeros for ids of other parts."""
    number, _ = block_of_rows(layer.weight, layer.tp_group.rank(), layer.tp_group.size())
    first_id = number * layer.num_embeddings_per_partition
    replace_forward(layer, lambda layer, ids_BS: _own_rows(layer, first_id, ids_BS))


def _own_rows(layer: Any, first_id: int, ids_BS: torch.Tensor) -> torch.Tensor:
    own_BS = ids_BS - first_id
    is_other_BS = (own_BS < 0) | (own_BS >= layer.num_embeddings_per_partition)
    own_BS = own_BS.masked_fill(is_other_BS, 0)
    rows_BSH = layer.weight[own_BS] if layer.deterministic_mode else F.embedding(own_BS, layer.weight)
    rows_BSH = rows_BSH.masked_fill(is_other_BS[..., None], 0.0)
    if layer.reduce_scatter_embeddings:
        rows_SBH = rows_BSH.transpose(0, 1).contiguous()
        words: torch.Tensor = tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows_SBH, group=layer.tp_group)
    else:
        words = tensor_parallel.reduce_from_tensor_model_parallel_region(rows_BSH, group=layer.tp_group)
    return words


def add_received(model: Any) -> None:
    """Have a GPTModel add what its embedding `receives` where its own rows and positions are summed: before dropout."""

    def added(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        received: torch.Tensor = model.__dict__.pop(_RECEIVED)
        return (inputs[0] + received,)

    model.embedding.embedding_dropout.register_forward_pre_hook(added)


def receive(model: Any, x_SBH: torch.Tensor) -> None:
    """For the forward that follows."""
    model.__dict__[_RECEIVED] = x_SBH
