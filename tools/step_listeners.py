"""Listeners that pass the figures of each step to TensorBoard and to Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynapipe_ext.durable_files import open_kept
from dynapipe_ext.errors import ConfigError, install_advice
from dynapipe_ext.executor.events import StepDone
from dynapipe_ext.tools.files import writing_in


def require_logger(name: str) -> None:
    """Raises ConfigError if the package of a logger is not installed."""
    if importlib.util.find_spec(name) is None:
        advice = install_advice(name) if name == "tensorboard" else f"pip install {name}"
        raise ConfigError(f"[run] loggers has {name!r} but {name} is not installed: {advice}, or leave it out")


class TensorBoardFile:
    """Writes the scalars of each step to an event file in a folder; figures of all ranks only at steps that have them.
    Before the first it says that a run begins there: TensorBoard forgets what a run before it, killed after its last
    checkpoint, has written of this step and later ones. Errors: DataError where the folder cannot be written, at once:
    tensorboard's own writer has a thread for it, which dies there with a traceback."""

    def __init__(self, folder: Path) -> None:
        require_logger("tensorboard")
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._path = folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        with writing_in(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(os.fdopen(open_kept(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab"))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._has_begun = False

    def step_done(self, done: StepDone) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._has_begun:
            self._add(Event(wall_time=time.time(), step=done.number, session_log=SessionLog(status=SessionLog.START)))
            self._has_begun = True
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(done).items()]
        self._add(Event(wall_time=time.time(), step=done.number, summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        with writing_in(self._path):
            self._records.write(event.SerializeToString())
            self._records.flush()

    def close(self) -> None:
        with suppress(OSError):  # of what could not be written before, and was said
            self._records.close()


def scalars(done: StepDone) -> dict[str, float]:
    """The figures of a step by their tags."""
    by_tag = {
        "train/loss": done.loss,
        "train/grad_norm": done.grad_norm,
        "train/learning_rate": done.learning_rate,
        "speed/step_s": done.step_s,
        "speed/real_tokens_per_s": done.real_tokens_per_s,
        "plan/padding_efficiency": done.real_tokens / max(1, done.padded_tokens),
        "memory/rank_0_peak_bytes": float(done.peak_bytes),
    }
    if done.all_ranks is not None:
        by_tag["speed/makespan_s"] = done.all_ranks.makespan_s
        if done.all_ranks.bubble_ratio is not None:
            by_tag["plan/bubble_ratio"] = done.all_ranks.bubble_ratio
        by_tag["memory/largest_peak_bytes"] = float(max(done.all_ranks.peak_bytes))
    if (learned := done.preferences) is not None:
        rewards = {"chosen": learned.chosen_reward, "rejected": learned.rejected_reward, "margins": learned.margin}
        by_tag |= {f"rewards/{name}": value for name, value in {**rewards, "accuracies": learned.accuracy}.items()}
    if done.evaluation is not None:
        by_tag["validation/loss"] = done.evaluation.loss
        by_tag["validation/seconds"] = done.evaluation.seconds
    return by_tag


class WandbRun:
    """A Weights & Biases run that logs each step, with files in `folder`. `wandb login` decides who may log there, and
    the variable WANDB_PROJECT to which project."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        require_logger("wandb")
        self._run = importlib.import_module("wandb").init(dir=str(folder), config=dict(settings))

    def step_done(self, done: StepDone) -> None:
        self._run.log(scalars(done), step=done.number)

    def close(self) -> None:
        self._run.finish()
