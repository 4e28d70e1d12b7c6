"""Megatron's pickles as plain values and places of tensors: nothing that a file names is imported or called.

Reads whole files of `torch.save` (common.pt, model_optim_rng.pt), the records inside .distcp files, and .metadata.
Numbers, texts, containers, types of values and `argparse.Namespace` come as they are, tensors as `StoredTensor`,
everything else (enumerations, classes of other packages) as an `Inert` that only remembers what the file said.
"""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.tools.checkpoint.stored_tensor import StoredTensor

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
    "UntypedStorage": torch.uint8,
}
_LOCAL_HEADER_BYTES = 30


class Inert:
    """What the file said of an object that is not built: the class's name, what it was made from, and its state."""

    qualified = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.args, made.kwargs, made.state = args, kwargs, None
        return made

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def __getitem__(self, name: str) -> Any:
        """A field of a pickled dataclass. Errors: KeyError."""
        if not isinstance(self.state, dict):
            raise KeyError(name)
        return self.state[name]


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes of a file that are one `torch.save` archive: the whole file, or one chunk of a .distcp."""

    path: Path
    offset: int = 0
    num_bytes: int = -1  # -1: to the end


def read_plain_pickle(path: Path) -> Any:
    """A pickle that holds no tensors (.metadata). Errors: DataError naming the file."""

    def read(file: BinaryIO) -> Any:
        return _Unpickler(file, path, {}).load()

    return _guarded(path, read)


def read_archive(record: Record) -> Any:
    """What `torch.save` wrote, tensors as StoredTensor. Errors: DataError naming the file."""

    def read(file: BinaryIO) -> Any:
        view = _View(file, record)
        with zipfile.ZipFile(view) as archive:
            infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "data.pkl" not in infos:
                raise zipfile.BadZipFile("it has no data.pkl")
            if "byteorder" in infos and archive.read(infos["byteorder"]).strip() != b"little":
                raise DataError(
                    f"{record.path} was written on a big-endian machine: save it again on a little-endian one"
                )
            places = {}
            for name, info in infos.items():
                if name.startswith("data/"):
                    if info.compress_type != zipfile.ZIP_STORED:
                        raise DataError(f"{record.path} is compressed inside: save it again with torch.save")
                    view.seek(info.header_offset + 26)
                    num_name, num_extra = struct.unpack("<HH", view.read(4))
                    start = record.offset + info.header_offset + _LOCAL_HEADER_BYTES + num_name + num_extra
                    places[name.removeprefix("data/")] = (start, info.file_size)
            pickled = archive.read(infos["data.pkl"])
        return _Unpickler(io.BytesIO(pickled), record.path, places).load()

    return _guarded(record.path, read)


def read_tensor_record(record: Record) -> StoredTensor:
    """The one tensor that a record holds. Errors: DataError."""
    found = read_archive(record)
    if not isinstance(found, StoredTensor):
        raise DataError(f"{record.path} holds no tensor at byte {record.offset:,}: copy it again, or save it anew")
    return found


def scalar(value: Any, default: float = 0.0) -> float:
    """A number that may have been saved as a tensor of one value."""
    if isinstance(value, StoredTensor) and value.size == 1:
        return float(value.read().item())
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def plain(value: Any) -> Any:
    """`value` with what is no plain value left out of its containers; tensors of one value become numbers.

    Errors: TypeError where `value` itself is none.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype):
        return value
    if isinstance(value, StoredTensor) and value.size == 1:
        return value.read().item()
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items() if is_plain(entry)}
    if isinstance(value, list | tuple):
        return type(value)(plain(entry) for entry in value if is_plain(entry))
    raise TypeError(f"{short(value)} is no plain value")


def is_plain(value: Any) -> bool:
    """Whether `plain` takes it."""
    return (
        value is None
        or isinstance(value, bool | int | float | str | bytes | torch.dtype | Mapping | list)
        or type(value) is tuple
        or (isinstance(value, StoredTensor) and value.size == 1)
    )


