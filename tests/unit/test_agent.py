"""A node's launcher, with real processes in the place of torchrun and its ranks: what it notices, ends and says."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dynapipe_ext.launch.processes import torchrun
from dynapipe_ext.launch.processes.agent import NodeEnd, Order, RankRecord, read_rank_records, run_agent
from dynapipe_ext.launch.processes.cluster import LOST_STATUS, Supervised
from dynapipe_ext.launch.processes.env import launcher
from dynapipe_ext.launch.processes.signals import ending_signals_raise
from tests.support.limits import LIMIT_S

GRACE_S = 40.0

# As torchrun: starts ranks, and ends with 1 as soon as one has failed, once it has ended the others.
AGENT = """
import os, signal, sys, time
from dynapipe_ext.errors import ConfigError, ExecutionError, NoRoomError, NotFiniteError, StoreError, StoreRefusedError
from dynapipe_ext.executor.parent_death import end_with_parent, supervising_pid
from dynapipe_ext.launch.processes.cluster import JobError
from dynapipe_ext.launch.processes.env import launcher
from dynapipe_ext.launch.processes.agent import recorded
from dynapipe_ext.launch.processes.signals import ending_signals_raise

def fail(error, cause, is_final=None):
    final = not getattr(error, "may_pass", True) if is_final is None else is_final
    raise JobError(str(error), 1 if isinstance(error, ValueError) else 2, cause, is_final=final) from error

def rank(number, body):
    agent = supervising_pid()
    if child := os.fork():
        return child
    end_with_parent(agent)
    try:
        with ending_signals_raise(), recorded(launcher().records, 0, number):
            body()
    except SystemExit as error:
        os._exit(error.code)
    except JobError as error:
        os._exit(error.exit_status)
    os._exit(0)

def watch(*bodies):
    ranks = [rank(number, body) for number, body in enumerate(bodies)]
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGTERM)
                os.waitpid(other, 0)
            sys.exit(1)

def wait():
    time.sleep(60)

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def ended(body: str, *, timeout_s: float = 60.0, order: Callable[[], Order] = lambda: "") -> NodeEnd:
    command = [sys.executable, "-c", AGENT + body]
    return run_agent(command, secret="hidden", timeout_s=timeout_s, grace_s=GRACE_S, order=order)


@pytest.mark.parametrize(
    ("body", "status", "says", "may_restart"),
    [
        ("watch(lambda: None, lambda: None)", 0, "", False),
        ("watch(wait, killed)", LOST_STATUS, r"rank 1 \(process \d+\) was killed: if nobody did that, memory", True),
        ("watch(wait, lambda: fail(ConfigError('no'), 'no'))", 2, "", False),
        ("watch(wait, lambda: fail(NotFiniteError('nan'), 'nan'))", 2, "", False),  # it would be so again
        ("watch(wait, lambda: fail(StoreRefusedError('no TLS'), 'no TLS'))", 2, "", False),
        ("watch(wait, lambda: fail(StoreError('away'), 'away'))", LOST_STATUS, "", True),
        ("watch(wait, lambda: fail(NoRoomError('full'), 'full'))", 2, "", False),
        ("watch(wait, lambda: fail(ExecutionError('late'), 'late'))", LOST_STATUS, "", True),
        ("watch(wait, lambda: fail(ExecutionError('late'), 'another is why'))", LOST_STATUS, "", True),
        ("watch(wait, lambda: fail(ExecutionError('late'), 'a mistake elsewhere', True))", 2, "a mistake else", False),
        ("watch(wait, lambda: fail(ConfigError('late'), 'a host was lost', False))", LOST_STATUS, "", True),
        ("watch(wait, lambda: fail(ValueError('bug'), 'bug'))", 1, "", True),
        ("watch(wait, lambda: sys.exit(138))", 138, "", False),  # another node was asked to save
        ("sys.exit(3)", LOST_STATUS, "no rank has begun: torchrun ended with exit status 3", True),
        ("rank(0, lambda: (os.kill(os.getppid(), 9), wait())); wait()", LOST_STATUS, "torchrun was killed by", True),
        ("killed()", LOST_STATUS, r"no rank has begun: torchrun was killed by signal 9", True),
    ],
)
def test_how_ranks_end_is_how_the_node_does(body: str, status: int, says: str, may_restart: bool) -> None:
    end = ended(body)
    assert (end.status, end.may_restart) == (status, may_restart)
    assert re.match(says, end.cause) if says else end.cause == ""


