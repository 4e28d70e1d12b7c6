"""One job on two hosts: two network namespaces joined by a virtual cable, started from outside by one launcher.

Each host has a name of its own, which resolves to loopback there (Debian's 127.0.1.1) and to its address elsewhere.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dynapipe_ext.errors import StoreError
from dynapipe_ext.executor.checkpoints.folder import latest
from dynapipe_ext.launch.redis_server import RedisServer, find_server_binary
from dynapipe_ext.tools.account.report import RunReport
from tests.support.preloaded import Preloaded
from tests.support.rank_processes import rank_process

CONFIG = """
[run]
steps = 12
[topology]
tp = 1
pp = 2
dp = 1
[model]
num_layers = 2
hidden_size = 32
num_heads = 2
num_query_groups = 2
ffn_hidden_size = 64
dropout = 0.1
[data]
num_samples = 300
tokenizer = "bytes"
truncate = true
tokens_per_batch = 2048
[checkpoint]
save_every = 4
[job]
timeout_s = 60.0
strict = true
"""
# What takes the place of ssh: HOST, then a command that is run on it.
SHELL = """#!/bin/sh
name=$1; shift
exec ip netns exec "$name" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$name" "$@"
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """(namespace, address, device) of two hosts that see each other and nothing else."""
    tag = secrets.token_hex(3)
    names = [f"dynapipe-{tag}-{i}" for i in range(2)]
    devices, addresses = [f"dp{tag}{i}" for i in range(2)], ["10.213.7.1", "10.213.7.2"]
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need ip and root")
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", devices[0], "netns", names[0], "type", "veth", "peer", devices[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for name, device, address in zip(names, devices, addresses, strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            others = [f"{other} {named}" for other, named in zip(addresses, names, strict=True) if named != name]
            files = Path("/etc/netns", name)  # `ip netns exec` lays them over those of /etc
            files.mkdir(parents=True)
            (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others]) + "\n")
        yield list(zip(names, addresses, devices, strict=True))
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


@contextmanager
def store_of(host: tuple[str, str, str], folder: Path) -> Iterator[list[str]]:
    """Flags of a store that both hosts reach: the job's own over TLS where a server here has that, else the user's, in
    the clear as is then to be said, its password in a file alone."""
    name, address, _ = host
    try:
        RedisServer(tls_host="127.0.0.1").close()
    except StoreError:
        pass
    else:
        yield []
        return
    password, secret = secrets.token_hex(16), folder / "secret"
    secret.touch(0o600)
    secret.write_text(password)
    settings = f'bind {address}\nport 6399\nsave ""\nrequirepass {password}\ndir "{folder}"\n'
    server = subprocess.Popen(
        ["ip", "netns", "exec", name, find_server_binary(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert server.stdin is not None
    server.stdin.write(settings.encode())
    server.stdin.close()
    try:
        yield ["--store", f"redis://{address}:6399/0", "--insecure-store", "--secret-file", str(secret)]
    finally:
        server.kill()
        server.wait(10)


def planners_of(rank: int) -> int:
    """How many planner processes that rank's process has now."""
    below = [child.cmdline() for child in psutil.Process(rank).children(recursive=True)]
    return sum(any("planner_process" in word for word in line) for line in below)


def test_a_rank_killed_on_one_of_two_hosts_leaves_the_weights_of_a_clean_run(
    hosts: list[tuple[str, str, str]], preloaded: Preloaded, tmp_path: Path
) -> None:
    """The launcher starts all again from the last checkpoint; each host has a planner of its own."""
    config, shell, host_file = (tmp_path / name for name in ("job.toml", "into", "hosts.txt"))
    config.write_text(CONFIG)
    shell.write_text(SHELL)
    shell.chmod(0o700)
    host_file.write_text("".join(f"{name} slots=1\n" for name, _, _ in hosts))
    words = ["launch", "--hosts", str(host_file), "--ssh", str(shell), "--max-restarts", "1", "--config", str(config)]
    said: list[str] = []
    with store_of(hosts[0], tmp_path) as flags:
        with preloaded.started([*words, "--run-dir", "killed", *flags], cwd=tmp_path) as launcher:
            for line in launcher.stderr:
                said.append(line)
                if line.startswith("step 6 ") and "restart" not in "".join(said):
                    ranks = [rank_process(rank, 2, tmp_path) for rank in range(2)]
                    assert [planners_of(rank) for rank in ranks] == [1, 1]
                    os.kill(ranks[1], signal.SIGKILL)
            launcher.communicate(100)
        passwords = [Path(flags[-1]).read_text()] if flags else []
    log = "".join(said)
    assert launcher.returncode == 0, log[-5000:]
    assert re.search(r"dynapipe launch: .*; restart 1 of 1, from killed/checkpoints/iter_000000[48]\n", log), log
    assert len(re.findall(r"rank \d \(process \d+\) was killed", log)) == 1
    assert not [password for password in passwords if password in log]
    assert ("at rediss://:***@10.213.7.1:" in log) == (not flags)
    assert ("is used without TLS" in log) == bool(flags)
    for i, (_, _, device) in enumerate(hosts):
        said_by = f"network of rank {i}'s machine: {device} (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        assert log.count(said_by) == 2  # the rank that is on it, at both starts
    preloaded.train("--config", str(config), "--run-dir", "clean", "--costs", "killed/costs.json", cwd=tmp_path)
    killed, clean = (RunReport.read(tmp_path / run / "report.json").result.losses for run in ("killed", "clean"))
    assert (len(killed), killed) == (12, clean)
    weights = [
        {file.name: file.read_bytes() for file in latest(tmp_path / run / "checkpoints").glob("*.distcp")}
        for run in ("killed", "clean")
    ]
    assert weights[0] == weights[1] != {}
