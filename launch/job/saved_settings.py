"""The settings of a run that is resumed: those of its config.toml, or of its newest checkpoint if a crash has cut that.

RUN/config.toml is written whole and synced before the first step, but not by older versions, and a disk may lose it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynapipe_ext.executor.checkpoints.folder import checkpoints, read_manifest
from dynapipe_ext.launch.job.run_directory import CHECKPOINTS
from dynapipe_ext.settings.train_config import TrainConfig

SETTINGS_FILE = "config.toml"


def read_saved_settings(run_dir: Path) -> TrainConfig | None:
    """Return the settings of the run in a directory; None if it holds neither a config.toml nor a checkpoint.

    Errors: ConfigError for a config.toml that is no TOML although it is whole; DataError for a damaged checkpoint that
    would take its place.
    """
    file = run_dir / SETTINGS_FILE
    if not find_damage(run_dir):
        return TrainConfig.read(file) if file.is_file() else None
    newest = checkpoints(run_dir / CHECKPOINTS)[-1]
    return TrainConfig.from_json(read_manifest(newest).run.settings, str(newest))


def find_damage(run_dir: Path) -> str:
    """Say what a run's config.toml lacks of what it was written with; empty if it is whole, or if no checkpoint could
    take its place."""
    saved = checkpoints(run_dir / CHECKPOINTS)
    if not saved:
        return ""
    file = run_dir / SETTINGS_FILE
    try:
        data = file.read_bytes()
    except OSError as error:
        return f"{file} cannot be read ({error.strerror}): the settings of {saved[-1]} take its place"
    if data.endswith(b"\n") and b"\0" not in data and not _is_cut(data, read_manifest(saved[-1]).run.settings):
        return ""
    return f"{file} was cut, as by a crash: the settings of {saved[-1]} take its place"


def _is_cut(data: bytes, saved: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether TOML lacks settings that a checkpoint of the same run has."""
    try:
        tables = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False  # a mistake of somebody who has edited it, which is told as such
    return any(name not in tables.get(table, {}) for table, values in saved.items() for name in values)
