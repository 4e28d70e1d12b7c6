"""The directory of a run: claimed at its start, filled once it trains, removed if it never trains.

runs/2026-11-22T01-30-00/   config.toml costs.json data events.jsonl report.json index.html …
runs/latest                 a link to the newest that has begun
runs/tokenized/HASH/        tokens, by what they were made from: runs share them
"""

from __future__ import annotations

import os
import shutil
from datetime import datetime
from pathlib import Path
from types import TracebackType

from dynapipe_ext.durable_files import make_folder, sync
from dynapipe_ext.errors import ConfigError, DataError, format_bytes
from dynapipe_ext.executor.checkpoints.folder import AUTO_SAVE_S, lacks_room
from dynapipe_ext.launch.job.own_outputs import OUTPUTS_FILE
from dynapipe_ext.launch.processes.scratch import FileLock, is_held
from dynapipe_ext.settings.tables import CheckpointSettings
from dynapipe_ext.tools.account.report import RunReport
from dynapipe_ext.tools.account.run_events import DAMAGED, EVENTS_FILE, HISTORY_FILE
from dynapipe_ext.tools.console import counted

CHECKPOINTS = "checkpoints"
_RUNS, _LATEST, _LOCK = Path("runs"), "latest", ".lock"
_HOLDS_A_RUN = (EVENTS_FILE, "report.json", CHECKPOINTS)  # one of them may be lost
_LEFT_BY_A_RUN = (
    *_HOLDS_A_RUN,
    CHECKPOINTS,
    "config.toml",
    "costs.json",
    "data",
    "emulated.html",
    HISTORY_FILE,
    "index.html",
    OUTPUTS_FILE,
    f"{EVENTS_FILE}{DAMAGED}",
    "loss.png",  # of older versions, as is trace.html
    "tensorboard",
    "trace.chrome.json",
    "trace.html",
    "trace.json",
)


def checkpoints_line(settings: CheckpointSettings, run_dir: Path, num_bytes: int) -> str:
    """Where a run saves, when, and how much each checkpoint takes."""
    place, minutes = run_dir / CHECKPOINTS, settings.save_minutes
    by_clock = f"{AUTO_SAVE_S / 60:g}" if minutes == "auto" else f"{minutes:g}"
    every = [f"every {counted(settings.save_every, 'step')}"] if settings.save_every else []
    asked_by_step = minutes == "auto" and settings.save_every > 0
    every += [f"every {by_clock} minutes"] if minutes and not asked_by_step else []
    stay = f"the newest {settings.keep_last} stay" if settings.keep_last else "all stay"
    size = f"about {format_bytes(num_bytes)} each, {stay}"
    line = f"checkpoints: in {place} {', '.join([*every, 'and at the end' if every else 'at the end'])} ({size})"
    if lack := lacks_room(place, num_bytes):
        line += f"; none fits: one {lack}, make room there in time"
    return line


def runs_folder(run_dir: str) -> Path:
    """Where a run stands beside others; `run_dir` empty means that nobody named one."""
    return Path(run_dir).parent if run_dir else _RUNS


class RunDirectory:
    """A run's own directory, locked until `close`, which removes it again if it was made here and nothing began in it.

    `named` empty makes a new one by the local time. Errors: ConfigError for one that another run uses now, that holds a
    run which may not be overwritten, or that cannot be made.
    """

    def __init__(
        self, named: str, *, overwrite: bool = False, resume: bool = False, now: datetime | None = None
    ) -> None:
        latest = _RUNS / _LATEST
        if latest.is_dir() and not latest.is_symlink() and not named:
            raise ConfigError(f"{latest} is a directory but links to the newest run now: give it another name (mv)")
        self._overwrite = overwrite
        self.path, self._is_new = _made(Path(named)) if named else _made_by_time(now or datetime.now())
        try:
            if resume:
                _refuse_links(self.path)
            self._lock = FileLock(self.path / _LOCK, f"the run directory {self.path}")
            for part in self.path.glob(".*.part"):  # half written by a run that was killed; no other uses the directory
                part.unlink(missing_ok=True)
            self._before = _identity(self.path / EVENTS_FILE)
            if not (overwrite or resume) and any((self.path / name).exists() for name in _HOLDS_A_RUN):
                self._lock.close()
                raise ConfigError(
                    f"the run directory {self.path} holds another run: choose another, or add --overwrite to lose that"
                    f" run, or go on with it by --resume {self.path}"
                )
        except BaseException:
            if self._is_new:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    @property
    def has_begun(self) -> bool:
        """Whether this run (no earlier one) has written its first line."""
        return _identity(self.path / EVENTS_FILE) not in (None, self._before)

    def close(self) -> None:
        if self._is_new and not self.has_begun:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _refuse_links(path: Path) -> None:
    """Errors: ConfigError for a folder in a run's that is a link to elsewhere, where a resumed run would write."""
    folders = [path / CHECKPOINTS, path / "tensorboard"]
    for place in (*folders, *(inner for folder in folders for inner in folder.glob("*"))):
        is_read_only = place.name.startswith("iter_")  # a checkpoint, which is read, or taken away as a link
        inside = Path(os.path.realpath(place)).is_relative_to(os.path.realpath(path))
        if place.is_symlink() and place.is_dir() and not is_read_only and not inside:
            raise ConfigError(
                f"{place} is a link out of the run's folder, where a resumed run would write: put the folder itself"
                " there"
            )


