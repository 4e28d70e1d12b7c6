"""Costs of the user's model on this device: what a planner needs to know before the first step.

A model of a few layers is run forwards and backwards over a few shapes, and the seconds (CPU seconds on a CPU, where
ranks may share cores) are fitted to overhead + FLOPs / rate, the form of `AnalyticCosts`.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from dynapipe_ext.costs.analytic import AnalyticCosts, ModelShape
from dynapipe_ext.executor.stages.megatron_model import (
    build_model,
    destroy_parallel,
    initialize_parallel,
    transformer_config,
)
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import MicroBatch
from dynapipe_ext.topology import Topology

_SHAPES = ((1, 32), (2, 64), (4, 128), (2, 512), (8, 128))  # rows, positions
_REPEATS = 3
_NUM_LAYERS = 2


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """time of an action = layers x layer_overhead_ns + FLOPs / flops_per_s; `error`: the fit's mean relative one."""

    flops_per_s: float
    layer_overhead_ns: int
    error: float


def measure_rate(shape: ModelShape, *, dtype: str, device: torch.device) -> MeasuredRate:
    """Measure on this process alone. torch.distributed must not be initialised; it is not afterwards either."""
    small, alone = replace(shape, num_layers=min(shape.num_layers, _NUM_LAYERS)), Topology()
    longest = min(shape.max_seq_len, max(length for _, length in _SHAPES))
    shapes = sorted({(rows, min(length, longest)) for rows, length in _SHAPES})
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group(backend, init_method=f"file://{Path(scratch) / 'alone'}", rank=0, world_size=1)
        try:
            initialize_parallel(alone, seed=0)
            config = transformer_config(small, alone, dtype=dtype, sequence_parallel=False)
            model = build_model(small, alone, 0, config, seed=0, device=device)
            seconds = np.array([_forward_backward_s(model, rows, length, device) for rows, length in shapes])
        finally:
            destroy_parallel()
            dist.destroy_process_group()
    unit = AnalyticCosts(small, alone, flops_per_s=1e9, overhead_ns=0)  # nanoseconds at 1 GFLOP/s are FLOPs
    costs = unit.evaluate([MicroBatch(tuple(SampleLength(i, length) for i in range(rows))) for rows, length in shapes])
    flops = (costs.forward_ns + costs.backward_ns)[0].astype(float)
    weights = 1.0 / seconds  # relative errors count
    design = np.stack([np.ones_like(flops), flops], axis=1) * weights[:, None]
    (intercept, slope), *_ = np.linalg.lstsq(design, seconds * weights, rcond=None)
    slope = max(slope, 1e-18)
    overhead_s = max(intercept, 1e-6) / 2  # of a forward and of a backward
    error = float(np.mean(np.abs(2 * overhead_s + slope * flops - seconds) / seconds))
    return MeasuredRate(float(1.0 / slope), round(overhead_s * 1e9 / small.num_layers), error)


def _forward_backward_s(model: torch.nn.Module, rows: int, length: int, device: torch.device) -> float:
    """Median seconds of one forward and backward; CPU seconds on a CPU."""
    tokens = torch.zeros((rows, length), dtype=torch.long, device=device)
    positions = torch.arange(length, device=device).expand(rows, -1)
    measured = []
    for _ in range(1 + _REPEATS):  # the first is a warm-up
        start_s = _seconds(device)
        model(input_ids=tokens, position_ids=positions, attention_mask=None, labels=tokens).sum().backward()
        measured.append(_seconds(device) - start_s)
        for parameter in model.parameters():
            parameter.grad = None
    return float(np.median(measured[1:]))


def _seconds(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()
