"""Work of one process that says what it does next, and is ended where it stands still."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.launch.processes.cluster import USER_ERROR_STATUS, say_at_once

_GIVE_UP_S = 5.0  # for the main thread to raise, which a call that hangs in the system never does


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
                os._exit(USER_ERROR_STATUS)
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
