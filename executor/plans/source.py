"""Where a rank gets its ExecutionPlan: planned in line, or taken from the store where planner processes put it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynapipe_ext.data.batches import StepPosition
from dynapipe_ext.errors import PlanError, StoreError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.proven_step import ProvenStep
from dynapipe_ext.executor.store.keys import Keys
from dynapipe_ext.executor.store.memory import StoreTimeoutError
from dynapipe_ext.executor.wire import decode, sealed, unseal

_SLICE_S = 0.25  # how often a rank that waits for its plan looks for a failed or silent planner
_MISSED_AFTER_S = 1.0  # then it says which plan it misses: the store may have lost it
SILENT_AFTER_S = 15.0  # planner processes give a sign every second; on a crowded machine some come late
_GIVEN_UP_AFTER_S = 3 * SILENT_AFTER_S  # by ranks: the planner's owner has started another one by then, if it lives
_MOST_REFUSALS = 5  # of one plan; another key than the planners' would refuse them for ever


@dataclass(frozen=True, slots=True)
class Taken:
    """A plan and the interval (time.monotonic) in which the rank waited for it."""

    plan: ExecutionPlan
    asked_s: float
    got_s: float


class PlanSource(Protocol):
    """Gives one rank its plans, in the order of the run."""

    def plan(self, place: StepPosition) -> ExecutionPlan:
        """This rank's plan. Raises PlanError where planning failed, StoreError where the plan does not come."""
        ...

    def close(self) -> None:
        """End a `plan` that waits in another thread."""
        ...


def timed(source: PlanSource, place: StepPosition) -> Taken:
    asked_s = time.monotonic()
    plan = source.plan(place)
    return Taken(plan, asked_s, time.monotonic())


class InlinePlanSource:
    """Plans here and now; `proven` gives the step of a place, of all ranks."""

    def __init__(self, proven: Callable[[StepPosition], ProvenStep], *, dp_rank: int, pp_rank: int) -> None:
        self._proven = proven
        self._dp_rank, self._pp_rank = dp_rank, pp_rank
        self.exposed_planning_s = 0.0

    def plan(self, place: StepPosition) -> ExecutionPlan:
        asked_s = time.monotonic()
        try:
            return self._proven(place).plans[self._dp_rank][self._pp_rank]
        finally:
            self.exposed_planning_s += time.monotonic() - asked_s

    def close(self) -> None:
        pass


