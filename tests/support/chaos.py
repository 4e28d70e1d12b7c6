"""Jobs that meet faults, and what must hold of them afterwards: the end of a run that nobody disturbed, and no trace.

clean job ─► sites its ranks reach ─► cells (site, deed, actor) ─► faults of a job ─► its starts ─► what is wrong
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.executor.checkpoints.folder import MANIFEST, checkpoints, latest
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of
from dynapipe_ext.launch.job.run_directory import is_in_use
from dynapipe_ext.launch.processes.cluster import BUG_STATUS
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import RunReport
from tests.support.faults import Fault
from tests.support.limits import LIMIT_S, SOON_S
from tests.support.preloaded import Preloaded
from tests.support.tiny_sizes import TINY_SIZES

SAVE_EVERY, STEPS = 3, 12
JOB = f"""
[run]
steps = {STEPS}
[topology]
tp = 1
pp = 2
dp = 2
[model]
num_layers = 2
{TINY_SIZES}max_seq_len = 128
dropout = 0.1
[data]
num_samples = 200
tokenizer = "bytes"
truncate = true
tokens_per_batch = 1024
num_workers = 1
[checkpoint]
save_every = {SAVE_EVERY}
[job]
timeout_s = 10
"""
PAUSE_S = 3.0  # for which a launcher is stopped: nobody else could go on for it
_FULL_S = 12.0
_ROOT = f"{Path(__file__).resolve().parents[2]}/"
_DISK = "64m"
_MOST_STARTS = 6
_BYTES_VOCABULARY = 258
_WAIT_DEEDS = [(deed, actor) for deed in ("kill", "stop") for actor in ("rank", "planner", "store", "launcher")]
_AGENT_DEEDS = [("kill", "agent"), ("stop", "agent")]
_STORE_DEEDS = [
    *((deed, kind) for deed in ("drop", "delay", "duplicate", "corrupt") for kind in ("plan", "taken", "heartbeat")),
    *(("corrupt", kind) for kind in ("wanted", "failure")),  # those that nobody has put are forged
]
_FULL = [("fill", what) for what in ("memory", "memory for a while", "disk", "files")]
_SOMETIMES = ("planner", "store")  # there is none in some waits
_ANYWHERE, _PLAN_WAIT, _FILE, _STEP = "anywhere", "channel._wait: store get", "file: ", "step: begins"

Command = Literal["train", "launch"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What is covered once it was done in some run; `site` is a site of `faults.py`, or a name of several."""

    site: str
    deed: str
    actor: str


@dataclass(frozen=True, slots=True)
class Site:
    """Where a rank of the clean run waited, how often, how often of that before its second step, and which other
    processes there were then."""

    name: str
    rank: int
    count: int
    num_early: int
    actors: frozenset[str]


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a job: its exit status, how long it took, its standard error, and the steps that it ran.

    `hung_processes` has the states of its processes at the limit (empty: it ended by itself).
    """

    status: int
    wall_s: float
    stderr: str
    steps: tuple[int, ...]
    hung_processes: str

    @property
    def reason(self) -> str:
        lines = [
            line for line in self.stderr.splitlines() if not re.match(r"step \d|tokenizing|data:|ranks:|store: ", line)
        ]
        return " | ".join(lines)[-600:]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job went. `done` are its faults that came to pass, `wrong` is what should not be (empty: nothing).

    Where something is wrong, `evidence` is the folder of what was seen of it.
    """

    command: Command
    faults: tuple[Fault, ...]
    done: tuple[bool, ...]
    starts: tuple[Start, ...]
    wrong: tuple[str, ...]
    evidence: Path | None

    @property
    def repeated_steps(self) -> int:
        return sum(max(0, last - step + 1) for last, step in _pairs(self.starts))

    def to_json(self) -> dict[str, Any]:
        starts = [{"status": s.status, "wall_s": round(s.wall_s, 1), "reason": s.reason} for s in self.starts]
        faults = [asdict(fault) | {"done": done} for fault, done in zip(self.faults, self.done, strict=True)]
        return {
            "command": self.command,
            "faults": faults,
            "starts": starts,
            "repeated_steps": self.repeated_steps,
            "wrong": list(self.wrong),
        }


