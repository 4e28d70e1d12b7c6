"""The settings of a run that is resumed: those of its config.toml, or of its newest checkpoint if a crash has cut that.

RUN/config.toml is written whole and synced before the first step, but not by older versions, and a disk may lose it.

A run's folder may come from somebody else. So a resumed run takes no program from it, and writes to no place outside of
it that its folder alone names: such a setting has to be given again.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.checkpoints.folder import checkpoints, read_manifest
from dynapipe_ext.launch.job.run_directory import CHECKPOINTS
from dynapipe_ext.settings.removed import list_keys, translate_saved
from dynapipe_ext.settings.train_config import TrainConfig, read_toml
from dynapipe_ext.toml_text import parse_toml

SETTINGS_FILE = "config.toml"
_PROGRAMS = {("job", "redis_server"): "--redis-server"}
_WRITTEN_PLACES = {
    ("checkpoint", "output"): "--output",
    ("run", "log_dir"): "--log-dir",
    ("run", "plan_dir"): "--plan-dir",
}
_DEEPSPEED = ("deepspeed", "config")


def find_untrusted(config: TrainConfig, run_dir: Path, given: Container[tuple[str, str]] = ()) -> dict[str, str]:
    """Return the settings of a run, by their flags, that a resume of it does not take from its folder: programs, and
    places outside of the folder that it would write to. `given` are those that the user names again, as (table, name).
    """
    values = {key: getattr(getattr(config, key[0]), key[1]) for key in (*_PROGRAMS, *_WRITTEN_PLACES, _DEEPSPEED)}
    asked = {key: value for key, value in values.items() if value and key not in given}
    untrusted = {flag: asked[key] for key, flag in _PROGRAMS.items() if key in asked}
    untrusted |= {
        flag: asked[key]
        for key, flag in _WRITTEN_PLACES.items()
        if key in asked and not _is_inside(asked[key], run_dir)
    }
    if _DEEPSPEED in asked and any(map(_names_place, _texts(config.deepspeed.described))):
        untrusted["--deepspeed"] = asked[_DEEPSPEED]  # DeepSpeed writes to places that its file names
    return untrusted


def refuse_untrusted(config: TrainConfig, run_dir: Path, given: Container[tuple[str, str]]) -> None:
    """Errors: ConfigError for what `find_untrusted` gives, with the flag that allows it."""
    for flag, value in find_untrusted(config, run_dir, given).items():
        use = "names a program" if flag in _PROGRAMS.values() else "writes outside of it"
        raise ConfigError(
            f"the config.toml of {run_dir} {use}: {value}: add {flag} {value} to allow that, or {flag} ''"
        )


def _is_inside(place: str, run_dir: Path) -> bool:
    return Path(os.path.realpath(place)).is_relative_to(os.path.realpath(run_dir))


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    match value:
        case str():
            yield value
        case Mapping():
            for inner in value.values():
                yield from _texts(inner)
        case list() | tuple():
            for inner in value:
                yield from _texts(inner)


def _names_place(text: str) -> bool:
    return os.sep in text or text in (".", "..")


def read_saved_settings(run_dir: Path) -> TrainConfig | None:
    """Return the settings of the run in a directory; None if it holds neither a config.toml nor a checkpoint.

    Errors: ConfigError for a config.toml that is no TOML although it is whole; DataError for a damaged checkpoint that
    would take its place.
    """
    return _read_saved(run_dir)[0]


def describe_losses(run_dir: Path) -> list[str]:
    """Say what a resume does not take of a run's settings: damage, and what only an earlier version had."""
    return [*filter(None, [_find_damage(run_dir)]), *_read_saved(run_dir)[1]]


def _read_saved(run_dir: Path) -> tuple[TrainConfig | None, list[str]]:
    """Return a run's settings, and what to do instead of those that are gone."""
    file = run_dir / SETTINGS_FILE
    if _find_damage(run_dir):
        file = checkpoints(run_dir / CHECKPOINTS)[-1]
        translated, gone = translate_saved(read_manifest(file).run.settings)
    elif file.is_file():
        translated, gone = translate_saved(read_toml(file))
    else:
        return None, []
    return TrainConfig.from_json(translated, str(file)), gone


def _find_damage(run_dir: Path) -> str:
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
        tables = parse_toml(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False  # a mistake of somebody who has edited it, which is told as such
    expected, found = (list_keys(translate_saved(raw)[0]).keys() for raw in (saved, tables))
    return not expected <= found
