"""When a run saves: every so many steps or minutes, when a signal asks it to end, and at its last step."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from dynapipe_ext.config import CheckpointSettings
from dynapipe_ext.executor.checkpoints.manifest import RunState
from dynapipe_ext.executor.events import StepDone


class EndRequest:
    """Whether a signal has asked this rank to save and end, and which; it has then `grace_s` to do so."""

    def __init__(self, grace_s: float) -> None:
        self.number = 0
        self._grace_s = grace_s

    @contextmanager
    def listening(self, numbers: Sequence[signal.Signals]) -> Iterator[None]:
        """Inside, these signals are noted instead of obeyed; outside of the main thread nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)  # SIGALRM ends a rank that hangs


@dataclass(frozen=True, slots=True)
class SoFar:
    """What a run has gone through: its losses, one a step, and samples."""

    losses: tuple[float, ...] = ()
    num_samples: int = 0

    def and_step(self, loss: float, num_samples: int) -> SoFar:
        return SoFar((*self.losses, loss), self.num_samples + num_samples)


class Saver(Protocol):
    def save(self, run: RunState) -> None: ...

    def advance(self, *, wait: bool = False) -> None: ...

    def most(self, number: int, step: int) -> int:
        """The largest of every rank's number after so many steps."""
        ...

    def close(self) -> None: ...


class PeriodicCheckpoints:
    """A listener, given to every rank: saves when a rank finds it due, and after `num_steps`. Where the best checkpoint
    is kept, weights of a lower validation loss than any before are due.

    `state(done, so_far)` describes the run after a step; `so_far` begins at that of a resumed run. `num_samples(done)`
    are those of the step's batch. Once a rank was asked to end, all save and raise SystemExit with 128 and the signal's
    number.
    """

    def __init__(
        self,
        saver: Saver,
        settings: CheckpointSettings,
        state: Callable[[StepDone, SoFar], RunState],
        request: EndRequest,
        *,
        num_steps: int,
        num_samples: Callable[[StepDone], int],
        so_far: SoFar,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saver, self._settings, self._state, self._request = saver, settings, state, request
        self._num_steps, self._num_samples, self._so_far, self._clock = num_steps, num_samples, so_far, clock
        self._saved_s = clock()
        self._least_loss = math.inf

    def step_done(self, done: StepDone) -> None:
        self._so_far = self._so_far.and_step(done.loss, self._num_samples(done))
        self._saver.advance()
        # Due by this rank's clock is 1; an ending signal is its number, which is larger.
        wanted = self._saver.most(self._request.number or self._is_due(done), done.number)
        if wanted or done.number >= self._num_steps:
            self._saver.save(self._state(done, self._so_far))
            self._saved_s = self._clock()
        if done.number >= self._num_steps or wanted > 1:
            self._saver.advance(wait=True)
        if wanted > 1:
            raise SystemExit(128 + wanted)

    def _is_due(self, done: StepDone) -> bool:
        every, minutes = self._settings.save_every, self._settings.save_minutes
        by_steps = bool(every) and done.number % every == 0
        loss = done.evaluation.loss if self._settings.keep_best and done.evaluation else math.inf
        if is_best := loss < self._least_loss:
            self._least_loss = loss
        return by_steps or is_best or (minutes > 0 and self._clock() - self._saved_s >= 60 * minutes)

    def close(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._saver.close()