def is_in_use(path: Path) -> bool:
    """Whether a run goes on in a directory now."""
    return (path / _LOCK).exists() and is_held(path / _LOCK)


def is_unfinished(run_dir: Path) -> bool:
    """Whether a directory holds a run that has not done all its steps, or not said so."""
    if not (run_dir / EVENTS_FILE).exists():
        return False
    try:
        return is_unreported(run_dir) or RunReport.read(run_dir / "report.json").unfinished is not None
    except DataError:  # a report that a crash has cut says nothing
        return True


def is_unreported(run_dir: Path) -> bool:
    """Whether more has happened than the report of a run knows."""
    report = run_dir / "report.json"
    return not report.exists() or report.stat().st_mtime_ns < (run_dir / EVENTS_FILE).stat().st_mtime_ns


def new_run_directory() -> Path:
    """An empty one in runs/, by the local time."""
    return _made_by_time(datetime.now())[0]


def begin_anew(path: Path) -> None:
    """Remove the run that a directory holds, if any. Errors: ConfigError where another one uses it now."""
    if path.is_dir():
        with RunDirectory(str(path), overwrite=True):
            clear_run(path)
            (path / EVENTS_FILE).unlink(missing_ok=True)


def run_to_resume(named: str) -> Path:
    """The directory that `--resume` means: "latest", the newest that has begun in runs/, or itself.

    Errors: ConfigError where there is none.
    """
    path = _RUNS / _LATEST if named == _LATEST else Path(named)
    if not path.is_dir():
        raise ConfigError(f"--resume {named}: there is no directory {path}: name that of a run")
    return path.resolve() if path.is_symlink() or path.name in ("", "..") else path


def place_of_resumed(configured: str, path: Path) -> str:
    """The `run_dir` of a run that goes on in `path`: the `configured` one, or `path` where the folder was moved. Files
    beside runs are read and written next to it."""
    before = Path(configured) if configured else _RUNS / path.name
    return configured if before.resolve() == path.resolve() else str(path)


def clear_run(path: Path) -> None:
    """Remove what an earlier run left in a directory that has been claimed, its events apart; nothing else.

    Errors: ConfigError for what cannot be removed.
    """
    forget_fitted(path, 0)
    for left in (path / name for name in _LEFT_BY_A_RUN if name != EVENTS_FILE):
        try:
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{left} cannot be overwritten ({error.strerror}): choose another directory") from error


def fitted_costs_file(path: Path, number: int) -> Path:
    """Where a run's directory has the costs that it fitted after `number` steps, and plans with from then on."""
    return path / f"costs-after-{number:06d}.json"


def forget_fitted(path: Path, number: int) -> None:
    """Remove what was fitted later than after `number` steps."""
    kept_name = fitted_costs_file(path, number).name
    for later in path.glob("costs-after-*.json"):
        if later.name > kept_name:
            later.unlink()


def point_latest_at(path: Path) -> None:
    """Make runs/latest a link to a run in runs/; a run elsewhere leaves it as it is."""
    if path.parent.resolve() == _RUNS.resolve() and path.name != _LATEST:
        link(path.parent / _LATEST, Path(path.name))


def link(place: Path, target: Path) -> None:
    """Make `place` a symbolic link, in one step also over an older one. Errors: ConfigError."""
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)
        part.symlink_to(target)
        part.replace(place)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{place} cannot be made a link ({error.strerror}): move what is there") from error


def _made(path: Path) -> tuple[Path, bool]:
    """The directory, and whether it is new."""
    is_new = not path.exists()
    try:
        make_folder(path)
    except OSError as error:
        raise ConfigError(f"the run directory {path} cannot be made ({error.strerror}): choose another") from error
    return path, is_new


def _made_by_time(now: datetime) -> tuple[Path, bool]:
    stamp, number = now.strftime("%Y-%m-%dT%H-%M-%S"), 1
    while True:
        path = _RUNS / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            make_folder(path.parent)
            path.mkdir()
            sync(path.parent)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"the run directory {path} cannot be made ({error.strerror}): choose another") from error
        else:
            return path, True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
