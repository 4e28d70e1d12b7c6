"""The user's own store, as `--store` names it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.launch.env import kv_store_url, store_password

_MOST_URL_BYTES = 4096


def greet_store(address: StoreAddress) -> None:
    """Errors: StoreError for a store that is not there, or refuses the password."""
    open_store(address, namespace="greeting").close()
    if address.scheme == "redis" and address.insecure:
        print(
            f"dynapipe: WARNING: the store at {address} is used without TLS: whoever sees this network can read its"
            " password, and stop the run",
            file=sys.stderr,
        )


def asked_store(given: str | None, password: str | None = None, *, insecure: bool = False) -> StoreAddress | None:
    """The user's own store, by `--store` or else by the variables; None: the run has one of its own."""
    said = given or kv_store_url(tls=not insecure)
    return store_address(said, password, insecure=insecure) if said else None


def store_address(given: str, password: str | None = None, *, insecure: bool = False) -> StoreAddress:
    """The user's own store, by its URL or a file that holds it; `password` comes from the file or the environment,
    rather than the command line, which others see. `insecure` allows a network without TLS."""
    url = given if "://" in given else _url_in(Path(given))
    address = StoreAddress.parse(url, password or store_password(), insecure=insecure)
    if address.password and address.password in given:
        print(
            "dynapipe: the store's password is visible in the process list: pass it in DYNAPIPE_STORE_PASSWORD, or give"
            " --store a file of mode 600 with the URL",
            file=sys.stderr,
        )
    return address


def _url_in(file: Path) -> str:
    try:
        with file.open() as opened:
            mode = os.fstat(opened.fileno()).st_mode
            url = opened.read(_MOST_URL_BYTES).strip()
    except (OSError, ValueError):
        raise ConfigError("--store is neither a URL (redis://, rediss://, unix://) nor a file with one") from None
    if mode & 0o077:
        raise ConfigError(f"--store {file} can be read by others, who would see the password: chmod 600 {file}")
    return url
