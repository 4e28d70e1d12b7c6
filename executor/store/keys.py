"""The names of everything that planners and ranks of one job put into the store, and the end of a wait for one.

A store has a namespace (one a run); below it a `prefix` keeps data loaders, and the passes of one loader, apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynapipe_ext.errors import StoreError


@dataclass(frozen=True, slots=True)
class Keys:
    """
    >>> Keys("3f2a/1").plan(epoch=0, step=7, dp_rank=1, pp_rank=3)
    '3f2a/1/plan/0/7/1/3'
    """

    prefix: str

    def plan(self, *, epoch: int, step: int, dp_rank: int, pp_rank: int) -> str:
        """The signed ExecutionPlan of one pipeline rank of one replica; its tensor parallel ranks share it."""
        return f"{self.prefix}/plan/{epoch}/{step}/{dp_rank}/{pp_rank}"

    def taken(self, *, epoch: int, step: int) -> str:
        """Put by global rank 0 when it takes its plan of the step: what lets planners go on."""
        return f"{self.prefix}/taken/{epoch}/{step}"

    def wanted(self, worker: int) -> str:
        """Put by a rank that waits: the key of a plan that this planner may have published to a store that lost it."""
        return f"{self.prefix}/wanted/{worker}"

    def failure(self, worker: int) -> str:
        """The signed sentence with which a planner process ended; see `publish_failure`."""
        return f"{self.prefix}/failure/{worker}"

    def heartbeat(self, worker: int) -> str:
        """A count that a living planner process raises; readers only look at whether it changes."""
        return f"{self.prefix}/heartbeat/{worker}"


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
