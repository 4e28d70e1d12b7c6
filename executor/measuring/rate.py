"""Costs of the user's model on this device: what a planner needs to know before the first step.

A model of a few layers, of the backend that trains, runs forwards and backwards over a few shapes. Its seconds are
fitted to overhead + FLOPs / rate, the form of `AnalyticCosts`. On a CPU they are CPU seconds, since ranks may share
cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

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


class ModelOfLayers(Protocol):
    """A model of a few layers on a device."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...

    def losses(self, rows: int, length: int, layout: Layout) -> torch.Tensor:
        """Of samples of equal lengths, one or one a position; an encoder-decoder reads as many on both sides."""
        ...


class LayersToMeasure(Protocol):
    """The layers of a run's model, as the backend that trains them computes them."""

    @property
    def device(self) -> torch.device: ...

    @property
    def layouts(self) -> Sequence[Layout]:
        """Those in which stored bytes are measured."""
        ...

    @property
    def kinds(self) -> Sequence[Architecture]:
        """The model as if all its layers were of one kind, for each kind of which one makes models."""
        ...

    @property
    def num_layers(self) -> int:
        """Of a model that has all that its kind has, 2 or more."""
        ...

    def ready(self) -> AbstractContextManager[None]:
        """Within, models can be made."""
        ...

    def model(self, architecture: Architecture) -> ModelOfLayers:
        """A fresh one of as many layers as `architecture` has."""
        ...


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
    layers: LayersToMeasure,
    *,
    dtype: str,
    layout: Layout = "padded",
    sign: Sign = lambda doing: None,
) -> MeasuredRate:
    """Measure on this process alone, times in the layout that the run will have. `sign` takes what is measured next.

    torch.distributed must not be initialised; it is not afterwards either.
    """
    kind = layers.kinds[-1]
    small = _of_layers(_one_kind(kind), layers.num_layers)
    shapes = _within(small, _SHAPES)
    device = layers.device
    timed_shapes = shapes if device.type == "cpu" else _large_shapes(small)
    with layers.ready():
        sign(f"making of {small.total_layers} layers to measure")
        seconds = _seconds_of(layers.model(small), timed_shapes, layout, device, sign)
        factors = [_byte_factors(layers, kind, dtype, shapes, sign) for kind in layers.kinds]
    flops = _of_first_layers(kind, small, partial(_flops, dtype, timed_shapes[: len(seconds)], layout))
    overhead_s, slope, error = _fit(flops, seconds)
    return MeasuredRate(
        flops_per_s=float(1.0 / slope),
        layer_overhead_ns=round(overhead_s * 1e9 / small.total_layers),
        layer_bytes_factor=max(of_layers for of_layers, _ in factors),
        head_bytes_factor=max(of_head for _, of_head in factors),
        error=error,
    )


