"""The files and folders that a run's settings name, and which of them this machine lacks."""

from __future__ import annotations

import os
from pathlib import Path

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.data.mixture import weighted_files
from dynapipe_ext.errors import ConfigError


def named_files(config: TrainConfig) -> dict[str, str]:
    """What a run reads, by the setting that names it; `architecture` and `tokenizer` may also be names of no file."""
    data, model = config.data, config.model
    mixed = {f"[data] mixture {number}": file.path for number, file in enumerate(weighted_files(data.mixture), 1)}
    named = {
        "[model] architecture": model.architecture,
        "[model] init_from": model.init_from,
        "[data] path": data.path,
        **mixed,
        "[data] tasks": data.tasks,
        "[data] tokenizer": data.tokenizer,
        "[eval] path": config.eval.path,
        "[plan] costs": config.plan.costs,
        "[deepspeed] config": config.deepspeed.config,
    }
    return {setting: path for setting, path in named.items() if path}


def missing_file(config: TrainConfig) -> str:
    """What to say of the first named file that is not on this machine; empty where all are."""
    for setting, path in named_files(config).items():
        is_path = setting not in ("[data] tokenizer", "[model] architecture") or os.sep in path
        if is_path and not Path(path).exists():
            return f"{setting} is {path}, which is not on this machine"
    return ""


def refuse_missing_file(config: TrainConfig) -> None:
    """Errors: ConfigError for a named file that is not on this machine."""
    if said := missing_file(config):
        raise ConfigError(f"{said}: check the path")
