"""Faults inside a command under test, at the places where its ranks wait and at the file operations of checkpoints.

Installed in a process before the command begins (`Preloaded.started(…, faults=…)`); its forks inherit it. A *site* is
named by the function of ours that waits, and by what it calls. When a rank reaches a fault's site, the fault is done at
once, by that rank, before the wait begins: so it meets every other process in whatever it does then, the launcher and
the planners mostly in waits of their own. FOLDER/hit-K says that fault K was done; fault K + 1 is looked for after it.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import re
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynapipe_ext.executor.parent_death import parent_of

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
_COLLECTIVES = (
    "init_process_group",
    "new_group",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "barrier",
    "broadcast",
    "gather",
    "reduce_scatter_tensor",
)
_HELD_S = 1.5  # what is delayed, or full for a while
_LOOKS = 3  # at which actors there are, of each site, while sites are recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`deed` is done to `actor` when `rank` reaches `site` for the `count`-th time, or the next time that there is such
    an actor.

    kill, stop: itself, peer (another rank), planner, store, agent (torchrun), launcher.
    drop, delay, duplicate, corrupt: the store's entries of a kind (plan, taken, heartbeat, wanted, failure).
    fill: memory (of the store), memory for a while, disk (of the working directory), files (this rank's end at 100 B).
    """

    site: str
    rank: int
    count: int
    deed: str
    actor: str


def install(*, folder: str, faults: Sequence[Mapping[str, Any]] = (), records: bool = False) -> None:
    """Have this process and its forks do `faults`, or write the sites that ranks reach to FOLDER/sites."""
    if sys.argv[1] == "launch":
        importlib.import_module("forked_programs").install_for_launch()
    sites = _Sites(Path(folder), tuple(Fault(**fault) for fault in faults), records)
    _watch_ranks(sites)
    _watch_waits(sites)
    _watch_files(sites)


class _Sites:
    def __init__(self, folder: Path, faults: tuple[Fault, ...], records: bool) -> None:
        self._folder, self._faults, self._records = folder, faults, records
        self._launcher = os.getpid()
        self._reached: Counter[str] = Counter()
        self._next = 0  # of the faults, as far as this process has looked
        self.rank = -1  # known once it trains
        self.store: Any = None

    def reached(self, site: str) -> None:
        if self.rank < 0:
            return
        self._reached[site] += 1
        if self._records:
            self._record(site)
        number = self._next  # several threads come here
        while number < len(self._faults) and (self._folder / f"hit-{number}").exists():
            number += 1
        self._next = number
        if number == len(self._faults):
            return
        fault = self._faults[number]
        if (fault.rank, fault.site) == (self.rank, site) and self._reached[site] >= fault.count:
            self._do(fault)

    def _record(self, site: str) -> None:
        there = " ".join(sorted(self._actors())) if self._reached[site] <= _LOOKS else ""
        with (self._folder / "sites").open("a") as file:
            file.write(f"{self.rank}\t{site}\t{there}\n")

    def _do(self, fault: Fault) -> None:
        match fault.deed:
            case "kill" | "stop":
                pid = self._actors().get(fault.actor)
                if pid is not None:
                    self._hit(f"{fault.deed} {pid}")
                    os.kill(pid, signal.SIGKILL if fault.deed == "kill" else signal.SIGSTOP)
            case "fill" if fault.actor == "files":
                self._hit("fill")
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            case "fill" if fault.actor == "disk":
                self._hit("fill")
                _fill_disk(Path("filler"))
            case "fill":
                if self.store is not None:
                    self._hit("fill")
                    _fill_memory(self.store._client, for_a_while=fault.actor == "memory for a while")
            case _:
                with suppress(*_silent_store()):  # of a fault before this: without its answer no entry changes
                    if self.store is not None and (keys := _entries(self.store, fault.actor, fault.deed)):
                        self._hit(fault.deed)
                        _tamper(self.store._client, keys, fault.deed)

    def _hit(self, what: str) -> None:
        (self._folder / f"hit-{self._next}").write_text(what)

    def _actors(self) -> dict[str, int]:
        """Their process ids; of several ranks or planners the last one found."""
        found = {"itself": os.getpid(), "launcher": self._launcher}
        for pid in descendants(self._launcher):
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if re.match(rb"rank \d+ of", line) and pid != os.getpid():
                    found["peer"] = pid
                elif b"planner_process" in line:
                    found["planner"] = pid
                elif line.startswith(b"torchrun"):
                    found["agent"] = pid
                elif b"-server" in line:
                    found["store"] = pid
        return found


