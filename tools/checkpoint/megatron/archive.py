"""Writes a file that `torch.load` reads without ever holding its tensors: what they look like first, then their bytes.

    with ArchiveWriter(path, {"model": {"a": Planned(torch.float32, (2, 3))}}) as archive:
        archive.write(planned, block)          # in blocks, one tensor after the other, in any order

The layout is that of `torch.save`: a zip archive, stored, with data.pkl, one record a tensor and the version.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch._utils import _rebuild_tensor_v2

from dynapipe_ext.tools.checkpoint.files.stored_tensor import byte_chunks

_ALIGNMENT = 64
_STORAGES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


class Planned:
    """A tensor whose values are written later. It is itself: the same one in two places is one tensor in the file."""

    __slots__ = ("dtype", "key", "shape")

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self.key = ""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ArchiveWriter:
    """The file under a temporary name until it is left without an error; a context manager.

    Errors: RuntimeError where a planned tensor was not written, or not with its number of bytes.
    """

    def __init__(self, path: Path, value: Any) -> None:
        self._path, self._part = path, path.with_name(f".{path.name}.part")
        self._left: set[str] = set()
        self._archive = zipfile.ZipFile(self._part, "w", zipfile.ZIP_STORED, allowZip64=True)
        pickled, self._small = _pickled(value, self._left)
        self._record("data.pkl", [memoryview(pickled)])
        self._record("byteorder", [memoryview(b"little")])

    def __enter__(self) -> Self:
        for planned, tensor in self._small:
            self.write(planned, [tensor])
        return self

    def write(self, planned: Planned, blocks: Iterable[torch.Tensor]) -> None:
        """The values of a planned tensor, in order."""
        self._left.remove(planned.key)
        size = self._record(f"data/{planned.key}", (chunk for block in blocks for chunk in byte_chunks(block)))
        if size != planned.num_bytes:
            raise RuntimeError(f"{size:,} bytes were written of a tensor of {planned.num_bytes:,}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None or self._left:
            if self._archive.fp is not None:
                self._archive.fp.close()
            self._archive.fp = None  # closed: what is in the file does not count, and nothing more may fit
            self._part.unlink(missing_ok=True)
            if error is None:
                raise RuntimeError(f"{len(self._left)} planned tensors were not written")
            return
        self._record("version", [memoryview(b"3\n")])
        self._archive.close()
        with self._part.open("rb") as file:
            os.fsync(file.fileno())
        self._part.replace(self._path)

    def _record(self, name: str, chunks: Iterable[memoryview]) -> int:
        info = zipfile.ZipInfo(f"archive/{name}")
        info.extra = self._alignment(info)
        size = 0
        with self._archive.open(info, "w", force_zip64=True) as record:
            for chunk in chunks:
                record.write(chunk)
                size += len(chunk)
        return size

    def _alignment(self, info: zipfile.ZipInfo) -> bytes:
        """An extra field that moves the record's bytes to a multiple of 64, as torch does for mapped files.

        Before the bytes lie a local header of 30, the name, this field (4 and its length) and the 64-bit sizes (20).
        """
        assert self._archive.fp is not None
        start = self._archive.fp.tell() + 30 + len(info.filename.encode()) + 4 + 20
        length = -start % _ALIGNMENT
        return b"FB" + length.to_bytes(2, "little") + b"Z" * length


class _PlannedStorage:
    def __init__(self, planned: Planned) -> None:
        self.planned = planned


class _Pickler(pickle.Pickler):
    """Writes planned tensors as torch does, and gives each a key."""

    def __init__(self, file: io.BytesIO, keys: set[str]) -> None:
        super().__init__(file, protocol=2)
        self._keys = keys
        self.small: list[tuple[Planned, torch.Tensor]] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            planned = Planned(value.dtype, tuple(value.shape))
            self.small.append((planned, value))
            return self._reduced(planned)
        return self._reduced(value) if isinstance(value, Planned) else NotImplemented

    def _reduced(self, planned: Planned) -> Any:
        planned.key = str(len(self._keys))
        self._keys.add(planned.key)
        stride: list[int] = []
        step = 1
        for length in reversed(planned.shape):
            stride.insert(0, step)
            step *= max(1, length)
        return _rebuild_tensor_v2, (
            _PlannedStorage(planned), 0, planned.shape, tuple(stride), False, OrderedDict(),
        )  # fmt: skip

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _PlannedStorage):
            return None
        planned = value.planned
        return ("storage", _STORAGES[planned.dtype], planned.key, "cpu", math.prod(planned.shape))


def _pickled(value: Any, keys: set[str]) -> tuple[bytes, list[tuple[Planned, torch.Tensor]]]:
    file = io.BytesIO()
    pickler = _Pickler(file, keys)
    pickler.dump(value)
    return file.getvalue(), pickler.small
