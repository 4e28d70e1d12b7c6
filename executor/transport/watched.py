"""Shows whether a transfer has ended without waiting for it.

gloo's operations do not know that they have ended until somebody waits for them, so a thread a queue does. NCCL's know
it, and their wait does not block the host but puts the wait into the caller's stream: they are asked, by no other
thread. There the host runs ahead of the device, so a transfer counts as late only if it has not ended once the
work that is queued before the question is done. (The NCCL way was tested over stand-ins, not run between accelerators.)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.instructions import Recv, Send
from dynapipe_ext.executor.protocols import Pending, Tensors, Transport

_CLOSE_S = 1.0
_Lane = queue.SimpleQueue["_Watched | None"]


class WatchedTransport:
    """The Transport it is given, with `arrived`. Close it at the end; the inner transport is closed as well.

    `drain` is for accelerators, over a TorchP2PTransport: it blocks until the device has done what this thread queued.
    Without it transfers are waited for by threads: a time limit of the inner transport then counts from when all
    transfers before it on its queue have ended, not from when the rank waits, and after a failure every later transfer
    of its queue fails at once, with the same error.
    """

    def __init__(self, inner: Transport, *, drain: Callable[[], None] | None = None) -> None:
        self._inner, self._drain = inner, drain
        self._lanes: dict[tuple[int, int, bool], _Lane] = {}
        self._threads: list[threading.Thread] = []

    def send(self, instruction: Send, tensors: Tensors) -> Pending:
        return self._watch(instruction, self._inner.send(instruction, tensors))

    def recv(self, instruction: Recv) -> Pending:
        return self._watch(instruction, self._inner.recv(instruction))

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
        self._inner.close()

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
