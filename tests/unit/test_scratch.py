"""Scratch folders do not outlive their owners, however these end."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from dynapipe_ext.launch.processes.scratch import ScratchDirectory


@pytest.mark.parametrize("with_lock", [True, False], ids=["its owner was killed", "written to while it was removed"])
def test_a_folder_that_nobody_owns_is_removed_by_the_next_owner_at_its_start_and_end(
    with_lock: bool, tmp_path: Path
) -> None:
    abandoned = tmp_path / "dynapipe-run-1"

    def abandon() -> None:
        (abandoned / "logs" / "rank").mkdir(parents=True)
        if with_lock:
            (abandoned / "lock").touch()

    abandon()
    with ScratchDirectory(tmp_path) as own:
        assert [*tmp_path.iterdir()] == [own.path]
        abandon()  # by a child of the killed owner, which ends later
    assert not [*tmp_path.iterdir()]


def test_a_folder_whose_owner_lives_stays_whatever_is_lost_of_what_it_holds(tmp_path: Path) -> None:
    """Cleaners of temporary folders remove old files, among them one that is a lock."""
    with ScratchDirectory(tmp_path) as own:
        for inside in own.path.iterdir():
            inside.unlink()
        with ScratchDirectory(tmp_path):
            pass
        assert own.path.is_dir()
        of_earlier_version = tmp_path / "dynapipe-run-1"
        of_earlier_version.mkdir()
        with (of_earlier_version / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with ScratchDirectory(tmp_path):
                pass
            assert of_earlier_version.is_dir()
    assert not [*tmp_path.iterdir()]
