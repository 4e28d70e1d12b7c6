"""One planner process: the job that it reads from standard input, and the plans that it publishes to the store."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any, BinaryIO

import numpy as np

from dynapipe_ext.batch.micro_batches import LengthArray, sample_lengths
from dynapipe_ext.data.batches import GlobalBatchRule, SampleOrder, StepPosition, step_positions
from dynapipe_ext.errors import ConfigError, DynaPipeError, StoreError
from dynapipe_ext.executor.parent_death import end_with_parent
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.proven_step import StepPlanner, prove_step
from dynapipe_ext.executor.store.address import Keys, StoreAddress, StoreTimeoutError
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.executor.wire import encode_all, sealed
from dynapipe_ext.visible_text import visible

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
    plan_key: bytes = field(repr=False)
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
        """Publishes again what the store has lost; the place of the plan that a rank misses, None where none does.

        From that place on, this worker publishes those of its `recent` plans that are not in the store, except those of
        `pending`, which follow anyway. It passes the request on to the other workers.
        """
        wanted_key = self.store.try_get(self.keys.wanted(self.worker))
        if wanted_key is None:
            return None
        self.store.delete(self.keys.wanted(self.worker))
        key = wanted_key.decode(errors="replace")
        missed = next((place for place, _ in recent if key in self._plans(place)), None)
        if missed is None:
            return None
        own_places = [
            (place, indices) for place, indices in recent if missed <= place != pending and self._is_mine(place)
        ]
        for place, indices in own_places:
            if self.store.try_get(key if place == missed else self._plans(place)[0]) is None:
                if place == missed:
                    self._pass_on(wanted_key)
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
            sentence = failure_sentence(error, self.worker, place)
            publish_failure(self.store, self.keys, self.plan_key, self.worker, sentence, of_planning=True)
            raise
        ranks, keys = self._ranks, self._plans(place)
        plans = [proven.plan_of(dp_rank, pp_rank) for dp_rank, pp_rank in ranks]
        encoded = encode_all(plans, self.plan_key, contexts=[key.encode() for key in keys])
        for key, data in zip(keys, encoded, strict=True):
            self.store.put(key, data)

    def _delete(self, place: StepPosition) -> None:
        self.store.delete(self.keys.taken(epoch=place.epoch, step=place.step), *self._plans(place))

    def _plans(self, place: StepPosition) -> list[str]:
        return [
            self.keys.plan(epoch=place.epoch, step=place.step, dp_rank=dp_rank, pp_rank=pp_rank)
            for dp_rank, pp_rank in self._ranks
        ]

    @property
    def _ranks(self) -> list[tuple[int, int]]:
        """(dp_rank, pp_rank): the ranks of a block have a key each, as none knows the step's width before its plan."""
        topology = self.planner.topology
        return [(dp_rank, pp_rank) for dp_rank in range(topology.dp) for pp_rank in range(topology.pp)]

    def _is_mine(self, place: StepPosition) -> bool:
        return place.step % self.num_workers == self.worker


RecentPlaces = deque[tuple[StepPosition, tuple[int, ...]]]


def recent_places(ahead: int) -> RecentPlaces:
    """Room for the places whose plans or marks somebody may still need."""
    return deque(maxlen=2 * ahead + SLACK + 1)


def failure_sentence(error: Exception, worker: int, place: StepPosition | None = None) -> str:
    """The sentence in which ranks report the error that ended a planner process."""
    if isinstance(error, DynaPipeError):
        return str(error)
    where = f"on step {place.step} of epoch {place.epoch}" if place else "while starting"
    return f"planner process {worker} failed {where}: {type(error).__name__}: {error} (its standard error has more)"


HEARTBEAT_S = 1.0
FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)  # a cluster sends them to all processes of a job
CLOSE_SIGNAL = signal.SIGRTMIN  # not SIGTERM or SIGUSR1: those may come from anybody, while ranks need the plans
ARRAY_TYPE = np.dtype("<i8")
_FORGET_S = 0.5
_YOUNG_OBJECTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerJob:
    """All that a planner process needs; `planner` is {"class": "module:name", "settings": to_json()}."""

    store: StoreAddress
    store_patience_s: float  # how long it may be away
    namespace: str
    prefix: str
    plan_key: str = field(repr=False)  # hexadecimal
    rule: GlobalBatchRule
    planner: dict[str, Any]
    start: StepPosition
    ahead: int
    num_workers: int
    worker: int = 0
    num_samples: int = 0  # rows of the lengths that follow on standard input
    num_columns: int = 3  # integers of each row; four of pairs of documents
    order_size: int | None = None  # and of the sampler's order after them, if there is one
    # This process ends when that one does. 0: it ends with its input alone, since the kernel watches a thread.
    parent_pid: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> PlannerJob:
        fields = json.loads(text)
        parts = {
            "store": StoreAddress.from_json(fields["store"]),
            "rule": GlobalBatchRule.from_json(fields["rule"]),
            "start": StepPosition(**fields["start"]),
        }
        return cls(**fields | parts)


