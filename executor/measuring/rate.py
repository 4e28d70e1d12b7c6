"""Costs of the user's model on this device: what a planner needs to know before the first step.

A model of a few layers runs forwards and backwards over a few shapes. Its seconds are fitted to overhead + FLOPs /
rate, the form of `AnalyticCosts`. On a CPU they are CPU seconds, since ranks may share cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.encoder_decoder import EncoderDecoderRunCosts
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.executor.device import process_group_backend
from dynapipe_ext.executor.stages.chunk_runner import StoredBytes
from dynapipe_ext.executor.stages.megatron.model import (
    build_model,
    destroy_parallel,
    initialize_parallel,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron.stage import packed_parameters
from dynapipe_ext.models.architecture import Architecture, layer_kinds
from dynapipe_ext.peak_memory import is_out_of_memory
from dynapipe_ext.reproducible import non_negative_least_squares

Sign = Callable[[str], None]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_SHAPES = ((1, 32), (2, 64), (4, 128), (2, 512), (8, 128))  # rows, positions
# An accelerator does those within the time it takes to be asked: of its rate they say nothing. Positions in all, and of
# a row; the larger ones where they fit in memory. By these the shapes of tests/bench/results/h100.json would be told
# within 13 % and its steps within 2 %; by shapes from 256 positions on, the steps were told 23 % too fast.
_LARGE_SHAPES = ((4096, 1024), (8192, 512), (8192, 1024), (16384, 2048), (16384, 4096))
_FEWEST_SHAPES = 2
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
    architecture: Architecture,
    *,
    dtype: str,
    device: torch.device,
    layout: Layout = "padded",
    sign: Sign = lambda doing: None,
) -> MeasuredRate:
    """Measure on this process alone, times in the layout that the run will have. `sign` takes what is measured next.

    torch.distributed must not be initialised; it is not afterwards either.
    """
    kinds = list(dict.fromkeys(kind for kind, _ in layer_kinds(architecture)))
    small = _of_layers(kinds[-1], _NUM_LAYERS)
    shapes = _within(architecture, _SHAPES)
    timed_shapes = shapes if device.type == "cpu" else _large_shapes(architecture)
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group(
            process_group_backend(device), init_method=f"file://{Path(scratch) / 'alone'}", rank=0, world_size=1
        )
        try:
            initialize_parallel(Topology(), seed=0)
            sign(f"making of {small.total_layers} layers to measure")
            timed = _model(small, dtype, device)
            seconds = _seconds_of(timed, timed_shapes, layout, device, sign)
            factors = [_byte_factors(kind, dtype, shapes, device, sign) for kind in kinds]
        finally:
            destroy_parallel()
            dist.destroy_process_group()
    overhead_s, slope, error = _fit(_counted(small, dtype, timed_shapes[: len(seconds)], layout), seconds)
    return MeasuredRate(
        flops_per_s=float(1.0 / slope),
        layer_overhead_ns=round(overhead_s * 1e9 / small.total_layers),
        layer_bytes_factor=max(of_layers for of_layers, _ in factors),
        head_bytes_factor=max(of_head for _, of_head in factors),
        error=error,
    )


def _within(architecture: Architecture, shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Shapes, none longer than the model's rows."""
    return sorted({(rows, min(length, architecture.max_seq_len)) for rows, length in shapes})


