"""What some families add to core attention: sinks, capped scores, chunks, scales by position.

Each function takes a class of core attention (`core_attention.py`) and gives one of the same protocol.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from dynapipe_ext.batch.packed_attention import DocumentMask, DocumentOffsets
from dynapipe_ext.executor.stages.megatron.core_attention import packed_lengths

_SINK_WIDTH = 8  # by which queries and keys widen: kernels want widths of whole vectors


class UnitNorm(torch.nn.Module):
    """Each head of a query or key over the root of its mean square; it has no weights. Computed in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        wide = heads.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(heads)


def in_chunks(attention: Any, size: int) -> type:
    """Where a position sees those of its chunk of `size` positions alone: each chunk is a document of its own."""

    class Chunked(attention):  # type: ignore[misc]
        carries = False
        gathers_keys = False

        def _sdpa(self, q_BHSD: torch.Tensor, k_BHSD: torch.Tensor, v_BHSD: torch.Tensor) -> torch.Tensor:
            chunks = zip(*(torch.split(x, size, dim=2) for x in (q_BHSD, k_BHSD, v_BHSD)), strict=True)
            return torch.cat([super(Chunked, self)._sdpa(*chunk) for chunk in chunks], dim=2)

        def _by_kernel(self, q_THD: torch.Tensor, *others: Any, borders: DocumentOffsets, **options: Any) -> Any:
            lengths = [min(size, length - start) for length in borders.lengths for start in range(0, length, size)]
            return super()._by_kernel(q_THD, *others, borders=DocumentOffsets.of(lengths, q_THD.device), **options)

    return Chunked


def scaled_by_position(attention: Any, floor: int, scale: float) -> type:
    """Where the query at position p of its document is multiplied by 1 + scale x log(1 + floor((p + 1) / floor))."""

    class Scaled(attention):  # type: ignore[misc]
        carries = False
        gathers_keys = False

        def _whole_rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any) -> torch.Tensor:
            lengths = [len(query)] if packed is None else packed_lengths(packed)
            places = torch.cat([torch.arange(length, device=query.device) for length in lengths])
            scales = torch.log1p(torch.floor((places.float() + 1.0) / floor)) * scale + 1.0
            query = (query * scales.view(-1, *[1] * (query.dim() - 1))).to(query.dtype)
            whole: torch.Tensor = super()._whole_rows(query, key, value, packed)
            return whole

    return Scaled


def capped(attention: Any, cap: float) -> type:
    """With capped scores, which no kernel of flash-attn is asked for."""

    class Capped(attention):  # type: ignore[misc]
        softcap = cap

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.backend = "sdpa"

    return Capped


def _widened_by_sink(
    q_BHSD: torch.Tensor, k_BHTD: torch.Tensor, v_BHTD: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values with a key more before all others, whose product with a query is its head's score."""
    columns = F.pad(scores, (0, _SINK_WIDTH - 1)).expand(*q_BHSD.shape[:-1], _SINK_WIDTH)
    sink = F.pad(k_BHTD.new_ones(()).expand(*k_BHTD.shape[:2], 1, 1), (q_BHSD.shape[-1], _SINK_WIDTH - 1))
    keys = torch.cat([sink, F.pad(k_BHTD, (0, _SINK_WIDTH))], dim=2)
    return torch.cat([q_BHSD, columns], dim=-1), keys, F.pad(v_BHTD, (0, _SINK_WIDTH, 1, 0))


def with_sinks(attention: Any) -> type:
    """With a learned score for each head, `softmax_offset`, that takes its share of the softmax and gives nothing.

    It stands as one more key before all others, of value 0, whose product with a query is the head's score.
    """

    class Sinks(attention):  # type: ignore[misc]
        carries = False
        scale: float | None

        def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
            from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

            super().__init__(config, *arguments, **keywords)
            if self.scale is None:  # not of the widths below
                self.scale = config.kv_channels**-0.5
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

        @property
        def _rule(self) -> DocumentMask:
            rule: DocumentMask = super()._rule
            return replace(rule, has_sinks=True)

        def _attend(
            self,
            q_BHSD: torch.Tensor,
            k_BHTD: torch.Tensor,
            v_BHTD: torch.Tensor,
            *,
            mask: torch.Tensor | None = None,
            is_causal: bool = False,
        ) -> torch.Tensor:
            assert self.scale is not None
            scores = (self.own_heads(self.softmax_offset) / self.scale)[:, None, None].to(q_BHSD.dtype)
            widened = _widened_by_sink(q_BHSD, k_BHTD, v_BHTD, scores)
            mask = None if mask is None else F.pad(mask, (1, 0), value=True)
            out_BHSD: torch.Tensor = super()._attend(*widened, mask=mask, is_causal=is_causal)
            return out_BHSD[..., : q_BHSD.shape[-1]]

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
        ) -> Any:
            from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

            own = {"softmax_offset": self.softmax_offset}
            return make_sharded_tensors_for_checkpoint(own, prefix, {"softmax_offset": 0}, sharded_offsets)

    return Sinks
