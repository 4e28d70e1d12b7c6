"""Emulated links: what arrives when, whatever was sent, over the in-memory transport."""

from __future__ import annotations

import time

import numpy as np

from dynapipe_ext.batch.topology import TensorSpec
from dynapipe_ext.executor.instructions import Buffer, Recv, Send
from dynapipe_ext.executor.transport.emulated import EmulatedLinks
from dynapipe_ext.executor.transport.inline import InlineHub

LINK_S = 0.05
LARGE = (TensorSpec((4096, 4096, 4096)),)  # more than any machine would copy


def pair(link_s: dict[Buffer, float]) -> list[EmulatedLinks]:
    hub = InlineHub(timeout_s=5)
    return [EmulatedLinks(hub.transport(rank), link_s.__getitem__, lambda s: np.array([s])) for rank in (0, 1)]


def test_a_message_of_any_size_ends_for_both_sides_when_its_link_s_time_is_over() -> None:
    buffer = Buffer("activation", 0, 3)
    first, second = pair({buffer: LINK_S})
    received = second.recv(Recv(buffer, 0, 0, LARGE))
    start_s = time.perf_counter()
    sent = first.send(Send(buffer, 1, 0, LARGE), ())
    posted_s = time.perf_counter() - start_s
    (stamp,) = received.wait()
    ended_s = [time.perf_counter() - start_s]
    sent.wait()
    ended_s.append(time.perf_counter() - start_s)
    assert stamp.nbytes == 8
    assert start_s + LINK_S <= float(stamp[0]) <= start_s + posted_s + LINK_S  # counted from when it was sent
    assert min(ended_s) >= LINK_S
