"""Forked ranks start together, fail together and leave nothing behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import (
    ConfigError,
    DataError,
    ExecutionError,
    NotFiniteError,
    PlanError,
    StoreError,
    StoreRefusedError,
)
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.launch.processes.cluster import JobError, Supervised, failure_status, run_local
from dynapipe_ext.launch.processes.env import RankEnv, rank_env
from dynapipe_ext.schedules.planner import Planner
from tests.support.limits import LIMIT_S, SOON_S

Wait = Callable[[int], None]


def children() -> set[int]:
    """Processes that are children of this one, zombies too."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def most_descriptors() -> int:
    """How many are open; the keeper of a server that lives on closes its own for a moment now and then."""
    counts = []
    for _ in range(5):
        counts.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.002)
    return max(counts)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every test here ends with the processes, descriptors, handlers and files it began with."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    before = children()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    descriptors = most_descriptors()
    yield
    assert children() == before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert most_descriptors() <= descriptors
    assert list(scratch.iterdir()) == []


def test_every_rank_runs_once_with_its_own_place(run_ranks: Any) -> None:
    envs = run_ranks(4, lambda env: (env, rank_env()))
    assert [env.rank for env, _ in envs] == [0, 1, 2, 3]
    for env, from_variables in envs:
        assert (env.world_size, env.local_world_size, env.local_rank) == (4, 4, env.rank)
        assert env.init_method.startswith("file://")
        assert from_variables.variables() == env.variables()
    assert len({env.master_port for env, _ in envs}) == 1


def test_ranks_leave_ctrl_c_to_the_job_and_end_at_once_on_sigterm(run_ranks: Any) -> None:
    def handlers(env: RankEnv) -> tuple[Any, Any]:
        return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    assert run_ranks(1, handlers) == [(signal.SIG_IGN, signal.SIG_DFL)]


def test_ranks_meet_in_a_process_group(run_ranks: Any) -> None:
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("torch.distributed")

    def total(env: RankEnv) -> list[float]:
        distributed.init_process_group("gloo", init_method=env.init_method, rank=env.rank, world_size=env.world_size)
        x_N = torch.full((3,), float(env.rank))
        distributed.all_reduce(x_N)
        distributed.destroy_process_group()
        return list(x_N.tolist())

    assert run_ranks(3, total) == [[3.0, 3.0, 3.0]] * 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreError("the store did not answer for 60 s"), 75),
        (StoreRefusedError("the store refuses the password"), 2),
        (ExecutionError("rank 0 waited for rank 1"), 75),
        (NotFiniteError("the loss is nan"), 2),
        (PlanError("sample 3 does not fit"), 2),
    ],
)
def test_a_job_ends_with_75_if_another_start_may_succeed_else_with_2(error: Exception, status: int) -> None:
    def main(env: RankEnv) -> int:
        raise error

    with pytest.raises(JobError) as caught:
        run_local(main, 1, timeout_s=LIMIT_S)
    assert caught.value.exit_status == failure_status(error) == status


def test_the_first_failure_ends_all_ranks_and_names_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    def main(env: RankEnv) -> int:
        if env.rank == 2:
            raise DataError("line 7 of a.jsonl is no JSON:\n correct it")
        signal.pause()
        return 0

    with pytest.raises(JobError, match=r"rank 2 ended with exit status 2 \(see its message above\)") as caught:
        run_local(main, 4, timeout_s=LIMIT_S)
    assert caught.value.exit_status == 2
    assert caught.value.cause == "rank 2: line 7 of a.jsonl is no JSON: correct it"
    assert capfd.readouterr().err == "rank 2: line 7 of a.jsonl is no JSON: correct it\n"


def test_a_defect_prints_a_traceback_with_its_rank_and_gives_status_1(capfd: pytest.CaptureFixture[str]) -> None:
    def main(env: RankEnv) -> int:
        if env.rank == 1:
            raise ZeroDivisionError("a defect")
        signal.pause()
        return 0

    with pytest.raises(JobError, match="rank 1 ended with exit status 1") as caught:
        run_local(main, 2, timeout_s=LIMIT_S)
    assert caught.value.exit_status == 1
    assert caught.value.cause == "rank 1: ZeroDivisionError: a defect"
    lines = capfd.readouterr().err.splitlines()
    assert all(line.startswith("rank 1: ") for line in lines)
    assert lines[-1] == "rank 1: ZeroDivisionError: a defect"