def descendants(pid: int) -> list[int]:
    """The processes below a process, of all generations."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            below.setdefault(parent_of(int(name)), []).append(int(name))
    found = [*below.get(pid, ())]
    for one in found:  # those below it join the ones to look at
        found += below.get(one, ())
    return found


def _watch_ranks(sites: _Sites) -> None:
    from dynapipe_ext.executor.store.redis import RedisStore
    from dynapipe_ext.launch.rank import one_rank

    own_train, own_init = one_rank._train, RedisStore.__init__

    def as_rank(env: Any, *arguments: Any) -> int:
        sites.rank = env.rank
        return own_train(env, *arguments)

    def opened(store: Any, *arguments: Any, **named: Any) -> None:
        own_init(store, *arguments, **named)
        sites.store = store

    one_rank._train = as_rank
    RedisStore.__init__ = opened  # type: ignore[method-assign]


def _watch_waits(sites: _Sites) -> None:
    import torch.distributed

    from dynapipe_ext.executor.engine import PipelineExecutor
    from dynapipe_ext.executor.store.redis import RedisStore
    from dynapipe_ext.executor.transport.torch_p2p import _TorchPending

    def before(owner: Any, name: str, said: Callable[[Any], str]) -> None:
        own = getattr(owner, name)

        @functools.wraps(own)
        def call(*arguments: Any, **named: Any) -> Any:
            sites.reached(said(arguments))
            return own(*arguments, **named)

        setattr(owner, name, call)

    for name in _COLLECTIVES:
        before(torch.distributed, name, lambda _, name=name: f"{_caller()}: {name}")
    for name in ("get", "put"):
        before(RedisStore, name, lambda _, name=name: f"{_caller()}: store {name}")
    before(_TorchPending, "wait", lambda those: f"transfer: {'receive' if those[0]._tensors else 'send'}")
    before(PipelineExecutor, "execute", lambda _: "step: begins")


def _watch_files(sites: _Sites) -> None:
    own_fsync, busy, here = os.fsync, threading.local(), os.getcwd() + os.sep

    def reached(what: str, path: str) -> None:
        before, found, place = path.rpartition("/checkpoints/")
        if found and before.startswith(here) and not getattr(busy, "now", False):
            busy.now = True  # what a fault does to files is none of a save's
            try:
                place = re.sub(r"\.[0-9]+\.part$", ".part", place)  # a process's own number, new at each start
                sites.reached(f"file: {what} {re.sub(r'[0-9]{7}', 'N', place)}")
            finally:
                busy.now = False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS and isinstance(arguments[0], str | os.PathLike):
            reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if not reads:
                reached(event.rpartition(".")[2], os.fspath(arguments[0]))

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        reached("fsync", os.readlink(f"/proc/self/fd/{number}"))
        own_fsync(descriptor)

    sys.addaudithook(audit)
    os.fsync = fsync


def _caller() -> str:
    """The innermost function of the package that is being run, as "file.function"."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OURS) and "/tests/" not in path and "/.venv/" not in path:
            return f"{Path(path).stem}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def _silent_store() -> tuple[type[Exception], ...]:
    """What a client raises where the store is gone or stopped."""
    import redis

    return redis.exceptions.ConnectionError, redis.exceptions.TimeoutError


def _entries(store: Any, kind: str, deed: str) -> list[bytes]:
    """The keys of a kind; of kinds that are put in need only, forged ones can be made up."""
    keys: list[bytes] = sorted(store._client.keys(f"{store._prefix}*/{kind}/*"))
    if not keys and deed == "corrupt" and kind in ("wanted", "failure"):
        signs = store._client.keys(f"{store._prefix}*/heartbeat/*")
        keys = [sign.replace(b"/heartbeat/", f"/{kind}/".encode()) for sign in signs]
    return keys


def _tamper(client: Any, keys: Sequence[bytes], deed: str) -> None:
    held = {key: client.lindex(key, 0) or b"?" for key in keys}

    def put(values: Mapping[bytes, bytes]) -> None:
        import redis

        for key, value in values.items():
            client.delete(key)
            with suppress(redis.exceptions.OutOfMemoryError):  # of a fault before this: what was there is gone
                client.rpush(key, value)

    match deed:
        case "drop":
            client.delete(*keys)
        case "delay":
            client.delete(*keys)
            _later(lambda: put(held))
        case "duplicate":  # each twice, and a copy of each in its neighbour's place
            for key, value in held.items():
                client.rpush(key, value)
            put(dict(zip(keys[1:], [held[key] for key in keys[:-1]], strict=True)))
        case "corrupt":  # a bit, an end, everything
            bad = [
                (lambda v: v[: len(v) // 2] + bytes([v[len(v) // 2] ^ 1]) + v[len(v) // 2 + 1 :]),
                (lambda v: v[: len(v) // 2]),
                (lambda v: random.Random(len(v)).randbytes(100_000)),
            ]
            put({key: bad[i % 3](value) for i, (key, value) in enumerate(held.items())})


def _fill_memory(client: Any, *, for_a_while: bool) -> None:
    import redis

    client.config_set("maxmemory", client.info("memory")["used_memory"] + (2 << 20))
    number = 0
    with suppress(redis.exceptions.OutOfMemoryError):
        while True:
            client.set(f"filler-{number}", bytes(1 << 14))
            number += 1
    if for_a_while:
        _later(lambda: client.delete(*(f"filler-{i}" for i in range(number))))


def _fill_disk(path: Path) -> None:
    for block in (1 << 20, 1 << 12):
        with suppress(OSError), path.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(block))


def _later(work: Callable[[], object]) -> None:
    timer = threading.Timer(_HELD_S, work)
    timer.daemon = True
    timer.start()
