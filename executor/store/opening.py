"""Stores: one in this process, and any by its address. Only this module knows which kind a scheme names."""

from __future__ import annotations

import threading
import time

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.store.address import StoreAddress, overdue

RECONNECT_S = 30.0


def open_store(
    address: StoreAddress, *, namespace: str, connect_s: float | None = None, reconnect_s: float = RECONNECT_S
) -> Store:
    """The store at `address`, its keys below `namespace`.

    Connecting may take `connect_s`, also where the server is still to start (left out: 5 s, of one that runs already);
    one that is lost later, or full, is waited for `reconnect_s`.

    Errors: ConfigError for an address or options that cannot work; StoreError for a server that is away or refuses.
    """
    match address.scheme:
        case "redis" | "rediss" | "unix":
            from dynapipe_ext.executor.store.redis import RedisStore  # only who opens one needs its client

            return RedisStore(
                address, namespace=namespace, connect_timeout_s=connect_s, reconnect_timeout_s=reconnect_s
            )
        case scheme:
            raise ConfigError(f"no store is known for {scheme}://: give redis://, rediss:// or unix://")


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
