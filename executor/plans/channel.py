"""The store as seen by one data loader: planner processes on one side, this rank's plans on the other."""

from __future__ import annotations

import hashlib
import hmac
import json

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.plans.planner_pool import PlannerProcesses
from dynapipe_ext.executor.plans.planner_process import PlannerJob, describe_planner
from dynapipe_ext.executor.plans.source import StorePlanSource
from dynapipe_ext.executor.plans.step_positions import GlobalBatchRule, SampleOrder, StepPosition, array_digest
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.proven_step import StepPlanner
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.keys import Keys
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.lengths import LengthArray
from dynapipe_ext.topology import Coordinates


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
        namespace: str,
        plan_key: bytes | None,
        num_workers: int,
        prefetch_steps: int,
        start_planners: bool | None,
        node_rank: int,
        num_nodes: int,
        timeout_s: float,
    ) -> None:
        is_first = coordinates == Coordinates(tp_rank=0, pp_rank=0, dp_rank=0)
        if not 0 <= node_rank < num_nodes or (num_nodes > 1 and start_planners is None):
            raise ConfigError(
                f"node_rank is {node_rank} and num_nodes is {num_nodes} but must be in 0..num_nodes - 1, with"
                " start_planners=True on one rank of each of several nodes and False on the others"
            )
        starts = is_first if start_planners is None else start_planners
        self._workers = range(node_rank * num_workers, (node_rank + 1) * num_workers if starts else 0)
        self._num_workers = num_workers * num_nodes
        self._marks_taken = is_first
        self._rule = rule
        self._lengths = lengths
        self._coordinates = coordinates
        self._ahead = prefetch_steps + self._num_workers  # finished ones, and one in the making for each planner
        self._timeout_s = timeout_s
        self._owns_store = isinstance(store, str | StoreAddress)
        self._store = _opened(store, namespace, num_workers, timeout_s)
        if self._workers and self._store.address is None:
            raise ConfigError(
                f"planner processes cannot reach a {type(self._store).__name__}: give the address of a Redis-compatible"
                " store, or use num_workers=0"
            )
        self._plan_key = plan_key or _derived_key(self._store.address)
        self._namespace = namespace
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

    @property
    def planners(self) -> PlannerProcesses | None:
        """The planner processes, on the rank that started them."""
        return self._pool

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


def _opened(store: str | StoreAddress | Store | None, namespace: str, num_workers: int, timeout_s: float) -> Store:
    if store is None:
        raise ConfigError(
            f"num_workers={num_workers} needs a store: pass store='redis://:PASSWORD@HOST:PORT/0' (or rediss://, unix://),"
            " or num_workers=0 to plan in line"
        )
    if isinstance(store, str):
        store = StoreAddress.parse(store)
    if isinstance(store, StoreAddress):
        return open_store(store, namespace=namespace, reconnect_s=store_patience_s(timeout_s))
    return store


def _derived_key(address: StoreAddress | None) -> bytes:
    """The key that all who know the store's password can derive."""
    if address is None or not address.password:
        raise ConfigError("the store has no password to derive a plan key from: pass plan_key, 32 random bytes")
    return hmac.new(address.password.encode(), b"dynapipe plan key", hashlib.sha256).digest()
