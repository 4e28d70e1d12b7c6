"""A process that plans ahead of the ranks: `python -m dynapipe_ext.executor.plans.planner_process`, without torch.

From standard input it reads one line of JSON (a PlannerJob: addresses, secrets and settings stand in neither arguments
nor environment) and the arrays that the job counts, as they lie in memory. It ends when that input closes, when its
parent dies, at SIGTERM, and at CLOSE_SIGNAL, which has it take its keys out of the store before; SIGUSR1, which asks
ranks to save and end, does not concern it. Process k of n plans the steps k modulo n, signs the plans and puts them
into the store, at most `ahead` places ahead of global rank 0.
"""

from __future__ import annotations

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
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any, BinaryIO

import numpy as np

from dynapipe_ext.errors import ConfigError, DynaPipeError, StoreError
from dynapipe_ext.executor.parent_death import end_with_parent
from dynapipe_ext.executor.plans.source import publish_failure
from dynapipe_ext.executor.plans.step_positions import GlobalBatchRule, SampleOrder, StepPosition, step_positions
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.proven_step import StepPlanner, prove_step
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.keys import Keys
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.executor.store.wait import StoreTimeoutError
from dynapipe_ext.executor.wire import encode
from dynapipe_ext.lengths import LengthArray, sample_lengths

HEARTBEAT_S = 1.0
CLOSE_SIGNAL = signal.SIGRTMIN  # not SIGTERM or SIGUSR1: those may come from anybody, while ranks need the plans
ARRAY_TYPE = np.dtype("<i8")
_FORGET_S = 0.5
_SLACK = 4  # a tensor parallel peer of rank 0 may still have to read a plan that rank 0 has taken


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerJob:
    """All that a planner process needs; `planner` is {"class": "module:name", "settings": to_json()}."""

    store_url: str
    store_password: str
    namespace: str
    prefix: str
    plan_key: str  # hexadecimal
    rule: GlobalBatchRule
    planner: dict[str, Any]
    start: StepPosition
    ahead: int
    num_workers: int
    worker: int = 0
    num_samples: int = 0  # rows of the lengths that follow on standard input, three integers each
    order_size: int | None = None  # and of the sampler's order after them, if there is one
    parent_pid: int = 0  # whose end is this process's own; 0: only that of its input, for the kernel watches a thread

    def for_worker(self, worker: int) -> PlannerJob:
        return replace(self, worker=worker)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> PlannerJob:
        fields = json.loads(text)
        return cls(**{**fields, "rule": GlobalBatchRule(**fields["rule"]), "start": StepPosition(**fields["start"])})


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


def publish_plans(
    store: Store,
    keys: Keys,
    plan_key: bytes,
    planner: StepPlanner,
    lengths: LengthArray,
    places: Iterable[tuple[StepPosition, tuple[int, ...]]],
    *,
    worker: int,
    num_workers: int,
    ahead: int,
    recent: deque[StepPosition] | None = None,
) -> None:
    """Put the plans of this worker's share of `places` into the store, `ahead` places before rank 0 takes them.

    Failures of planning are published before they are raised. Plans and marks that no rank and no worker can need any
    more are deleted: a worker waits for marks at most `ahead` places back, and the slowest is at most `ahead` behind.
    Those that are not, of all workers, are of the places in their `recent` (from `recent_places`).
    """
    recent = recent_places(ahead) if recent is None else recent
    assert recent.maxlen
    kept = recent.maxlen - 1
    for place, indices in places:
        recent.append(place)
        if place.step % num_workers != worker:
            continue
        if len(recent) > ahead:
            _wait_until_taken(store, keys, recent[-1 - ahead])
        try:
            proven = prove_step(planner, sample_lengths(lengths, indices), step=place.global_step)
        except Exception as error:
            publish_failure(store, keys, plan_key, worker, _sentence(error, worker, place), of_planning=True)
            raise
        for plan in (plan for replica in proven.plans for plan in replica):
            key = keys.plan(epoch=place.epoch, step=place.step, dp_rank=plan.dp_rank, pp_rank=plan.pp_rank)
            store.put(key, encode(plan, plan_key, context=key.encode()))
        if len(recent) > kept:
            _delete(store, keys, recent[0], planner)


