"""A job on several nodes, started from one place: a launcher of its own runs on every node, over ssh or on Ray.

host file ─► NODE sh -s ◄─ standard input: one line that starts `dynapipe launch --follow-stdin` there,
                           then orders. Its end ends the node's processes.

On Ray a placement group has one bundle a node, with an actor that runs the node's line. Actors end with the process
that made them, and so does what they run.
"""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from dynapipe_ext.errors import ConfigError, ExecutionError, install_advice, reason, short
from dynapipe_ext.executor.parent_death import before_exec
from dynapipe_ext.launch.processes.agent import (
    INTERRUPTED_STATUS,
    SAVED_STATUSES,
    TAKEN_STATUS,
    NodeEnd,
    Order,
)
from dynapipe_ext.launch.processes.cluster import (
    BUG_STATUS,
    LOST_STATUS,
    USER_ERROR_STATUS,
    Supervised,
    end_all,
    say_at_once,
)
from dynapipe_ext.launch.processes.signals import interrupted_again, raise_if_lost, stacks_asked_for
from dynapipe_ext.ray_cluster import connect_to_ray

FOLLOW_FLAG = "--follow-stdin"
WrittenOrder = Literal["save", "stacks"]  # a line of a node's standard input
_POLL_S = 0.2
_TELL_S = 3.0  # time for the other nodes to report what they know of a failure
_END_S = 5.0
_SAVE_MARGIN_S = 10.0
_MOST_ORDER_BYTES = 4096
_NOT_EXECUTABLE_STATUS, _NOT_FOUND_STATUS = 126, 127  # of a shell
_MISTAKES_IN_ORDER = (USER_ERROR_STATUS, _NOT_FOUND_STATUS, _NOT_EXECUTABLE_STATUS)
_MISTAKES = frozenset(_MISTAKES_IN_ORDER)
# With which a node's launcher ends in order; another one is the only sign of what became of the node.
_IN_ORDER = {0, BUG_STATUS, LOST_STATUS, TAKEN_STATUS, INTERRUPTED_STATUS, *_MISTAKES, *SAVED_STATUSES}
_ERROR, _MOST_ERRORS = "dynapipe: error: ", 3
_MOST_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Host:
    """A line of a host file: a name for `--ssh`, and the ranks that it has room for (None: any number)."""

    name: str
    slots: int | None = None


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The hosts of a file with a line for each: NAME or USER@NAME, then an optional `slots=N`; # begins a comment.

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


