"""Signals that ask a job to end, turned into exceptions so that every `with` block on the way out is closed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def ending_signals_raise() -> Iterator[None]:
    """Inside, SIGINT raises KeyboardInterrupt, SIGTERM and SIGUSR1 raise SystemExit (143, 138), in the main thread.

    A second such signal is ignored: the first one's clean-up is bounded, and cut short it would leave processes.
    Nested use and use outside the main thread change nothing.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) in (
        _raise,
        _ignore,
    ):
        yield
        return
    before = {number: signal.signal(number, _raise) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not installed from Python, which cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def ending_signals_blocked() -> Iterator[None]:
    """Inside, ending signals wait: for a fork, whose child must not run the parent's handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # It blocks, and only then runs the handler of a signal that came before: that may raise, with all blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def stacks_asked_for() -> Iterator[threading.Event]:
    """Inside, SIGUSR2 to this process sets the event; outside the main thread, which alone can listen, nothing does."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGUSR2, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL if before is None else before)


def _raise(number: int, frame: FrameType | None) -> None:
    for ending in ENDING:
        signal.signal(ending, _ignore)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Swallows a signal. A handler, not SIG_IGN: processes started during the clean-up must not inherit deafness."""
