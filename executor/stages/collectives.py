"""Collectives inside a stage (tensor and data parallel) have no instruction that could name them when they fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dynapipe_ext.errors import ExecutionError

# What gloo and NCCL say of a peer that is late or gone; both raise plain RuntimeErrors (torch 2.6 to 2.13).
_SIGNS = ("timed out", "timeout", "connection closed", "connection reset", "gloo", "nccl", "broken pipe", "socket")


@contextmanager
def named_collectives(what: str) -> Iterator[None]:
    """Turn a backend's error within into an ExecutionError that says what this rank was doing."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error).lower() for sign in _SIGNS):
            raise
        reason = str(error).splitlines()[0]
        raise ExecutionError(
            f"{what}: another rank of its tensor or data parallel group is late or gone ({reason}):"
            " look at the first message of the other ranks"
        ) from error
