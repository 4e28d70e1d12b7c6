"""Actions as ranges in torch's profiler and, on CUDA, in Nsight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def profiler_ranges(label: str) -> Iterator[None]:
    """For `PipelineExecutor(ranges=profiler_ranges)`: what runs within is shown under `label` ("0F3")."""
    on_cuda = torch.cuda.is_available()
    with torch.profiler.record_function(label), torch.cuda.nvtx.range(label) if on_cuda else nullcontext():
        yield
