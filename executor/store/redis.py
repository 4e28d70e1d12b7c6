"""A Store on a Redis-compatible server (Redis or Valkey, 6.2 or later).

A key is a list of one element. BLMOVE from a list onto itself waits for that element and leaves it there, so any number
of readers wait on the server, without polling, for a value that is written once. (Pub/sub would lose a message for a
reader that comes late.)
"""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
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
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from dynapipe_ext.errors import ConfigError, StoreError, StoreRefusedError
from dynapipe_ext.executor.store.address import StoreAddress, overdue

T = TypeVar("T")

_SLICE_S = 1.0  # the longest single wait on the server: bounds how late a lost connection is noticed
_CONNECT_S = 5.0
_TTL_MS = 86_400_000
_NOBODY = (ConnectionRefusedError, FileNotFoundError)  # behind a connection error: no server, rather than a slow one
_REPLY_S = 4.0  # a server that says nothing for so long is taken for lost
_FULL_S = 0.05  # between looks for a value in a full server
_MOST_PAUSE_S = 0.5  # between attempts, which begin at once and come further and further apart
# Lost, full, or a replica after a failover: it may pass.
_PASSING = (redis.ConnectionError, redis.TimeoutError, OSError, OutOfMemoryError, ReadOnlyError)

# What a server says to readers while it becomes a replica, or while its cluster or disk is not as it should be.
_PASSING_REFUSALS = ("UNBLOCKED", "CLUSTERDOWN", "MASTERDOWN", "MISCONF", "NOREPLICAS", "TRYAGAIN")


