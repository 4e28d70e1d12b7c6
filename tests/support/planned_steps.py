"""What tests of planner processes plan: a small job, its places, and both ends of its store."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from dynapipe_ext.batch.micro_batches import LengthArray, as_length_array
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import GlobalBatchRule, StepPosition, step_positions
from dynapipe_ext.executor.plans.channel import StorePlanSource
from dynapipe_ext.executor.plans.planner_process import PlannerJob, PlanPublisher, describe_planner
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.store.address import Keys
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.schedules.planner import Planner

KEY = b"k" * 32
LENGTHS: LengthArray = as_length_array(np.random.default_rng(0).integers(4, 90, 40))
RULE = GlobalBatchRule(batch_size=5, shuffle=True)
PLANNER = Planner(
    Topology(pp=2, dp=2), TokenCosts(2), 1e12,
    schedule="1f1b", format=ActivationFormat(16), collectives=ReplicaCollectives(),
)  # fmt: skip
KEYS = Keys("topic/1")


def job_of(store: RedisStore, *, num_workers: int = 2, ahead: int = 4) -> PlannerJob:
    return PlannerJob(
        store=store.address,
        store_patience_s=20.0,
        namespace=store.namespace,
        prefix=KEYS.prefix,
        plan_key=KEY.hex(),
        rule=RULE,
        planner=describe_planner(PLANNER),
        start=StepPosition(),
        ahead=ahead,
        num_workers=num_workers,
    )


def publisher(store: Store, planner: Planner = PLANNER) -> PlanPublisher:
    settings = {"store": store, "keys": KEYS, "plan_key": KEY, "planner": planner, "lengths": LENGTHS}
    return PlanPublisher(**settings, worker=0, num_workers=1, ahead=3)


def source(
    store: object, *, dp_rank: int = 0, pp_rank: int = 0, num_planners: int = 2, **options: float
) -> StorePlanSource:
    settings = {"timeout_s": 60.0, "marks_taken": dp_rank == pp_rank == 0, **options}
    return StorePlanSource(store, KEYS, KEY, dp_rank=dp_rank, pp_rank=pp_rank, num_planners=num_planners, **settings)


def plan_key(place: StepPosition, dp_rank: int = 0, pp_rank: int = 0) -> str:
    return KEYS.plan(epoch=place.epoch, step=place.step, dp_rank=dp_rank, pp_rank=pp_rank)


def places(count: int) -> list[tuple[StepPosition, tuple[int, ...]]]:
    steps = step_positions(RULE, LENGTHS, StepPosition())
    return [next(steps) for _ in range(count)]


def until(condition: Callable[[], bool]) -> None:
    """Poll, under the test's own time limit, for a state of another process that cannot be waited for."""
    while not condition():
        time.sleep(0.01)
