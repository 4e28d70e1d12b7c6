"""Where a run's checkpoints lie, and how one appears there whole or not at all.

ROOT/latest_checkpointed_iteration.txt     "10": for Megatron, which starts from there
ROOT/iter_0000010/                         complete: a folder has this name only once all of it is on the disk
ROOT/.iter_0000020.part/                   being written, or left by a save that was killed
ROOT/.iter_0000010.old/, .removed/         being replaced, being removed

Rank 0 alone changes anything here; `tidy` at the start of a run puts right what a kill has left.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from pathlib import Path

from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.checkpoints.manifest import MANIFEST, Manifest, read_manifest

POINTER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})")
_PART, _OLD, _REMOVED = ".part", ".old", ".removed"
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
    found = [entry for entry in root.iterdir() if _NAME.fullmatch(entry.name) and entry.is_dir()]
    return tuple(sorted(found, key=lambda entry: int(entry.name.removeprefix("iter_"))))


def latest(root: Path) -> Path:
    """The complete checkpoint of the most steps. Errors: DataError where there is none."""
    found = checkpoints(root)
    if not found:
        raise DataError(f"{root} holds no complete checkpoint: start the run anew, or name another run to resume")
    return found[-1]


def best(root: Path) -> Path:
    """The complete checkpoint of the least score (`RunState.score`). Errors: DataError where there is none."""
    latest(root)
    return min(checkpoints(root), key=_score)


def least_validation_loss(root: Path) -> float:
    """Of the complete checkpoints; infinite where none was evaluated. Errors: DataError for a damaged one."""
    losses = (read_manifest(folder).run.validation_loss for folder in checkpoints(root))
    return min((loss for loss in losses if loss is not None), default=math.inf)


def begin(root: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into."""
    part = part_folder(root, step)
    _create(root)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    return part


def publish(part: Path, manifest: Manifest) -> Path:
    """Make what lies in `part` the checkpoint of its step, in one move, then Megatron's pointer; returns its folder.

    What had been saved for the same step before is there until the new one is.
    """
    _write(part / MANIFEST, manifest.encode())
    for file in part.iterdir():
        _sync(file)
    _sync(part)
    root = part.parent
    folder, old = root / name_of(manifest.run.step), root / f".{name_of(manifest.run.step)}{_OLD}"
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    _sync(root)
    _point(root, manifest.run.step)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def retain(root: Path, *, last: int, best: bool) -> tuple[Path, ...]:
    """Remove all but the `last` newest complete checkpoints (0: keep all) and, with `best`, the one of the least score;
    returns those removed. The newest always stays.
    """
    found = checkpoints(root)
    if not last or len(found) <= last:
        return ()
    kept = set(found[-last:])
    if best:
        kept.add(min(found, key=_score))
    removed = tuple(folder for folder in found if folder not in kept)
    for folder in removed:
        doomed = root / f".{folder.name}{_REMOVED}"
        folder.rename(doomed)  # first: what is half removed must not look complete
        shutil.rmtree(doomed, ignore_errors=True)
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
                shutil.rmtree(entry, ignore_errors=True)
        elif entry.name == f".{POINTER}{_PART}":
            entry.unlink()
    if found := checkpoints(root):
        _point(root, int(found[-1].name.removeprefix("iter_")))


def _score(folder: Path) -> tuple[bool, float]:
    return read_manifest(folder).run.score


def _point(root: Path, step: int) -> None:
    pointer, part = root / POINTER, root / f".{POINTER}{_PART}"
    with contextlib.suppress(OSError):
        if pointer.read_text() == str(step):
            return
    _write(part, str(step).encode())
    part.rename(pointer)
    _sync(root)


def _create(root: Path) -> None:
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        _sync(root.parent)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
