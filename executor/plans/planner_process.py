"""A process that plans ahead of the ranks: `python -m dynapipe_ext.executor.plans.planner_process`, without torch.

From standard input it reads one line of JSON (a PlannerJob: addresses, secrets and settings stand in neither arguments
nor environment) and the arrays that the job counts, as they lie in memory. It ends when that input closes, when its
parent dies, at SIGTERM, and at CLOSE_SIGNAL, which has it take its keys out of the store before; SIGUSR1, which asks
ranks to save and end, does not concern it. Process k of n, over all nodes, plans the steps k modulo n, signs the plans
and puts them into the store, at most `ahead` places ahead of global rank 0 (`publishing.py`).
"""

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
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any, BinaryIO

import numpy as np

from dynapipe_ext.errors import ConfigError, DynaPipeError, StoreError
from dynapipe_ext.executor.parent_death import end_with_parent
from dynapipe_ext.executor.plans.publishing import LOOK_S, PlanPublisher, failure_sentence, recent_places
from dynapipe_ext.executor.plans.source import publish_failure
from dynapipe_ext.executor.plans.step_positions import GlobalBatchRule, SampleOrder, StepPosition, step_positions
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.proven_step import StepPlanner
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.keys import Keys
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.lengths import LengthArray

HEARTBEAT_S = 1.0
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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> PlannerJob:
        fields = json.loads(text)
        parts = {
            "store": StoreAddress.from_json(fields["store"]),
            "rule": GlobalBatchRule(**fields["rule"]),
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
        said = failure_sentence(error, job.worker)
        publish_failure(store, keys, plan_key, job.worker, said, of_planning=True)
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


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which stops this process
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a cluster sends it to all processes of a job
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # its stacks, as ranks give theirs
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
        collect_seldom()
        with _opened(job, patience_s=job.store_patience_s) as store:
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
