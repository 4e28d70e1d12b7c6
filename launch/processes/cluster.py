"""Ranks forked on this machine, supervised until all have ended; and work that is ended where it stands still."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from types import FrameType, TracebackType
from typing import NoReturn

from dynapipe_ext.errors import ConfigError, DynaPipeError, ExecutionError, in_one_line
from dynapipe_ext.executor.parent_death import before_exec, end_with_parent, supervising_pid
from dynapipe_ext.launch.processes.env import RankEnv, child_environment, use_interface
from dynapipe_ext.launch.processes.network import free_port
from dynapipe_ext.launch.processes.scratch import ScratchDirectory
from dynapipe_ext.launch.processes.signals import (
    ENDING,
    ending_signals_blocked,
    ending_signals_raise,
    interrupted_again,
    raise_if_lost,
    stacks_asked_for,
)
from dynapipe_ext.visible_text import visible

_GIVE_UP_S = 5.0  # for the main thread to raise, which a call that hangs in the system never does


class StandingStill:
    """How long processes have been stopped (by SIGSTOP or a debugger)."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since_s: dict[int, float] = {}

    def seen(self, processes: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        """The (process id, name) of processes that every look has found stopped for at least the limit."""
        now_s, stopped = time.monotonic(), [(pid, name) for pid, name in processes if _is_stopped(pid)]
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid, _ in stopped}
        return [(pid, name) for pid, name in stopped if now_s - self._since_s[pid] >= self.limit_s]


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


_PR_SET_NAME = 15
_MOST_NAME_BYTES = 15
_ARG_START, _ARG_END = 47, 48  # of /proc/self/stat (proc_pid_stat(5) counts from 1)


def set_process_title(title: str) -> None:
    """Show `title` as the name (in top; its first 15 bytes) and as the command line (in ps) of this process.

    It is cut to the length of the original command line. Where the kernel does not tell its place, nothing changes.
    """
    text = title.encode()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, text[:_MOST_NAME_BYTES] + b"\0", 0, 0, 0)
    try:
        # The name of the program, in brackets, may contain anything: count the fields after it.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = (int(fields[place - 2]) for place in (_ARG_START, _ARG_END))
        shown = Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError, IndexError):
        return
    room = end - start
    if room < 2 or len(shown) != room:  # the layout has changed: leave it alone
        return
    # The last byte stays zero, else the kernel would read on into the environment.
    ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)


BUG_STATUS, USER_ERROR_STATUS = 1, 2
LOST_STATUS = 75  # EX_TEMPFAIL of sysexits.h: another try may succeed
_SAVED_STATUS = 128 + signal.SIGUSR1
_GRACE_S = 2.0
_KILL_S = 2.0  # a killed process is gone in milliseconds unless it hangs in the kernel
_STACKS_S = 10.0  # of ranks that are not stopped, on machines that others use
_FAILED = "failed"  # in a job's scratch directory: the name of the process that failed first
_DYING_S = 0.2  # a killed process can be reaped at most this long after its connections are gone
_POLL_S = 0.5  # a signal that arrives just before a wait is noticed at the latest after this


class JobError(ExecutionError):
    """A process of the job failed. It has printed the `cause` if it could. `exit_status` is that of the whole job.
    `is_final`: another start would end the same way."""

    def __init__(
        self, message: str, exit_status: int = LOST_STATUS, cause: str = "", *, is_final: bool = False
    ) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.cause = cause or message
        self.is_final = is_final


def failure_status(error: BaseException) -> int:
    """Return the exit status of a process or job that ends with an error."""
    if isinstance(error, JobError):
        return error.exit_status
    if not isinstance(error, DynaPipeError):
        return BUG_STATUS
    return LOST_STATUS if error.may_pass else USER_ERROR_STATUS


