"""The addresses at which the processes of a test listen."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.support.limits import LIMIT_S, SOON_S

_LISTENS, _LOOK_S = "0A", 0.02


def listeners_in(namespace: str) -> set[str]:
    """The addresses of all TCP sockets that listen in a network namespace, as `ss -ltn` shows them."""
    command = ["ip", "netns", "exec", namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout.splitlines()
    seen = set()
    for _, local, _, state, *_ in map(str.split, lines):
        if state == _LISTENS:
            words = bytes.fromhex(local.partition(":")[0])
            in_order = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
            seen.add(str(ipaddress.ip_address(in_order)))
    return seen


def listeners_below(pid: int) -> set[str]:
    """Those of the sockets of a process and of all that it has started."""
    seen = set()
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with suppress(psutil.Error):
            sockets = process.net_connections("tcp")
            seen |= {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    return seen


@contextmanager
def listeners_seen() -> Iterator[set[str]]:
    """The addresses at which this process and its children listen while the context lasts, once it has ended."""
    seen: set[str] = set()
    over, before = threading.Event(), listeners_below(os.getpid())

    def look() -> None:
        while not over.wait(_LOOK_S):
            seen.update(listeners_below(os.getpid()) - before)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join(SOON_S)


def refuse_open(addresses: set[str]) -> None:
    """Fail for an address that is not loopback, or if nobody listened at all: ranks do, over gloo."""
    assert addresses, "nobody was seen to listen"
    found = [ipaddress.ip_address(address) for address in addresses]
    plain = [getattr(address, "ipv4_mapped", None) or address for address in found]
    assert all(address.is_loopback for address in plain), addresses