def describe_planner(planner: StepPlanner) -> dict[str, Any]:
    """What `planner_of` needs in another process. Raises ConfigError for a class that cannot be imported there."""
    kind = type(planner)
    if kind.__module__ == "__main__" or "<" in kind.__qualname__:
        raise ConfigError(
            f"planner class {kind.__module__}.{kind.__qualname__} cannot be imported by planner processes: define it in"
            " a module, or use num_workers=0"
        )
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "settings": planner.to_json()}


def planner_of(description: dict[str, Any]) -> StepPlanner:
    module, _, name = description["class"].partition(":")
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part)
    planner: StepPlanner = kind.from_json(description["settings"])
    return planner


class Closed(BaseException):
    """The owner needs no more plans. No Exception: nothing on the way may take it for a failure."""


def run(job: PlannerJob, lengths: LengthArray, order: SampleOrder | None, store: Store) -> None:
    """Plan until the places end (they do only with an order), and answer ranks until the process is ended."""
    keys, plan_key = Keys(job.prefix), bytes.fromhex(job.plan_key)
    stop = threading.Event()
    beating = threading.Thread(target=_beat, args=(store, keys.heartbeat(job.worker), stop), daemon=True)
    beating.start()
    publisher: PlanPublisher | None = None
    recent = recent_places(job.ahead)
    try:
        publisher = PlanPublisher(
            store=store,
            keys=keys,
            plan_key=plan_key,
            planner=planner_of(job.planner),
            lengths=lengths,
            worker=job.worker,
            num_workers=job.num_workers,
            ahead=job.ahead,
        )
        publisher.publish(step_positions(job.rule, lengths, job.start, order), recent)
        while not stop.wait(LOOK_S):  # all is planned: stay, as a living planner, until the job ends
            publisher.answer(recent)
    except Closed:
        stop.set()
        beating.join(_FORGET_S)
        with _opened(job, patience_s=_FORGET_S) as anew:  # the signal may have cut a call on the other one short
            if publisher is None:
                anew.delete(keys.heartbeat(job.worker))
            else:
                replace(publisher, store=anew).forget(recent)
    except StoreError:
        raise
    except Exception as error:
        sentence = failure_sentence(error, job.worker)
        publish_failure(store, keys, plan_key, job.worker, sentence, of_planning=True)
        raise
    finally:
        stop.set()


def collect_seldom() -> None:
    """Look for cycles once in a million objects: the plans of a large step are as many values without one, and to look
    through them every few hundred took as long as to lower and prove them."""
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def _beat(store: Store, key: str, stop: threading.Event) -> None:
    count = 0
    try:
        while True:
            store.put(key, str(count).encode())
            count += 1
            if stop.wait(HEARTBEAT_S):
                return
    except StoreError:
        return  # the main thread meets the same lost server, and says so


def _opened(job: PlannerJob, *, patience_s: float) -> closing[Store]:
    return closing(open_store(job.store, namespace=job.namespace, connect_s=patience_s, reconnect_s=patience_s))


def read_array(stream: BinaryIO, *shape: int) -> LengthArray:
    """An array that was written as it lies in memory. Raises EOFError where the stream ends before it does."""
    array = np.empty(shape, ARRAY_TYPE)
    view, filled = array.reshape(-1).view(np.uint8).data, 0
    while filled < len(view):
        count = stream.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"standard input ended after {filled} of {len(view)} bytes of an array")
        filled += count
    return array


def _end_with_input() -> None:
    """Die when standard input closes."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock would still be held when the interpreter ends
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _close(number: int, frame: FrameType | None) -> None:
    signal.signal(CLOSE_SIGNAL, signal.SIG_IGN)
    raise Closed


def publish_failure(store: Store, keys: Keys, plan_key: bytes, worker: int, message: str, *, of_planning: bool) -> None:
    """Tell every rank that this planner's next plan will not come: as PlanError if planning failed, else StoreError.

    The planner's first message stays: what its owner says of its end is a consequence.
    """
    key = keys.failure(worker)
    if store.try_get(key) is None:
        body = json.dumps({"of_planning": of_planning, "message": message}).encode()
        store.put(key, sealed(body, plan_key, context=key.encode()))


def main() -> int:
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):  # the parent saves, and then stops this process
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # its stacks, as ranks give theirs
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_RANKS)
    worker = ""
    try:
        signal.signal(CLOSE_SIGNAL, _close)
        line = sys.stdin.buffer.readline()
        if not line.endswith(b"\n"):
            raise EOFError("standard input ended before the job was read")
        job = PlannerJob.from_json(line)
        worker = f" {job.worker}"
        if job.parent_pid:
            end_with_parent(job.parent_pid)
        lengths = read_array(sys.stdin.buffer, job.num_samples, job.num_columns)
        order = None if job.order_size is None else read_array(sys.stdin.buffer, job.order_size)
        _end_with_input()
        collect_seldom()
        with _opened(job, patience_s=job.store_patience_s) as store:
            run(job, lengths, order, store)
    except Closed:
        return 0
    except (EOFError, DynaPipeError) as error:
        print(visible(f"planner process{worker}: {error}"), file=sys.stderr)
        return 2
    except Exception:  # noqa: BLE001 - the last frame of the process; the ranks have the sentence, this is the detail
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
