"""What failing ranks say under torchrun: one line of the first on standard error, and its cause in torchrun's file."""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from torch.distributed import TCPStore

from dynapipe_ext.errors import ConfigError, DataError, LowMemoryError
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job.requested import config_from
from dynapipe_ext.launch.job.terms import UnlikeRanksError
from dynapipe_ext.launch.processes import cluster, network
from dynapipe_ext.launch.processes.agent import read_rank_records
from dynapipe_ext.launch.processes.env import Launcher
from dynapipe_ext.launch.rank import rank_program
from dynapipe_ext.launch.store import RedisServer
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.checkpoints import saved, tiny
from tests.support.limits import LIMIT_S


@pytest.fixture(autouse=True)
def _keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank names its process; here that is the one of the tests."""
    monkeypatch.setattr(rank_program, "set_process_title", lambda _: None)


def as_rank(rank: int, monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    place = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
    for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | more).items():
        monkeypatch.setenv(name, value)


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(rank_program, "_main", fails)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (MemoryError("no room"), 1, "rank 3: MemoryError: no room; on rank 3, step 7, 1F0: micro-batch 0"),
        (DataError("sample 5\nis damaged"), 2, "rank 3: sample 5 is damaged; on rank 3, step 7, 1F0: micro-batch 0"),
    ],
)
def test_a_failing_rank_says_its_cause_with_its_notes_in_one_line(
    error: Exception,
    status: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error.add_note("on rank 3, step 7, 1F0: micro-batch 0")
    as_rank(3, monkeypatch, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error"))
    fail_with(error, monkeypatch)
    assert rank_program.main(["--config", "job.toml"]) == status
    assert capsys.readouterr().err == f"dynapipe: error: {says}\n"
    told = json.loads((tmp_path / "error").read_text())["message"]
    assert told["message"].endswith(says)
    assert ("in fails" in told["extraInfo"]["py_callstack"]) == (status == 1)  # the calls, of a defect alone


def test_a_rank_that_torchrun_ends_while_it_says_why_it_fails_has_recorded_that_and_left_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun does so once the node that keeps its store has left. Another start would end the same way."""
    (tmp_path / "ranks").mkdir()
    as_rank(3, monkeypatch, **Launcher(os.getpid(), tmp_path / "ranks").variables())
    left: list[str] = []
    fail_with(UnlikeRanksError("lr is 1 and 2", partial(left.append, "all")), monkeypatch)

    def asked(_: object, mine: tuple[str, bool]) -> tuple[str, bool]:
        os.kill(os.getpid(), signal.SIGTERM)
        return mine

    monkeypatch.setattr(rank_program, "_first_failure", asked)
    assert rank_program.main([]) == 2
    (record,) = read_rank_records(tmp_path / "ranks")
    assert record.end is not None
    assert (record.end.status, record.end.is_final, record.end.cause) == (2, True, "rank 3: lr is 1 and 2")
    assert left == ["all"]


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), DataError("a mistake")])
def test_under_the_launcher_which_has_no_summary_a_defect_is_said_with_its_calls_and_a_mistake_in_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ranks").mkdir()
    launched = Launcher(os.getpid(), tmp_path / "ranks").variables()
    as_rank(3, monkeypatch, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error"), **launched)
    fail_with(error, monkeypatch)
    rank_program.main([])
    *calls, last = capsys.readouterr().err.splitlines()
    assert last.startswith("dynapipe: error: rank 3: ")
    is_defect = isinstance(error, ZeroDivisionError)
    assert sum("in fails" in line for line in calls) == is_defect
    assert bool(calls) == is_defect


def test_a_job_that_starts_again_waits_for_memory_and_fails_for_now_where_it_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own killed ranks, or neighbours, may hold it for a moment. At the first start it is refused at once."""
    (tmp_path / "ranks").mkdir()
    monkeypatch.setattr(rank_program, "_LOOK_S", 0.01)
    looks: list[str] = []

    def refused(*_: object, **__: object) -> NoReturn:
        looks.append("")
        raise LowMemoryError("states take 2 GB, but 1 GB are free here")

    monkeypatch.setattr(rank_program, "requested_job", refused)
    for attempt, (variables, freed_s) in enumerate(
        (({}, 60.0), ({"DYNAPIPE_RESTART": "1"}, 0.1), ({"TORCHELASTIC_RESTART_COUNT": "2"}, 0.1))
    ):
        looks.clear()
        monkeypatch.setattr(rank_program, "_FREED_S", freed_s)
        launched = Launcher(os.getpid(), tmp_path / "ranks").variables()
        as_rank(attempt, monkeypatch, **launched, **variables)
        if "TORCHELASTIC_RESTART_COUNT" in variables:
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
            monkeypatch.setattr(rank_program, "_first_failure", lambda env, mine: mine)
            monkeypatch.delenv("DYNAPIPE_RESTART")
        assert rank_program.main([]) == 2
        (end,) = (rank.end for rank in read_rank_records(tmp_path / "ranks") if rank.rank == attempt)
        assert end is not None
        assert end.is_final is (not variables)
        assert (len(looks) > 1) is bool(variables)


def test_of_ranks_that_fail_the_first_of_each_start_of_the_job_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    said = []
    for attempt, rank in (("0", 2), ("0", 1), ("1", 1)):
        started = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": attempt}
        as_rank(rank, monkeypatch, MASTER_PORT=str(agent.port), **started)
        fail_with(DataError("it went wrong"), monkeypatch)
        assert rank_program.main([]) == 2
        said.append(capsys.readouterr().err)
    assert said == ["dynapipe: error: rank 2: it went wrong\n", "", "dynapipe: error: rank 1: it went wrong\n"]


def test_a_wrong_argument_is_said_by_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        as_rank(rank, monkeypatch)
        with pytest.raises(SystemExit) as caught:
            rank_program.main(["--stepz", "3"])
        assert caught.value.code == 2
        assert ("did you mean '--steps'?" in capsys.readouterr().err) == (rank == 0)


def test_the_rank_program_takes_what_dynapipe_train_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--dp", "4", "--steps", "7", "--truncate", "64", "--schedule", "1f1b"]
    args = rank_program._parsed(arguments)
    wanted = TrainConfig().with_values(
        topology={"tp": 1, "pp": 1, "dp": 4},
        run={"steps": 7},
        data={"truncate": True},
        model={"max_seq_len": 64},
        plan={"schedule": "1f1b"},
    )
    assert config_from(args) == wanted


def test_the_stores_password_is_checked_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    as_rank(0, monkeypatch, DYNAPIPE_STORE_PASSWORD="wrong")
    with RedisServer() as server:
        assert rank_program.main(["--tp", "4", "--store", server.address.url]) == 2
    assert "password" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["train", "torchrun"])
def test_weights_of_another_model_are_refused_before_a_run_has_a_directory(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = saved(tiny("llama"), tmp_path / "small", shard_size="1GB")
    other = json.loads((small / "config.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(other | {"intermediate_size": 2 * other["intermediate_size"]}))
    empty = tmp_path / "here"
    empty.mkdir()
    monkeypatch.chdir(empty)
    words = ["--architecture", str(tmp_path / "other.json"), "--init-from", str(small), "--tp", "4"]
    if way == "train":
        assert cli.main(["train", *words]) == 2
    else:
        as_rank(0, monkeypatch)
        assert rank_program.main(words) == 2
    assert f"init_from {small} is a checkpoint of another model than" in capsys.readouterr().err
    assert list(empty.iterdir()) == []


def test_of_forked_ranks_that_fail_the_first_alone_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    """The others fail because it did, in whatever order they end."""

    def main(env: cluster.RankEnv) -> int:
        raise DataError("it went wrong")

    with pytest.raises(cluster.JobError) as caught:
        cluster.run_local(main, 4, timeout_s=LIMIT_S)
    (line,) = capfd.readouterr().err.splitlines()
    assert caught.value.cause == line
    assert str(caught.value).startswith(line.removesuffix(": it went wrong") + " ended with exit status 2")


def test_ps_shows_which_rank_a_process_is() -> None:
    script = """
from dynapipe_ext.launch.processes.cluster import set_process_title

def shown(what):
    with open(f"/proc/self/{what}") as file:
        return file.read().rstrip(chr(0))

set_process_title("rank 12 of 64: dynapipe train dp1 pp2 tp0")
print(shown("cmdline"), shown("comm"), sep=",", end="")
set_process_title("x" * 100_000)  # the environment lies right behind
print(len(shown("cmdline")) > 100, shown("environ").partition(chr(0))[0])
"""
    run = partial(subprocess.run, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    shown = run([sys.executable, "-c", script], env={"PROBE": "still here"}).stdout
    assert shown == "rank 12 of 64: dynapipe train dp1 pp2 tp0,rank 12 of 64: \nTrue PROBE=still here\n"


def test_the_interface_that_is_named_is_taken_where_routes_do_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the refusal advises: by its address the job's own store is reached."""
    monkeypatch.setattr(network, "_addresses", lambda: {"fe80::2": "ib0", "10.0.0.1": "eth0", "10.1.0.2": "ib0"})
    monkeypatch.setattr(network, "_addresses_towards", lambda host: [])
    assert network.interface_towards(["node0"], "ib0") == ("ib0", "10.1.0.2")
    for named in ("", "ib1"):
        with pytest.raises(ConfigError, match=r"\(eth0, ib0\).* node0 does not decide: name the one"):
            network.interface_towards(["node0"], named)
