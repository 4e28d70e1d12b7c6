"""Causal core attention that restarts at each document: plugs into Megatron's layer spec.

Padded micro-batches need no mask (padding comes last, and causal attention never looks ahead). Packed ones (Megatron's
"thd" layout) attend within each document only, by the best varlen kernel that is here on CUDA in 16 bits, by one
scaled-dot-product call a document elsewhere (the reference; exact on CPU).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dynapipe_ext.packing.kernels import Borders, DocumentRule, attend, attend_by_kernel, kernel_for


def _document_lengths(packed: Any) -> Sequence[int]:
    """From the host where the stage left them there; else read back from the device."""
    if hasattr(packed, "document_lengths"):
        lengths: Sequence[int] = packed.document_lengths
        return lengths
    return [end - start for start, end in itertools.pairwise(packed.cu_seqlens_q.tolist())]


class DocumentAttention(torch.nn.Module):
    """Megatron's CoreAttention protocol: softmax(QK^T scale)V, causal, per document in "thd" layout.

    Shapes: padded q, k, v (S, B, heads, D) -> (S, B, heads x D); packed (T, heads, D) -> (T, heads x D). Fewer key and
    value heads than query heads are shared in groups (GQA). A subclass may look back on `window` positions alone, and
    cap scores.
    """

    window: int | None = None
    softcap = 0.0

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.dropout = float(config.attention_dropout)
        self.scale = softmax_scale
        self.is_deterministic = bool(config.deterministic_mode)

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
        if packed_seq_params is None:
            q_BHSD, k_BHSD, v_BHSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out_BHSD = self._sdpa(q_BHSD, k_BHSD, v_BHSD)
            return out_BHSD.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
        lengths = list(_document_lengths(packed_seq_params))
        if sum(lengths) != query.shape[0]:
            raise ValueError(f"documents of {sum(lengths)} positions do not fill a packed row of {query.shape[0]}")
        rule = DocumentRule(
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            dropout=self._dropout,
            is_deterministic=self.is_deterministic,
        )
        if (kernel := kernel_for(query, rule)) is not None:
            borders = Borders(lengths, packed_seq_params.cu_seqlens_q)
            with self.dropout_generator() if rule.dropout else nullcontext():
                out_THD = attend_by_kernel(kernel, query, key, value, borders, rule)
            return out_THD.reshape(query.shape[0], -1)
        documents = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
        outputs = [
            self._sdpa(*(x_THD.transpose(0, 1).unsqueeze(0) for x_THD in document)).squeeze(0).transpose(0, 1)
            for document in documents
        ]
        return torch.cat(outputs).reshape(query.shape[0], -1)

    def _sdpa(self, q_BHSD: torch.Tensor, k_BHSD: torch.Tensor, v_BHSD: torch.Tensor) -> torch.Tensor:
        return self._attend(q_BHSD, k_BHSD, v_BHSD, is_causal=True)

    def _attend(
        self,
        q_BHSD: torch.Tensor,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """softmax(QK^T scale + mask)V with dropout; `mask` as torch's function takes it."""
        dropout = self._dropout
        with self.dropout_generator() if dropout else nullcontext():
            return attend(q_BHSD, k_BHTD, v_BHTD, mask=mask, is_causal=is_causal, dropout=dropout, scale=self.scale)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def dropout_generator(self) -> AbstractContextManager[Any]:
        """The context in which dropout draws; heads spread over tensor parallel ranks need a generator a rank."""
        return nullcontext()