def shell_line(command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """The line that a shell on a node runs: `command` in `folder`, which every node has, with `variables`, which may be
    secret: the shell reads the line from its standard input.

    >>> print(shell_line(["run", "a b"], Path("/work"), {"SECRET": "it's"}))
    export SECRET='it'"'"'s' && cd /work && exec run 'a b' || exit 127
    """
    exports = "".join(f"export {name}={shlex.quote(value)} && " for name, value in (variables or {}).items())
    return f"{exports}cd {shlex.quote(str(folder))} && exec {shlex.join(command)} || exit {_NOT_FOUND_STATUS}"


class Nodes(Protocol):
    """The nodes of a job. Each runs one line of shell; `close` ends what still runs."""

    @property
    def first_address(self) -> str:
        """The address at which other nodes reach the first one."""
        ...

    def start(self, lines: Sequence[str]) -> None: ...

    def ended(self, wait_s: float) -> Mapping[str, int]:
        """The exit statuses of nodes that have ended, after waiting at most `wait_s` for the next one."""
        ...

    def errors(self) -> Sequence[NodeError]:
        """Errors of nodes that nobody has printed yet, and the ends of nodes that were lost without an error; the
        earliest first, all of them also after `close`."""
        ...

    def order(self, order: WrittenOrder) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeError:
    node: str
    text: str


class ShellNodes:
    """Nodes that `shell HOST sh -s` reaches; this process writes to its standard input."""

    def __init__(self, shell: Sequence[str], hosts: Sequence[Host]) -> None:
        self._shell, self._hosts = tuple(shell), tuple(hosts)
        self._nodes: list[Supervised] = []
        self._inputs: list[int] = []
        self._outputs: list[_NodeOutput] = []
        self._errors: list[NodeError] = []
        self._ended: dict[str, int] = {}

    @property
    def first_address(self) -> str:
        return self._hosts[0].name.rpartition("@")[2]

    def start(self, lines: Sequence[str]) -> None:
        for host, line in zip(self._hosts, lines, strict=True):
            read_end, write_end = os.pipe()
            self._inputs.append(write_end)
            output_end, stderr_end = os.pipe()
            self._outputs.append(_NodeOutput(host.name, output_end, self._errors))
            try:
                command = [*self._shell, host.name, "sh", "-s"]
                self._nodes.append(Supervised.spawn(host.name, command, stdin=read_end, stderr=stderr_end))
            finally:
                os.close(read_end)
                os.close(stderr_end)
            self._write(write_end, f"{line}\n".encode())

    def ended(self, wait_s: float) -> Mapping[str, int]:
        waiting = select.poll()
        for descriptor in [node.pidfd for node in self._nodes if node.poll() is None]:
            waiting.register(descriptor, select.POLLIN)
        for output in self._outputs:
            if not output.have_ended:
                waiting.register(output.descriptor, select.POLLIN)
        waiting.poll(wait_s * 1000)
        for node, output in zip(self._nodes, self._outputs, strict=False):  # the last may not have started
            if node.name not in self._ended and (code := node.poll()) is not None:
                output.pass_on()
                self._ended[node.name] = status = exit_status(code)
                if self._inputs and status not in _IN_ORDER and not any(one.node == node.name for one in self._errors):
                    self._errors.append(NodeError(node.name, f"{node.name} ended with exit status {status}"))
        for output in self._outputs:
            output.pass_on()
        return dict(self._ended)

    def errors(self) -> Sequence[NodeError]:
        return tuple(self._errors)

    def order(self, order: WrittenOrder) -> None:
        for descriptor in self._inputs:
            self._write(descriptor, f"{order}\n".encode())

    def close(self) -> None:
        while self._inputs:
            os.close(self._inputs.pop())
        deadline_s, num_nodes = time.monotonic() + _END_S, len(self._nodes)
        while len(self.ended(_POLL_S)) < num_nodes and time.monotonic() < deadline_s:
            pass
        end_all(self._nodes, 0.0)
        self._nodes.clear()
        for output in self._outputs:
            output.close()
        self._outputs.clear()

    @staticmethod
    def _write(descriptor: int, words: bytes) -> None:
        with suppress(BrokenPipeError):  # it has ended: whoever watches it reports that
            os.write(descriptor, words)


class _NodeOutput:
    """A node's standard error, read from `descriptor`. Lines are passed on as they come. Errors are added to `errors`
    instead: all nodes may report the same one, and one node's error may explain another's."""

    def __init__(self, name: str, descriptor: int, errors: list[NodeError]) -> None:
        self.name, self.descriptor, self._errors = name, descriptor, errors
        self.have_ended = False
        self._open_line = b""
        os.set_blocking(descriptor, False)

    def pass_on(self) -> None:
        """Pass on all lines that have come by now."""
        while not self.have_ended:
            try:
                words = os.read(self.descriptor, _MOST_LINE_BYTES)
            except BlockingIOError:
                return
            self.have_ended = not words
            *lines, self._open_line = (self._open_line + words).split(b"\n")
            if self._open_line and (self.have_ended or len(self._open_line) >= _MOST_LINE_BYTES):
                lines, self._open_line = [*lines, self._open_line], b""
            for line in lines:
                self._take_line(line.decode(errors="replace"))

    def _take_line(self, line: str) -> None:
        if line.startswith(_ERROR):
            self._errors.append(NodeError(self.name, line.removeprefix(_ERROR)))
        else:
            say_at_once(line)

    def close(self) -> None:
        """With what it has said by now, also of a line that has not ended."""
        self.pass_on()
        if self._open_line:
            self._take_line(self._open_line.decode(errors="replace"))
        os.close(self.descriptor)


def run_on_nodes(nodes: Nodes, lines: Sequence[str], grace_s: float) -> NodeEnd:
    """Run a line on every node until all have ended, or one has failed; then end the others. SIGUSR2 has all print the
    stacks of their ranks. No error of a node is lost: those that the end does not name are printed."""
    try:
        try:
            nodes.start(lines)
            ended = _until_one_fails(nodes, len(lines))
        except (SystemExit, KeyboardInterrupt):
            nodes.order("save")
            deadline_s = time.monotonic() + grace_s + _SAVE_MARGIN_S
            while len(nodes.ended(_POLL_S)) < len(lines) and time.monotonic() < deadline_s and not interrupted_again():
                pass
            raise
        finally:
            nodes.close()
    except BaseException:
        if cause := _cause(errors := nodes.errors(), errors):
            say_at_once(f"{_ERROR}{cause}")
        raise
    return _of_nodes(ended, nodes.errors())


def _until_one_fails(nodes: Nodes, num_nodes: int) -> Mapping[str, int]:
    """The statuses of the nodes that have ended: all, or those that did soon after the first failure."""
    ended: Mapping[str, int] = {}
    with stacks_asked_for() as stacks_asked:
        while len(ended) < num_nodes and not any(ended.values()):
            raise_if_lost()
            ended = nodes.ended(_POLL_S)
            if stacks_asked.is_set():
                stacks_asked.clear()
                nodes.order("stacks")
    deadline_s = time.monotonic() + _TELL_S
    while len(ended) < num_nodes and time.monotonic() < deadline_s and _MISTAKES.isdisjoint(ended.values()):
        ended = nodes.ended(_POLL_S)
    return ended


def _of_nodes(ended: Mapping[str, int], errors: Sequence[NodeError]) -> NodeEnd:
    """The end of a job, from the ends of its nodes and what these said, the first in time first. A mistake explains all
    else; what came first explains the rest."""
    failed = {name: status for name, status in ended.items() if status}
    if not failed:
        return NodeEnd(0, _cause((), errors))
    for status in (*_MISTAKES_IN_ORDER, TAKEN_STATUS):
        if names := [name for name, node_status in failed.items() if node_status == status]:
            causes = [error for error in errors if error.node in names]
            if status in (_NOT_FOUND_STATUS, _NOT_EXECUTABLE_STATUS):
                where, status = f"{names[0]}: folder or Python of this job", USER_ERROR_STATUS
                advice = "cannot be used there (see above): the same paths must exist on all nodes"
                causes = [NodeError(names[0], f"{where} {advice}")]
            return NodeEnd(status, _cause(causes, errors))
    first_status = failed.get(errors[0].node, LOST_STATUS) if errors else BUG_STATUS
    likely = (BUG_STATUS,) if first_status == BUG_STATUS else ()
    status = next((one for one in (*likely, *SAVED_STATUSES) if one in failed.values()), LOST_STATUS)
    statuses = ", ".join(f"{name} ended with exit status {code}" for name, code in failed.items())
    return NodeEnd(status, _cause(errors, errors) or (statuses if status == LOST_STATUS else ""))


def _cause(causes: Sequence[NodeError], errors: Sequence[NodeError]) -> str:
    """In one line, what several nodes may say alike; the other `errors` are printed."""
    texts = list(dict.fromkeys(error.text for error in causes))[:_MOST_ERRORS]
    others = {error.text: error.node for error in reversed(errors) if error.text not in texts}
    for text, node in reversed(others.items()):
        say_at_once(f"dynapipe launch: {node}: {text}")
    return "; ".join(texts)


def exit_status(code: int) -> int:
    """The exit status that a shell reports for a return code: 128 plus the signal that killed the process."""
    return code if code >= 0 else 128 - code


class OrdersOfStdin:
    """A call returns the next order on standard input: a line of it, "end" once it is closed, or nothing."""

    def __init__(self) -> None:
        self._unread = b""

    def __call__(self) -> Order:
        if b"\n" not in self._unread and select.select([sys.stdin.fileno()], [], [], 0)[0]:
            words = os.read(sys.stdin.fileno(), _MOST_ORDER_BYTES)
            if not words:
                return "end"
            self._unread += words
        line, separator, rest = self._unread.partition(b"\n")
        if not separator:
            return ""
        self._unread = rest
        return next((order for order in get_args(WrittenOrder) if order.encode() == line), "")


_PLACE_S = 60.0
_ANSWER_S = 30.0
_ACTORS_END_S = 5.0


class RayNodes:
    """`num_nodes` different nodes of a Ray cluster, each with room for `num_ranks`: GPUs if the cluster has any, else
    CPUs.

    `address` names the cluster ("auto": the one of this machine). None starts one here, unless Ray is connected
    already.

    Errors: ConfigError without the package, where the address does not answer, or where the room is missing.
    """

    def __init__(self, num_nodes: int, num_ranks: int, address: str | None) -> None:
        try:
            import ray
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        except ImportError:
            raise ConfigError(f"--ray needs Ray: {install_advice('ray')}") from None
        self._ray: Any = ray
        if not self._ray.is_initialized():
            connect_to_ray(self._ray, address)
        room = {"CPU": 1, "GPU": num_ranks} if self._ray.cluster_resources().get("GPU") else {"CPU": num_ranks}
        self._group = self._ray.util.placement_group([room] * num_nodes, strategy="STRICT_SPREAD")
        if not self._group.wait(_PLACE_S):
            self._ray.util.remove_placement_group(self._group)
            resources = " and ".join(f"{number} {kind}" for kind, number in room.items())
            raise ConfigError(
                f"the Ray cluster has no {num_nodes} free nodes with {resources} each: look at `ray status`, or"
                " ask for fewer"
            )
        actor = self._ray.remote(NodeActor)
        self._actors: list[Any] = [
            actor.options(
                num_cpus=room["CPU"],
                num_gpus=room.get("GPU", 0),
                runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},  # else each rank would use all CPUs of the actor
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i),
            ).remote()
            for i in range(num_nodes)
        ]
        self._ended: dict[str, int] = {}

    @property
    def first_address(self) -> str:
        try:
            return str(self._ray.get(self._actors[0].address.remote(), timeout=_PLACE_S))
        except self._ray.exceptions.RayError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise ExecutionError(f"the first node does not answer ({reason}): look at `ray status`") from error

    def start(self, lines: Sequence[str]) -> None:
        for actor, line in zip(self._actors, lines, strict=True):
            actor.start.remote(line)  # `ended` reports actors that cannot

    def ended(self, wait_s: float) -> Mapping[str, int]:
        time.sleep(wait_s)
        for name, actor in self._named():
            if name not in self._ended:
                try:
                    code = self._ray.get(actor.poll.remote(), timeout=_ANSWER_S)
                except self._ray.exceptions.RayError:  # the actor has gone, or its node
                    code = LOST_STATUS
                if code is not None:
                    self._ended[name] = exit_status(code)
        return self._ended

    def errors(self) -> Sequence[NodeError]:
        return ()  # Ray has printed them

    def order(self, order: WrittenOrder) -> None:
        for _, actor in self._named():
            actor.tell.remote(f"{order}\n".encode())

    def close(self) -> None:
        for _, actor in self._named():
            actor.close.remote()
        deadline_s = time.monotonic() + _ACTORS_END_S
        while len(self.ended(_ACTORS_END_S / 50)) < len(self._actors) and time.monotonic() < deadline_s:
            pass
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)

    def _named(self) -> list[tuple[str, Any]]:
        return [(f"Ray node {i}", actor) for i, actor in enumerate(self._actors)]


class NodeActor:
    """A shell on a node that runs the lines it receives; its input stays open until `close`."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(["sh", "-s"], stdin=subprocess.PIPE, preexec_fn=before_exec())

    def address(self) -> str:
        from ray import util

        services: Any = util
        return str(services.get_node_ip_address())

    def start(self, line: str) -> None:
        self.tell(f"{line}\n".encode())

    def tell(self, words: bytes) -> None:
        assert self._shell.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            self._shell.stdin.write(words)
            self._shell.stdin.flush()

    def poll(self) -> int | None:
        return self._shell.poll()

    def close(self) -> None:
        assert self._shell.stdin is not None
        with suppress(BrokenPipeError):
            self._shell.stdin.close()