class Supervised:
    """A child process that ends with this one; a context manager that ends it. Make it with `fork` or `spawn`."""

    def __init__(
        self, name: str, pid: int, popen: subprocess.Popen[bytes] | None = None, stacks: int = -1, words: int = -1
    ) -> None:
        self.name = name
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.return_code: int | None = None
        self._popen = popen
        self._stacks, self._words = stacks, words
        self._owner_pid = os.getpid()

    @classmethod
    def fork(cls, name: str, main: Callable[[], int], is_first: Callable[[], bool] = lambda: True) -> Supervised:
        """Run `main` in a copy of this process; its result is the exit status.

        A DynaPipeError prints `name: message` and gives status 2, or 75 if another start may succeed; another exception
        prints its traceback and gives status 1. They are printed only if `is_first()` says that no other process of the
        job failed before. The child ignores SIGINT and SIGHUP, since this process decides what they mean, and never
        returns into the caller's stack.
        """
        parent_pid = supervising_pid()
        sys.stdout.flush()
        sys.stderr.flush()
        stacks, words = os.memfd_create("stacks"), os.memfd_create("words")
        with ending_signals_blocked():
            pid = os.fork()
            if pid == 0:
                _run_child(name, main, is_first, parent_pid, stacks, words)
            return cls(name, pid, stacks=stacks, words=words)

    @classmethod
    def spawn(
        cls,
        name: str,
        command: Sequence[str],
        *,
        stdin: bytes | int = b"",
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Supervised:
        """Run another program with `stdin` (at most 64 KiB, or a descriptor) as its standard input, `environment` added
        to that of this process, and the descriptor `stderr` as its standard error (None: that of this process).

        Secrets belong in `stdin`, since everybody on the machine can read arguments.
        """
        if isinstance(stdin, bytes) and len(stdin) > 65536:
            raise ConfigError(f"{name} would get {len(stdin)} B on standard input but a pipe holds 65536 B: use a file")
        try:
            popen = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if isinstance(stdin, bytes) else stdin,
                stderr=stderr,
                env=child_environment(environment),
                process_group=0,  # Ctrl-C reaches this process, which then ends the job in order
                preexec_fn=before_exec(),
            )
        except OSError as error:
            raise ExecutionError(f"{name} cannot be started ({error.strerror}): check {command[0]!r}") from error
        child = cls(name, popen.pid, popen)
        if isinstance(stdin, bytes):
            assert popen.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: whoever watches it reports that
                popen.stdin.write(stdin)
                popen.stdin.close()
        return child

    def poll(self) -> int | None:
        """None while it runs, then its exit status, or minus the signal that killed it."""
        if self.return_code is None and self._popen is not None:
            self.return_code = self._popen.poll()
        elif self.return_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.return_code = os.waitstatus_to_exitcode(status)
        return self.return_code

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it if it still runs, and never a later process with the same id."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def verdict(self) -> str:
        """What became of it, for a message."""
        code = self.poll()
        if code is None:
            return f"{self.name} still runs"
        if code >= 0:
            return f"{self.name} ended with exit status {code}" + (" (see its message above)" if code else "")
        try:
            name = f"signal {-code} ({signal.Signals(-code).name})"
        except ValueError:  # a real-time signal
            name = f"signal {-code}"
        reason = ": if nobody sent it, memory ran out; lower the token budget" if code == -signal.SIGKILL else ""
        return f"{self.name} was killed by {name}{reason}"

    def stack_text(self) -> str:
        """The stacks that it has written so far on SIGUSR2 (forked processes only)."""
        return _memory_text(self._stacks)

    def last_words(self) -> str:
        """The message of the error that ended it, in one line (forked processes only)."""
        return _memory_text(self._words)

    def close(self, grace_s: float = _GRACE_S) -> None:
        """End it: SIGTERM, and SIGKILL after `grace_s`."""
        end_all([self], grace_s)

    def release(self) -> None:
        """Close the file descriptors of a process that has ended."""
        for descriptor in (self.pidfd, self._stacks, self._words):
            if descriptor >= 0:
                os.close(descriptor)
        self.pidfd = self._stacks = self._words = -1

    @property
    def owned(self) -> bool:
        """Whether the current process started it; false in a fork of that process."""
        return self.pidfd >= 0 and os.getpid() == self._owner_pid

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def run_local(
    rank_main: Callable[[RankEnv], int],
    world_size: int,
    *,
    timeout_s: float | None = None,
    grace_s: float = _GRACE_S,
    save_s: float = 0.0,
    stopped_s: float = math.inf,
) -> None:
    """Run `rank_main` in `world_size` forked ranks and return when all have ended with status 0.

    Before the call, import what the ranks need and set the number of threads. The first rank that fails, or is stopped
    for `stopped_s`, ends all ranks (SIGTERM, then SIGKILL after `grace_s`); JobError names it. At `timeout_s` every
    rank's stack is printed first. Signals of `ENDING` to this process end the ranks and raise KeyboardInterrupt or
    SystemExit. With `save_s` they first reach the ranks as SIGUSR1, which then have that long to end by
    themselves, or until Ctrl-C comes again; where all were ending well, nothing is raised. SIGUSR2 prints every rank's
    stack.
    """
    if world_size < 1:
        raise ConfigError(f"the number of ranks is {world_size} but must be at least 1")
    ranks: list[Supervised] = []
    with ending_signals_raise(), stacks_asked_for() as stacks_asked, ScratchDirectory() as scratch:
        init_method = f"file://{scratch.path / 'rendezvous'}"  # torch does not decode %20 in the path
        port = free_port()  # for libraries that need one; ranks themselves meet in a file
        try:
            with ending_signals_blocked():  # a rank outside the list would never be ended
                for rank in range(world_size):
                    env = RankEnv(
                        rank=rank,
                        world_size=world_size,
                        local_rank=rank,
                        local_world_size=world_size,
                        master_addr="127.0.0.1",
                        master_port=port,
                        init_method=init_method,
                    )
                    name = f"rank {rank}"
                    is_first = partial(_claim_first_failure, scratch.path / _FAILED, name)
                    ranks.append(Supervised.fork(name, partial(_rank, rank_main, env), is_first))
            _watch(ranks, timeout_s, StandingStill(stopped_s), scratch.path / _FAILED, stacks_asked)
        except (SystemExit, KeyboardInterrupt):
            if not save_s or not _ended_well(ranks, save_s):
                raise
        finally:
            end_all(ranks, grace_s)


