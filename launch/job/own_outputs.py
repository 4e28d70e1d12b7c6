"""Which folders of published models a run has written itself: who goes on with the run may replace these, as they are,
without `--overwrite`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dynapipe_ext.durable_files import file_stamp
from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.files import read_json, write_atomic

OUTPUTS_FILE = "outputs.json"
_FORMAT = "dynapipe-outputs/1"


def note_output(run_dir: Path, output: str, written: Path) -> None:
    """Keep what the folder `written` holds, which is to be put at `output`; and what is there, if it is the run's own,
    for one that is killed before. Errors: DataError."""
    place, places = os.path.realpath(output), _places(run_dir)
    there = [_contents(Path(place))] if is_own_output(run_dir, output) else []
    places[place] = [*there, _contents(written)]
    write_atomic(run_dir / OUTPUTS_FILE, json.dumps({"format": _FORMAT, "places": places}))


def is_own_output(run_dir: Path, output: str) -> bool:
    """Whether a folder holds what the run wrote there, and nothing else."""
    place = Path(os.path.realpath(output))
    return place.is_dir() and _contents(place) in _places(run_dir).get(str(place), [])


def _places(run_dir: Path) -> dict[str, list[dict[str, list[int]]]]:
    """The contents of each place, before and after it was written last; nothing where a file says none."""
    try:
        places = read_json(run_dir / OUTPUTS_FILE, _FORMAT, "the outputs").get("places")
    except DataError:
        return {}
    return places if isinstance(places, dict) and all(isinstance(one, list) for one in places.values()) else {}


def _contents(folder: Path) -> dict[str, list[int]]:
    """The `file_stamp` of every file, by its path in the folder; of folders and links that they are there."""
    return {
        path.relative_to(folder).as_posix(): file_stamp(path) if path.is_file() and not path.is_symlink() else []
        for path in sorted(folder.rglob("*"))
    }
