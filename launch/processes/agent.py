"""torchrun's agent on a node, and what its ranks record of themselves."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Literal, assert_never

from dynapipe_ext.launch.processes.cluster import (
    BUG_STATUS,
    LOST_STATUS,
    USER_ERROR_STATUS,
    AskedStack,
    JobError,
    StandingStill,
    Supervised,
    asked_to_end,
    say_at_once,
    say_stacks,
)
from dynapipe_ext.launch.processes.env import Launcher, agent_variables
from dynapipe_ext.launch.processes.scratch import FileLock, ScratchDirectory, is_held
from dynapipe_ext.launch.processes.signals import interrupted_again, raise_if_lost, stacks_asked_for

_END, _STACKS, _AGENT = ".end", ".stacks", "agent"
_END_BYTES, _MOST_CAUSE = 16384, 2000  # a character may take six bytes
_LOOKED_AT_S = 1.0  # a launcher that tests a lock holds it for an instant


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank ended by itself, at `at_s` (of the clock that all processes of a machine share, and
    nobody sets). `cause` is the cause for the whole job. `is_first`:
    no other rank failed before. `is_final`: for that cause another start would end the same way."""

    status: int
    at_s: float
    cause: str = ""
    is_first: bool = False
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What a rank has recorded. On SIGUSR2 it writes its stacks to the file `stacks`."""

    rank: int
    pid: int
    runs: bool
    end: RankEnd | None
    stacks: Path

    @property
    def was_killed(self) -> bool:
        return not self.runs and self.end is None


@contextmanager
def recorded(folder: Path, start: int, rank: int) -> Iterator[None]:
    """Inside, the records show this process as a running rank. How the block ends is recorded as the rank's end."""
    place = folder / str(start) / str(rank)
    # The lock lasts as long as the process, not only this block: whoever ends the ranks must end what still runs.
    FileLock(place.with_name(f".{rank}"), f"the record of rank {rank}", wait_s=_LOOKED_AT_S)
    end, part = RankEnd(BUG_STATUS, time.monotonic()), place.with_name(f".{rank}{_END}")
    try:
        faulthandler.register(signal.SIGUSR2, file=place.with_name(f"{rank}{_STACKS}").open("w"), all_threads=True)
        part.write_bytes(bytes(_END_BYTES))  # room for the record of its end, even if a full disk ends it
        place.with_name(f".{rank}").rename(place)  # visible only once it is locked
        yield
        end = RankEnd(0, time.monotonic())
    except JobError as error:
        end = RankEnd(error.exit_status, time.monotonic(), error.cause, error.cause == str(error), error.is_final)
        raise
    except SystemExit as error:
        end = RankEnd(error.code if isinstance(error.code, int) else BUG_STATUS, time.monotonic())
        raise
    finally:
        with suppress(OSError):  # without a record it counts as killed
            _overwrite(part, json.dumps(asdict(replace(end, cause=end.cause[:_MOST_CAUSE]))))
            part.rename(place.with_name(f"{rank}{_END}"))


def _overwrite(path: Path, text: str) -> None:
    """Overwrite a file in place, which needs no room on disk; spaces fill the rest."""
    with path.open("r+b") as file:
        file.write(text.encode().ljust(_END_BYTES))


