"""Megatron's local layers with this package's attention to documents, where loops ask for Transformer Engine's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.moe import moe_utils

from dynapipe_ext.executor.stages.megatron.layers import CoreAttention

# What a configuration says for layers without CUDA.
LOCAL = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "attention_softmax_in_fp32": True,
}

_block_spec = gpt_layer_specs.get_gpt_decoder_block_spec


vars(moe_utils).setdefault("te_general_gemm", None)  # routers ask for it, by a name that is undefined without it


def local_block_spec(config: Any, use_transformer_engine: bool = False, **keywords: Any) -> Any:
    """What `get_gpt_decoder_block_spec` is called for, whichever engine is named."""
    keywords |= {"normalization": config.normalization}
    block = _block_spec(config, use_transformer_engine=False, **keywords)
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
    return block


def pretend_device() -> None:
    """What loops ask of a device before and beside their steps: how many there are, and what they hold."""
    torch.cuda.device_count = lambda: 8
    torch.cuda.get_device_name = lambda *_, **__: "CPU"
    torch.cuda.mem_get_info = lambda *_, **__: (1, 1)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *_, **__: 0)
    torch.cuda.reset_peak_memory_stats = lambda *_, **__: None


class _Nothing(type):
    """Of classes that have every attribute, each another such class; called, they decorate."""

    def __call__(cls, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Absent(ModuleType):
    """A package that is not here: any name of it is there, and nothing of it runs."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _AbsentFinder:
    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, _: ModuleType) -> None: ...


def name_absent(*packages: str) -> None:
    """Imports of these packages, and from them, give classes that nothing is made of."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    sys.meta_path.append(_AbsentFinder(absent))
