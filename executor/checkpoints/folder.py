"""A run's checkpoints: where they lie, what each says of its run (`dynapipe.json`), and how one appears there whole or
not at all.

ROOT/latest_checkpointed_iteration.txt     "10": for Megatron, which starts from there
ROOT/iter_0000010/                         complete: a folder has this name only once all of it is on the disk
ROOT/.iter_0000020.part/                   being written, or left by a save that was killed
ROOT/.iter_0000010.old/, .removed/         being replaced, being removed

Rank 0 alone changes anything here; `tidy` at the start of a run puts right what a kill has left. The disk's room for a
checkpoint is asked about here, too: what one takes beside what is free, and whether a write failed for want of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dynapipe_ext.costs.interchange import cost_model_from_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.states import MOMENT_BYTES
from dynapipe_ext.durable_files import (
    checksum_of,
    is_intact,
    make_folder,
    remove_path,
    replace_file,
    replace_folder,
)
from dynapipe_ext.errors import MOST_NAME_BYTES, UNWRITABLE, DataError, format_bytes, reason, short
from dynapipe_ext.executor.events import losses_compare
from dynapipe_ext.executor.protocols import OptimizerPlace
from dynapipe_ext.models.architecture import without_defaults

FORMAT = "dynapipe-checkpoint/1"
MANIFEST = "dynapipe.json"
OPTIMIZER_FILES = "optimizer-*.safetensors"  # beside a model that transformers computes
MODEL_FOLDER = "model"  # beside what a DeepSpeed engine saves, where the model of a checkpoint may be a run's output
RECENT_STEPS = 10  # whose losses a checkpoint has; those of all steps are in the run's events.jsonl
_T = TypeVar("_T")
AUTO_SAVE_S = 600.0  # between saves that nobody asked for
_MASTER_BYTES = 4  # of a 16-bit weight
_RUSTS_NUMBER = re.compile(r"\(os error (\d+)\)")  # safetensors'
_PROBE_BYTES = 1 << 16
_UNSEALED = "crc32:00000000"  # in a manifest's bytes while their checksum is taken


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
    describes the model by its sizes and dtype. `first_weights` names the values that it began with, where they matter
    to the end (empty: they do not, or an older version saved this). `costs` is the cost model as JSON, beside its hash.
    `recent_losses` are those of the last steps (RECENT_STEPS at most; not a number where a step was refused).
    `validation_loss` is that of these weights; None where they were not evaluated. `validated_on` names its samples and
    the kind of loss (empty: unknown, of older versions): losses of two names are not compared.
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
    validated_on: str = ""
    first_weights: str = ""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything in `dynapipe.json`: `files` are the sizes of the other files in bytes, and `checksums` those of their
    contents, by their names below the folder; `tensors` says what is stored where. Older versions saved no checksums.
    """

    run: RunState
    optimizer: OptimizerPlace
    versions: Mapping[str, str]
    files: Mapping[str, int]
    checksums: Mapping[str, str]
    tensors: Mapping[str, SavedTensor]

    def encode(self) -> bytes:
        """Return the content of `dynapipe.json`. Its own checksum is that of the same bytes with `_UNSEALED` in the
        checksum's place."""
        run = self.run
        raw = {
            "format": FORMAT,
            "checksum": _UNSEALED,
            "step": run.step,
            "num_samples": run.num_samples,
            "loader": run.loader,
            "model": run.model,
            "settings": run.settings,
            "costs": run.costs,
            "costs_fingerprint": run.costs_fingerprint,
            "losses": [loss if math.isfinite(loss) else None for loss in run.recent_losses],
            "validation_loss": run.validation_loss if math.isfinite(run.validation_loss or 0.0) else None,
            "validated_on": run.validated_on,
            "first_weights": run.first_weights,
            "optimizer": {"num_updates": self.optimizer.num_updates, "schedule": self.optimizer.schedule},
            "versions": self.versions,
            "files": self.files,
            "checksums": self.checksums,
            "tensors": {
                key: [t.dtype, t.shape, [[c.begin, c.shape, c.file, c.offset, c.num_bytes] for c in t.chunks]]
                for key, t in self.tensors.items()
            },
        }
        unsealed = (json.dumps(raw, allow_nan=False) + "\n").encode()
        return unsealed.replace(_UNSEALED.encode(), checksum_of([unsealed]).encode(), 1)

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Errors: DataError naming `where` and the field."""
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is no JSON ({reason(error)}): resume from another checkpoint") from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            wrote = raw.get("format") if isinstance(raw, dict) else raw
            raise DataError(
                f"{where} has format {short(wrote)} but {FORMAT!r} is read here: resume with the version that wrote it"
            )
        optimizer = _field(raw, "optimizer", dict, where)
        checksums = _field({"checksums": {}, **raw}, "checksums", dict, where)
        try:
            manifest = cls(
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
                    validated_on=_field({"validated_on": "", **raw}, "validated_on", str, where),
                    first_weights=_field({"first_weights": "", **raw}, "first_weights", str, where),
                ),
                optimizer=OptimizerPlace(
                    _field(optimizer, "num_updates", int, f"{where}: optimizer"),
                    _field(optimizer, "schedule", dict, f"{where}: optimizer"),
                ),
                versions=_field(raw, "versions", dict, where),
                files={name: int(size) for name, size in _field(raw, "files", dict, where).items()},
                checksums={name: str(value) for name, value in checksums.items()},
                tensors={key: _tensor(value) for key, value in _field(raw, "tensors", dict, where).items()},
            )
        except (TypeError, ValueError) as error:
            raise DataError(f"{where} is damaged ({error}): resume from another checkpoint") from error
        if manifest.checksums or "checksum" in raw:
            seal = _field(raw, "checksum", str, where)
            if checksum_of([data.replace(seal.encode(), _UNSEALED.encode(), 1)]) != seal:
                raise DataError(f"{where} is not what was saved, by its own checksum: resume from another checkpoint")
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder. Errors: DataError naming the file that is missing or cut, or a
    damaged manifest. `find_damaged` reads the contents of the files."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.decode(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): {folder.name} is no checkpoint of dynapipe, remove it or resume"
            " from another run"
        ) from error
    for name, num_bytes in manifest.files.items():
        file, parts = folder / name, name.split("/")
        if any(part in ("", ".", "..") or len(os.fsencode(part)) > MOST_NAME_BYTES for part in parts):
            raise DataError(f"{path} names the file {short(name)} outside of its folder: it is not to be trusted")
        present = file.stat().st_size if file.is_file() else None
        if present != num_bytes:
            fault = "is missing" if present is None else f"has {present:,} bytes"
            raise DataError(
                f"{file} {fault} but was saved with {num_bytes:,}: remove {folder} to resume from before it"
            )
    if manifest.checksums and (bare := sorted(manifest.files.keys() - manifest.checksums.keys())):
        raise DataError(f"{path} has no checksum of {short(bare[0])}: resume from another checkpoint")
    return manifest


def find_damaged(folder: Path, manifest: Manifest, names: Iterable[str]) -> str:
    """Read some of a checkpoint's files and return what is wrong with the first whose content is not what was saved;
    empty if all are intact, or were saved without checksums."""
    for name in names:
        file, saved = folder / name, manifest.checksums.get(name)
        try:
            if saved is None or is_intact(file, saved):
                continue
            fault = "is damaged: its content is not what was saved"
        except (OSError, ValueError) as error:
            fault = f"cannot be checked ({reason(error)})"
        return f"{file} {fault}: remove {folder} to resume from before it"
    return ""


def refuse_other_model(saved: Mapping[str, Any], configured: Mapping[str, Any], folder: Path) -> None:
    """Errors: DataError naming each size in which the checkpoint's model is another than the configured one."""
    saved, configured = (without_defaults(json.loads(json.dumps(one))) for one in (saved, configured))
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


