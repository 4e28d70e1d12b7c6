"""One job on two hosts: two network namespaces joined by a virtual cable, torchrun on each, one store.

Each host has a name of its own, which resolves to loopback there (Debian's 127.0.1.1) and to its address elsewhere.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from dynapipe_ext.errors import StoreError
from dynapipe_ext.launch.redis_server import RedisServer, find_server_binary

CONFIG = """
[run]
steps = 3
run_dir = "{run_dir}"
[topology]
tp = 1
pp = 2
dp = 2
[model]
num_layers = 2
hidden_size = 32
num_heads = 2
num_query_groups = 2
ffn_hidden_size = 64
[data]
num_samples = 300
tokenizer = "bytes"
truncate = true
tokens_per_batch = 2048
[job]
timeout_s = 60.0
strict = true
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
def store_of(host: tuple[str, str, str], folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Flags and variables of a store that both hosts reach: the job's own over TLS where a server here has that, else
    the user's, in the clear as is then to be said."""
    name, address, _ = host
    try:
        RedisServer(tls_host="127.0.0.1").close()
    except StoreError:
        pass
    else:
        yield [], {}
        return
    password = secrets.token_hex(16)
    settings = f'bind {address}\nport 6399\nsave ""\nrequirepass {password}\ndir "{folder}"\n'
    server = subprocess.Popen(
        ["ip", "netns", "exec", name, find_server_binary(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert server.stdin is not None
    server.stdin.write(settings.encode())
    server.stdin.close()
    try:
        flags = ["--store", f"redis://{address}:6399/0", "--insecure-store"]
        yield flags, {"DYNAPIPE_STORE_PASSWORD": password}
    finally:
        server.kill()
        server.wait(10)


def planners_below(nodes: list[subprocess.Popen[bytes]]) -> list[int]:
    """How many planner processes run on each node now."""
    counts = []
    for node in nodes:
        with suppress(psutil.Error):
            below = [child.cmdline() for child in psutil.Process(node.pid).children(recursive=True)]
            counts.append(sum(any("planner_process" in word for word in line) for line in below))
    return counts


def test_a_job_trains_over_two_hosts(hosts, tmp_path: Path) -> None:
    first = hosts[0][0]
    config = tmp_path / "job.toml"
    config.write_text(CONFIG.format(run_dir=tmp_path / "run"))
    nodes: list[subprocess.Popen[bytes]] = []
    seen: set[tuple[int, ...]] = set()
    with store_of(hosts[0], tmp_path) as (flags, variables):
        try:
            for i, (name, _, _) in enumerate(hosts):
                command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
                command += ['hostname "$0" && exec "$@"', name, sys.executable, "-m", "torch.distributed.run"]
                command += ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
                command += [f"{first}:29511", "--rdzv-id", "job", "--rdzv-conf", "join_timeout=60"]
                command += ["-m", "dynapipe_ext.launch.train", "--config", str(config), *flags]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
                for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                    environment.pop(name, None)
                log = (tmp_path / f"node{i}.log").open("wb")
                nodes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            deadline_s = time.monotonic() + 150
            while any(node.poll() is None for node in nodes) and time.monotonic() < deadline_s:
                if (1, 1) not in seen:
                    seen.add(tuple(planners_below(nodes)))
                time.sleep(0.5)
            statuses = [node.poll() for node in nodes]
        finally:
            for process in nodes:
                process.kill()
                process.wait(10)
    logs = "\n".join((tmp_path / f"node{i}.log").read_text()[-3000:] for i in range(2))
    assert statuses == [0, 0], logs
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert len(report["losses"]) == 3
    assert report["losses"][-1] < report["losses"][0]
    assert (1, 1) in seen
    assert all(password not in logs for password in variables.values())
    assert ("at rediss://:***@10.213.7.1:" in logs) == (not flags)
    assert ("is used without TLS" in logs) == bool(flags)
    for i, (_, _, device) in enumerate(hosts):
        said = f"network of rank {2 * i}'s machine: {device} (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        assert (tmp_path / f"node{i}.log").read_text().count(said) == 1
