"""Forked processes that are stopped at a chosen change of the file system."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def in_child(action: Callable[[], int], errors: Path, timeout_s: int = 60) -> int:
    """The wait status of a forked process that ran `action`, with all it said in a file."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            signal.alarm(timeout_s)
            sys.stderr = sys.stdout = errors.open("w", buffering=1)
            status = action()
        except BaseException:  # noqa: BLE001 (a fork must never return into pytest)
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def at_event(number: int, action: Callable[[], None]) -> None:
    """Have `action` run before the `number`-th change of the file system by this process."""
    seen = 0

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == number:
                if change is os.write:  # a line of the journal, cut in the middle
                    change(args[0], args[1][: len(args[1]) // 2])
                action()
            return change(*args, **kwargs)

        call.__wrapped__ = change  # type: ignore[attr-defined]
        return call

    for name in ("fsync", "replace", "rename", "unlink", "mkdir", "write"):
        setattr(os, name, watched(getattr(os, name)))


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