def _ended_well(ranks: Sequence[Supervised], save_s: float) -> bool:
    """Ask all ranks to save, and wait until all have ended, one has failed, Ctrl-C comes again, or the time is over.
    Whether all have done what they had to, as nothing was left when they were asked."""
    deadline_s = time.monotonic() + save_s
    say_at_once(asked_to_end(save_s))
    for rank in ranks:
        rank.send_signal(signal.SIGUSR1)
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline_s and not interrupted_again():
        _wait_for_all(ranks, min(_POLL_S, max(0.0, deadline_s - time.monotonic())))
        if any(rank.poll() not in (None, 0, _SAVED_STATUS) for rank in ranks):
            break
    if time.monotonic() >= deadline_s and any(rank.poll() is None for rank in ranks):
        say_at_once(f"the ranks did not end within {save_s:g} s and are ended now: steps since the last save are lost")
    return bool(ranks) and all(rank.poll() == 0 for rank in ranks)


def asked_to_end(grace_s: float) -> str:
    """What a signal to end is answered with."""
    return f"asked to end: the ranks finish their step and save, for at most {grace_s:g} s; Ctrl-C ends them at once"


def end_all(processes: Sequence[Supervised], grace_s: float = _GRACE_S) -> None:
    """End all processes that still run: SIGTERM, then SIGKILL after `grace_s`. Ending signals to this process wait."""
    own_children = [process for process in processes if process.owned]
    with ending_signals_blocked():
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_S)):
            for process in own_children:
                process.send_signal(number)
            _wait_for_all(own_children, wait_s)
    for process in own_children:
        if process.poll() is None:
            say_at_once(f"{process.name} (pid {process.pid}) hangs in the kernel and could not be ended")
        process.release()


def _claim_first_failure(place: Path, name: str) -> bool:
    """Whether this is the first call of the job; the file at `place` keeps the first caller's name."""
    try:
        with place.open("x") as file:
            file.write(name)
    except FileExistsError:
        return False
    return True


def _watch(
    ranks: Sequence[Supervised], timeout_s: float | None, still: StandingStill, first: Path, stacks_asked: Event
) -> None:
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pidfd, selectors.EVENT_READ)
        while running := [rank for rank in ranks if rank.poll() is None]:
            raise_if_lost()
            remaining_s = _POLL_S if deadline_s is None else deadline_s - time.monotonic()
            if remaining_s <= 0:
                say_stacks([_stack_of(rank) for rank in running])
                names = ", ".join(rank.name for rank in running)
                raise JobError(
                    f"not ended after {timeout_s:g} s: {names} (stacks above); look there, or allow more time"
                )
            if stacks_asked.is_set():
                stacks_asked.clear()
                say_stacks([_stack_of(rank) for rank in running])
            for key, _ in selector.select(min(_POLL_S, remaining_s)):
                selector.unregister(key.fd)
            _raise_first_failure(ranks, first)
            for pid, name in still.seen((rank.pid, rank.name) for rank in ranks):
                raise JobError(f"{name} (pid {pid}) was stopped for {still.limit_s:g} s, by SIGSTOP or a debugger")
    _raise_first_failure(ranks, first)


def _raise_first_failure(processes: Sequence[Supervised], first: Path) -> None:
    if failed := [process for process in processes if process.poll()]:
        with suppress(OSError):  # the process that has printed why; it may still be ending
            name = first.read_text()
            reporters = [process for process in processes if process.name == name]
            _wait_for_all(reporters, _POLL_S)
            failed = [process for process in reporters if process.poll()] or failed
        # A killed process is the cause of the other failures, even if another one has reported first: no failure sends
        # SIGKILL. Its connections close a little before it can be reaped.
        deadline_s = time.monotonic() + _DYING_S
        while not (killed := [p for p in processes if p.poll() == -signal.SIGKILL]) and time.monotonic() < deadline_s:
            time.sleep(_DYING_S / 20)
        # Of several that ended at once, one with an exit status tells more than one that a signal ended.
        culprit = max(killed[:1] or failed, key=lambda process: (process.poll() or 0) > 0)
        code = culprit.poll()
        status = code if code in (BUG_STATUS, USER_ERROR_STATUS) else LOST_STATUS
        raise JobError(culprit.verdict(), status, culprit.last_words())


