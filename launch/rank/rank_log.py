"""A rank's log, and the loggers that a run needs."""

from __future__ import annotations

import os
import re
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.events import Listener, StepDone
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Recorder
from dynapipe_ext.launch.job.configured import Variant
from dynapipe_ext.launch.processes.env import RankEnv
from dynapipe_ext.launch.run.page import LivePage, PageListener
from dynapipe_ext.settings.tables import DebugSettings
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.timeline import Span
from dynapipe_ext.tools.account.run_events import EVENTS_FILE, EventsFile
from dynapipe_ext.tools.files import writing_in
from dynapipe_ext.tools.progress import StepProgress
from dynapipe_ext.tools.step_listeners import TensorBoardFile, WandbRun


@dataclass(frozen=True, slots=True)
class RankLog:
    """A listener to the steps of a rank, and to their beginnings. `variant` opens its lines where it is not empty.

    At `every_action`, a step begins with all its instructions. Errors: DataError where the file cannot be written.
    """

    file: TextIO
    every_action: bool
    variant: str = ""

    def say(self, text: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        opening = f"{now} {self.variant}: " if self.variant else f"{now} "
        with writing_in(self.file.name):
            self.file.write("".join(f"{opening}{line}\n" for line in text.splitlines()))

    def step_begins(self, plan: ExecutionPlan) -> None:
        shapes = " ".join(
            f"{m.rows}x{m.encoder_len}" + f"+{m.decoder_len}" * bool(m.decoder_len) for m in plan.micro_batches
        )
        self.say(
            f"step {plan.step + 1} begins (plan {plan.step}): micro-batches {shapes or 'none'};"
            f" {plan.real_tokens} of {plan.padded_tokens} tokens real in all replicas;"
            f" predicted {plan.makespan_s:.6g} s and at most {plan.prediction.peak_bytes[plan.pp_rank]} B"
        )
        if self.every_action:
            self.say("\n".join(f"instruction {i}: {instruction}" for i, instruction in enumerate(plan.instructions)))

    def record(self, span: Span) -> None:
        self.say(f"{span.label} took {span.duration_s:.6f} s, {span.num_bytes} B held after it")

    def step_done(self, done: StepDone) -> None:
        refused = f"; refused: {done.refused}" if done.refused else ""
        self.say(
            f"step {done.number} done: loss {done.loss:.6g}, gradient norm {done.grad_norm:.6g};"
            f" {done.step_s:.6f} s, {done.executed_s:.6f} s of it executed, {done.cpu_s:.6f} s CPU;"
            f" at most {done.peak_bytes} B held{refused}"
        )

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoggingRecorder:
    """Gives each span on, and a line of the log."""

    inner: Recorder
    log: RankLog

    def record(self, span: Span) -> None:
        self.inner.record(span)
        self.log.record(span)


@contextmanager
def rank_log(settings: DebugSettings, env: RankEnv) -> Iterator[RankLog | None]:
    """A rank's log while it runs, which goes on where an earlier attempt ended; None where none is asked for.

    An error that ends the rank is its last entry, with the calls that led to it. Errors: ConfigError for a place that
    cannot be written.
    """
    if not settings.log_dir:
        yield None
        return
    path = Path(settings.log_dir) / f"rank-{env.rank:05d}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another [debug] log_dir") from error
    try:
        log = RankLog(file, settings.log_level == "debug")
        log.say(f"rank {env.rank} of {env.world_size} is process {os.getpid()} on {socket.gethostname()}")
        try:
            yield log
        except BaseException as error:
            with suppress(DataError):
                log.say("ended by an error\n" + "".join(traceback.format_exception(error)))
            raise
        log.say("ended well")
    finally:
        with suppress(OSError):  # what a full disk could not take has been told by `say`
            file.close()


def written(config: TrainConfig, page: LivePage, variant: Variant, index: int) -> list[Listener]:
    """Those that keep a variant's steps in the run's directory, the run's own one being `index` 0."""
    run_dir = page.run_dir
    events = EventsFile(run_dir / EVENTS_FILE, variant.name)
    listeners: list[Listener] = [events, PageListener(page, variant.name)]
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
