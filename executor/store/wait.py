"""The error of a wait that reached its limit: the server answers, but nobody has put the key yet."""

from __future__ import annotations

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