POINTER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})")
_PART, _OLD, _REMOVED = ".part", ".old", ".removed"
_POINTERS_PART = re.compile(rf"\.{re.escape(POINTER)}(\.\d+)?{re.escape(_PART)}")
_LEFTOVER = re.compile(rf"\.(iter_\d{{7,}})({re.escape(_PART)}|{re.escape(_OLD)}|{re.escape(_REMOVED)})")


def name_of(step: int) -> str:
    """
    >>> name_of(40)
    'iter_0000040'
    """
    return f"iter_{step:07d}"


def part_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written, on all ranks alike."""
    return root / f".{name_of(step)}{_PART}"


def checkpoints(root: Path) -> tuple[Path, ...]:
    """The complete checkpoints, those of fewer steps first."""
    if not root.is_dir():
        return ()
    folders = [entry for entry in root.iterdir() if _NAME.fullmatch(entry.name) and entry.is_dir()]
    return tuple(sorted(folders, key=lambda entry: int(entry.name.removeprefix("iter_"))))


def latest(root: Path) -> Path:
    """The complete checkpoint of the most steps. Errors: DataError where there is none."""
    folders = checkpoints(root)
    if not folders:
        raise DataError(f"{root} holds no complete checkpoint: start the run anew, or name another run to resume")
    return folders[-1]


def best(root: Path) -> Path:
    """The complete checkpoint of the least score (`RunState.score`); validation losses of other data, or of another
    loss, than the newest one count as none. Errors: DataError where there is none."""
    latest(root)
    return _of_least_score(checkpoints(root))


def least_validation_loss(root: Path, validated_on: str) -> float:
    """Of the complete checkpoints that can be read and were validated so; infinite where there is none."""
    losses = [run.validation_loss for run in _evaluated(root) if losses_compare(run.validated_on, validated_on)]
    return min((loss for loss in losses if loss is not None), default=math.inf)


def is_validated_anew(root: Path, validated_on: str) -> bool:
    """Whether a checkpoint that can be read was validated otherwise than now."""
    return any(not losses_compare(run.validated_on, validated_on) for run in _evaluated(root))


def _evaluated(root: Path) -> Iterator[RunState]:
    for folder in checkpoints(root):
        with contextlib.suppress(DataError):  # a damaged one cannot become the output
            run = read_manifest(folder).run
            if run.validation_loss is not None:
                yield run


def _of_least_score(folders: Sequence[Path]) -> Path:
    runs = [read_manifest(folder).run for folder in folders]
    newest = next((run.validated_on for run in reversed(runs) if run.validation_loss is not None), "")
    scores = [
        (run if losses_compare(run.validated_on, newest) else replace(run, validation_loss=None)).score for run in runs
    ]
    return folders[scores.index(min(scores))]


def begin(root: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into."""
    part = part_folder(root, step)
    make_folder(root)
    remove_path(part)
    part.mkdir()
    return part


