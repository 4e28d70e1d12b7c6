"""What a chat template may take: it is a program, and loops in it, or texts that double, end nowhere."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_MOST_CPU_S, _MOST_BYTES = 5.0, 256 << 20  # for one chat
_AGAIN_S = 0.1  # an interruption may fall where Python ignores errors, as in a `__del__`: so it comes again
_Result = TypeVar("_Result")
# The limit on memory is the process's: another thread that takes memory as it likes does so under this.
MEMORY_UNLIMITED = threading.Lock()


def in_template_limits(render: Callable[[], _Result]) -> _Result:
    """What `render` returns. In the main thread it may take so much more CPU time and memory, as for one chat; other
    threads cannot be interrupted, and have no limits. Errors: those of `render`, TimeoutError, MemoryError."""
    if threading.current_thread() is not threading.main_thread():
        return render()
    with MEMORY_UNLIMITED:
        try:
            return _limited(render)
        except MemoryError:  # no limit is on any more: its message takes memory, too
            raise MemoryError(f"it takes more than {_MOST_BYTES >> 20} MiB") from None


def _limited(render: Callable[[], _Result]) -> _Result:
    """A context manager would not do: an interruption between the end of its block and its own next line would leave
    the limits on."""
    interrupts = True

    def interrupt(*_: object) -> None:
        if interrupts:
            raise TimeoutError(f"it takes more than {_MOST_CPU_S:g} s of CPU time")

    own_limits = resource.getrlimit(resource.RLIMIT_AS)
    taken_bytes = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    most_bytes = [taken_bytes + _MOST_BYTES, *(limit for limit in own_limits if limit != resource.RLIM_INFINITY)]
    own_handler = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(most_bytes), own_limits[1]))
        signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_CPU_S, _AGAIN_S)
        return render()
    finally:  # the memory first: what follows, and whoever is interrupted in it, needs some
        interrupts = False
        try:
            resource.setrlimit(resource.RLIMIT_AS, own_limits)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, signal.SIG_DFL if own_handler is None else own_handler)
