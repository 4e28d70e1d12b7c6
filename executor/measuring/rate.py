"""Costs of the user's model on this device: what a planner needs to know before the first step.

A model of a few layers is run forwards and backwards over a few shapes, and the seconds (CPU seconds on a CPU, where
ranks may share cores) are fitted to overhead + FLOPs / rate, the form of `AnalyticCosts`.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.executor.device import process_group_backend
from dynapipe_ext.executor.stages.megatron import packed_parameters
from dynapipe_ext.executor.stages.megatron_model import (
    build_model,
    destroy_parallel,
    initialize_parallel,
    transformer_config,
)
from dynapipe_ext.executor.stages.stored_bytes import StoredBytes
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.plan import Layout, MicroBatch
from dynapipe_ext.reproducible import non_negative_least_squares
from dynapipe_ext.topology import Topology

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_SHAPES = ((1, 32), (2, 64), (4, 128), (2, 512), (8, 128))  # rows, positions
_REPEATS = 3
_NUM_LAYERS = 2


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """time of an action = layers x layer_overhead_ns + FLOPs / flops_per_s; `error`: the fit's mean relative one.

    The two factors are stored over counted bytes of layers and of head with embedding, the largest of all shapes.
    """

    flops_per_s: float
    layer_overhead_ns: int
    layer_bytes_factor: float
    head_bytes_factor: float
    error: float


def measure_rate(
    architecture: Architecture, *, dtype: str, device: torch.device, layout: Layout = "padded"
) -> MeasuredRate:
    """Measure on this process alone, times in the layout that the run will have.

    torch.distributed must not be initialised; it is not afterwards either.
    """
    small = replace(architecture, num_layers=_NUM_LAYERS)
    longest = min(architecture.max_seq_len, max(length for _, length in _SHAPES))
    shapes = sorted({(rows, min(length, longest)) for rows, length in _SHAPES})
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group(
            process_group_backend(device), init_method=f"file://{Path(scratch) / 'alone'}", rank=0, world_size=1
        )
        try:
            initialize_parallel(Topology(), seed=0)
            models = [_model(replace(small, num_layers=n), dtype, device) for n in (1, _NUM_LAYERS)]
            seconds = np.array([_forward_backward_s(models[1], *one, layout, device) for one in shapes])
            cases = [(*one, layout) for one in shapes for layout in LAYOUTS]
            stored = np.array([[_stored_bytes(model, *case, device) for case in cases] for model in models])
        finally:
            destroy_parallel()
            dist.destroy_process_group()
    overhead_s, slope, error = _fit(_counted(small, dtype, shapes, layout), seconds)
    layer_factor, head_factor = _byte_factors(small, dtype, shapes, stored)
    return MeasuredRate(
        flops_per_s=float(1.0 / slope),
        layer_overhead_ns=round(overhead_s * 1e9 / _NUM_LAYERS),
        layer_bytes_factor=layer_factor,
        head_bytes_factor=head_factor,
        error=error,
    )


def _model(architecture: Architecture, dtype: str, device: torch.device) -> torch.nn.Module:
    config = transformer_config(architecture, Topology(), dtype=dtype)
    return build_model(architecture, Topology(), 0, config, seed=0, device=device)


def _costs(architecture: Architecture, dtype: str, micro_batches: list[MicroBatch]) -> MicroBatchCosts:
    """Counted costs; at 1 GFLOP/s and without overhead, nanoseconds are FLOPs."""
    width: Literal[2, 4] = 4 if dtype == "float32" else 2
    unit = AnalyticCosts(
        architecture.padded(), Topology(), flops_per_s=1e9, overhead_ns=0, activation_bytes_per_value=width
    )
    return unit.evaluate(micro_batches)


def _micro_batch(rows: int, length: int, layout: Layout) -> MicroBatch:
    return MicroBatch(tuple(SampleLength(i, length) for i in range(rows)), layout)


def _counted(
    architecture: Architecture, dtype: str, shapes: list[tuple[int, int]], layout: Layout
) -> npt.NDArray[np.float64]:
    costs = _costs(architecture, dtype, [_micro_batch(*one, layout) for one in shapes])
    flops: npt.NDArray[np.float64] = (costs.forward_ns + costs.backward_ns)[0].astype(np.float64)
    return flops


def _fit(flops: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """(overhead of a forward or a backward, seconds per FLOP, mean relative error); relative errors count."""
    design = np.stack([np.ones_like(flops), flops], axis=1)
    intercept, slope = non_negative_least_squares(design, seconds)
    overhead_s, slope = max(float(intercept), 1e-6) / 2, max(float(slope), 1e-18)
    return overhead_s, slope, float(np.mean(np.abs(2 * overhead_s + slope * flops - seconds) / seconds))


def _byte_factors(
    architecture: Architecture, dtype: str, shapes: list[tuple[int, int]], stored: npt.NDArray[np.int64]
) -> tuple[float, float]:
    """Stored over counted bytes: of a layer (what one more layer adds), and of everything else."""
    micro_batches = [_micro_batch(*one, layout) for one in shapes for layout in LAYOUTS]
    counted = np.array(
        [_costs(replace(architecture, num_layers=n), dtype, micro_batches).stored_bytes[0] for n in (1, _NUM_LAYERS)]
    )
    layer, counted_layer = stored[1] - stored[0], counted[1] - counted[0]
    rest, counted_rest = stored[0] - layer, counted[0] - counted_layer
    return float((layer / counted_layer).max()), max(1.0, float((rest / counted_rest).max()))


def _stored_bytes(model: torch.nn.Module, rows: int, length: int, layout: Layout, device: torch.device) -> int:
    """What autograd keeps after one forward."""
    stored = StoredBytes({p.untyped_storage().data_ptr() for p in model.parameters()})
    inputs = _inputs(rows, length, layout, device)
    with stored.counting():
        losses = model(**inputs)
        (losses * torch.ones_like(losses)).sum()
    return stored.num_bytes


def _inputs(rows: int, length: int, layout: Layout, device: torch.device) -> dict[str, Any]:
    """Of a model: so many samples of one length."""
    shape = (1, rows * length) if layout == "packed" else (rows, length)
    tokens = torch.zeros(shape, dtype=torch.long, device=device)
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(length, device=device).repeat(rows).reshape(shape),
        "attention_mask": None,
        "labels": tokens,
        "packed_seq_params": packed_parameters([length] * rows, device) if layout == "packed" else None,
    }


def _forward_backward_s(model: torch.nn.Module, rows: int, length: int, layout: Layout, device: torch.device) -> float:
    """Median seconds of one forward and backward; CPU seconds on a CPU."""
    inputs = _inputs(rows, length, layout, device)
    measured = []
    for _ in range(1 + _REPEATS):  # the first is a warm-up
        start_s = _seconds(device)
        model(**inputs).sum().backward()
        measured.append(_seconds(device) - start_s)
        for parameter in model.parameters():
            parameter.grad = None
    return float(np.median(measured[1:]))


def _seconds(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()