def recent_places(ahead: int) -> deque[StepPosition]:
    return deque(maxlen=2 * ahead + _SLACK + 1)


def forget(
    store: Store, keys: Keys, planner: StepPlanner | None, recent: Iterable[StepPosition], job: PlannerJob
) -> None:
    """Delete what this worker has put, and the marks of rank 0; all stays where a failure is still to be told."""
    if any(store.try_get(keys.failure(worker)) is not None for worker in range(job.num_workers)):
        return
    if planner is not None:
        for place in recent:
            _delete(store, keys, place, planner)
    store.delete(keys.heartbeat(job.worker))


def _wait_until_taken(store: Store, keys: Keys, place: StepPosition) -> None:
    """Without a limit of its own, as a training step may take hours; the process ends with its parent."""
    while True:
        try:
            store.get(keys.taken(epoch=place.epoch, step=place.step), HEARTBEAT_S)
            return
        except StoreTimeoutError:
            pass


def _delete(store: Store, keys: Keys, place: StepPosition, planner: StepPlanner) -> None:
    topology = planner.topology
    plans = [
        keys.plan(epoch=place.epoch, step=place.step, dp_rank=dp_rank, pp_rank=pp_rank)
        for dp_rank in range(topology.dp)
        for pp_rank in range(topology.pp)
    ]
    store.delete(keys.taken(epoch=place.epoch, step=place.step), *plans)


def _sentence(error: Exception, worker: int, place: StepPosition | None = None) -> str:
    if isinstance(error, DynaPipeError):
        return str(error)
    where = f"on step {place.step} of epoch {place.epoch}" if place else "while starting"
    return f"planner process {worker} failed {where}: {type(error).__name__}: {error} (its standard error has more)"


class Closed(BaseException):
    """The owner needs no more plans. No Exception: nothing on the way may take it for a failure."""


def run(job: PlannerJob, lengths: LengthArray, order: SampleOrder | None, store: Store) -> None:
    """Plan until the places end (they do only with an order) or the process is ended."""
    keys, plan_key = Keys(job.prefix), bytes.fromhex(job.plan_key)
    stop = threading.Event()
    beating = threading.Thread(target=_beat, args=(store, keys.heartbeat(job.worker), stop), daemon=True)
    beating.start()
    planner, recent = None, recent_places(job.ahead)
    try:
        planner = planner_of(job.planner)
        publish_plans(
            store,
            keys,
            plan_key,
            planner,
            lengths,
            step_positions(job.rule, lengths, job.start, order),
            worker=job.worker,
            num_workers=job.num_workers,
            ahead=job.ahead,
            recent=recent,
        )
        stop.wait()  # all is planned: stay, as a living planner, until the job ends
    except Closed:
        stop.set()
        beating.join(_FORGET_S)
        with _opened(job, patience_s=_FORGET_S) as anew:  # the signal may have cut a call on the other one short
            forget(anew, keys, planner, recent, job)
    except StoreError:
        raise
    except Exception as error:
        publish_failure(store, keys, plan_key, job.worker, _sentence(error, job.worker), of_planning=True)
        raise
    finally:
        stop.set()


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


def _opened(job: PlannerJob, patience_s: float = 5.0) -> closing[Store]:
    address = StoreAddress(job.store_url, job.store_password)
    return closing(open_store(address, namespace=job.namespace, patience_s=patience_s))


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


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which stops this process
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a cluster sends it to all processes of a job
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
        lengths = read_array(sys.stdin.buffer, job.num_samples, 3)
        order = None if job.order_size is None else read_array(sys.stdin.buffer, job.order_size)
        _end_with_input()
        with _opened(job) as store:
            run(job, lengths, order, store)
    except Closed:
        return 0
    except (EOFError, DynaPipeError) as error:
        print(f"planner process{worker}: {error}", file=sys.stderr)
        return 2
    except Exception:  # noqa: BLE001 - the last frame of the process; the ranks have the sentence, this is the detail
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
