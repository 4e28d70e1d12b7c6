"""When a run saves, and what its ranks do together while they save: all of them go on, or none does."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from dynapipe_ext.durable_files import checksum, list_files, sync_below
from dynapipe_ext.errors import (
    NO_ROOM,
    DataError,
    ExecutionError,
    NoRoomError,
    in_one_line,
    named_collectives,
    writing_move,
)
from dynapipe_ext.executor.checkpoints import folder as folders
from dynapipe_ext.executor.checkpoints.folder import (
    AUTO_SAVE_S,
    RECENT_STEPS,
    Manifest,
    RunState,
    SavedTensor,
    find_damaged,
    lacks_room,
    needed_and_free,
    read_manifest,
    refuse_other_model,
    unwritable_number,
)
from dynapipe_ext.executor.device import gather_json, most_of_ranks, send_json
from dynapipe_ext.executor.events import StepDone
from dynapipe_ext.executor.protocols import OptimizerPlace
from dynapipe_ext.settings.tables import CheckpointSettings

_T = TypeVar("_T")


class EndRequest:
    """`signal` is the first signal that asked this rank to save and end, None before it. From then on the rank has
    `grace_s` to do so."""

    def __init__(self, grace_s: float) -> None:
        self.signal: signal.Signals | None = None
        self._grace_s = grace_s

    @contextmanager
    def listening(self, numbers: Sequence[signal.Signals]) -> Iterator[None]:
        """Inside, these signals are noted instead of obeyed, but for those that are ignored. On any thread but the main
        one nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        obeyed = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in obeyed}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)  # SIGALRM ends a rank that hangs


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The samples that a run has trained on, over all epochs, and the losses of its last RECENT_STEPS steps."""

    num_samples: int = 0
    recent_losses: tuple[float, ...] = ()

    def and_step(self, loss: float, num_samples: int) -> RunProgress:
        return RunProgress(self.num_samples + num_samples, (*self.recent_losses, loss)[-RECENT_STEPS:])


@dataclass(frozen=True, slots=True)
class SaveVote:
    """Whether a rank wants all ranks to save after this step, and the signal by which it was asked to end, if any."""

    is_due: bool
    end_signal: signal.Signals | None = None

    @property
    def saves(self) -> bool:
        return self.is_due or self.end_signal is not None

    def to_number(self) -> int:
        """The largest number of all ranks is their common vote: a signal outweighs a save without one.

        >>> [SaveVote(due, end).to_number() for due, end in ((False, None), (True, None), (False, signal.SIGTERM))]
        [0, 1, 30]
        """
        return 2 * (self.end_signal or 0) + self.is_due

    @classmethod
    def from_number(cls, number: int) -> SaveVote:
        end_signal, is_due = divmod(number, 2)
        return cls(bool(is_due), signal.Signals(end_signal) if end_signal else None)


class Saver(Protocol):
    def save(self, run: RunState) -> None: ...

    def advance(self, *, wait: bool = False) -> bool:
        """Bring a save in the background forward, to its end where `wait`; whether none is under way any more."""
        ...

    def most(self, number: int, step: int) -> int:
        """The largest of every rank's number after so many steps."""
        ...

    def close(self) -> None: ...


_MOST_SHARE = 1 / 20  # of a run's time that goes into saves which nobody asked for
_TRIED_AGAIN_S = 60.0
_LOOKED_AGAIN_S, _LOOKS = 0.5, 10  # whether it is to end, between two tries of the last save
WAITS_FOR_ROOM_S = 3600.0


