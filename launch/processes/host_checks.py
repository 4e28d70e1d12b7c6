"""Which hosts of a job do not answer: a look at all of them at once, over the shell that starts their nodes."""

from __future__ import annotations

import os
import select
import shlex
import sys
import time
from collections.abc import Sequence

from dynapipe_ext.launch.processes.cluster import Supervised, end_all
from dynapipe_ext.launch.processes.nodes import Host
from dynapipe_ext.launch.processes.signals import raise_if_lost

_ANSWER_S, _CONNECT_S = 20.0, 5.0
_POLL_S = 0.2
_NO_WAY_STATUS = 75
_CANNOT_ASK = (126, 127)  # a shell that has no Python for us: the next start says so
# Whoever refuses a connection is there. A name that nobody knows is a mistake, which the next start names.
_ASK = f"""
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), {_CONNECT_S})
except (ConnectionRefusedError, socket.gaierror):
    pass
except OSError:
    sys.exit({_NO_WAY_STATUS})
"""


def hosts_away(shell: Sequence[str], hosts: Sequence[Host], meeting_host: str, port: int) -> frozenset[Host]:
    """The hosts that the shell does not reach within some seconds, and those that cannot connect to the first host
    (`meeting_host`). If none of several others can connect to it, the first host counts as away instead."""
    line = f"exec {shlex.join([sys.executable, '-c', _ASK, meeting_host, str(port)])} || exit {_CANNOT_ASK[0]}\n"
    checks: list[Supervised] = []
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for host in hosts:
            words = b"exit 0\n" if host == hosts[0] else line.encode()
            checks.append(Supervised.spawn(host.name, [*shell, host.name, "sh", "-s"], stdin=words, stderr=nowhere))
        deadline_s = time.monotonic() + _ANSWER_S
        while (running := [one for one in checks if one.poll() is None]) and time.monotonic() < deadline_s:
            raise_if_lost()
            waiting = select.poll()
            for one in running:
                waiting.register(one.pidfd, select.POLLIN)
            waiting.poll(_POLL_S * 1000)
        statuses = {host: one.poll() for host, one in zip(hosts, checks, strict=True)}
    finally:
        os.close(nowhere)
        end_all(checks, 0.0)
    unreached = frozenset(host for host, status in statuses.items() if status not in (0, _NO_WAY_STATUS, *_CANNOT_ASK))
    cut_off = frozenset(host for host, status in statuses.items() if status == _NO_WAY_STATUS)
    if hosts[0] in unreached:
        return unreached
    if len(cut_off) > 1 and cut_off | unreached == frozenset(hosts[1:]):
        return unreached | {hosts[0]}
    return unreached | cut_off
