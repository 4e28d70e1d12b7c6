"""Safetensors files: read by place, and written header first, then tensor by tensor as they come.

The file is 8 bytes of the header's length (little endian), the header (JSON: name to dtype, shape and the span of its
bytes after the header), then the tensors' bytes, end to end.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor, byte_chunks

_MOST_HEADER_BYTES = 100_000_000  # what the format allows
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    _NAMES[torch.float8_e8m0fnu] = "F8_E8M0"
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class SafetensorsSpec:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The file's tensors by name. Errors: DataError naming the file and what is broken in it."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise DataError(f"{path} is a Git LFS pointer, not the tensors: run `git lfs pull` in its folder")
            if len(start) < 8:
                raise _broken(path, f"has {file_bytes} bytes and no header")
            header_bytes = struct.unpack("<Q", start[:8])[0]
            if header_bytes > min(_MOST_HEADER_BYTES, file_bytes - 8):
                raise _broken(path, f"claims a header of {header_bytes:,} bytes in a file of {file_bytes:,}")
            file.seek(8)
            text = file.read(header_bytes)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the file and its rights") from error
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"has a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, "has a header that is no object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + header_bytes) for name, value in header.items()}
    end = 8 + header_bytes
    for name, tensor in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != end:
            raise _broken(path, f"has a gap or an overlap before tensor {name!r}")
        end += tensor.num_bytes
    if end != file_bytes:
        raise _broken(path, f"has {file_bytes:,} bytes, but its header says {end:,}")
    return entries


def write_safetensors(
    path: Path, specs: Sequence[SafetensorsSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, Any]:
    """Write `tensors`, which come in the order of `specs`, one at a time; the file appears under `path` when whole.

    Errors: DataError where a tensor is not what its spec says; OSError where the place cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        if spec.dtype not in _NAMES:
            raise DataError(f"{spec.name} is {spec.dtype}: safetensors has no such type")
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end := end + spec.num_bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        _write_values(file, path, specs, iter(tensors))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return {"tensors": [spec.name for spec in specs], "bytes": end}


def _write_values(
    file: Any, path: Path, specs: Sequence[SafetensorsSpec], tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    for spec in specs:
        name, tensor = next(tensors, ("", torch.empty(0)))
        tensor_spec = (name, tensor.dtype, tuple(tensor.shape))
        if tensor_spec != (spec.name, spec.dtype, spec.shape):
            raise DataError(
                f"{path}: {spec.name} {list(spec.shape)} of {spec.dtype} was to be written, but came as"
                f" {name or 'nothing'} {list(tensor.shape)} of {tensor.dtype}"
            )
        _write_bytes(file, tensor)
        del tensor  # before the next one is read


def _write_bytes(file: Any, tensor: torch.Tensor) -> None:
    """On its own, so that no chunk of this tensor is left in a variable when the next one is read."""
    for chunk in byte_chunks(tensor):
        file.write(chunk)


def _entry(path: Path, name: str, value: Any, start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"has no dtype, shape and data_offsets for tensor {name!r}") from error
    if dtype not in _DTYPES:
        raise DataError(f"{path}: {name} is of type {short(dtype)}: known are {', '.join(_DTYPES)}")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise _broken(path, f"has a shape or an offset that is no count, for tensor {name!r}")
    tensor = StoredTensor(path, _DTYPES[dtype], shape, start + begin)
    if tensor.num_bytes != end - begin:
        raise _broken(path, f"has {end - begin:,} bytes for tensor {name!r}, whose shape needs {tensor.num_bytes:,}")
    return tensor


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(pairs)
    if len(by_name) != len(pairs):
        raise _broken(path, "names a tensor twice")
    return by_name


def _broken(path: Path, what: str) -> DataError:
    return DataError(f"{path} is no whole safetensors file: it {what}; copy it again")
