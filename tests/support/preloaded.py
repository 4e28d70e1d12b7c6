"""`dynapipe` commands that start in milliseconds: forks of one process that has imported what training imports.

`Preloaded` starts that process, this file as a program. A command is as one that was executed: its own process, and
session where asked for, working directory, environment, standard streams, signal handlers, exit status, and what ends
with the interpreter: threads and functions registered for then. Its planners are forks, too (`forked_programs`). What
it cannot show is an import that is missing, late or wrong, nor how modules are taken down: tests of every kind of start
keep one command that is executed. A fork of it that has collected the tests, too (`after`), is what the workers of a
suite are forks of (`interpreter`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import itertools
import json
import logging
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

_MODULES = (
    "dynapipe_ext.launch.cli",
    "dynapipe_ext.launch.subcommands",
    "dynapipe_ext.launch.commands.train",
    "dynapipe_ext.launch.rank.variant_run",
    "dynapipe_ext.launch.rank.megatron_run",
    "dynapipe_ext.executor.store.redis",
    "dynapipe_ext.executor.checkpoints.megatron_checkpoint",
    "dynapipe_ext.executor.plans.planner_process",
    "dynapipe_ext.executor.measuring.rate",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
)
# What commands of models that transformers computes import besides.
TRANSFORMERS = (
    "dynapipe_ext.launch.rank.transformers_run",
    "dynapipe_ext.executor.stages.transformers.adapters",
    "dynapipe_ext.launch.rank.deepspeed_run",
    "transformers.integrations.deepspeed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
)
_REQUEST_BYTES = 1 << 17
_PAGE_BYTES, _MADV_COLLAPSE = 1 << 21, 25
_ENDED = "the preloaded process, or its fork that waits for a command, has ended: if nobody ended it, it says why above"


class Command:
    """A running command; `stderr` is what it says, a text file to read while it runs."""

    def __init__(self, stdout: IO[bytes], stderr: IO[str], status: IO[str]) -> None:
        self._stdout, self.stderr, self._status = stdout, stderr, status
        self.pid = _next_number(status)
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All of standard output, and what is left to read of standard error; at the limit the command is killed."""
        from tests.support.limits import LIMIT_S  # not at the top: as a program this file finds no other of the tests

        limit = threading.Timer(timeout or LIMIT_S, self.send_signal, [signal.SIGKILL])
        limit.start()
        try:
            stderr = self.stderr.read()
            self.returncode = _next_number(self._status)
        finally:
            limit.cancel()  # else this process would stay until then
        self._stdout.seek(0)
        return self._stdout.read().decode(), stderr


class PreloadedError(Exception):
    """A process that commands are forks of has ended before them."""


def _next_number(status: IO[str]) -> int:
    line = status.readline()
    if not line:
        raise PreloadedError(_ENDED)
    return int(line)


