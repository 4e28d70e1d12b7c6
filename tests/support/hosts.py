"""Hosts on one machine: network namespaces joined by a virtual switch, and what their jobs need.

Each host has a name of its own, which resolves to loopback there (Debian's 127.0.1.1) and to its address elsewhere,
and half of the cores: plans heed their number, and are those of a job on the machine itself.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dynapipe_ext.errors import StoreError
from dynapipe_ext.launch.store import RedisServer, find_server_binary
from tests.support.limits import LIMIT_S

STORE_PORT = 6399
Host = tuple[str, str, str]  # namespace, address, device

INTO = """ip netns exec "$name" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$name" "$@"\n"""
# What takes the place of ssh: HOST, then a command that is run on it.
SHELL = (
    """#!/bin/sh
name=$1; shift
[ -e "${{0%/*}}/$name-is-lost" ] && exit 255
case $name in *-0) cores={};; *) cores={};; esac
exec taskset -c "$cores" """
    + INTO
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=LIMIT_S)


class NoHostsError(Exception):
    """This machine cannot have network namespaces, or this user cannot make them."""


@contextmanager
def joined_hosts(number: int = 2) -> Iterator[list[Host]]:
    """So many that see each other and nothing else. Errors: NoHostsError."""
    tag, switch = secrets.token_hex(3), "switch"
    names, between = [f"dynapipe-{tag}-{i}" for i in range(number)], f"dynapipe-{tag}-{switch}"
    devices, addresses = [f"dp{tag}{i}" for i in range(number)], [f"10.213.7.{i + 1}" for i in range(number)]
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoHostsError("network namespaces need ip and root")
    made = []
    try:
        try:
            for name in (*names, between):
                ip("netns", "add", name)
                made.append(name)
            ip("-n", between, "link", "add", switch, "type", "bridge")
            for name, device in zip(names, devices, strict=True):
                ip("link", "add", device, "netns", name, "type", "veth", "peer", device, "netns", between)
                ip("-n", between, "link", "set", device, "master", switch, "up")
            ip("-n", between, "link", "set", switch, "up")
        except subprocess.CalledProcessError as error:
            raise NoHostsError(f"no network namespaces here: {error.stderr.decode().strip()}") from error
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
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=LIMIT_S)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def lose(host: Host, folder: Path) -> None:
    """Take a host from a job whose files are in `folder`: all that runs on it ends, its link is down, and no shell
    reaches it any more."""
    name, _, device = host
    (folder / f"{name}-is-lost").touch()
    ip("-n", name, "link", "set", device, "down")
    running = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, timeout=LIMIT_S)
    for pid in running.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@contextmanager
def store_of(host: Host, folder: Path) -> Iterator[list[str]]:
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
    settings = f'bind {address}\nport {STORE_PORT}\nsave ""\nrequirepass {password}\ndir "{folder}"\n'
    server = subprocess.Popen(
        ["ip", "netns", "exec", name, find_server_binary(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert server.stdin is not None
    server.stdin.write(settings.encode())
    server.stdin.close()
    try:
        yield ["--store", f"redis://{address}:{STORE_PORT}/0", "--insecure-store", "--secret-file", str(secret)]
    finally:
        server.kill()
        server.wait(LIMIT_S)


def host_files(hosts: list[Host], folder: Path, *, slots: int) -> list[str]:
    """Flags of `dynapipe launch` that start a job on the hosts, with the files that they name."""
    shell, host_file = folder / "into", folder / "hosts.txt"
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    half = (len(cores) + 1) // 2
    shell.write_text(SHELL.format(",".join(cores[:half]), ",".join(cores[half:] or cores)))
    shell.chmod(0o700)
    host_file.write_text("".join(f"{name} slots={slots}\n" for name, _, _ in hosts))
    return ["--hosts", str(host_file), "--ssh", str(shell)]
