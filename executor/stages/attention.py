"""Causal core attention that restarts at each document: plugs into Megatron's layer spec.

Padded micro-batches need no mask (padding comes last, and causal attention never looks ahead). Packed ones (Megatron's
"thd" layout) attend within each document only. Backends, best first: flash-attn's varlen kernels on CUDA in 16 bits,
one scaled-dot-product call a document elsewhere (the reference; exact on CPU).
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F


def attention_backend() -> str:
    """Name of the kernel that packed batches run on here: "flash-attn" or "sdpa"."""
    if torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None:
        return "flash-attn"
    return "sdpa"


def _document_lengths(packed: Any) -> Sequence[int]:
    """From the host where the stage left them there; else read back from the device."""
    if hasattr(packed, "document_lengths"):
        lengths: Sequence[int] = packed.document_lengths
        return lengths
    return [end - start for start, end in itertools.pairwise(packed.cu_seqlens_q.tolist())]


class DocumentAttention(torch.nn.Module):
    """Megatron's CoreAttention protocol: softmax(QK^T scale)V, causal, per document in "thd" layout.

    Shapes: padded q, k, v (S, B, heads, D) -> (S, B, heads x D); packed (T, heads, D) -> (T, heads x D). Fewer key and
    value heads than query heads are shared in groups (GQA).
    """

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
        self.backend = attention_backend()
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
        if self.backend == "flash-attn" and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            return self._flash(query, key, value, packed_seq_params)
        lengths = list(_document_lengths(packed_seq_params))
        if sum(lengths) != query.shape[0]:
            raise ValueError(f"documents of {sum(lengths)} positions do not fill a packed row of {query.shape[0]}")
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
        groups = q_BHSD.shape[1] // k_BHTD.shape[1]
        if groups > 1:
            k_BHTD, v_BHTD = (x.repeat_interleave(groups, dim=1) for x in (k_BHTD, v_BHTD))
        dropout = self.dropout if self.training else 0.0
        with self.dropout_generator() if dropout else nullcontext():
            return F.scaled_dot_product_attention(
                q_BHSD, k_BHTD, v_BHTD, attn_mask=mask, is_causal=is_causal, dropout_p=dropout, scale=self.scale
            )

    def dropout_generator(self) -> AbstractContextManager[Any]:
        """The context in which dropout draws; heads spread over tensor parallel ranks need a generator a rank."""
        return nullcontext()

    def _flash(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, packed: Any) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func

        dropout = self.dropout if self.training else 0.0
        with self.dropout_generator() if dropout else nullcontext():
            out_THD: torch.Tensor = flash_attn_varlen_func(
                q_THD,
                k_THD,
                v_THD,
                packed.cu_seqlens_q,
                packed.cu_seqlens_kv,
                packed.max_seqlen_q,
                packed.max_seqlen_kv,
                dropout_p=dropout,
                softmax_scale=self.scale,
                causal=True,
                deterministic=self.is_deterministic,
            )
        return out_THD.reshape(q_THD.shape[0], -1)
