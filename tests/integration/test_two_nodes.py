"""One job on two hosts, the pipeline across the cable between them, and a spare: three network namespaces, started from
outside by one launcher."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from dynapipe_ext.executor.checkpoints.folder import latest
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import RunReport
from tests.support.given_costs import write_costs
from tests.support.hosts import Host, NoHostsError, host_files, joined_hosts, lose, store_of
from tests.support.limits import LIMIT_S
from tests.support.preloaded import Preloaded
from tests.support.rank_processes import rank_process
from tests.support.tiny_sizes import TINY_SIZES
from tests.support.wire import SECRETS_VARIABLE, captured, refuse_secrets

CONFIG = f"""
[run]
steps = 8
[topology]
tp = 2
pp = 2
dp = 1
[model]
num_layers = 2
{TINY_SIZES}dropout = 0.1
[data]
num_samples = 300
tokenizer = "bytes"
truncate = true
tokens_per_batch = 2048
[checkpoint]
save_every = 3
[job]
timeout_s = 480
strict = true
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        with joined_hosts(3) as made:
            yield made
    except NoHostsError as error:
        pytest.skip(str(error))


def hosts_python(preloaded: Preloaded, folder: Path) -> str:
    """A program that is Python on all hosts."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {preloaded.interpreter} "$@"\n')
    python.chmod(0o700)
    return str(python)


def planners_of(rank: int) -> int:
    """How many planner processes that rank's process has now."""
    below = [child.cmdline() for child in psutil.Process(rank).children(recursive=True)]
    return sum(any("planner_process" in word for word in line) for line in below)


def test_a_mistake_on_one_of_two_hosts_is_said_once_and_nothing_starts_again(
    hosts: list[Host], preloaded: Preloaded, tmp_path: Path
) -> None:
    """Here of rank 0, which refuses the store; torch says nothing of the ranks that end with it."""
    (tmp_path / "job.toml").write_text(CONFIG)
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "secret").write_text("password")
    store = ["--store", f"redis://{hosts[0][1]}:6399/0", "--secret-file", "secret"]
    words = ["launch", *host_files(hosts[:2], tmp_path, slots=2), "--config", "job.toml", "--run-dir", "run", *store]
    python = hosts_python(preloaded, tmp_path)
    with preloaded.started(words, cwd=tmp_path, interpreter=python) as launcher:
        _, said = launcher.communicate(LIMIT_S)
    assert launcher.returncode == 2
    last = said.splitlines()[-1]
    assert last.startswith("dynapipe: error: rank 0: store at redis://:***@10.213.7.1:6399/0 would be used over the")
    assert [line for line in said.splitlines() if not line.startswith("network of rank")] == [last]


def test_a_node_that_nobody_invited_is_refused_alone_and_the_job_waits_for_the_invited_one(
    hosts: list[Host], preloaded: Preloaded, tmp_path: Path
) -> None:
    """It takes a rank, with another secret file or with none. The invited node has other settings, which end both."""
    (tmp_path / "job.toml").write_text(CONFIG.replace("tp = 2", "tp = 1"))
    (tmp_path / "unlike.toml").write_text(CONFIG.replace("tp = 2", "tp = 1") + "[optimizer]\nlr = 0.5\n")
    python, into = hosts_python(preloaded, tmp_path), host_files(hosts[:2], tmp_path, slots=1)[-1]
    (tmp_path / "unlike").touch(0o600)
    (tmp_path / "unlike").write_text("a line of another file")

    def node(rank: int, settings: str, *secret: str) -> subprocess.Popen[str]:
        words = ["--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", f"{hosts[0][1]}:29411"]
        words += ["--max-restarts", "0", "--config", settings, "--run-dir", "run", *secret]
        command = [into, hosts[rank][0], python, "-m", "dynapipe_ext.launch.cli", "launch", *words]
        return stack.enter_context(subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True))

    with store_of(hosts[0], tmp_path) as flags, ExitStack() as stack:
        strangers = [[*flags[:-2], "--secret-file", str(tmp_path / "unlike")], []]
        if not flags:
            (tmp_path / "secret").touch(0o600)
            (tmp_path / "secret").write_text("a line of the first file")
        invited = [*flags[:-2], "--secret-file", str(tmp_path / "secret")]
        first = node(0, "job.toml", *invited)
        for secret in strangers:
            stranger = node(1, "job.toml", *secret)
            _, own_words = stranger.communicate(timeout=LIMIT_S)
            assert stranger.returncode == 2, own_words
            (fault,) = [line for line in own_words.splitlines() if line.startswith("dynapipe: error: ")]
            assert fault.startswith("dynapipe: error: the secret of this node differs from that of the first node, at")
            assert first.poll() is None
        second = node(1, "unlike.toml", *invited)
        said = [one.communicate(timeout=LIMIT_S)[1] for one in (first, second)]
    assert (first.returncode, second.returncode) == (2, 2), "\n\n".join(said)
    assert f"lr is 0.002 for rank 0 ({hosts[0][0]}) and 0.5 for rank 1 ({hosts[1][0]})" in "".join(said)
    assert said[0].count("a node is refused (") == 2
    assert "a line of" not in "".join(said)


