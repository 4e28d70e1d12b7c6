"""Whole Megatron tensors to the parts that ranks hold and back, a few megabytes at a time.

    whole tensor ──spans of a rank──► blocks ──► file            boxes of files ──assemble──► whole tensor

Rows of padding below the vocabulary are zeros on the way out and are left behind on the way in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.tensors import TensorGroup
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor
from dynapipe_ext.tools.checkpoint.formats import GroupTensors, WriterOptions
from dynapipe_ext.tools.checkpoint.megatron.names import MegatronTensor, megatron_tensors, to_megatron

BLOCK_BYTES = 1 << 23
RowRange = tuple[int, int]  # begin and end along the dimension that ranks cut


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How a model lies on tensor and pipeline parallel ranks. Errors: ConfigError naming what cannot be cut."""

    architecture: Architecture
    tp: int
    layers_per_stage: tuple[int, ...]
    padded_vocab_size: int
    ep: int = 1
    vpp: int = 1

    @classmethod
    def of(cls, architecture: Architecture, options: WriterOptions) -> RankLayout:
        if options.vocab_divisible_by < 1:
            raise ConfigError(f"vocab_divisible_by is {options.vocab_divisible_by} but must be at least 1")
        _refuse_uncuttable(architecture, options.tp)
        _refuse_unshared(architecture, options)
        return cls(
            architecture,
            options.tp,
            _layers_per_stage(architecture, options),
            architecture.padded_vocab_size(options.vocab_divisible_by, options.tp),
            options.ep,
            options.vpp,
        )

    @property
    def num_ranks(self) -> int:
        """The least that hold the model; experts lie on replicas."""
        return self.tp * self.pp * self.ep

    @property
    def layers_per_virtual_stage(self) -> int | None:
        """As Megatron's interleaved schedule is told; None without one."""
        return self.layers_per_stage[0] // self.vpp if self.vpp > 1 else None

    @property
    def pp(self) -> int:
        return len(self.layers_per_stage)

    def stage_of_layer(self, layer: int) -> tuple[int, int]:
        """The pipeline stage of a layer, and the layer's number there."""
        for stage, count in enumerate(self.layers_per_stage):
            if layer < count:
                return stage, layer
            layer -= count
        raise ConfigError(f"layer {layer} lies behind the last stage of {self.layers_per_stage}")

    def length(self, tensor: MegatronTensor) -> int:
        """Of the dimension that ranks cut, padding included."""
        assert tensor.tp_dim is not None
        return self.padded_vocab_size if tensor.vocabulary else tensor.shape[tensor.tp_dim]

    def spans(self, tensor: MegatronTensor, rank: int) -> tuple[RowRange, ...]:
        """What tensor parallel rank `rank` holds, in the order it holds it; all of a tensor that no rank cuts."""
        if tensor.tp_dim is None:
            return ((0, tensor.shape[0]),)
        part = self.length(tensor) // tensor.tp_parts
        share = part // self.tp
        return tuple((i * part + rank * share, i * part + (rank + 1) * share) for i in range(tensor.tp_parts))

    def all_spans(self, tensor: MegatronTensor) -> tuple[RowRange, ...]:
        """What all ranks hold, in the order of the whole tensor."""
        if tensor.tp_dim is None:
            return self.spans(tensor, 0)
        return tuple(sorted(span for rank in range(self.tp) for span in self.spans(tensor, rank)))

    def whole_shape(self, tensor: MegatronTensor) -> tuple[int, ...]:
        return _with_length(tensor, self.length(tensor)) if tensor.tp_dim is not None else tensor.shape

    def local_shape(self, tensor: MegatronTensor) -> tuple[int, ...]:
        return (
            self.whole_shape(tensor) if tensor.tp_dim is None else _with_length(tensor, self.length(tensor) // self.tp)
        )


def _with_length(tensor: MegatronTensor, length: int) -> tuple[int, ...]:
    assert tensor.tp_dim is not None
    return (*tensor.shape[: tensor.tp_dim], length, *tensor.shape[tensor.tp_dim + 1 :])


def _refuse_uncuttable(a: Architecture, tp: int) -> None:
    if tp < 1:
        raise ConfigError(f"--tp {tp} must be at least 1")
    for name, count in a.divided_sizes.items():
        if count % tp:
            raise ConfigError(f"--tp {tp} does not divide {name} {count}: give a divisor of it")
    if fault := a.groups_fault(tp):
        raise ConfigError(f"--tp {tp}: {fault}")


def _refuse_unshared(a: Architecture, options: WriterOptions) -> None:
    ep, vpp, pp = options.ep, options.vpp, options.pp
    if ep < 1 or (ep > 1 and (not a.num_experts or a.num_experts % ep)):
        raise ConfigError(f"--ep {ep} must be at least 1, and divide num_experts {a.num_experts} above 1")
    if vpp < 1 or (vpp > 1 and (pp < 2 or options.layers_per_stage or a.num_decoder_layers)):
        raise ConfigError(
            f"--vpp {vpp} must be at least 1; above, Megatron needs a decoder-only model over --pp 2 or more, here"
            f" {pp}, and stages of equal layers without --layers-per-stage"
        )
    if vpp > 1 and a.total_layers % (pp * vpp):
        raise ConfigError(f"--pp {pp} x --vpp {vpp} does not divide {a.total_layers} layers: give a divisor")


def _layers_per_stage(a: Architecture, options: WriterOptions) -> tuple[int, ...]:
    total, pp, layers_per_stage = a.total_layers, options.pp, options.layers_per_stage
    if pp < 1:
        raise ConfigError(f"--pp {pp} must be at least 1")
    if not layers_per_stage:
        if total % pp:
            raise ConfigError(
                f"--pp {pp} does not divide {total} layers: give a divisor, or --layers-per-stage with {pp} numbers"
            )
        return (total // pp,) * pp
    if len(layers_per_stage) != pp or sum(layers_per_stage) != total or min(layers_per_stage) < 0:
        raise ConfigError(
            f"--layers-per-stage {','.join(map(str, layers_per_stage))} must be --pp {pp} numbers of at least 0 that"
            f" sum to {total} layers; these sum to {sum(layers_per_stage)}"
        )
    return layers_per_stage


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Rows `begin` onwards of a whole Megatron tensor, without padding."""

    tensor: MegatronTensor
    begin: int
    values: torch.Tensor


def parts_of(architecture: Architecture, group: TensorGroup, tensors: GroupTensors) -> list[TensorPart]:
    """A group as Megatron's tensors. Halves of [gate; up] stay two parts, so that no second copy is made."""
    expected = megatron_tensors(architecture, group)
    if len(expected) == 1 and expected[0].tp_parts == 2 and len(group.tensors) == 2:
        halves = [tensors[info.name] for info in group.tensors]
        if all(tuple(half.shape) == info.shape for half, info in zip(halves, group.tensors, strict=True)):
            return [
                TensorPart(expected[0], 0, halves[0]),
                TensorPart(expected[0], group.tensors[0].shape[0], halves[1]),
            ]
    whole = to_megatron(architecture, group, tensors)
    return [TensorPart(tensor, 0, whole[tensor.name]) for tensor in expected]


def blocks(
    tensor: MegatronTensor, parts: Sequence[TensorPart], spans: Iterable[RowRange], block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[RowRange, torch.Tensor]]:
    """The spans' values in order as contiguous blocks of about `block_bytes`, each with where it begins in the whole.

    The place is (row, column) of the block's first value; of a vector (index, 0). Rows behind the parts are zeros.
    """
    across = tensor.tp_dim == 1
    for begin, end in spans:
        rows = (0, tensor.shape[0]) if across else (begin, end)
        columns = (begin, end) if across else None
        for row, block in _row_blocks(parts, rows, columns, block_bytes):
            yield (row, begin if across else 0), block


def _row_blocks(
    parts: Sequence[TensorPart], rows: RowRange, columns: RowRange | None, block_bytes: int
) -> Iterator[tuple[int, torch.Tensor]]:
    row, stop = rows
    for part in parts:
        end = min(stop, part.begin + part.values.shape[0])
        if row >= end:
            continue
        values = part.values if columns is None else part.values[:, columns[0] : columns[1]]
        step = _rows_in_block(values, block_bytes)
        while row < end:
            until = min(end, row + step)
            block = values[row - part.begin : until - part.begin]
            yield row, block.clone(memory_format=torch.contiguous_format)
            row = until
    like = parts[0].values
    step = _rows_in_block(like, block_bytes)
    while row < stop:
        until = min(stop, row + step)
        yield row, like.new_zeros((until - row, *like.shape[1:]))
        row = until


def _rows_in_block(values: torch.Tensor, block_bytes: int) -> int:
    return max(1, block_bytes // max(1, math.prod(values.shape[1:]) * values.itemsize))


@dataclass(frozen=True, slots=True)
class Box:
    """Values in a file, and where their first one lies in the whole tensor."""

    begin: tuple[int, ...]
    stored: StoredTensor


def inner(stored: StoredTensor, index: Sequence[int]) -> StoredTensor:
    """`stored[index]`, index by index along the first dimensions."""
    for i in index:
        shape = stored.shape[1:]
        step = stored.stride[0] if stored.stride else math.prod(shape)
        offset = stored.offset + i * step * stored.dtype.itemsize
        stored = replace(stored, shape=shape, offset=offset, stride=stored.stride[1:])
    return stored


def rows_of(stored: StoredTensor, begin: int, end: int) -> StoredTensor:
    """`stored[begin:end]`."""
    step = stored.stride[0] if stored.stride else math.prod(stored.shape[1:])
    offset = stored.offset + begin * step * stored.dtype.itemsize
    return replace(stored, shape=(end - begin, *stored.shape[1:]), offset=offset)


def assemble(name: str, shape: tuple[int, ...], boxes: Sequence[Box], *, clip_rows: bool) -> torch.Tensor:
    """The whole tensor from boxes that cover it once. `clip_rows`: rows behind the shape's are padding, left behind.

    Memory of the result and one block. Errors: DataError naming `name`, where values are missing, double or outside.
    """
    if len(boxes) == 1 and boxes[0].stored.shape == shape and not any(boxes[0].begin):
        return boxes[0].stored.read()
    whole: torch.Tensor | None = None
    num_values = 0
    for box in boxes:
        stored = box.stored
        if clip_rows and box.begin[0] + stored.shape[0] > shape[0]:
            stored = rows_of(stored, 0, max(0, shape[0] - box.begin[0]))
        if not stored.size:
            continue
        ends = [begin + length for begin, length in zip(box.begin, stored.shape, strict=True)]
        if len(ends) != len(shape) or any(end > length for end, length in zip(ends, shape, strict=True)):
            raise DataError(f"{name} has values behind {shape} in {stored.path}: the file is not of this model")
        if whole is None:
            whole = torch.empty(shape, dtype=stored.dtype)
        place = whole[tuple(slice(begin, end) for begin, end in zip(box.begin, ends, strict=True))]
        step = max(1, BLOCK_BYTES // max(1, math.prod(stored.shape[1:]) * stored.dtype.itemsize))
        for row in range(0, stored.shape[0], step):
            until = min(stored.shape[0], row + step)
            place[row:until] = stored.read_rows(row, until)
        num_values += stored.size
    if whole is None or num_values != whole.numel() or _overlap(boxes):
        raise DataError(
            f"{name} has {num_values:,} values in the files of all ranks where {math.prod(shape):,} are needed, each"
            " once: copy the checkpoint again"
        )
    return whole


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two boxes share a value; sorted by their first rows, only neighbours that share rows are compared."""
    placed = sorted((box for box in boxes if box.stored.size), key=lambda box: box.begin)
    for i, one in enumerate(placed):
        for two in placed[i + 1 :]:
            if two.begin[0] >= one.begin[0] + one.stored.shape[0]:
                break
            pairs = zip(one.begin, one.stored.shape, two.begin, two.stored.shape, strict=True)
            if all(a < b + n and b < a + m for a, m, b, n in pairs):
                return True
    return False