def test_a_killed_rank_is_named_though_somebody_sets_the_clock_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + 3600.0)  # of the launcher, once ranks have ended
    assert re.match(r"rank 1 \(process \d+\) was killed: ", ended("watch(wait, killed)").cause)


def test_ranks_that_have_ended_before_the_first_look_leave_the_agent_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynapipe_ext.launch.processes.agent._POLL_S", 2.0)
    end = ended("os.waitpid(rank(0, lambda: sys.exit(138)), 0); time.sleep(3); sys.exit(1)")
    assert (end.status, end.cause) == (138, "")


def test_what_stands_still_is_killed_by_name() -> None:
    end = ended("watch(wait, stopped)", timeout_s=0.5)
    assert (end.status, end.may_restart) == (LOST_STATUS, True)
    assert re.fullmatch(r"rank 1 \(process \d+\) was stopped for 0.5 s, and is killed", end.cause)
    end = ended("stopped()", timeout_s=0.5)
    assert re.fullmatch(r"torchrun \(process \d+\) was stopped for 0.5 s, and is killed", end.cause)


def test_an_agent_that_stays_when_its_ranks_have_failed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynapipe_ext.launch.processes.agent._AFTER_RANKS_S", 0.5)
    end = ended("os.waitpid(rank(0, lambda: fail(ExecutionError('late'), 'x')), 0); wait()", timeout_s=0.1)
    assert (end.status, end.cause) == (LOST_STATUS, "no rank has run here for 0.6 s, and none will")


@pytest.mark.parametrize("pressed", [False, True], ids=["an order", "Ctrl-C"])
def test_ranks_that_are_asked_to_save_end_by_themselves_and_are_not_started_again(
    pressed: bool, tmp_path: Path
) -> None:
    """Torchrun, which would take their end for a failure, stands still meanwhile."""
    orders: list[Order] = []

    def order() -> Order:
        if not (tmp_path / "began").exists():
            return ""
        orders.append("save")
        if pressed and len(orders) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return "save"

    body = f"""
def save():
    try:
        open({str(tmp_path / "began")!r}, "w")
        wait()
    except SystemExit as error:
        time.sleep(0.3)
        open({str(tmp_path)!r} + f"/saved-{{error.code}}", "w")
        raise
os.waitpid(rank(0, save), 0)
open({str(tmp_path / "again")!r}, "w")
"""
    with pytest.raises(KeyboardInterrupt if pressed else SystemExit) as caught, ending_signals_raise():
        ended(body, order=order)
    assert pressed or caught.value.code == 138  # type: ignore[attr-defined]
    assert {path.name for path in tmp_path.iterdir()} == {"began", "saved-138"}


def test_on_request_the_stacks_of_a_nodes_ranks_are_said_each_by_itself_and_the_job_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked by a signal, and then by the launcher of another node; what was said the first time is not said again."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    body = f"""
from pathlib import Path
def waits_here():
    while not Path({str(tmp_path / "over")!r}).exists():
        time.sleep(0.01)
