"""Steps for Weights & Biases: a listener that logs them to a run of its own."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.events import StepDone
from dynapipe_ext.tools.tensorboard_file import scalars


def require_wandb() -> None:
    """Errors: ConfigError where it is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("[run] wandb names a project but wandb is not installed: pip install wandb, or leave it out")


class WandbRun:
    """A run in `project`, its files in `folder`; who may log there is wandb's own matter (`wandb login`)."""

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any]) -> None:
        require_wandb()
        self._run = importlib.import_module("wandb").init(project=project, dir=str(folder), config=dict(settings))

    def step_done(self, done: StepDone) -> None:
        self._run.log(scalars(done), step=done.number)

    def close(self) -> None:
        self._run.finish()