class RedisStore:
    """Named bytes on a Redis-compatible server, below `namespace`; safe to use from several threads.

    The address of a TLS server takes `?ssl_ca_certs=FILE` and redis-py's other ssl_ options in its query. Keys live
    a day from their last put, so an abandoned job leaves nothing behind.

    A lost connection is made again for up to `reconnect_timeout_s` (puts are repeatable, so nothing is done twice),
    also where that goes beyond a `get`'s own limit; then StoreError. A full server is given as long to have room again.
    The first connection may take 5 s, and where nobody listens the server is away; with `connect_timeout_s` it may take
    that long, also of a server that is still to start. What a server held that was started again, or flushed, is gone.

    Errors: ConfigError for options that cannot work; StoreError for a server that is away, full, refuses the password,
    or would be used over a network without one or in the clear.
    """

    def __init__(
        self,
        address: StoreAddress,
        *,
        namespace: str,
        connect_timeout_s: float | None = None,
        reconnect_timeout_s: float = 5.0,
    ) -> None:
        if not namespace:
            raise ConfigError("the store's namespace is empty: give each run a name of its own")
        _refuse_open_network(address)
        self.address = address
        self.namespace = namespace
        self.where = address.redacted()
        self._prefix = f"dynapipe/{namespace}/"
        first_s = _CONNECT_S if connect_timeout_s is None else connect_timeout_s
        self._patience_s, self._awaits_start, self._has_answered = first_s, connect_timeout_s is not None, False
        try:
            trusted = {"ssl_ca_data": address.ca_pem} if address.ca_pem else {}
            self._client = redis.Redis.from_url(
                address.url,
                **trusted,
                password=address.password or None,
                socket_connect_timeout=min(first_s, _REPLY_S),
                socket_timeout=_SLICE_S + _REPLY_S,
                retry=Retry(NoBackoff(), 0),  # `_call` retries: it knows the limit and which calls may be repeated
            )
            self._call("connecting", self._client.ping)
        except (ValueError, TypeError, RedisError) as error:  # the client makes its first connection at the ping
            raise ConfigError(f"store address {self.where} cannot be used: {error}") from error
        self._patience_s, self._awaits_start, self._has_answered = reconnect_timeout_s, True, True

    def put(self, key: str, value: bytes) -> None:
        name = self._prefix + key

        def replace() -> None:
            if self._client.lindex(name, 0) == value:
                self._client.pexpire(name, _TTL_MS)
                return
            # In one transaction, so that no reader meets the list empty or with two elements.
            with self._client.pipeline(transaction=True) as transaction:
                transaction.delete(name)
                transaction.rpush(name, value)
                transaction.pexpire(name, _TTL_MS)
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
        try:
            # redis-py declares whole seconds; the server takes fractions since 6.0.
            return _bytes(self._client.blmove(name, name, wait_s, "LEFT", "LEFT"))  # type: ignore[arg-type]
        except OutOfMemoryError:  # a full server refuses what could write, though this does not
            time.sleep(min(wait_s, _FULL_S))
            return _bytes(self._client.lindex(name, 0))

    def _call(self, doing: str, call: Callable[[], T]) -> T:
        """`call()`, again after what may pass until that has lasted for the patience of this store."""
        failing_since_s: float | None = None
        pause_s = 0.02
        while True:
            try:
                return call()
            except (AuthenticationError, AuthenticationWrongNumberOfArgsError) as error:
                raise StoreRefusedError(
                    f"store at {self.where} refuses the password ({error}): give the address the server's own password"
                    " (requirepass, or the ACL user's with user@ in the URL)"
                ) from None
            except NoPermissionError as error:
                raise StoreRefusedError(
                    f"store at {self.where} does not permit {doing} ({error}): allow the ACL user the commands"
                    f" @read @write @blocking @transaction @connection on keys {self._prefix}*"
                ) from None
            except _PASSING as error:
                if not self._has_answered and (why := _refusal_of_tls(error.__context__)):
                    raise StoreRefusedError(f"store at {self.where} cannot be used over TLS: {why}") from None
                if not self._awaits_start and isinstance(error.__context__, _NOBODY):
                    raise self._absent(error) from None
                now_s = time.monotonic()
                failing_since_s = now_s if failing_since_s is None else failing_since_s
                if now_s + pause_s - failing_since_s > self._patience_s:
                    raise self._failing(error, doing) from None
                if isinstance(error, ReadOnlyError):  # the address may lead to the new primary by now
                    self._client.connection_pool.disconnect()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            except ResponseError as error:
                if str(error).startswith(_PASSING_REFUSALS):
                    raise self._failing(error, doing) from None
                raise StoreRefusedError(
                    f"store at {self.where} refused {doing}: {error} (needed: Redis 6.2 or any Valkey, a writable"
                    f" primary, and keys {self._prefix}* that no other program uses)"
                ) from None

    def _absent(self, error: Exception) -> StoreError:
        return StoreError(
            f"nobody listens at the store's address {self.where} ({error}): start the server, or correct it"
        )

    def _failing(self, error: Exception, doing: str) -> StoreError:
        within = f"for {self._patience_s:.1f} s while {doing}"
        match error:
            case OutOfMemoryError():
                return StoreError(
                    f"store at {self.where} was full (maxmemory) {within}: give it more, or lower prefetch_steps or"
                    " num_workers"
                )
            case ReadOnlyError():
                return StoreError(f"store at {self.where} was a read-only replica {within}: give the primary's address")
            case _:
                return StoreError(
                    f"store at {self.where} did not answer {within} ({error}): is the server running and reachable from"
                    " this machine?"
                )


def _refuse_open_network(address: StoreAddress) -> None:
    if address.scheme == "unix" or _is_loopback(address.host):
        return
    if not address.password:
        raise StoreRefusedError(
            f"store at {address.redacted()} would be used over the network without a password: set requirepass or an"
            " ACL user on the server and give its password in the address"
        )
    if address.scheme == "redis" and not address.insecure:
        raise StoreRefusedError(
            f"store at {address.redacted()} would be used over the network in the clear, where its password can be"
            " read: give a TLS server's rediss:// address, or say that this network is trusted (--insecure-store;"
            " StoreAddress.parse(…, insecure=True))"
        )


def _refusal_of_tls(error: BaseException | None) -> str:
    """Why TLS cannot be had with this server, whenever one asks, and what to do; empty where it may pass."""
    match error:
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate is not trusted ({error.verify_message}): give its authority's as ?ssl_ca_certs=FILE,"
                " and the host by a name that is in it"
            )
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError() | ssl.SSLSyscallError():
            return ""
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
            return "it speaks no TLS there: give the port of its TLS, or redis:// with --insecure-store"
        case ssl.SSLError():
            return f"{error.reason or error}: check the files of ?ssl_ca_certs, ssl_certfile and ssl_keyfile"
        case _:
            return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bytes(reply: object) -> bytes | None:
    return reply if isinstance(reply, bytes) else None
