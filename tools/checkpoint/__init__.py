"""A wing: checkpoints of one format to another. In: a folder that a format recognises. Out: a folder of another format,
tensor for tensor. `converter.py` joins any reader of `formats.py` with any writer; `dynapipe convert` calls it, and so
do runs that start from published weights or end with them.

All outside this folder take the names below from here. They load on first use, torch only with those that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynapipe_ext.lazy import lazy_names

if TYPE_CHECKING:
    from dynapipe_ext.tools.checkpoint.converter import convert, prepare_conversion
    from dynapipe_ext.tools.checkpoint.formats import CheckpointReader, WriterOptions
    from dynapipe_ext.tools.checkpoint.huggingface.carried_files import CARRIED_FOLDER, carried_files
    from dynapipe_ext.tools.checkpoint.huggingface.merging import merge_adapters
    from dynapipe_ext.tools.checkpoint.megatron.export import export_hf_weights, weight_buckets
    from dynapipe_ext.tools.checkpoint.megatron.loading import load_hf_weights
    from dynapipe_ext.tools.checkpoint.megatron.names import megatron_weights
    from dynapipe_ext.tools.checkpoint.recognition import FORMATS, TARGETS, has_all_weights, recognise

_HOMES = {
    "CARRIED_FOLDER": "dynapipe_ext.tools.checkpoint.huggingface.carried_files",
    "FORMATS": "dynapipe_ext.tools.checkpoint.recognition",
    "TARGETS": "dynapipe_ext.tools.checkpoint.recognition",
    "CheckpointReader": "dynapipe_ext.tools.checkpoint.formats",
    "WriterOptions": "dynapipe_ext.tools.checkpoint.formats",
    "carried_files": "dynapipe_ext.tools.checkpoint.huggingface.carried_files",
    "convert": "dynapipe_ext.tools.checkpoint.converter",
    "export_hf_weights": "dynapipe_ext.tools.checkpoint.megatron.export",
    "has_all_weights": "dynapipe_ext.tools.checkpoint.recognition",
    "load_hf_weights": "dynapipe_ext.tools.checkpoint.megatron.loading",
    "merge_adapters": "dynapipe_ext.tools.checkpoint.huggingface.merging",
    "megatron_weights": "dynapipe_ext.tools.checkpoint.megatron.names",
    "prepare_conversion": "dynapipe_ext.tools.checkpoint.converter",
    "recognise": "dynapipe_ext.tools.checkpoint.recognition",
    "weight_buckets": "dynapipe_ext.tools.checkpoint.megatron.export",
}

__all__ = [
    "CARRIED_FOLDER",
    "FORMATS",
    "TARGETS",
    "CheckpointReader",
    "WriterOptions",
    "carried_files",
    "convert",
    "export_hf_weights",
    "has_all_weights",
    "load_hf_weights",
    "megatron_weights",
    "merge_adapters",
    "prepare_conversion",
    "recognise",
    "weight_buckets",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