watch(waits_here, waits_here)
"""
    requests = [
        lambda: "",  # ranks begin after the first look
        lambda: os.kill(os.getpid(), signal.SIGUSR2) or "",
        lambda: "stacks",
        lambda: (tmp_path / "over").touch() or "",
    ]
    looks = iter(requests)

    def order() -> Order:
        records = [rank for folder in tmp_path.glob("*/ranks") for rank in read_rank_records(folder)]
        return next(looks, lambda: "")() if sum(rank.runs for rank in records) >= 2 else ""

    assert ended(body, order=order).status == 0
    said = capfd.readouterr().err
    titles = re.findall(rf"^--- (rank \d) \(pid \d+ on {os.uname().nodename}\):\nCurrent thread", said, re.M)
    assert titles == ["rank 0", "rank 1"] * 2
    assert said.count("in waits_here") == 4


def test_a_second_ctrl_c_ends_ranks_that_are_saving(tmp_path: Path) -> None:
    def order() -> Order:
        if (tmp_path / "began").exists():
            os.kill(os.getpid(), signal.SIGINT)
        return ""

    body = f"""
def save():
    try:
        open({str(tmp_path / "began")!r}, "w")
        wait()
    except SystemExit:
        os.kill(launcher().pid, signal.SIGINT)
        wait()
os.waitpid(rank(0, save), 0)
"""
    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ending_signals_raise():
        ended(body, order=order)
    assert time.monotonic() - start_s < GRACE_S
    assert ended("wait()", order=lambda: "end").status == 130  # who started the launcher has gone


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--standalone", "--nproc-per-node", "2", "--no-python", "false"], ""),
        (["--rdzv-backend", "carrier-pigeon", "--nnodes", "2", "x.py"], r"torchrun: ValueError: .*carrier-pigeon.*\n"),
    ],
)
def test_torchrun_says_nothing_of_ranks_that_fail_and_in_a_line_what_stops_itself(
    words: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with Supervised.fork("torchrun", lambda: torchrun.main(words)) as agent:
        select.select([agent.pidfd], [], [], LIMIT_S)
        assert agent.poll() == 1
    assert re.fullmatch(says, capfd.readouterr().err)


@pytest.mark.parametrize(
    ("rank", "end"),
    [
        ("", NodeEnd(LOST_STATUS, "torchrun: the others are gone")),
        ("lambda: sys.exit(143)", NodeEnd(LOST_STATUS, "torchrun: the others are gone")),
        ('lambda: fail(ConfigError("x"), "rank 3: x")', NodeEnd(2, "rank 3: x")),  # why the others have gone
    ],
)
def test_what_stops_torchrun_is_the_launchers_to_say_where_no_rank_knows_better(
    rank: str, end: NodeEnd, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"""
from dynapipe_ext.launch.processes.agent import leave_words_of_agent
try:
    watch({rank})
except SystemExit:
    pass
leave_words_of_agent(launcher().records, "torchrun: the others are gone")
sys.exit(1)
"""
    assert ended(body) == end
    assert "torchrun" not in capfd.readouterr().err


def test_the_secret_of_a_job_is_in_the_environment_alone(tmp_path: Path) -> None:
    end = ended(f"open({str(tmp_path / 'told')!r}, 'w').write(os.environ['DYNAPIPE_JOB_SECRET'])")
    assert end.status == 0
    assert (tmp_path / "told").read_text() == "hidden"


def test_everything_ends_with_a_launcher_that_is_killed(
    tmp_path: Path, wait_until_gone: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it left in the temporary folder is removed by the next one."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    body = f"open({str(tmp_path / 'agent')!r}, 'w').write(str(os.getpid())); watch(wait, wait)"
    if (first := os.fork()) == 0:
        ended(body)
        os._exit(70)
    ranks: tuple[RankRecord, ...] = ()
    deadline_s = time.monotonic() + LIMIT_S
    while len(ranks) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.02)
        ranks = tuple(rank for folder in tmp_path.glob("*/ranks") for rank in read_rank_records(folder) if rank.runs)
    agent = int((tmp_path / "agent").read_text())
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    for pid in (agent, *(rank.pid for rank in ranks)):
        wait_until_gone(pid)
    assert len(ranks) == 2
    assert ended("sys.exit(0)").status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]
    assert launcher() is None
