"""The data loader with planner processes and a real server."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.collectives import ReplicaCollectives
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.errors import ConfigError, DataError, PlanError, StoreError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.plans import planner_pool
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.executor.wire import decode, encode
from dynapipe_ext.launch.redis_server import RedisServer
from dynapipe_ext.lengths import LengthArray
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.topology import Coordinates, Topology

pytestmark = pytest.mark.timeout(90)
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


class RecordingStore(RedisStore):
    """Remembers the keys that were waited for."""

    def __init__(self, address: StoreAddress, namespace: str) -> None:
        super().__init__(address, namespace=namespace)
        self.asked: set[str] = set()
        self.waited = threading.Event()

    def get(self, key: str, timeout_s: float) -> bytes:
        self.asked.add(key)
        self.waited.set()
        return super().get(key, timeout_s)


@pytest.fixture(scope="module")
def address() -> Iterator[StoreAddress]:
    with RedisServer() as server:
        yield server.address


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    return request.node.name


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
    return DynaPipeDataLoader(
        dataset, options.pop("planner"), coordinates=at, store=store, namespace=namespace or "loader", **options
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


def samples_of(plan: ExecutionPlan) -> list[int]:
    return [sample.index for micro_batch in plan.micro_batches for sample in micro_batch.samples]


def test_planners_outlive_the_signal_that_asks_ranks_to_save_however_early_it_comes(
    address: StoreAddress, namespace: str
) -> None:
    with through(address, RANKS[0], namespace, num_workers=2) as loading:
        running = iter(loading)
        assert loading._channel is not None
        pool = loading._channel.planners
        assert pool is not None
        for _ in range(4):
            for process in pool.processes:
                process.send_signal(signal.SIGUSR1)
            next(running)
    assert pool.poll() == {0: 0, 1: 0}


def test_two_planner_processes_give_every_rank_the_plans_of_planning_in_line(
    address: StoreAddress, namespace: str
) -> None:
    loaders = [through(address, at, namespace, num_workers=2) for at in RANKS]
    try:
        found = in_step(loaders, epochs=2)
    finally:
        for loading in loaders:
            loading.close()
    assert found == [train_epochs(inline(at), 2) for at in RANKS]
    assert len({plan for rank in found for plan in rank}) == sum(map(len, found))


def test_planners_of_evaluation_give_every_rank_forwards_alone_as_in_line(
    address: StoreAddress, namespace: str
) -> None:
    forwards = planner().for_forwards()
    loaders = [through(address, at, namespace, planner=forwards) for at in RANKS]
    try:
        found = in_step(loaders, epochs=1)
    finally:
        for loading in loaders:
            loading.close()
    assert found == [train_epochs(inline(at, planner=forwards), 1) for at in RANKS]
    assert all(decode(plan, KEY).forward_only for rank in found for plan in rank)


def test_the_tensors_are_those_of_planning_in_line(address: StoreAddress, namespace: str) -> None:
    with through(address, FIRST, namespace) as loading:
        for (found, _), (expected, _) in zip(loading, inline(FIRST), strict=True):
            for left, right in zip(found, expected, strict=True):
                assert left.keys() == right.keys()
                assert all((left[name] == right[name]).all() for name in left)


def test_a_rank_takes_no_plan_but_its_own_and_reads_no_sample_but_its_replicas(
    address: StoreAddress, namespace: str
) -> None:
    dataset = CountingDataset()
    with (
        RecordingStore(address, namespace) as mine,
        through(address, FIRST, namespace) as first,
        through(mine, RANKS[3], namespace, dataset=dataset) as loading,
    ):
        planned = [samples_of(plan) for (_, plan), _ in zip(loading, first, strict=True)]
    asked = [key.split("/")[-2:] for key in mine.asked if "/plan/" in key]
    assert set(map(tuple, asked)) == {("1", "1")}
    assert dataset.read == [i for step in planned for i in step]


def test_the_next_step_is_read_by_a_thread_that_ends_with_the_iteration(address: StoreAddress, namespace: str) -> None:
    dataset = CountingDataset()
    with through(address, FIRST, namespace, dataset=dataset) as loading:
        running = iter(loading)
        next(running)
        assert threading.get_ident() not in dataset.threads
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dynapipe-loader")]


def test_a_resumed_loader_with_planner_processes_goes_on_with_exactly_the_same_plans(
    address: StoreAddress, namespace: str
) -> None:
    expected = train_epochs(inline(FIRST), 2)
    with through(address, FIRST, namespace) as broken:
        running = iter(broken)
        for _ in range(2):
            next(running)
        state = broken.state_dict()
    with through(address, FIRST, f"{namespace} again") as resumed:
        resumed.load_state_dict(state)
        assert plans(resumed) + plans(resumed) == expected[2:]
        resumed.load_state_dict(state)  # in the same loader, after other steps
        assert plans(resumed) == expected[2 : len(expected) // 2]


def test_an_iteration_left_half_way_is_followed_by_the_next_epoch(address: StoreAddress, namespace: str) -> None:
    with through(address, FIRST, namespace) as loading, inline(FIRST) as expected:
        next(iter(loading))
        next(iter(expected))
        assert plans(loading) == plans(expected)


def test_a_samplers_order_goes_to_the_planner_processes(address: StoreAddress, namespace: str) -> None:
    class Reversed:
        def __init__(self) -> None:
            self.epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(29 - self.epoch, -1, -2))

    settings: dict[str, Any] = {"shuffle": None, "sampler": Reversed()}
    found = train_epochs(through(address, FIRST, namespace, **settings), 2)
    assert found == train_epochs(inline(FIRST, **settings), 2)


def test_ranks_whose_samplers_differ_are_told(address: StoreAddress, namespace: str) -> None:
    orders = [list(range(30)), list(range(29, -1, -1))]
    loaders = [
        through(address, at, namespace, shuffle=None, sampler=order)
        for at, order in zip(RANKS[:2], orders, strict=True)
    ]
    try:
        next(iter(loaders[0]))
        with pytest.raises(DataError, match=r"not in this rank's global batch.*sampler order"):
            next(iter(loaders[1]))
    finally:
        for loading in loaders:
            loading.close()


def test_planners_of_two_nodes_share_the_steps_and_one_that_is_killed_is_started_again(
    address: StoreAddress, namespace: str
) -> None:
    """Each node's first rank starts one planner; every rank gets the plans of planning in line."""
    loaders = [
        through(address, at, namespace, start_planners=at.pp_rank == 0, node_rank=at.dp_rank, num_nodes=2)
        for at in sorted(RANKS, key=lambda at: at.dp_rank)
    ]
    try:
        steps = zip(*loaders, strict=True)
        found = [[encode(plan, KEY)] for _, plan in next(steps)]
        pools = [loading._channel.planners for loading in loaders if loading._channel]
        assert [list(pool._processes) if pool else [] for pool in pools] == [[0], [], [1], []]
        for pool in filter(None, pools):
            os.kill(pool.processes[0].pid, signal.SIGKILL)
        for step in steps:
            for rank, (_, plan) in enumerate(step):
                found[rank].append(encode(plan, KEY))
    finally:
        for loading in loaders:
            loading.close()
    assert found == [train_epochs(inline(at), 1) for at in sorted(RANKS, key=lambda at: at.dp_rank)]


