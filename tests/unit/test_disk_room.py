"""Whether a write failed for want of room, by what the real writers raise on a device that is always full."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dynapipe_ext.errors import DataError, NoRoomError
from dynapipe_ext.executor.checkpoints import folder
from dynapipe_ext.executor.checkpoints.folder import bytes_of_checkpoint, free_disk_bytes, lacks_room, unwritable_number
from dynapipe_ext.executor.checkpoints.saving import SavingRanks
from dynapipe_ext.launch.job.run_directory import checkpoints_line
from dynapipe_ext.settings.tables import CheckpointSettings
from dynapipe_ext.tools.files import writing_in

TENSOR = torch.zeros(1 << 16)


def into_an_open_file(place: Path) -> None:
    with place.open("wb") as file:
        torch.save(TENSOR, file)


@contextmanager
def full() -> Iterator[None]:
    """Inside, files of this process end at 100 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("write", "own_words"),
    [
        (lambda place: place.write_bytes(bytes(1000)), "File too large"),
        (into_an_open_file, "File too large|unexpected pos"),  # the latter over the former, by the bytes before
        (lambda place: save_file({"x": TENSOR}, place), "os error 27"),
        (lambda place: torch.save(TENSOR, place), "unexpected pos"),  # nothing of the system's: the place is asked
    ],
    ids=["python", "torch", "safetensors", "torch by name"],
)
def test_the_systems_words_are_found_below_each_writers_own(
    write: Callable[[Path], object], own_words: str, tmp_path: Path
) -> None:
    with full():
        with pytest.raises(Exception, match=own_words) as caught:
            write(tmp_path / "tensors")
        assert unwritable_number(caught.value, tmp_path) == errno.EFBIG
    (tmp_path / "tensors").unlink(missing_ok=True)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_that_says_nothing_of_room_is_not_taken_for_one_where_there_is_some(tmp_path: Path) -> None:
    assert unwritable_number(RuntimeError("unexpected pos 704 vs 598"), tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "lasts"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EFBIG, True), (errno.EROFS, True), (errno.EIO, False)],
)
def test_what_another_start_may_not_meet_is_no_want_of_room(number: int, lasts: bool, tmp_path: Path) -> None:
    assert unwritable_number(OSError(number, os.strerror(number)), tmp_path) == number * lasts


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (
            errno.ENOSPC,
            "No space left on device; one takes about 5 B below .*, where .* are free: make room there, then",
        ),
        (errno.EROFS, "Read-only file system: make it writable, then start the run anew, of which nothing was saved"),
        (errno.EACCES, "Permission denied: make it writable, then start the run anew, of which nothing was saved"),
    ],
)
def test_a_place_that_is_forbidden_is_not_said_to_lack_room(
    number: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("dynapipe_ext.executor.checkpoints.saving.most_of_ranks", lambda *_: 0)
    ranks = SavingRanks(tmp_path, torch.device("cpu"), CheckpointSettings(), num_bytes=5)
    with pytest.raises(NoRoomError, match=f"rank 0 could not write below {tmp_path}: {says}"):
        ranks.raise_first([ranks.fault_of(OSError(number, os.strerror(number)))])
    with pytest.raises(DataError, match="make room there" if number == errno.ENOSPC else "make it writable"):  # noqa: SIM117
        with writing_in(tmp_path):
            raise OSError(number, os.strerror(number))


def test_what_is_free_is_asked_of_the_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=len(str(place))))
    assert free_disk_bytes(tmp_path / "run" / "checkpoints") == len(str(tmp_path))


def test_the_first_line_of_a_run_says_where_it_saves_how_often_and_whether_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "free_disk_bytes", lambda _: 35_000_000_000)
    size = bytes_of_checkpoint(8_000_000_000, "bfloat16", 2)
    asked = CheckpointSettings(save_every=1, save_minutes=0.5, keep_last=0)
    never = CheckpointSettings(save_minutes=0)
    place = tmp_path / "checkpoints"
    assert [checkpoints_line(one, tmp_path, 12_000_000) for one in (CheckpointSettings(), asked, never)] == [
        f"checkpoints: in {place} every 10 minutes, and at the end (about 12.0 MB each, the newest 2 stay)",
        f"checkpoints: in {place} every 1 step, every 0.5 minutes, and at the end (about 12.0 MB each, all stay)",
        f"checkpoints: in {place} at the end (about 12.0 MB each, the newest 2 stay)",
    ]
    assert checkpoints_line(CheckpointSettings(), tmp_path, size).endswith(
        f"; none fits: one takes about 112.0 GB below {place}, where 35.0 GB are free, make room there in time"
    )
    assert lacks_room(place, 35_000_000_001)
    assert not lacks_room(place, 35_000_000_000)
