"""T5's attention on Megatron's layers: relative positions, padding hidden, documents of a packed row kept apart."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
from torch.nn.attention import SDPBackend, sdpa_kernel

from dynapipe_ext.executor.stages.megatron.core_attention import CoreAttention
from dynapipe_ext.executor.stages.spread_attention import SpreadRows


class RelativePositions(RelativePositionEmbedding):  # type: ignore[misc] # megatron has no types
    """Megatron's learned biases of distances, under its name, of the heads of this tensor parallel rank.

    Layers ask for them one by one, so that what is recomputed holds none of them until then.
    """

    def by_distance(self, most: int) -> torch.Tensor:
        """Biases of the distances 1 - `most` to `most` - 1 (key minus query), shape (heads, 2 x most - 1)."""
        distances = torch.arange(1 - most, most, device=self.relative_attention_bias.weight.device)
        buckets = self._relative_position_bucket(
            distances,
            bidirectional=self.bidirectional,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        values_DH: torch.Tensor = scatter_to_tensor_model_parallel_region(self.relative_attention_bias(buckets))
        return values_DH.t()


def biases_of_rows(values_HD: torch.Tensor, length: int) -> torch.Tensor:
    """(heads, length, length) out of biases by distance: row q, column k has that of k - q.

    >>> biases_of_rows(torch.tensor([[-2, -1, 0, 1, 2]]), 2)
    tensor([[[ 0,  1],
             [-1,  0]]])
    """
    middle = values_HD.shape[1] // 2
    near = values_HD[:, middle - length + 1 : middle + length]
    return near.unfold(1, length, 1).flip(1)


class PairAttention(CoreAttention):
    """Attention of an encoder, of a decoder to itself (causal) and of a decoder to its encoder.

    q (S, B, heads, D), k and v (T, B, heads, D) -> (S, B, heads x D). `attention_mask` is for rows that are padded a
    bool (B, 1, 1, T), where True hides a key, or None; for a packed row whole numbers (2, documents): the positions of
    each document among queries and among keys. `attention_bias` are RelativePositions, or None.
    """

    carries = False
    gathers_keys = False

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
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if self.joined is None:
            return self._whole_sides(query, key, value, attention_mask, attention_bias).flatten(2)
        rows = SpreadRows(self.joined, query.shape[2], ())  # of two lengths, so heads are enough (`gathers_keys`)
        whole = rows.attended(query, key, value)
        return rows.returned(self._whole_sides(*whole, attention_mask, attention_bias)).flatten(2)

    def _whole_sides(
        self,
        q_SBHD: torch.Tensor,
        k_TBHD: torch.Tensor,
        v_TBHD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        positions: RelativePositions | None,
    ) -> torch.Tensor:
        """(S, B, heads, D)."""
        q_BHSD, k_BHTD, v_BHTD = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_TBHD, v_TBHD))
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            out_BHSD = self._pairs(q_BHSD, k_BHTD, v_BHTD, attention_mask.tolist(), positions)
        else:
            out_BHSD = self._rows(q_BHSD, k_BHTD, v_BHTD, attention_mask, self._biases(positions, q_BHSD.shape[2]))
        return out_BHSD.permute(2, 0, 1, 3)

    def _biases(self, positions: RelativePositions | None, most: int) -> torch.Tensor | None:
        """By distance, of the heads that this rank attends with."""
        return None if positions is None else self.own_heads(positions.by_distance(most))

    def _pairs(
        self,
        q_BHSD: torch.Tensor,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        lengths: list[list[int]],
        positions: RelativePositions | None,
    ) -> torch.Tensor:
        """Each document alone; the padding behind them is one more, which may have no key: its values are zero."""
        queries, keys = lengths
        if (sum(queries), sum(keys)) != (q_BHSD.shape[2], k_BHTD.shape[2]):
            raise ValueError(f"documents of {sum(queries)} and {sum(keys)} positions do not fill a packed row's sides")
        biases = self._biases(positions, max(queries))
        pieces = (torch.split(x, own, dim=2) for x, own in ((q_BHSD, queries), (k_BHTD, keys), (v_BHTD, keys)))
        outputs = [
            self._rows(q, k, v, None, biases) if k.shape[2] else torch.zeros_like(q)
            for q, k, v in zip(*pieces, strict=True)
        ]
        return torch.cat(outputs, dim=2)

    def _rows(
        self,
        q_BHSD: torch.Tensor,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        hidden_B11T: torch.Tensor | None,
        biases_HD: torch.Tensor | None,
    ) -> torch.Tensor:
        if biases_HD is None:
            seen = None if hidden_B11T is None else ~hidden_B11T
            return self._attend(q_BHSD, k_BHTD, v_BHTD, mask=seen)
        length = q_BHSD.shape[2]
        added_BHST = biases_of_rows(biases_HD, length)[None].to(q_BHSD.dtype)
        if self.is_causal:
            later = torch.ones(length, length, dtype=torch.bool, device=q_BHSD.device).triu(1)
            hidden_B11T = later if hidden_B11T is None else hidden_B11T | later
        if hidden_B11T is not None:
            added_BHST = added_BHST.masked_fill(hidden_B11T, torch.finfo(q_BHSD.dtype).min)
        # A bias that learns rules out torch's fused kernels, but not in the first pass of what is recomputed.
        with sdpa_kernel(SDPBackend.MATH) if self.is_deterministic else nullcontext():
            return self._attend(q_BHSD, k_BHTD, v_BHTD, mask=added_BHST)
