"""Records and rows for transformers models. In: records of text fields, or documents of token ids. Out: inputs of a
model whose documents do not see each other. Users' own training loops call it.

The names below load on first use, torch and transformers only with those that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynapipe_ext.lazy import lazy_names

if TYPE_CHECKING:
    from dynapipe_ext.batch.document_attention import register_document_attention
    from dynapipe_ext.batching.packing.check import check_packing
    from dynapipe_ext.batching.packing.collator import PackingCollator
    from dynapipe_ext.batching.packing.dynamicat import loss_weight, scaled_learning_rate
    from dynapipe_ext.batching.packing.record_tokens import tokenize_records

_HOMES = {
    "PackingCollator": "dynapipe_ext.batching.packing.collator",
    "check_packing": "dynapipe_ext.batching.packing.check",
    "loss_weight": "dynapipe_ext.batching.packing.dynamicat",
    "register_document_attention": "dynapipe_ext.batch.document_attention",
    "scaled_learning_rate": "dynapipe_ext.batching.packing.dynamicat",
    "tokenize_records": "dynapipe_ext.batching.packing.record_tokens",
}

__all__ = [
    "PackingCollator",
    "check_packing",
    "loss_weight",
    "register_document_attention",
    "scaled_learning_rate",
    "tokenize_records",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
