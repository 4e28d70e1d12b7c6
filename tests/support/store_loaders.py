"""Data loaders of a small job, planned in line and through a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import redis

from dynapipe_ext.batch.micro_batches import LengthArray
from dynapipe_ext.batch.topology import ActivationFormat, Coordinates, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.plans.channel import PlanDelivery
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.wire import encode
from dynapipe_ext.schedules.planner import Planner

KEY = b"k" * 32
RANKS = [Coordinates(tp_rank=0, pp_rank=pp_rank, dp_rank=dp_rank) for pp_rank in range(2) for dp_rank in range(2)]
FIRST = RANKS[0]


class CountingDataset:
    """Decoder-only samples of seeded lengths; remembers which were read, by which thread."""

    def __init__(self, num_samples: int = 30) -> None:
        sizes = np.random.default_rng(0).integers(4, 90, num_samples)
        self.lengths: LengthArray = np.stack([sizes, np.zeros_like(sizes), sizes], axis=1)
        self.read: list[int] = []
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        self.read.append(index)
        self.threads.add(threading.get_ident())
        return TokenSample(index, np.arange(self.lengths[index, 0] + 1) + index, 1)


def planner(memory_limit_bytes: float = 1e12) -> Planner:
    topology, costs = Topology(pp=2, dp=2), TokenCosts(2)
    needed: Any = {"format": ActivationFormat(16), "collectives": ReplicaCollectives()}
    return Planner(topology, costs, memory_limit_bytes, schedule="1f1b", **needed)


def inline(at: Coordinates, **settings: Any) -> DynaPipeDataLoader:
    options = {"planner": planner(), "tokens_per_batch": 400, "shuffle": True, **settings}
    return DynaPipeDataLoader(options.pop("dataset", CountingDataset()), coordinates=at, **options)


def through(store: object, at: Coordinates, namespace: str = "", **settings: Any) -> DynaPipeDataLoader:
    options = {"planner": planner(), "tokens_per_batch": 400, "shuffle": True, "num_workers": 1, **settings}
    dataset = options.pop("dataset", CountingDataset())
    names = [field.name for field in fields(PlanDelivery) if field.name in options]
    delivery = PlanDelivery(**{"namespace": namespace or "loader", **{name: options.pop(name) for name in names}})
    return DynaPipeDataLoader(
        dataset, options.pop("planner"), coordinates=at, store=store, delivery=delivery, **options
    )


def plans(loading: DynaPipeDataLoader) -> list[bytes]:
    return [encode(plan, KEY) for _, plan in loading]


def train_epochs(loading: DynaPipeDataLoader, epochs: int) -> list[bytes]:
    with loading:
        return [data for _ in range(epochs) for data in plans(loading)]


def in_step(loaders: list[DynaPipeDataLoader], epochs: int) -> list[list[bytes]]:
    """The plans of each rank, which take their steps together as training ranks do."""
    seen: list[list[bytes]] = [[] for _ in loaders]
    for _ in range(epochs):
        for step in zip(*loaders, strict=True):
            for rank, (_, plan) in enumerate(step):
                seen[rank].append(encode(plan, KEY))
    return seen


def until_it_ends(loading: DynaPipeDataLoader, running: Iterator[Any]) -> None:
    """Take all that was published before, over the end of the epoch too."""
    while True:
        for _ in running:
            pass
        running = iter(loading)


def redis_at(address: StoreAddress) -> redis.Redis:
    return redis.Redis.from_url(address.url, password=address.password)


def keys_left(address: StoreAddress, namespace: str) -> list[bytes]:
    with redis_at(address) as client:
        return sorted(key for key in client.scan_iter(count=1000) if namespace.encode() in key)
