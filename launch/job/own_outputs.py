"""Which folders of published models a run has written itself: who goes on with the run may replace these, as they are,
without `--overwrite`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.files import read_json, write_atomic

OUTPUTS_FILE = "outputs.json"
_FORMAT = "dynapipe-outputs/1"


def note_output(run_dir: Path, output: str, written: Path) -> None:
    """Keep what the folder `written` holds, which is to be put at `output`. Errors: DataError."""
    places = _places(run_dir) | {os.path.realpath(output): _contents(written)}
    write_atomic(run_dir / OUTPUTS_FILE, json.dumps({"format": _FORMAT, "places": places}))


def is_own_output(run_dir: Path, output: str) -> bool:
    """Whether a folder holds what the run wrote there, and nothing else."""
    place = Path(os.path.realpath(output))
    return place.is_dir() and _places(run_dir).get(str(place)) == _contents(place)


def _places(run_dir: Path) -> dict[str, dict[str, list[int]]]:
    """The contents of each place when it was written; none of a run that has written nothing, or of a broken file."""
    try:
        places = read_json(run_dir / OUTPUTS_FILE, _FORMAT, "the outputs").get("places")
    except DataError:
        return {}
    return places if isinstance(places, dict) else {}


def _contents(folder: Path) -> dict[str, list[int]]:
    """Bytes and time of the last change of every file, by its path in the folder."""
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return {
        path.relative_to(folder).as_posix(): [fact.st_size, fact.st_mtime_ns]
        for path in files
        for fact in [path.lstat()]
    }
