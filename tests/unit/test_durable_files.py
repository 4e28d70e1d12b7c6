"""Files that a crash leaves whole, and that no planted link leads elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dynapipe_ext.durable_files import open_kept, replace_file, replace_folder
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.checkpoints.folder import unwritable_number
from dynapipe_ext.launch.job.run_directory import RunDirectory
from dynapipe_ext.launch.processes.scratch import FileLock, is_held
from dynapipe_ext.tools.account.run_events import EventsFile, note
from dynapipe_ext.tools.files import write_atomic, write_output

WRITERS: dict[str, Callable[[Path], object]] = {
    "history.jsonl": lambda run: note(run, "begun", 0, "here"),
    "events.jsonl": lambda run: EventsFile(run / "events.jsonl", "ours").close(),
    ".lock": lambda run: FileLock(run / ".lock", "it").close(),
    "config.toml": lambda run: write_atomic(run / "config.toml", "text"),
    "page.html": lambda run: write_output(run / "page.html", "text"),
    ".probe": lambda run: unwritable_number(RuntimeError(), run),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to, None], ids=["symbolic", "hard", "to a pipe"])
def test_no_file_of_a_run_is_written_through_a_link(
    name: str, plant: Callable[[Path, Path], None] | None, tmp_path: Path
) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    if plant is None:
        os.mkfifo(victim)
        (run / name).symlink_to(victim)
    else:
        victim.write_text("as it was")
        plant(run / name, victim)
    try:
        WRITERS[name](run)
        refused = ""
    except (ConfigError, DataError) as error:
        refused = str(error)
    assert plant is None or victim.read_text() == "as it was"
    if refused:
        assert "it is a link, which is not followed" in refused
    else:
        assert not (run / name).is_symlink()
    assert not is_held(run / name) if (run / name).exists() else name == ".probe"


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/model", "tensorboard", "tensorboard/ours"])
def test_a_resumed_run_writes_to_no_folder_through_a_link(place: str, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / place).parent.mkdir(parents=True)
    outside.mkdir()
    (run / place).symlink_to(outside)
    with pytest.raises(ConfigError, match=f"run/{place} is a link out of the run's folder"):
        RunDirectory(str(run), resume=True)
    (run / place).unlink()
    (run / "within").mkdir()
    (run / place).symlink_to(run / "within")
    RunDirectory(str(run), resume=True).close()


def test_what_is_not_a_file_is_neither_opened_nor_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        open_kept(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(OSError):  # noqa: PT011  # the system's own words, as nobody reads the pipe
        open_kept(tmp_path / "pipe", os.O_WRONLY)
    assert not is_held(tmp_path / "pipe")


def test_a_folder_whose_place_cannot_be_taken_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, place, aside = tmp_path / "part", tmp_path / "place", tmp_path / "aside"
    replace_file(part / "new", b"new")
    replace_file(place / "old", b"old")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path == part:
            raise OSError("full")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="full"):
            replace_folder(part, place, aside)
    assert ((place / "old").read_bytes(), aside.exists()) == (b"old", False)
    replace_folder(part, place, aside)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "place"]
