"""Who is told of a run's steps on rank 0, besides its checkpoints: the log, its events, and what else was asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.executor.events import Listener
from dynapipe_ext.launch.job import Variant
from dynapipe_ext.tools.account.run_events import EVENTS_FILE, EventsFile
from dynapipe_ext.tools.progress import StepProgress
from dynapipe_ext.tools.tensorboard_file import TensorBoardFile, require_tensorboard
from dynapipe_ext.tools.wandb_run import WandbRun, require_wandb


def require_loggers(config: TrainConfig) -> None:
    """Errors: ConfigError for one that is asked for and not installed."""
    if config.run.tensorboard:
        require_tensorboard()
    if config.run.wandb:
        require_wandb()


def written(config: TrainConfig, run_dir: Path, variant: Variant, index: int) -> list[Listener]:
    """Those that keep a variant's steps, the run's own one being `index` 0."""
    listeners: list[Listener] = [EventsFile(run_dir / EVENTS_FILE, variant.name)]
    if config.run.wandb and not index:
        listeners.append(WandbRun(config.run.wandb, run_dir, config.to_json()))
    if config.run.tensorboard:
        listeners.append(TensorBoardFile(run_dir / "tensorboard" / (re.sub(r"\W+", "-", variant.name))))
    return listeners


def shown(config: TrainConfig, compared: Sequence[str], first_step: int) -> StepProgress:
    """What people see while variants run, of the first of them, which goes on after `first_step` steps."""
    progress = StepProgress(config.run.steps - first_step, every=config.run.log_every)
    if compared:
        progress.log(f"comparing: {'; '.join(compared)}")
    return progress
