"""Processes that tokenize, and what each of them does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Protocol, Self

from dynapipe_ext.data.preprocessing.encoders import Encoder
from dynapipe_ext.data.preprocessing.encoding import EncodedBlock, EncodeSettings, encode_block
from dynapipe_ext.data.preprocessing.inputs import Block, BlockStream
from dynapipe_ext.errors import ConfigError, DataError, DynaPipeError, ExecutionError

Result = EncodedBlock | Exception
_MODULE = "dynapipe_ext.data.preprocessing.worker"
_ON_HAND = 2  # blocks that a worker has: one in work, one waiting
_AHEAD = 4  # blocks a worker that may be done before the oldest is
_GRACE_S = 5.0


class Workers(Protocol):
    """Something that encodes blocks; a context manager."""

    def run(self, blocks: BlockStream) -> Iterator[EncodedBlock]:
        """One result a block, in order. An error of a block is raised after the results of all blocks before it."""
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
    """`num_workers` processes; `environment` is theirs whole, or None for this process's.

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
        """End all workers, whatever they are at."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.end()
        self._workers = []

    def run(self, blocks: BlockStream) -> Iterator[EncodedBlock]:
        done: dict[int, Result] = {}
        taken = given = 0
        more = True
        while more or given < taken:
            while more and taken - given < _AHEAD * self._num_workers:
                if self._load() >= _ON_HAND:
                    break
                try:
                    block = next(blocks, None)
                except DynaPipeError as error:  # told in its turn, after the results of what comes before it
                    done[taken] = error
                    taken, more = taken + 1, False
                    break
                if block is None:
                    more = False
                    break
                self._least_loaded().give(taken, block)
                taken += 1
            if given in done:
                yield _result(done.pop(given))
                given += 1
                continue
            busy = {worker.connection: worker for worker in self._workers if worker.on_hand}
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                index, result = busy[connection].take()
                done[index] = result

    def _load(self) -> int:
        """Blocks on hand of the worker that would get the next one."""
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
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],  # -P: nothing of the working folder
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=None if environment is None else dict(environment),
                    process_group=0,  # Ctrl-C is this process's to hear
                )
            except OSError as error:
                raise ExecutionError(
                    f"a worker cannot be started ({error.strerror}): ask for fewer with --workers"
                ) from error
            self.connection = Connection(ours.detach())
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
    """The result of a block, or its error as a value, to be raised where the blocks come from."""
    try:
        return encode_block(block, settings, encoder)
    except DynaPipeError as error:
        return type(error)(str(error))  # without its cause, which may not be picklable
    except MemoryError:
        return DataError(f"{block.file}, line {block.first} and after: no memory left: ask for fewer --workers")
