"""Where the ranks of a job meet, while each of them prepares (imports, data, measurements), however long that takes.

rank ─► shows in torch's store what it was started with, which is compared ─► arrives there once it is ready, waits for
        the others ─► all connect at once, within a short limit

A connected rank answers soon, so a broken connection is noticed. A rank that prepares answers nobody, so the others
wait for it in the store alone. Where a job has several machines, each rank writes a sign into the store every few
seconds, and the rank before it reads these signs.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dynapipe_ext.errors import ExecutionError, named_collectives
from dynapipe_ext.executor.device import process_group_backend
from dynapipe_ext.launch.job.terms import Terms, UnlikeRanksError, difference
from dynapipe_ext.launch.processes.env import RankEnv

_LOOK_S = 2.0  # a wait that sends nothing would never learn that its connection is gone
_SIGN_S, _POLL_S = 2.0, 0.05
_LEAVE_S = 20.0
_LOST = "dynapipe/lost"
_T = TypeVar("_T")


class Meeting:
    """A rank's access to the store that all ranks of its job share, until `close`. It is an error if not all ranks have
    arrived after `limit_s`, also if nobody has opened the store by then; if the store does not answer for `silent_s`;
    and, on several machines, if a rank that gave signs gives none for `silent_s`."""

    def __init__(self, env: RankEnv, *, limit_s: float, silent_s: float) -> None:
        self._rank, self._world_size = env.rank, env.world_size
        self._limit_s, self._silent_s, self._closed = limit_s, silent_s, Event()
        with named_collectives("meeting of all ranks"):
            met = rendezvous(env.init_method, env.rank, env.world_size, timeout=timedelta(seconds=limit_s))
            self._store: Any = next(met)[0]
            if env.local_world_size < env.world_size:  # else whoever has started them sees how they are
                self._answered("meeting of all ranks", self._sign)
                Thread(target=self._give_signs, daemon=True).start()

    def arrive(self, what: str) -> None:
        """Return once all ranks have called this with the same `what`, which no rank may give twice.

        Errors: ExecutionError that names the ranks that did not arrive within the limit, or the rank that is lost, or
        says that the store is lost.
        """
        deadline_s, place = time.monotonic() + self._limit_s, f"dynapipe/{what}"
        try:
            self._answered(what, partial(self._come, place))
            while not self._answered(what, partial(self._has_come, place, deadline_s)):
                if lost_rank := self._answered(what, self._lost_rank):
                    raise ExecutionError(
                        f"{what}: rank {lost_rank} has given no sign for {self._silent_s:g} s: its machine is lost, or"
                        " it stands still; look there, then start again"
                    )
                if time.monotonic() >= deadline_s:
                    missing = self._answered(what, partial(self._missing, place))
                    raise ExecutionError(
                        f"{what}: rank {self._rank} waited {self._limit_s:g} s for {missing}: look at what they said,"
                        " or prepare beforehand what takes them so long"
                    )
        except dist.DistNetworkError as error:
            raise ExecutionError(
                f"{what}: the store in which all ranks meet is gone ({str(error).splitlines()[0]}): look at the first"
                " message of the other ranks"
            ) from error

    def agree(
        self, what: str, terms: Terms, least: Mapping[str, float] | None = None, *, is_part: bool = False
    ) -> dict[str, float]:
        """Return the minimum over all ranks of each value in `least`, once all ranks have called this with the same
        `what` and equal `terms`. `is_part`: this rank leaves out terms that another rank of its machine shows.

        Errors: UnlikeRanksError on all ranks, in the same words, for the first name whose values differ; as `arrive`.
        """
        place, text = f"dynapipe/{what}", json.dumps(terms)
        digest = hashlib.sha256(text.encode()).hexdigest()
        own_entry = {"terms": digest, "is_part": is_part, "host": socket.gethostname(), "least": least or {}}
        self._answered(what, partial(self._show, place, {digest: text, f"of/{self._rank}": json.dumps(own_entry)}))
        self.arrive(what)
        if self._rank == 0:
            self._answered(what, partial(self._compare, place, terms))
        verdict = json.loads(self._answered(what, partial(self._store.get, f"{place}/verdict")))
        if verdict["fault"]:
            raise UnlikeRanksError(f"{what}: {verdict['fault']}", partial(self._leave_together, what))
        return dict(verdict["least"])

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

    def close(self) -> None:
        """Give no more signs: nobody waits for another in the store from now on."""
        self._closed.set()

    def _answered(self, what: str, ask: Callable[[], _T]) -> _T:
        """The store's answer to `ask`, which runs in a thread of its own: torch would wait for ever for a store that
        stands still. Errors: ExecutionError."""
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:  # noqa: BLE001 - whoever asked is told
                answer.set_exception(error)

        Thread(target=run, daemon=True).start()
        try:
            return answer.result(_LOOK_S + self._silent_s)
        except TimeoutError:
            raise ExecutionError(
                f"{what}: the store in which all ranks meet has not answered rank {self._rank} for"
                f" {self._silent_s:g} s: its machine is lost or stands still; look there, then start again"
            ) from None

    def _sign(self) -> None:
        self._store.add(f"dynapipe/signs/{self._rank}", 1)

    def _give_signs(self) -> None:
        """Give signs until `close`. If the next rank has begun and then gives none, write that into the store for all
        ranks."""
        watched = (self._rank + 1) % self._world_size
        last_number, changed_s = 0, time.monotonic()
        with suppress(RuntimeError):  # the store is gone, which whoever waits for others notices
            while not self._closed.wait(_SIGN_S):
                self._sign()
                number = self._store.add(f"dynapipe/signs/{watched}", 0)
                if number != last_number or not number:
                    last_number, changed_s = number, time.monotonic()
                elif time.monotonic() - changed_s > self._silent_s:
                    self._store.set(_LOST, str(watched))

    def _lost_rank(self) -> str:
        return self._store.get(_LOST).decode() if self._store.check([_LOST]) else ""

    def _come(self, place: str) -> None:
        self._store.set(f"{place}/{self._rank}", "")
        if self._store.add(f"{place}/arrived", 1) == self._world_size:
            self._store.set(f"{place}/all", "")

    def _show(self, place: str, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._store.set(f"{place}/{name}", text)

    def _compare(self, place: str, terms: Terms) -> None:
        """On rank 0: write into the store how the terms of the first rank with other terms differ from its own."""
        ranks = [json.loads(self._store.get(f"{place}/of/{rank}")) for rank in range(self._world_size)]
        who = [f"rank {rank} ({one['host']})" for rank, one in enumerate(ranks)]
        least = {name: min(one["least"].get(name, value) for one in ranks) for name, value in ranks[0]["least"].items()}
        fault, digests_seen = "", {ranks[0]["terms"]}
        for rank, one in enumerate(ranks):
            if not fault and one["terms"] not in digests_seen:
                digests_seen.add(one["terms"])
                others = json.loads(self._store.get(f"{place}/{one['terms']}"))
                fault = difference(terms, others, (who[0], who[rank]), is_part=one["is_part"])
        self._store.set(f"{place}/verdict", json.dumps({"fault": fault, "least": least}))

    def _leave_together(self, what: str) -> None:
        """Wait until all ranks have called this, for `_LEAVE_S`: the store goes with the first who leaves."""
        place, deadline_s = f"dynapipe/{what}/leaving", time.monotonic() + min(_LEAVE_S, self._silent_s)
        with suppress(RuntimeError, ExecutionError):
            number = self._answered(what, partial(self._store.add, place, 1))
            while number < self._world_size and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                number = self._answered(what, partial(self._store.add, place, 0))

    def _has_come(self, place: str, deadline_s: float) -> bool:
        """Whether all have, after waiting for them for a moment."""
        wait_s = max(0.001, min(_LOOK_S, deadline_s - time.monotonic()))
        try:
            self._store.wait([f"{place}/all"], timedelta(seconds=wait_s))
        except RuntimeError as error:  # a plain one where the store is a file
            if isinstance(error, dist.DistNetworkError) or "timeout" not in str(error).lower():
                raise
            return False
        return True

    def _missing(self, place: str) -> str:
        missing = [rank for rank in range(self._world_size) if not self._store.check([f"{place}/{rank}"])]
        return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
