"""Pipeline ranks as threads of one process: the in-memory Transport, for tests, notebooks and one-process runs."""

from __future__ import annotations

import threading
from collections import defaultdict, deque

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.instructions import Recv, Send
from dynapipe_ext.executor.protocols import Pending, Tensors

_Lane = tuple[int, int, int]  # sender, receiver, communicator


class InlineHub:
    """Where the transports of one replica meet. Buffers pass by reference; sends wait for their receives."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.sent: dict[_Lane, deque[tuple[Send, Tensors]]] = defaultdict(deque)
        self.num_sent: dict[_Lane, int] = defaultdict(int)
        self.num_taken: dict[_Lane, int] = defaultdict(int)

    def transport(self, pp_rank: int) -> InlineTransport:
        return InlineTransport(self, pp_rank)


class InlineTransport:
    """One rank's end of an InlineHub."""

    def __init__(self, hub: InlineHub, pp_rank: int) -> None:
        self._hub = hub
        self._pp_rank = pp_rank
        self._num_posted: dict[_Lane, int] = defaultdict(int)

    def send(self, instruction: Send, tensors: Tensors) -> Pending:
        hub, lane = self._hub, (self._pp_rank, instruction.peer, instruction.channel)
        with hub.changed:
            hub.sent[lane].append((instruction, tensors))
            hub.num_sent[lane] += 1
            place = hub.num_sent[lane]
            hub.changed.notify_all()
        return _InlineSend(hub, lane, place, instruction)

    def recv(self, instruction: Recv) -> Pending:
        lane = (instruction.peer, self._pp_rank, instruction.channel)
        self._num_posted[lane] += 1
        return _InlineRecv(self._hub, lane, self._num_posted[lane], instruction)

    def close(self) -> None: ...


class _InlineSend:
    def __init__(self, hub: InlineHub, lane: _Lane, place: int, instruction: Send) -> None:
        self._hub, self._lane, self._place, self._instruction = hub, lane, place, instruction

    def wait(self) -> Tensors:
        hub = self._hub
        with hub.changed:
            if not hub.changed.wait_for(lambda: hub.num_taken[self._lane] >= self._place, hub.timeout_s):
                raise ExecutionError(
                    f"pipeline rank {self._lane[0]} waited {hub.timeout_s:g} s for rank {self._lane[1]}"
                    f" to take the {self._instruction.buffer}"
                )
        return ()


class _InlineRecv:
    def __init__(self, hub: InlineHub, lane: _Lane, place: int, instruction: Recv) -> None:
        self._hub, self._lane, self._place, self._instruction = hub, lane, place, instruction

    def wait(self) -> Tensors:
        hub, lane = self._hub, self._lane
        with hub.changed:
            if not hub.changed.wait_for(
                lambda: hub.num_taken[lane] == self._place - 1 and len(hub.sent[lane]) > 0, hub.timeout_s
            ):
                raise ExecutionError(
                    f"pipeline rank {lane[1]} waited {hub.timeout_s:g} s for rank {lane[0]}"
                    f" to send the {self._instruction.buffer}"
                )
            sent, tensors = hub.sent[lane].popleft()
            hub.num_taken[lane] += 1
            hub.changed.notify_all()
        check_meets(sent, self._instruction, lane[0], lane[1])
        return tensors


def check_meets(sent: Send, received: Recv, sender: int, receiver: int) -> None:
    """Refuse a pair of operations that met on a queue but do not belong together."""
    if (sent.buffer, sent.specs) != (received.buffer, received.specs):
        raise ExecutionError(
            f"pipeline rank {sender} sent the {sent.buffer} {[s.shape for s in sent.specs]} where rank {receiver}"
            f" expected the {received.buffer} {[s.shape for s in received.specs]}: the ranks run different plans"
        )
