"""A job on several nodes, from one place: a launcher of its own on every node, over ssh or what takes its place.

host file ─► NODE sh -s ◄─ standard input: one line that starts `dynapipe launch --follow-stdin` there,
                           then "save", and its end, with which the node's processes end
"""

from __future__ import annotations

import os
import select
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dynapipe_ext.errors import ConfigError, reason, short
from dynapipe_ext.launch.processes.agent import LOST_STATUS, SAVED_STATUSES, NodeEnd
from dynapipe_ext.launch.processes.cluster import BUG_STATUS, USER_ERROR_STATUS, Supervised, end_all
from dynapipe_ext.launch.processes.signals import raise_if_lost

SAVE_ORDER, FOLLOW_FLAG = b"save\n", "--follow-stdin"
_POLL_S = 0.2
_TELL_S = 3.0  # for the other nodes, to say what they know of a failure, too
_END_S = 5.0
_SAVE_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Host:
    """A line of a host file: a name that `--ssh` takes, and how many ranks it has room for (None: as many as asked)."""

    name: str
    slots: int | None = None


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The hosts of a file with a line each: NAME or USER@NAME, then `slots=N` if that is known; # begins a comment.

    Errors: ConfigError naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the host file {path} cannot be read ({reason(error)}): give one with a host a line"
        ) from error
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        name, *rest = line.partition("#")[0].split() or [""]
        if not name:
            continue
        slots = [word.removeprefix("slots=") for word in rest]
        is_count = all(word.isascii() and word.isdigit() and 0 < int(word) < 10**6 for word in slots)
        if name.startswith("-") or not is_count or len(rest) > 1 or (rest and not rest[0].startswith("slots=")):
            raise ConfigError(
                f"{path}, line {number} is {short(line)} but must be a host's name, then slots=N or nothing"
            )
        if name in hosts:
            raise ConfigError(f"{path}, line {number} names {name} again: one line a host, with slots=N for more ranks")
        hosts[name] = Host(name, int(slots[0]) if slots else None)
    if not hosts:
        raise ConfigError(f"the host file {path} names no host: write one a line")
    return tuple(hosts.values())


def shell_line(command: Sequence[str], folder: Path) -> str:
    """What a shell on a node runs: `command` in `folder`, which every node has."""
    return f"cd {shlex.quote(str(folder))} && exec {shlex.join(command)}"


class Nodes(Protocol):
    """The nodes of a job, one line of shell running on each; `close` ends what still runs."""

    @property
    def first_address(self) -> str:
        """Where the others reach the first."""
        ...

    def start(self, lines: Sequence[str]) -> None: ...

    def ended(self, wait_s: float) -> Mapping[str, int]:
        """The exit statuses of nodes that have ended, after waiting for the next one at most `wait_s`."""
        ...

    def save(self) -> None: ...

    def close(self) -> None: ...


class ShellNodes:
    """Nodes that `shell HOST sh -s` reaches, its standard input being ours to write."""

    def __init__(self, shell: Sequence[str], hosts: Sequence[Host]) -> None:
        self._shell, self._hosts = tuple(shell), tuple(hosts)
        self._nodes: list[Supervised] = []
        self._inputs: list[int] = []

    @property
    def first_address(self) -> str:
        return self._hosts[0].name.rpartition("@")[2]

    def start(self, lines: Sequence[str]) -> None:
        for host, line in zip(self._hosts, lines, strict=True):
            theirs, ours = os.pipe()
            self._inputs.append(ours)
            try:
                self._nodes.append(Supervised.spawn(host.name, [*self._shell, host.name, "sh", "-s"], stdin=theirs))
            finally:
                os.close(theirs)
            self._tell(ours, f"{line}\n".encode())

    def ended(self, wait_s: float) -> Mapping[str, int]:
        running = [node.pidfd for node in self._nodes if node.poll() is None]
        select.select(running, [], [], wait_s)
        return {node.name: exit_status(code) for node in self._nodes if (code := node.poll()) is not None}

    def save(self) -> None:
        for descriptor in self._inputs:
            self._tell(descriptor, SAVE_ORDER)

    def close(self) -> None:
        while self._inputs:
            os.close(self._inputs.pop())
        deadline_s, num_nodes = time.monotonic() + _END_S, len(self._nodes)
        while len(self.ended(_POLL_S)) < num_nodes and time.monotonic() < deadline_s:
            pass
        end_all(self._nodes, 0.0)
        self._nodes.clear()

    @staticmethod
    def _tell(descriptor: int, words: bytes) -> None:
        with suppress(BrokenPipeError):  # it has ended: whoever watches it will say so
            os.write(descriptor, words)


def run_on_nodes(nodes: Nodes, lines: Sequence[str], grace_s: float) -> NodeEnd:
    """Run a line on every node until all have ended, or one has failed and the others are ended for it."""
    try:
        nodes.start(lines)
        ended: Mapping[str, int] = {}
        while len(ended) < len(lines) and not any(ended.values()):
            raise_if_lost()
            ended = nodes.ended(_POLL_S)
        deadline_s = time.monotonic() + _TELL_S
        while len(ended) < len(lines) and time.monotonic() < deadline_s:
            ended = nodes.ended(_POLL_S)
        return _of_nodes(ended)
    except SystemExit:
        nodes.save()
        deadline_s = time.monotonic() + grace_s + _SAVE_MARGIN_S
        while len(nodes.ended(_POLL_S)) < len(lines) and time.monotonic() < deadline_s:
            pass
        raise
    finally:
        nodes.close()


def _of_nodes(ended: Mapping[str, int]) -> NodeEnd:
    """A job's end of those of its nodes: what explains the others counts."""
    failed = {name: status for name, status in ended.items() if status}
    for status in (USER_ERROR_STATUS, BUG_STATUS, *SAVED_STATUSES):
        if status in failed.values():
            return NodeEnd(status)
    if not failed:
        return NodeEnd(0)
    return NodeEnd(LOST_STATUS, ", ".join(f"{name} ended with exit status {status}" for name, status in failed.items()))


def exit_status(code: int) -> int:
    """Of a process's return code, as shells have it: 128 and the signal that killed it."""
    return code if code >= 0 else 128 - code


def order_of_stdin() -> str:
    """What whoever started this process here has written to its standard input since the last look: "save", "end" once
    it is closed, or nothing."""
    if not select.select([sys.stdin.fileno()], [], [], 0)[0]:
        return ""
    match os.read(sys.stdin.fileno(), len(SAVE_ORDER)):
        case b"":
            return "end"
        case words if words == SAVE_ORDER:
            return "save"
        case _:
            return ""
