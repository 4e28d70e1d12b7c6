"""T5 on megatron-core's T5Model: relative positions, unscaled attention, the scaled head of tied models."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch

from dynapipe_ext.executor.stages.megatron_layers import CoreAttention, MarkedNorm
from dynapipe_ext.models.architecture import Architecture


class BiasedAttention(CoreAttention):
    """Attention with Megatron's `attention_bias` (1, heads, S, T) and mask (B, 1, S, T; True hides); T: key positions.

    Causal where the layer's mask type says so. Packed rows are not possible: positions are relative within a row.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any = None, *rest: Any, **keywords: Any) -> None:
        super().__init__(config, layer_number, attn_mask_type, *rest, **keywords)
        self.is_causal = getattr(attn_mask_type, "name", "") == "causal"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if packed_seq_params is not None:
            raise ValueError(
                "T5's relative positions are counted within rows: give padded micro-batches, not packed ones"
            )
        q_BHSD, k_BHTD, v_BHTD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        added = self._added(q_BHSD, k_BHTD, attention_mask, attention_bias)
        out_BHSD = self._attend(q_BHSD, k_BHTD, v_BHTD, mask=added)
        return out_BHSD.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _added(
        self, q_BHSD: torch.Tensor, k_BHTD: torch.Tensor, hidden: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What is added to the scores before the softmax, or None."""
        rows, columns = q_BHSD.shape[2], k_BHTD.shape[2]
        if self.is_causal:
            later = torch.ones(rows, columns, dtype=torch.bool, device=q_BHSD.device).triu(1)
            hidden = later if hidden is None else hidden | later
        if hidden is None:
            return bias
        added = bias if bias is not None else q_BHSD.new_zeros(1, 1, rows, columns)
        return added.masked_fill(hidden, torch.finfo(q_BHSD.dtype).min)


def build_t5(architecture: Architecture, config: Any, vocab_size: int) -> torch.nn.Module:
    """A T5Model as published: of a tied one the decoder's output is scaled by hidden_size**-0.5 before the head.

    Megatron's tied head has a bias that published models lack: it is there, under its name, and stays zero.
    """
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    a = architecture
    encoder, decoder = encoder_model_with_local_spec(), decoder_model_with_local_spec()
    decoder.submodules.pre_cross_attn_layernorm = MarkedNorm
    decoder.submodules.cross_attention.submodules.core_attention = BiasedAttention
    for layer in (encoder, decoder):
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = MarkedNorm
        layer.submodules.self_attention.submodules.core_attention = BiasedAttention
    encoder_config = copy(config)
    encoder_config.num_layers = a.num_layers
    model: torch.nn.Module = T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=TransformerBlockSubmodules([encoder] * a.num_layers, layer_norm=MarkedNorm),
        transformer_decoder_layer_spec=TransformerBlockSubmodules(
            [decoder] * a.num_decoder_layers, layer_norm=MarkedNorm
        ),
        vocab_size=vocab_size,
        max_sequence_length=a.max_seq_len,
        share_embeddings_and_output_weights=a.tied_embeddings,
        position_embedding_type="relative",
        relative_attention_num_buckets=a.relative_buckets,
        relative_attention_max_distance=a.relative_max_distance,
    )
    if a.tied_embeddings:
        head: Any = model.lm_head
        head.output_layer.bias.requires_grad_(False)
        head.register_forward_pre_hook(
            lambda _module, inputs: (inputs[0] * a.hidden_size**-0.5, *inputs[1:]), with_kwargs=False
        )
    return model
