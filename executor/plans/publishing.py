"""What a planner process does with the store: plans put ahead of the ranks, and again where the store has lost them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from dynapipe_ext.errors import DynaPipeError
from dynapipe_ext.executor.plans.source import publish_failure
from dynapipe_ext.executor.plans.step_positions import StepPosition
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.proven_step import StepPlanner, prove_step
from dynapipe_ext.executor.store.keys import Keys
from dynapipe_ext.executor.store.wait import StoreTimeoutError
from dynapipe_ext.executor.wire import encode_all
from dynapipe_ext.lengths import LengthArray, sample_lengths

LOOK_S = 0.5  # how often a planner that waits looks for plans that are missed
SLACK = 4  # a tensor parallel peer of rank 0 may still have to read a plan that rank 0 has taken

Places = Iterable[tuple[StepPosition, tuple[int, ...]]]  # with the sample indices of the global batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPublisher:
    """Puts the plans of one worker's share of the steps, those `worker` modulo `num_workers`, into the store.

    A plan is a pure function of its samples: what a store lost that was started again or flushed is computed again, to
    the same bytes, once a rank misses it.
    """

    store: Store
    keys: Keys
    plan_key: bytes
    planner: StepPlanner
    lengths: LengthArray
    worker: int
    num_workers: int
    ahead: int

    def publish(self, places: Places, recent: RecentPlaces | None = None) -> None:
        """Plan this worker's share of `places`, each at most `ahead` places before rank 0 takes it.

        Failures of planning are published before they are raised. Plans and marks that no rank and no worker can need
        any more are deleted: a worker waits for marks at most `ahead` places back, and the slowest is at most `ahead`
        behind. Those that are not, of all workers, are of the places in their `recent`.
        """
        recent = recent_places(self.ahead) if recent is None else recent
        assert recent.maxlen
        for place, indices in places:
            recent.append((place, indices))
            if not self._is_mine(place):
                continue
            if len(recent) > self.ahead:
                self._wait_until_taken(recent[-1 - self.ahead][0], recent)
            self._publish(place, indices)
            if len(recent) == recent.maxlen:
                self._delete(recent[0][0])

    def answer(self, recent: RecentPlaces, *, pending: StepPosition | None = None) -> StepPosition | None:
        """Where a rank misses a plan of one of the `recent` places: its place.

        Of that place and later ones, this worker's plans that are not in the store are published again, except those of
        `pending`, which follow anyway; the other workers are told.
        """
        wanted = self.store.try_get(self.keys.wanted(self.worker))
        if wanted is None:
            return None
        self.store.delete(self.keys.wanted(self.worker))
        key = wanted.decode(errors="replace")
        missed = next((place for place, _ in recent if key in self._plans(place)), None)
        if missed is None:
            return None
        mine = [(place, indices) for place, indices in recent if missed <= place != pending and self._is_mine(place)]
        for place, indices in mine:
            if self.store.try_get(key if place == missed else self._plans(place)[0]) is None:
                if place == missed:
                    self._pass_on(wanted)
                self._publish(place, indices)
        return missed

    def forget(self, recent: RecentPlaces) -> None:
        """Delete what this worker has put, and the marks of ranks; all stays where a failure is still to be told."""
        if any(self.store.try_get(self.keys.failure(worker)) is not None for worker in range(self.num_workers)):
            return
        for place, _ in recent:
            self._delete(place)
        self.store.delete(self.keys.heartbeat(self.worker), self.keys.wanted(self.worker))

    def _wait_until_taken(self, before: StepPosition, recent: RecentPlaces) -> None:
        """Without a limit of its own, as a training step may take hours; the process ends with its parent.

        Ranks take their steps together: one that misses a later plan says that this one was taken, and its mark lost.
        """
        while True:
            try:
                self.store.get(self.keys.taken(epoch=before.epoch, step=before.step), LOOK_S)
                return
            except StoreTimeoutError:
                missed = self.answer(recent, pending=recent[-1][0])
            if missed is not None and missed > before:
                return

    def _pass_on(self, wanted: bytes) -> None:
        for worker in range(self.num_workers):
            if worker != self.worker:
                self.store.put(self.keys.wanted(worker), wanted)

    def _publish(self, place: StepPosition, indices: tuple[int, ...]) -> None:
        try:
            proven = prove_step(self.planner, sample_lengths(self.lengths, indices), step=place.global_step)
        except Exception as error:
            said = failure_sentence(error, self.worker, place)
            publish_failure(self.store, self.keys, self.plan_key, self.worker, said, of_planning=True)
            raise
        plans, keys = [plan for replica in proven.plans for plan in replica], self._plans(place)
        encoded = encode_all(plans, self.plan_key, contexts=[key.encode() for key in keys])
        for key, data in zip(keys, encoded, strict=True):
            self.store.put(key, data)

    def _delete(self, place: StepPosition) -> None:
        self.store.delete(self.keys.taken(epoch=place.epoch, step=place.step), *self._plans(place))

    def _plans(self, place: StepPosition) -> list[str]:
        topology = self.planner.topology
        return [
            self.keys.plan(epoch=place.epoch, step=place.step, dp_rank=dp_rank, pp_rank=pp_rank)
            for dp_rank in range(topology.dp)
            for pp_rank in range(topology.pp)
        ]

    def _is_mine(self, place: StepPosition) -> bool:
        return place.step % self.num_workers == self.worker


RecentPlaces = deque[tuple[StepPosition, tuple[int, ...]]]


def recent_places(ahead: int) -> RecentPlaces:
    """Room for the places whose plans or marks somebody may still need."""
    return deque(maxlen=2 * ahead + SLACK + 1)


def failure_sentence(error: Exception, worker: int, place: StepPosition | None = None) -> str:
    """What ranks are told of an error that ended a planner process."""
    if isinstance(error, DynaPipeError):
        return str(error)
    where = f"on step {place.step} of epoch {place.epoch}" if place else "while starting"
    return f"planner process {worker} failed {where}: {type(error).__name__}: {error} (its standard error has more)"
