"""A store by its address: the one place that knows which kind of store a scheme names."""

from __future__ import annotations

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.store.address import StoreAddress

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