def test_a_planner_that_is_killed_for_good_ends_every_ranks_iteration(
    address: StoreAddress, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_pool, "_MOST_STARTS", 1)
    loaders = [through(address, at, namespace, num_workers=2, timeout_s=600.0) for at in RANKS[:2]]
    try:
        running = [iter(loading) for loading in loaders]
        for one in running:
            next(one)
        assert loaders[0]._channel is not None
        pool = loaders[0]._channel.planners
        assert pool is not None
        for process in pool.processes:
            os.kill(process.pid, signal.SIGKILL)
        for loading, one in zip(loaders, running, strict=True):
            with pytest.raises(StoreError, match=r"planner process [01] \(pid \d+\) was killed by SIGKILL"):
                until_it_ends(loading, one)
    finally:
        for loading in loaders:
            loading.close()


def test_no_plan_is_lost_with_a_server_that_is_killed(namespace: str) -> None:
    """It is started again, empty, where it was; ranks and planners connect again."""
    with RedisServer() as server:
        loaders = [through(server.address, at, namespace, num_workers=2) for at in RANKS[:2]]
        try:
            found: list[list[bytes]] = [[], []]
            for number, step in enumerate(zip(*loaders, strict=True)):
                if number in (1, 4):
                    os.kill(server.pid, signal.SIGKILL)
                for rank, (_, plan) in enumerate(step):
                    found[rank].append(encode(plan, KEY))
        finally:
            for loading in loaders:
                loading.close()
    assert found == [train_epochs(inline(at), 1) for at in RANKS[:2]]


