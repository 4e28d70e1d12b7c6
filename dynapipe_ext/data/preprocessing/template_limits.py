"""What a chat template may take: it is a program, and loops in it, or texts that double, end nowhere."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MOST_CPU_S, _MOST_BYTES = 5.0, 256 << 20  # for one chat


@contextmanager
def template_limits() -> Iterator[None]:
    """Inside, a process may take so much more CPU time and memory for one chat, in its main thread; other threads
    cannot be interrupted. Errors: TimeoutError, MemoryError."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own_limits = resource.getrlimit(resource.RLIMIT_AS)
    own_handler = signal.signal(signal.SIGVTALRM, _interrupt)
    taken_bytes = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    limits = [taken_bytes + _MOST_BYTES, *(limit for limit in own_limits if limit != resource.RLIM_INFINITY)]
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), own_limits[1]))
        signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_CPU_S)
        yield
    except MemoryError:
        raise MemoryError(f"it takes more than {_MOST_BYTES >> 20} MiB") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, own_handler)
        resource.setrlimit(resource.RLIMIT_AS, own_limits)


def _interrupt(*_: object) -> None:
    raise TimeoutError(f"it takes more than {_MOST_CPU_S:g} s of CPU time")