class Preloaded:
    """The process that commands are forks of, while the context lasts; with an `address`, that of another context."""

    def __init__(self, address: str = "") -> None:
        self.address = address
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Preloaded:
        if not self.address:
            self._folder = tempfile.TemporaryDirectory()  # its owner's alone, as what listens in it is
            self.address = f"{self._folder.name}/preloaded"
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(self.address)
                listener.listen()
                words = [sys.executable, "-P", __file__, "serve", str(os.getpid()), *_MODULES]
                quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # which torch reads as it is loaded; as ranks of a launcher
                self._process = subprocess.Popen(words, stdin=listener, env=quiet | os.environ)
        self._requests = _connected(self.address)
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._folder.cleanup()

    @property
    def interpreter(self) -> str:
        """A command line that runs `-c CODE` or `-m dynapipe_ext.launch.cli`, once appended, as Python does, but with
        all modules loaded."""
        return shlex.join([sys.executable, "-P", __file__, "interpret", self.address])

    def after(self, code: str) -> Preloaded:
        """Another one: a fork of this that has run `code`. It ends when nobody is connected to it any more.

        Errors: PreloadedError where `code` failed; standard error has its traceback.
        """
        other = Preloaded(f"{self.address}-{secrets.token_hex(4)}")
        status_read, status_write = os.pipe()
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
            open(os.devnull, "r+b") as null,
            open(status_read, encoding="utf-8") as status,
        ):
            listener.bind(other.address)
            listener.listen()
            other._requests = _connected(other.address)
            request = {"arguments": [code], "cwd": str(Path.cwd()), "environment": {**os.environ}, "is_code": True}
            streams = [listener.fileno(), null.fileno(), 2, status_write]
            socket.send_fds(self._requests, [json.dumps(request | {"serves": True}).encode()], streams)
            os.close(status_write)
            _next_number(status)
            if _next_number(status):
                raise PreloadedError(_ENDED)
        return other

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
        interpreter: str = "",
    ) -> Iterator[Command]:
        """`dynapipe ARGUMENTS` with variables on top of this process's environment; `faults` are what `faults.install`
        is given before the command begins. `interpreter`: a program that it takes for its Python."""
        request = {
            "arguments": list(arguments),
            "cwd": str(cwd or Path.cwd()),
            "environment": {**os.environ, **(environment or {})},
            "new_session": new_session,
            "faults": faults,
            "interpreter": interpreter,
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
        timeout: float | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` would return of `dynapipe ARGUMENTS`."""
        with self.started(arguments, cwd=cwd, environment=environment) as command:
            stdout, stderr = command.communicate(timeout)
        assert command.returncode is not None
        return subprocess.CompletedProcess(["dynapipe", *arguments], command.returncode, stdout, stderr)

    def train(self, *arguments: str, cwd: Path | None = None, timeout: float | None = None) -> str:
        """What `dynapipe train ARGUMENTS` says on standard error; it must succeed."""
        done = self.run(["train", *arguments], timeout=timeout, cwd=cwd, environment={"GLOO_SOCKET_IFNAME": "lo"})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr


def _connected(address: str) -> socket.socket:
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests.connect(address)
    return requests


def _interpret(address: str, arguments: Sequence[str]) -> NoReturn:
    """Lends a fork of the preloaded process this one's streams, namespaces and cores, and ends as it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the fork
    request = {"arguments": arguments, "cwd": str(Path.cwd()), "environment": {**os.environ}, "is_code": True}
    if arguments[0] == "-m":
        request |= {"place_of": os.getpid()}
        if arguments[1] == "dynapipe_ext.launch.cli":  # the command itself
            request |= {"arguments": arguments[2:], "is_code": False}
        else:
            run = f"runpy.run_module({arguments[1]!r}, run_name='__main__', alter_sys=True)"
            request["arguments"] = [f"import runpy, sys; sys.argv[1:] = {list(arguments[2:])!r}; {run}"]
    status_read, status_write = os.pipe()
    with _connected(address) as requests:
        socket.send_fds(requests, [json.dumps(request).encode()], [0, 1, 2, status_write])
    os.close(status_write)
    with open(status_read) as status:
        try:
            _, code = _next_number(status), _next_number(status)
        except PreloadedError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
    os._exit(code % 256)


def _serve(listener: socket.socket) -> NoReturn:
    """Forks a command for every request, and a process that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    watched = selectors.DefaultSelector()
    watched.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is listener:
                watched.register(listener.accept()[0], selectors.EVENT_READ)
                continue
            requests: socket.socket = key.fileobj  # type: ignore[assignment]
            request, streams, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
            given = json.loads(request) if request else {}
            if not given:
                watched.unregister(requests)
                requests.close()
                if len(watched.get_map()) == 1:  # nobody is left who could ask
                    os._exit(0)
            elif "modules" in given:
                _load(given["modules"])
            elif os.fork() == 0:
                _run(watched, streams, given)
            for stream in streams:
                os.close(stream)


def _run(watched: selectors.BaseSelector, streams: Sequence[int], given: dict[str, Any]) -> NoReturn:
    """A fork that is the command, and this one, which waits for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for key in [*watched.get_map().values()]:
        key.fileobj.close()  # type: ignore[union-attr]
    watched.close()
    *standard, status = streams
    if (pid := os.fork()) == 0:
        _become(standard, status, **given)
    for stream in standard:
        os.close(stream)
    exit_status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(status, f"{exit_status}\n".encode())
    os._exit(0)


def _load(modules: Sequence[str]) -> None:
    show, warnings.showwarning = warnings.showwarning, lambda *_, **__: None  # of what no test is about
    logging.disable(logging.WARNING)
    for module in modules:
        importlib.import_module(module)
    if conversions := sys.modules.get("transformers.conversion_mapping"):
        conversions.get_checkpoint_conversion_mapping("")  # compiles hundreds of patterns for a process's first model
    logging.disable(logging.NOTSET)
    warnings.showwarning = show
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined] # torch's take half a second of a core
        finalizer.atexit = False
    keep_loaded()


def keep_loaded() -> None:
    """What is loaded by now stays: neither this process nor its forks seek garbage in it, and they seldom seek any."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a command makes many objects and little garbage that refers to itself
    join_pages()


def join_pages() -> None:
    """Have memory of this process in pages of 2 MB, where the kernel joins them (Linux 6.1): its forks, commands, ranks
    and planners, start in a third of the time."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()  # places, access, offset, device, inode, and the name of what has one
        if words[1].startswith("rw") and words[5:] in ([], ["[heap]"]):
            first, end = (int(place, 16) for place in words[0].split("-"))
            for page in range(-(-first // _PAGE_BYTES) * _PAGE_BYTES, end - _PAGE_BYTES + 1, _PAGE_BYTES):
                madvise(page, _PAGE_BYTES, _MADV_COLLAPSE)


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
    new_session: bool = False,
    faults: dict[str, Any] | None = None,
    is_code: bool = False,
    serves: bool = False,
    interpreter: str = "",
    place_of: int = 0,
) -> NoReturn:
    """What `dynapipe ARGUMENTS` does once it has been executed, or `python ARGUMENTS`, the last of which is code."""
    from dynapipe_ext.launch import cli

    if new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(standard):
        os.dup2(stream, number)
        os.close(stream)
    os.write(status, f"{os.getpid()}\n".encode())
    if not serves:
        os.close(status)
    if place_of:
        _enter(place_of)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as TMPDIR says now
    sys.argv = ["dynapipe", *arguments]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    if interpreter:
        sys.executable = interpreter
    if place_of or not is_code:
        programs = importlib.import_module("forked_programs")
        programs.install_for_launch() if place_of else programs.install()
        _try_one_move()
    if folder := environment.get("DYNAPIPE_TEST_SECRETS"):
        importlib.import_module("tests.support.wire").keep_secrets(Path(folder))
    if faults is not None:
        importlib.import_module("faults").install(**faults)
    try:
        if is_code:
            sys.argv, sys.dont_write_bytecode = ["-c"], "-B" in arguments
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(arguments[-1], vars(main))
            if serves:
                os.write(status, b"0\n")
                os.close(status)
                _serve(socket.socket(fileno=0))
            sys.exit()
        sys.exit(cli.main())
    except SystemExit as ended:
        _end(ended.code)
    except BaseException:  # noqa: BLE001 - it is said, as an interpreter would
        traceback.print_exc()
        _end(1)


def _try_one_move() -> None:
    """A run plans for up to 2 s what it tells to try next. Here it tries one; tests/unit/test_next_moves.py has all."""
    module: Any = sys.modules["dynapipe_ext.launch.run.next_moves"]
    changes = module._changes
    module._changes = lambda *given, **named: itertools.islice(changes(*given, **named), 1)


def _enter(pid: int) -> None:
    """The namespaces and cores of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
    for namespace in namespaces:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    os.sched_setaffinity(0, os.sched_getaffinity(pid))


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
    if sys.argv[1] == "interpret":
        _interpret(sys.argv[2], sys.argv[3:])

    from dynapipe_ext.executor.parent_death import end_with_parent
    from dynapipe_ext.executor.stages import megatron_cpu

    end_with_parent(int(sys.argv[2]))
    megatron_cpu.install()  # before anything of megatron is imported
    sys.path.append(str(Path(__file__).parent))
    _load([*sys.argv[3:], "faults", "forked_programs"])
    sys.modules["dynapipe_ext.executor.measuring.rate"]._REPEATS = 1  # no test looks at it
    sys.path.pop()
    _serve(socket.socket(fileno=0))
