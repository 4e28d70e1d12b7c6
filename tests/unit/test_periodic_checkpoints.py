"""When a run saves, and that what it saves of its past does not grow with it."""

from __future__ import annotations

import math
import os
import signal
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.errors import NoRoomError
from dynapipe_ext.executor.checkpoints import folder as folders
from dynapipe_ext.executor.checkpoints import saving
from dynapipe_ext.executor.checkpoints.folder import Manifest, RunState
from dynapipe_ext.executor.checkpoints.saving import (
    EndRequest,
    PeriodicCheckpoints,
    RunProgress,
    SaveVote,
)
from dynapipe_ext.executor.events import EvalDone, StepDone
from dynapipe_ext.executor.protocols import OptimizerPlace
from dynapipe_ext.launch.job.run_directory import RunDirectory
from dynapipe_ext.settings.tables import CheckpointSettings
from dynapipe_ext.tools.account.run_events import EVENTS_FILE, EventsFile, start_events
from dynapipe_ext.tools.files import write_atomic
from tests.support.steps import a_step
from tests.unit.test_run_events import FACTS, OURS

SIGTERM = SaveVote(False, signal.SIGTERM)


class Kept:
    """A saver of one rank; `others` is the vote of the other ranks."""

    def __init__(self, others: SaveVote = SaveVote(False)) -> None:  # noqa: B008
        self.others, self._voted = others, 0
        self.saved: list[RunState] = []
        self.waited: list[bool] = []

    def save(self, run: RunState) -> None:
        self.saved.append(run)

    def advance(self, *, wait: bool = False) -> bool:
        self.waited.append(wait)
        return True

    def most(self, number: int, step: int) -> int:
        is_vote, self._voted = step != self._voted, step  # the first thing that ranks agree on after a step
        return max(number, self.others.to_number()) if is_vote else number

    def close(self) -> None: ...


