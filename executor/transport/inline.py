"""Pipeline ranks as threads of one process: the in-memory Transport, for tests, notebooks and one-process runs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError, ExecutionError, check_timeout
from dynapipe_ext.executor.instructions import Recv, Send
from dynapipe_ext.executor.protocols import Pending, Tensors

_Lane = tuple[int, int, int]  # lower rank, higher rank, communicator


class _Meeting:
    """The k-th operation of each side of a lane: a transfer has happened once both are posted.

    The hub knows it until then; after that only the two sides that may still wait for it do.
    """

    def __init__(self) -> None:
        self.sent: Send | None = None
        self.received: Recv | None = None
        self.tensors: Tensors = ()


class InlineHub:
    """Where the transports of one replica meet. Buffers pass by reference; a send ends once its receive is posted.

    Like NCCL's, a pair of ranks has one queue for each communicator, without tags: operations meet by their place.
    """

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        check_timeout(timeout_s)
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._meetings: dict[tuple[_Lane, int], _Meeting] = defaultdict(_Meeting)
        self.failed_step = ""  # on any rank

    def transport(self, pp_rank: int) -> InlineTransport:
        return InlineTransport(self, pp_rank)

    def post(self, lane: _Lane, place: int, operation: Send | Recv, tensors: Tensors = ()) -> _Meeting:
        with self._changed:
            meeting = self._meetings[lane, place]
            if isinstance(operation, Send):
                meeting.sent, meeting.tensors = operation, tensors
            else:
                meeting.received = operation
            if meeting.sent and meeting.received:
                del self._meetings[lane, place]
                self._changed.notify_all()
            return meeting

    def wait(self, meeting: _Meeting, operation: Send | Recv, who: str) -> Tensors:
        with self._changed:
            if not self._changed.wait_for(lambda: meeting.sent and meeting.received, self.timeout_s):
                raise ExecutionError(f"{who}, limit {self.timeout_s:g} s")
            assert meeting.sent
            assert meeting.received
            _check_meets(meeting.sent, meeting.received, who)
            if isinstance(operation, Send):
                return ()
            tensors, meeting.tensors = meeting.tensors, ()
            return tensors


class InlineTransport:
    """One rank's end of an InlineHub."""

    def __init__(self, hub: InlineHub, pp_rank: int) -> None:
        self._hub = hub
        self._pp_rank = pp_rank
        self._num_posted: dict[_Lane, int] = defaultdict(int)

    @property
    def failed_step(self) -> str:
        """That of any rank: they share what was posted."""
        return self._hub.failed_step

    @failed_step.setter
    def failed_step(self, step: str) -> None:
        self._hub.failed_step = step

    def send(self, instruction: Send, tensors: Tensors) -> Pending:
        return self._post(instruction, tensors)

    def recv(self, instruction: Recv) -> Pending:
        return self._post(instruction, ())

    def close(self) -> None: ...

    def _post(self, instruction: Send | Recv, tensors: Tensors) -> Pending:
        peer, me = instruction.peer, self._pp_rank
        lane = (min(me, peer), max(me, peer), instruction.channel)
        place = self._num_posted[lane]
        self._num_posted[lane] += 1
        meeting = self._hub.post(lane, place, instruction, tensors)
        verb = "take" if isinstance(instruction, Send) else "send"
        who = f"pipeline rank {me} waited for rank {peer} to {verb} the {instruction.buffer}"
        return _InlinePending(self._hub, meeting, instruction, who)


class _InlinePending:
    def __init__(self, hub: InlineHub, meeting: _Meeting, operation: Send | Recv, who: str) -> None:
        self._hub, self._meeting, self._operation, self._who = hub, meeting, operation, who

    def wait(self) -> Tensors:
        return self._hub.wait(self._meeting, self._operation, self._who)


class InlineReductions:
    """Sums over the pipeline ranks of one replica, threads that share this object."""

    def __init__(self, topology: Topology, *, timeout_s: float = 60.0) -> None:
        if topology.world_size != topology.pp:
            raise ConfigError(f"tp {topology.tp} and dp {topology.dp} must be 1 where ranks are threads of one process")
        check_timeout(timeout_s)
        self.topology = topology
        self._job = _ThreadSum(topology.pp, "the job", timeout_s)
        self._of_ranks: dict[tuple[int, ...], _ThreadSum] = {}
        self._timeout_s = timeout_s

    def sum_over_replicas(self, tensor: Any) -> None:
        """There is one."""

    def sum_over_job(self, tensor: Any) -> None:
        self._job.add(tensor)

    def sum_over_pipeline(self, pp_ranks: tuple[int, ...]) -> Callable[[Any], None]:
        members = f"pipeline ranks {pp_ranks}"
        return self._of_ranks.setdefault(pp_ranks, _ThreadSum(len(pp_ranks), members, self._timeout_s)).add


class _ThreadSum:
    """Sums, one after the other, to which so many threads come."""

    def __init__(self, num_threads: int, name: str, timeout_s: float) -> None:
        self._num_threads, self._name = num_threads, name
        self._lock = threading.Lock()
        self._total: Any = None
        self._given = threading.Barrier(num_threads, timeout=timeout_s)
        self._taken = threading.Barrier(num_threads, action=self._reset, timeout=timeout_s)

    def add(self, tensor: Any) -> None:
        """`tensor` becomes the sum over all threads, in place."""
        with self._lock:
            self._total = tensor.clone() if self._total is None else self._total + tensor
        try:
            self._given.wait()
            tensor.copy_(self._total)
            self._taken.wait()
        except threading.BrokenBarrierError as error:
            raise ExecutionError(f"not all {self._num_threads} ranks came to a sum over {self._name}") from error

    def _reset(self) -> None:
        self._total = None


def _check_meets(sent: Send, received: Recv, who: str) -> None:
    """Refuse a pair of operations that met on a queue but do not belong together."""
    if (sent.buffer, sent.specs) != (received.buffer, received.specs):
        raise ExecutionError(
            f"{who}, but the {sent.buffer} {[s.shape for s in sent.specs]} was sent where the {received.buffer}"
            f" {[s.shape for s in received.specs]} is expected: the ranks run different plans"
        )