class PeriodicCheckpoints:
    """A listener on every rank. It saves when any rank votes for it, and after `num_steps`.

    Saves are due by `settings`. Rank 0 decides on those that settings leave to the run: it has `lacks_room()`, which
    says what a save needs beside what is free, or nothing where that will do. Where settings keep the best checkpoint,
    a save is also due for a validation loss below all before, and below `least_validation_loss`, that of the
    checkpoints which a resumed run already has. `state(done, progress)` describes the run after a step; `progress`
    begins at that of a resumed run. `saved(done, seconds)` is told of each save once its checkpoint is whole;
    `seconds` is what training waited for it. `say` tells people of saves for which there was no room. `unwritten()`
    writes what a checkpoint goes with, the run's losses, or gives the error of want of room for it.
    `num_samples(done)` counts the samples of the step's batch. Once a signal has asked any rank to end, all ranks save
    and raise SystemExit with 128 and the signal's number.

    A save without room falls due again after a minute or more, and training goes on. The last one waits for room, as
    long as no signal comes and at most WAITS_FOR_ROOM_S. Errors: NoRoomError where there is none even then.
    """

    def __init__(
        self,
        saver: Saver,
        settings: CheckpointSettings,
        state: Callable[[StepDone, RunProgress], RunState],
        request: EndRequest,
        *,
        num_steps: int,
        num_samples: Callable[[StepDone], int],
        progress: RunProgress,
        least_validation_loss: float = math.inf,
        lacks_room: Callable[[], str] | None = None,
        say: Callable[[str], object] = lambda text: None,
        unwritten: Callable[[], NoRoomError | None] = lambda: None,
        saved: Callable[[StepDone, float], object] = lambda done, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saver, self._settings, self._state, self._request = saver, settings, state, request
        self._num_steps, self._num_samples, self._progress, self._clock = num_steps, num_samples, progress, clock
        self._saved_s, self._save_took_s, self._lacks_room, self._say = clock(), 0.0, lacks_room, say
        self._least_loss, self._saved, self._unwritten = least_validation_loss, saved, unwritten
        self._again_s = math.inf  # when a save falls due for which there was no room
        self._last: StepDone | None = None
        self._has_saved_last = False  # or begun to, in the background
        self._under_way: tuple[StepDone, float] | None = None  # the save that `saved` is to be told of

    def step_done(self, done: StepDone) -> None:
        self._progress = self._progress.and_step(done.loss, self._num_samples(done))
        self._has_room(done, self._advance)
        is_due = self._falls_due(done) or (self._is_best(done) and self._again_s == math.inf)
        vote = self._vote_of_all(done, is_due=is_due)
        self._last, self._has_saved_last = done, False
        if vote.end_signal is not None:
            try:
                self._save(done)
                self._advance(wait=True)
            except NoRoomError as error:
                self._end_without_room(error, vote.end_signal)
            raise SystemExit(128 + vote.end_signal)
        if done.number >= self._num_steps:
            self._save_once_there_is_room(done)
        elif vote.saves:
            self._has_room(done, partial(self._save, done))

    def save_last(self, place: Mapping[str, Any], why: str) -> None:
        """Save the run as its last step left it, where no save has that, and wait for saves under way: the step after
        it changed nothing and ends the run, for the reason `why`. `place` is the loader's state between the two."""
        done = self._last
        if done is None or (self._has_saved_last and self._has_room(done, partial(self._advance, wait=True))):
            return
        self._save_once_there_is_room(done, place, why)

    def _vote_of_all(self, done: StepDone, *, is_due: bool) -> SaveVote:
        own_vote = SaveVote(is_due, self._request.signal)
        return SaveVote.from_number(self._saver.most(own_vote.to_number(), done.number))

    def _has_room(self, done: StepDone, work: Callable[[], object]) -> bool:
        """Take a step of a save. Where there is no room for it, which all ranks then know, it is said, and a save falls
        due again after a while."""
        begun_s = self._clock()
        try:
            work()
        except NoRoomError as error:
            wait_s = max(_TRIED_AGAIN_S, (self._clock() - begun_s) / _MOST_SHARE)
            self._again_s = self._clock() + wait_s
            self._say(f"step {done.number}: {error.problem}: {error.remedy}; it is tried again after {wait_s:.0f} s")
            return False
        return True

    def _save_once_there_is_room(self, done: StepDone, place: Mapping[str, Any] | None = None, why: str = "") -> None:
        begun_s, has_said = self._clock(), False
        while True:
            try:
                self._save(done, place)
                self._advance(wait=True)
                return
            except NoRoomError as error:
                if not has_said:
                    self._say(
                        f"{why and f'{why}; '}step {done.number}: {error.problem}: {error.remedy}; the run waits for it"
                        f" up to {WAITS_FOR_ROOM_S / 60:.0f} minutes (Ctrl-C ends it without what it has not saved)"
                    )
                has_said = True
                for _ in range(_LOOKS):
                    vote = self._vote_of_all(done, is_due=self._clock() - begun_s >= WAITS_FOR_ROOM_S)
                    if vote.end_signal is not None:
                        self._end_without_room(error, vote.end_signal)
                    if vote.is_due:  # it has waited long enough
                        raise
                    time.sleep(_LOOKED_AGAIN_S)

    def _end_without_room(self, error: NoRoomError, end_signal: signal.Signals) -> NoReturn:
        self._say(str(error))
        raise SystemExit(128 + end_signal)

    def _save(self, done: StepDone, place: Mapping[str, Any] | None = None) -> None:
        start_s, state = self._clock(), self._state(done, self._progress)
        if self._under_way is not None:
            self._has_room(done, partial(self._advance, wait=True))
        lack = self._unwritten()
        if self._saver.most(lack is not None, done.number):
            raise lack or NoRoomError("rank 0 has no room for the run's losses", "make room there", "resume")
        self._saver.save(state if place is None else replace(state, loader=dict(place)))
        self._saved_s, self._again_s, self._has_saved_last = self._clock(), math.inf, True
        self._save_took_s = self._saved_s - start_s
        self._under_way = done, self._save_took_s
        self._advance()

    def _advance(self, *, wait: bool = False) -> None:
        save, self._under_way = self._under_way, None
        if not self._saver.advance(wait=wait):
            self._under_way = save
        elif save is not None:
            done, _ = save
            if self._is_best(done) and done.evaluation is not None:
                self._least_loss = done.evaluation.loss
            self._saved(*save)

    def _is_best(self, done: StepDone) -> bool:
        return self._settings.keep_best and done.evaluation is not None and done.evaluation.loss < self._least_loss

    def _falls_due(self, done: StepDone) -> bool:
        """Whether to save now."""
        if self._again_s < math.inf:
            return self._clock() >= self._again_s
        every, minutes = self._settings.save_every, self._settings.save_minutes
        if every > 0 and done.number % every == 0:
            return True
        if minutes == "auto":
            return every <= 0 and self._falls_due_unasked(done)  # saves that were asked for stay the newest
        return minutes > 0 and self._clock() - self._saved_s >= 60 * minutes

    def _falls_due_unasked(self, done: StepDone) -> bool:
        after_s = max(AUTO_SAVE_S, self._save_took_s / _MOST_SHARE)
        if self._lacks_room is None or self._clock() - self._saved_s < after_s:
            return False
        if lack := self._lacks_room():
            self._say(f"step {done.number} is not saved, which {lack}: make room there for the next one")
            self._saved_s = self._clock()
        return not lack

    def close(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._saver.close()


@dataclass(frozen=True, slots=True)
class WriteFault:
    """Why a rank could not write, empty where it could. `number` is the operating system's where the place is full,
    read-only or not the rank's own, as it will be at another start; else 0."""

    text: str = ""
    number: int = 0

    def to_json(self) -> list[Any]:
        return [self.text, self.number]


NO_FAULT = WriteFault()


class SavingRanks:
    """This rank among all that save below `root` checkpoints of about `num_bytes`; of them `settings` keep some.

    If any work fails on one rank, what is half written goes, all ranks raise NoRoomError or ExecutionError with its
    words, and none waits for one that is gone."""

    def __init__(self, root: Path, device: torch.device, settings: CheckpointSettings, *, num_bytes: int = 0) -> None:
        self._root, self._device, self._settings, self._num_bytes = root, device, settings, num_bytes
        if dist.get_rank() == 0:
            folders.tidy(root)
            self._retain()  # a save may have failed before it

    def begin(self, step: int) -> None:
        """Make the folder that all ranks then write the checkpoint of a step into. Errors: NoRoomError, before anything
        is written where its bytes do not fit."""

        def made() -> None:
            if lacks_room(self._root, self._num_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            folders.begin(self._root, step)

        self.on_first(made)

    def on_first(self, work: Callable[[], _T]) -> _T | None:
        """What `work` gives, on rank 0; None on the other ranks."""
        return self.on_every(work if dist.get_rank() == 0 else lambda: None)

    def on_every(self, work: Callable[[], _T]) -> _T:
        """What `work` gives."""
        result, fault, cause = None, NO_FAULT, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  # whatever it is: left by this rank, the others would wait
            fault, cause = self.fault_of(error), error
        if most_of_ranks(bool(fault.text), self._device):
            self.raise_first([WriteFault(*one) for one in gather_json(fault.to_json(), self._device)], cause)
        return cast(_T, result)

    def publish(
        self,
        part: Path,
        manifest: Manifest,
        *,
        join: Callable[[Path], object],
        checksums: Mapping[str, str],
        published: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        """Make what all ranks have written to `part` a checkpoint, with `manifest`, to which its files are added.

        First every rank waits until its own files are on the disk: another machine's rank 0 cannot. Then rank 0 calls
        `join(part)`, ranks share the files whose `checksums` are not known yet, and rank 0 gives the folder its name
        and calls `published(folder)`.
        """
        self.on_every(lambda: sync_below(part) if dist.get_rank() else None)  # rank 0 does so once it has joined them

        def joined() -> dict[str, int]:
            join(part)
            return {name: (part / name).stat().st_size for name in list_files(part)}

        files: dict[str, int] = send_json(self.on_first(joined), 0, None, self._device)
        own = _share(name for name in files if name not in checksums)
        shares = gather_json(self.on_every(lambda: {name: checksum(part / name) for name in own}), self._device)
        known = dict(checksums) | {name: saved for share in shares for name, saved in share.items()}

        def put() -> None:
            published(folders.publish(part, replace(manifest, files=files, checksums=known)))
            self._retain()

        self.on_first(put)

    def _retain(self) -> None:
        folders.retain(self._root, last=self._settings.keep_last, best=self._settings.keep_best)

    def fault_of(self, error: BaseException) -> WriteFault:
        number = unwritable_number(error, self._root)
        why = os.strerror(number) if number else str(error) if isinstance(error, OSError) else in_one_line(error)
        return WriteFault(f"rank {dist.get_rank()} could not write below {self._root}: {why}", number)

    def raise_first(self, faults: Sequence[WriteFault], cause: BaseException | None = None) -> NoReturn:
        """On all ranks, none of which writes any more. What is half written goes first, so that what is free then is
        what is free. `cause` is this rank's own error."""
        if dist.get_rank() == 0:
            with suppress(OSError):
                folders.tidy(self._root)
        most_of_ranks(0, self._device)
        move = "resume" if folders.checkpoints(self._root) else "start the run anew, of which nothing was saved"
        first = next((fault for fault in faults if fault.number), None)
        if first is None:
            text = next(fault.text for fault in faults if fault.text)
            raise ExecutionError(f"the checkpoint was not saved: {text}: look there, then {move}") from cause
        is_full = first.number in NO_ROOM and self._num_bytes > 0
        room = f"; one {needed_and_free(self._root, self._num_bytes)}" if is_full else ""
        problem = f"the checkpoint was not saved: {first.text}{room}"
        raise NoRoomError(problem, writing_move(first.number), move) from cause

    def most(self, number: int, step: int) -> int:
        """The largest of every rank's number: what one of them asks for after so many steps, all do."""
        with named_collectives(f"agreement of all ranks on a checkpoint of step {step}"):
            return most_of_ranks(number, self._device)


class SavingTogether:
    """Saves a run below `root`, a folder that all ranks reach; each checkpoint appears there whole or not at all.

    Every rank takes each of `steps(folder, run)` once all have taken the one before: what ranks wait for each other in
    is a step of its own. Then rank 0 calls `join(folder)`, and `published(folder)` where the checkpoint has its name.
    `place` says where the optimizer stands, `framework` is the package whose version is kept, `num_bytes` what a
    checkpoint takes (0: nobody knows). Errors: NoRoomError and ExecutionError on all ranks where one of them fails;
    what was saved before stays.
    """

    def __init__(
        self,
        root: Path,
        settings: CheckpointSettings,
        device: torch.device,
        steps: Sequence[Callable[[Path, RunState], object]],
        *,
        place: Callable[[], OptimizerPlace],
        framework: str,
        join: Callable[[Path], object] = lambda folder: None,
        published: Callable[[Path], object] = lambda folder: None,
        num_bytes: int = 0,
    ) -> None:
        self._root, self._framework = root, framework
        self._steps, self._join, self._published, self._place = steps, join, published, place
        self._ranks = SavingRanks(root, device, settings, num_bytes=num_bytes)
        self.most = self._ranks.most

    def save(self, run: RunState) -> None:
        part = folders.part_folder(self._root, run.step)
        with named_collectives(f"checkpoint of step {run.step}"):
            self._ranks.begin(run.step)
            for step in self._steps:
                self._ranks.on_every(partial(step, part, run))
            manifest = new_manifest(run, self._place(), self._framework)
            self._ranks.publish(part, manifest, join=self._join, checksums={}, published=self._published)

    def advance(self, *, wait: bool = False) -> bool:
        """Nothing goes on in the background."""
        return True

    def close(self) -> None: ...


def new_manifest(
    run: RunState, place: OptimizerPlace, framework: str, tensors: Mapping[str, SavedTensor] | None = None
) -> Manifest:
    """The manifest of a checkpoint whose files are still to be named."""
    versions = {name: version(name) for name in ("dynapipe-ext", "torch", framework)}
    return Manifest(run=run, optimizer=place, versions=versions, files={}, checksums={}, tensors=tensors or {})


def open_checkpoint(folder: Path, model: Mapping[str, Any], device: torch.device) -> Manifest:
    """Read a checkpoint's manifest, and compare the contents of all its files with what was saved: each rank reads a
    share of them. Every rank calls it, or a process without ranks. `model` is compared with the RunState's.

    Errors: DataError, on all ranks, for a file that is missing or damaged, and for another model.
    """
    manifest = read_manifest(folder)
    refuse_other_model(manifest.run.model, model, folder)
    if dist.is_initialized():
        with named_collectives("check of the checkpoint's files"):
            faults = gather_json(find_damaged(folder, manifest, _share(manifest.files)), device)
    else:
        faults = [find_damaged(folder, manifest, manifest.files)]
    for fault in filter(None, faults):
        raise DataError(fault)
    return manifest


def _share(names: Iterable[str]) -> list[str]:
    """This rank's of some files, of which each is one rank's."""
    return sorted(names)[dist.get_rank() :: dist.get_world_size()]