@dataclass(frozen=True, slots=True)
class MegatronLayers:
    """Layers of megatron-core, each kind in a model of two."""

    architecture: Architecture
    dtype: str
    device: torch.device
    num_layers = 2
    layouts = LAYOUTS

    @property
    def kinds(self) -> list[Architecture]:
        return list(dict.fromkeys(kind for kind, _ in layer_kinds(self.architecture)))

    @contextmanager
    def ready(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as scratch:
            dist.init_process_group(
                process_group_backend(self.device),
                init_method=f"file://{Path(scratch) / 'alone'}",
                rank=0,
                world_size=1,
            )
            try:
                initialize_parallel(Topology(), seed=0)
                yield
            finally:
                destroy_parallel()
                dist.destroy_process_group()

    def model(self, architecture: Architecture) -> MegatronModel:
        config = transformer_config(architecture, Topology(), dtype=self.dtype)
        return MegatronModel(build_model(architecture, Topology(), 0, config, seed=0, device=self.device), self.device)


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A whole model of megatron-core."""

    model: Any  # megatron has no types
    device: torch.device

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        parameters: Iterable[torch.nn.Parameter] = self.model.parameters()
        return parameters

    def losses(self, rows: int, length: int, layout: Layout) -> torch.Tensor:
        shape = (1, rows * length) if layout == "packed" else (rows, length)
        tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        losses: torch.Tensor
        if hasattr(self.model, "encoder"):
            documents = torch.tensor([[length] * rows] * 2) if layout == "packed" else None
            losses = self.model(tokens, tokens, documents, documents, documents, lm_labels=tokens)
            return losses
        packed = packed_parameters([length] * rows, self.device) if layout == "packed" else None
        positions = torch.arange(length, device=self.device).repeat(rows).reshape(shape)
        losses = self.model(
            input_ids=tokens, position_ids=positions, attention_mask=None, labels=tokens, packed_seq_params=packed
        )
        return losses


def _within(architecture: Architecture, shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Shapes, none longer than the model's rows."""
    return sorted({(rows, min(length, architecture.max_seq_len)) for rows, length in shapes})


def _large_shapes(architecture: Architecture) -> list[tuple[int, int]]:
    """The same of an accelerator, as many positions in shorter rows; smaller ones first."""
    shapes = [(positions, min(length, architecture.max_seq_len)) for positions, length in _LARGE_SHAPES]
    return list(dict.fromkeys((positions // length, length) for positions, length in shapes))


def _seconds_of(
    model: ModelOfLayers, shapes: list[tuple[int, int]], layout: Layout, device: torch.device, sign: Sign
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


def _one_kind(architecture: Architecture) -> Architecture:
    """As if all layers were of the last kind: of a few layers, one that may stand for their number."""
    return layer_kinds(architecture)[-1][0]


def _more(architecture: Architecture, count: int) -> list[Architecture]:
    """The model of one layer (on either side), then with `count` layers of each side in turn."""
    one = _of_layers(architecture, 1)
    decoders = [replace(one, num_decoder_layers=count)] if one.num_decoder_layers else []
    return [one, replace(one, num_layers=count), *decoders]


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


def _of_first_layers(
    architecture: Architecture, small: Architecture, of: Callable[[Architecture], npt.NDArray[np.float64]]
) -> npt.NDArray[np.float64]:
    """`of` a model of as many first layers as `small` has, each of its kind in `architecture`; every further layer of a
    kind adds as much."""
    if small.num_decoder_layers:
        return of(small)
    kind_of = {layer: kind for kind, own in layer_kinds(architecture) for layer in own}
    more = {kind: of(_of_layers(kind, 2)) - of(_of_layers(kind, 1)) for kind in dict.fromkeys(kind_of.values())}
    first = of(_of_layers(kind_of[0], 1))
    return first + sum(more[kind_of[layer % len(kind_of)]] for layer in range(1, small.num_layers))


def _flops(
    dtype: str, shapes: list[tuple[int, int]], layout: Layout, architecture: Architecture
) -> npt.NDArray[np.float64]:
    """Of a forward and a backward of each shape."""
    costs = _costs(architecture, dtype, [_micro_batch(architecture, *one, layout) for one in shapes])
    flops: npt.NDArray[np.float64] = (costs.forward_ns + costs.backward_ns)[0].astype(np.float64)
    return flops


def _counted_bytes(dtype: str, micro_batches: list[MicroBatch], architecture: Architecture) -> npt.NDArray[np.float64]:
    stored: npt.NDArray[np.float64] = _costs(architecture, dtype, micro_batches).stored_bytes[0].astype(np.float64)
    return stored


def _fit(flops: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """(overhead of a forward or a backward, seconds per FLOP, mean relative error); relative errors count."""
    design = np.stack([np.ones_like(flops), flops], axis=1)
    intercept, slope = non_negative_least_squares(design, seconds)
    overhead_s, slope = max(float(intercept), 1e-6) / 2, max(float(slope), 1e-18)
    return overhead_s, slope, float(np.mean(np.abs(2 * overhead_s + slope * flops - seconds) / seconds))


def _byte_factors(
    layers: LayersToMeasure, architecture: Architecture, dtype: str, shapes: list[tuple[int, int]], sign: Sign
) -> tuple[float, float]:
    """Stored over counted bytes: of a layer (what each further one adds, of either side), and of everything else."""
    sign("making of layers of which the stored bytes are measured")
    wanted = _more(_one_kind(architecture), layers.num_layers)
    models = [layers.model(one) for one in wanted]
    cases = [(*one, layout) for one in shapes for layout in layers.layouts]
    stored = np.array([[_stored_bytes(model, *case, sign) for case in cases] for model in models])
    count = partial(_counted_bytes, dtype, [_micro_batch(architecture, *case) for case in cases])
    counted = np.array([_of_first_layers(architecture, one, count) for one in wanted])
    factors = (stored[1:] - stored[0]) / (counted[1:] - counted[0])
    first_kind = next(kind for kind, own in layer_kinds(architecture) if 0 in own)
    of_first = np.array([count(one) for one in _more(first_kind, 2)])
    first_layers = of_first[1:] - of_first[0]
    rest, counted_rest = stored[0] - (factors * first_layers).sum(axis=0), of_first[0] - first_layers.sum(axis=0)
    return float(factors.max()), float((rest / counted_rest).max())


def _stored_bytes(model: ModelOfLayers, rows: int, length: int, layout: Layout, sign: Sign) -> int:
    """What autograd keeps after one forward."""
    sign(f"measuring of the bytes stored by a forward of {rows} x {length} tokens, {layout}")
    stored = StoredBytes({p.untyped_storage().data_ptr() for p in model.parameters()})
    with stored.counting():
        losses = model.losses(rows, length, layout)
        (losses * torch.ones_like(losses)).sum()
    return stored.num_bytes


def _forward_backward_s(
    model: ModelOfLayers, rows: int, length: int, layout: Layout, device: torch.device, sign: Sign
) -> float:
    """Median seconds of one forward and backward; CPU seconds on a CPU."""
    measured = []
    for _ in range(1 + _REPEATS):  # the first is a warm-up
        sign(f"measuring of a forward and backward of {rows} x {length} tokens")
        start_s = _seconds(device)
        torch.autograd.backward(model.losses(rows, length, layout).sum())
        measured.append(_seconds(device) - start_s)
        for parameter in model.parameters():
            parameter.grad = None
    return float(np.median(measured[1:]))


def _seconds(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()
