"""Scratch folders do not outlive their owners, however these end."""

from __future__ import annotations

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
