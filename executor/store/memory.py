"""A store in this process, and what a wait says when it ends."""

from __future__ import annotations

import threading
import time

from dynapipe_ext.errors import StoreError


class StoreTimeoutError(StoreError):
    """A key that was not put within the time limit of a `Store.get`."""


def overdue(key: str, timeout_s: float, where: str) -> StoreTimeoutError:
    """
    >>> str(overdue("plan/0/3/0/1", 2.0, "unix:///tmp/d/s"))
    "nobody put 'plan/0/3/0/1' into the store at unix:///tmp/d/s within 2.0 s: is its writer running?"
    """
    return StoreTimeoutError(
        f"nobody put {key!r} into the store at {where} within {timeout_s:.1f} s: is its writer running?"
    )


class MemoryStore:
    """Named bytes in this process; for tests and for one-process runs."""

    address: None = None
    namespace = ""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while key not in self._values:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise overdue(key, timeout_s, "memory")
                self._changed.wait(remaining_s)
            return self._values[key]

    def try_get(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def delete(self, *keys: str) -> None:
        with self._changed:
            for key in keys:
                self._values.pop(key, None)

    def info(self) -> dict[str, str]:
        return {"server": "memory", "version": ""}

    def close(self) -> None:
        with self._changed:
            self._values.clear()
