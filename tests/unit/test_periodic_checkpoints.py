"""When a run saves: by steps, by the clock, when any rank is asked to end, and after its last step."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dynapipe_ext.executor.checkpoints.manifest import EndRequest, PeriodicCheckpoints, RunState, SoFar
from dynapipe_ext.executor.events import EvalDone, StepDone
from dynapipe_ext.settings.train_config import CheckpointSettings
from tests.support.steps import a_step


class Kept:
    """A saver of one rank; `others` is what the other ranks ask for."""

    def __init__(self, others: int = 0) -> None:
        self.others = others
        self.saved: list[RunState] = []
        self.waited: list[bool] = []

    def save(self, run: RunState) -> None:
        self.saved.append(run)

    def advance(self, *, wait: bool = False) -> None:
        self.waited.append(wait)

    def most(self, number: int, step: int) -> int:
        return max(number, self.others)

    def close(self) -> None: ...


def state(done: StepDone, so_far: SoFar) -> RunState:
    nothing: dict[str, Any] = {"loader": {}, "model": {}, "settings": {}, "costs": {}, "costs_fingerprint": ""}
    return RunState(step=done.number, losses=so_far.losses, num_samples=so_far.num_samples, **nothing)


def steps_saved(
    settings: CheckpointSettings,
    *,
    saver: Kept | None = None,
    request: EndRequest | None = None,
    first: int = 0,
    validation: Mapping[int, float] | None = None,
) -> list[int]:
    """Of 7 steps, each of which lasts a minute; `validation` losses are by the number of their step."""
    kept, now_s = saver or Kept(), 0.0
    checkpoints = PeriodicCheckpoints(
        kept,
        settings,
        state,
        request or EndRequest(60),
        num_steps=7,
        num_samples=lambda done: 10 + done.step,
        so_far=SoFar((9.0,) * first, 100 * first),
        clock=lambda: now_s,
    )
    for step in range(first, 7):
        now_s += 60
        loss = (validation or {}).get(step + 1)
        evaluated = loss and EvalDone(step=step, loss=loss, real_tokens=1, num_samples=1, seconds=0.0)
        checkpoints.step_done(replace(a_step(step), evaluation=evaluated or None))
    return [run.step for run in kept.saved]


def test_a_run_saves_by_steps_by_the_clock_and_after_its_last_step() -> None:
    assert steps_saved(CheckpointSettings()) == [7]
    assert steps_saved(CheckpointSettings(save_every=3)) == [3, 6, 7]
    assert steps_saved(CheckpointSettings(save_minutes=2)) == [2, 4, 6, 7]
    assert steps_saved(CheckpointSettings(save_every=5, save_minutes=2)) == [2, 4, 5, 7]
    assert steps_saved(CheckpointSettings(save_every=3), first=4) == [6, 7]


def test_what_was_saved_is_waited_for_at_the_end_alone() -> None:
    kept, ended = Kept(), Kept(others=signal.SIGTERM)
    steps_saved(CheckpointSettings(save_every=3), saver=kept)
    with pytest.raises(SystemExit):
        steps_saved(CheckpointSettings(), saver=ended)
    assert (kept.waited, ended.waited) == ([False] * 7 + [True], [False, True])


def test_a_lower_validation_loss_than_any_before_is_saved_where_the_best_is_kept() -> None:
    validation = {1: 5.0, 2: 4.0, 4: 4.5, 5: math.nan, 6: 3.0}
    assert steps_saved(CheckpointSettings(keep_best=True), validation=validation) == [1, 2, 6, 7]
    assert steps_saved(CheckpointSettings(), validation=validation) == [7]


def test_losses_and_samples_go_on_from_those_of_a_resumed_run() -> None:
    kept = Kept()
    steps_saved(CheckpointSettings(), saver=kept, first=4)
    assert kept.saved[0].losses == (9.0, 9.0, 9.0, 9.0, *(a_step(step).loss for step in (4, 5, 6)))
    assert kept.saved[0].num_samples == 400 + 14 + 15 + 16


def test_a_rank_that_is_asked_to_end_saves_after_its_step_and_ends() -> None:
    request, kept = EndRequest(60), Kept()
    before = signal.getsignal(signal.SIGUSR1)
    with request.listening([signal.SIGUSR1]):
        os.kill(os.getpid(), signal.SIGUSR1)
        left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    assert 0 < left_s <= 60
    with pytest.raises(SystemExit) as ended:
        steps_saved(CheckpointSettings(), saver=kept, request=request)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert [run.step for run in kept.saved] == [1]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_all_ranks_save_and_end_when_one_is_asked_to() -> None:
    kept = Kept(others=signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        steps_saved(CheckpointSettings(), saver=kept)
    assert (ended.value.code, [run.step for run in kept.saved]) == (143, [1])
