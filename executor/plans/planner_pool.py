"""The planner processes of a job: started together, watched, and stopped by the process that owns them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

import numpy as np

from dynapipe_ext.errors import StoreError
from dynapipe_ext.executor.plans.planner_process import ARRAY_TYPE, CLOSE_SIGNAL, PlannerJob
from dynapipe_ext.executor.plans.source import publish_failure
from dynapipe_ext.executor.plans.step_positions import SampleOrder
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.store.keys import Keys
from dynapipe_ext.lengths import LengthArray

_STOP_S = 1.0
_PIECE = 1 << 20


class PlannerProcesses:
    """`job.num_workers` planner processes. A context manager; `store` is that of the job.

    A process that ends by itself, however it ends, is made known through the store to all ranks that wait for it.
    The arrays go to the processes through their standard input, from threads: nothing is ever written to a disk.
    """

    def __init__(self, job: PlannerJob, store: Store, lengths: LengthArray, order: SampleOrder | None = None) -> None:
        self._store = store
        self._arrays = [_bytes(lengths)] if order is None else [_bytes(lengths), _bytes(order)]
        self._job = replace(
            job,
            num_samples=len(lengths),
            order_size=None if order is None else len(order),
            parent_pid=os.getpid() if threading.current_thread() is threading.main_thread() else 0,
        )
        self._closing = threading.Event()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        try:
            for worker in range(job.num_workers):
                self._start(worker)
        except BaseException:
            self.close()
            raise

    def poll(self) -> dict[int, int]:
        """Exit status of each planner that has ended, by its number; a signal's is negative."""
        ended = {worker: process.poll() for worker, process in enumerate(self.processes)}
        return {worker: status for worker, status in ended.items() if status is not None}

    def close(self) -> None:
        """Stop all planners, which take this session's keys out of the store; about a second later they are killed."""
        self._closing.set()
        for process in self.processes:
            process.send_signal(CLOSE_SIGNAL)
        deadline_s = time.monotonic() + _STOP_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_S)
        for thread in self._threads:
            thread.join(_STOP_S)
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()

    def __enter__(self) -> PlannerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, worker: int) -> None:
        with _blocked(signal.SIGUSR1):  # it asks ranks to save; a planner inherits this, before it can ignore it
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dynapipe_ext.executor.plans.planner_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,
                process_group=0,  # a terminal's Ctrl-C reaches the owner alone, which then stops its planners in order
            )
        self.processes.append(process)
        for target in (self._watch, self._feed):
            thread = threading.Thread(target=target, args=(worker, process), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _feed(self, worker: int, process: subprocess.Popen[bytes]) -> None:
        """The job and the arrays; what follows on standard input is its end alone, with this process."""
        assert process.stdin is not None
        line = self._job.for_worker(worker).to_json().encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended already: the watcher tells the ranks
            for data in (memoryview(line), *self._arrays):
                sent = 0
                while sent < len(data):
                    sent += os.write(process.stdin.fileno(), data[sent : sent + _PIECE])

    def _watch(self, worker: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._closing.is_set():
            return
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        message = f"planner process {worker} (pid {process.pid}) {how}: its standard error may say why"
        try:
            keys, plan_key = Keys(self._job.prefix), bytes.fromhex(self._job.plan_key)
            publish_failure(self._store, keys, plan_key, worker, message, of_planning=False)
        except StoreError as error:
            print(f"{message}; and the ranks cannot be told: {error}", file=sys.stderr)


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """Inside, the signal waits for this thread; processes started inside never take it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _bytes(array: SampleOrder | LengthArray) -> memoryview:
    return np.ascontiguousarray(array, dtype=ARRAY_TYPE).reshape(-1).view(np.uint8).data