def publish(part: Path, manifest: Manifest) -> Path:
    """Make what lies in `part` the checkpoint of its step, in one move, then Megatron's pointer; returns its folder.

    What had been saved for the same step before is there until the new one is.
    """
    (part / MANIFEST).write_bytes(manifest.encode())
    root, name = part.parent, name_of(manifest.run.step)
    folder = root / name
    replace_folder(part, folder, root / f".{name}{_OLD}")
    _point(root, manifest.run.step)
    return folder


def retain(root: Path, *, last: int, best: bool) -> tuple[Path, ...]:
    """Remove all but the `last` newest complete checkpoints (0: keep all) and, with `best`, that of the least score, as
    the function `best` has it; returns those removed. The newest always stays.
    """
    folders = checkpoints(root)
    if not last or len(folders) <= last:
        return ()
    retained = set(folders[-last:])
    if best:
        retained.add(_of_least_score(folders))
    removed = tuple(folder for folder in folders if folder not in retained)
    for folder in removed:
        doomed = root / f".{folder.name}{_REMOVED}"
        folder.rename(doomed)  # first: what is half removed must not look complete
        remove_path(doomed)
    return removed


def tidy(root: Path) -> None:
    """Put right what a killed save left: unfinished folders go, one that was to be replaced comes back."""
    if not root.is_dir():
        return
    for entry in root.iterdir():
        if match := _LEFTOVER.fullmatch(entry.name):
            folder = root / match[1]
            if match[2] == _OLD and not folder.exists():
                entry.rename(folder)
            else:
                remove_path(entry)
        elif _POINTERS_PART.fullmatch(entry.name):
            remove_path(entry)
    if folders := checkpoints(root):
        _point(root, int(folders[-1].name.removeprefix("iter_")))


def _point(root: Path, step: int) -> None:
    pointer = root / POINTER
    with contextlib.suppress(OSError):
        if pointer.read_text() == str(step):
            return
    replace_file(pointer, str(step).encode())


def bytes_of_checkpoint(num_trained: int, dtype: str, num_moments: int) -> int:
    """Of so many parameters with the moments that their optimizer keeps of each; `dtype` is torch's name of the
    weights'."""
    weight_bytes = 4 if dtype == "float32" else 2 + _MASTER_BYTES
    return num_trained * (weight_bytes + MOMENT_BYTES * num_moments)


def free_disk_bytes(place: Path) -> int:
    """What a user may write on the file system of a place, of which the last folders need not be there yet."""
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def lacks_room(root: Path, num_bytes: int) -> str:
    """What a checkpoint needs beside what is free, where that is less; else nothing."""
    return needed_and_free(root, num_bytes) if free_disk_bytes(root) < num_bytes else ""


def needed_and_free(root: Path, num_bytes: int) -> str:
    """
    >>> import unittest.mock as mock
    >>> with mock.patch("shutil.disk_usage", lambda _: mock.Mock(free=1_200_000)):
    ...     needed_and_free(Path("/"), 96_000_000_000)
    'takes about 96.0 GB below /, where 1.20 MB are free'
    """
    return f"takes about {format_bytes(num_bytes)} below {root}, where {format_bytes(free_disk_bytes(root))} are free"


def unwritable_number(error: BaseException, folder: Path) -> int:
    """The operating system's number of a place that is full, read-only or not ours, where that is why a write failed;
    else 0. torch and safetensors have errors of their own, over the system's or in its place."""
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if named := _RUSTS_NUMBER.search(str(cause)):
            number = int(named[1])
        if number is not None:
            return number if number in UNWRITABLE else 0
        cause = cause.__cause__ or cause.__context__
    return _refused_now(folder)


def _refused_now(folder: Path) -> int:
    probe = folder / ".probe"
    try:
        replace_file(probe, bytes(_PROBE_BYTES))
    except OSError as error:
        return error.errno if error.errno in UNWRITABLE else 0
    finally:
        with contextlib.suppress(OSError):  # of a place that is read-only
            probe.unlink()
    return 0
