"""The planner processes of a job: started together, watched, and stopped by the process that owns them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType

import numpy as np

from dynapipe_ext.errors import StoreError
from dynapipe_ext.executor.parent_death import ends_within
from dynapipe_ext.executor.plans.planner_process import ARRAY_TYPE, CLOSE_SIGNAL, HEARTBEAT_S, PlannerJob
from dynapipe_ext.executor.plans.publishing import SLACK
from dynapipe_ext.executor.plans.source import SILENT_AFTER_S, publish_failure
from dynapipe_ext.executor.plans.step_positions import SampleOrder, StepPosition
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.store.keys import Keys
from dynapipe_ext.lengths import LengthArray

_STOP_S = 1.0
_MOST_STARTS = 4  # of one planner: what kills it more often is not chance
_PIECE = 1 << 20


class PlannerProcesses:
    """The planner processes `workers` of a `job.num_workers`, all by default. A context manager; `store` is the job's.

    A process that was killed, or has fallen silent, is started again where ranks are. One that fails by itself, or was
    killed too often, is made known through the store to all ranks that wait for it. The arrays go to the processes
    through their standard input, from threads: nothing is ever written to a disk.
    """

    def __init__(
        self,
        job: PlannerJob,
        store: Store,
        lengths: LengthArray,
        order: SampleOrder | None = None,
        *,
        workers: Sequence[int] | None = None,
    ) -> None:
        self._store = store
        self._arrays = [_bytes(lengths)] if order is None else [_bytes(lengths), _bytes(order)]
        self._job = replace(
            job,
            num_samples=len(lengths),
            order_size=None if order is None else len(order),
            parent_pid=os.getpid() if threading.current_thread() is threading.main_thread() else 0,
        )
        self._reached = deque([job.start], maxlen=SLACK)  # a rank may still have to read the oldest one's plan
        self._closing = threading.Event()
        self._changing = threading.Lock()  # which processes there are, and whether they are to run
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        try:
            for worker in range(job.num_workers) if workers is None else workers:
                self._start(worker)
                self._in_thread(self._keep, worker)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        with self._changing:
            return list(self._processes.values())

    def reached(self, place: StepPosition) -> None:
        """Where the owner's ranks are: a process that is started again goes on from there."""
        self._reached.append(place)

    def poll(self) -> dict[int, int]:
        """Exit status of each planner that has ended, by its number; a signal's is negative."""
        with self._changing:
            ended = {worker: process.poll() for worker, process in self._processes.items()}
        return {worker: status for worker, status in ended.items() if status is not None}

    def close(self) -> None:
        """Stop all planners, which take this session's keys out of the store; about a second later they are killed."""
        with self._changing:
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
        self._processes[worker] = process
        self._in_thread(self._feed, worker, process)

    def _in_thread(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _feed(self, worker: int, process: subprocess.Popen[bytes]) -> None:
        """The job and the arrays; what follows on standard input is its end alone, with this process."""
        assert process.stdin is not None
        job = replace(self._job, worker=worker, start=self._reached[0])
        line = job.to_json().encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its keeper tells the ranks
            for data in (memoryview(line), *self._arrays):
                sent = 0
                while sent < len(data):
                    sent += os.write(process.stdin.fileno(), data[sent : sent + _PIECE])

    def _keep(self, worker: int) -> None:
        """Start the worker's process again whenever it is killed; tell the ranks if it is not.

        This thread stays while the process runs, as the kernel takes a starting thread's end for the owner's.
        """
        for times_left in reversed(range(_MOST_STARTS)):
            process = self._processes[worker]
            status = self._until_it_ends(worker, process)
            if self._closing.is_set():
                return
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            message = f"planner process {worker} (pid {process.pid}) {how}"
            with self._changing:
                if self._closing.is_set():
                    return
                if again := status < 0 and times_left > 0:
                    self._start(worker)
            if not again:
                self._tell(worker, f"{message}: its standard error may say why")
                return
            print(f"dynapipe: {message}: started again", file=sys.stderr)

    def _until_it_ends(self, worker: int, process: subprocess.Popen[bytes]) -> int:
        """Its exit status; a process that gives no sign any more is killed."""
        last, num_same = None, 0
        while not ends_within(process, HEARTBEAT_S):
            sign = None
            with contextlib.suppress(StoreError):  # a store that is away says nothing about planners
                sign = self._store.try_get(Keys(self._job.prefix).heartbeat(worker))
            num_same = num_same + 1 if sign is not None and sign == last else 0
            last = sign
            if num_same * HEARTBEAT_S >= SILENT_AFTER_S:
                process.kill()
        return process.wait()

    def _tell(self, worker: int, message: str) -> None:
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