class StorePlanSource:
    """Takes the plans of one rank, and no others, from a store.

    `num_planners` planner processes publish them, process k those of steps k modulo their number. A plan that the store
    has lost, or that does not carry the job's signature, is asked for again. A wait ends at once with PlanError if the
    planner in charge has published a failure of planning, with StoreError if it is dead for good, has been silent for
    `silent_after_s`, or after `timeout_s`. Plans that other planners have published are still taken, so all ranks end
    at the same step. With `marks_taken` (global rank 0) each plan taken lets planners go on.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        plan_key: bytes,
        *,
        dp_rank: int,
        pp_rank: int,
        num_planners: int,
        timeout_s: float,
        marks_taken: bool = False,
        silent_after_s: float = _GIVEN_UP_AFTER_S,
    ) -> None:
        self._store = store
        self._keys = keys
        self._plan_key = plan_key
        self._dp_rank, self._pp_rank = dp_rank, pp_rank
        self._num_planners = num_planners
        self._timeout_s = timeout_s
        self._marks_taken = marks_taken
        self._silent_after_s = silent_after_s
        self._signs: dict[int, tuple[bytes, float]] = {}  # planner -> last heartbeat and when it was first seen
        self._closed = threading.Event()
        self.exposed_planning_s = 0.0

    def plan(self, place: StepPosition) -> ExecutionPlan:
        key = self._keys.plan(epoch=place.epoch, step=place.step, dp_rank=self._dp_rank, pp_rank=self._pp_rank)
        asked_s = time.monotonic()
        try:
            plan = self._genuine(key, place, asked_s)
        finally:
            self.exposed_planning_s += time.monotonic() - asked_s
        if self._marks_taken:
            self._store.put(self._keys.taken(epoch=place.epoch, step=place.step), b"1")
        found, wanted = (
            (plan.step, plan.dp_rank, plan.pp_rank),
            (place.global_step, self._dp_rank, self._pp_rank),
        )
        if found != wanted:
            raise StoreError(
                f"the plan at {key!r} is for (step, dp_rank, pp_rank) {found} but this rank is at {wanted}:"
                " ranks and planners must start from the same checkpoint"
            )
        return plan

    def close(self) -> None:
        self._closed.set()

    def _genuine(self, key: str, place: StepPosition, asked_s: float) -> ExecutionPlan:
        """The plan with the job's signature; what has none is refused, taken out, and asked for again."""
        refusals: list[StoreError] = []
        while True:
            data = self._wait(key, place, asked_s, refusals)
            try:
                return decode(data, self._plan_key, context=key.encode())
            except StoreError as error:
                refusals.append(error)
                if len(refusals) == _MOST_REFUSALS:
                    raise
                print(f"dynapipe: refused, and asked for again: {error}", file=sys.stderr)
                self._store.delete(key)
                self._ask_again(key, place)

    def _wait(self, key: str, place: StepPosition, asked_s: float, refusals: Sequence[StoreError]) -> bytes:
        deadline_s = asked_s + self._timeout_s
        while True:
            try:
                return self._store.get(key, max(0.0, min(_SLICE_S, deadline_s - time.monotonic())))
            except StoreTimeoutError:
                pass
            planner = place.step % self._num_planners
            if self._closed.is_set():
                self._store.delete(self._keys.wanted(planner))  # its planner may be closed, too, and not look any more
                raise StoreError(f"the data loader was closed while it waited for {_named(place)}")
            _raise_failure(self._store, self._keys, self._plan_key, planner, place)
            self._check_alive(planner, place)
            now_s = time.monotonic()
            if now_s >= deadline_s:
                refused = f" (what was there was refused: {refusals[-1]})" if refusals else ""
                raise StoreError(
                    f"planner process {planner} did not publish {_named(place)} for dp_rank"
                    f" {self._dp_rank}, pp_rank {self._pp_rank} within {self._timeout_s:.1f} s{refused}: is it running,"
                    " with the same data and settings? If planning takes longer, raise timeout_s or num_workers"
                )
            if now_s - asked_s > _MISSED_AFTER_S:
                self._ask_again(key, place)

    def _ask_again(self, key: str, place: StepPosition) -> None:
        self._store.put(self._keys.wanted(place.step % self._num_planners), key.encode())

    def _check_alive(self, planner: int, place: StepPosition) -> None:
        """A planner that has not given its first sign is still starting: `timeout_s` bounds that."""
        sign = self._store.try_get(self._keys.heartbeat(planner))
        if sign is None:
            return
        now_s = time.monotonic()
        last, since_s = self._signs.get(planner, (b"", now_s))
        if sign != last:
            self._signs[planner] = (sign, now_s)
        elif now_s - since_s > self._silent_after_s:
            raise StoreError(
                f"planner process {planner} has given no sign for {now_s - since_s:.1f} s while this rank waits for"
                f" {_named(place)}: it was killed or its machine is gone; start the job again from its last checkpoint"
            )


def publish_failure(store: Store, keys: Keys, plan_key: bytes, worker: int, message: str, *, of_planning: bool) -> None:
    """Tell every rank that this planner's next plan will not come: as PlanError if planning failed, else StoreError.

    The planner's first message stays: what its owner says of its end is a consequence.
    """
    key = keys.failure(worker)
    if store.try_get(key) is None:
        body = json.dumps({"of_planning": of_planning, "message": message}).encode()
        store.put(key, sealed(body, plan_key, context=key.encode()))


def _raise_failure(store: Store, keys: Keys, plan_key: bytes, worker: int, place: StepPosition) -> None:
    key = keys.failure(worker)
    data = store.try_get(key)
    if data is None:
        return
    try:
        failure = json.loads(unseal(data, plan_key, context=key.encode()))
    except StoreError as error:
        print(f"dynapipe: not believed: {error}", file=sys.stderr)
        store.delete(key)
        return
    if failure["of_planning"]:
        raise PlanError(failure["message"])
    raise StoreError(f"{failure['message']} (this rank waits for {_named(place)})")


def _named(place: StepPosition) -> str:
    return f"the plan of step {place.step} of epoch {place.epoch}"