class InFolder(Kept):
    """A saver that keeps its newest checkpoint below `root`, and the best."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def save(self, run: RunState) -> None:
        super().save(run)
        folders.publish(folders.begin(self.root, run.step), manifest_of(run))
        folders.retain(self.root, last=1, best=True)


def manifest_of(run: RunState) -> Manifest:
    return Manifest(run=run, optimizer=OptimizerPlace(run.step, {}), versions={}, files={}, checksums={}, tensors={})


def state(done: StepDone, progress: RunProgress) -> RunState:
    nothing: dict[str, Any] = {"loader": {}, "model": {}, "settings": {}, "costs": {}, "costs_fingerprint": ""}
    return RunState(
        step=done.number,
        recent_losses=progress.recent_losses,
        num_samples=progress.num_samples,
        validation_loss=done.evaluation.loss if done.evaluation else None,
        **nothing,
    )


def checkpoints_of(
    saver: Kept, settings: CheckpointSettings, request: EndRequest | None = None, *, num_steps: int = 9, **options: Any
) -> PeriodicCheckpoints:
    """Of a new run, each step of which has one sample."""
    options = {"num_samples": lambda _: 1, "progress": RunProgress(), **options}
    return PeriodicCheckpoints(saver, settings, state, request or EndRequest(60), num_steps=num_steps, **options)


def steps_saved(
    settings: CheckpointSettings,
    *,
    saver: Kept | None = None,
    request: EndRequest | None = None,
    first: int = 0,
    last: int = 7,
    validation: Mapping[int, float] | None = None,
    least_validation_loss: float = math.inf,
    lacks_room: Callable[[], str] | None = None,
    say: Callable[[str], object] = lambda text: None,
    save_s: float = 0.0,
) -> list[int]:
    """Of steps up to `last`, each of which lasts a minute, and saves of `save_s`; `validation` losses are by the number
    of their step."""
    kept, now_s = saver or Kept(), 0.0

    def state_later(done: StepDone, progress: RunProgress) -> RunState:
        nonlocal now_s
        now_s += save_s
        return state(done, progress)

    checkpoints = PeriodicCheckpoints(
        kept,
        settings,
        state_later,
        request or EndRequest(60),
        num_steps=last,
        num_samples=lambda done: 10 + done.step,
        progress=RunProgress(100 * first, (9.0,) * first),
        least_validation_loss=least_validation_loss,
        lacks_room=lacks_room,
        say=say,
        clock=lambda: now_s,
    )
    for step in range(first, last):
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


def test_a_step_that_ends_the_run_has_the_one_before_it_saved_where_no_save_has_it() -> None:
    kept = Kept()
    settings = CheckpointSettings(save_every=2)
    checkpoints = checkpoints_of(kept, settings)
    checkpoints.save_last({"step": 0}, "")
    assert not kept.saved  # no step has run
    for step in range(3):
        checkpoints.step_done(a_step(step))
    checkpoints.save_last({"step": 3}, "")
    checkpoints.save_last({"step": 3}, "")
    assert [(run.step, run.loader, run.num_samples) for run in kept.saved] == [(2, {}, 2), (3, {"step": 3}, 3)]
    assert kept.waited.count(True) == 2  # also for a save that is under way


def test_a_run_of_more_than_minutes_saves_unasked_where_there_is_room_and_not_for_long() -> None:
    """Rank 0 decides; the others have nothing to decide by."""
    lacks: list[str] = []
    said: list[str] = []
    fits: dict[str, Any] = {"lacks_room": lambda: "", "say": said.append}
    full: dict[str, Any] = {"lacks_room": lambda: lacks.append("") or "takes 2 B where 1 B is free", "say": said.append}
    assert steps_saved(CheckpointSettings(), last=25, **fits) == [10, 20, 25]
    assert steps_saved(CheckpointSettings(), last=60, **fits, save_s=60) == [10, 30, 50, 60]
    assert steps_saved(CheckpointSettings(save_every=8), last=25, **fits) == [8, 16, 24, 25]
    assert steps_saved(CheckpointSettings(save_minutes=0), last=25, **fits) == [25]
    assert steps_saved(CheckpointSettings(), last=25) == [25]
    assert said == []
    assert steps_saved(CheckpointSettings(), last=25, **full) == [25]
    assert len(lacks) == 2  # a look every ten minutes
    assert said[0] == "step 10 is not saved, which takes 2 B where 1 B is free: make room there for the next one"


class Full(Kept):
    """A saver without room for so many saves, after `skips` others; in the background, a later look finds that out."""

    skips = 0

    def __init__(self, failing: int, *, background: bool = False, others: SaveVote = SaveVote(False)) -> None:  # noqa: B008
        super().__init__(others)
        self.failing, self._background, self.looks_left = failing, background, 0

    def save(self, run: RunState) -> None:
        assert self.looks_left == 0
        super().save(run)
        self.looks_left = 2 if self._background else 1
        if not self._background:
            self.advance()

    def advance(self, *, wait: bool = False) -> bool:
        is_under_way, self.looks_left = bool(self.looks_left), 0 if wait else max(0, self.looks_left - 1)
        if is_under_way and self.looks_left == 0 and self.failing > 0:
            if self.skips:
                self.skips -= 1
                return True
            self.failing -= 1
            self.saved.pop()
            raise NoRoomError("the disk is full", "make room there")
        return self.looks_left == 0


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(saving.time, "sleep", found.append)
    return found


@pytest.mark.parametrize("background", [False, True])
def test_a_save_without_room_falls_due_again_and_the_run_goes_on(background: bool, slept: list[float]) -> None:
    said: list[str] = []
    full = Full(2, background=background)
    saved = steps_saved(CheckpointSettings(save_every=3), saver=full, last=10, say=said.append)
    assert saved == ([7, 9, 10] if background else [5, 6, 9, 10])  # a minute lies between two steps
    first = "step 4" if background else "step 3"
    assert said[0] == f"{first}: the disk is full: make room there; it is tried again after 60 s"
    assert len(said) == 2
    assert not slept


@pytest.mark.parametrize("background", [False, True])
def test_the_last_save_waits_for_room(background: bool, slept: list[float]) -> None:
    said: list[str] = []
    assert steps_saved(CheckpointSettings(), saver=Full(3, background=background), say=said.append) == [7]
    assert len(slept) == 30  # whether it is to end, ten times between two tries
    assert said == [
        "step 7: the disk is full: make room there; the run waits for it up to 60 minutes (Ctrl-C ends it without what"
        " it has not saved)"
    ]


def test_nothing_is_saved_before_what_goes_with_it_is_written(slept: list[float]) -> None:
    kept, said = Kept(), list[str]()
    lacks: list[NoRoomError | None] = [None, NoRoomError("losses are not written", "make room"), None]
    options = {"num_steps": 3, "say": said.append, "unwritten": lambda: lacks.pop(0)}
    checkpoints = checkpoints_of(kept, CheckpointSettings(save_every=1), **options)
    for step in range(3):
        checkpoints.step_done(a_step(step))
    assert [run.step for run in kept.saved] == [1, 3]
    assert said == ["step 2: losses are not written: make room; it is tried again after 60 s"]


def test_settings_and_events_are_on_the_disk_before_the_checkpoint_that_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order of writes, syncs and renames, as a power loss could cut it anywhere."""
    synced: dict[int, int] = {}  # the bytes of each file, by its inode, that are on the disk
    lacking: list[str] = []
    sync, rename = os.fsync, Path.rename

    def record_sync(descriptor: int) -> None:
        sync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = len(os.listdir(descriptor)) if stat.S_ISDIR(status.st_mode) else status.st_size

    def check_rename(path: Path, target: Path) -> Path:
        if target.name.startswith("iter_"):
            files = {path, *path.iterdir(), run / "config.toml", run / EVENTS_FILE}
            sizes = {file: file.stat().st_size if file.is_file() else len(list(file.iterdir())) for file in files}
            folders_of_names = {run.parent: {run.name}, run: {"config.toml", EVENTS_FILE, "checkpoints"}}
            lacking.extend(file.name for file in files if synced.get(file.stat().st_ino, -1) < sizes[file])
            lacking.extend(
                str(folder) for folder, names in folders_of_names.items() if synced[folder.stat().st_ino] < len(names)
            )
        elif path.is_file():
            assert synced[path.stat().st_ino] == path.stat().st_size  # before it takes its place
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", check_rename)
    run = tmp_path / "runs" / "one"
    with RunDirectory(str(run)):
        write_atomic(run / "config.toml", "[run]\n")
        start_events(run / EVENTS_FILE, FACTS, [OURS], num_steps=4)
        events = EventsFile(run / EVENTS_FILE, OURS.name)
        saver = InFolder(run / "checkpoints")
        checkpoints = checkpoints_of(saver, CheckpointSettings(save_every=2), num_steps=4, unwritten=events.catch_up)
        for step in range(4):
            events.step_done(a_step(step))
            checkpoints.step_done(a_step(step))
        events.close()
    assert [state.step for state in saver.saved] == [2, 4]
    assert lacking == []