def _wait_for_all(processes: Collection[Supervised], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for process in processes:
            if process.poll() is None:
                selector.register(process.pidfd, selectors.EVENT_READ)
        while selector.get_map() and (remaining_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_s):
                selector.unregister(key.fd)


@dataclass(frozen=True, slots=True)
class AskedStack:
    """A rank that writes its stacks on request, each time behind what its file holds: `text`."""

    title: str
    ask: Callable[[], None]
    text: Callable[[], str]


def say_stacks(ranks: Sequence[AskedStack]) -> None:
    """Print each rank's stacks, once all have written them. They write to files, so the lines of two do not mix."""
    written = [len(rank.text()) for rank in ranks]
    for rank in ranks:
        rank.ask()
    deadline_s = time.monotonic() + _STACKS_S
    texts: list[str] = []
    while time.monotonic() < deadline_s:
        before, texts = texts, [rank.text()[start:] for rank, start in zip(ranks, written, strict=True)]
        if all(texts) and texts == before:
            break
        time.sleep(0.05)
    for rank, text in zip(ranks, texts, strict=True):
        say_at_once(f"--- {rank.title}:\n{text.rstrip() or 'it gave no stack'}")


def _stack_of(rank: Supervised) -> AskedStack:
    return AskedStack(f"{rank.name} (pid {rank.pid})", partial(rank.send_signal, signal.SIGUSR2), rank.stack_text)


def _rank(rank_main: Callable[[RankEnv], int], env: RankEnv) -> int:
    env.export()
    use_interface("lo")
    return rank_main(env)


def _run_child(
    name: str, main: Callable[[], int], is_first: Callable[[], bool], parent_pid: int, stacks: int, words: int
) -> NoReturn:
    status = BUG_STATUS
    try:
        end_with_parent(parent_pid)
        gc.freeze()  # imports live as long as this process: collections need not walk them and copy their pages
        for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to whole groups
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(
                    line_buffering=True, write_through=False
                )  # write whole lines, since ranks share the terminal
        status = main()
    except DynaPipeError as error:
        status = failure_status(error)
        message = f"{name}: {in_one_line(error)}"
        os.write(words, message.encode())
        if is_first():
            say_at_once(message)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001 - nothing may travel up into the parent's stack
        message = f"{name}: {in_one_line(error)}"
        os.write(words, message.encode())
        if is_first():
            calls = "".join(traceback.format_tb(error.__traceback__)).splitlines()
            say_at_once("\n".join([*(f"{name}: {line}" for line in calls), message]))
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _memory_text(descriptor: int) -> str:
    return "" if descriptor < 0 else os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def say_at_once(text: str) -> None:
    """Write to standard error at once and in one piece, since several processes write there."""
    with suppress(OSError):
        os.write(2, (visible(text.rstrip("\n")) + "\n").encode(errors="backslashreplace"))


@contextmanager
def ended_if_silent(limit_s: float, move: str) -> Iterator[Callable[[str], None]]:
    """Inside, the function takes what is done next. Where one such thing takes longer than `limit_s`, this process
    prints its stacks and raises, or ends with the same words where its main thread hangs. Elsewhere than in the main
    thread nothing is watched.

    Errors: ExecutionError naming what was done, and `move`, what the user may do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda doing: None
        return
    doing, since_s, over = "start", time.monotonic(), threading.Event()

    def sign(what: str) -> None:
        nonlocal doing, since_s
        doing, since_s = what, time.monotonic()

    def fault() -> str:
        return f"{doing} has not ended after {limit_s:g} s (stacks above): {move}"

    def raise_fault(number: int, frame: FrameType | None) -> None:
        raise ExecutionError(fault())

    def watch() -> None:
        while not over.wait(max(0.0, since_s + limit_s - time.monotonic())):
            if time.monotonic() - since_s < limit_s:
                continue
            faulthandler.dump_traceback(file=2, all_threads=True)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            if not over.wait(_GIVE_UP_S):
                say_at_once(f"dynapipe: error: {fault()}")
                os._exit(LOST_STATUS)
            return

    before = signal.signal(signal.SIGALRM, raise_fault)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield sign
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
