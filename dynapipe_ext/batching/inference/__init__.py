"""Batch inference in as few batches as memory allows. In: texts, or their lengths, and what one batch was measured to
need (or a learned memory model). Out: a DataLoader of such batches. Users' scripts and the commands `collect-memory`
and `train-memory-model` call it.

The names below load on first use, torch only with those that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynapipe_ext.lazy import lazy_names

if TYPE_CHECKING:
    from dynapipe_ext.batching.inference.generation import generate
    from dynapipe_ext.batching.inference.loader import build_dynamic_batch_dataloader

_HOMES = {
    "build_dynamic_batch_dataloader": "dynapipe_ext.batching.inference.loader",
    "generate": "dynapipe_ext.batching.inference.generation",
}

__all__ = [
    "build_dynamic_batch_dataloader",
    "generate",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
