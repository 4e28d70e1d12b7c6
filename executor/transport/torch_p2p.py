"""Buffers over torch.distributed: asynchronous, without tags, shapes known beforehand. gloo and NCCL alike."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.activations import TensorSpec
from dynapipe_ext.errors import ExecutionError, check_timeout
from dynapipe_ext.executor.instructions import Buffer, Recv, Send
from dynapipe_ext.executor.protocols import Pending, Tensors
from dynapipe_ext.executor.transport.groups import Groups
from dynapipe_ext.topology import Topology


def empty_tensors(specs: tuple[TensorSpec, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in specs)


def check_tensors(instruction: Send, tensors: Tensors) -> None:
    """Refuse to send what the plan does not announce: the receiver has already posted that shape."""
    found = tuple(TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors)
    if found != instruction.specs:
        raise ExecutionError(
            f"the {instruction.buffer} has {[(s.shape, s.dtype) for s in found]} but the plan says"
            f" {[(s.shape, s.dtype) for s in instruction.specs]}:"
            " check hidden size, dtype and order of the ActivationFormat"
        )


class TorchP2PTransport:
    """isend and irecv on a group a direction. `rank` is the global rank; waits raise after `timeout_s`.

    On CUDA a wait is one of the stream alone, which the host runs ahead of, and the time limit is that of the group,
    whose watchdog ends the process: asked to wait with a limit, NCCL would hold up the host until the transfer is done.
    """

    def __init__(
        self, topology: Topology, rank: int, groups: Groups, *, device: torch.device, timeout_s: float = 120.0
    ) -> None:
        check_timeout(timeout_s)
        self._topology = topology
        self._me = topology.coordinates(rank)
        self._groups = groups
        self._device = device
        self._limit_s = None if device.type == "cuda" else timeout_s

    def send(self, instruction: Send, tensors: Tensors) -> Pending:
        check_tensors(instruction, tensors)
        kept = tuple(tensor.detach().contiguous() for tensor in tensors)
        group, peer = self._route(instruction)
        works = [dist.isend(tensor, dst=peer, group=group) for tensor in kept]
        who = self._who("to take", instruction.buffer, instruction.peer)
        return _TorchPending(works, kept, (), who, self._limit_s)

    def recv(self, instruction: Recv) -> Pending:
        tensors = empty_tensors(instruction.specs, self._device)
        group, peer = self._route(instruction)
        works = [dist.irecv(tensor, src=peer, group=group) for tensor in tensors]
        who = self._who("to send", instruction.buffer, instruction.peer)
        return _TorchPending(works, (), tensors, who, self._limit_s)

    def close(self) -> None: ...

    def _route(self, instruction: Send | Recv) -> tuple[Any, int]:
        me = self._me
        peer = self._topology.rank(tp_rank=me.tp_rank, pp_rank=instruction.peer, dp_rank=me.dp_rank)
        group = self._groups.get((instruction.peer, instruction.channel))
        if group is None:
            raise ExecutionError(
                f"pipeline rank {me.pp_rank} has no communicator {instruction.channel} with rank {instruction.peer}:"
                " the plan was made for another placement of stages"
            )
        return group, peer

    def _who(self, verb: str, buffer: Buffer, peer: int) -> str:
        me = self._me
        return f"pipeline rank {me.pp_rank} of replica {me.dp_rank} waited for rank {peer} {verb} the {buffer}"


class _TorchPending:
    def __init__(self, works: list[Any], kept: Tensors, tensors: Tensors, who: str, limit_s: float | None) -> None:
        self._works, self._kept, self._tensors, self._who, self._limit_s = works, kept, tensors, who, limit_s

    def is_completed(self) -> bool:
        """Whether every part has ended, without waiting; gloo's do not know it before somebody waits."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Tensors:
        try:
            for work in self._works:
                work.wait() if self._limit_s is None else work.wait(timedelta(seconds=self._limit_s))
        except RuntimeError as error:  # gloo and NCCL raise it for time limits and for peers that are gone
            reason = str(error).splitlines()[0]
            limit = "" if self._limit_s is None else f", limit {self._limit_s:g} s"
            raise ExecutionError(f"{self._who}{limit}: {reason}") from error
        self._kept = ()
        return self._tensors
