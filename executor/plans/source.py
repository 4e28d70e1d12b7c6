"""Where a rank gets its ExecutionPlan: planned in line, or taken from the store where planner processes put it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError, PlanError, StoreError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.lowering import lower
from dynapipe_ext.executor.plans.course import Place
from dynapipe_ext.executor.proof.step import Crossing, crossing_collectives, verify_step, with_collectives
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.store.keys import Keys
from dynapipe_ext.executor.store.wait import StoreTimeoutError
from dynapipe_ext.executor.wire import decode, seal, unseal
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.topology import Topology

Plans = tuple[tuple[ExecutionPlan, ...], ...]  # indexed [dp_rank][pp_rank]

_REPLANS = 4  # plans of a step: less room makes fewer micro-batches wait; so a few rounds settle it
_SLICE_S = 0.25  # how often a rank that waits for its plan looks for a failed or silent planner
SILENT_AFTER_S = 15.0  # planner processes give a sign every second; on a crowded machine some come late


class Planner(Protocol):
    """Plans one global batch as a pure function of its samples' lengths, the step and its own settings."""

    @property
    def topology(self) -> Topology: ...

    @property
    def costs(self) -> CostModel: ...

    @property
    def activation_format(self) -> ActivationFormat: ...

    @property
    def memory_limit_bytes(self) -> float: ...

    @property
    def fill_waits(self) -> bool:
        """Whether executors will run weight gradients while they wait."""
        ...

    def plan(self, samples: Sequence[SampleLength], *, step: int) -> StepPlan: ...

    def with_memory_limit(self, limit_bytes: int) -> Planner:
        """The same planner under another limit. Raises PlanError for a limit that leaves nothing."""
        ...

    def to_json(self) -> Mapping[str, Any]:
        """The settings from which the class's `from_json` makes an equal planner in another process."""
        ...


def execution_plans(planner: Planner, samples: Sequence[SampleLength], *, step: int) -> Plans:
    """The plans of all ranks for one global batch, proven together; their peak bytes count buffers in flight as well.

    Where those do not fit beside what the planner has filled, it plans again with that much less. Where that was not
    enough it leaves room for the most that was ever in flight, which settles it at once but can cost makespan; where no
    plan has that much to spare, again for what was too much. Raises PlanError or VerificationError; ConfigError where
    waits cannot be filled.
    """
    limit, most_in_flight, planners = int(planner.memory_limit_bytes), 0, [planner]
    for attempt in range(_REPLANS):
        step_plan, planner = _first_plan(planners, samples, step)
        plans, in_flight = _verified(step_plan, planner)
        peak = max(replica[0].peak_bytes for replica in plans)
        if peak <= limit:
            return plans
        most_in_flight = max(most_in_flight, in_flight)
        room = int(planner.memory_limit_bytes) - (peak - limit)
        ample = limit - most_in_flight
        rooms = (ample, room) if attempt and 0 < ample < room else (room,)
        planners = [planner.with_memory_limit(size) for size in rooms]
    raise PlanError(
        f"step {step}: buffers in flight take a rank to {peak} B but the limit is {limit} B: raise the limit, or cap"
        " micro-batches with max_tokens"
    )


def _first_plan(planners: Sequence[Planner], samples: Sequence[SampleLength], step: int) -> tuple[StepPlan, Planner]:
    """The plan of the first of these that finds one, and which it was. Errors: the last one's."""
    *before, last = planners
    for planner in before:
        try:
            return planner.plan(samples, step=step), planner
        except PlanError:
            continue
    return last.plan(samples, step=step), last


def _crossing(planner: Planner) -> Crossing:
    """Refuses to move weight gradients that meet those of other replicas, whose ranks move theirs at other times."""
    crossing = crossing_collectives(planner.costs)
    if planner.fill_waits and (meets := crossing.get("with_gradients")):
        raise ConfigError(
            f"fill_waits moves weight gradients at run time, but with these costs each joins a {meets[0]} over replicas"
            " (ZeRO stage 2 or 3), which needs one order on all: leave fill_waits out, or take ZeRO stage 1"
        )
    return crossing


