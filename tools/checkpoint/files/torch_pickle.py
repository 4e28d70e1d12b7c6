"""Pickles of `torch.save` as plain values and places of tensors: nothing that a pickle names is imported or called.

Numbers, texts, containers and torch's types of values come as they are, tensors as `StoredTensor`, everything else as
an `Inert` that only remembers what the pickle said.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.tools.checkpoint.files.pickle_scan import pickle_size, refuse_unfolding
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor, refuse_state

Locate = Callable[[str, torch.dtype], tuple[int, int]]  # of a storage's key: its first byte in the file, its length
Classes = Callable[[str, str], Any]  # of a module and a name: what stands for it, None for an Inert

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
    "UntypedStorage": torch.uint8,  # unless the tensor says otherwise
}
_MOST_DIMENSIONS = 64


class Inert:
    """What the file said of an object that is not built: the class's name, what it was made from, and its state."""

    qualified = ""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.args, made.kwargs, made.state = args, kwargs, None
        return made

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


class _Ordered(dict[Any, Any]):
    """An ordered dictionary, without the attributes that torch hangs on it (the versions of modules)."""

    def __setstate__(self, _state: Any) -> None: ...


class _Function:
    """What a pickle may call and cannot change."""

    __slots__ = ("_run",)
    __setstate__ = refuse_state

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)


class _Storage(NamedTuple):
    dtype: torch.dtype
    offset: int
    num_bytes: int


def next_pickle(file: io.RawIOBase | io.BytesIO) -> bytes:
    """Return the bytes of the pickle at the file's position, which moves beyond it.

    Raises ValueError if it is cut or broken, or if loading would take memory or time that its size does not explain.
    """
    start = file.tell()
    num_bytes = pickle_size(file)  # type: ignore[arg-type]  # the stubs want all of IO
    file.seek(start)
    return file.read(num_bytes)


def load(
    data: bytes, path: Path, locate: Locate, classes: Classes, tensor: Callable[[StoredTensor], Any] = lambda it: it
) -> Any:
    """What the pickle says of `path`; each tensor is what `tensor` makes of its place.

    Errors: DataError, and whatever else a broken pickle raises.
    """
    tree = _Unpickler(data, path, locate, classes, tensor).load()
    refuse_unfolding(tree, (Inert, argparse.Namespace))
    return tree


class _Unpickler(pickle.Unpickler):
    """Every name in a pickle stands for a plain type, one of the functions below, or a class that only remembers.

    None of them can be changed by the pickle: what it sets on its own classes goes with them.
    """

    def __init__(
        self, data: bytes, path: Path, locate: Locate, classes: Classes, tensor: Callable[[StoredTensor], Any]
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="backslashreplace")  # texts of Python 2
        self._path, self._locate, self._classes, self._tensor = path, locate, classes, tensor
        self._storages: dict[tuple[str, torch.dtype], _Storage] = {}
        self._inert: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype  # getattr would import parts of torch by their names
        match module, name:
            case "torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2":
                return _Function(self._stored)
            case "torch._utils", "_rebuild_tensor_v3":
                return _Function(self._stored_as)
        replacement = _KNOWN.get((module, name))
        if replacement is None:
            replacement = self._classes(module, name)
        if replacement is None:
            qualified = f"{module}.{name}"
            if qualified not in self._inert:
                self._inert[qualified] = type("Inert", (Inert,), {"qualified": qualified})
            replacement = self._inert[qualified]
        return replacement

    def persistent_load(self, pid: Any) -> _Storage:
        tag, kind, key, _device, _num_values, *view = pid
        dtype = _STORAGE_DTYPES.get(kind) if isinstance(kind, str) else None
        if tag != "storage" or dtype is None or (view and view[0] is not None):
            raise DataError(f"{self._path}: a storage of type {short(kind)} is not known here: save its tensors anew")
        place = str(key), dtype
        if place not in self._storages:
            self._storages[place] = _Storage(dtype, *self._locate(*place))
        return self._storages[place]

    def _stored_as(
        self, storage: Any, start: Any, shape: Any, stride: Any, _gradient: Any, _hooks: Any, dtype: Any, *_rest: Any
    ) -> Any:
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
            raise DataError(f"{self._path}: a tensor of type {short(dtype)} is not known here")
        return self._stored(storage._replace(dtype=dtype), start, shape, stride)

    def _stored(self, storage: Any, start: Any, shape: Any, stride: Any, *_rest: Any) -> Any:
        if not isinstance(storage, _Storage):
            raise DataError(f"{self._path}: a tensor has {short(storage)} where a storage belongs")
        shape, stride, dtype = tuple(shape), tuple(stride), storage.dtype
        subject = f"{self._path}: a tensor of shape {short(shape)}, strides {short(stride)} and start {short(start)}"
        if not all(type(n) is int and n >= 0 for n in (start, *shape, *stride)):
            raise DataError(f"{subject} cannot be read: all are numbers >= 0")
        if len(shape) != len(stride) or len(shape) > _MOST_DIMENSIONS:
            raise DataError(f"{subject} cannot be read: both have one number for each of {_MOST_DIMENSIONS} dimensions")
        if 0 in shape:
            return self._tensor(StoredTensor(self._path, dtype, shape, storage.offset))
        last = start + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if (last + 1) * dtype.itemsize > storage.num_bytes:
            raise DataError(f"{subject} needs more than its {storage.num_bytes} bytes: copy the file again, it was cut")
        end_to_end = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        straight = all(n == 1 or a == b for n, a, b in zip(shape, stride, end_to_end, strict=True))
        offset = storage.offset + start * dtype.itemsize
        return self._tensor(StoredTensor(self._path, dtype, shape, offset, () if straight else stride))


def _from_type(function: Any, _type: Any, arguments: Sequence[Any], _state: Any) -> Any:
    """`_rebuild_from_type_v2`: a tensor with attributes. `function` is one of this file's, plain, or inert."""
    return function(*arguments)


def _set_of(values: Any = (), *_rest: Any) -> Any:
    """Return a set; of tuples, whose hashes may look at more than there is, a list."""
    return list(values) if any(isinstance(value, tuple) for value in values) else frozenset(values)


_ITSELF = _Function(lambda value, *_rest: value)
_KNOWN: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_parameter"): _ITSELF,
    ("torch._utils", "_rebuild_parameter_with_state"): _ITSELF,
    ("torch.nn.parameter", "Parameter"): _ITSELF,
    ("torch._tensor", "_rebuild_from_type_v2"): _Function(_from_type),
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): _Ordered,
    ("collections", "defaultdict"): _Function(lambda *_: _Ordered()),
    # By which old protocols write bytes.
    ("_codecs", "encode"): _Function(lambda text, *_: text.encode("latin1") if isinstance(text, str) else text),
} | {
    (module, kind.__name__): known
    for module in ("builtins", "__builtin__")
    for kind, known in ((complex, complex), (set, _Function(_set_of)), (frozenset, _Function(_set_of)))
}
