"""Bytes that autograd keeps between a forward and its backward: torch has no such counter on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class StoredBytes:
    """Counts what autograd saves, each storage once, those that are `known` (weights; by data pointer) left out."""

    def __init__(self, *known: set[int]) -> None:
        self._seen, self._known = set[int](), known
        self.num_bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if not any(pointer in counted for counted in (self._seen, *self._known)):
            self._seen.add(pointer)
            self.num_bytes += storage.nbytes()
        return tensor.detach()  # an operation's own output would keep the operation, and thereby itself, for ever

    def counting(self) -> AbstractContextManager[Any]:
        """Within: everything that autograd saves is counted."""
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)
        return hooks


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
