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
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
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
from dynapipe_ext.models.layer_pattern import MASKED_ROW
from dynapipe_ext.peak_memory import is_out_of_memory
from dynapipe_ext.reproducible import non_negative_least_squares

Sign = Callable[[str], None]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_SHAPES = ((1, 32), (2, 64), (4, 128), (2, 512), (8, 128))  # rows, positions
# (positions in all, positions of a row) for accelerators, the larger ones where they fit in memory. The small shapes
# above say nothing of an accelerator's rate: it finishes them while it is asked for the next. Fitted to these, steps of
# tests/bench/results/h100.json were predicted 10 % too fast; fitted to shapes from 256 positions on, 23 %.
_LARGE_SHAPES = ((4096, 1024), (8192, 512), (8192, 1024), (16384, 2048), (16384, 4096))
_SHORT = 64  # positions of the samples that fill a row of MASKED_ROW
_FEWEST_SHAPES = 2
_ENOUGH_S = 30.0  # a further shape is measured where those before took less
_REPEATS = 3


class ModelOfLayers(Protocol):
    """A model of a few layers on a device."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...

    def layers(self) -> Sequence[torch.nn.Module]:
        """In order, an encoder's before the decoder's."""
        ...

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
    def masks_rows(self) -> bool:
        """Whether masks of whole packed rows keep documents apart: then no squares of documents tell what is stored."""
        ...

    @property
    def num_layers(self) -> int:
        """Of a model that has all that its kind has, 2 or more."""
        ...

    def ready(self) -> AbstractContextManager[None]:
        """Within, models can be made."""
        ...

    def model(self, kind: Architecture) -> ModelOfLayers:
        """A fresh one of `num_layers`, an encoder-decoder's on either side."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """time of an action = layers x layer_overhead_ns + FLOPs / flops_per_s; `error`: the fit's mean relative one.

    The two factors are stored over counted bytes, the largest of all layers and shapes: of a layer, and of all that is
    in none. `flash`: whether layers keep no squares of a row, as those of kernels do not, and so are to be counted.
    """

    flops_per_s: float
    layer_overhead_ns: int
    layer_bytes_factor: float
    head_bytes_factor: float
    error: float
    flash: bool = True


@dataclass(frozen=True, slots=True)
class StoredFactors:
    """Stored over counted bytes, the largest; `spread` is the largest of a layer over its smallest."""

    of_layers: float
    of_rest: float
    spread: float
    flash: bool


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
    kind, count = layers.kinds[-1], layers.num_layers
    device = layers.device
    timed_shapes = _within(kind, _SHAPES) if device.type == "cpu" else _large_shapes(kind)
    with layers.ready():
        sign(f"making of {count} layers to measure")
        seconds = _seconds_of(layers.model(kind), timed_shapes, layout, device, sign)
        factors = measure_stored(layers, dtype=dtype, sign=sign)
    timed = [_micro_batch(kind, *shape, layout) for shape in timed_shapes[: len(seconds)]]
    of_layers, rest = _counted(kind, count, timed, dtype, _flops, flash=factors.flash)
    overhead_s, slope, error = _fit(of_layers.sum(axis=0) + rest, seconds)
    return MeasuredRate(
        flops_per_s=float(1.0 / slope),
        layer_overhead_ns=round(overhead_s * 1e9 / len(of_layers)),
        layer_bytes_factor=factors.of_layers,
        head_bytes_factor=factors.of_rest,
        error=error,
        flash=factors.flash,
    )


def measure_stored(
    layers: LayersToMeasure, *, dtype: str, flash: bool | None = None, sign: Sign = lambda doing: None
) -> StoredFactors:
    """Measure what forwards store; `layers` are ready. `flash` is what rows were found to store, None: not yet."""
    kind, count = layers.kinds[-1], layers.num_layers
    longest = min(MASKED_ROW, kind.max_seq_len)
    short = min(_SHORT, longest)
    shapes = [*_within(kind, _SHAPES), (1, longest), (MASKED_ROW // short, short)]
    stored = [_stored(layers, one, shapes, sign) for one in layers.kinds]
    laws = [True] if kind.num_decoder_layers or layers.masks_rows else [True, False]
    laws = laws if flash is None else [flash]
    return min((_byte_factors(stored, count, dtype, flash=law) for law in laws), key=lambda one: one.spread)


@dataclass(frozen=True, slots=True)
class MegatronLayers:
    """Layers of megatron-core, each kind in a model of two."""

    architecture: Architecture
    dtype: str
    device: torch.device
    num_layers = 2
    layouts = LAYOUTS
    masks_rows = False

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

    def model(self, kind: Architecture) -> MegatronModel:
        architecture = _of_layers(kind, self.num_layers)
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

    def layers(self) -> list[torch.nn.Module]:
        stacks = [self.model.encoder, self.model.decoder] if hasattr(self.model, "encoder") else [self.model.decoder]
        return [layer for stack in stacks for layer in stack.layers]

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
    the device's memory on, or for the time."""
    found: list[float] = []
    begun_s = time.monotonic()
    for shape in shapes:
        if len(found) >= _FEWEST_SHAPES and time.monotonic() - begun_s > _ENOUGH_S:
            break
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


