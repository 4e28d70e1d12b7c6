"""Files of `torch.save` (.bin, .pth): their tensors by place, without running what the file says.

Both layouts: the zip archive of torch 1.6 and later, and the plain one before it (GPT-2's and T5's first files). The
pickle inside may name tensors, storages and ordered dictionaries; anything else is refused, and nothing of torch or of
other modules is called. Storages are found by their offset in the file and are read when asked for.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.tools.checkpoint.stored_tensor import StoredTensor

_PLAIN_MAGIC = 0x1950A86A20F9469CFC6C
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


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: torch.dtype
    num_values: int


@dataclass(slots=True)
class _View:
    """A tensor as the pickle describes it; all counts are in values."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True)
class _Found:
    storages: dict[str, _Storage] = field(default_factory=dict)


def read_torch_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a saved state dict by name. Errors: DataError naming the file and what it holds besides."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            views, offsets = (_read_zip if start[:2] == b"PK" else _read_plain)(path, file)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the file and its rights") from error
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, struct.error) as error:
        raise _broken(path, str(error) or "it ends too early") from error
    except (AttributeError, IndexError, KeyError, MemoryError, TypeError, ValueError, RecursionError) as error:
        raise _broken(path, f"its pickle does not describe tensors ({type(error).__name__}: {error})") from error
    if not isinstance(views, Mapping):
        raise DataError(f"{path} holds {type(views).__name__} where a state dict is needed: save model.state_dict()")
    others = [str(name) for name, view in views.items() if not isinstance(view, _View) or not isinstance(name, str)]
    if others:
        shown = ", ".join(map(short, others[:5])) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise DataError(f"{path} holds {shown} besides tensors: save the model's state dict alone")
    return {name: _stored(path, name, view, offsets) for name, view in views.items()}


def _stored(path: Path, name: str, view: _View, offsets: Mapping[str, tuple[int, int]]) -> StoredTensor:
    """Errors: DataError where the tensor reaches outside its storage."""
    shape, stride = view.shape, view.stride
    counts = (view.offset, *shape, *stride)
    if len(shape) != len(stride) or not all(type(count) is int and count >= 0 for count in counts):
        raise _broken(path, f"{name} has shape {short(shape)} and stride {short(stride)}")
    start, num_bytes = offsets[view.storage.key]
    itemsize = view.storage.dtype.itemsize
    last = view.offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    empty = 0 in shape
    if not empty and (last + 1) * itemsize > num_bytes:
        raise _broken(path, f"{name} reaches beyond its storage of {num_bytes:,} bytes")
    end_to_end: list[int] = []
    step = 1
    for length in reversed(shape):
        end_to_end.insert(0, step)
        step *= length
    plain = empty or all(length == 1 or a == b for length, a, b in zip(shape, stride, end_to_end, strict=True))
    return StoredTensor(path, view.storage.dtype, shape, start + view.offset * itemsize, () if plain else stride)


def _read_zip(path: Path, file: BinaryIO) -> tuple[Any, dict[str, tuple[int, int]]]:
    found = _Found()
    with zipfile.ZipFile(file) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "data.pkl" not in records:
            raise _broken(path, "it has no data.pkl")
        if "byteorder" in records and archive.read(records["byteorder"]).strip() != b"little":
            raise DataError(f"{path} was written on a big-endian machine: save it again on a little-endian one")
        views = _Unpickler(path, io.BytesIO(archive.read(records["data.pkl"])), found).load()
    offsets = {}
    for key in found.storages:
        info = records[f"data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED:
            raise DataError(f"{path} is compressed inside: save it again with torch.save")
        # The data follow a local header of 30 bytes, the name and an extra field, whose length is its own.
        file.seek(info.header_offset + 26)
        name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
        offsets[key] = (info.header_offset + 30 + name_bytes + extra_bytes, info.file_size)
    return views, offsets


def _read_plain(path: Path, file: BinaryIO) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Four pickles (magic, version, system, the object), the storages' keys, and each storage after its count."""
    found = _Found()
    magic = _Unpickler(path, file, found).load()
    if magic != _PLAIN_MAGIC:
        raise _broken(path, "it does not begin as files of torch.save do")
    _Unpickler(path, file, found).load()
    system = _Unpickler(path, file, found).load()
    if isinstance(system, Mapping) and system.get("little_endian") is False:
        raise DataError(f"{path} was written on a big-endian machine: save it again on a little-endian one")
    views = _Unpickler(path, file, found).load()
    keys = _Unpickler(path, file, found).load()
    position, file_bytes = file.tell(), path.stat().st_size
    offsets = {}
    for key in keys:
        file.seek(position)
        num_bytes = struct.unpack("<q", file.read(8))[0] * found.storages[key].dtype.itemsize
        offsets[key] = (position + 8, num_bytes)
        position += 8 + num_bytes
        if num_bytes < 0 or position > file_bytes:
            raise _broken(path, "it ends too early")
    return views, offsets


class _Unpickler(pickle.Unpickler):
    """Builds descriptions of tensors. Every name in the pickle stands for one of the functions below, or is refused."""

    def __init__(self, path: Path, file: BinaryIO | io.BytesIO, found: _Found) -> None:
        super().__init__(file, encoding="utf-8")
        self._path, self._found = path, found

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGE_DTYPES:
            return _StorageType(_STORAGE_DTYPES[name])
        known = _KNOWN.get((module, name))
        if known is None:
            raise DataError(f"{self._path} names {module}.{name}, which is no plain tensor: save the state dict alone")
        return known

    def persistent_load(self, pid: Any) -> _Storage:
        tag, kind, key, _device, num_values, *view = pid
        if tag != "storage" or not isinstance(kind, _StorageType) or (view and view[0] is not None):
            raise pickle.UnpicklingError(f"an unknown kind of storage: {short(pid)}")
        return self._found.storages.setdefault(str(key), _Storage(str(key), kind.dtype, int(num_values)))


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: torch.dtype


def _tensor(storage: _Storage, offset: int, shape: Any, stride: Any, *_rest: Any) -> _View:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    return _View(storage, offset, tuple(shape), tuple(stride))


def _parameter(tensor: Any, *_rest: Any) -> Any:
    return tensor


_KNOWN: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch.nn.parameter", "Parameter"): _parameter,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
}


def _broken(path: Path, what: str) -> DataError:
    return DataError(f"{path} is no whole file of torch.save: {what}; copy it again")
