"""A tensor that lies in a file: read when it is asked for, whole or some rows of it, by plain reads.

Mapped files would count as memory of the process, page by page, so nothing here maps one.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import DataError

_CHUNK_BYTES = 1 << 24


def refuse_state(_made: object, _state: object) -> None:
    """As `__setstate__`: a pickle cannot change what stands for its tensors. Errors: UnpicklingError."""
    raise pickle.UnpicklingError("it changes what it made, as torch.save never does")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`offset` bytes into the file lies the first value; `stride` (in values) is empty where rows are end to end."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...] = ()

    __setstate__ = refuse_state

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """All values, contiguous, on the CPU. Errors: DataError where the file is shorter or cannot be read."""
        if not self.stride or not self.size:
            return self._values(0, self.size).view(self.shape)
        last = sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        return torch.as_strided(self._values(0, last + 1), self.shape, self.stride).contiguous()

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Return rows `start` to `stop` of the first dimension as a tensor of their own; nothing is read."""
        step = self.stride[0] if self.stride else math.prod(self.shape[1:])
        offset = self.offset + start * step * self.dtype.itemsize
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=offset)

    def row(self, index: int) -> StoredTensor:
        """Return one row of the first dimension, without that dimension; nothing is read."""
        one = self.rows(index, index + 1)
        return replace(one, shape=self.shape[1:], stride=self.stride[1:])

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of the first dimension, contiguous."""
        if self.stride:
            return self.read()[start:stop].contiguous()
        row = math.prod(self.shape[1:])
        return self._values(start * row, (stop - start) * row).view(stop - start, *self.shape[1:])

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The values' bytes in order, a few megabytes at a time."""
        if self.stride:
            yield from byte_chunks(self.read())
            return
        with _open(self.path) as file:
            file.seek(self.offset)
            left = self.num_bytes
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise self._short(left)
                left -= len(chunk)
                yield chunk

    def equals(self, other: StoredTensor) -> bool:
        """Whether type, shape and every bit are the same; a difference at the start costs one chunk."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        if (self.path, self.offset, self.stride) == (other.path, other.offset, other.stride):
            return True
        return all(bytes(one) == bytes(two) for one, two in zip(self.chunks(), other.chunks(), strict=True))

    def fill(self, buffer: memoryview, start: int = 0) -> None:
        """The bytes of the stored values from `start` on, as many as `buffer` holds. Errors: as `read`."""
        try:
            with _open(self.path) as file:
                file.seek(self.offset + start * self.dtype.itemsize)
                num_read = _fill(file, buffer)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror}): check the disk") from error
        if num_read < len(buffer):
            raise self._short(len(buffer) - num_read)

    def _values(self, start: int, count: int) -> torch.Tensor:
        data = torch.empty(count * self.dtype.itemsize, dtype=torch.uint8)
        self.fill(memoryview(data.numpy()), start)  # type: ignore[arg-type]  # numpy's stubs for 3.11 know no Buffer
        return data.view(self.dtype)

    def _short(self, num_bytes: int) -> DataError:
        return DataError(f"{self.path} ends {num_bytes:,} bytes early: it was changed or cut short; copy it again")


def _open(path: Path):  # type: ignore[no-untyped-def]  # FileIO, whose readinto takes any buffer
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the file and its rights") from error


def _fill(file: Any, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            break
        done += count
    return done


def byte_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    values = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    view = memoryview(values)  # type: ignore[arg-type]  # numpy's stubs for 3.11 know no Buffer
    for start in range(0, len(view), _CHUNK_BYTES):
        yield view[start : start + _CHUNK_BYTES]


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of type, shape and bytes: equal for tensors of equal bits alone."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for chunk in byte_chunks(tensor):
        digest.update(chunk)
    return digest.hexdigest()


def shape_faults(expected: Mapping[str, tuple[int, ...]], present: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is missing, extra and misshapen, each named with its shapes."""
    missing = [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in present]
    extra = [f"{name} {list(shape)} is extra" for name, shape in present.items() if name not in expected]
    misshapen = [
        f"{name} is {list(present[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in present and tuple(present[name]) != tuple(shape)
    ]
    return missing + extra + misshapen


def refuse_faults(where: Path, faults: list[str], advice: str) -> None:
    """Errors: DataError with all `faults`, where there is any."""
    if faults:
        number = f"{len(faults)} tensors" if len(faults) > 1 else "a tensor"
        raise DataError(f"{where} does not hold its model, {number} at fault: {'; '.join(faults)}. {advice}")
