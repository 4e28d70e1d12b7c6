"""The most memory that a call of torch takes on a device, and which errors mean that there is too little of it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

MeasurePeak = Callable[[Callable[[], Any]], tuple[Any, int]]  # runs a call -> its result, and its peak in bytes


def measure_on(device: torch.device) -> MeasurePeak:
    """How peaks are measured on a device: by torch's counters on CUDA, by the profiler's memory events elsewhere."""
    return functools.partial(cuda_peak, device) if device.type == "cuda" else profiled_peak


def cuda_peak(device: torch.device, call: Callable[[], Any]) -> tuple[Any, int]:
    """A call's result, and the most bytes allocated on the device above those at its start."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    return result, torch.cuda.max_memory_allocated(device) - before


def profiled_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """A call's result, and the most bytes allocated on the host above those at its start, by the profiler's events."""
    profiled: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet():
        profiled.__enter__()
    try:
        result = call()
    finally:
        with _quiet():
            profiled.__exit__(None, None, None)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = np.array([0, *(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))], np.int64)
    return result, int(changes.cumsum().max())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on standard error: some versions of the profiler's C++ core log each start and stop there."""
    try:
        stderr_copy = os.dup(2)
    except OSError:  # there is none
        yield
        return
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
        os.close(nowhere)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a batch was too large for the memory of its device, or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in ("out of memory", "can't allocate memory", "cublas_status_alloc_failed"))