def test_the_last_line_of_a_failing_model_says_where_and_on_what(capfd: pytest.CaptureFixture[str]) -> None:
    class Failing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no room")

    def main(env: RankEnv) -> int:
        planner = Planner(Topology(), TokenCosts(1), 1e9, format=ActivationFormat(4))
        plan = prove_step(planner, sample_lengths([5, 6, 7]), step=3).plans[0][0]
        batches = [{"tokens": torch.zeros(m.rows, m.encoder_len)} for m in plan.micro_batches]
        stage = TorchStage(Failing(), lambda output, batch: output, parameters=[torch.nn.Parameter(torch.zeros(1))])
        PipelineExecutor(stage, InlineHub().transport(0), rank=env.rank).execute(plan, batches)
        return 0

    with pytest.raises(JobError) as caught:
        run_local(main, 1, timeout_s=LIMIT_S)
    assert re.fullmatch(
        r"rank 0: MemoryError: no room; on rank 0 \(pipeline rank 0 of replica 0\), step 3, 0F0: micro-batch 0 of \d"
        r" rows x 8 tokens, padded, recomputation none; predicted peak of this rank \d+ bytes",
        caught.value.cause,
    )
    error = capfd.readouterr().err
    assert error.splitlines()[-1] == caught.value.cause
    assert error.count("no room\n") + error.count("no room;") == 1


def test_a_rank_that_returns_a_status_fails_with_it() -> None:
    with pytest.raises(JobError, match="exit status 9"):
        run_local(lambda env: 9 if env.rank == 0 else 0, 2, timeout_s=LIMIT_S)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    def main(env: RankEnv) -> int:
        if env.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        return 0

    with pytest.raises(JobError, match=r"rank 1 was killed by signal 9 \(SIGKILL\).*memory"):
        run_local(main, 3, timeout_s=LIMIT_S)


def test_a_killed_rank_is_named_though_another_has_said_first_that_it_is_gone() -> None:
    def main(env: RankEnv) -> int:
        if env.rank == 0:
            os.read(gone, 1)
            raise ConnectionError("closed by the peer")
        os.write(going, b".")  # as a killed process, whose connections are gone before it can be waited for
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    gone, going = os.pipe()
    try:
        with pytest.raises(JobError, match="rank 1 was killed by signal 9") as caught:
            run_local(main, 2, timeout_s=LIMIT_S)
    finally:
        os.close(gone)
        os.close(going)
    assert caught.value.exit_status == 75


def test_a_rank_that_ignores_sigterm_is_killed(run_ranks: Any) -> None:
    def main(env: RankEnv) -> int:
        if env.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(ready, b".")
            signal.pause()
        os.read(start, 1)
        return 3

    start, ready = os.pipe()
    try:
        with pytest.raises(JobError, match="rank 1 ended with exit status 3"):
            run_local(main, 2, timeout_s=LIMIT_S, grace_s=0.2)
    finally:
        os.close(start)
        os.close(ready)


def test_at_the_time_limit_every_ranks_stack_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def where_it_hangs() -> None:
        signal.pause()

    def main(env: RankEnv) -> int:
        if env.rank != 1:
            where_it_hangs()
        return 0

    with pytest.raises(JobError, match=r"not ended after 0\.5 s: rank 0, rank 2 \(stacks above\)"):
        run_local(main, 3, timeout_s=0.5)
    text = capfd.readouterr().err
    assert re.findall(r"^--- (rank \d)", text, re.M) == ["rank 0", "rank 2"]
    assert text.count("in where_it_hangs") == 2


def test_a_signal_to_the_launching_process_prints_every_ranks_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def where_it_waits(env: RankEnv) -> int:
        if env.rank == 1:
            (tmp_path / "waits").touch()
        else:
            while not (tmp_path / "waits").exists():
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGUSR2)
        while "--- rank 1" not in Path("/proc/self/fd/2").read_text():
            time.sleep(0.01)
        return 0

    run_local(where_it_waits, 2, timeout_s=LIMIT_S)
    text = capfd.readouterr().err
    assert re.findall(r"^--- (rank \d)", text, re.M) == ["rank 0", "rank 1"]
    assert text.count("in where_it_waits") == 2


def test_no_exception_of_a_rank_returns_into_the_callers_stack(tmp_path: Path) -> None:
    def main(env: RankEnv) -> int:
        raise SystemExit("leave")

    try:
        with pytest.raises(JobError, match="exit status 1"):
            run_local(main, 2, timeout_s=LIMIT_S)
    finally:
        (tmp_path / str(os.getpid())).touch()
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == [str(os.getpid())]