def test_jobs_that_start_at_once_on_the_same_hosts_end_as_if_alone_and_one_of_unlike_nodes_before_it_trains(
    hosts: list[Host], preloaded: Preloaded, tmp_path: Path
) -> None:
    """They share no port and no id. The second host of the third job has another file of settings by the same name."""
    text = CONFIG.replace("steps = 8", "steps = 3").replace("tp = 2", "tp = 1")
    (tmp_path / "job.toml").write_text(text)
    write_costs(TrainConfig.read(tmp_path / "job.toml"), 258, tmp_path / "costs.json")
    (tmp_path / "unlike").mkdir()
    (tmp_path / "unlike" / "job.toml").write_text(f"{text}[optimizer]\nlr = 0.5\n")
    flags = host_files(hosts[:2], tmp_path, slots=1)
    unlike = tmp_path / "into-unlike"
    unlike.write_text(
        f'#!/bin/sh\n[ $1 = {hosts[0][0]} ] && exec {flags[-1]} "$@"\n'
        f"sed -u '1s|cd {tmp_path} |cd {tmp_path}/unlike |' | {flags[-1]} \"$@\"\n"
    )
    unlike.chmod(0o700)
    python, ways = hosts_python(preloaded, tmp_path), {"a": flags[-1], "b": flags[-1], "c": str(unlike)}
    with store_of(hosts[0], tmp_path) as store, ExitStack() as stack:
        launchers = []
        for run_dir, way in ways.items():
            words = [
                "launch",
                *flags[:-1],
                way,
                "--config",
                "job.toml",
                "--costs",
                str(tmp_path / "costs.json"),
                *store,
            ]
            words += ["--run-dir", str(tmp_path / run_dir)]
            launchers.append(stack.enter_context(preloaded.started(words, cwd=tmp_path, interpreter=python)))
        logs = [launcher.communicate(LIMIT_S)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0, 2], "\n\n".join(logs)[-9000:]
    assert "restart" not in "".join(logs)
    said = f"lr is 0.002 for rank 0 ({hosts[0][0]}) and 0.5 for rank 1 ({hosts[1][0]}): start every node by the same"
    assert f"comparison of nodes: [optimizer] {said} command, with the same files" in logs[2].splitlines()[-1]
    assert logs[2].count("dynapipe: error: ") == 1
    preloaded.train("--config", "job.toml", "--run-dir", "alone", "--costs", "costs.json", cwd=tmp_path)
    losses = [RunReport.read(tmp_path / run / "report.json").result.losses for run in ("a", "b", "alone")]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 3


def test_a_spare_replaces_a_lost_host_with_the_weights_of_a_clean_run(
    hosts: list[Host], preloaded: Preloaded, tmp_path: Path
) -> None:
    """The launcher waits for it, and starts all again from the last checkpoint; each host has a planner of its own."""
    config = tmp_path / "job.toml"
    config.write_text(CONFIG)
    write_costs(TrainConfig.read(config), 258, tmp_path / "costs.json")
    words = ["launch", *host_files(hosts, tmp_path, slots=2), "--spares", "1", "--wait-for-hosts", "2s"]
    words += ["--max-restarts", "1", "--config", str(config), "--costs", str(tmp_path / "costs.json")]
    python = hosts_python(preloaded, tmp_path)
    said: list[str] = []
    (tmp_path / "secrets").mkdir()
    with store_of(hosts[0], tmp_path) as flags, captured([name for name, _, _ in hosts]) as wire:
        with preloaded.started(
            [*words, "--run-dir", "lost", *flags],
            cwd=tmp_path,
            interpreter=python,
            environment={SECRETS_VARIABLE: str(tmp_path / "secrets")},
        ) as launcher:
            for line in launcher.stderr:
                said.append(line)
                if line.startswith("step 2 ") and "---" not in "".join(said):
                    launcher.send_signal(signal.SIGUSR2)
                if line.startswith("step 4 ") and "; restart" not in "".join(said):
                    ranks = [rank_process(rank, 4, tmp_path) for rank in range(4)]
                    assert [planners_of(rank) for rank in ranks] == [1, 0, 1, 0]
                    lose(hosts[1], tmp_path)
            launcher.communicate(LIMIT_S)
        passwords = [Path(flags[-1]).read_text()] if flags else []
    log = "".join(said)
    assert launcher.returncode == 0, log[-5000:]
    lost, spare = hosts[1][0], hosts[2][0]
    assert re.search(r"dynapipe launch: .*; restart 1 of 1 in 1 s, from lost/checkpoints/iter_000000[36]\n", log), log
    assert f"{spare} takes the place of {lost}, which stays away\n" in log
    stacks = re.findall(r"^--- rank (\d) \(pid \d+ on (\S+)\):\n(?:Thread|Current thread)", log, re.M)
    assert sorted(stacks) == [(str(rank), hosts[rank // 2][0]) for rank in range(4)]
    assert not [password for password in passwords if password in log]
    refuse_secrets(wire, tmp_path, log, num_starts=2)
    assert ("at rediss://:***@10.213.7.1:" in log) == (not flags)
    assert ("is used without TLS" in log) == bool(flags)
    networks = re.findall(r"network of rank (\d)'s machine: (\S+) \(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME\)", log)
    devices = [device for _, _, device in hosts]  # the first rank that is on each, at both starts
    assert sorted(networks) == sorted([("0", devices[0])] * 2 + [("2", devices[1]), ("2", devices[2])])
    preloaded.train("--config", str(config), "--run-dir", "clean", "--costs", "costs.json", cwd=tmp_path)
    lost_run, clean = (RunReport.read(tmp_path / run / "report.json").result.losses for run in ("lost", "clean"))
    assert (len(lost_run), lost_run) == (8, clean)
    weights = [
        {file.name: file.read_bytes() for file in latest(tmp_path / run / "checkpoints").glob("*.distcp")}
        for run in ("lost", "clean")
    ]
    assert weights[0] == weights[1] != {}
