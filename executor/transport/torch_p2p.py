"""Transfers over torch.distributed, plain or watched for weight gradients to run meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable
from datetime import timedelta
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Coordinates, TensorSpec, Topology
from dynapipe_ext.errors import ExecutionError, check_timeout
from dynapipe_ext.executor.instructions import Recv, Send
from dynapipe_ext.executor.protocols import Pending, Tensors, Transport

Groups = dict[tuple[int, int], Any]  # (peer pp_rank, communicator) -> process group


def make_group(
    topology: Topology, rank: int, in_common: Callable[[Coordinates], Hashable | None], *, timeout_s: float
) -> Any:
    """The group of the ranks that have as much `in_common` as this one; None where that is None.

    Every rank of the job must call this at the same point: group creation is collective.
    """
    groups: dict[Hashable, list[int]] = {}
    for other in range(topology.world_size):
        groups.setdefault(in_common(topology.coordinates(other)), []).append(other)
    groups.pop(None, None)
    made = [dist.new_group(ranks, timeout=timedelta(seconds=timeout_s)) for ranks in groups.values()]
    return next((group for group, ranks in zip(made, groups.values(), strict=True) if rank in ranks), None)


def make_pipeline_groups(topology: Topology, rank: int, *, timeout_s: float) -> Groups:
    """This rank's groups. Every rank of the job must call this at the same point: group creation is collective.

    Directions have groups of their own because NCCL runs a pair's operations in order, without tags, on one queue.
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

    On CUDA a wait is one of the stream alone, which the host runs ahead of, and the time limit is that of the group,
    whose watchdog ends the process: asked to wait with a limit, NCCL would hold up the host until the transfer is done.
    """

    def __init__(
        self, topology: Topology, rank: int, groups: Groups, *, device: torch.device, timeout_s: float = 120.0
    ) -> None:
        check_timeout(timeout_s)
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

    def is_completed(self) -> bool:
        """Whether every part has ended, without waiting; gloo's do not know it before somebody waits."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Tensors:
        limit = self._transfer.limit
        try:
            for work in self._works:
                work.wait() if limit is None else work.wait(limit)
        except RuntimeError as error:
            raise self._transfer.failed(error) from error
        self._kept = ()
        return self._tensors


_CLOSE_S = 1.0
_Lane = queue.SimpleQueue["_Watched | None"]


class WatchedTransport:
    """The Transport it is given, with `arrived`. Close it at the end; the inner transport is closed as well.

    `drain` is for accelerators, over a TorchP2PTransport: it blocks until the device has done what this thread queued.
    Without it threads wait for transfers, one thread for each queue. The inner transport's time limit then counts from
    the end of the transfer before, not from when the rank waits. After a failure every later transfer of its queue
    fails at once, with the same error.
    """

    def __init__(self, inner: Transport, *, drain: Callable[[], None] | None = None) -> None:
        self.inner, self._drain = inner, drain
        self._lanes: dict[tuple[int, int, bool], _Lane] = {}
        self._threads: list[threading.Thread] = []

    def send(self, instruction: Send, tensors: Tensors) -> Pending:
        return self._watch(instruction, self.inner.send(instruction, tensors))

    def recv(self, instruction: Recv) -> Pending:
        return self._watch(instruction, self.inner.recv(instruction))

    def arrived(self, pending: Pending) -> bool:
        """Whether a transfer that this transport started has ended, or failed: then its wait returns at once."""
        match pending:
            case _Watched():
                return pending.ended.is_set()
            case _Queued() if self._drain is not None:
                if not pending.has_ended():
                    self._drain()
                return pending.has_ended()
            case _:
                raise ExecutionError(
                    f"{type(pending).__name__} was not started by this transport: give the executor the"
                    " WatchedTransport"
                )

    def close(self) -> None:
        """Within a second: a thread that still waits for a transfer is left to end with its process."""
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join(timeout=_CLOSE_S / len(self._threads))
        self._lanes, self._threads = {}, []
        self.inner.close()

    def _watch(self, instruction: Send | Recv, pending: Pending) -> Pending:
        if self._drain is not None:
            return _Queued(pending)
        key = (instruction.peer, instruction.channel, isinstance(instruction, Send))
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = queue.SimpleQueue()
            self._threads.append(threading.Thread(target=_serve, args=(lane,), daemon=True))
            self._threads[-1].start()
        watched = _Watched(pending)
        lane.put(watched)
        return watched


def _serve(lane: _Lane) -> None:
    error: Exception | None = None
    while (watched := lane.get()) is not None:
        if error is None:
            try:
                watched.tensors = watched.pending.wait()
            except Exception as caught:  # noqa: BLE001 - raised again in the thread that waits
                error = caught
        watched.error = error
        watched.ended.set()


class _Watched:
    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.ended = threading.Event()
        self.tensors: Tensors = ()
        self.error: Exception | None = None

    def wait(self) -> Tensors:
        self.ended.wait()  # the inner transport's own limit ends it
        if self.error is not None:
            raise self.error
        tensors, self.tensors = self.tensors, ()
        return tensors


@runtime_checkable
class _Asked(Protocol):
    """A Pending that can be asked whether it has ended, as those of TorchP2PTransport."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Tensors: ...


class _Queued:
    """A transfer in a device's queue, which says whether the device has done it."""

    def __init__(self, pending: Pending) -> None:
        if not isinstance(pending, _Asked):
            raise ExecutionError(
                f"{type(pending).__name__} cannot be asked whether a device has done it: give drain with a"
                " TorchP2PTransport only"
            )
        self._pending = pending

    def has_ended(self) -> bool:
        return self._pending.is_completed()

    def wait(self) -> Tensors:
        return self._pending.wait()
