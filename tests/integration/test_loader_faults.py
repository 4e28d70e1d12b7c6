"""The data loader while planners and servers are killed, and strangers and forgers write beside it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from dynapipe_ext.errors import StoreError
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.plans import channel as planner_pool
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.wire import encode
from dynapipe_ext.launch.store import RedisServer
from tests.support.store_loaders import (
    FIRST,
    KEY,
    RANKS,
    inline,
    keys_left,
    plans,
    redis_at,
    through,
    train_epochs,
    until_it_ends,
)

pytestmark = pytest.mark.usefixtures("forked_planners")
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


@pytest.fixture(scope="module")
def address() -> Iterator[StoreAddress]:
    with RedisServer() as server:
        yield server.address


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    return request.node.name


def test_planners_of_two_nodes_share_the_steps_and_one_that_is_killed_is_started_again(
    address: StoreAddress, namespace: str
) -> None:
    """Each node's first rank starts one planner; every rank gets the plans of planning in line."""
    loaders = [
        through(address, at, namespace, starts_planners=at.pp_rank == 0, node_rank=at.dp_rank, num_nodes=2)
        for at in sorted(RANKS, key=lambda at: at.dp_rank)
    ]
    try:
        steps = zip(*loaders, strict=True)
        found = [[encode(plan, KEY)] for _, plan in next(steps)]
        pools = [loading._channel._pool for loading in loaders if loading._channel]
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
        pool = loaders[0]._channel._pool
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
    rng, found, said = random.Random(0), [], ""
    with through(address, FIRST, namespace, num_workers=2) as loading, redis_at(address) as forger:
        for number, (_, plan) in enumerate(itertools.islice(cycled(loading), 60)):
            found.append(encode(plan, KEY))
            said += capsys.readouterr().err
            if number >= 10 and said:
                break
            if number % 3 == 2:  # what was read before is no longer asked for
                names = [name.encode() for name in forger_names(loading)] + keys_left(address, namespace)
                values = [forger.lindex(name, 0) or b"" for name in names]
                for name, value in zip(names, values, strict=True):
                    forger.delete(name)
                    forger.rpush(name, rng.choice((rng.randbytes(5000), rng.choice(values), value * 2)))
    assert found == list(itertools.islice((encode(plan, KEY) for _, plan in cycled(inline(FIRST))), len(found)))
    assert "refused, and asked for again" in said


def forger_names(loading: DynaPipeDataLoader) -> list[str]:
    """What is not always there: failures and wants of both workers."""
    assert loading._channel is not None
    keys, prefix = loading._channel._keys, f"dynapipe/{loading._channel._store.namespace}/"
    return [prefix + name for worker in range(2) for name in (keys.failure(worker), keys.wanted(worker))]


def test_planners_of_an_earlier_attempt_write_where_nobody_looks(address: StoreAddress, namespace: str) -> None:
    """Of the same run in the same namespace: its new key keeps them apart, though they still run."""
    with through(address, FIRST, namespace, plan_key=b"1" * 32, num_workers=2) as earlier:
        next(iter(earlier))
        with through(address, FIRST, namespace, plan_key=b"2" * 32) as later:
            assert plans(later) == train_epochs(inline(FIRST), 1)
            assert earlier._channel._keys.prefix != later._channel._keys.prefix
