"""Private files of a process: scratch folders, secrets and locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from types import TracebackType

from dynapipe_ext.durable_files import open_kept
from dynapipe_ext.errors import ConfigError

_UNFINISHED, _OWNED, _LOCK = "dynapipe-new-", "dynapipe-run-", "lock"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class ScratchDirectory:
    """A directory (mode 0700) under `base`, removed by `close`.

    Its owner holds a lock on it, which lasts as long as both: no file of it can be lost, and systemd-tmpfiles leaves
    locked directories alone. A killed owner cannot clean up, but its lock is released. The next ScratchDirectory under
    the same base removes the directory at its own end, with files that children of the killed owner wrote later.
    """

    def __init__(self, base: Path | None = None) -> None:
        base = Path(tempfile.gettempdir()) if base is None else base
        _remove_abandoned(base)
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=base))
        self._owner_pid = os.getpid()
        # Of the two locks earlier versions know the file's alone.
        self._locks = [os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)]
        self._locks.append(os.open(unfinished, _DIRECTORY))
        for lock in self._locks:
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Only directories with the "owned" name are judged by their locks, and they get that name once the lock is
        # held.
        self.path = unfinished.rename(base / unfinished.name.replace(_UNFINISHED, _OWNED, 1))

    def close(self) -> None:
        """Remove the directory. Does nothing in a forked child, and nothing the second time."""
        if not self._locks or os.getpid() != self._owner_pid:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())
        _remove_abandoned(self.path.parent)

    def __enter__(self) -> ScratchDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _remove_abandoned(base: Path) -> None:
    for directory in base.glob(f"{_OWNED}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            if directory.lstat().st_uid != os.getuid():
                continue
            lock = os.open(directory, _DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (directory / _LOCK).exists() and is_held(directory / _LOCK):
                    continue  # of an earlier version, whose lock is a file
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


_MOST_BYTES = 4096
FEWEST_CHARACTERS = 16  # of a secret: who sees what is made of it could try all shorter ones


def is_guessable(secret: str) -> bool:
    """Whether a secret is so short, or empty, that nothing made of it may be shown."""
    return len(secret) < FEWEST_CHARACTERS


def read_secret(path: Path, from_environment: str | None) -> str:
    """The only line of a file that nobody else can read. A password `from_environment` must be the same.

    Errors: ConfigError, which never shows the file's content.
    """
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the secret file {path} cannot be read ({error.strerror}): put it on every node") from error
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"the secret file {path} is open to others: chown it to yourself and chmod 600 it")
    try:
        lines = text.decode().splitlines()
    except UnicodeDecodeError:
        lines = []
    if len(lines) != 1 or not lines[0] or len(text) > _MOST_BYTES:
        raise ConfigError(f"the secret file {path} must be one line of text of at most {_MOST_BYTES} B, the password")
    if from_environment is not None and from_environment != lines[0]:
        raise ConfigError(f"the secret file {path} and DYNAPIPE_STORE_PASSWORD differ: leave out one of them")
    return lines[0]


_POLL_S = 0.1


class FileLock:
    """A lock that is held until `close`; forks of the holder hold it too. Its file stays, with the holder's pid in it.

    Errors: ConfigError naming the holder where the lock is not free within `wait_s`, and where the file cannot be made.
    """

    def __init__(self, path: Path, what: str, *, wait_s: float = 0.0) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_kept(path, os.O_RDWR | os.O_CREAT)
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
    """Whether a process holds the lock whose file is at `path`. Nobody holds what is not a file."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
