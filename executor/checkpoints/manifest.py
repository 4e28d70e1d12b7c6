"""What a checkpoint says of its run (`dynapipe.json`), and when one is saved."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from dynapipe_ext.costs.interchange import cost_model_from_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import DataError, short
from dynapipe_ext.executor.events import StepDone
from dynapipe_ext.settings.tables import CheckpointSettings

FORMAT = "dynapipe-checkpoint/1"
MANIFEST = "dynapipe.json"
OPTIMIZER_FILES = "optimizer-*.safetensors"  # beside a model that transformers computes
MODEL_FOLDER = "model"  # beside what a DeepSpeed engine saves, where the model of a checkpoint may be a run's output
RECENT_STEPS = 10  # whose losses a checkpoint has; those of all steps are in the run's events.jsonl
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A block of a tensor: its first value's place, its shape, and the bytes of a file that hold it."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A whole tensor by its chunks, which fill it without overlap; `dtype` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands after `step` steps, and its settings. The next plan is that of step `step`.

    `num_samples` counts the samples trained on, over all epochs. `loader` is DynaPipeDataLoader.state_dict(). `model`
    describes the model by its sizes and dtype. `costs` is the cost model as JSON, beside its hash. `recent_losses` are
    those of the last steps (RECENT_STEPS at most; not a number where a step was refused). `validation_loss` is that of
    these weights; None where they were not evaluated.
    """

    step: int
    num_samples: int
    loader: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    costs: Mapping[str, Any]
    costs_fingerprint: str
    recent_losses: tuple[float, ...]
    validation_loss: float | None = None

    @property
    def score(self) -> tuple[bool, float]:
        """(False, validation loss) of evaluated weights, else (True, mean loss of the recent steps, infinite without
        any). The best checkpoint has the least score, so evaluated weights come before all others.

        >>> state = dict(step=3, num_samples=9, loader={}, model={}, settings={}, costs={}, costs_fingerprint="")
        >>> RunState(recent_losses=(9.0, math.nan, 1.0), **state).score
        (True, 5.0)
        >>> RunState(recent_losses=(9.0, math.nan, 1.0), validation_loss=7.0, **state).score
        (False, 7.0)
        """
        if self.validation_loss is not None and math.isfinite(self.validation_loss):
            return False, self.validation_loss
        finite_losses = [loss for loss in self.recent_losses if math.isfinite(loss)]
        return True, sum(finite_losses) / len(finite_losses) if finite_losses else math.inf

    def cost_model(self) -> CostModel:
        """The costs that the run plans with. Errors: DataError where they are not those that were hashed."""
        model = cost_model_from_json(self.costs)
        if model.fingerprint() != self.costs_fingerprint:
            raise DataError(
                f"the checkpoint's costs have the hash {short(model.fingerprint())} but were saved with"
                f" {short(self.costs_fingerprint)}: plans would differ; resume from another checkpoint"
            )
        return model


@dataclass(frozen=True, slots=True)
class OptimizerPlace:
    """Updates that the optimizer has made (refused steps make none), and its learning-rate schedule's own state."""

    num_updates: int
    schedule: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything in `dynapipe.json`: `files` are the other files with their bytes, `tensors` what lies where."""

    run: RunState
    optimizer: OptimizerPlace
    versions: Mapping[str, str]
    files: Mapping[str, int]
    tensors: Mapping[str, SavedTensor]

    def encode(self) -> bytes:
        run = self.run
        raw = {
            "format": FORMAT,
            "step": run.step,
            "num_samples": run.num_samples,
            "loader": run.loader,
            "model": run.model,
            "settings": run.settings,
            "costs": run.costs,
            "costs_fingerprint": run.costs_fingerprint,
            "losses": [loss if math.isfinite(loss) else None for loss in run.recent_losses],
            "validation_loss": run.validation_loss if math.isfinite(run.validation_loss or 0.0) else None,
            "optimizer": {"num_updates": self.optimizer.num_updates, "schedule": self.optimizer.schedule},
            "versions": self.versions,
            "files": self.files,
            "tensors": {
                key: [t.dtype, t.shape, [[c.begin, c.shape, c.file, c.offset, c.num_bytes] for c in t.chunks]]
                for key, t in self.tensors.items()
            },
        }
        return (json.dumps(raw, allow_nan=False) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Errors: DataError naming `where` and the field."""
        try:
            raw = json.loads(data)
        except ValueError as error:
            raise DataError(f"{where} is no JSON ({error}): resume from another checkpoint") from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            wrote = raw.get("format") if isinstance(raw, dict) else raw
            raise DataError(
                f"{where} has format {short(wrote)} but {FORMAT!r} is read here: resume with the version that wrote it"
            )
        optimizer = _field(raw, "optimizer", dict, where)
        try:
            return cls(
                run=RunState(
                    step=_field(raw, "step", int, where),
                    num_samples=_field(raw, "num_samples", int, where),
                    loader=_field(raw, "loader", dict, where),
                    model=_field(raw, "model", dict, where),
                    settings=_field(raw, "settings", dict, where),
                    costs=_field(raw, "costs", dict, where),
                    costs_fingerprint=_field(raw, "costs_fingerprint", str, where),
                    recent_losses=tuple(  # older versions saved the losses of all steps
                        math.nan if loss is None else float(loss)
                        for loss in _field(raw, "losses", list, where)[-RECENT_STEPS:]
                    ),
                    validation_loss=None
                    if raw.get("validation_loss") is None
                    else _field(raw, "validation_loss", float, where),
                ),
                optimizer=OptimizerPlace(
                    _field(optimizer, "num_updates", int, f"{where}: optimizer"),
                    _field(optimizer, "schedule", dict, f"{where}: optimizer"),
                ),
                versions=_field(raw, "versions", dict, where),
                files={name: int(size) for name, size in _field(raw, "files", dict, where).items()},
                tensors={key: _tensor(value) for key, value in _field(raw, "tensors", dict, where).items()},
            )
        except (TypeError, ValueError) as error:
            raise DataError(f"{where} is damaged ({error}): resume from another checkpoint") from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder. Errors: DataError naming the file that is missing, cut or damaged."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.decode(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): {folder.name} is no checkpoint of dynapipe, remove it or resume"
            " from another run"
        ) from error
    for name, num_bytes in manifest.files.items():
        file = folder / name
        if Path(name).name != name:
            raise DataError(f"{path} names the file {short(name)} outside of its folder: it is not to be trusted")
        present = file.stat().st_size if file.is_file() else None
        if present != num_bytes:
            fault = "is missing" if present is None else f"has {present:,} bytes"
            raise DataError(
                f"{file} {fault} but was saved with {num_bytes:,}: remove {folder} to resume from before it"
            )
    return manifest


