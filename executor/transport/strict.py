"""Enforces NCCL's rules at run time over gloo, which would forgive too much: for tests and `--strict`.

gloo matches messages by tag and buffers sends. Here a rank runs what it has posted one at a time, over all its
communicators, as NCCL may: an operation starts when the one before it has ended, a send leaves only after its receive
was posted, and both sides compare what they think they exchange before a byte of payload moves. A plan that would hang
or corrupt memory under NCCL therefore raises here, naming both ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import DTYPE_BYTES, Topology
from dynapipe_ext.errors import ExecutionError, check_timeout
from dynapipe_ext.executor.instructions import Buffer, Recv, Send
from dynapipe_ext.executor.protocols import Pending, Tensors
from dynapipe_ext.executor.transport.torch_p2p import Groups, check_tensors, empty_tensors

_HEADER_LEN = 24
_NAME_LEN = 200  # bytes of a collective's name that ranks compare
_CLOSE_S = 1.0
_READY_TAG, _PAYLOAD_TAG = 1, 2


def _header(instruction: Send | Recv) -> torch.Tensor:
    """What both sides must agree on, as integers: buffer, then dtype and shape of each tensor."""
    buffer = instruction.buffer
    values = [int(buffer.payload == "gradient"), buffer.stage, buffer.micro_batch, len(instruction.specs)]
    for spec in instruction.specs:
        values += [list(DTYPE_BYTES).index(spec.dtype), len(spec.shape), *spec.shape]
    if len(values) > _HEADER_LEN:
        raise ExecutionError(f"the {buffer} has too many tensors for a strict transport: {instruction.specs}")
    return torch.tensor(values + [-1] * (_HEADER_LEN - len(values)), dtype=torch.int64)


class StrictTransport:
    """A Transport with the contract of TorchP2PTransport and no forgiveness. CPU tensors only; close it at the end."""

    def __init__(self, topology: Topology, rank: int, groups: Groups, *, timeout_s: float = 60.0) -> None:
        check_timeout(timeout_s)
        self.failed_step = ""
        self._topology = topology
        self._me = topology.coordinates(rank)
        self._timeout_s = timeout_s
        self._groups = groups
        self._queue: queue.SimpleQueue[_StrictPending | _StrictCollective | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def send(self, instruction: Send, tensors: Tensors) -> Pending:
        check_tensors(instruction, tensors)
        return self._post(instruction, tuple(tensor.detach().contiguous() for tensor in tensors))

    def recv(self, instruction: Recv) -> Pending:
        return self._post(instruction, empty_tensors(instruction.specs, torch.device("cpu")))

    def in_turn(self, what: str, group: Any, run: Callable[[], None]) -> None:
        """A collective over a group, once all that this rank has posted before has ended. Its ranks compare `what` they
        begin. Errors: ExecutionError naming what two of them begin, or that an operation before it never ended."""
        pending = _StrictCollective(what, group, run, self._timeout_s)
        self._queue.put(pending)
        pending.ended()

    def close(self) -> None:
        """Within a second: an operation that is blocked is left to end with its process."""
        self._queue.put(None)
        self._thread.join(timeout=_CLOSE_S)

    def _post(self, instruction: Send | Recv, tensors: tuple[torch.Tensor, ...]) -> Pending:
        if (instruction.peer, instruction.channel) not in self._groups:
            raise ExecutionError(
                f"pipeline rank {self._me.pp_rank} has no communicator {instruction.channel} with {instruction.peer}"
            )
        verb = "take" if isinstance(instruction, Send) else "send"
        who = f"pipeline rank {self._me.pp_rank} waited for rank {instruction.peer} to {verb} the {instruction.buffer}"
        pending = _StrictPending(instruction, tensors, who, self._timeout_s)
        self._queue.put(pending)
        return pending

    def _serve(self) -> None:
        while (pending := self._queue.get()) is not None:
            try:
                if isinstance(pending, _StrictCollective):
                    _check_alike(pending.what, pending.group)
                    pending.run()
                else:
                    self._transfer(pending)
            except (RuntimeError, ExecutionError) as error:
                pending.fail(error)
                return  # as under NCCL, nothing after a failed operation runs; later waits reach their limit
            pending.succeed()

    def _transfer(self, pending: _StrictPending) -> None:
        me, limit, peer = self._me, timedelta(seconds=self._timeout_s), pending.instruction.peer
        group = self._groups[peer, pending.instruction.channel]
        peer_rank = self._topology.rank(tp_rank=me.tp_rank, pp_rank=peer, dp_rank=me.dp_rank)

        def move(transfer: Callable[..., Any], tensor: torch.Tensor, tag: int) -> None:
            transfer(tensor, peer_rank, group=group, tag=tag).wait(limit)

        own_header = _header(pending.instruction)
        if isinstance(pending.instruction, Recv):
            move(dist.isend, own_header, _READY_TAG)
            for tensor in pending.tensors:
                move(dist.irecv, tensor, _PAYLOAD_TAG)
            return
        theirs = torch.empty_like(own_header)
        move(dist.irecv, theirs, _READY_TAG)
        if not torch.equal(own_header, theirs):
            raise ExecutionError(
                f"pipeline rank {me.pp_rank} sends the {pending.instruction.buffer} where rank {peer}"
                f" expects the {_describe(theirs)}: under NCCL this corrupts memory or hangs"
            )
        for tensor in pending.tensors:
            move(dist.isend, tensor, _PAYLOAD_TAG)


def _describe(header: torch.Tensor) -> str:
    gradient, stage, micro_batch = header[:3].tolist()
    shape = header[6 : 6 + max(0, int(header[5]))].tolist()
    return f"{Buffer('gradient' if gradient else 'activation', stage, micro_batch)} of shape {shape}"


def _check_alike(what: str, group: Any) -> None:
    """Errors: ExecutionError where another rank of the group begins another collective."""
    own = torch.zeros(_NAME_LEN, dtype=torch.uint8)
    name = what.encode()[:_NAME_LEN]
    own[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_ranks, own, group=group)
    for rank, theirs in zip(dist.get_process_group_ranks(group), of_ranks, strict=True):
        if not torch.equal(own, theirs):
            raise ExecutionError(
                f"rank {dist.get_rank()} begins the {what} where rank {rank} begins the"
                f" {bytes(theirs.tolist()).rstrip(bytes(1)).decode(errors='replace')}: under NCCL this corrupts memory"
                " or hangs"
            )


class _StrictOperation:
    """Something posted, which others wait for."""

    def __init__(self, who: str, timeout_s: float) -> None:
        self._who, self._timeout_s = who, timeout_s
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def succeed(self) -> None:
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()

    def ended(self) -> None:
        """Return once it has. Errors: ExecutionError at the limit, or the operation's own."""
        if not self._ended.wait(self._timeout_s):
            raise ExecutionError(f"{self._who}, limit {self._timeout_s:g} s: an operation before it never ended")
        if isinstance(self._error, ExecutionError):
            raise self._error
        if self._error is not None:
            reason = str(self._error).splitlines()[0]
            raise ExecutionError(f"{self._who}, limit {self._timeout_s:g} s: {reason}") from self._error


class _StrictPending(_StrictOperation):
    def __init__(self, instruction: Send | Recv, tensors: tuple[torch.Tensor, ...], who: str, timeout_s: float) -> None:
        super().__init__(who, timeout_s)
        self.instruction, self.tensors = instruction, tensors

    def wait(self) -> Tensors:
        self.ended()
        return self.tensors if isinstance(self.instruction, Recv) else ()


class _StrictCollective(_StrictOperation):
    def __init__(self, what: str, group: Any, run: Callable[[], None], timeout_s: float) -> None:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        super().__init__(f"rank {dist.get_rank()} waited for ranks {ranks} in the {what}", timeout_s)
        self.what, self.group, self.run = what, group, run
