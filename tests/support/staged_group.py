"""A process group whose ranks may share one device: what they exchange goes through the host, over gloo.

NCCL takes one rank a device, and gloo sends no tensors of a device. Here are the collectives and transfers that
executors and megatron-core use, no others. Collectives end before they return. A send returns at once and keeps its
copy on the host; a receive copies to the device in its `wait`, on the stream that is current there. As of NCCL,
autograd hears of none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

STAGED = "staged"


def register() -> None:
    """Let `init_process_group(STAGED)` and the groups made after it be of this kind; in a process once."""
    dist.Backend.register_backend(STAGED, StagedGroup, devices=["cpu", "cuda"])


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, made once all that the current stream has queued is done: also of a tensor of the host."""
    return tensor.detach().contiguous().to("cpu", copy=True)


class Transfer:
    """A transfer of gloo, with the tensor on the host that it reads or fills, and where that then goes."""

    def __init__(self, work: Any, host: torch.Tensor, target: torch.Tensor | None = None) -> None:
        self._work, self._host, self._target = work, host, target

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        if self._target is not None:
            self._target.data.copy_(self._host)
            self._target = None
        return True


class Ended:
    """A collective, which has ended before its call returned."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class StagedGroup(dist.ProcessGroup):
    """torch.distributed calls these methods itself. Some have two names: those of torch 2.13, and the older ones."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Ended:
        for tensor in tensors:
            self._sum(tensor, on_host(tensor), opts)
        return Ended()

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Ended:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Ended:
        for tensor in tensors:
            host = on_host(tensor)
            self._gloo.broadcast([host], opts).wait()
            tensor.data.copy_(host)
        return Ended()

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Ended:
        for of_ranks, own in zip(outputs, inputs, strict=True):
            for output, host in zip(of_ranks, self._gathered(own), strict=True):
                output.data.copy_(host.view_as(output))
        return Ended()

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Ended:
        output.data.copy_(torch.cat([host.flatten() for host in self._gathered(own)]).view_as(output))
        return Ended()

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Ended:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return Ended()

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Ended:
        host = on_host(whole)
        self._gloo.allreduce([host], _of_sum(opts)).wait()
        output.data.copy_(host.flatten().chunk(self.size())[self.rank()].view_as(output))
        return Ended()

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Ended:
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return Ended()

    def all_to_all_single(
        self, output: torch.Tensor, sent: torch.Tensor, output_sizes: list[int], sent_sizes: list[int], opts: Any = None
    ) -> Ended:
        host = torch.empty(output.shape, dtype=output.dtype)
        self._gloo.alltoall_base(host, on_host(sent), output_sizes, sent_sizes).wait()
        output.data.copy_(host)
        return Ended()

    def barrier(self, opts: Any = None) -> Ended:
        self._gloo.barrier().wait()
        return Ended()

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Transfer:
        (tensor,) = tensors
        host = on_host(tensor)
        return Transfer(self._gloo.send([host], peer, tag), host)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Transfer:
        (tensor,) = tensors
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return Transfer(self._gloo.recv([host], peer, tag), host, tensor)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _sum(self, tensor: torch.Tensor, host: torch.Tensor, opts: Any) -> None:
        self._gloo.allreduce([host], _of_sum(opts)).wait()
        tensor.data.copy_(host)

    def _gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        host = on_host(own)
        hosts = [torch.empty_like(host) for _ in range(self.size())]
        self._gloo.allgather([hosts], [host]).wait()
        return hosts


def _of_sum(opts: Any) -> dist.AllreduceOptions:
    """Options of gloo's all-reduce by those of any reduction."""
    own = dist.AllreduceOptions()
    if opts is not None:
        own.reduceOp = opts.reduceOp
    return own
