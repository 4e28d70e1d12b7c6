"""The data loader with planner processes and a real server."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.executor.wire import decode
from dynapipe_ext.launch.store import RedisServer
from tests.support.limits import LIMIT_S
from tests.support.store_loaders import (
    FIRST,
    KEY,
    RANKS,
    CountingDataset,
    in_step,
    inline,
    keys_left,
    planner,
    plans,
    through,
    train_epochs,
)

pytestmark = pytest.mark.usefixtures("forked_planners")


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


def samples_of(plan: ExecutionPlan) -> list[int]:
    return [sample.index for micro_batch in plan.micro_batches for sample in micro_batch.samples]


def test_planners_outlive_the_signal_that_asks_ranks_to_save_however_early_it_comes(
    address: StoreAddress, namespace: str
) -> None:
    with through(address, RANKS[0], namespace, num_workers=2) as loading:
        running = iter(loading)
        assert loading._channel is not None
        pool = loading._channel._pool
        assert pool is not None
        pids = [process.pid for process in pool.processes]
        for _ in range(4):
            for process in pool.processes:
                process.send_signal(signal.SIGUSR1)
            next(running)
        assert (pool.poll(), [process.pid for process in pool.processes]) == ({}, pids)


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


@pytest.mark.parametrize(
    ("node_rank", "num_nodes", "starts"), [(2, 2, True), (-1, 2, False), (0, 0, True), (0, 2, None)]
)
def test_a_node_outside_of_the_job_is_refused(
    address: StoreAddress, node_rank: int, num_nodes: int, starts: bool | None
) -> None:
    with pytest.raises(ConfigError, match=f"node_rank is {node_rank} and num_nodes is {num_nodes}"):
        through(address, FIRST, starts_planners=starts, node_rank=node_rank, num_nodes=num_nodes)


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


def test_ctrl_c_ends_a_wait_for_a_plan_that_never_comes(address: StoreAddress, namespace: str) -> None:
    with RecordingStore(address, namespace) as store, through(store, RANKS[1], timeout_s=600.0) as loading:

        def interrupt() -> None:
            store.waited.wait(LIMIT_S)
            time.sleep(0.2)  # the main thread waits by now, and is not woken: as by a Ctrl-C just before its wait
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            next(iter(loading))
        thread.join()
        for reader in threading.enumerate():  # an interrupt during its start leaves the thread to end by itself
            if reader.name.startswith("dynapipe-loader"):
                reader.join(LIMIT_S)
                assert not reader.is_alive()


def test_exposed_planning_does_not_exceed_the_consumers_waiting(address: StoreAddress, namespace: str) -> None:
    with through(address, FIRST, namespace) as loading:
        plans(loading)
        assert loading.exposed_planning_s > 0  # the first plan cannot be ahead of its consumer


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
