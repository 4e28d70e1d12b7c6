"""`dynapipe launch` before anything starts: what it would run, what it refuses, and where a run goes on."""

from __future__ import annotations

import os
import re
import shlex
import socket
from itertools import pairwise
from pathlib import Path

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch import cli
from dynapipe_ext.launch.job.run_directory import RunDirectory
from dynapipe_ext.launch.processes.agent import TAKEN_STATUS
from dynapipe_ext.launch.processes.scratch import read_secret
from dynapipe_ext.launch.rank import rank_program
from dynapipe_ext.launch.run.outcome import report_what_ran
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.run_events import EVENTS_FILE

STORE = ["--store", "redis://127.0.0.1:1/0"]
SIZES = ["--tp", "2", "--pp", "2", "--dp", "2"]
TORCHRUN = (
    "-m dynapipe_ext.launch.processes.torchrun --nnodes {nodes} --nproc-per-node {ranks} --max-restarts {restarts}"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("node0 slots=8\nme@node1\n")
    (tmp_path / "short").touch(0o600)
    (tmp_path / "short").write_text("secret")
    return tmp_path


def commands(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """Of a dry run, the words of each, without the path of Python."""
    assert cli.main(["launch", *SIZES, "--dry-run", *arguments]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_on_one_machine_torchrun_starts_all_ranks_with_the_flags_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--max-restarts", "5", "--data", "a b.jsonl=1", "c.jsonl=2", "--min-lr", "1e-9", "--steps", "3"]
    (words,) = commands(capsys, *arguments)
    assert words[1:] == [
        *TORCHRUN.format(nodes=1, ranks=8, restarts=0).split(),  # the launcher starts again itself
        *["--rdzv-backend", "dynapipe", "-m", "dynapipe_ext.launch.rank", "--tp", "2", "--pp", "2", "--dp", "2"],
        *["--data", "a b.jsonl=1", "c.jsonl=2", "--min-lr", "1e-9", "--steps", "3"],
    ]


def test_of_nodes_that_are_started_one_by_one_torchrun_counts_the_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    meeting = ["--nnodes", "2", "--rdzv-endpoint", "localhost", "--run-dir", "r", "--rdzv-id", "mine"]
    (words,) = commands(capsys, *meeting, "--node-rank", "1")
    said = "--rdzv-backend dynapipe --rdzv-endpoint localhost:29400 --rdzv-id mine --rdzv-conf node_rank=1"
    wanted = [*TORCHRUN.format(nodes=2, ranks=4, restarts=3).split(), *said.split()]
    assert words[1 : len(wanted) + 1] == wanted
    (words,) = commands(capsys, *meeting)
    assert "--rdzv-conf" not in words


def test_a_script_for_any_number_of_nodes_runs_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = commands(capsys, "--nnodes", "1", "--rdzv-endpoint", "node0", "--rdzv-id", "mine")
    assert "--rdzv-endpoint" not in words


def test_nodes_that_are_started_one_by_one_agree_on_where_they_meet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    """By the run's directory, as jobs do not share one; within a step of Slurm by that."""

    def place(run_dir: str, *more: str) -> tuple[str, str]:
        (words,) = commands(capsys, "--nnodes", "2", "--rdzv-endpoint", "node0", "--run-dir", run_dir, *more)
        named = dict(pairwise(words))
        return named["--rdzv-endpoint"], named["--rdzv-id"]

    assert place("r") == place(str(here / "r")) != place("s")
    assert place("r")[0] == place("s")[0] == "node0:29400"
    assert place("r", "--rdzv-id", "mine") == ("node0:29400", "mine")
    for step in ("0", "1"):
        monkeypatch.setenv("SLURM_JOB_ID", "71")
        monkeypatch.setenv("SLURM_STEP_ID", step)
        assert place("r") == place("s")
        assert place("r")[1] == f"slurm-71.{step}"
        assert re.fullmatch(r"node0:2\d{4}", place("r")[0])
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    assert place("r") == place("s")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")  # each node is started by an srun of its own
    places = []
    for step in ("3", "4"):
        monkeypatch.setenv("SLURM_STEP_ID", step)
        places.append(place("r"))
        assert place("r") != place("s")
    assert places[0] == places[1]
    assert re.fullmatch(r"slurm-71-[0-9a-f]{8}", places[0][1])
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")  # and by a Slurm job of its own
    alone = ["--nnodes", "2", "--rdzv-endpoint", "node0", "--run-dir", "r"]
    assert cli.main(["launch", *SIZES, *alone]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--nnodes is 2 but the Slurm job 71 has 1 nodes, so others would meet elsewhere: give --rdzv-end" in said
    (words,) = commands(capsys, *alone[:3], "node0:1234", *alone[4:], "--rdzv-id", "mine")
    assert "node0:1234" in words


def test_a_taken_port_is_said_by_the_first_node_and_another_is_tried_where_nobody_chose_it(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("", 0)) as server:
        endpoint = f"localhost:{server.getsockname()[1]}"
        alone = ["launch", *SIZES, "--nnodes", "2", "--rdzv-endpoint", endpoint, "--node-rank", "0", "--run-dir", "r"]
        says = f"nodes would meet at {endpoint}, but process {os.getpid()} ("
        for followed, status in (([], 2), (["--follow-stdin"], TAKEN_STATUS)):
            assert cli.main([*alone, *followed]) == status
            assert says in " ".join(capfd.readouterr().err.split())
    shell = here / "into"  # node0 starts where its port is free at the second time only
    shell.write_text(
        f'#!/bin/sh\nread -r line; echo "$line" >> {here}/lines\n'
        f"[ $(wc -l < {here}/lines) -ge 2 ] || exit {TAKEN_STATUS}\n"
    )
    shell.chmod(0o700)
    (here / "many").write_text("node0\n")
    hosts = ["launch", "--tp", "1", "--pp", "1", "--dp", "1", "--hosts", "many", "--ssh", str(shell), "--run-dir", "r"]
    assert cli.main([*hosts, "--rdzv-endpoint", "node0:29400", "--max-restarts", "0"]) == 2
    assert "give a free one by --rdzv-endpoint" in " ".join(capfd.readouterr().err.split())
    (here / "lines").unlink()
    assert cli.main([*hosts, "--max-restarts", "0"]) == 0
    places = re.findall(r"--rdzv-endpoint (node0:\d+)", (here / "lines").read_text())
    assert len(places) == 2
    assert places[0] != places[1]


def test_from_a_host_file_every_node_is_told_its_place_and_no_secret(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "secret").write_text("hidden")
    own = [*STORE, "--secret-file", "secret"]
    shells = commands(capsys, "--hosts", "hosts", "--run-dir", "my run", "--ssh", "rsh -n", *own)
    assert [words[:5] for words in shells[::2]] == [["rsh", "-n", name, "sh", "-s"] for name in ("node0", "me@node1")]
    place = dict(pairwise(shlex.split(shells[0][6])))
    assert re.fullmatch(r"node0:2\d{4}", place["--rdzv-endpoint"])
    assert re.fullmatch(r"dynapipe-[0-9a-f]{8}", place["--rdzv-id"])
    for rank, (words, torchrun) in enumerate(zip(shells[::2], shells[1::2], strict=True)):
        line = shlex.split(words[6])
        assert line[:4] == ["cd", str(here), "&&", "exec"]
        said = f"--nnodes 2 --node-rank {rank} --rdzv-endpoint {place['--rdzv-endpoint']}"
        said += f" --rdzv-id {place['--rdzv-id']}"
        said += " --max-restarts 0 --follow-stdin"
        asked = [*SIZES, "--run-dir", "my run", *own]
        assert line[5:] == ["-m", "dynapipe_ext.launch.cli", "launch", *said.split(), *asked, "||", "exit", "127"]
        assert f"--rdzv-conf node_rank={rank} " in " ".join(torchrun)
    assert "hidden" not in str(shells)
    by_ssh, *_ = commands(capsys, "--hosts", "hosts", "--run-dir", "my run", *own)
    assert place["--rdzv-id"] not in by_ssh[-1]  # another launch, another place
    assert place["--rdzv-endpoint"] not in by_ssh[-1]
    assert by_ssh[:3] == ["ssh", "-o", "BatchMode=yes"]
    assert "ServerAliveInterval=15" in by_ssh  # a host that is lost ends its shell within two minutes


def test_a_job_starts_on_all_hosts_of_the_file_but_its_spares(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "three").write_text("node0\nnode1\nnode2\n")
    waits = ["--wait-for-hosts", "90s"]
    shells = commands(capsys, "--hosts", "three", "--spares", "1", *waits, "--run-dir", "r")
    assert [words[-5] for words in shells[::2]] == ["node0", "node1"]
    assert not [words for words in shells[::2] if "--spares" in words[-1] or "--wait-for-hosts" in words[-1]]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nnodes", "3"], "8 ranks (tp x pp x dp) do not spread evenly over 3 nodes"),
        (["--nnodes", "0"], "over 0 nodes"),
        (["--nnodes", "2"], "must meet somewhere: give --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "a"], "one directory that all of them see: give it as --run-dir"),
        (["--node-rank", "1"], "--node-rank is 1 but must be in 0..0"),
        (["--max-restarts", "-1"], "--max-restarts is -1 but"),
        (["--spares", "1"], "--spares 1 are the last hosts of a file: give it by --hosts"),
        (["--hosts", "hosts", "--spares", "2", "--run-dir", "r"], "--spares is 2 but must be in 0..1: hosts names 2"),
        (["--wait-for-hosts", "soon"], "'soon' is no duration: write seconds, or 90s, 10m or 2h"),
        (["--hosts", "hosts", "--node-rank", "1", "--run-dir", "r"], "leave out --nnodes and --node-rank"),
        (["--hosts", "hosts", "--dp", "8", "--run-dir", "r"], "node0 has 8 slots but 16 ranks"),
        (["--hosts", "hosts", "--ray"], "--ray finds its nodes itself"),
        (["--schedule", "dualpipe-v", "--split-backwards"], "unknown --split-backwards"),
        (["--rdzv-endpoint", "a:99999"], "--rdzv-endpoint is 'a:99999' but must be HOST or HOST:PORT"),
        (["--rdzv-endpoint", "a:port"], "--rdzv-endpoint is 'a:port' but"),
        (["--rdzv-endpoint", ":29400"], "--rdzv-endpoint is ':29400' but"),
        (
            ["--rdzv-endpoint", "a"],
            "--rdzv-endpoint a is for several nodes that meet, but --nnodes is 1: add --nnodes N",
        ),
        (["--rdzv-id", "mine"], "--rdzv-id mine is for several nodes"),
        (["--ray", "--rdzv-id", "mine"], "--rdzv-id mine is for several nodes"),
        (["--ssh", "rsh -n"], "--ssh rsh -n is for the hosts of a file: add --hosts FILE, or leave it out"),
        (["--ray", "--wait-for-hosts", "2m"], "--wait-for-hosts 120 is for the hosts of a file: add --hosts FILE"),
        (["--ray-address", "auto"], "add --ray, or leave it out"),
        (["--secret-file", "nothere"], "the secret file nothere cannot be read"),
        (["--secret-file", "short"], "short holds 6 characters but a job's secret must have at least 16: (umask 77;"),
        ([*STORE, "--secret-file", "nothere"], "the secret file nothere cannot be read"),
        (STORE, "has no password: set DYNAPIPE_STORE_PASSWORD"),
        (["--store", "nothere"], "--store is neither a URL"),
        (["--nnodes", "2", "--rdzv-endpoint", "node.invalid", "--run-dir", "r"], "would meet at 'node.invalid', which"),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "a", "--run-dir", "r", "--overwrite"],
            "cannot agree who removes r: remove it first",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    flags: list[str], says: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynapipe_ext.launch.processes.network._KNOWN_S", 0.0)
    try:
        status = cli.main(["launch", *SIZES, *flags])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert says in capsys.readouterr().err
    assert {path.name for path in here.iterdir()} <= {"hosts", "runs", "short"}
    assert not list(here.glob("runs/*"))


def test_a_launched_run_goes_on_where_it_ended_and_what_is_done_is_refused(here: Path) -> None:
    def go_on(*, compare: bool = False) -> tuple[Path | None, bool]:
        return rank_program._to_go_on_with(here, TrainConfig(), compare=compare)

    assert go_on() == (None, False)  # an empty place
    (here / EVENTS_FILE).touch()
    assert go_on() == (None, True)  # killed before it saved anything
    saved = here / "checkpoints" / "iter_0000004"
    saved.mkdir(parents=True)
    assert go_on(compare=True) == (None, True)  # of what is compared nothing is saved
    with pytest.raises(Exception, match=r"dynapipe\.json"):
        go_on()


def test_the_report_of_a_killed_run_is_made_of_its_events_unless_it_still_runs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_what_ran(here, "killed")
    (here / EVENTS_FILE).touch()  # with nothing in it to report
    with RunDirectory(str(here), overwrite=True):
        report_what_ran(here, "killed")
    assert capsys.readouterr().err == ""
    report_what_ran(here, "killed")
    assert "the report could not be written" in capsys.readouterr().err
    (here / "report.json").touch()
    report_what_ran(here, "killed")  # by its own rank 0
    assert capsys.readouterr().err == ""


def test_a_secret_is_the_only_line_of_a_file_of_ones_own(here: Path) -> None:
    file = here / "secret"
    file.touch(0o600)
    file.write_text("hidden\n")
    assert read_secret(file, None) == read_secret(file, "hidden") == "hidden"
    for change, says in (
        (lambda: file.chmod(0o640), "is open to others: chown it to yourself and chmod 600"),
        (lambda: (file.chmod(0o600), file.write_text("hidden\nmore")), "must be one line"),
        (lambda: file.write_text(""), "must be one line"),
        (lambda: file.write_bytes(b"\xff"), "must be one line"),
        (lambda: file.write_text("h" * 5000), "at most 4096 B"),
    ):
        change()
        with pytest.raises(ConfigError, match=says) as caught:
            read_secret(file, None)
        assert "hidden" not in str(caught.value)
    file.write_text("hidden")
    with pytest.raises(ConfigError, match="differ"):
        read_secret(file, "another")


def test_a_file_that_is_not_here_is_refused_before_ranks_start_and_told_where_other_nodes_may_have_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "[data] path is nowhere.jsonl, which is not on this machine"
    assert cli.main(["launch", *SIZES, "--data", "nowhere.jsonl"]) == 2
    assert f"error: {said}: check the path" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["launch", *SIZES, "--costs", "c.json", "--tokenizer", "cl100k_base"]) == 2
    assert "error: [plan] costs is c.json" in " ".join(capsys.readouterr().err.split())
    commands(capsys, "--data", "nowhere.jsonl", "--hosts", "hosts", "--run-dir", "shared")