def refuse_other_model(saved: Mapping[str, Any], configured: Mapping[str, Any], folder: Path) -> None:
    """Errors: DataError naming each size in which the checkpoint's model is another than the configured one."""
    differing = [
        f"{name} {short(saved.get(name))} where {short(configured.get(name))} is configured"
        for name in sorted(saved.keys() | configured.keys())
        if saved.get(name) != configured.get(name)
    ]
    if differing:
        raise DataError(
            f"{folder} holds another model: {'; '.join(differing)}: resume with the model it was saved with"
        )


def _field(raw: Mapping[str, Any], name: str, kind: type[_T], where: str) -> _T:
    value = raw.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DataError(f"{where}: {name} is {short(value)}, expected {kind.__name__}: resume from another checkpoint")
    return value


def _tensor(raw: Any) -> SavedTensor:
    dtype, shape, chunks = raw
    return SavedTensor(
        str(dtype),
        _ints(shape),
        tuple(
            StoredChunk(_ints(b), _ints(s), str(file), int(offset), int(size)) for b, s, file, offset, size in chunks
        ),
    )


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


class EndRequest:
    """`signal` is the first signal that asked this rank to save and end, None before it. From then on the rank has
    `grace_s` to do so."""

    def __init__(self, grace_s: float) -> None:
        self.signal: signal.Signals | None = None
        self._grace_s = grace_s

    @contextmanager
    def listening(self, numbers: Sequence[signal.Signals]) -> Iterator[None]:
        """Inside, these signals are noted instead of obeyed. On any thread but the main one nothing changes."""
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

    def advance(self, *, wait: bool = False) -> None: ...

    def most(self, number: int, step: int) -> int:
        """The largest of every rank's number after so many steps."""
        ...

    def close(self) -> None: ...


class PeriodicCheckpoints:
    """A listener on every rank. It saves when any rank votes for it, and after `num_steps`.

    Saves are due by `settings`. Where these keep the best checkpoint, a save is also due for a validation loss below
    all before, and below `least_validation_loss`, that of the checkpoints which a resumed run already has.
    `state(done, progress)` describes the run after a step; `progress` begins at that of a resumed run.
    `num_samples(done)` counts the samples of the step's batch. Once a signal has asked any rank to end, all ranks save
    and raise SystemExit with 128 and the signal's number.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saver, self._settings, self._state, self._request = saver, settings, state, request
        self._num_steps, self._num_samples, self._progress, self._clock = num_steps, num_samples, progress, clock
        self._saved_s = clock()
        self._least_loss = least_validation_loss

    def step_done(self, done: StepDone) -> None:
        self._progress = self._progress.and_step(done.loss, self._num_samples(done))
        self._saver.advance()
        is_best = self._is_best(done)
        if is_best and done.evaluation is not None:
            self._least_loss = done.evaluation.loss
        own_vote = SaveVote(is_best or self._is_due(done), self._request.signal)
        vote = SaveVote.from_number(self._saver.most(own_vote.to_number(), done.number))
        is_last = done.number >= self._num_steps
        if vote.saves or is_last:
            self._saver.save(self._state(done, self._progress))
            self._saved_s = self._clock()
        if is_last or vote.end_signal is not None:
            self._saver.advance(wait=True)
        if vote.end_signal is not None:
            raise SystemExit(128 + vote.end_signal)

    def _is_best(self, done: StepDone) -> bool:
        return self._settings.keep_best and done.evaluation is not None and done.evaluation.loss < self._least_loss

    def _is_due(self, done: StepDone) -> bool:
        every, minutes = self._settings.save_every, self._settings.save_minutes
        by_steps = every > 0 and done.number % every == 0
        return by_steps or (minutes > 0 and self._clock() - self._saved_s >= 60 * minutes)

    def close(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._saver.close()