def test_no_ranks_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="number of ranks is 0"):
        run_local(lambda env: 0, 0)


def test_a_rank_that_is_stopped_for_too_long_ends_the_job_and_is_named() -> None:
    def main(env: RankEnv) -> int:
        if env.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return _pause(env)

    with pytest.raises(JobError, match=r"rank 1 \(pid \d+\) was stopped for 0\.1 s, by SIGSTOP"):
        run_local(main, 2, timeout_s=LIMIT_S, grace_s=0.1, stopped_s=0.1)


def test_a_process_beside_the_ranks_is_ended_by_its_context() -> None:
    with Supervised.spawn("sleeper", ["sleep", "600"]) as sleeper:
        run_local(lambda env: 0, 2, timeout_s=LIMIT_S)
        assert sleeper.poll() is None
    assert sleeper.poll() == -signal.SIGTERM


def test_a_spawned_process_reads_its_secret_from_standard_input(tmp_path: Path) -> None:
    command = ["sh", "-c", 'cat > "$TARGET"; exit 4']
    extra = {"TARGET": str(tmp_path / "read")}
    with Supervised.spawn("reader", command, stdin=b"secret", environment=extra) as reader:
        os.waitid(os.P_PIDFD, reader.pidfd, os.WEXITED | os.WNOWAIT)
        assert reader.verdict().startswith("reader ended with exit status 4")
        assert b"secret" not in " ".join(command).encode()
    assert (tmp_path / "read").read_bytes() == b"secret"


def test_a_process_that_cannot_be_started_names_the_program() -> None:
    with pytest.raises(ExecutionError, match=r"planner 1 cannot be started .*/nowhere/planner"):
        Supervised.spawn("planner 1", ["/nowhere/planner"])


def _pause(env: RankEnv) -> int:
    signal.pause()
    return 0


JOB = textwrap.dedent("""
    import os, signal, sys, types
    from dynapipe_ext.launch import cli, subcommands
    from dynapipe_ext.launch.processes.cluster import Supervised, run_local
    from dynapipe_ext.launch.store import RedisServer

    def pause():
        os.write(1, f"{os.getpid()}\\n".encode())
        signal.pause()
        return 0

    def run(args):
        with RedisServer() as server, Supervised.fork("planner 0", pause) as planner:
            os.write(1, f"{server.pid}\\n".encode())
            run_local(lambda env: pause(), 3)
        return 0

    sys.modules["job"] = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
    subcommands.SUBCOMMANDS = (subcommands.Subcommand("job", "job", "a job"),)
    sys.exit(cli.main(["job"]))
""")
JOB_PROCESSES = 5


@pytest.mark.parametrize(
    ("number", "whole_group", "status"),
    [
        (signal.SIGINT, True, 130),  # Ctrl-C in a terminal goes to the whole group
        (signal.SIGINT, False, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
    ids=["ctrl-c", "sigint", "sigterm", "sigkill"],
)
def test_a_signal_to_the_job_ends_ranks_planner_and_server(
    number: signal.Signals, whole_group: bool, status: int, tmp_path: Path, wait_until_gone: Wait
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", JOB],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as job:
        assert job.stdout is not None
        pids = [int(job.stdout.readline()) for _ in range(JOB_PROCESSES)]
        if whole_group:
            os.killpg(job.pid, number)
        else:
            job.send_signal(number)
        assert job.wait(SOON_S) == status
        for pid in pids:
            wait_until_gone(pid)
        assert job.stderr is not None
        assert job.stderr.read() == ""
    if number != signal.SIGKILL:
        assert list(folder.iterdir()) == []


def test_two_signals_in_a_row_still_clean_up(tmp_path: Path, wait_until_gone: Wait) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", JOB],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as job:
        assert job.stdout is not None
        pids = [int(job.stdout.readline()) for _ in range(JOB_PROCESSES)]
        while job.poll() is None:
            job.send_signal(signal.SIGINT)
            job.send_signal(signal.SIGTERM)
            time.sleep(1e-4)  # a tight loop would nest CPython's handlers faster than one of them can start
        for pid in pids:
            wait_until_gone(pid)
    assert list(folder.iterdir()) == []


def test_ranks_have_no_stake_in_the_servers_life(redis_server: Any, run_ranks: Any) -> None:
    def leave(env: RankEnv) -> str:
        redis_server.close()
        return str(redis_server.address.url)

    assert run_ranks(2, leave) == [redis_server.address.url] * 2
    assert Path(redis_server.address.path).is_socket()
