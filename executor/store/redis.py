"""A Store on a Redis-compatible server (Redis or Valkey, 6.2 or later).

A key is a list of one element. BLMOVE from a list onto itself waits for that element and leaves it there, so any number
of readers wait on the server, without polling, for a value that is written once. (Pub/sub would lose a message for a
reader that comes late.)
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from dynapipe_ext.errors import ConfigError, StoreError
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.wait import overdue

T = TypeVar("T")

_SLICE_S = 1.0  # the longest single wait on the server: bounds how late a lost connection is noticed
_REPLY_S = 4.0  # a server that says nothing for so long is taken for lost


class RedisStore:
    """Named bytes on a Redis-compatible server, below `namespace`; safe to use from several threads.

    The address of a TLS server takes `?ssl_ca_certs=FILE` and redis-py's other ssl_ options in its query. Keys live
    `ttl_s` seconds from their last put, so an abandoned job leaves nothing behind.

    A lost connection is made again for up to `reconnect_timeout_s` (puts are repeatable, so nothing is done twice),
    also where that goes beyond a `get`'s own limit; then StoreError. The first connection may take `connect_timeout_s`.

    Errors: ConfigError for options that cannot work; StoreError for a server that is away, refuses the password, or
    would be used over a network without one.
    """

    def __init__(
        self,
        address: StoreAddress,
        *,
        namespace: str,
        connect_timeout_s: float = 5.0,
        reconnect_timeout_s: float = 5.0,
        ttl_s: int = 86_400,
    ) -> None:
        if not namespace:
            raise ConfigError("the store's namespace is empty: give each run a name of its own")
        _refuse_open_network(address)
        self.address = address
        self.namespace = namespace
        self.where = address.redacted()
        self._prefix = f"dynapipe/{namespace}/"
        self._patience_s = connect_timeout_s
        self._ttl_ms = max(1, math.ceil(ttl_s * 1000))
        try:
            self._client = redis.Redis.from_url(
                address.url,
                password=address.password or None,
                socket_connect_timeout=min(connect_timeout_s, _REPLY_S),
                socket_timeout=_SLICE_S + _REPLY_S,
                retry=Retry(NoBackoff(), 0),  # `_call` retries: it knows the limit and which calls may be repeated
            )
            self._call("connecting", self._client.ping)
        except (ValueError, TypeError, RedisError) as error:  # the client makes its first connection at the ping
            raise ConfigError(f"store address {self.where} cannot be used: {error}") from error
        self._patience_s = reconnect_timeout_s

    def put(self, key: str, value: bytes) -> None:
        name = self._prefix + key

        def replace() -> None:
            if self._client.lindex(name, 0) == value:
                self._client.pexpire(name, self._ttl_ms)
                return
            # In one transaction, so that no reader meets the list empty or with two elements.
            with self._client.pipeline(transaction=True) as transaction:
                transaction.delete(name)
                transaction.rpush(name, value)
                transaction.pexpire(name, self._ttl_ms)
                transaction.execute()

        self._call(f"putting {key!r}", replace)

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        name = self._prefix + key
        value = self.try_get(key)
        while value is None:
            wait_s = min(_SLICE_S, deadline_s - time.monotonic())
            if wait_s < 1e-3:  # the server's resolution; 0 would mean for ever
                raise overdue(key, timeout_s, self.where)
            value = self._call(f"waiting for {key!r}", partial(self._move, name, round(wait_s, 3)))
        return value

    def try_get(self, key: str) -> bytes | None:
        return _bytes(self._call(f"reading {key!r}", lambda: self._client.lindex(self._prefix + key, 0)))

    def delete(self, *keys: str) -> None:
        if keys:
            names = [self._prefix + key for key in keys]
            self._call(f"deleting {len(keys)} keys", lambda: self._client.delete(*names))

    def info(self) -> dict[str, str]:
        """The server's kind ("valkey" or "redis") and version; "unknown" where an ACL hides them."""
        with contextlib.suppress(StoreError):
            fields = self._call("asking for the version", lambda: self._client.info("server"))
            if isinstance(fields, dict):
                kind = "valkey" if "valkey_version" in fields else "redis"
                return {"server": kind, "version": str(fields.get(f"{kind}_version", "unknown"))}
        return {"server": "redis", "version": "unknown"}

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> RedisStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _move(self, name: str, wait_s: float) -> bytes | None:
        # redis-py declares whole seconds; the server takes fractions since 6.0.
        return _bytes(self._client.blmove(name, name, wait_s, "LEFT", "LEFT"))  # type: ignore[arg-type]

    def _call(self, doing: str, call: Callable[[], T]) -> T:
        """`call()`, again after a lost connection until that has lasted for the patience of this store."""
        lost_since_s: float | None = None
        pause_s = 0.02
        while True:
            try:
                return call()
            except (AuthenticationError, AuthenticationWrongNumberOfArgsError) as error:
                raise StoreError(
                    f"store at {self.where} refuses the password ({error}): give the address the server's own password"
                    " (requirepass, or the ACL user's with user@ in the URL)"
                ) from None
            except NoPermissionError as error:
                raise StoreError(
                    f"store at {self.where} does not permit {doing} ({error}): allow the ACL user the commands"
                    f" @read @write @blocking @transaction @connection on keys {self._prefix}*"
                ) from None
            except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
                now_s = time.monotonic()
                lost_since_s = now_s if lost_since_s is None else lost_since_s
                if now_s + pause_s - lost_since_s > self._patience_s:
                    raise StoreError(
                        f"store at {self.where} did not answer for {self._patience_s:.1f} s while {doing} ({error}):"
                        " is the server running and reachable from this machine?"
                    ) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.5)
            except ResponseError as error:
                raise StoreError(
                    f"store at {self.where} refused {doing}: {error} (needed: Redis 6.2 or any Valkey, a writable"
                    f" primary, and keys {self._prefix}* that no other program uses)"
                ) from None


def _refuse_open_network(address: StoreAddress) -> None:
    if address.scheme != "unix" and not _is_loopback(address.host) and not address.password:
        raise StoreError(
            f"store at {address.redacted()} would be used over the network without a password: set requirepass or an"
            " ACL user on the server and give its password in the address"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bytes(reply: object) -> bytes | None:
    return reply if isinstance(reply, bytes) else None
