"""Planner processes that are killed or hang, stores that lose plans, and messages that nobody of the job has signed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest
import redis

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.data.batches import StepPosition
from dynapipe_ext.errors import StoreError
from dynapipe_ext.executor.plans import channel as planner_pool
from dynapipe_ext.executor.plans.channel import PlannerProcesses, StorePlanSource
from dynapipe_ext.executor.plans.planner_process import publish_failure, recent_places
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.opening import MemoryStore
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.executor.wire import encode
from dynapipe_ext.launch.store import RedisServer
from tests.support.planned_steps import (
    KEY,
    KEYS,
    LENGTHS,
    PLANNER,
    job_of,
    places,
    plan_key,
    publisher,
    source,
    until,
)

pytestmark = pytest.mark.usefixtures("forked_planners")


@pytest.fixture(scope="module")
def address() -> Iterator[StoreAddress]:
    with RedisServer() as server:
        yield server.address


@pytest.fixture
def store(address: StoreAddress, request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    with RedisStore(address, namespace=request.node.name) as made:
        yield made


def test_a_killed_planner_is_started_again_where_the_ranks_are(store: RedisStore) -> None:
    order, mine = places(12), source(store)
    with PlannerProcesses(job_of(store), store, LENGTHS) as pool:
        for place, _ in order:
            if place.global_step in (3, 6):
                killed = pool.processes[place.step % 2].pid
                os.kill(killed, signal.SIGKILL)
                until(lambda killed=killed: killed not in [process.pid for process in pool.processes])
            assert mine.plan(place).step == place.global_step
            pool.reached(place)
        assert pool.poll() == {}


def test_any_number_of_planners_publishes_the_same_bytes_whichever_is_killed(address: StoreAddress) -> None:
    ranks, published = [(dp_rank, pp_rank) for dp_rank in range(2) for pp_rank in range(2)], []
    for num_workers in (1, 2, 5):
        with RedisStore(address, namespace=f"{num_workers}-planners") as store:
            mine, data = source(store, num_planners=num_workers), {}
            with PlannerProcesses(job_of(store, num_workers=num_workers), store, LENGTHS) as pool:
                for place, _ in places(12):
                    if place.global_step == 2:  # its next plan is 4 steps or more ahead: another process makes it
                        pid = pool.processes[place.step % num_workers].pid
                        os.kill(pid, signal.SIGKILL)
                        until(lambda pid=pid, pool=pool: pid not in [process.pid for process in pool.processes])
                    assert mine.plan(place).step == place.global_step
                    pool.reached(place)
                    for rank in ranks:
                        data[place, rank] = store.get(plan_key(place, *rank), 60.0)
            published.append(data)
    assert published[1:] == published[:1] * 2


def test_a_planner_that_is_killed_again_and_again_is_named_at_a_rank_that_waits_for_it(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_pool, "_MOST_STARTS", 2)
    with PlannerProcesses(job_of(store), store, LENGTHS) as pool:
        for _ in range(2):
            until(lambda: 1 not in pool.poll())
            pid = pool.processes[1].pid
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: pool.processes[1].pid != pid or 1 in pool.poll())
        with pytest.raises(
            StoreError, match=rf"planner process 1 \(pid {pid}\) was killed by SIGKILL.*step 7 of epoch 3"
        ):
            source(store, timeout_s=600.0).plan(StepPosition(3, 7, 31))
        assert pool.poll() == {1: -signal.SIGKILL}


def test_a_planner_that_falls_silent_is_started_again(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_pool, "SILENT_AFTER_S", 5.0)
    with PlannerProcesses(job_of(store), store, LENGTHS) as pool:
        store.get(KEYS.heartbeat(1), 60.0)
        os.kill(pool.processes[1].pid, signal.SIGSTOP)
        assert [source(store).plan(place).step for place, _ in places(8)] == list(range(8))


def test_plans_that_the_store_loses_are_published_again_bit_for_bit(store: RedisStore) -> None:
    """FLUSHALL takes plans, marks and signs, whatever rank 0 has taken and other ranks have not."""
    sources = {(d, p): source(store, dp_rank=d, pp_rank=p) for d in range(2) for p in range(2)}
    order = places(12)
    with PlannerProcesses(job_of(store), store, LENGTHS) as pool:
        for place, indices in order:
            expected = prove_step(PLANNER, sample_lengths(LENGTHS, indices), step=place.global_step).plans
            for (dp_rank, pp_rank), one in sources.items():
                assert encode(one.plan(place), KEY) == encode(expected[dp_rank][pp_rank], KEY)
                if place.global_step in (0, 6) and (dp_rank, pp_rank) == (0, 1):
                    with redis.Redis.from_url(store.address.url, password=store.address.password) as admin:
                        admin.flushall()
        assert pool.poll() == {}


def test_a_planner_that_falls_silent_is_named_without_its_owners_help(store: RedisStore) -> None:
    with PlannerProcesses(job_of(store), store, LENGTHS) as pool:
        store.get(KEYS.heartbeat(1), 60.0)
        os.kill(pool.processes[1].pid, signal.SIGSTOP)
        with pytest.raises(StoreError, match=r"planner process 1 has given no sign for .* step 7 of epoch 3"):
            source(store, timeout_s=600.0, silent_after_s=3.0).plan(StepPosition(3, 7, 31))
        os.kill(pool.processes[1].pid, signal.SIGCONT)


def test_a_failed_session_keeps_its_plans_for_the_ranks(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_pool, "_MOST_STARTS", 1)
    with PlannerProcesses(job_of(store), store, LENGTHS) as pool:
        store.get(plan_key(StepPosition()), 60.0)
        store.get(plan_key(places(2)[1][0]), 60.0)
        pool.processes[0].terminate()
        store.get(KEYS.failure(0), 60.0)
    assert store.try_get(plan_key(StepPosition())) is not None
    assert store.try_get(plan_key(places(2)[1][0])) is not None  # its neighbour's too, though that was closed


def test_what_is_not_signed_for_its_name_is_refused_and_the_plan_published_again(
    store: RedisStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another rank's plan, another key's, a plan cut short, random bytes: each in the place of a genuine plan."""
    order, mine = places(5), source(store, num_planners=1)
    with PlannerProcesses(job_of(store, num_workers=1), store, LENGTHS):
        genuine = {place: store.get(plan_key(place), 60.0) for place, _ in order[:4]}
        first = prove_step(PLANNER, sample_lengths(LENGTHS, order[1][1]), step=1).plans[0][0]
        forged = [
            store.get(plan_key(order[0][0], 1, 1), 60.0),
            encode(first, b"j" * 32, context=plan_key(order[1][0]).encode()),
            genuine[order[2][0]][:-7],
            random.Random(0).randbytes(100_000),
        ]
        for (place, _), data in zip(order, forged, strict=False):
            store.put(plan_key(place), data)
        for place, data in genuine.items():
            assert encode(mine.plan(place), KEY, context=plan_key(place).encode()) == data
        assert mine.plan(order[4][0]).step == 4
    assert capsys.readouterr().err.count("refused, and asked for again") == 4


