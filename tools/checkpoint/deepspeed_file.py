"""Files of torch.save as trees of plain values, in which a tensor is the place where its bytes lie.

Nothing in the file is imported or run: a class that is not plain data becomes an `Opaque` that remembers nothing. No
tensor is read until asked for, and then only its own bytes.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import DataError, short

_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_PLAIN_TYPES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
}
_ZERO_STAGE = ("deepspeed.runtime.zero.config", "ZeroStageEnum")
_MOST_PICKLE_BYTES = 1 << 30  # names and shapes; tensors lie beside it
_LOCAL_HEADER_BYTES = 30
_MOST_DIMENSIONS = 64
_CHUNK_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class Run:
    """Values that lie one after the other in a file, from byte `offset` on."""

    path: Path
    offset: int
    num_values: int


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """A tensor on disk: its values are the runs end to end, row-major unless `strides` (in values) says otherwise."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: tuple[Run, ...]
    strides: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def part(self, start: int, shape: tuple[int, ...]) -> SplitTensor:
        """The tensor of `shape` that begins with value `start` of this one. Errors: DataError beyond its end."""
        if self.strides:
            raise DataError(
                f"{self.runs[0].path}: a tensor of shape {self.shape} is not stored row by row: save a copy"
            )
        wanted = math.prod(shape)
        if start < 0 or start + wanted > self.size:
            raise DataError(
                f"{self.runs[0].path if self.runs else 'a tensor'}: values {start} to {start + wanted} of {self.size}"
                " are asked for: the checkpoint is cut short; save it again"
            )
        runs, end, position = [], start + wanted, 0
        for run in self.runs:
            first, last = max(start, position), min(end, position + run.num_values)
            if first < last:
                offset = run.offset + (first - position) * self.dtype.itemsize
                runs.append(Run(run.path, offset, last - first))
            position += run.num_values
        return SplitTensor(shape, self.dtype, tuple(runs))

    def read_as(self, dtype: torch.dtype) -> torch.Tensor:
        """`read()` cast to another type, a few megabytes at a time."""
        if dtype == self.dtype or self.strides:
            return self.read().to(dtype)
        found = torch.empty(self.size, dtype=dtype)
        for start in range(0, self.size, _CHUNK_VALUES):
            values = self.part(start, (min(_CHUNK_VALUES, self.size - start),)).read()
            found[start : start + values.numel()] = values
        return found.view(self.shape)

    def read(self) -> torch.Tensor:
        """Contiguous, on the CPU. Errors: DataError where the file has become shorter or cannot be read."""
        values = torch.empty(sum(run.num_values for run in self.runs), dtype=self.dtype)
        buffer = memoryview(_bits(values).numpy())  # type: ignore[arg-type]  # an array is a buffer
        done = 0
        for run in self.runs:
            wanted = buffer[done : done + run.num_values * self.dtype.itemsize]
            try:
                with run.path.open("rb", buffering=0) as file:
                    file.seek(run.offset)
                    read = _fill(file, wanted)
            except OSError as error:
                raise DataError(f"{run.path} cannot be read ({error.strerror}): give a readable checkpoint") from error
            if read < len(wanted):
                raise DataError(f"{run.path} ends {len(wanted) - read} bytes early: it was changed or cut short")
            done += len(wanted)
        if self.strides:
            return values.as_strided(self.shape, self.strides).contiguous()
        return values.view(self.shape)


def joined(parts: Iterable[SplitTensor], shape: tuple[int, ...]) -> SplitTensor:
    """One tensor of `shape` whose values are those of `parts`, one after the other; all have one dtype."""
    parts = list(parts)
    dtypes = {part.dtype for part in parts}
    whole = SplitTensor(shape, dtypes.pop(), tuple(run for part in parts for run in part.runs if run.num_values))
    assert not dtypes
    assert not any(part.strides for part in parts)
    assert sum(run.num_values for run in whole.runs) == whole.size
    return whole


def same_bytes(one: SplitTensor, other: SplitTensor, chunk: int = _CHUNK_VALUES) -> bool:
    """Whether two stored tensors are equal bit for bit, compared `chunk` values at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if (one.runs, one.strides) == (other.runs, other.strides):
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


def _fill(file: io.FileIO, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            break
        done += count
    return done


class Opaque:
    """What stands where a file holds an object that is not plain data. It keeps nothing of it."""

    def __init__(self, *_args: Any, **_named: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass

    def append(self, _value: Any) -> None:
        pass

    def extend(self, _values: Any) -> None:
        pass

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass


class _Ordered(dict[Any, Any]):
    def __setstate__(self, _state: Any) -> None:
        pass  # torch hangs the versions of modules on a state dict


def read_tree(path: Path) -> Any:
    """What torch.save wrote into `path`; tensors are SplitTensors, other objects plain values or `Opaque`.

    Errors: DataError naming the file where it cannot be read, is damaged or in torch's format before 1.6.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_archive(path, archive)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): give a readable checkpoint") from error
    except zipfile.BadZipFile as error:
        raise DataError(
            f"{path} is not a whole file of torch.save ({error}): it is cut short, or older than torch 1.6; copy it"
            " again, or load and save it with a later torch"
        ) from error


