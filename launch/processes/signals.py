"""What a terminal or a supervisor does to a process: signals, and standard streams that nobody reads any more.

Signals that ask a job to end become exceptions, so that every `with` block on the way out is closed. Processes may
outlive whoever reads their streams, or start without them.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from dynapipe_ext.visible_text import visible

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_num_blocks = 0  # blocks of `ending_signals_blocked` around the main thread
_waiting = 0  # a signal that arrived inside such a block: a thread without the block took it for the process
_raised = 0  # the signal that has raised since handlers were installed
_interrupted_again = False  # Ctrl-C came after the signal that has raised
_GONE = (errno.EIO, errno.EPIPE, errno.EBADF)  # a terminal that was closed, a reader that has ended
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, or what the user may have, that a log lies on
_ends_anyway = False  # of `end_undisturbed`


@contextlib.contextmanager
def ending_signals_raise() -> Iterator[None]:
    """Inside, SIGINT raises KeyboardInterrupt, SIGTERM, SIGUSR1 and SIGHUP raise SystemExit (143, 138, 129), in the
    main thread. A SIGHUP that is ignored (by nohup) stays so.

    A second such signal does not raise: the clean-up after the first one is bounded, and an interrupted clean-up would
    leave processes behind. `interrupted_again` tells of a second Ctrl-C. Nested use and use outside the
    main thread change nothing.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) in (
        _raise,
        _ignore,
    ):
        yield
        return
    global _raised, _interrupted_again, _ends_anyway
    before = {number: signal.signal(number, _raise) for number in _heard()}
    try:
        yield
    finally:
        _raised, _interrupted_again, _ends_anyway = 0, False, False
        for number, handler in before.items():
            # None: a handler that was not installed from Python, which cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def end_undisturbed() -> None:
    """From now on, until `ending_signals_raise` is left, these signals raise nothing: this process has failed, ends in
    a moment, and must first write its error and its records whole."""
    global _ends_anyway
    _ends_anyway = True


def raise_if_lost() -> None:
    """Raise a signal's exception again where it was lost in a destructor or a callback from C.

    Loops that wait for the job call this, so that they cannot wait forever.
    """
    if _raised:
        raise _ending(_raised)


def interrupted_again() -> bool:
    """Whether Ctrl-C came once more after an ending signal: nobody wants to wait for a save."""
    return _interrupted_again


@contextlib.contextmanager
def ending_signals_blocked() -> Iterator[None]:
    """Inside, ending signals wait. Forks need it: the child must not run the parent's handlers, and Python's hooks
    around a fork would swallow their exceptions."""
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
    """Inside, SIGUSR2 to this process sets the event. Only the main thread can listen; in others nothing sets it."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    with _stacks_wait():
        shows_own = faulthandler.unregister(signal.SIGUSR2)  # type: ignore[func-returns-value]  # a bool, whatever typeshed says
        before = signal.signal(signal.SIGUSR2, lambda *_: requested.set())
    try:
        yield requested
    finally:
        with _stacks_wait():
            signal.signal(signal.SIGUSR2, signal.SIG_DFL if before is None else before)
            if shows_own:
                show_own_stacks()


def show_own_stacks() -> None:
    """From now on SIGUSR2 prints the stacks of this process, which goes on, and at its very end is ignored. Outside
    `stacks_asked_for` no ranks run."""
    with _stacks_wait():
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # what the interpreter puts back when it ends
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


@contextlib.contextmanager
def _stacks_wait() -> Iterator[None]:
    """Inside, SIGUSR2 waits, as between two handlers it would kill."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heard() -> list[signal.Signals]:
    return [number for number in ENDING if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def _raise(number: int, frame: FrameType | None) -> None:
    global _raised, _waiting
    if _ends_anyway:
        return
    if _num_blocks:
        _waiting = _waiting or number
        return
    for ending in _heard():
        signal.signal(ending, _ignore)
    _raised = number
    raise _ending(number)


def _ending(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Note a second Ctrl-C. A handler instead of SIG_IGN, which processes started during the clean-up would inherit."""
    global _interrupted_again
    _interrupted_again = _interrupted_again or number == signal.SIGINT


def _forget() -> None:
    global _num_blocks, _waiting, _raised, _interrupted_again
    _num_blocks = _waiting = _raised = 0
    _interrupted_again = False


os.register_at_fork(after_in_child=_forget)  # signals to the parent do not concern the child


def complete_streams() -> None:
    """Open those of the three standard descriptors that are closed, on /dev/null. Else the next opened files would get
    their numbers, and output for a standard stream would be written into these files. Call this before anything is
    opened."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def show_what_terminals_obey() -> None:
    """From now on what is printed shows control characters as escapes, whoever prints it. Consoles of rich, which move
    the cursor themselves, do so for their text (`tools/console.py`). Streams of tests stay as they are."""
    sys.stdout, sys.stderr = _visible(sys.stdout), _visible(sys.stderr)


class _VisibleStream(io.TextIOWrapper):
    """A standard stream that shows control characters as escapes, but keeps a carriage return at the beginning of what
    is written: progress bars use it."""

    def write(self, text: str, /) -> int:
        begin = "\r" * text.startswith("\r")
        super().write(begin + visible(text.removeprefix(begin)))
        return len(text)

    @property
    def rich_proxied_file(self) -> _AsItIs:
        """Where rich writes."""
        return _AsItIs(self)


class _AsItIs:
    """A visible stream to which everything is written as it is."""

    def __init__(self, stream: _VisibleStream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _visible(stream: TextIO) -> TextIO:
    if type(stream) is not io.TextIOWrapper or stream.closed:
        return stream
    try:
        outlives = isinstance(getattr(stream.buffer, "raw", None), _Outliving)
        raw = (_Outliving if outlives else io.FileIO)(stream.fileno(), "w", closefd=False)
    except OSError:  # of a test
        return stream
    stream.flush()
    return _in_place_of(
        stream,
        _VisibleStream(
            io.BufferedWriter(raw), stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through
        ),
    )


def _in_place_of(stream: TextIO, made: TextIO) -> TextIO:
    """Return `made`, which keeps the stream whose descriptor it has: if nothing did, that would be closed."""
    made.replaced = stream  # type: ignore[attr-defined]
    return made


def outlive_readers() -> None:
    """From now on what is written to a standard stream that nobody reads any more is lost, and while the disk of a log
    is full: an error would end a run that has not saved. Forks of this process inherit that. A reader that only
    rests is waited for, also by a stream that does not block."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


class _Outliving(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            while (written := super().write(data)) is None:  # the pipe is full and was told not to block
                select.select([], [self], [])
        except OSError as error:
            if error.errno not in (*_GONE, *_FULL):
                raise
            return memoryview(data).nbytes
        return written


def _outliving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or stream.closed:
        return stream
    try:
        raw = _Outliving(stream.fileno(), "w", closefd=False)
    except OSError:  # of a test
        return stream
    stream.flush()
    kind = _VisibleStream if isinstance(stream, _VisibleStream) else io.TextIOWrapper
    made = kind(io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True)
    return _in_place_of(stream, made)
