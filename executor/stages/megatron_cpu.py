"""Lets megatron-core run on a machine without CUDA, by redirecting the CUDA calls that it makes without asking.

`install()` is called explicitly, before megatron is imported, by whoever builds a Megatron stage. Where CUDA
exists it does nothing. It changes torch for the whole process (device "cuda" means the CPU, streams and events do
nothing), which is why nothing here happens at import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils._device import _device_constructors

_GENERATOR_MOVED = "CPU RNG state changed within GPU RNG context"
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "as_tensor", "eye")
_CPU = torch.device("cpu")


class _NoStream:
    """Stands for a CUDA stream or event: everything on a CPU is already in order."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _NoStream:
        return self

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return redirected


def _nothing() -> Callable[..., None]:
    """One for each call that is replaced: torch's compiler refuses one function under two names."""
    return lambda *_, **__: None


def install() -> bool:
    """Redirect CUDA calls to the CPU; True if this process now runs so, False where CUDA exists. Idempotent."""
    if torch.cuda.is_available():
        return False
    if getattr(torch.cuda.current_device, "_dynapipe_cpu", False):
        return True
    _import_megatron_uncompiled()

    def current_device() -> torch.device:
        return _CPU

    current_device._dynapipe_cpu = True  # type: ignore[attr-defined]
    stream = _NoStream()
    replacements: dict[str, Any] = {
        "current_device": current_device,
        "set_device": _nothing(),
        "synchronize": _nothing(),
        "empty_cache": _nothing(),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
        "Stream": _NoStream,
        "Event": _NoStream,
        "stream": lambda *_, **__: _NoStream(),
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _nothing())
    _device_constructors()  # remembers which factories `with torch.device(...)` leads, before they are wrapped
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    plain_type = torch.Tensor.type

    def type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron's optimizers compare `param.type()` with "torch.cuda.FloatTensor" and the like."""
        if args or kwargs:
            return plain_type(self, *args, **kwargs)
        return plain_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_as_on_cuda  # type: ignore[assignment, method-assign]
    _redirect_megatron_generator_state()
    _take_split_sizes_as_tensors()
    _share_network_devices()
    return True


def _share_network_devices() -> None:
    """All groups use the network devices of the group of all ranks.

    Megatron makes some twenty groups. With a device each, as torch gives them, so many threads look around a hundred
    times a second: 2 % of a core a rank when nothing moves, and half as much again for what does.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo

    class OnWorldsDevices(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            world = torch.distributed.group.WORLD
            backend = world._get_backend(_CPU) if world is not None else None
            if not isinstance(backend, gloo):
                super().__init__(store, rank, size, timeout)
                return
            options = gloo._Options()
            options._devices = backend.options._devices
            options._threads, options._timeout = backend.options._threads, timeout
            super().__init__(store, rank, size, options)

    torch.distributed.distributed_c10d.ProcessGroupGloo = OnWorldsDevices  # type: ignore[misc]


def _import_megatron_uncompiled() -> None:
    """Megatron decorates small functions with torch.compile at import: minutes of C++ compilation on a CPU."""
    importlib.import_module("torch._dynamo")  # for torch.optim; its tables are built before anything is redirected
    with uncompiled(), warnings.catch_warnings(), triton_named():
        warnings.simplefilter("ignore")  # on what Transformer Engine and Apex would do, which need CUDA
        from megatron.core import jit

        jit.disable_jit_fuser()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, `torch.compile` leaves functions as they are."""
    compile_function = torch.compile
    torch.compile = lambda function, *_, **__: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function


@contextmanager
def triton_named() -> Iterator[None]:
    """megatron-core from 0.18 on imports triton, which torch for CPUs does not bring. Here is its name alone, whose
    decorators do nothing: no kernel can run without CUDA."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    importlib.import_module("torch._inductor.runtime.hints")  # looks for triton, once

    names = ("triton", "triton.language")
    for name in names:
        sys.modules[name] = _Named(name)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class _Named(ModuleType):
    __version__ = "0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", _decorator)


def _decorator(*arguments: Any, **_: Any) -> Any:
    """Used with arguments or without."""
    return arguments[0] if arguments and callable(arguments[0]) else lambda function: function


def _take_split_sizes_as_tensors() -> None:
    """Megatron's dispatchers make numbers of split sizes that lie on a device, and leave those on a CPU tensors."""
    exchange = torch.distributed.all_to_all_single

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        here, there = (
            x.tolist() if isinstance(x, torch.Tensor) else x for x in (output_split_sizes, input_split_sizes)
        )
        return exchange(output, input, here, there, *arguments, **keywords)

    torch.distributed.all_to_all_single = all_to_all_single


def _redirect_megatron_generator_state() -> None:
    """Megatron's RNG tracker reaches into `torch.cuda.default_generators`, which is empty without CUDA.

    It also warns when the CPU's generator has moved inside its contexts; here that is the one that they are about.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(megatron_random.__name__).addFilter(lambda record: record.msg != _GENERATOR_MOVED)