def _more(architecture: Architecture) -> list[Architecture]:
    """The model of one layer (on either side), then with one more of each side in turn."""
    one = _of_layers(architecture, 1)
    decoders = [replace(one, num_decoder_layers=2)] if one.num_decoder_layers else []
    return [one, replace(one, num_layers=2), *decoders]


def _costs(architecture: Architecture, dtype: str, micro_batches: list[MicroBatch], *, flash: bool) -> MicroBatchCosts:
    """Counted costs; at 1 GFLOP/s and without overhead, nanoseconds are FLOPs."""
    width: Literal[2, 4] = 4 if dtype == "float32" else 2
    unit = AnalyticCosts(
        architecture.padded(),
        Topology(),
        flops_per_s=1e9,
        overhead_ns=0,
        activation_bytes_per_value=width,
        flash=flash,
    )
    return unit.evaluate(micro_batches)


def _micro_batch(architecture: Architecture, rows: int, length: int, layout: Layout) -> MicroBatch:
    """Of equal samples; the two sides of a pair are equal, too."""
    decoder = length * bool(architecture.num_decoder_layers)
    return MicroBatch(tuple(SampleLength(i, length, decoder, length) for i in range(rows)), layout)


def _flops(costs: MicroBatchCosts) -> npt.NDArray[np.float64]:
    """Of a forward and a backward."""
    flops: npt.NDArray[np.float64] = (costs.forward_ns + costs.backward_ns)[0].astype(np.float64)
    return flops


def _bytes(costs: MicroBatchCosts) -> npt.NDArray[np.float64]:
    stored: npt.NDArray[np.float64] = costs.stored_bytes[0].astype(np.float64)
    return stored


