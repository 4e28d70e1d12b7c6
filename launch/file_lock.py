"""Locks between processes that end with their holder, however that ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from dynapipe_ext.errors import ConfigError

_POLL_S = 0.1


class FileLock:
    """Held from its making to `close`; forks of the holder hold it too. The file stays, with the holder's pid in it.

    Errors: ConfigError, naming the process that holds it, where it is not free within `wait_s`; and where it cannot be
    made at all.
    """

    def __init__(self, path: Path, what: str, *, wait_s: float = 0.0) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be made ({error.strerror}): choose another directory") from error
        try:
            self._take(what, time.monotonic() + wait_s)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, str(os.getpid()).encode(), 0)
        except BaseException:
            os.close(self._file)
            raise

    def _take(self, what: str, deadline_s: float) -> None:
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() >= deadline_s:
                    pid = os.pread(self._file, 20, 0).decode(errors="replace") or "unknown"
                    raise ConfigError(
                        f"{what} is in use by another run (process {pid}): wait for it, or choose another directory"
                    ) from error
                time.sleep(_POLL_S)
            except OSError as error:
                raise ConfigError(
                    f"{what} cannot be locked ({error.strerror}): choose a directory on a file system with locks"
                ) from error

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock whose file is at `path`."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
