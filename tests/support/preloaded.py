"""`dynapipe` commands that start in milliseconds: forks of one process that has imported what training imports.

`Preloaded` starts that process, this file as a program. A command is as one that was executed: its own process, and
session where asked for, working directory, environment, standard streams, signal handlers, exit status, and what ends
with the interpreter: threads and functions registered for then. What it cannot show is an import that is missing, late
or wrong, nor how modules are taken down: tests of every kind of start keep one command that is executed.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

_MODULES = (
    "dynapipe_ext.launch.cli",
    "dynapipe_ext.launch.subcommands",
    "dynapipe_ext.launch.commands.train",
    "dynapipe_ext.launch.variant_run",
    "dynapipe_ext.launch.megatron_run",
    "dynapipe_ext.executor.store.redis",
    "dynapipe_ext.executor.checkpoints.megatron_tensors",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
)
# What commands of models that transformers computes import besides.
TRANSFORMERS = (
    "dynapipe_ext.launch.transformers_run",
    "dynapipe_ext.executor.stages.transformers_adapters",
    "dynapipe_ext.launch.deepspeed_run",
    "transformers.integrations.deepspeed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "deepspeed",
)
_REQUEST_BYTES = 1 << 17


class Command:
    """A running command; `stderr` is what it says, a text file to read while it runs."""

    def __init__(self, stdout: IO[bytes], stderr: IO[str], status: IO[str]) -> None:
        self._stdout, self.stderr, self._status = stdout, stderr, status
        self.pid = int(status.readline())
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """All of standard output, and what is left to read of standard error; at the limit the command is killed."""
        limit = threading.Timer(timeout, self.send_signal, [signal.SIGKILL])
        limit.start()
        said = self.stderr.read()
        self.returncode = int(self._status.readline())
        limit.cancel()
        self._stdout.seek(0)
        return self._stdout.read().decode(), said


class Preloaded:
    """The process that commands are forks of, while the context lasts."""

    def __enter__(self) -> Preloaded:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-P", __file__, *_MODULES], stdin=theirs)
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        self._process.wait(60)

    def load(self, *modules: str) -> None:
        """Import these, too, before the next command begins."""
        self._requests.send(json.dumps({"modules": modules}).encode())

    @contextmanager
    def started(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        new_session: bool = False,
        faults: Mapping[str, Any] | None = None,
    ) -> Iterator[Command]:
        """`dynapipe ARGUMENTS` with variables on top of this process's environment; `faults` are what `faults.install`
        is given before the command begins."""
        request = {
            "arguments": list(arguments),
            "cwd": str(cwd or Path.cwd()),
            "environment": {**os.environ, **(environment or {})},
            "new_session": new_session,
            "faults": faults,
        }
        stderr_read, stderr_write = os.pipe()
        status_read, status_write = os.pipe()
        with (
            open(os.devnull, "rb") as stdin,
            tempfile.TemporaryFile() as stdout,
            open(stderr_read, encoding="utf-8") as stderr,
            open(status_read, encoding="utf-8") as status,
        ):
            streams = [stdin.fileno(), stdout.fileno(), stderr_write, status_write]
            socket.send_fds(self._requests, [json.dumps(request).encode()], streams)
            os.close(stderr_write)
            os.close(status_write)
            yield Command(stdout, stderr, status)

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout: float,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` would return of `dynapipe ARGUMENTS`."""
        with self.started(arguments, cwd=cwd, environment=environment) as command:
            stdout, stderr = command.communicate(timeout)
        assert command.returncode is not None
        return subprocess.CompletedProcess(["dynapipe", *arguments], command.returncode, stdout, stderr)

    def train(self, *arguments: str, cwd: Path | None = None, timeout: float = 120) -> str:
        """What `dynapipe train ARGUMENTS` says on standard error; it must succeed."""
        done = self.run(["train", *arguments], timeout=timeout, cwd=cwd, environment={"GLOO_SOCKET_IFNAME": "lo"})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr


def _serve(requests: socket.socket) -> None:
    """Forks a command for every request, and a process that waits for it, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    while True:
        request, streams, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
        if not request:
            return
        given = json.loads(request)
        if "modules" in given:
            _load(given["modules"])
            continue
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            *standard, status = streams
            if (pid := os.fork()) == 0:
                _become(standard, status, **given)
            for stream in standard:
                os.close(stream)
            exit_status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(status, f"{exit_status}\n".encode())
            os._exit(0)
        for stream in streams:
            os.close(stream)


def _load(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # what is loaded is not searched for garbage by every command


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _become(
    standard: Sequence[int],
    status: int,
    *,
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    new_session: bool,
    faults: dict[str, Any] | None,
) -> NoReturn:
    """What `dynapipe ARGUMENTS` does once it has been executed."""
    from dynapipe_ext.launch import cli

    if new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(standard):
        os.dup2(stream, number)
        os.close(stream)
    os.write(status, f"{os.getpid()}\n".encode())
    os.close(status)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as TMPDIR says now
    sys.argv = ["dynapipe", *arguments]
    if faults is not None:
        sys.path.append(str(Path(__file__).parent))
        importlib.import_module("faults").install(**faults)
    try:
        sys.exit(cli.main())
    except SystemExit as ended:
        _end(ended.code)
    except BaseException:  # noqa: BLE001 - it is said, as an interpreter would
        traceback.print_exc()
        _end(1)


def _end(code: object) -> NoReturn:
    """As an interpreter ends, but for taking down what is loaded, which would take half a second of a core."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # waits for threads, as the interpreter does first
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    from dynapipe_ext.executor.stages import megatron_cpu

    megatron_cpu.install()  # before anything of megatron is imported
    _load(sys.argv[1:])
    _serve(socket.socket(fileno=0))
