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
from pathlib import Path

import pytest

from dynapipe_ext.executor.checkpoints.folder import latest
from dynapipe_ext.launch.redis_server import find_server_binary
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


def test_a_rank_killed_on_one_of_two_hosts_leaves_the_weights_of_a_clean_run(
    hosts: list[tuple[str, str, str]], preloaded: Preloaded, tmp_path: Path
) -> None:
    """The launcher starts all again from the last checkpoint; the password of the store is in a file alone."""
    (first, address, _), password = hosts[0], secrets.token_hex(16)
    config, shell, secret, host_file = (tmp_path / name for name in ("job.toml", "into", "secret", "hosts.txt"))
    config.write_text(CONFIG)
    shell.write_text(SHELL)
    shell.chmod(0o700)
    secret.touch(0o600)
    secret.write_text(password)
    host_file.write_text("".join(f"{name} slots=1\n" for name, _, _ in hosts))
    settings = f'bind {address}\nport 6399\nsave ""\nrequirepass {password}\ndir "{tmp_path}"\n'
    server = subprocess.Popen(
        ["ip", "netns", "exec", first, find_server_binary(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert server.stdin is not None
    server.stdin.write(settings.encode())
    server.stdin.close()
    words = ["launch", "--hosts", str(host_file), "--ssh", str(shell), "--secret-file", str(secret), "--max-restarts"]
    words += ["1", "--config", str(config), "--run-dir", "killed", "--store", f"redis://{address}:6399/0"]
    said: list[str] = []
    try:
        with preloaded.started(words, cwd=tmp_path) as launcher:
            for line in launcher.stderr:
                said.append(line)
                if line.startswith("step 6 ") and "restart" not in "".join(said):
                    os.kill(rank_process(1, 2, tmp_path), signal.SIGKILL)
            launcher.communicate(100)
    finally:
        server.kill()
        server.wait(10)
    log = "".join(said)
    assert launcher.returncode == 0, log[-5000:]
    assert re.search(r"dynapipe launch: .*; restart 1 of 1, from killed/checkpoints/iter_000000[48]\n", log), log
    assert len(re.findall(r"rank \d \(process \d+\) was killed", log)) == 1
    assert password not in log
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
