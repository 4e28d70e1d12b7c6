"""The flags and keys that earlier versions had, each with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dynapipe_ext.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "[debug] log_dir": "[run] log_dir",
    "[debug] log_level": "[run] log_level",
    "[debug] plan_dir": "[run] plan_dir",
}
_REMOVED: Mapping[str, str] = {
    **dict.fromkeys(
        ("--partitions", "--keep-sequential-samples"), "leave it out, as documents keep the order of the input"
    ),
    **dict.fromkeys(("--split-sentences", "--lang", "--keep-newlines"), "give texts as lists of sentences"),
    "--json-key": "use --json-keys",
    **dict.fromkeys(("--output-merged", "[checkpoint] output_merged"), "use dynapipe convert ADAPTER DIR --merge BASE"),
    **dict.fromkeys(("--save-format", "[checkpoint] save_format"), "use dynapipe convert OUTPUT DIR --to FORMAT"),
    "[checkpoint] background": "leave it out, as runs on accelerators save so",
    "[data] prefetch_steps": "leave it out, as planners stay 2 steps ahead",
    "[run] tensorboard": 'use loggers = ["tensorboard"]',
    "[run] traced_steps": "leave it out, as the page draws the last 3 steps",
    **dict.fromkeys(("--wandb", "[run] wandb"), 'use loggers = ["wandb"], and WANDB_PROJECT for the project\'s name'),
}


def refuse_removed(names: Iterable[str], where: str = "") -> None:
    """Raises ConfigError for a flag, or a key like "[run] steps", that an earlier version had, with its successor."""
    for name in names:
        if name in RENAMED:
            raise ConfigError(f"{where}{name} was renamed: use {RENAMED[name]}")
        if name in _REMOVED:
            raise ConfigError(f"{where}{name} was removed: {_REMOVED[name]}")


def translate_saved(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings that an earlier version saved, under their names of today, without those that are gone."""
    translated: dict[str, dict[str, Any]] = {}
    for table, values in tables.items():
        for name, value in values.items():
            key = f"[{table}] {name}"
            if key not in _REMOVED:
                new_table, _, new_name = RENAMED.get(key, key).removeprefix("[").partition("] ")
                translated.setdefault(new_table, {})[new_name] = value
    if loggers := [name for name in ("tensorboard", "wandb") if tables.get("run", {}).get(name)]:
        translated["run"]["loggers"] = loggers
    return translated
