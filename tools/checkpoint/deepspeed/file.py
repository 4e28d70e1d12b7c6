"""DeepSpeed's files: trees of plain values, in which a tensor may lie in pieces, in one file or in many."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor, refuse_state
from dynapipe_ext.tools.checkpoint.files.torch_file import ArchiveRecord
from dynapipe_ext.tools.checkpoint.files.torch_file import read_tree as read_stored_tree

_ZERO_STAGE = ("deepspeed.runtime.zero.config", "ZeroStageEnum")
_CHUNK_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """A tensor on disk: its values are those of the runs, one after the other; only a run alone may have strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: tuple[StoredTensor, ...]

    __setstate__ = refuse_state

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """In values; empty where rows are end to end."""
        return self.runs[0].stride if len(self.runs) == 1 else ()

    def part(self, start: int, shape: tuple[int, ...]) -> SplitTensor:
        """The tensor of `shape` that begins with value `start` of this one. Errors: DataError beyond its end."""
        if self.strides:
            raise DataError(
                f"{self.runs[0].path}: a tensor of shape {self.shape} is not stored row by row: save a copy"
            )
        num_values = math.prod(shape)
        if start < 0 or start + num_values > self.size:
            where = self.runs[0].path if self.runs else "a tensor"
            raise DataError(
                f"{where}: values {start} to {start + num_values} of {self.size}"
                " are asked for: the checkpoint is cut short; save it again"
            )
        runs, end, position = [], start + num_values, 0
        for run in self.runs:
            first, last = max(start, position), min(end, position + run.size)
            if first < last:
                offset = run.offset + (first - position) * self.dtype.itemsize
                runs.append(replace(run, offset=offset, shape=(last - first,)))
            position += run.size
        return SplitTensor(shape, self.dtype, tuple(runs))

    def read_as(self, dtype: torch.dtype) -> torch.Tensor:
        """`read()` cast to another type, a few megabytes at a time."""
        if dtype == self.dtype or self.strides:
            return self.read().to(dtype)
        cast = torch.empty(self.size, dtype=dtype)
        for start in range(0, self.size, _CHUNK_VALUES):
            values = self.part(start, (min(_CHUNK_VALUES, self.size - start),)).read()
            cast[start : start + values.numel()] = values
        return cast.view(self.shape)

    def read(self) -> torch.Tensor:
        """Contiguous, on the CPU. Errors: DataError where a file has become shorter or cannot be read."""
        if self.strides:
            return self.runs[0].read()
        values = torch.empty(self.size, dtype=self.dtype)
        buffer = memoryview(_bits(values).numpy())  # type: ignore[arg-type]  # an array is a buffer
        done = 0
        for run in self.runs:
            run.fill(buffer[done : done + run.num_bytes])
            done += run.num_bytes
        return values.view(self.shape)


def read_deepspeed_tree(path: Path) -> Any:
    """What torch.save wrote into `path`; tensors are SplitTensors, other objects plain values or Inert.

    Errors: DataError naming the file where it cannot be read or is damaged.
    """
    return read_stored_tree(ArchiveRecord(path), lambda *name: int if name == _ZERO_STAGE else None, _whole)


def _whole(stored: StoredTensor) -> SplitTensor:
    run = stored if stored.stride else replace(stored, shape=(stored.size,))
    return SplitTensor(stored.shape, stored.dtype, (run,) if stored.size else ())


def joined_pieces(parts: Iterable[SplitTensor], shape: tuple[int, ...]) -> SplitTensor:
    """One tensor of `shape` whose values are those of `parts`, one after the other; all have one dtype."""
    parts = list(parts)
    dtypes = {part.dtype for part in parts}
    whole = SplitTensor(shape, dtypes.pop(), tuple(run for part in parts for run in part.runs if run.size))
    assert not dtypes
    assert not any(part.strides for part in parts)
    assert sum(run.size for run in whole.runs) == whole.size
    return whole


def same_bytes(one: SplitTensor, other: SplitTensor, chunk: int = _CHUNK_VALUES) -> bool:
    """Whether two stored tensors are equal bit for bit, compared `chunk` values at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.runs == other.runs:
        return True
    if one.strides or other.strides:
        return torch.equal(_bits(one.read()), _bits(other.read()))
    for start in range(0, one.size, chunk):
        shape = (min(chunk, one.size - start),)
        if not torch.equal(_bits(one.part(start, shape).read()), _bits(other.part(start, shape).read())):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
