"""Causal core attention that restarts at each document: plugs into Megatron's layer spec.

Padded micro-batches need no mask (padding comes last, and causal attention never looks ahead). Packed ones (Megatron's
"thd" layout) attend within each document only, the first one, where it is a piece of a cut sample, to the earlier
pieces as well: by the best varlen kernel that is here on CUDA in 16 bits, by one scaled-dot-product call a document
elsewhere (the reference; exact on CPU).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dynapipe_ext.batch.packed_attention import (
    Borders,
    DocumentRule,
    VarlenKernel,
    attend,
    attend_by_kernel,
    kernel_for,
)
from dynapipe_ext.executor.stages.carried_keys import AttentionKernel, CarriedPiece


def _document_lengths(packed: Any) -> Sequence[int]:
    """From the host where the stage left them there; else read back from the device."""
    if hasattr(packed, "document_lengths"):
        lengths: Sequence[int] = packed.document_lengths
        return lengths
    return [end - start for start, end in itertools.pairwise(packed.cu_seqlens_q.tolist())]


@dataclass(frozen=True, slots=True)
class CarriedRow:
    """A packed row whose first document is a piece of a cut sample, beside Megatron's description of the row.

    `to_prefix` and `others` are PackedSeqParams: of the piece's queries and the keys up to its end, and of the
    documents behind it, None if there are none.
    """

    piece: CarriedPiece
    to_prefix: Any
    others: Any


class DocumentAttention(torch.nn.Module):
    """Megatron's CoreAttention protocol: softmax(QK^T scale)V, causal, per document in "thd" layout.

    Shapes: padded q, k, v (S, B, heads, D) -> (S, B, heads x D); packed (T, heads, D) -> (T, heads x D). Fewer key and
    value heads than query heads are shared in groups (GQA). `packed_seq_params.carried` is a CarriedRow for rows that
    have one. A subclass may look back on `window` positions alone, and cap scores.
    """

    carries = True  # whether it attends to earlier pieces
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
        if (row := getattr(packed_seq_params, "carried", None)) is not None:
            return self._carried(query, key, value, row)
        lengths = list(_document_lengths(packed_seq_params))
        if sum(lengths) != query.shape[0]:
            raise ValueError(f"documents of {sum(lengths)} positions do not fill a packed row of {query.shape[0]}")
        if (kernel := kernel_for(query, self._rule)) is not None:
            borders = Borders(lengths, packed_seq_params.cu_seqlens_q)
            return self._by_kernel(query, key, value, kernel=kernel, borders=borders).reshape(query.shape[0], -1)
        documents = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._document(*document) for document in documents]).reshape(query.shape[0], -1)

    def _carried(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, row: CarriedRow) -> torch.Tensor:
        """The piece to its sample up to its end, the other documents as ever: two calls, so that no keys are joined."""
        piece, length, q_THD = row.piece, row.piece.length, q_THD.contiguous()  # not a view that keeps keys and values
        own = q_THD[:length], k_THD[:length], v_THD[:length]
        if (kernel := kernel_for(q_THD, self._rule)) is None:
            attention: AttentionKernel = self._document
        else:
            queries = Borders([length], row.to_prefix.cu_seqlens_q)
            keys = Borders([piece.end], row.to_prefix.cu_seqlens_kv)
            attention = partial(self._by_kernel, kernel=kernel, borders=queries, keys=keys)
        recompute = kernel is None and not self._dropout
        out_TH = piece.attend(self, *own, attention, recompute=recompute).flatten(1)
        if row.others is None:
            return out_TH
        # Copies, for the same reason: the piece's keys and values are in the buffers of its sample.
        rest_TH = self(q_THD[length:], k_THD[length:].clone(), v_THD[length:].clone(), packed_seq_params=row.others)
        return torch.cat([out_TH, rest_TH])

    def _document(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        """One document alone, (T, heads, D); its queries are the last of its keys."""
        one = (x_THD.transpose(0, 1).unsqueeze(0) for x_THD in (q_THD, k_THD, v_THD))
        return self._sdpa(*one).squeeze(0).transpose(0, 1)

    def _by_kernel(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        *,
        kernel: VarlenKernel,
        borders: Borders,
        keys: Borders | None = None,
    ) -> torch.Tensor:
        with self.dropout_generator() if self._dropout else nullcontext():
            return attend_by_kernel(kernel, q_THD, k_THD, v_THD, borders, self._rule, keys=keys)

    @property
    def _rule(self) -> DocumentRule:
        return DocumentRule(
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            dropout=self._dropout,
            is_deterministic=self.is_deterministic,
        )

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
        """softmax(QK^T scale + mask)V with dropout; `mask` as torch's function takes it.

        Causal queries are the last of the keys, where these are more.
        """
        dropout = self._dropout
        with self.dropout_generator() if dropout else nullcontext():
            return attend(q_BHSD, k_BHTD, v_BHTD, mask=mask, is_causal=is_causal, dropout=dropout, scale=self.scale)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def dropout_generator(self) -> AbstractContextManager[Any]:
        """The context in which dropout draws; heads spread over tensor parallel ranks need a generator a rank."""
        return nullcontext()
