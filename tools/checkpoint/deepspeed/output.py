"""Files of torch.save, written one tensor at a time: the structure first, then each tensor's bytes as they come."""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.checkpoint.files.stored_tensor import byte_chunks

_ALIGNMENT_BYTES = 64  # where torch.save begins each tensor
_LOCAL_HEADER_BYTES, _ZIP64_EXTRA_BYTES, _PADDING_HEADER_BYTES = 30, 20, 4
_PADDING_ID = b"FB"  # torch's name for the extra field that aligns
_STORAGES: Mapping[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
}


@dataclass(frozen=True, slots=True)
class Promised:
    """A tensor of a tree that will be written: the values of storage number `storage`, row-major."""

    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TorchFileWriter:
    """Writes `tree`, whose tensors are `Promised`, as torch.save would; a context manager.

    `write` takes the values of storage 0, then 1 and so on, in as many parts as it pleases. At the end the file appears
    under `path`, whole; nothing is left where an error came first. Errors: DataError where parts do not add up.
    """

    def __init__(self, path: Path, tree: Any) -> None:
        self.path = path
        self._promised: dict[int, Promised] = {}
        self._pickle = io.BytesIO()
        _Pickler(self._pickle, self._promise).dump(tree)
        if sorted(self._promised) != list(range(len(self._promised))):
            raise ValueError(f"storages {sorted(self._promised)} are not numbered from 0")
        self._part = path.with_name(f".{path.name}.part")
        self._storage = 0
        self._left = -1  # bytes of the storage that is open
        self._record: Any = None

    def __enter__(self) -> TorchFileWriter:
        self._file: BinaryIO = self._part.open("wb")
        self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)
        self._add("data.pkl", self._pickle.getvalue())
        self._add("byteorder", b"little")
        self._next_storage()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._archive.fp = None  # closed: what is in the file does not count
            self._file.close()
            self._part.unlink(missing_ok=True)
            return
        try:
            if self._record is not None:
                self._archive.fp = None
                raise DataError(f"{self.path}: storage {self._storage} lacks {self._left} bytes: this is a defect")
            self._add("version", b"3\n")
            self._archive.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._part.replace(self.path)
        finally:
            self._file.close()
            self._part.unlink(missing_ok=True)

    def write(self, tensor: torch.Tensor) -> None:
        """The next values, of the type that was promised."""
        if not tensor.numel():
            return
        if self._record is None or tensor.dtype != self._promised[self._storage].dtype:
            raise DataError(f"{self.path}: {tensor.dtype} {list(tensor.shape)} was not promised: this is a defect")
        self._left -= tensor.numel() * tensor.dtype.itemsize
        if self._left < 0:
            raise DataError(f"{self.path}: storage {self._storage} has {-self._left} bytes too many: this is a defect")
        for chunk in byte_chunks(tensor):
            self._record.write(chunk)
        if self._left == 0:
            self._record.close()
            self._storage += 1
            self._next_storage()

    def _promise(self, promised: Promised) -> None:
        earlier = self._promised.setdefault(promised.storage, promised)
        if (earlier.num_bytes, earlier.dtype) != (promised.num_bytes, promised.dtype):
            raise ValueError(f"storage {promised.storage} is promised as {earlier} and as {promised}")
        if promised.dtype not in _STORAGES:
            raise DataError(f"{self.path}: {promised.dtype} cannot be written: give float32, bfloat16 or float16")

    def _next_storage(self) -> None:
        self._record = None
        while self._storage < len(self._promised):
            self._left = self._promised[self._storage].num_bytes
            name = f"data/{self._storage}"
            if self._left:
                info = self._info(name, self._left)
                self._record = self._archive.open(info, "w", force_zip64=_needs_zip64(self._left))
                return
            self._add(name, b"")
            self._storage += 1

    def _add(self, name: str, data: bytes) -> None:
        with self._archive.open(self._info(name, len(data)), "w") as record:
            record.write(data)

    def _info(self, name: str, num_bytes: int) -> zipfile.ZipInfo:
        """A record whose bytes begin at a multiple of 64."""
        info = zipfile.ZipInfo(f"{self.path.stem}/{name}")
        info.file_size = num_bytes
        header = _LOCAL_HEADER_BYTES + len(info.filename.encode()) + _PADDING_HEADER_BYTES
        header += _ZIP64_EXTRA_BYTES if _needs_zip64(num_bytes) else 0
        padding = -(self._file.tell() + header) % _ALIGNMENT_BYTES
        info.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
        return info


def _needs_zip64(num_bytes: int) -> bool:
    return num_bytes > zipfile.ZIP64_LIMIT


@dataclass(frozen=True, slots=True)
class _Storage:
    """What a pickle of torch.save says of a storage, in place of the storage."""

    identity: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO, promise: Callable[[Promised], None]) -> None:
        super().__init__(file, protocol=2)
        self._promise = promise

    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Promised):
            return NotImplemented
        self._promise(value)
        size = math.prod(value.shape)
        storage = _Storage(("storage", _STORAGES[value.dtype], str(value.storage), "cpu", size))
        strides = tuple(math.prod(value.shape[i + 1 :]) for i in range(len(value.shape)))
        no_hooks: OrderedDict[Any, Any] = OrderedDict()
        return torch._utils._rebuild_tensor_v2, (storage, 0, value.shape, strides, False, no_hooks)