HOSTILE = (
    b"FLUSHALL\r\nINFO\r\n",
    b"AUTH wrong\r\nFLUSHALL\r\n",
    b"AUTH default \r\nKEYS *\r\n",
    b"*1\r\n$8\r\nSHUTDOWN\r\n",
    b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1073741824\r\n" + b"x" * 100_000,
    b"*1000000000\r\n$1000000000\r\n",
    b"*3\r\n$3\r\nSE",
    *(random.Random(seed).randbytes(10_000) for seed in range(10)),
)


def test_clients_without_the_password_change_nothing(namespace: str) -> None:
    """Commands unasked, with a wrong password, oversized, cut short, and random bytes, each beside a run's steps."""
    with RedisServer() as server, through(server.address, FIRST, namespace) as loading:
        pid, found = server.pid, []
        for sent, (_, plan) in zip(itertools.cycle(HOSTILE), itertools.islice(cycled(loading), 20)):
            found.append(encode(plan, KEY))
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(0.05)
                stranger.connect(server.address.path)
                with contextlib.suppress(OSError):  # it closes the connection, or waits for more
                    stranger.sendall(sent)
                    assert stranger.recv(1 << 16)[:1] in (b"-", b"")
        assert server.pid == pid
    assert found == list(itertools.islice((encode(plan, KEY) for _, plan in cycled(inline(FIRST))), 20))


def cycled(loading: DynaPipeDataLoader) -> Iterator[Any]:
    while True:
        yield from loading


