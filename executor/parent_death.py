"""Processes that end with the process that started them, however that one ends (Linux, prctl(2)), and their ends."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill the calling process when its parent ends. Call it first thing after a fork.

    `parent_pid` is what the parent read before the fork: where it ended in between, the caller ends at once.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def supervising_pid() -> int:
    """This process's id, for `end_with_parent` in a child that is about to be started.

    The kernel watches the thread that forks, not the process: so only the main thread may start such children.
    """
    if threading.get_native_id() != os.getpid():
        raise RuntimeError("a process that must end with this one has to be started from the main thread")
    return os.getpid()


def before_exec(*, from_lasting_thread: bool = False) -> Callable[[], None]:
    """A `preexec_fn` for Popen with which the child ends with this process, and ignores SIGUSR2 until it listens: who
    asks for stacks asks whole groups of processes.

    Used by the main thread, or `from_lasting_thread`: another one that stays for as long as the child.
    """
    parent_pid = os.getpid() if from_lasting_thread else supervising_pid()

    def run() -> None:
        end_with_parent(parent_pid)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    return run


def parent_of(pid: int) -> int:
    """The process that started another, or took it over; 0 where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])  # the program's name, in brackets, may hold anything
    except OSError:
        return 0


def ends_within(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether a child has ended, or does so in that time; a wait that costs nothing meanwhile."""
    if process.poll() is not None:
        return True
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:  # another thread has waited for it
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)