def test_a_run_does_not_wait_for_room_once_it_is_asked_to_end(
    slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        steps_saved(CheckpointSettings(), saver=Full(10**9, others=SIGTERM), say=said.append)
    assert said == ["the disk is full: make room there"]
    assert not slept
    request, looks = EndRequest(60), [None] * 12 + [signal.SIGTERM]
    monkeypatch.setattr(saving.time, "sleep", lambda _: setattr(request, "signal", looks.pop(0)))
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        steps_saved(CheckpointSettings(), saver=Full(10**9), request=request, say=said.append)
    assert not looks
    assert said[-1] == "the disk is full: make room there"


def test_a_save_in_the_background_without_room_takes_no_other_with_it() -> None:
    kept = Full(1, background=True)
    request = EndRequest(60)
    checkpoints = checkpoints_of(kept, CheckpointSettings(save_every=1), request)
    checkpoints.step_done(a_step(0))
    request.signal = signal.SIGTERM
    kept.looks_left = 9  # still under way after the next step
    with pytest.raises(SystemExit):
        checkpoints.step_done(a_step(1))
    assert [run.step for run in kept.saved] == [2]


@pytest.mark.parametrize("background", [False, True])
def test_the_best_is_what_was_saved_and_without_room_is_not_tried_at_every_step(background: bool) -> None:
    said: list[str] = []
    losses = {2: 5.0, 5: 3.0, 6: 2.9, 9: 4.0}
    saver = Full(1, background=background)
    saver.skips = 1  # of the saves before
    saved = steps_saved(CheckpointSettings(keep_best=True), saver=saver, last=10, validation=losses, say=said.append)
    assert saved == ([2, 7, 9, 10] if background else [2, 6, 10])
    assert len(said) == 1


def test_what_was_saved_is_waited_for_at_the_end_alone() -> None:
    kept, ended = Kept(), Kept(SIGTERM)
    steps_saved(CheckpointSettings(save_every=3), saver=kept)
    with pytest.raises(SystemExit):
        steps_saved(CheckpointSettings(), saver=ended)
    assert [wait.index(True) == len(wait) - 1 for wait in (kept.waited, ended.waited)] == [True, True]


def test_a_save_in_the_background_is_told_of_once_it_is_whole() -> None:
    class InBackground(Kept):
        """Each save takes three looks at it, or a wait."""

        looks = 0

        def save(self, run: RunState) -> None:
            assert not self.looks
            super().save(run)
            self.looks = 3

        def advance(self, *, wait: bool = False) -> bool:
            self.looks = 0 if wait else max(0, self.looks - 1)
            return not self.looks

    told: list[tuple[int, int]] = []  # after so many steps, of the checkpoint of so many
    saved = lambda done, _: told.append((len(steps), done.number))  # noqa: E731
    checkpoints = checkpoints_of(InBackground(), CheckpointSettings(save_every=4), saved=saved)
    steps: list[int] = []
    for step in range(9):
        steps.append(step)
        checkpoints.step_done(a_step(step))
    assert told == [(6, 4), (9, 8), (9, 9)]  # the last save waits for the one before it, and the end for the last


def test_a_lower_validation_loss_than_any_before_is_saved_where_the_best_is_kept() -> None:
    validation = {1: 5.0, 2: 4.0, 4: 4.5, 5: math.nan, 6: 3.0}
    assert steps_saved(CheckpointSettings(keep_best=True), validation=validation) == [1, 2, 6, 7]
    assert steps_saved(CheckpointSettings(), validation=validation) == [7]


def test_the_best_checkpoint_of_a_resumed_run_stays_the_best(tmp_path: Path) -> None:
    keeps_best = CheckpointSettings(keep_best=True)
    before, after = InFolder(tmp_path), InFolder(tmp_path)
    assert steps_saved(keeps_best, saver=before, last=4, validation={2: 4.0}) == [2, 4]
    best_loss = folders.least_validation_loss(tmp_path, "")
    worse = {5: 4.5, 6: 4.25}
    resumed = steps_saved(keeps_best, saver=after, first=4, validation=worse, least_validation_loss=best_loss)
    assert resumed == [7]
    assert folders.best(tmp_path).name == "iter_0000002"
    (tmp_path / "iter_0000007" / "dynapipe.json").write_text("{")  # what is damaged is no other's matter
    assert folders.least_validation_loss(tmp_path, "") == 4.0


def test_what_a_checkpoint_says_of_its_run_does_not_grow_with_the_steps() -> None:
    num_bytes = {}
    for num_steps in (10, 100_000):
        progress = RunProgress()
        for _ in range(num_steps):
            progress = progress.and_step(2.0625, 3)
        run = replace(state(a_step(0), progress), step=100_000, num_samples=300_000)
        num_bytes[num_steps] = len(manifest_of(run).encode())
    assert num_bytes[100_000] == num_bytes[10]


def test_losses_and_samples_go_on_from_those_of_a_resumed_run() -> None:
    kept = Kept()
    steps_saved(CheckpointSettings(), saver=kept, first=4)
    assert kept.saved[0].recent_losses == (9.0, 9.0, 9.0, 9.0, *(a_step(step).loss for step in (4, 5, 6)))
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
    kept = Kept(SIGTERM)
    with pytest.raises(SystemExit) as ended:
        steps_saved(CheckpointSettings(), saver=kept)
    assert (ended.value.code, [run.step for run in kept.saved]) == (143, [1])
