"""Planner processes of a node, started again where they are killed, and a rank's way to their plans."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

import numpy as np

from dynapipe_ext.batch.micro_batches import LengthArray
from dynapipe_ext.batch.topology import Coordinates
from dynapipe_ext.data.batches import GlobalBatchRule, SampleOrder, StepPosition, array_digest
from dynapipe_ext.errors import ConfigError, PlanError, StoreError, check_timeout
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.parent_death import ends_within
from dynapipe_ext.executor.plans.planner_process import (
    ARRAY_TYPE,
    CLOSE_SIGNAL,
    FOR_RANKS,
    HEARTBEAT_S,
    SLACK,
    PlannerJob,
    describe_planner,
    publish_failure,
)
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.proven_step import StepPlanner
from dynapipe_ext.executor.store.address import Keys, StoreAddress, StoreTimeoutError
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.executor.wire import decode, unseal

_STOP_S, _KILLED_S = 1.0, 60.0
_MOST_STARTS = 4  # of one planner: what kills it more often is not chance
_PIECE = 1 << 20
_LOOK_S = 0.25  # how often a rank that waits for its plan looks for a failed or silent planner
_MISSED_AFTER_S = 1.0  # then it says which plan it misses: the store may have lost it
SILENT_AFTER_S = 15.0  # planner processes give a sign every second; on a crowded machine some come late
_GIVEN_UP_AFTER_S = 3 * SILENT_AFTER_S  # by ranks: the planner's owner has started another one by then, if it lives
_MOST_REFUSALS = 5  # of one plan; another key than the planners' would refuse them for ever


class PlannerProcesses:
    """The planner processes `workers` of a `job.num_workers`, all by default. A context manager; `store` is the job's.

    A process that was killed, or has fallen silent, is started again where ranks are. One that fails by itself, or was
    killed too often, is made known through the store to all ranks that wait for it. The arrays go to the processes
    through their standard input, from threads: nothing is ever written to a disk.
    """

    def __init__(
        self,
        job: PlannerJob,
        store: Store,
        lengths: LengthArray,
        order: SampleOrder | None = None,
        *,
        workers: Sequence[int] | None = None,
    ) -> None:
        self._store = store
        self._arrays = [_bytes(lengths)] if order is None else [_bytes(lengths), _bytes(order)]
        self._job = replace(
            job,
            num_samples=len(lengths),
            num_columns=lengths.shape[1],
            order_size=None if order is None else len(order),
            parent_pid=os.getpid() if threading.current_thread() is threading.main_thread() else 0,
        )
        self._reached = deque([job.start], maxlen=SLACK)  # a rank may still have to read the oldest one's plan
        self._closing = threading.Event()
        self._changing = threading.Lock()  # which processes there are, and whether they are to run
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        try:
            for worker in range(job.num_workers) if workers is None else workers:
                self._start(worker)
                self._in_thread(self._keep, worker)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        with self._changing:
            return list(self._processes.values())

    def reached(self, place: StepPosition) -> None:
        """Where the owner's ranks are: a process that is started again goes on from there."""
        self._reached.append(place)

    def poll(self) -> dict[int, int]:
        """Exit status of each planner that has ended, by its number; a signal's is negative."""
        with self._changing:
            ended = {worker: process.poll() for worker, process in self._processes.items()}
        return {worker: status for worker, status in ended.items() if status is not None}

    def close(self) -> None:
        """Stop all planners, which take this session's keys out of the store; about a second later they are killed."""
        with self._changing:
            self._closing.set()
        for process in self.processes:
            process.send_signal(CLOSE_SIGNAL)
        deadline_s = time.monotonic() + _STOP_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the system: the system ends it
                    process.wait(_KILLED_S)  # which may take its time where others have the cores
        for thread in self._threads:
            thread.join(_STOP_S)
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()

    def __enter__(self) -> PlannerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, worker: int) -> None:
        with _blocked(*FOR_RANKS):  # a planner inherits this, before it can ignore them
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dynapipe_ext.executor.plans.planner_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,
                process_group=0,  # a terminal's Ctrl-C reaches the owner alone, which then stops its planners in order
            )
        self._processes[worker] = process
        self._in_thread(self._feed, worker, process)

    def _in_thread(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _feed(self, worker: int, process: subprocess.Popen[bytes]) -> None:
        """The job and the arrays; what follows on standard input is its end alone, with this process."""
        assert process.stdin is not None
        job = replace(self._job, worker=worker, start=self._reached[0])
        line = job.to_json().encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its keeper tells the ranks
            for data in (memoryview(line), *self._arrays):
                sent = 0
                while sent < len(data):
                    sent += os.write(process.stdin.fileno(), data[sent : sent + _PIECE])

    def _keep(self, worker: int) -> None:
        """Start the worker's process again whenever it is killed; tell the ranks if it is not.

        This thread stays while the process runs, as the kernel takes a starting thread's end for the owner's.
        """
        for times_left in reversed(range(_MOST_STARTS)):
            process = self._processes[worker]
            status = self._until_it_ends(worker, process)
            if self._closing.is_set():
                return
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            message = f"planner process {worker} (pid {process.pid}) {how}"
            with self._changing:
                if self._closing.is_set():
                    return
                if again := status < 0 and times_left > 0:
                    self._start(worker)
            if not again:
                self._tell(worker, f"{message}: its standard error may say why")
                return
            print(f"dynapipe: {message}: started again", file=sys.stderr)

    def _until_it_ends(self, worker: int, process: subprocess.Popen[bytes]) -> int:
        """Its exit status; a process that gives no sign any more is killed."""
        last, num_same = None, 0
        while not ends_within(process, HEARTBEAT_S):
            sign = None
            with contextlib.suppress(StoreError):  # a store that is away says nothing about planners
                sign = self._store.try_get(Keys(self._job.prefix).heartbeat(worker))
            num_same = num_same + 1 if sign is not None and sign == last else 0
            last = sign
            if num_same * HEARTBEAT_S >= SILENT_AFTER_S:
                process.kill()
        return process.wait()

    def _tell(self, worker: int, message: str) -> None:
        try:
            keys, plan_key = Keys(self._job.prefix), bytes.fromhex(self._job.plan_key)
            publish_failure(self._store, keys, plan_key, worker, message, of_planning=False)
        except StoreError as error:
            print(f"{message}; and the ranks cannot be told: {error}", file=sys.stderr)


@contextlib.contextmanager
def _blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Inside, these signals wait for this thread; processes started inside never take them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _bytes(array: SampleOrder | LengthArray) -> memoryview:
    return np.ascontiguousarray(array, dtype=ARRAY_TYPE).reshape(-1).view(np.uint8).data


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDelivery:
    """How planner processes share their work, and how their plans reach the ranks. Equal on all ranks, but for the
    node's two fields.

    prefetch_steps: finished plans that the planners keep ahead. namespace: one that no other loader or run has used in
    the store. plan_key: secret that signs plans; None derives it from the store's password. timeout_s: longest wait for
    a plan. node_rank, num_nodes: planners of all nodes share the steps. starts_planners: whether this rank starts those
    of its node; None means global rank 0, on one node alone. Errors: ConfigError.
    """

    prefetch_steps: int = 2
    namespace: str = "loader"
    plan_key: bytes | None = field(default=None, repr=False)
    timeout_s: float = 60.0
    node_rank: int = 0
    num_nodes: int = 1
    starts_planners: bool | None = None

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        if not 0 <= self.node_rank < self.num_nodes or (self.num_nodes > 1 and self.starts_planners is None):
            raise ConfigError(
                f"node_rank is {self.node_rank} and num_nodes is {self.num_nodes} but must be in 0..num_nodes - 1, with"
                " starts_planners=True on one rank of each of several nodes and False on the others"
            )


class PlanChannel:
    """Gives plan sources for passes over the data, and runs the planner processes on the rank that starts them.

    A *session* is a run of places that follow one another, planned by the same processes under one prefix. A jump (a
    resumed state, a chosen epoch, an iteration left half-way, a sampler's next order) begins another session. All ranks
    jump alike, so they count sessions alike, and none reads what planners of an earlier session left behind.
    """

    def __init__(
        self,
        planner: StepPlanner,
        rule: GlobalBatchRule,
        lengths: LengthArray,
        coordinates: Coordinates,
        *,
        store: str | StoreAddress | Store | None,
        num_workers: int,
        delivery: PlanDelivery,
    ) -> None:
        is_first = coordinates == Coordinates(tp_rank=0, pp_rank=0, dp_rank=0)
        starts = is_first if delivery.starts_planners is None else delivery.starts_planners
        first_worker = delivery.node_rank * num_workers
        self._workers = range(first_worker, first_worker + num_workers if starts else 0)
        self._num_workers = num_workers * delivery.num_nodes
        self._marks_taken = is_first
        self._rule = rule
        self._lengths = lengths
        self._coordinates = coordinates
        self._ahead = (
            delivery.prefetch_steps + self._num_workers
        )  # finished ones, and one in the making for each planner
        self._timeout_s = delivery.timeout_s
        self._owns_store = isinstance(store, str | StoreAddress)
        self._store = _opened(store, num_workers, delivery)
        if self._workers and self._store.address is None:
            raise ConfigError(
                f"planner processes cannot reach a {type(self._store).__name__}: give the address of a Redis-compatible"
                " store, or use num_workers=0"
            )
        self._plan_key = delivery.plan_key or _derived_key(self._store.address)
        self._namespace = delivery.namespace
        self._describe(planner)
        self._session = 0
        self._next: StepPosition | None = None  # where the present session goes on; None before the first
        self._pool: PlannerProcesses | None = None

    def source(self, place: StepPosition, order: SampleOrder | None) -> StorePlanSource:
        """Plans from `place` on, to the end of the epoch."""
        if order is not None or place != self._next:
            self._begin_session(place, order)
        return StorePlanSource(
            self._store,
            self._keys,
            self._plan_key,
            dp_rank=self._coordinates.dp_rank,
            pp_rank=self._coordinates.pp_rank,
            num_planners=self._num_workers,
            timeout_s=self._timeout_s,
            marks_taken=self._marks_taken,
        )

    def plan_with(self, planner: StepPlanner) -> None:
        """Begin another session at the next place, under a prefix of the new planner's: no plan of both mixes."""
        self._stop_planners()
        self._describe(planner)
        self._next = None

    def reached(self, place: StepPosition) -> None:
        """The consumer's next place in this session."""
        self._next = place
        if self._pool is not None:
            self._pool.reached(place)

    def close(self) -> None:
        self._stop_planners()
        self._next = None
        if self._owns_store:
            self._store.close()

    @property
    def _keys(self) -> Keys:
        return Keys(f"{self._topic}/{self._session}")

    def _describe(self, planner: StepPlanner) -> None:
        self._planner = describe_planner(planner)
        self._topic = _topic(self._namespace, self._lengths, self._rule, self._planner, self._plan_key)

    def _begin_session(self, place: StepPosition, order: SampleOrder | None) -> None:
        self._stop_planners()
        self._session += 1
        self._next = place
        if not self._workers:
            return
        address = self._store.address
        assert address is not None
        job = PlannerJob(
            store=address,
            store_patience_s=store_patience_s(self._timeout_s),
            namespace=self._store.namespace,
            prefix=self._keys.prefix,
            plan_key=self._plan_key.hex(),
            rule=self._rule,
            planner=self._planner,
            start=place,
            ahead=self._ahead,
            num_workers=self._num_workers,
        )
        self._pool = PlannerProcesses(job, self._store, self._lengths, order, workers=self._workers)

    def _stop_planners(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _topic(
    namespace: str, lengths: LengthArray, rule: GlobalBatchRule, planner: dict[str, object], plan_key: bytes
) -> str:
    """Keeps loaders of another namespace, other data, other settings, or with another key, apart in one store.

    A run that is started again has a new key: what late processes of an earlier attempt write lies where nobody looks.
    """
    attempt = hmac.new(plan_key, b"dynapipe topic", hashlib.sha256).hexdigest()
    try:
        settings = json.dumps([namespace, attempt, rule.to_json(), planner], sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"planner.to_json() must give plain JSON values for planner processes: {error}") from error
    return hashlib.sha256(f"{array_digest(lengths)} {settings}".encode()).hexdigest()[:16]


def store_patience_s(timeout_s: float) -> float:
    """How long a store may be away where a plan may take `timeout_s`: what is left is for planning again."""
    return timeout_s / 2


def _opened(store: str | StoreAddress | Store | None, num_workers: int, delivery: PlanDelivery) -> Store:
    if store is None:
        raise ConfigError(
            f"num_workers={num_workers} needs a store: pass store='redis://:PASSWORD@HOST:PORT/0' (or rediss://, unix://),"
            " or num_workers=0 to plan in line"
        )
    if isinstance(store, str):
        store = StoreAddress.parse(store)
    if isinstance(store, StoreAddress):
        patience_s = store_patience_s(delivery.timeout_s)
        return open_store(store, namespace=delivery.namespace, reconnect_s=patience_s)
    return store


def _derived_key(address: StoreAddress | None) -> bytes:
    """The key that all who know the store's password can derive."""
    if address is None or not address.password:
        raise ConfigError(
            "the store has no password to derive a plan key from: pass PlanDelivery(plan_key=…), 32 random bytes"
        )
    return hmac.new(address.password.encode(), b"dynapipe plan key", hashlib.sha256).digest()


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
        plan_place, rank_place = (
            (plan.step, plan.dp_rank, plan.pp_rank),
            (place.global_step, self._dp_rank // plan.width, self._pp_rank),
        )
        if plan_place != rank_place:
            raise StoreError(
                f"the plan at {key!r} is for (step, replica, pp_rank) {plan_place} but this rank is at {rank_place}:"
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
                return self._store.get(key, max(0.0, min(_LOOK_S, deadline_s - time.monotonic())))
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
