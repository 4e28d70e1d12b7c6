"""Core attention of Megatron's layers: causal, each document alone, with windows, caps and pieces of long samples.

Where a plan joins data parallel ranks, `joined` of each module says with which ranks it shares a row's positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dynapipe_ext.batch.packed_attention import (
    DocumentMask,
    DocumentOffsets,
    VarlenKernel,
    attend,
    attend_by_kernel,
    pick_kernel,
)
from dynapipe_ext.executor.stages.carried_keys import AttentionKernel, CarriedPiece
from dynapipe_ext.executor.stages.joined_ranks import JoinedRanks
from dynapipe_ext.executor.stages.spread_attention import (
    QuerySpan,
    SpreadRows,
    attend_piece_and_spans,
    attend_spans,
    heads_of,
)


def packed_lengths(packed: Any) -> Sequence[int]:
    """Those of a PackedSeqParams: from the host where the stage left them; else read back from the device."""
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
    gathers_keys = True  # whether joined ranks may be more than heads
    joined: JoinedRanks | None = None  # the ranks with which this one shares positions; the stage sets it for a step
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
        if self.joined is None:
            return self._whole_rows(query, key, value, packed_seq_params)
        return self._slices(self.joined, query, key, value, packed_seq_params)

    def _slices(
        self, joined: JoinedRanks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any
    ) -> torch.Tensor:
        """Of this rank's positions: it attends with a part of the heads over whole rows."""
        q_PBHD, k_PBHD, v_PBHD = (x if packed is None else x.unsqueeze(1) for x in (query, key, value))
        lengths = [joined.width * len(query)] if packed is None else packed_lengths(packed)
        rows = SpreadRows(joined, query.shape[-2], lengths)
        q_NBHD, k_TBHD, v_TBHD = rows.attended(q_PBHD, k_PBHD, v_PBHD)
        if rows.spans is not None:
            out_NBHD = self._spans(q_NBHD, k_TBHD, v_TBHD, rows.spans, packed)
        else:
            query, key, value = (x if packed is None else x.squeeze(1) for x in (q_NBHD, k_TBHD, v_TBHD))
            out_NBHD = self._whole_rows(query, key, value, packed).reshape(*q_NBHD.shape[:3], v_TBHD.shape[-1])
        out_PBHD = rows.returned(out_NBHD)
        return out_PBHD.flatten(2) if packed is None else out_PBHD.squeeze(1).flatten(1)

    def _spans(
        self,
        q_NBHD: torch.Tensor,
        k_TBHD: torch.Tensor,
        v_TBHD: torch.Tensor,
        spans: Sequence[QuerySpan],
        packed: Any,
    ) -> torch.Tensor:
        """Of some queries alone, in their order, with the keys of whole rows: (N, B, heads, D)."""
        row: CarriedRow | None = getattr(packed, "carried", None)
        if row is None:
            return attend_spans(q_NBHD, k_TBHD, v_TBHD, spans, self._documents)
        recompute = pick_kernel(q_NBHD, self._rule) is None and not self._dropout
        return attend_piece_and_spans(
            q_NBHD, k_TBHD, v_TBHD, spans, self._documents, piece=row.piece, layer=self, recompute=recompute
        )

    def _documents(
        self, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Of documents, each with its queries, which are the last of its keys."""
        kernel = pick_kernel(queries[0], self._rule)
        if kernel is None:
            return torch.cat([self._document(*document) for document in zip(queries, keys, values, strict=True)])
        q_borders, k_borders = (DocumentOffsets.of([len(x) for x in of], queries[0].device) for of in (queries, keys))
        tensors = [torch.cat(list(of)) for of in (queries, keys, values)]
        return self._by_kernel(*tensors, kernel=kernel, borders=q_borders, keys=k_borders)

    def _whole_rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_seq_params: Any
    ) -> torch.Tensor:
        if packed_seq_params is None:
            q_BHSD, k_BHSD, v_BHSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out_BHSD = self._sdpa(q_BHSD, k_BHSD, v_BHSD)
            return out_BHSD.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
        if (row := getattr(packed_seq_params, "carried", None)) is not None:
            return self._carried(query, key, value, row)
        lengths = list(packed_lengths(packed_seq_params))
        if sum(lengths) != query.shape[0]:
            raise ValueError(f"documents of {sum(lengths)} positions do not fill a packed row of {query.shape[0]}")
        if (kernel := pick_kernel(query, self._rule)) is not None:
            borders = DocumentOffsets(lengths, packed_seq_params.cu_seqlens_q)
            return self._by_kernel(query, key, value, kernel=kernel, borders=borders).reshape(query.shape[0], -1)
        documents = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._document(*document) for document in documents]).reshape(query.shape[0], -1)

    def _carried(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, row: CarriedRow) -> torch.Tensor:
        """The piece to its sample up to its end, the other documents as ever: two calls, so that no keys are joined."""
        piece, length, q_THD = row.piece, row.piece.length, q_THD.contiguous()  # not a view that keeps keys and values
        own = q_THD[:length], k_THD[:length], v_THD[:length]
        if (kernel := pick_kernel(q_THD, self._rule)) is None:
            attention: AttentionKernel = self._document
        else:
            queries = DocumentOffsets([length], row.to_prefix.cu_seqlens_q)
            keys = DocumentOffsets([piece.end], row.to_prefix.cu_seqlens_kv)
            attention = partial(self._by_kernel, kernel=kernel, borders=queries, keys=keys)
        recompute = kernel is None and not self._dropout
        out_TH = piece.attend(self, *own, attention, recompute=recompute).flatten(1)
        if row.others is None:
            return out_TH
        # Copies, for the same reason: the piece's keys and values are in the buffers of its sample.
        rest_TH = self._whole_rows(q_THD[length:], k_THD[length:].clone(), v_THD[length:].clone(), row.others)
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
        borders: DocumentOffsets,
        keys: DocumentOffsets | None = None,
    ) -> torch.Tensor:
        with self.dropout_generator() if self._dropout else nullcontext():
            return attend_by_kernel(kernel, q_THD, k_THD, v_THD, borders, self._rule, keys=keys)

    @property
    def _rule(self) -> DocumentMask:
        return DocumentMask(
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

    def own_heads(self, of_heads: torch.Tensor) -> torch.Tensor:
        """Of what has a value for each query head of this tensor parallel rank, that of the heads it attends with."""
        return of_heads if self.joined is None else heads_of(self.joined, of_heads)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def dropout_generator(self) -> AbstractContextManager[Any]:
        """The context in which dropout draws; heads spread over tensor parallel ranks need a generator a rank."""
        return nullcontext()


class CoreAttention(DocumentAttention):
    """Draws dropout from Megatron's generator of this tensor parallel rank: heads on two ranks must not share masks.

    A `softcap` above 0 caps the scores, softcap x tanh(scores / softcap); no kernel of torch's does, so they are whole.
    """

    def _attend(
        self,
        q_BHSD: torch.Tensor,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        if not self.softcap:
            return super()._attend(q_BHSD, k_BHTD, v_BHTD, mask=mask, is_causal=is_causal)
        groups = q_BHSD.shape[1] // k_BHTD.shape[1]
        k_BHTD, v_BHTD = (x.repeat_interleave(groups, dim=1) for x in (k_BHTD, v_BHTD))
        scale = self.scale if self.scale is not None else q_BHSD.shape[-1] ** -0.5
        scores = self.softcap * torch.tanh(q_BHSD @ k_BHTD.transpose(2, 3) * scale / self.softcap)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            mask = mask.tril(scores.shape[-1] - scores.shape[-2])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q_BHSD.dtype)
        if self.training and self.dropout:
            with self.dropout_generator():
                shares = torch.nn.functional.dropout(shares, self.dropout)
        return shares @ v_BHTD

    def dropout_generator(self) -> AbstractContextManager[Any]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        tracker: AbstractContextManager[Any] = get_cuda_rng_tracker().fork()
        return tracker


class WindowAttention(CoreAttention):
    """Causal attention to the last `window` positions, each its own included, computed in blocks of queries.

    Memory is that of a block by two windows, not of a square. On one window or less it is CoreAttention's.
    """

    carries = False

    def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, *arguments, **keywords)
        self.window: int = config.window_size[0] + 1

    def _sdpa(self, q_BHSD: torch.Tensor, k_BHTD: torch.Tensor, v_BHTD: torch.Tensor) -> torch.Tensor:
        num_keys = k_BHTD.shape[2]
        if num_keys <= self.window:
            return super()._sdpa(q_BHSD, k_BHTD, v_BHTD)
        blocks, before = [], num_keys - q_BHSD.shape[2]  # queries are the last of the keys
        for start in range(before, num_keys, self.window):
            end, first = min(start + self.window, num_keys), max(0, start - self.window + 1)
            queries = torch.arange(start, end, device=q_BHSD.device)
            back = queries[:, None] - torch.arange(first, end, device=q_BHSD.device)
            seen = (back >= 0) & (back < self.window)
            k_block, v_block = k_BHTD[:, :, first:end], v_BHTD[:, :, first:end]
            blocks.append(self._attend(q_BHSD[:, :, start - before : end - before], k_block, v_block, mask=seen))
        return torch.cat(blocks, dim=2)