def test_who_has_the_stores_password_but_not_the_key_changes_no_plan(
    address: StoreAddress, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that planners and ranks have put is replaced by random bytes, by one another, or by values twice as long."""
    rng, found = random.Random(0), []
    with through(address, FIRST, namespace, num_workers=2) as loading, redis_at(address) as forger:
        for number, (_, plan) in enumerate(itertools.islice(cycled(loading), 10)):
            found.append(encode(plan, KEY))
            if number in (2, 5):
                names = [name.encode() for name in forger_names(loading)] + keys_left(address, namespace)
                values = [forger.lindex(name, 0) or b"" for name in names]
                for name, value in zip(names, values, strict=True):
                    forger.delete(name)
                    forger.rpush(name, rng.choice((rng.randbytes(5000), rng.choice(values), value * 2)))
    assert found == list(itertools.islice((encode(plan, KEY) for _, plan in cycled(inline(FIRST))), 10))
    assert "refused, and asked for again" in capsys.readouterr().err


def forger_names(loading: DynaPipeDataLoader) -> list[str]:
    """What is not always there: failures and wants of both workers."""
    assert loading._channel is not None
    keys, prefix = loading._channel._keys, f"dynapipe/{loading._channel._store.namespace}/"
    return [prefix + name for worker in range(2) for name in (keys.failure(worker), keys.wanted(worker))]


@pytest.mark.parametrize(
    ("node_rank", "num_nodes", "starts"), [(2, 2, True), (-1, 2, False), (0, 0, True), (0, 2, None)]
)
def test_a_node_outside_of_the_job_is_refused(
    address: StoreAddress, node_rank: int, num_nodes: int, starts: bool | None
) -> None:
    with pytest.raises(ConfigError, match=f"node_rank is {node_rank} and num_nodes is {num_nodes}"):
        through(address, FIRST, start_planners=starts, node_rank=node_rank, num_nodes=num_nodes)


def test_a_failing_planner_ends_every_ranks_iteration_with_its_sentence(address: StoreAddress, namespace: str) -> None:
    tight = planner(memory_limit_bytes=10.0)
    loaders = [through(address, at, namespace, planner=tight, timeout_s=600.0) for at in RANKS[:2]]
    try:
        running = [iter(loading) for loading in loaders]
        messages = []
        for one in running:
            with pytest.raises(PlanError, match="10 B") as caught:
                next(one)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    finally:
        for loading in loaders:
            loading.close()


def test_equal_loaders_in_one_store_do_not_meet_if_their_namespaces_differ(
    address: StoreAddress, namespace: str
) -> None:
    expected = train_epochs(inline(FIRST), 1)
    with RedisStore(address, namespace=namespace) as store:
        for name in ("first", "second"):
            assert train_epochs(through(store, FIRST, name), 1) == expected
        prefixes = {through(store, FIRST, name)._channel._keys.prefix for name in ("first", "second")}
    assert len(prefixes) == 2


def test_planners_of_an_earlier_attempt_write_where_nobody_looks(address: StoreAddress, namespace: str) -> None:
    """Of the same run in the same namespace: its new key keeps them apart, though they still run."""
    with through(address, FIRST, namespace, plan_key=b"1" * 32, num_workers=2) as earlier:
        next(iter(earlier))
        with through(address, FIRST, namespace, plan_key=b"2" * 32) as later:
            assert plans(later) == train_epochs(inline(FIRST), 1)
            assert earlier._channel._keys.prefix != later._channel._keys.prefix


def test_ctrl_c_ends_a_wait_for_a_plan_that_never_comes(address: StoreAddress, namespace: str) -> None:
    with RecordingStore(address, namespace) as store, through(store, RANKS[1], timeout_s=600.0) as loading:

        def interrupt() -> None:
            store.waited.wait(60)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            next(iter(loading))
        thread.join()
        for reader in threading.enumerate():  # an interrupt during its start leaves the thread to end by itself
            if reader.name.startswith("dynapipe-loader"):
                reader.join(60)
                assert not reader.is_alive()


def test_exposed_planning_does_not_exceed_the_consumers_waiting(address: StoreAddress, namespace: str) -> None:
    with through(address, FIRST, namespace) as loading:
        plans(loading)
        assert loading.exposed_planning_s > 0  # the first plan cannot be ahead of its consumer


def redis_at(address: StoreAddress) -> redis.Redis:
    return redis.Redis.from_url(address.url, password=address.password)


def keys_left(address: StoreAddress, namespace: str) -> list[bytes]:
    with redis_at(address) as client:
        return sorted(key for key in client.scan_iter(count=1000) if namespace.encode() in key)


@pytest.mark.parametrize("steps", [1, 5, None])
def test_no_key_is_left_once_all_loaders_are_closed(address: StoreAddress, namespace: str, steps: int | None) -> None:
    loaders = [through(address, at, namespace, num_workers=2) for at in RANKS]
    try:
        if steps is None:
            in_step(loaders, epochs=6)
        else:
            for _ in zip(range(steps), zip(*loaders, strict=True), strict=False):
                pass
        assert keys_left(address, namespace)
    finally:
        for loading in loaders:
            loading.close()
    assert keys_left(address, namespace) == []


def test_no_key_of_an_earlier_session_is_left_either(address: StoreAddress, namespace: str) -> None:
    with through(address, FIRST, namespace) as loading:
        for epoch in (4, 1, 7):
            loading.set_epoch(epoch)
            next(iter(loading))
    assert keys_left(address, namespace) == []
