"""Planner processes against a real server: they keep ahead, fail aloud, and never outlive their owner."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import as_length_array, sample_lengths
from dynapipe_ext.data.batches import StepPosition, step_positions
from dynapipe_ext.errors import ConfigError, PlanError, StoreError
from dynapipe_ext.executor import proven_step
from dynapipe_ext.executor.plans.channel import PlannerProcesses
from dynapipe_ext.executor.plans.planner_process import describe_planner, publish_failure
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.executor.store.opening import MemoryStore
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.executor.wire import decode, encode
from dynapipe_ext.launch.store import RedisServer
from tests.support.limits import LIMIT_S
from tests.support.planned_steps import (
    KEY,
    KEYS,
    LENGTHS,
    PLANNER,
    RULE,
    job_of,
    places,
    plan_key,
    publisher,
    source,
    until,
)


@pytest.fixture(scope="module")
def address() -> Iterator[StoreAddress]:
    with RedisServer() as server:
        yield server.address


@pytest.fixture
def store(address: StoreAddress, request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    with RedisStore(address, namespace=request.node.name) as made:
        yield made


def is_running(pid: int) -> bool:
    """False for a zombie too: an orphan's new parent may be slow to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("forked_planners")
def test_every_rank_gets_the_plan_that_it_would_make_itself_over_epochs(store: RedisStore) -> None:
    sources = {(d, p): source(store, dp_rank=d, pp_rank=p) for d in range(2) for p in range(2)}
    with PlannerProcesses(job_of(store), store, LENGTHS):
        for place, indices in places(19):  # two epochs of 8 steps, and some
            expected = prove_step(PLANNER, sample_lengths(LENGTHS, indices), step=place.global_step).plans
            for (dp_rank, pp_rank), one in sources.items():
                plan = one.plan(place)
                assert encode(plan, KEY) == encode(expected[dp_rank][pp_rank], KEY)
                assert (plan.step, plan.dp_rank, plan.pp_rank) == (place.global_step, dp_rank, pp_rank)


@pytest.mark.usefixtures("forked_planners")
def test_planners_stay_exactly_so_far_ahead_of_rank_0(store: RedisStore) -> None:
    order = [place for place, _ in places(8)]
    with PlannerProcesses(job_of(store, ahead=4), store, LENGTHS):
        for place in order[:4]:
            store.get(plan_key(place), 60.0)
        assert store.try_get(plan_key(order[4])) is None
        source(store).plan(order[0])
        store.get(plan_key(order[4]), 60.0)
        assert store.try_get(plan_key(order[5])) is None


def test_plans_that_nobody_needs_any_more_are_deleted() -> None:
    store = MemoryStore()
    order = places(40)
    for place, _ in order:
        store.put(KEYS.taken(epoch=place.epoch, step=place.step), b"1")
    publisher(store).publish(order)
    left = [place for place, _ in order if store.try_get(plan_key(place, 1, 1))]
    assert left == [place for place, _ in order[-10:]]  # 2 x ahead and the slack of 4
    assert store.try_get(KEYS.taken(epoch=0, step=0)) is None


def test_nothing_secret_stands_in_arguments_or_environment(store: RedisStore) -> None:
    with PlannerProcesses(job_of(store), store, LENGTHS) as pool:
        store.get(KEYS.heartbeat(0), 60.0)
        for process in pool.processes:
            visible = (
                Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
            )
            for secret in (store.address.password, KEY.hex(), store.address.url):
                assert secret.encode() not in visible


def test_planning_processes_do_not_import_torch() -> None:
    modules = "dynapipe_ext.executor.plans.planner_process, dynapipe_ext.schedules.planner"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S, check=False).returncode == 0


@pytest.mark.usefixtures("forked_planners")
def test_a_batch_that_cannot_be_planned_ends_every_rank_with_the_planners_sentence(store: RedisStore) -> None:
    tight = replace(PLANNER, memory_limit_bytes=10.0)
    with pytest.raises(PlanError) as wanted:
        prove_step(tight, sample_lengths(LENGTHS, places(1)[0][1]), step=0)
    job = replace(job_of(store), planner=describe_planner(tight))
    with PlannerProcesses(job, store, LENGTHS):
        for dp_rank in range(2):
            with pytest.raises(PlanError) as found:
                source(store, dp_rank=dp_rank, timeout_s=600.0).plan(StepPosition())
            assert str(found.value) == str(wanted.value)