def _verified(step_plan: StepPlan, planner: Planner) -> tuple[Plans, int]:
    """The plans, and the most bytes of buffers that a rank has in flight."""
    crossing = _crossing(planner)
    costs = tuple(planner.costs.evaluate(replica.micro_batches) for replica in step_plan.batch.replicas)
    lowered = lower(step_plan, costs, planner.activation_format, fill_waits=planner.fill_waits)
    programs = [[plan.instructions for plan in replica] for replica in lowered]
    at_end = () if step_plan.forward_only else ("gradient reduction",)
    buffers = verify_step(
        with_collectives(programs, **crossing, at_end=at_end),
        lowered[0][0].stage_ranks,
        lowered[0][0].num_micro_batches,
        forward_only=step_plan.forward_only,
    )
    plans = []
    for replica, in_flight in zip(lowered, buffers, strict=True):
        certificate = replica[0].certificate
        peaks = tuple(p + b for p, b in zip(certificate.peak_bytes, in_flight, strict=True))
        certificate = replace(certificate, peak_bytes=peaks)
        plans.append(tuple(replace(plan, certificate=certificate) for plan in replica))
    return tuple(plans), max(max(in_flight) for in_flight in buffers)


@dataclass(frozen=True, slots=True)
class Taken:
    """A plan and the interval (time.monotonic) in which the rank waited for it."""

    plan: ExecutionPlan
    asked_s: float
    got_s: float


class PlanSource(Protocol):
    """Gives one rank its plans, in the order of the run."""

    def plan(self, place: Place) -> ExecutionPlan:
        """This rank's plan. Raises PlanError where planning failed, StoreError where the plan does not come."""
        ...

    def close(self) -> None:
        """End a `plan` that waits in another thread."""
        ...


def timed(source: PlanSource, place: Place) -> Taken:
    asked_s = time.monotonic()
    plan = source.plan(place)
    return Taken(plan, asked_s, time.monotonic())


class InlinePlanSource:
    """Plans here and now; `make_plans` gives the plans of all ranks for a place."""

    def __init__(self, make_plans: Callable[[Place], Plans], *, dp_rank: int, pp_rank: int) -> None:
        self._make_plans = make_plans
        self._dp_rank, self._pp_rank = dp_rank, pp_rank
        self.exposed_planning_s = 0.0

    def plan(self, place: Place) -> ExecutionPlan:
        asked_s = time.monotonic()
        try:
            return self._make_plans(place)[self._dp_rank][self._pp_rank]
        finally:
            self.exposed_planning_s += time.monotonic() - asked_s

    def close(self) -> None:
        pass


class StorePlanSource:
    """Takes the plans of one rank, and no others, from a store.

    `num_planners` planner processes publish them, process k those of steps k modulo their number. A wait ends at once
    with PlanError if the planner in charge has published a failure of planning, with StoreError if it is dead, has been
    silent for `silent_after_s`, or after `timeout_s`. Plans that other planners have published are still taken, so all
    ranks end at the same step. With `marks_taken` (global rank 0) each plan taken lets planners go on.
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
        silent_after_s: float = SILENT_AFTER_S,
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

    def plan(self, place: Place) -> ExecutionPlan:
        key = self._keys.plan(epoch=place.epoch, step=place.step, dp_rank=self._dp_rank, pp_rank=self._pp_rank)
        asked_s = time.monotonic()
        try:
            data = self._wait(key, place, asked_s + self._timeout_s)
        finally:
            self.exposed_planning_s += time.monotonic() - asked_s
        plan = decode(data, self._plan_key, context=key.encode())
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

    def _wait(self, key: str, place: Place, deadline_s: float) -> bytes:
        while True:
            try:
                return self._store.get(key, max(0.0, min(_SLICE_S, deadline_s - time.monotonic())))
            except StoreTimeoutError:
                pass
            if self._closed.is_set():
                raise StoreError(f"the data loader was closed while it waited for {_named(place)}")
            planner = place.step % self._num_planners
            _raise_failure(self._store, self._keys, self._plan_key, planner, place)
            self._check_alive(planner, place)
            if time.monotonic() >= deadline_s:
                raise StoreError(
                    f"planner process {planner} did not publish {_named(place)} for dp_rank"
                    f" {self._dp_rank}, pp_rank {self._pp_rank} within {self._timeout_s:.1f} s: is it running, with the"
                    " same data and settings? If planning takes longer, raise timeout_s or num_workers"
                )

    def _check_alive(self, planner: int, place: Place) -> None:
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
        store.put(key, seal(body, plan_key, context=key.encode()))


def _raise_failure(store: Store, keys: Keys, plan_key: bytes, worker: int, place: Place) -> None:
    key = keys.failure(worker)
    data = store.try_get(key)
    if data is None:
        return
    failure = json.loads(unseal(data, plan_key, context=key.encode()))
    if failure["of_planning"]:
        raise PlanError(failure["message"])
    raise StoreError(f"{failure['message']} (this rank waits for {_named(place)})")


def _named(place: Place) -> str:
    return f"the plan of step {place.step} of epoch {place.epoch}"
