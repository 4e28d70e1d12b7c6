"""Private directories that never outlive their owner for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

_UNFINISHED, _OWNED, _LOCK = "dynapipe-new-", "dynapipe-run-", "lock"


class ScratchDirectory:
    """A directory (mode 0700) under `base`, removed by `close`.

    Its owner holds a file lock in it. An owner that was killed could not clean up, but its lock is gone: the next
    ScratchDirectory under the same base removes what it left.
    """

    def __init__(self, base: Path | None = None) -> None:
        base = Path(tempfile.gettempdir()) if base is None else base
        _remove_abandoned(base)
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=base))
        self._owner_pid = os.getpid()
        self._lock = os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only a name that says "owned" is ever judged by its lock, and it says so only once the lock is held.
        self.path = unfinished.rename(base / unfinished.name.replace(_UNFINISHED, _OWNED, 1))

    def close(self) -> None:
        """Remove the directory. Does nothing in a forked child, and nothing the second time."""
        if self._lock < 0 or os.getpid() != self._owner_pid:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> ScratchDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _remove_abandoned(base: Path) -> None:
    for directory in base.glob(f"{_OWNED}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            if directory.lstat().st_uid != os.getuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
