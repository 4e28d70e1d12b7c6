"""What ranks tell the launcher of their node: that they run, and how they ended.

FOLDER/0/3        start 0 of the ranks, rank 3: its process id; locked for as long as that runs
FOLDER/0/3.end    how it ended; a rank that runs no more and left none was killed
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dynapipe_ext.errors import ConfigError, DataError, NotFiniteError, PlanError, VerificationError
from dynapipe_ext.launch.cluster import BUG_STATUS, JobError
from dynapipe_ext.launch.file_lock import FileLock, is_held

_END = ".end"
_END_BYTES, _MOST_CAUSE = 16384, 2000  # a character may take six bytes
_LOOKED_AT_S = 1.0  # a launcher that looks whether a lock is held holds it for an instant
# Of settings or data, or a stop that they ask for.
_FINAL = (ConfigError, DataError, PlanError, VerificationError, NotFiniteError)


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank ended by itself, at `at_s` (seconds of the epoch). `cause` is the whole job's, and `is_first` where no
    other rank failed before; `is_final` where another start would end alike."""

    status: int
    at_s: float
    cause: str = ""
    is_first: bool = False
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class RankRecord:
    rank: int
    pid: int
    runs: bool
    end: RankEnd | None

    @property
    def was_killed(self) -> bool:
        return not self.runs and self.end is None


@contextmanager
def recorded(folder: Path, start: int, rank: int) -> Iterator[None]:
    """Inside, this process is a rank that runs; how the block is left is how it ended."""
    place = folder / str(start) / str(rank)
    # The lock goes with the process, not with this block: what runs until then must be ended, too.
    FileLock(place.with_name(f".{rank}"), f"the record of rank {rank}", wait_s=_LOOKED_AT_S)
    end, part = RankEnd(BUG_STATUS, time.time()), place.with_name(f".{rank}{_END}")
    try:
        part.write_bytes(bytes(_END_BYTES))  # room for its end, which may be that of a full disk
        place.with_name(f".{rank}").rename(place)  # whoever finds it finds it locked
        yield
        end = RankEnd(0, time.time())
    except JobError as error:
        is_final = isinstance(error.__cause__, _FINAL)
        end = RankEnd(error.exit_status, time.time(), error.cause, error.cause == str(error), is_final)
        raise
    except SystemExit as error:
        end = RankEnd(error.code if isinstance(error.code, int) else BUG_STATUS, time.time())
        raise
    finally:
        with suppress(OSError):  # it then counts as killed
            _overwrite(part, json.dumps(asdict(replace(end, cause=end.cause[:_MOST_CAUSE]))))
            part.rename(place.with_name(f"{rank}{_END}"))


def _overwrite(path: Path, text: str) -> None:
    """Write into a file's own bytes, which takes no room; spaces fill the rest."""
    with path.open("r+b") as file:
        file.write(text.encode().ljust(_END_BYTES))


def read_rank_records(folder: Path) -> tuple[RankRecord, ...]:
    """The ranks of the last start on this node, as far as they have begun; in rank order."""
    starts = [int(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    if not starts:
        return ()
    places = (folder / str(max(starts))).iterdir()
    return tuple(_record(place) for place in sorted((p for p in places if p.name.isdigit()), key=lambda p: int(p.name)))


def _record(place: Path) -> RankRecord:
    runs = is_held(place)  # asked before its end is read: an end is written while it runs
    try:
        end = RankEnd(**json.loads(place.with_name(place.name + _END).read_text()))
    except FileNotFoundError:
        end = None
    return RankRecord(int(place.name), int(place.read_text()), runs, end)
