"""A run's own directory: named by time, claimed, locked, overwritten only on request, gone where nothing began."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.job.run_directory import (
    RunDirectory,
    clear_run,
    place_of_resumed,
    point_latest_at,
    run_to_resume,
)
from dynapipe_ext.launch.processes.scratch import FileLock
from dynapipe_ext.tools.account.run_events import EVENTS_FILE
from dynapipe_ext.tools.files import write_atomic

NOW = datetime(2026, 11, 22, 1, 30, 0)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def begin(directory: RunDirectory) -> None:
    clear_run(directory.path)
    write_atomic(directory.path / EVENTS_FILE, "{}\n")
    point_latest_at(directory.path)


def files() -> set[str]:
    return {str(path) for path in Path("runs").rglob("*") if path.name != ".lock"} if Path("runs").exists() else set()


def test_runs_that_start_within_a_second_have_directories_of_their_own_and_latest_is_the_newest() -> None:
    for name in ("2026-11-22T01-30-00", "2026-11-22T01-30-00-2", "2026-11-22T01-30-00-3"):
        with RunDirectory("", now=NOW) as directory:
            assert directory.path == Path("runs") / name
            begin(directory)
        assert os.readlink("runs/latest") == name


def test_a_start_that_fails_leaves_no_directory_and_does_not_move_latest() -> None:
    with RunDirectory("", now=NOW) as directory:
        begin(directory)
    before = files()
    for named in ("", "runs/mine"):
        with RunDirectory(named, now=NOW) as directory:
            assert directory.path.is_dir()
        assert files() == before
    assert os.readlink("runs/latest") == "2026-11-22T01-30-00"


def test_a_directory_that_was_there_before_stays_when_a_start_fails() -> None:
    Path("mine").mkdir()
    Path("mine/notes").write_text("x")
    with RunDirectory("mine"):
        pass
    assert Path("mine/notes").exists()


def test_a_run_is_lost_only_on_request_and_only_once_the_next_one_begins() -> None:
    with RunDirectory("runs/mine") as directory:
        begin(directory)
        (directory.path / "report.json").write_text("old")
        (directory.path / "checkpoints").mkdir()
        (directory.path / "notes").write_text("the user's own")
    with pytest.raises(ConfigError, match=r"runs/mine holds another run: .*--overwrite"):
        RunDirectory("runs/mine")
    with RunDirectory("runs/mine", overwrite=True) as directory:
        assert not directory.has_begun
    assert Path("runs/mine/report.json").read_text() == "old"
    with RunDirectory("runs/mine", overwrite=True) as directory:
        begin(directory)
        assert directory.has_begun
    assert files() == {"runs/mine", "runs/mine/notes", f"runs/mine/{EVENTS_FILE}", "runs/latest"}


def test_a_report_of_an_older_version_counts_as_a_run() -> None:
    Path("old").mkdir()
    Path("old/report.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds another run"):
        RunDirectory("old")


def test_two_runs_cannot_share_a_directory_and_the_message_names_the_process_that_has_it() -> None:
    with RunDirectory("mine"):
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=rf"mine is in use by another run \(process {os.getpid()}\)"):
                RunDirectory("mine", overwrite=overwrite)
        assert Path("mine").is_dir()
    RunDirectory("mine").close()


def test_a_lock_that_is_waited_for_is_taken_when_its_holder_has_ended(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        FileLock(tmp_path / "lock", "it")
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    with pytest.raises(ConfigError, match=rf"it is in use by another run \(process {pid}\)"):
        FileLock(tmp_path / "lock", "it")
    os.kill(pid, 9)
    with FileLock(tmp_path / "lock", "it", wait_s=30.0):
        assert (tmp_path / "lock").read_text() == str(os.getpid())
    os.waitpid(pid, 0)


def test_only_runs_in_the_runs_folder_move_the_link() -> None:
    with RunDirectory("elsewhere/mine") as directory:
        begin(directory)
    assert not Path("elsewhere/latest").exists()
    assert not Path("runs/latest").is_symlink()


def test_a_latest_that_is_no_link_is_refused_before_anything_starts() -> None:
    Path("runs/latest").mkdir(parents=True)
    with pytest.raises(ConfigError, match="runs/latest is a directory but links to the newest run now"):
        RunDirectory("")
    assert files() == {"runs/latest"}


def test_a_resumed_run_is_where_its_directory_is_now_and_keeps_its_name_where_it_has_stayed(
    tmp_path: Path,
) -> None:
    for name in ("runs/a", "runs/copy", "away/a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "away/link").symlink_to(tmp_path / "runs/a")

    def place(said: str, resumed: str) -> str:
        return place_of_resumed(said, run_to_resume(resumed))

    assert (place("runs/a", "runs/a"), place("away/link", "runs/a"), place("", "runs/a")) == ("runs/a", "away/link", "")
    assert place("runs/a", str(tmp_path / "runs/a")) == "runs/a"
    assert (place("runs/a", "runs/copy"), place("", "away/a")) == ("runs/copy", "away/a")
    os.chdir("away/a")
    assert place("runs/a", ".") == str(tmp_path / "away/a")


def test_what_a_killed_run_left_half_written_is_gone_once_its_directory_is_used_again() -> None:
    Path("mine").mkdir()
    left, own = Path("mine/.trace.html.123.part"), Path("mine/notes.part")
    left.touch()
    own.touch()
    with RunDirectory("mine", resume=True):
        assert not left.exists()
        assert own.exists()