def test_a_rank_with_another_key_than_its_planners_is_told_within_seconds(store: RedisStore) -> None:
    with PlannerProcesses(job_of(store), store, LENGTHS):
        other = StorePlanSource(store, KEYS, b"j" * 32, dp_rank=0, pp_rank=0, num_planners=2, timeout_s=600.0)
        with pytest.raises(StoreError, match="signature"):
            other.plan(StepPosition())


def test_a_refused_plan_that_nobody_publishes_again_is_named_at_the_limit() -> None:
    store = MemoryStore()
    publisher(store).publish(places(1))
    store.put(plan_key(StepPosition(), 0, 0), store.get(plan_key(StepPosition(), 1, 0), 1.0))
    with pytest.raises(StoreError, match=r"within 0\.3 s .*was refused: .*signature"):
        source(store, num_planners=1, timeout_s=0.3).plan(StepPosition())


def test_a_forged_failure_is_not_believed(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    publish_failure(store, KEYS, b"j" * 32, 0, "pay here", of_planning=True)
    with pytest.raises(StoreError, match="did not publish"):
        source(store, timeout_s=0.3).plan(StepPosition())
    assert "not believed" in (said := capsys.readouterr().err)
    assert "pay here" not in said


def test_a_planner_answers_nothing_but_its_own_plans() -> None:
    store = MemoryStore()
    one, recent = publisher(store), recent_places(3)
    one.publish(places(2), recent)
    for asked in (b"", b"\xff" * 9, b"topic/1/plan/0/0/0/0/0", plan_key(StepPosition(0, 7, 7)).encode(), b"x" * 10**6):
        store.put(KEYS.wanted(0), asked)
        assert one.answer(recent) is None
        assert store.try_get(KEYS.wanted(0)) is None
