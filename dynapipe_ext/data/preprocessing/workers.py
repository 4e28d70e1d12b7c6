"""Who encodes blocks: the calling process, processes of this machine, or a Ray cluster. All give the same bytes.

With Ray every node needs this package and must see the input files under the same paths:

    files -> read tasks, one a file -> blocks -> a pool of actors with the tokenizer -> results in order
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol, Self

from dynapipe_ext.data.preprocessing.encoder_loading import encoder_from_json
from dynapipe_ext.data.preprocessing.encoders import Encoder
from dynapipe_ext.data.preprocessing.encoding import EncodedBlock, EncodeSettings, encode_block
from dynapipe_ext.data.preprocessing.inputs import BLOCK_BYTES, Block, BlockStream, InputFile, file_blocks
from dynapipe_ext.errors import ConfigError, DataError, DynaPipeError, ExecutionError, install_advice
from dynapipe_ext.ray_cluster import connect_to_ray

Result = EncodedBlock | Exception
_MODULE = "dynapipe_ext.data.preprocessing.worker"
_ON_HAND = 2  # blocks of each worker: one in work, one waiting
_AHEAD = 4  # blocks of each worker that may be finished before the oldest one
_GRACE_S = 5.0


class Workers(Protocol):
    """Something that encodes blocks; a context manager."""

    def run(self, blocks: BlockStream) -> Iterator[EncodedBlock]:
        """One result for each block, in order. A block's error is raised after the results of all blocks before it."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class InlineWorkers:
    """The calling process alone."""

    def __init__(self, settings: EncodeSettings, encoder: Encoder) -> None:
        self._settings, self._encoder = settings, encoder

    def run(self, blocks: BlockStream) -> Iterator[EncodedBlock]:
        return (encode_block(block, self._settings, self._encoder) for block in blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


class ProcessWorkers:
    """`num_workers` processes. `environment` is their whole environment; None means that of this process.

    Errors: ConfigError for fewer than one; ExecutionError where one cannot start or dies.
    """

    def __init__(
        self,
        settings: EncodeSettings,
        encoder: Encoder,
        num_workers: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"the number of workers is {num_workers} but must be at least 1")
        self._job = (settings, encoder.as_json())
        self._num_workers = num_workers
        self._environment = environment
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self  # workers start as blocks come: a small file needs few

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all workers at once."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.end()
        self._workers = []

    def run(self, blocks: BlockStream) -> Iterator[EncodedBlock]:
        results: dict[int, Result] = {}
        num_taken = num_yielded = 0
        more = True
        while more or num_yielded < num_taken:
            while more and num_taken - num_yielded < _AHEAD * self._num_workers:
                if self._load() >= _ON_HAND:
                    break
                try:
                    block = next(blocks, None)
                except DynaPipeError as error:  # raised in its turn, after the results of earlier blocks
                    results[num_taken] = error
                    num_taken, more = num_taken + 1, False
                    break
                if block is None:
                    more = False
                    break
                self._least_loaded().give(num_taken, block)
                num_taken += 1
            if num_yielded in results:
                yield _result(results.pop(num_yielded))
                num_yielded += 1
                continue
            busy = {worker.connection: worker for worker in self._workers if worker.on_hand}
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                index, result = busy[connection].take()
                results[index] = result

    def _load(self) -> int:
        """Blocks on hand of the worker that gets the next block."""
        if len(self._workers) < self._num_workers:
            return 0
        return min(len(worker.on_hand) for worker in self._workers)

    def _least_loaded(self) -> _Worker:
        worker = min(self._workers, key=lambda worker: len(worker.on_hand), default=None)
        if worker is None or (worker.on_hand and len(self._workers) < self._num_workers):
            worker = _Worker(self._environment)
            self._workers.append(worker)
            worker.send(self._job)
        return worker


class _Worker:
    def __init__(self, environment: Mapping[str, str] | None) -> None:
        own_end, worker_end = socket.socketpair()
        with own_end, worker_end:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # the worker inherits it
            try:
                self.process = subprocess.Popen(
                    # -P: no modules of the working folder
                    [sys.executable, "-P", "-m", _MODULE, str(worker_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(worker_end.fileno(),),
                    env=None if environment is None else dict(environment),
                    process_group=0,  # Ctrl-C reaches this process alone
                )
            except OSError as error:
                raise ExecutionError(
                    f"a worker cannot be started ({error.strerror}): ask for fewer with --workers"
                ) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.connection = Connection(own_end.detach())
        self.on_hand: deque[tuple[int, Block]] = deque()

    def give(self, number: int, block: Block) -> None:
        self.on_hand.append((number, block))
        self.send(block)

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._death() from None

    def take(self) -> tuple[int, Result]:
        """The number and the result of the oldest block on hand."""
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        return self.on_hand.popleft()[0], result

    def end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
            return
        self.process.kill()
        self.process.wait()

    def _death(self) -> ExecutionError:
        try:
            code = self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return ExecutionError("a worker closed its connection: start again, what is done is kept")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        at = f" at {self.on_hand[0][1].file}, line {self.on_hand[0][1].first}" if self.on_hand else ""
        memory = " (out of memory?): ask for fewer with --workers, and" if code == -signal.SIGKILL else ":"
        return ExecutionError(f"worker {self.process.pid} {how}{at}{memory} start again, what is done is kept")


def _result(result: Result) -> EncodedBlock:
    if isinstance(result, Exception):
        raise result
    return result


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def guarded(block: Block, settings: EncodeSettings, encoder: Encoder) -> Result:
    """The result of a block, or its error as a value, which the process that sent the block raises."""
    try:
        return encode_block(block, settings, encoder)
    except DynaPipeError as error:
        return type(error)(str(error))  # without its cause, which may not be picklable
    except MemoryError:
        return DataError(f"{block.file}, line {block.first} and after: no memory left: ask for fewer --workers")


# Shares of a CPU: an actor and a read task take one together, so that actors leave room for reading.
_ACTOR_CPUS, _READ_CPUS = 0.9, 0.1
# Threads of the tokenizers library would share the CPU that other actors have.
_ENVIRONMENT = {"env_vars": {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}}
_QUIET = {"enable_progress_bars": False, "print_on_execution_start": False, "target_max_block_size": BLOCK_BYTES}


class RayWorkers:
    """`num_workers` actors, by default one for each CPU of the cluster, and as many tasks that read.

    `address` names a running cluster ("auto": the one of this machine). None starts one here with `local_cpus`; it ends
    with the context. An existing connection of Ray is used and stays.

    Errors: ConfigError without the package, or where the address does not answer; ExecutionError where the cluster
    fails.
    """

    def __init__(
        self,
        settings: EncodeSettings,
        encoder: Encoder,
        *,
        num_workers: int | None = None,
        address: str | None = None,
        local_cpus: int | None = None,
        object_store_bytes: int | None = None,
    ) -> None:
        try:
            import ray
            import ray.data
        except ImportError:
            raise ConfigError(f"--ray needs Ray Data: {install_advice('ray')}") from None
        self._ray: Any = ray
        self._settings, self._tokenizer = settings, encoder.as_json()
        self._num_workers = num_workers
        self._address, self._local_cpus, self._object_store_bytes = address, local_cpus, object_store_bytes
        self._own = False

    def __enter__(self) -> Self:
        if not self._ray.is_initialized():
            own = {"num_cpus": self._local_cpus, "object_store_memory": self._object_store_bytes}
            connect_to_ray(self._ray, self._address, own, log_to_driver=False)
            self._own = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._own:
            self._ray.shutdown()
            self._own = False

    def run(self, blocks: BlockStream) -> Iterator[EncodedBlock]:
        ray = self._ray
        cpus = int(ray.cluster_resources().get("CPU", 0))
        num_workers = self._num_workers or cpus
        if not 1 <= num_workers <= cpus:
            raise ConfigError(f"{num_workers} workers need a CPU each but the Ray cluster has {cpus}: ask for fewer")
        named_paths = {str(file.path.absolute()): str(file.path) for file, _ in blocks.left()}
        rows = [
            {"file": pickle.dumps((replace(file, path=file.path.absolute()), num_taken))}
            for file, num_taken in blocks.left()
        ]
        with _ordered_and_quiet(ray.data.DataContext.get_current()):
            results = (
                ray.data.from_items(rows, override_num_blocks=len(rows))
                .flat_map(
                    _Read(blocks),
                    num_cpus=_READ_CPUS,
                    runtime_env=_ENVIRONMENT,
                    compute=ray.data.TaskPoolStrategy(size=min(num_workers, len(rows))),
                )
                .map(
                    _Encode,
                    fn_constructor_args=(self._settings, self._tokenizer),
                    compute=ray.data.ActorPoolStrategy(size=num_workers),
                    num_cpus=_ACTOR_CPUS,
                    runtime_env=_ENVIRONMENT,
                )
            )
            try:
                for row in results.iter_rows():
                    result: Result = pickle.loads(row["result"])
                    if isinstance(result, Exception):
                        raise result
                    yield replace(result, file=named_paths[result.file])
            except ray.exceptions.RayError as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
                raise ExecutionError(
                    f"the Ray cluster failed ({reason}): look at `ray status`, then start again, what is done is kept"
                ) from error


class _Read:
    """A file's blocks as rows. An error becomes the last row and is raised in its turn."""

    def __init__(self, blocks: BlockStream) -> None:
        self._how = blocks.unit, blocks.columns, blocks.block_bytes

    def __call__(self, row: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
        file: InputFile
        file, num_taken = pickle.loads(row["file"])
        try:
            for place, block in enumerate(file_blocks(file, *self._how)):
                if place >= num_taken:
                    yield {"block": pickle.dumps(block)}
        except DynaPipeError as error:
            yield {"block": pickle.dumps(type(error)(str(error)))}
        except OSError as error:
            message = f"{file.path} cannot be read by a node of the cluster ({error.strerror}): put the files where all"
            yield {"block": pickle.dumps(DataError(f"{message} nodes see them"))}


class _Encode:
    def __init__(self, settings: EncodeSettings, tokenizer: str) -> None:
        self._settings, self._encoder = settings, encoder_from_json(tokenizer)

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        block = pickle.loads(row["block"])
        failed = isinstance(block, Exception)
        return {"result": pickle.dumps(block if failed else guarded(block, self._settings, self._encoder))}


@contextmanager
def _ordered_and_quiet(context: Any) -> Iterator[None]:
    """Inside, Ray Data keeps the order of rows, passes them on at once, and prints nothing."""
    before = {name: getattr(context, name) for name in _QUIET}
    order = context.execution_options.preserve_order
    logger = logging.getLogger("ray.data")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        for name, value in _QUIET.items():
            setattr(context, name, value)
        context.execution_options.preserve_order = True
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            setattr(context, name, value)
        context.execution_options.preserve_order = order