def _guarded(path: Path, read: Callable[[BinaryIO], Any]) -> Any:
    try:
        with path.open("rb") as file:
            return read(file)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the file and its rights") from error
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, struct.error) as error:
        raise DataError(
            f"{path} is no whole file of Megatron: {error or 'it ends too early'}; copy it again"
        ) from error
    except (AttributeError, IndexError, KeyError, MemoryError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be understood ({type(error).__name__}: {error}): copy it again") from error


class _View(io.RawIOBase):
    """A record's bytes as a file of their own."""

    def __init__(self, file: BinaryIO, record: Record) -> None:
        super().__init__()
        end = file.seek(0, io.SEEK_END)
        self._file, self._start = file, record.offset
        self._length = end - record.offset if record.num_bytes < 0 else record.num_bytes
        if record.offset < 0 or record.offset + self._length > end:
            raise EOFError(f"a record of {self._length:,} bytes at {record.offset:,} in a file of {end:,} bytes")
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._start + self._at)
        found = self._file.read(count)
        self._at += len(found)
        return found


class _Unpickler(pickle.Unpickler):
    """Every name in the pickle stands for one of the things below, or for a class that only remembers."""

    def __init__(self, file: Any, path: Path, places: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(file, encoding="latin1")
        self._path, self._places = path, places
        self._inert: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGE_DTYPES:
            return _StorageType(_STORAGE_DTYPES[name])
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module == "torch._utils" and name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return self._tensor
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        qualified = f"{module}.{name}"
        if qualified not in self._inert:
            self._inert[qualified] = type("Inert", (Inert,), {"qualified": qualified})
        return self._inert[qualified]

    def persistent_load(self, pid: Any) -> _Storage:
        tag, kind, key, _device, _num_values, *view = pid
        if tag != "storage" or not isinstance(kind, _StorageType) or (view and view[0] is not None):
            raise pickle.UnpicklingError(f"an unknown kind of storage: {short(pid)}")
        start, num_bytes = self._places[str(key)]
        return _Storage(kind.dtype, start, num_bytes)

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *_rest: Any) -> StoredTensor:
        if not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("a tensor without a storage")
        shape, stride = tuple(shape), tuple(stride)
        if len(shape) != len(stride) or not all(type(n) is int and n >= 0 for n in (offset, *shape, *stride)):
            raise pickle.UnpicklingError(f"a tensor of shape {short(shape)} and stride {short(stride)}")
        itemsize, is_empty = storage.dtype.itemsize, 0 in shape
        last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if not is_empty and (last + 1) * itemsize > storage.num_bytes:
            raise pickle.UnpicklingError(f"a tensor of shape {shape} reaches beyond its {storage.num_bytes:,} bytes")
        end_to_end: list[int] = []
        step = 1
        for length in reversed(shape):
            end_to_end.insert(0, step)
            step *= length
        straight = is_empty or all(n == 1 or a == b for n, a, b in zip(shape, stride, end_to_end, strict=True))
        start = storage.offset + offset * itemsize
        return StoredTensor(self._path, storage.dtype, shape, start, () if straight else stride)


def _itself(value: Any, *_rest: Any) -> Any:
    return value


class _Namespace(argparse.Namespace):
    """Takes a state, as pickled namespaces have one, without touching anything but its own fields."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})


def _from_type(function: Any, _type: Any, args: Any, _state: Any) -> Any:
    """`torch._tensor._rebuild_from_type_v2`: a tensor with attributes. `function` is one of this file's, or inert."""
    return function(*args) if callable(function) else None


def _bytes_of(text: Any, *_rest: Any) -> Any:
    """`_codecs.encode`, by which old protocols write bytes."""
    return text.encode("latin1") if isinstance(text, str) else text


_KNOWN: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_parameter"): _itself,
    ("torch._utils", "_rebuild_parameter_with_state"): _itself,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: defaultdict(),
    ("argparse", "Namespace"): _Namespace,
    ("types", "SimpleNamespace"): _Namespace,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("_codecs", "encode"): _bytes_of,
}