class JobsClosedError(Exception):
    """A run was given up, since its jobs were closed."""


class ChaosJobs:
    """A clean job in `folder` (a short path), made at once, and jobs with faults beside it. With `kills_late` all
    faults are kills, which come after the first step of a start."""

    def __init__(self, preloaded: Preloaded, folder: Path, *, kills_late: bool = False) -> None:
        self._preloaded, self.folder, self._kills_late = preloaded, folder.resolve(), kills_late
        self._closed = threading.Event()
        (self.folder / "tokenized").mkdir(parents=True)
        (self.folder / "job.toml").write_text(JOB)
        config = TrainConfig.read(self.folder / "job.toml")
        shape = architecture_of(config, _BYTES_VOCABULARY)
        costs = analytic_costs(config, shape, flops_per_s=50e9, overhead_ns=1_000_000)
        (self.folder / "costs.json").write_text(json.dumps(cost_model_to_json(costs)))
        clean = self._prepared("clean")
        start = self._start(clean, "train", self._words("train", clean), {"records": True})
        assert start.status == 0, start.stderr
        self.sites = _read_sites(clean / "faults" / "sites")
        self.clean = _end_of(clean / "run")

    def close(self) -> None:
        """Have runs under way end at once, with `JobsClosedError`."""
        self._closed.set()
        _kill_all(self.folder)

    def cells(self, command: Command) -> list[Cell]:
        """All that there are: of waits and file operations those that the clean run came to."""
        found = []
        for name in sorted({site.name for site in self.sites}):
            there = frozenset[str]().union(*(site.actors for site in self.sites if site.name == name))
            deeds = [("kill", "rank")] if name.startswith(_FILE) else _WAIT_DEEDS
            found += [Cell(name, deed, actor) for deed, actor in deeds if actor == "rank" or actor in there]
        if self._kills_late:
            late = {site.name for site in self.sites if site.count > site.num_early}
            return [cell for cell in found if cell.deed == "kill" and cell.site in late]
        anywhere = [*_STORE_DEEDS, *_FULL, *(_AGENT_DEEDS if command == "launch" else ())]
        return found + [Cell(_ANYWHERE, deed, actor) for deed, actor in anywhere]

    def fault(self, cell: Cell, chance: random.Random) -> Fault:
        """One of the ways to hit a cell, early in a start: another start may begin late."""
        actor, prefix = cell.actor, cell.site
        if cell.site == _ANYWHERE:
            prefix = _FILE if actor in ("disk", "files") else "" if actor == "agent" else _PLAN_WAIT
        named = [site for site in self.sites if site.name.startswith(prefix)]
        if self._kills_late:
            named = [site for site in named if site.count > site.num_early]
        name = chance.choice(sorted({site.name for site in named}))
        site = chance.choice([s for s in named if s.name == name and (actor in s.actors or actor not in _SOMETIMES)])
        if actor == "rank":
            alone = name.startswith(_FILE) or "peer" not in site.actors
            actor = "itself" if alone else chance.choice(["itself", "peer"])
        skipped = site.num_early if self._kills_late else 0
        count = skipped + chance.randint(1, max(1, (site.count - skipped) // 3))
        return Fault(site=site.name, rank=site.rank, count=count, deed=cell.deed, actor=actor)

    def place(self, fault: Fault) -> int:
        """Of the fault's site among all, in the order in which a job comes to them."""
        return [site.name for site in self.sites].index(fault.site)

    def run(self, name: str, command: Command, faults: Sequence[Fault]) -> Outcome:
        """Start a job, and again as its user would, until it has ended well; then look at what it left.

        Of a job that went wrong, what was seen is kept in the folder NAME.wrong beside it.
        """
        folder = self._prepared(name)
        starts: list[Start] = []
        wrong: list[str] = []
        left_processes: list[str] = []
        with _small_disk(folder) if any(f.actor == "disk" for f in faults) else _own_disk(folder):
            while not starts or (starts[-1].status and len(starts) < _MOST_STARTS):
                (folder / "filler").unlink(missing_ok=True)
                start = self._start(
                    folder, command, self._words(command, folder), {"faults": [asdict(fault) for fault in faults]}
                )
                starts.append(start)
                left_processes.append(_end_processes(folder))
                wrong += _wrong_with(folder, start, left_processes[-1])
            if starts[-1].status:
                wrong.append(f"it has not ended well in {len(starts)} starts")
            else:
                had_no_room = any(fault.actor in ("disk", "files") for fault in faults)
                wrong += _differences(_end_of(folder / "run"), self.clean, saved_fewer=had_no_room)
            wrong += _lost_steps(starts)
            wrong += _left_behind(folder)
            done = tuple((folder / "faults" / f"hit-{i}").exists() for i in range(len(faults)))
            evidence = self.folder / f"{name}.wrong" if wrong else None
            outcome = Outcome(command, tuple(faults), done, tuple(starts), tuple(wrong), evidence)
            if evidence is not None:  # before a small disk is gone
                _keep(evidence, folder, outcome, left_processes, self.clean)
        return outcome

    def _prepared(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder

    def _words(self, command: Command, folder: Path) -> list[str]:
        if command == "train" and checkpoints(folder / "run" / "checkpoints"):
            return ["train", "--resume", "run"]
        words = ["--config", "../job.toml", "--costs", "../costs.json", "--run-dir", "run"]
        if command == "launch":
            return ["launch", *words, "--max-restarts", "3"]
        return ["train", *words, "--overwrite"]

    def _start(self, folder: Path, command: Command, words: Sequence[str], faults: Mapping[str, Any]) -> Start:
        for made in ("faults", "t"):
            (folder / made).mkdir(exist_ok=True)
        if not (folder / "tokenized").exists():
            (folder / "tokenized").symlink_to("../tokenized")
        variables = {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder / "t")}
        given = dict(faults) | {"folder": str(folder / "faults")}
        begun_s = time.monotonic()
        with (
            self._preloaded.started(words, cwd=folder, environment=variables, faults=given) as started,
            ThreadPoolExecutor(1) as pool,
        ):
            listener = pool.submit(started.communicate, 2 * LIMIT_S)
            while time.monotonic() - begun_s < LIMIT_S and not self._closed.is_set():
                if wait([listener], 0.2).done:
                    break
                _let_go_on(folder, started.pid)
                _make_room(folder)
            hung_processes = "" if listener.done() or self._closed.is_set() else _states(_processes(folder))
            if hung_processes:
                with suppress(ProcessLookupError):
                    os.kill(started.pid, signal.SIGUSR2)  # it prints its ranks' stacks
                wait([listener], SOON_S)
            if not listener.done():
                _kill_all(folder)
            stderr = listener.result()[1]
        if self._closed.is_set():
            raise JobsClosedError
        assert started.returncode is not None
        stderr = stderr.replace(str(self.folder), "JOBS").replace(_ROOT, "")
        steps = tuple(int(number) for number in re.findall(r"^step (\d+) ", stderr, re.MULTILINE))
        return Start(started.returncode, time.monotonic() - begun_s, stderr, steps, hung_processes)


def read_faults(outcome: Path) -> tuple[Command, tuple[Fault, ...]]:
    """The command and the faults of a run whose outcome.json was kept."""
    run = json.loads(outcome.read_text())
    return run["command"], tuple(
        Fault(**{key: fault[key] for key in fault if key != "done"}) for fault in run["faults"]
    )


def _read_sites(path: Path) -> list[Site]:
    count: dict[tuple[str, int], int] = {}
    early: dict[tuple[str, int], int] = {}
    actors: dict[tuple[str, int], set[str]] = {}
    for line in path.read_text().splitlines():
        rank, name, there = line.split("\t")
        key = (name, int(rank))
        count[key] = count.get(key, 0) + 1
        early[key] = early.get(key, 0) + (count.get((_STEP, int(rank)), 0) < 2)
        actors.setdefault(key, set()).update(there.split())
    return [Site(*key, number, early[key], frozenset(actors[key])) for key, number in count.items()]


@dataclass(frozen=True, slots=True)
class JobEnd:
    """What a run has come to: its last checkpoint's tensors, its losses, the names of its files."""

    tensors: Mapping[str, bytes]
    losses: tuple[float, ...]
    files: frozenset[str]


def _end_of(run_dir: Path) -> JobEnd:
    newest = latest(run_dir / "checkpoints")
    tensors = {file.name: file.read_bytes() for file in newest.glob("*.distcp")}
    losses = tuple(RunReport.read(run_dir / "report.json").result.losses)
    return JobEnd(tensors, losses, frozenset(str(p.relative_to(run_dir)) for p in run_dir.rglob("*")))


def _differences(found: JobEnd, clean: JobEnd, *, saved_fewer: bool) -> Iterator[str]:
    """`saved_fewer`: there was no room for some checkpoints, so others may have stayed before the last."""
    if found.tensors != clean.tensors or not clean.tensors:
        yield "the weights are not those of a clean run"
    if found.losses != clean.losses:
        yield "the losses are not those of a clean run"
    last = f"checkpoints/iter_{len(clean.losses):07}"
    may_differ = {
        name
        for name in found.files | clean.files
        if saved_fewer and name.startswith("checkpoints/iter_") and not name.startswith(last)
    }
    if more := sorted(found.files - clean.files - may_differ):
        yield f"files that a clean run has not: {', '.join(more)}"
    if fewer := sorted(clean.files - found.files - may_differ):
        yield f"files that a clean run has: {', '.join(fewer)}"


def _end_processes(folder: Path) -> str:
    """The states of what has outlived a start, which is then killed. Empty: nothing has, or it ended soon."""
    deadline_s = time.monotonic() + SOON_S
    while (left := _processes(folder)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    states = _states(left)
    _kill_all(folder)
    return states


def _wrong_with(folder: Path, start: Start, left_processes: str) -> Iterator[str]:
    """After a start has ended, however it has: no process, no lock, and a reason where it did not end well."""
    if start.hung_processes:
        yield f"it hangs: not ended after {LIMIT_S:g} s"
        return
    if left_processes:
        yield f"processes are left: {left_processes}"
    if (folder / "run").is_dir() and is_in_use(folder / "run"):
        yield "the run directory is still locked"
    if start.status > 0 and not start.reason:
        yield f"it ended with exit status {start.status} and no reason"
    if start.status == BUG_STATUS:
        yield "it ended as by a defect"
    if "distributed_c10d.py" in start.stderr:
        yield "a rank failed in a collective that its error does not name"


def _pairs(starts: Sequence[Start]) -> Iterator[tuple[int, int]]:
    """Each step of a job's starts with the one that was run before it."""
    return pairwise([0, *(step for start in starts for step in start.steps)])


def _lost_steps(starts: Sequence[Start]) -> Iterator[str]:
    """A step is run again only if it had not been saved."""
    for last, step in _pairs(starts):
        saved = (last - 1) // SAVE_EVERY * SAVE_EVERY  # that of `last` may have been under way
        if step != last + 1 and not (saved < step <= last and (step - 1) % SAVE_EVERY == 0):
            yield f"step {step} followed step {last}, though step {max(0, saved)} was saved"


def _left_behind(folder: Path) -> Iterator[str]:
    if left := sorted(path.name for path in (folder / "t").iterdir()):
        yield f"temporary files are left: {', '.join(left)}"


def _keep(evidence: Path, folder: Path, outcome: Outcome, left_processes: Sequence[str], clean: JobEnd) -> None:
    """Write what was seen of a job that went wrong to a new folder `evidence`:

    outcome.json      its faults, how each start ended, what is wrong
    start-K.log       standard error of start K
    processes-K       the states of those that hung in start K, or outlived it
    files             size and digest of each file of the run directory
    losses            a step, its loss, the loss of the clean run, and whether they differ
    events.jsonl, report.json, iter_N.json (the manifest of each checkpoint), hit-K: as the job left them
    """
    evidence.mkdir()
    (evidence / "outcome.json").write_text(json.dumps(outcome.to_json(), indent=1) + "\n")
    for number, (start, left) in enumerate(zip(outcome.starts, left_processes, strict=True), 1):
        (evidence / f"start-{number}.log").write_text(start.stderr)
        if states := start.hung_processes + left:
            (evidence / f"processes-{number}").write_text(states)
    run_dir = folder / "run"
    kept = [run_dir / "events.jsonl", run_dir / "report.json", *(folder / "faults").glob("hit-*")]
    for file in kept:
        if file.exists():
            shutil.copy2(file, evidence)
    for manifest in run_dir.glob(f"checkpoints/*/{MANIFEST}"):
        shutil.copy2(manifest, evidence / f"{manifest.parent.name}.json")
    lines = [
        f"{file.relative_to(run_dir)}\t{file.stat().st_size}\t{hashlib.sha256(file.read_bytes()).hexdigest()}"
        for file in sorted(run_dir.rglob("*"))
        if file.is_file()
    ]
    (evidence / "files").write_text("\n".join(lines) + "\n")
    (evidence / "losses").write_text("\n".join(_compared_losses(run_dir / "events.jsonl", clean.losses)) + "\n")


def _compared_losses(events: Path, expected: Sequence[float]) -> Iterator[str]:
    losses = {}
    for line in events.read_text(errors="replace").splitlines() if events.exists() else ():
        with suppress(ValueError):  # a line that a kill or a full disk cut
            event = json.loads(line)
            if "loss" in event:
                losses[event["step"]] = event["loss"]
    for step, clean_loss in enumerate(expected, 1):
        loss = losses.get(step)
        yield f"{step}\t{loss}\t{clean_loss}\t{'' if loss == clean_loss else 'differs'}"


def _processes(folder: Path) -> list[int]:
    """Those that work in a job's folder or below, but for zombies."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cwd").readlink().is_relative_to(folder):
                pids.append(int(entry.name))
    return pids


def _kill_all(folder: Path) -> None:
    for pid in _processes(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _states(pids: Sequence[int]) -> str:
    """A line a process: its id, its parent's, its state (R, S, D, T), the innermost call of the kernel, its command."""
    lines = []
    for pid in pids:
        with suppress(OSError):  # it has ended since
            place = Path(f"/proc/{pid}")
            state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
            call = (place / "stack").read_text().partition("\n")[0]
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
            lines.append(f"{pid} of {parent} {state} {call} {command}")
    return "\n".join(lines)


def _let_go_on(folder: Path, launcher: int) -> None:
    """A launcher that has been stopped for long enough goes on."""
    for hit in (folder / "faults").glob("hit-*"):
        with suppress(OSError):
            if hit.read_text() == f"stop {launcher}" and time.time() - hit.stat().st_mtime > PAUSE_S:
                os.kill(launcher, signal.SIGCONT)


def _make_room(folder: Path) -> None:
    """As the user of a job that waits for room does, once files or the disk have been full for long enough."""
    for hit in (folder / "faults").glob("hit-*"):
        with suppress(OSError):
            if hit.read_text() == "fill" and time.time() - hit.stat().st_mtime > _FULL_S:
                (folder / "filler").unlink(missing_ok=True)
                for pid in _processes(folder):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own, which has room for the job and not for much more. Needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def _own_disk(folder: Path) -> Iterator[None]:
    yield
