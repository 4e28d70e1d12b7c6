"""Transfers over torch.distributed, plain or watched for weight gradients to run meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import timedelta
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Coordinates, TensorSpec, Topology
from dynapipe_ext.errors import ExecutionError, check_timeout
from dynapipe_ext.executor.instructions import Recv, Send
from dynapipe_ext.executor.protocols import Pending, Tensors

Groups = dict[tuple[int, int], Any]  # (peer pp_rank, communicator) -> process group


def make_group(
    topology: Topology, rank: int, in_common: Callable[[Coordinates], Hashable | None], *, timeout_s: float
) -> Any:
    """Return the group of the ranks that have as much `in_common` as this one. If that is None, return torch's
    NON_GROUP_MEMBER, with which collectives do nothing: None would mean all ranks of the job.

    Every rank of the job must call this at the same point: group creation is collective.
    """
    groups: dict[Hashable, list[int]] = {}
    for other in range(topology.world_size):
        groups.setdefault(in_common(topology.coordinates(other)), []).append(other)
    groups.pop(None, None)
    made = [dist.new_group(ranks, timeout=timedelta(seconds=timeout_s)) for ranks in groups.values()]
    own = (group for group, ranks in zip(made, groups.values(), strict=True) if rank in ranks)
    return next(own, dist.GroupMember.NON_GROUP_MEMBER)


def make_pipeline_groups(topology: Topology, rank: int, *, timeout_s: float) -> Groups:
    """Return this rank's groups. Every rank of the job must call this at the same point: group creation is collective.

    Directions have groups of their own because NCCL runs a pair's operations in order, without tags, on one queue.

    A rank also counts the groups of which it is not a member: torch numbers them. That sends nothing, since torch (2.1
    and later) ends group creation without a barrier, and takes 0.02 s with 512 ranks and 0.13 s with 4,096
    (tests/bench/process_groups.py). `use_local_synchronization` would leave this out, but then torch names a group by
    the number of groups that a rank is a member of. Neighbours in a pipeline have different numbers, and would wait for
    each other until the time limit.
    """
    me = topology.coordinates(rank)
    neighbours = sorted(
        {(min(a, b), max(a, b)) for a, b in zip(topology.stage_ranks, topology.stage_ranks[1:], strict=False) if a != b}
    )
    mine: Groups = {}
    for dp_rank in range(topology.dp):
        for tp_rank in range(topology.tp):
            for low, high in neighbours:
                ends = [topology.rank(tp_rank=tp_rank, pp_rank=p, dp_rank=dp_rank) for p in (low, high)]
                for channel in (0, 1):
                    group = dist.new_group(ends, timeout=timedelta(seconds=timeout_s))
                    if (me.tp_rank, me.dp_rank) == (tp_rank, dp_rank) and me.pp_rank in (low, high):
                        mine[high if me.pp_rank == low else low, channel] = group
    return mine


def empty_tensors(specs: tuple[TensorSpec, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in specs)


def check_tensors(instruction: Send, tensors: Tensors) -> None:
    """Refuse to send what the plan does not announce: the receiver has already posted that shape."""
    if len(tensors) == len(instruction.specs) and all(map(_has_spec, tensors, instruction.specs)):
        return
    shapes = [(tuple(t.shape), _dtype_name(t.dtype)) for t in tensors]
    raise ExecutionError(
        f"the {instruction.buffer} has {shapes} but the plan says"
        f" {[(spec.shape, spec.dtype) for spec in instruction.specs]}: check hidden size, dtype and order of the"
        " ActivationFormat"
    )


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_spec(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    return tensor.shape == spec.shape and _dtype_name(tensor.dtype) == spec.dtype


class _Transfer(NamedTuple):
    """What a rank waits for, and how long at most; words are made where it fails alone."""

    me: Coordinates
    verb: Literal["take", "send"]
    instruction: Send | Recv
    limit: timedelta | None

    def failed(self, error: RuntimeError) -> ExecutionError:
        """What gloo and NCCL raise for time limits and for peers that are gone, at the start of a transfer, too."""
        me, to = self.me, self.instruction
        limit = "" if self.limit is None else f", limit {self.limit.total_seconds():g} s"
        return ExecutionError(
            f"pipeline rank {me.pp_rank} of replica {me.dp_rank} waited for rank {to.peer} to {self.verb} the"
            f" {to.buffer}{limit}: {str(error).splitlines()[0]}"
        )


_TAG = 0  # none: what is sent in one order arrives in it


class TorchP2PTransport:
    """Asynchronous sends and receives on a group a direction, past torch's isend and irecv, which look the group and
    its ranks up each time. `rank` is the global rank; waits raise after `timeout_s`.

    On CUDA only the stream waits, and the host runs ahead of it. There the time limit is that of the group, after which
    NCCL's watchdog ends the process: no wait raises for a late peer. If asked to wait with a limit, NCCL would hold up
    the host until the transfer is done.
    """

    def __init__(
        self, topology: Topology, rank: int, groups: Groups, *, device: torch.device, timeout_s: float = 120.0
    ) -> None:
        check_timeout(timeout_s)
        self.failed_step = ""
        self._me = me = topology.coordinates(rank)
        self._routes = {
            (peer, channel): (
                group,
                dist.get_group_rank(group, topology.rank(tp_rank=me.tp_rank, pp_rank=peer, dp_rank=me.dp_rank)),
            )
            for (peer, channel), group in groups.items()
        }
        self._device = device
        self._limit = None if device.type == "cuda" else timedelta(seconds=timeout_s)

    def send(self, instruction: Send, tensors: Tensors) -> Pending:
        check_tensors(instruction, tensors)
        sent = tuple(tensor.detach().contiguous() for tensor in tensors)
        group, peer = self._route(instruction)
        transfer = _Transfer(self._me, "take", instruction, self._limit)
        try:
            works = [group.send([tensor], peer, _TAG) for tensor in sent]
        except RuntimeError as error:
            raise transfer.failed(error) from error
        return _TorchPending(works, sent, (), transfer)

    def recv(self, instruction: Recv) -> Pending:
        tensors = empty_tensors(instruction.specs, self._device)
        group, peer = self._route(instruction)
        transfer = _Transfer(self._me, "send", instruction, self._limit)
        try:
            works = [group.recv([tensor], peer, _TAG) for tensor in tensors]
        except RuntimeError as error:
            raise transfer.failed(error) from error
        return _TorchPending(works, (), tensors, transfer)

    def close(self) -> None: ...

    def _route(self, instruction: Send | Recv) -> tuple[Any, int]:
        route = self._routes.get((instruction.peer, instruction.channel))
        if route is None:
            raise ExecutionError(
                f"pipeline rank {self._me.pp_rank} has no communicator {instruction.channel} with rank"
                f" {instruction.peer}: the plan was made for another placement of stages"
            )
        return route


class _TorchPending:
    def __init__(self, works: list[Any], held_tensors: Tensors, tensors: Tensors, transfer: _Transfer) -> None:
        self._works, self._kept, self._tensors, self._transfer = works, held_tensors, tensors, transfer

    def wait(self) -> Tensors:
        limit = self._transfer.limit
        try:
            for work in self._works:
                work.wait() if limit is None else work.wait(limit)
        except RuntimeError as error:
            raise self._transfer.failed(error) from error
        self._kept = ()
        return self._tensors
