"""Megatron's pickles (common.pt, model_optim_rng.pt, records of .distcp files) as plain values and places of tensors.

`argparse.Namespace` comes as it is; other classes, like enumerations, only remember what the file said.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor
from dynapipe_ext.tools.checkpoint.files.torch_file import ArchiveRecord, read_tree


class _Namespace(argparse.Namespace):
    """Takes a state, as pickled namespaces have one, without touching anything but its own fields."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})


def read_archive(record: ArchiveRecord) -> Any:
    """What `torch.save` wrote, tensors as StoredTensor. Errors: DataError naming the file."""
    names = (("argparse", "Namespace"), ("types", "SimpleNamespace"))
    return read_tree(record, lambda *name: _Namespace if name in names else None)


def read_tensor_record(record: ArchiveRecord) -> StoredTensor:
    """The one tensor that a record holds. Errors: DataError."""
    tensor = read_archive(record)
    if not isinstance(tensor, StoredTensor):
        raise DataError(f"{record.path} holds no tensor at byte {record.offset:,}: copy it again, or save it anew")
    return tensor


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