def test_a_bug_in_a_planner_is_told_with_its_type_worker_and_step(
    store: RedisStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_planner.py").write_text(
        "class Broken:\n"
        "    memory_limit_bytes, activation_format, replica_collectives = 1e9, None, None\n"
        "    @classmethod\n"
        "    def from_json(cls, settings): return cls()\n"
        "    def plan(self, samples, **where): raise ZeroDivisionError('by nought')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = replace(job_of(store), planner={"class": "broken_planner:Broken", "settings": {}})
    with (
        PlannerProcesses(job, store, LENGTHS),
        pytest.raises(PlanError, match="planner process 0 failed on step 0 of epoch 0: ZeroDivisionError: by nought"),
    ):
        source(store, timeout_s=600.0).plan(StepPosition())


@pytest.mark.usefixtures("forked_planners")
def test_a_planner_that_cannot_start_ends_the_wait(store: RedisStore) -> None:
    job = replace(job_of(store), planner={"class": "no_such_module:Planner", "settings": {}})
    with (
        PlannerProcesses(job, store, LENGTHS),
        pytest.raises(PlanError, match="failed while starting: ModuleNotFoundError: No module named 'no_such_module'"),
    ):
        source(store, timeout_s=600.0).plan(StepPosition())


@pytest.mark.parametrize("stop_s", [60.0, 0.0], ids=["asked", "killed"])
@pytest.mark.usefixtures("forked_planners")
def test_closing_the_pool_leaves_no_process_and_blames_nobody(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, stop_s: float
) -> None:
    """Also where a killed process takes longer to end than planners that were asked to."""
    monkeypatch.setattr("dynapipe_ext.executor.plans.channel._STOP_S", stop_s)
    with PlannerProcesses(job_of(store), store, LENGTHS) as pool:
        store.get(KEYS.heartbeat(0), 60.0)
    assert set(pool.poll()) == {0, 1}
    assert [store.try_get(KEYS.failure(worker)) for worker in range(2)] == [None, None]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_planners_end_with_their_owner_and_leave_no_file(
    store: RedisStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: signal.Signals
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    (tmp_path / "job.json").write_text(job_of(store).to_json())
    np.save(tmp_path / "lengths.npy", LENGTHS)
    owner_code = (
        "import sys, numpy as np, time\n"
        "from dynapipe_ext.executor.plans.channel import PlannerProcesses\n"
        "from dynapipe_ext.executor.plans.planner_process import PlannerJob\n"
        "from dynapipe_ext.executor.store.opening import MemoryStore\n"
        f"job = PlannerJob.from_json(open({str(tmp_path / 'job.json')!r}).read())\n"
        f"pool = PlannerProcesses(job, MemoryStore(), np.load({str(tmp_path / 'lengths.npy')!r}))\n"
        "print(*[process.pid for process in pool.processes], flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", owner_code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        store.get(KEYS.heartbeat(0), 60.0)
        store.get(KEYS.heartbeat(1), 60.0)
        owner.send_signal(end)
    assert len(pids) == 2
    until(lambda: not any(is_running(pid) for pid in pids))
    assert list(scratch.iterdir()) == []


@pytest.mark.usefixtures("forked_planners")
def test_lengths_and_order_larger_than_a_pipe_reach_the_planners_whole(store: RedisStore) -> None:
    lengths = as_length_array(np.random.default_rng(1).integers(4, 90, 60_000))
    order = np.random.default_rng(2).permutation(60_000)
    with PlannerProcesses(job_of(store), store, lengths, order):
        plan = source(store).plan(StepPosition())
    steps = step_positions(RULE, lengths, StepPosition(), order)
    expected = prove_step(PLANNER, sample_lengths(lengths, next(steps)[1]), step=0).plans
    assert encode(plan, KEY) == encode(expected[0][0], KEY)


def test_a_planner_that_does_not_read_its_input_holds_up_neither_start_nor_close(
    store: RedisStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\nexec sleep 600\n")
    deaf.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(deaf))
    with PlannerProcesses(job_of(store), store, as_length_array(np.full(100_000, 5))) as pool:
        assert pool.poll() == {}
    assert set(pool.poll()) == {0, 1}
    assert not any(thread.is_alive() for thread in pool._threads)


@pytest.mark.usefixtures("forked_planners")
@pytest.mark.parametrize("order_size", [None, 10])
def test_a_planner_whose_input_ends_too_early_says_so(store: RedisStore, order_size: int | None) -> None:
    job = replace(job_of(store), num_samples=100, order_size=order_size)
    sent = 2399 if order_size is None else 2479
    done = subprocess.run(
        [sys.executable, "-m", "dynapipe_ext.executor.plans.planner_process"],
        input=job.to_json().encode() + b"\n" + bytes(sent),
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert b"planner process 0: standard input ended after" in done.stderr
    assert store.try_get(KEYS.heartbeat(0)) is None


def test_a_planner_ends_when_its_input_closes(store: RedisStore) -> None:
    job = replace(job_of(store), num_samples=len(LENGTHS))
    with subprocess.Popen(
        [sys.executable, "-m", "dynapipe_ext.executor.plans.planner_process"], stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(job.to_json().encode() + b"\n" + LENGTHS.astype("<i8").tobytes())
        process.stdin.flush()
        store.get(KEYS.heartbeat(0), 60.0)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0


def test_a_planner_class_of_the_main_script_is_refused_before_anything_starts() -> None:
    kind = type("Planner", (), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match="define it in a module"):
        describe_planner(kind())


def test_an_overdue_plan_names_the_planner_the_step_and_the_rank() -> None:
    with pytest.raises(
        StoreError, match=r"planner process 1 did not publish .*step 3 of epoch 2.*pp_rank 1 within 0\.3 s"
    ):
        source(MemoryStore(), pp_rank=1, timeout_s=0.3).plan(StepPosition(2, 3, 9))


def test_a_rank_at_another_step_than_its_planners_is_told() -> None:
    store = MemoryStore()
    publisher(store).publish(places(1))
    with pytest.raises(StoreError, match="same checkpoint"):
        source(store, num_planners=1).plan(StepPosition(0, 0, 5))


def test_a_failure_of_a_later_step_does_not_stop_a_rank_that_waits_for_another_planner() -> None:
    store = MemoryStore()
    publish_failure(store, KEYS, KEY, 1, "step 1 does not fit", of_planning=True)
    with pytest.raises(StoreError, match="did not publish"):
        source(store, timeout_s=0.3).plan(StepPosition(0, 0, 0))
    with pytest.raises(PlanError, match="step 1 does not fit"):
        source(store, timeout_s=LIMIT_S).plan(StepPosition(0, 1, 1))


def test_the_first_failure_stays() -> None:
    store = MemoryStore()
    publish_failure(store, KEYS, KEY, 0, "the cause", of_planning=True)
    publish_failure(store, KEYS, KEY, 0, "a consequence", of_planning=False)
    with pytest.raises(PlanError, match="the cause"):
        source(store, timeout_s=LIMIT_S).plan(StepPosition())


def test_plans_are_verified_before_they_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    real = proven_step.lower

    def without_waits(*arguments: object, **named: object) -> object:
        plans = real(*arguments, **named)
        return tuple(tuple(replace(plan, instructions=plan.instructions[:-1]) for plan in replica) for replica in plans)

    monkeypatch.setattr(proven_step, "lower", without_waits)
    store = MemoryStore()
    with pytest.raises(Exception, match="rank"):
        publisher(store).publish(places(1))
    assert store.try_get(plan_key(StepPosition())) is None
    with pytest.raises(PlanError):
        source(store, num_planners=1).plan(StepPosition())


def test_time_spent_waiting_for_plans_is_counted() -> None:
    store = MemoryStore()
    waiting = source(store, timeout_s=0.3)
    with pytest.raises(StoreError):
        waiting.plan(StepPosition())
    assert waiting.exposed_planning_s >= 0.3


def test_a_stored_plan_is_signed_for_its_name(store: RedisStore) -> None:
    with PlannerProcesses(job_of(store), store, LENGTHS):
        data = store.get(plan_key(StepPosition()), 60.0)
    assert decode(data, KEY, context=plan_key(StepPosition()).encode()).step == 0
