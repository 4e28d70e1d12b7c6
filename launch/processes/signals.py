"""Signals that ask a job to end, turned into exceptions so that every `with` block on the way out is closed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_num_blocks = 0  # of `ending_signals_blocked` that the main thread is in
_waiting = 0  # the signal that came there: another thread, which has not blocked it, took it for the process
_raised = 0  # the signal that has raised since handlers were installed


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
    global _raised
    before = {number: signal.signal(number, _raise) for number in ENDING}
    try:
        yield
    finally:
        _raised = 0
        for number, handler in before.items():
            # None: a handler that was not installed from Python, which cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def raise_if_lost() -> None:
    """Raise again what a signal has raised where nothing could pass it on (a destructor, a callback from C), so that
    who waits for the job to end need not wait for ever."""
    if _raised:
        raise _ending(_raised)


@contextlib.contextmanager
def ending_signals_blocked() -> Iterator[None]:
    """Inside, ending signals wait: for a fork, whose child must not run the parent's handlers, and around which Python
    runs hooks that swallow what these raise."""
    global _num_blocks, _waiting
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    block = int(threading.current_thread() is threading.main_thread())
    _num_blocks += block
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        yield
    finally:
        _num_blocks -= block
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if block and not _num_blocks and _waiting:
            number, _waiting = _waiting, 0
            _raise(number, None)


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
    global _raised, _waiting
    if _num_blocks:
        _waiting = _waiting or number
        return
    for ending in ENDING:
        signal.signal(ending, _ignore)
    _raised = number
    raise _ending(number)


def _ending(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Swallows a signal. A handler, not SIG_IGN: processes started during the clean-up must not inherit deafness."""


def _forget() -> None:
    global _num_blocks, _waiting, _raised
    _num_blocks = _waiting = _raised = 0


os.register_at_fork(after_in_child=_forget)  # what was asked of the parent