def _read_archive(path: Path, archive: zipfile.ZipFile) -> Any:
    records = {info.filename: info for info in archive.infolist()}
    heads = [name for name in records if name.endswith("data.pkl") and name.count("/") == 1]
    if len(heads) != 1:
        raise DataError(f"{path} has no data.pkl of torch.save: give a checkpoint that torch.save wrote")
    root = heads[0].removesuffix("data.pkl")
    if records[heads[0]].file_size > _MOST_PICKLE_BYTES:
        raise DataError(f"{path}: its index has {records[heads[0]].file_size} bytes, more than {_MOST_PICKLE_BYTES}")
    order = archive.read(root + "byteorder").strip() if root + "byteorder" in records else b"little"
    if order != b"little":
        raise DataError(f"{path} was written with {short(order)} endian numbers: save it on a little endian machine")
    with path.open("rb") as file:
        data = archive.read(heads[0])
        try:
            _refuse_memory_bombs(data)
            return _Unpickler(data, path, root, records, file).load()
        except DataError:
            raise
        except Exception as error:  # a damaged pickle can raise anything
            raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): copy or save it again") from error


def _refuse_memory_bombs(data: bytes) -> None:
    """Errors: ValueError where loading would take memory that the pickle's own size does not account for."""
    for operation, argument, _ in pickletools.genops(data):  # it also finds lengths that reach beyond the end
        if operation.name.endswith("PUT") and int(argument or 0) > len(data):
            raise ValueError(f"value {argument} is remembered in a pickle of {len(data)} bytes")


@dataclass(frozen=True, slots=True)
class _Storage:
    offset: int
    num_bytes: int
    dtype: torch.dtype | None


class _Unpickler(pickle.Unpickler):
    """Every name in the pickle leads to one of these methods, to a plain type or to a class that does nothing.

    What it hands out are bound methods, built-in types and classes of this one load, so that nothing a pickle sets on
    them outlives it.
    """

    def __init__(
        self, data: bytes, path: Path, root: str, records: dict[str, zipfile.ZipInfo], file: io.BufferedReader
    ) -> None:
        super().__init__(io.BytesIO(data))
        self.path, self.root, self.records, self.file = path, root, records, file
        self.storages: dict[tuple[str, torch.dtype | None], _Storage] = {}
        self.opaque = type("Opaque", (Opaque,), {})
        self.ordered = type("Ordered", (_Ordered,), {})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN_TYPES:
            return _PLAIN_TYPES[module, name]
        if (module, name) == _ZERO_STAGE:
            return self._zero_stage
        if (module, name) == ("collections", "OrderedDict"):
            return self.ordered
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return f"{module}.{name}"
        match module, name:
            case "torch._utils", "_rebuild_tensor_v2":
                return self._tensor
            case "torch._utils", "_rebuild_tensor_v3":
                return self._typed_tensor
            case "torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state":
                return self._parameter
            case "torch._tensor", "_rebuild_from_type_v2":
                return self._from_type
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return self.opaque

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _location, _num_values = pid
        dtype = _STORAGE_DTYPES.get(str(storage_type).rpartition(".")[2])
        if kind != "storage" or (dtype is None and storage_type != "torch.storage.UntypedStorage"):
            raise DataError(f"{self.path}: a storage of type {short(storage_type)} is not known here")
        found = self.storages.get((key, dtype))
        if found is None:
            found = self.storages[key, dtype] = self._locate(str(key), dtype)
        return found

    def _locate(self, key: str, dtype: torch.dtype | None) -> _Storage:
        info = self.records.get(f"{self.root}data/{key}")
        if info is None:
            raise DataError(f"{self.path}: the bytes of tensor {short(key)} are absent: the file is not whole")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise DataError(f"{self.path}: tensor {short(key)} is compressed or encrypted: save it with torch.save")
        self.file.seek(info.header_offset)
        header = self.file.read(_LOCAL_HEADER_BYTES)
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        offset = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if offset + info.file_size > os.fstat(self.file.fileno()).st_size:
            raise DataError(f"{self.path}: tensor {short(key)} reaches beyond the end of the file: it is cut short")
        return _Storage(offset, info.file_size, dtype)

    def _zero_stage(self, value: int) -> int:
        return int(value)

    def _parameter(self, data: Any, *_rest: Any) -> Any:
        return data

    def _from_type(self, function: Any, _type: Any, arguments: Any, _state: Any) -> Any:
        return function(*arguments)

    def _typed_tensor(
        self, storage: _Storage, start: int, size: Sequence[int], stride: Sequence[int], _gradient: Any, _hooks: Any,
        dtype: torch.dtype, *_rest: Any,
    ) -> SplitTensor:  # fmt: skip
        return self._tensor(replace(storage, dtype=dtype), start, size, stride)

    def _tensor(
        self, storage: _Storage, start: int, size: Sequence[int], stride: Sequence[int], *_rest: Any
    ) -> SplitTensor:
        shape, strides = tuple(map(int, size)), tuple(map(int, stride))
        dtype = storage.dtype
        if dtype is None or len(shape) != len(strides) or len(shape) > _MOST_DIMENSIONS:
            raise DataError(f"{self.path}: a tensor of shape {shape} and strides {strides} cannot be read")
        if min((*shape, *strides, start), default=0) < 0:
            raise DataError(
                f"{self.path}: a tensor has shape {shape}, strides {strides}, start {start}: none can be < 0"
            )
        if math.prod(shape) == 0:
            return SplitTensor(shape, dtype, ())
        span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if (start + span) * dtype.itemsize > storage.num_bytes:
            raise DataError(f"{self.path}: a tensor of shape {shape} needs more than its {storage.num_bytes} bytes")
        run = Run(self.path, storage.offset + start * dtype.itemsize, span)
        row_major = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        is_plain = all(n == 1 or step == plain for n, step, plain in zip(shape, strides, row_major, strict=True))
        return SplitTensor(shape, dtype, (run,), () if is_plain else strides)