def _counted(
    architecture: Architecture,
    num_layers: int,
    micro_batches: list[MicroBatch],
    dtype: str,
    of: Callable[[MicroBatchCosts], npt.NDArray[np.float64]],
    *,
    flash: bool,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Of the first layers (L, M), each of its kind, those of either side of an encoder-decoder; and of the rest (M)."""

    def of_kind(kind: Architecture) -> tuple[list[npt.NDArray[np.float64]], npt.NDArray[np.float64]]:
        one, *more = [of(_costs(each, dtype, micro_batches, flash=flash)) for each in _more(kind)]
        layers = [each - one for each in more]
        return layers, one - np.sum(layers, axis=0)

    if architecture.num_decoder_layers:
        sides, rest = of_kind(architecture)
        return np.repeat(sides, num_layers, axis=0), rest
    kind_of = {layer: kind for kind, own in layer_kinds(architecture) for layer in own}
    counted = {kind: of_kind(kind) for kind in dict.fromkeys(kind_of.values())}
    kinds = [kind_of[layer % len(kind_of)] for layer in range(num_layers)]
    return np.array([counted[kind][0][0] for kind in kinds]), counted[kinds[0]][1]


def _fit(flops: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """(overhead of a forward or a backward, seconds per FLOP, mean relative error); relative errors count."""
    design = np.stack([np.ones_like(flops), flops], axis=1)
    intercept, slope = non_negative_least_squares(design, seconds)
    overhead_s, slope = max(float(intercept), 1e-6) / 2, max(float(slope), 1e-18)
    return overhead_s, slope, float(np.mean(np.abs(2 * overhead_s + slope * flops - seconds) / seconds))


@dataclass(frozen=True, slots=True)
class _Stored:
    """What forwards of a kind of layers have stored: of each layer (L, M), and of the rest (M)."""

    kind: Architecture
    micro_batches: list[MicroBatch]
    of_layers: npt.NDArray[np.float64]
    of_rest: npt.NDArray[np.float64]


def _byte_factors(stored: Sequence[_Stored], num_layers: int, dtype: str, *, flash: bool) -> StoredFactors:
    of_layers, of_rest, spread = 0.0, 0.0, 1.0
    for one in stored:
        counted, counted_rest = _counted(one.kind, num_layers, one.micro_batches, dtype, _bytes, flash=flash)
        ratios = one.of_layers / counted
        of_layers = max(of_layers, float(ratios.max()))
        of_rest = max(of_rest, float((one.of_rest / counted_rest).max()))
        spread = max(spread, float((ratios.max(axis=1) / ratios.min(axis=1).clip(1e-9)).max()))
    return StoredFactors(of_layers, of_rest, spread, flash)


def _stored(layers: LayersToMeasure, kind: Architecture, shapes: list[tuple[int, int]], sign: Sign) -> _Stored:
    """Of one forward of each shape in each layout, of two at least; without those that come after enough time."""
    sign("making of layers of which the stored bytes are measured")
    model, begun_s = layers.model(kind), time.monotonic()
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    micro_batches: list[MicroBatch] = []
    found: list[list[int]] = []
    for shape, layout in product(shapes, layers.layouts):
        if len(found) >= _FEWEST_SHAPES and time.monotonic() - begun_s > _ENOUGH_S:
            break
        sign(f"measuring of the bytes stored by a forward of {shape[0]} x {shape[1]} tokens, {layout}")
        stored = _StoredByLayer(known, model.layers())
        with stored.counting():
            losses = model.losses(*shape, layout)
            (losses * torch.ones_like(losses)).sum()
        stored.forget_layers()
        found.append([*stored.of_layers, stored.num_bytes - sum(stored.of_layers)])
        micro_batches.append(_micro_batch(kind, *shape, layout))
    *of_layers, rest = np.array(found, np.float64).T
    return _Stored(kind, micro_batches, np.array(of_layers), rest)


class _StoredByLayer(StoredBytes):
    """The same by the layer that runs while they are saved."""

    def __init__(self, known_pointers: set[int], layers: Sequence[torch.nn.Module]) -> None:
        super().__init__(known_pointers)
        self.of_layers, self._running = [0] * len(layers), -1
        self._hooks = [
            hook
            for number, layer in enumerate(layers)
            for hook in (
                layer.register_forward_pre_hook(partial(self._run, number)),
                layer.register_forward_hook(partial(self._run, -1)),
            )
        ]

    def _run(self, number: int, *_: Any) -> None:
        self._running = number

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        before = self.num_bytes
        packed = super().pack(tensor)
        if self._running >= 0:
            self.of_layers[self._running] += self.num_bytes - before
        return packed

    def forget_layers(self) -> None:
        for hook in self._hooks:
            hook.remove()


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