def _large_shapes(architecture: Architecture) -> list[tuple[int, int]]:
    """The same of an accelerator, as many positions in shorter rows; smaller ones first."""
    shapes = [(positions, min(length, architecture.max_seq_len)) for positions, length in _LARGE_SHAPES]
    return list(dict.fromkeys((positions // length, length) for positions, length in shapes))


def _seconds_of(
    model: torch.nn.Module, shapes: list[tuple[int, int]], layout: Layout, device: torch.device, sign: Sign
) -> npt.NDArray[np.float64]:
    """Of one forward and backward of each shape, of two at least; without those from the first that is too large for
    the device's memory on."""
    found: list[float] = []
    for shape in shapes:
        try:
            found.append(_forward_backward_s(model, *shape, layout, device, sign))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(found) < _FEWEST_SHAPES:
                raise
            for parameter in model.parameters():
                parameter.grad = None
            break
    return np.array(found)


def _of_layers(architecture: Architecture, count: int) -> Architecture:
    """The model with so many layers, on either side of an encoder-decoder."""
    return replace(architecture, num_layers=count, num_decoder_layers=count * bool(architecture.num_decoder_layers))


def _one_more(architecture: Architecture) -> list[Architecture]:
    """The model of one layer (on either side), then with one more of them, of each side in turn."""
    one = _of_layers(architecture, 1)
    more = [replace(one, num_layers=2)]
    return [one, *more, *([replace(one, num_decoder_layers=2)] if one.num_decoder_layers else [])]


def _model(architecture: Architecture, dtype: str, device: torch.device) -> torch.nn.Module:
    config = transformer_config(architecture, Topology(), dtype=dtype)
    return build_model(architecture, Topology(), 0, config, seed=0, device=device)


def _costs(architecture: Architecture, dtype: str, micro_batches: list[MicroBatch]) -> MicroBatchCosts:
    """Counted costs; at 1 GFLOP/s and without overhead, nanoseconds are FLOPs."""
    width: Literal[2, 4] = 4 if dtype == "float32" else 2
    padded, topology = architecture.padded(), Topology()
    if architecture.num_decoder_layers:
        pairs = EncoderDecoderRunCosts(
            architecture=padded, topology=topology, flops_per_s=1e9, activation_bytes_per_value=width
        )
        return pairs.evaluate(micro_batches)
    unit = AnalyticCosts(padded, topology, flops_per_s=1e9, overhead_ns=0, activation_bytes_per_value=width)
    return unit.evaluate(micro_batches)


def _micro_batch(architecture: Architecture, rows: int, length: int, layout: Layout) -> MicroBatch:
    """Of equal samples; the two sides of a pair are equal, too."""
    decoder = length * bool(architecture.num_decoder_layers)
    return MicroBatch(tuple(SampleLength(i, length, decoder, length) for i in range(rows)), layout)


def _counted(
    architecture: Architecture, dtype: str, shapes: list[tuple[int, int]], layout: Layout
) -> npt.NDArray[np.float64]:
    costs = _costs(architecture, dtype, [_micro_batch(architecture, *one, layout) for one in shapes])
    flops: npt.NDArray[np.float64] = (costs.forward_ns + costs.backward_ns)[0].astype(np.float64)
    return flops


def _fit(flops: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """(overhead of a forward or a backward, seconds per FLOP, mean relative error); relative errors count."""
    design = np.stack([np.ones_like(flops), flops], axis=1)
    intercept, slope = non_negative_least_squares(design, seconds)
    overhead_s, slope = max(float(intercept), 1e-6) / 2, max(float(slope), 1e-18)
    return overhead_s, slope, float(np.mean(np.abs(2 * overhead_s + slope * flops - seconds) / seconds))


def _byte_factors(
    architecture: Architecture, dtype: str, shapes: list[tuple[int, int]], device: torch.device, sign: Sign
) -> tuple[float, float]:
    """Stored over counted bytes: of a layer (what one more layer adds, of either side), and of everything else."""
    sign("making of layers of which the stored bytes are measured")
    models = [_model(one, dtype, device) for one in _one_more(architecture)]
    cases = [(*one, layout) for one in shapes for layout in LAYOUTS]
    stored = np.array([[_stored_bytes(model, *case, device, sign) for case in cases] for model in models])
    micro_batches = [_micro_batch(architecture, *one, layout) for one in shapes for layout in LAYOUTS]
    counted = np.array([_costs(one, dtype, micro_batches).stored_bytes[0] for one in _one_more(architecture)])
    layers, counted_layers = stored[1:] - stored[0], counted[1:] - counted[0]
    rest, counted_rest = stored[0] - layers.sum(axis=0), counted[0] - counted_layers.sum(axis=0)
    return float((layers / counted_layers).max()), float((rest / counted_rest).max())


def _stored_bytes(
    model: torch.nn.Module, rows: int, length: int, layout: Layout, device: torch.device, sign: Sign
) -> int:
    """What autograd keeps after one forward."""
    sign(f"measuring of the bytes stored by a forward of {rows} x {length} tokens, {layout}")
    stored = StoredBytes({p.untyped_storage().data_ptr() for p in model.parameters()})
    with stored.counting():
        losses = _losses(model, rows, length, layout, device)
        (losses * torch.ones_like(losses)).sum()
    return stored.num_bytes


def _forward_backward_s(
    model: torch.nn.Module, rows: int, length: int, layout: Layout, device: torch.device, sign: Sign
) -> float:
    """Median seconds of one forward and backward; CPU seconds on a CPU."""
    measured = []
    for _ in range(1 + _REPEATS):  # the first is a warm-up
        sign(f"measuring of a forward and backward of {rows} x {length} tokens")
        start_s = _seconds(device)
        torch.autograd.backward(_losses(model, rows, length, layout, device).sum())
        measured.append(_seconds(device) - start_s)
        for parameter in model.parameters():
            parameter.grad = None
    return float(np.median(measured[1:]))


def _losses(model: Any, rows: int, length: int, layout: Layout, device: torch.device) -> torch.Tensor:
    """Of samples of equal lengths, one by position; an encoder-decoder reads as many on both sides."""
    shape = (1, rows * length) if layout == "packed" else (rows, length)
    tokens = torch.zeros(shape, dtype=torch.long, device=device)
    if hasattr(model, "encoder"):
        documents = torch.tensor([[length] * rows] * 2) if layout == "packed" else None
        losses: torch.Tensor = model(tokens, tokens, documents, documents, documents, lm_labels=tokens)
        return losses
    packed = packed_parameters([length] * rows, device) if layout == "packed" else None
    positions = torch.arange(length, device=device).repeat(rows).reshape(shape)
    losses = model(
        input_ids=tokens, position_ids=positions, attention_mask=None, labels=tokens, packed_seq_params=packed
    )
    return losses  # noqa: RET504 (megatron has no types)


def _seconds(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()