def read_rank_records(folder: Path) -> tuple[RankRecord, ...]:
    """The ranks of the last start on this node that have begun, in rank order."""
    starts = [int(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    if not starts:
        return ()
    places = (folder / str(max(starts))).iterdir()
    return tuple(_record(place) for place in sorted((p for p in places if p.name.isdigit()), key=lambda p: int(p.name)))


def _record(place: Path) -> RankRecord:
    runs = is_held(place)  # before the end is read, since a rank writes it while it runs
    try:
        end = RankEnd(**json.loads(place.with_name(place.name + _END).read_text()))
    except FileNotFoundError:
        end = None
    return RankRecord(int(place.name), int(place.read_text()), runs, end, place.with_name(place.name + _STACKS))


RENDEZVOUS = "dynapipe"  # torchrun's name of the package's own, in processes/rendezvous.py
Order = Literal["", "save", "stacks", "end"]  # to a node: nothing, or what its launcher shall do
TAKEN_STATUS = 69  # EX_UNAVAILABLE: another process has the port at which nodes were to meet
SAVED_STATUSES = (128 + signal.SIGTERM, 128 + signal.SIGUSR1, 128 + signal.SIGHUP)
INTERRUPTED_STATUS = 128 + signal.SIGINT
_POLL_S = 0.2
_GONE_S = 2.0  # a killed process is gone in milliseconds unless it hangs in the kernel
_AT_ONCE_S, _AFTER_RANKS_S = 10.0, 60.0  # torchrun kills ranks 30 s after its SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """A node's place in a job of `num_nodes` nodes with `num_ranks` ranks each.

    `node_rank` None: the nodes agree on it. All nodes meet at `rdzv_endpoint` (HOST:PORT). `local_addr` is the address
    at which others reach this node, if known.
    """

    num_ranks: int
    num_nodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    local_addr: str = ""


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """How a node or a job ended: its exit status, and the cause if no process has printed it yet."""

    status: int
    cause: str = ""

    @property
    def may_restart(self) -> bool:
        return self.status not in (0, USER_ERROR_STATUS, INTERRUPTED_STATUS, *SAVED_STATUSES)


def torchrun_command(place: NodePlace, max_restarts: int, train_words: Sequence[str]) -> list[str]:
    """
    >>> place = NodePlace(num_ranks=8, num_nodes=2, node_rank=0, rdzv_endpoint="node0:29400", rdzv_id="mine")
    >>> print(*torchrun_command(place, 0, ["--config", "mine.toml"])[3:])
    --nnodes 2 --nproc-per-node 8 --max-restarts 0 --rdzv-backend dynapipe --rdzv-endpoint node0:29400 --rdzv-id mine \
--rdzv-conf node_rank=0 -m dynapipe_ext.launch.rank --config mine.toml
    """
    words = [sys.executable, "-m", "dynapipe_ext.launch.processes.torchrun"]
    words += ["--nnodes", str(place.num_nodes), "--nproc-per-node", str(place.num_ranks)]
    words += ["--max-restarts", str(max_restarts)]
    words += ["--rdzv-backend", RENDEZVOUS]
    if place.num_nodes > 1:
        words += ["--rdzv-endpoint", place.rdzv_endpoint, "--rdzv-id", place.rdzv_id]
        if place.node_rank is not None:
            words += ["--rdzv-conf", f"node_rank={place.node_rank}"]
        if place.local_addr:
            words += ["--local-addr", place.local_addr]
    return [*words, "-m", "dynapipe_ext.launch.rank", *train_words]


def run_agent(
    command: Sequence[str],
    *,
    secret: str,
    timeout_s: float,
    grace_s: float,
    order: Callable[[], Order] = lambda: "",
    is_restart: bool = False,
) -> NodeEnd:
    """Run torchrun until it ends or has to be ended. `is_restart`: ranks of the job have run before.

    A rank that is stopped for `timeout_s` is killed. An agent without ranks since a failure is ended once all ranks had
    time to notice it. On a signal of `ENDING` or `order()` "save" the ranks save and end within `grace_s`, without
    a restart; then KeyboardInterrupt or SystemExit is raised. A second SIGINT, and "end", end everything at once. On
    SIGUSR2 and "stacks" the stacks of all ranks of this node are printed, and the job goes on.
    """
    with ScratchDirectory() as scratch:
        records = scratch.path / "ranks"
        records.mkdir()
        environment = agent_variables(scratch.path / "logs", secret, is_restart=is_restart)
        environment |= Launcher(os.getpid(), records).variables()
        agent = Supervised.spawn("torchrun", command, environment=environment)
        try:
            with stacks_asked_for() as stacks_asked:
                return _watched(agent, records, timeout_s, order, stacks_asked)
        except (SystemExit, KeyboardInterrupt):
            _have_saved(agent, records, grace_s, lambda: interrupted_again() or order() == "end")
            raise
        finally:
            agent.close(grace_s=0.0)
            _end_ranks(records)


def _watched(
    agent: Supervised, records: Path, timeout_s: float, order: Callable[[], Order], stacks_asked: Event
) -> NodeEnd:
    still, cause, empty_since_s = StandingStill(timeout_s), "", time.monotonic()
    while agent.poll() is None:
        raise_if_lost()
        if select.select([agent.pidfd], [], [], _POLL_S)[0]:
            break
        match order():
            case "save":
                raise SystemExit(128 + signal.SIGUSR1)
            case "end":
                return NodeEnd(INTERRUPTED_STATUS)
            case "stacks":
                stacks_asked.set()
            case "":
                pass
            case never:
                assert_never(never)
        ranks = read_rank_records(records)
        if stacks_asked.is_set():
            stacks_asked.clear()
            _say_stacks_of(ranks)
        for pid, name in still.seen([(agent.pid, "torchrun"), *((r.pid, f"rank {r.rank}") for r in ranks if r.runs)]):
            cause = cause or f"{name} (process {pid}) was stopped for {timeout_s:g} s, and is killed"
            _send(pid, signal.SIGKILL)
        cause = cause or _killed_first(ranks)
        if end := _final(ranks):
            return end
        if not ranks or any(rank.runs or (rank.end and rank.end.status == 0) for rank in ranks):
            empty_since_s = time.monotonic()
        elif time.monotonic() - empty_since_s > timeout_s + _AFTER_RANKS_S:
            return NodeEnd(LOST_STATUS, f"no rank has run here for {timeout_s + _AFTER_RANKS_S:g} s, and none will")
    return _verdict(agent, read_rank_records(records), cause, _words_of_agent(records))


def leave_words_of_agent(records: Path, words: str) -> None:
    """What stopped the agent itself, for its launcher."""
    try:
        records.with_name(_AGENT).write_text(words)
    except OSError:
        say_at_once(words)


def _words_of_agent(records: Path) -> str:
    path = records.with_name(_AGENT)
    return path.read_text() if path.exists() else ""


def _verdict(agent: Supervised, ranks: Sequence[RankRecord], cause: str, words_of_agent: str) -> NodeEnd:
    ends = [rank.end for rank in ranks if rank.end]
    first = next((end for end in ends if end.is_first), None)
    if agent.poll() == 0:
        return NodeEnd(0)
    if words_of_agent and agent.poll() == USER_ERROR_STATUS:
        return NodeEnd(USER_ERROR_STATUS, words_of_agent)
    if end := _final(ranks):
        return end
    was_killed = (agent.poll() or 0) < 0
    if ranks and was_killed and not cause:  # and its ranks with it
        return NodeEnd(LOST_STATUS, agent.verdict())
    if cause := cause or _killed_first(ranks):
        return NodeEnd(LOST_STATUS, cause)
    if first:
        return NodeEnd(BUG_STATUS if first.status == BUG_STATUS else LOST_STATUS)
    if any(
        end.status == SAVED_STATUSES[1] for end in ends
    ):  # another node was asked to save; SIGTERM may come from torchrun
        return NodeEnd(SAVED_STATUSES[1])
    if ends:
        return NodeEnd(LOST_STATUS, words_of_agent)
    return NodeEnd(LOST_STATUS, words_of_agent or f"no rank has begun: {agent.verdict()}")


def _final(ranks: Sequence[RankRecord]) -> NodeEnd | None:
    """The end of a node after a failure that every start would end with; None without one. Where the rank that has
    said why is on another node, its cause is this node's to say."""
    ends = [rank.end for rank in ranks if rank.end and rank.end.is_final]
    if not ends:
        return None
    return NodeEnd(USER_ERROR_STATUS, "" if any(end.is_first for end in ends) else ends[0].cause)


def _killed_first(ranks: Iterable[RankRecord]) -> str:
    """A message about the ranks that were killed, and so are the cause of other failures; empty where none was.

    Where a rank failed long before, torchrun has killed the others itself.
    """
    now_s = time.monotonic()
    if any(rank.end and rank.end.status and now_s - rank.end.at_s > _AT_ONCE_S for rank in ranks):
        return ""
    killed = [f"rank {rank.rank} (process {rank.pid})" for rank in ranks if rank.was_killed]
    return f"{', '.join(killed)} was killed: if nobody did that, memory ran out" if killed else ""


def _have_saved(agent: Supervised, records: Path, grace_s: float, given_up: Callable[[], bool]) -> None:
    """Let the ranks save and end, unless that is given up. torchrun is stopped meanwhile: it would take their ends for
    failures."""
    say_at_once(asked_to_end(grace_s))
    agent.send_signal(signal.SIGSTOP)
    _signal_ranks(records, signal.SIGUSR1)
    _wait_for_ranks(records, grace_s, given_up)


def _say_stacks_of(ranks: Sequence[RankRecord]) -> None:
    host, running = os.uname().nodename, [rank for rank in ranks if rank.runs]
    if not running:
        say_at_once(f"no rank runs on {host} yet: no stacks")
    say_stacks(
        [
            AskedStack(
                f"rank {rank.rank} (pid {rank.pid} on {host})",
                partial(_send, rank.pid, signal.SIGUSR2),
                partial(rank.stacks.read_text, errors="replace"),
            )
            for rank in running
        ]
    )


def _end_ranks(records: Path) -> None:
    _signal_ranks(records, signal.SIGKILL)
    _wait_for_ranks(records, _GONE_S)


def _signal_ranks(records: Path, number: signal.Signals) -> None:
    for rank in read_rank_records(records):
        if rank.runs:
            _send(rank.pid, number)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


def _wait_for_ranks(records: Path, limit_s: float, given_up: Callable[[], bool] = lambda: False) -> None:
    deadline_s = time.monotonic() + limit_s
    while any(rank.runs for rank in read_rank_records(records)) and time.monotonic() < deadline_s:
        if given_up():
            break
        time.sleep(_POLL_S / 4)
