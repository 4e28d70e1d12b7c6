"""The planner processes of a job: started together, watched, and stopped by the process that owns them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np

from dynapipe_ext.errors import StoreError
from dynapipe_ext.executor.course import Order
from dynapipe_ext.executor.plan_source import publish_failure
from dynapipe_ext.executor.planner_process import PlannerJob
from dynapipe_ext.executor.protocols import Store
from dynapipe_ext.executor.store.keys import Keys
from dynapipe_ext.lengths import LengthArray

_STOP_S = 2.0


class PlannerProcesses:
    """`job.num_workers` planner processes. A context manager; `store` is that of the job.

    A process that ends by itself, however it ends, is made known through the store to all ranks that wait for it.
    """

    def __init__(self, job: PlannerJob, store: Store, lengths: LengthArray, order: Order | None = None) -> None:
        self._store = store
        self._folder = tempfile.TemporaryDirectory(prefix="dynapipe-planner-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._job = replace(
            job,
            lengths_path=_saved(folder / "lengths.npy", lengths),
            order_path=None if order is None else _saved(folder / "order.npy", order),
            parent_pid=os.getpid(),
            dies_with_thread=threading.current_thread() is threading.main_thread(),
        )
        self._closing = threading.Event()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
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
        """Stop all planners, within seconds."""
        self._closing.set()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_S)
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # a job that could not be written to a dead process
                    process.stdin.close()
        for watcher in self._watchers:
            watcher.join(_STOP_S)
        self._folder.cleanup()

    def __enter__(self) -> PlannerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, worker: int) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dynapipe_ext.executor.planner_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C reaches the owner alone, which then stops its planners in order
        )
        self.processes.append(process)
        assert process.stdin is not None
        try:
            process.stdin.write(self._job.for_worker(worker).to_json().encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already: the watcher tells the ranks
        watcher = threading.Thread(target=self._watch, args=(worker, process), daemon=True)
        watcher.start()
        self._watchers.append(watcher)

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


def _saved(path: Path, array: Order | LengthArray) -> str:
    np.save(path, array, allow_pickle=False)
    return str(path)
