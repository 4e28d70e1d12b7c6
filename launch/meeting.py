"""Where the ranks of a job meet before, and while, each prepares what takes it as long as it takes.

rank ─► arrives in torch's store, waits there for the others ─► all connect at once, within a short limit

Whoever is connected answers soon, so a connection that is broken shows; who prepares does not, and is waited for in the
store alone.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.device import process_group_backend
from dynapipe_ext.executor.stages.collectives import named_collectives
from dynapipe_ext.launch.env import RankEnv

_LOOK_S = 10.0  # a wait that sends nothing would never learn that its connection is gone


class Meeting:
    """A rank's way into the store that all ranks of its job share. What is longer than `limit_s` before all have
    arrived is an error, be it that nobody keeps the store yet."""

    def __init__(self, env: RankEnv, *, limit_s: float) -> None:
        self._rank, self._world_size, self._limit_s = env.rank, env.world_size, limit_s
        with named_collectives("meeting of all ranks"):
            met = rendezvous(env.init_method, env.rank, env.world_size, timeout=timedelta(seconds=limit_s))
            self._store: Any = next(met)[0]

    def arrive(self, what: str) -> None:
        """Return once all ranks have called this with the same `what`, which no rank may give twice.

        Errors: ExecutionError naming the ranks that have not come within the limit, or that the store is gone.
        """
        deadline_s, place = time.monotonic() + self._limit_s, f"dynapipe/{what}"
        try:
            self._store.set(f"{place}/{self._rank}", "")
            if self._store.add(f"{place}/arrived", 1) == self._world_size:
                self._store.set(f"{place}/all", "")
            while not self._has_come(f"{place}/all", min(_LOOK_S, deadline_s - time.monotonic())):
                if time.monotonic() >= deadline_s:
                    raise ExecutionError(
                        f"{what}: rank {self._rank} waited {self._limit_s:g} s for {self._missing(place)}: look at what"
                        " they said, or prepare beforehand what takes them so long"
                    )
        except dist.DistNetworkError as error:
            raise ExecutionError(
                f"{what}: the store in which all ranks meet is gone ({str(error).splitlines()[0]}): look at the first"
                " message of the other ranks"
            ) from error

    def connect(self, device: torch.device, *, timeout_s: float) -> None:
        """Make the process group of all ranks, all of which must have arrived: connections, and whatever it does later,
        may take `timeout_s`. Errors: ExecutionError."""
        limit = timedelta(seconds=timeout_s)
        self._store.set_timeout(limit)  # of what ranks tell each other to connect
        with named_collectives("connection of all ranks"):
            dist.init_process_group(
                process_group_backend(device),
                store=self._store,
                rank=self._rank,
                world_size=self._world_size,
                timeout=limit,
            )

    def _has_come(self, key: str, wait_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=max(wait_s, 0.001)))
        except RuntimeError as error:  # a plain one where the store is a file
            if isinstance(error, dist.DistNetworkError) or "timeout" not in str(error).lower():
                raise
            return False
        return True

    def _missing(self, place: str) -> str:
        missing = [rank for rank in range(self._world_size) if not self._store.check([f"{place}/{rank}"])]
        return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
