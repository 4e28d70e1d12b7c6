"""Transfers that take their link's time and carry a few bytes, for sleeping ranks of one machine.

Real messages of a large model are copied by the ranks' cores, which sleeping ranks mean to be idle: what is measured
would be the machine's memory, the more of it the more messages a plan has. Here a message is the time at which it
arrives, on the clock that all processes of a machine share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from dynapipe_ext.batch.topology import TensorSpec
from dynapipe_ext.executor.instructions import Buffer, Recv, Send
from dynapipe_ext.executor.protocols import Pending, Tensors, Transport

_STAMP = (TensorSpec((1,), "float64"),)


class EmulatedLinks:
    """The Transport it is given, with messages that arrive `link_s(buffer)` after they were sent, whatever they hold.

    `make_stamp` makes the tensor that travels, of one float64. Receivers get that, and sends end on arrival.
    """

    def __init__(
        self, inner: Transport, link_s: Callable[[Buffer], float], make_stamp: Callable[[float], object]
    ) -> None:
        self._inner, self._link_s, self._make_stamp = inner, link_s, make_stamp
        self.failed_step = ""

    def send(self, instruction: Send, tensors: Tensors) -> Pending:
        arrival_s = time.perf_counter() + self._link_s(instruction.buffer)
        stamp = (self._make_stamp(arrival_s),)
        return _OnItsWay(self._inner.send(replace(instruction, specs=_STAMP), stamp), stamp)

    def recv(self, instruction: Recv) -> Pending:
        return _OnItsWay(self._inner.recv(replace(instruction, specs=_STAMP)))

    def close(self) -> None:
        self._inner.close()


class _OnItsWay:
    """A transfer that ends when the stamp says: a send's own, or the one that is received."""

    def __init__(self, pending: Pending, stamp: Tensors = ()) -> None:
        self._pending, self._stamp = pending, stamp

    def wait(self) -> Tensors:
        received = self._pending.wait()
        (stamp,) = received or self._stamp
        sleep_until(float(stamp[0]))
        return received


def sleep_until(deadline_s: float) -> None:
    """Sleep until `time.perf_counter` says so: a late wake-up inside one wait must not add up over its pieces."""
    while (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(left_s)
