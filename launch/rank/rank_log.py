"""A rank's log, and the loggers that a run needs."""

from __future__ import annotations

import os
import re
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from dynapipe_ext.durable_files import open_kept
from dynapipe_ext.errors import ConfigError, DataError, in_one_line
from dynapipe_ext.executor.events import Listener, StepDone
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Recorder
from dynapipe_ext.launch.job.configured import Variant
from dynapipe_ext.launch.processes.cluster import say_at_once
from dynapipe_ext.launch.processes.env import RankEnv
from dynapipe_ext.launch.run.page import LivePage, PageListener
from dynapipe_ext.settings.tables import RunSettings
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.timeline import Span
from dynapipe_ext.tools.account.run_events import EVENTS_FILE, EventsFile
from dynapipe_ext.tools.files import writing_in
from dynapipe_ext.tools.progress import StepProgress
from dynapipe_ext.tools.step_listeners import TensorBoardFile, WandbRun


class LogFile:
    """An open file of lines. Where it takes no more, one line on stderr says so, and what follows is left out."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._takes_no_more = False

    def write(self, text: str) -> None:
        if self._takes_no_more:
            return
        try:
            with writing_in(self._file.name):
                self._file.write(text)
        except DataError as error:
            self._takes_no_more = True
            say_at_once(f"{error}; no more is written there, and the run goes on")


@dataclass(frozen=True, slots=True)
class RankLog:
    """A listener to the steps of a rank, and to their beginnings. `variant` opens its lines where it is not empty.

    At `every_action`, a step begins with all its instructions.
    """

    file: LogFile
    every_action: bool
    variant: str = ""

    def say(self, text: str) -> None:
        self.file.write(_dated(text, self.variant))

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


def _dated(text: str, variant: str = "") -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    opening = f"{now} {variant}: " if variant else f"{now} "
    return "".join(f"{opening}{line}\n" for line in text.splitlines())


@dataclass(frozen=True, slots=True)
class LoggingRecorder:
    """Gives each span on, and a line of the log."""

    inner: Recorder
    log: RankLog

    def record(self, span: Span) -> None:
        self.inner.record(span)
        self.log.record(span)


@contextmanager
def rank_log(settings: RunSettings, env: RankEnv) -> Iterator[RankLog | None]:
    """A rank's log while it runs, which goes on where an earlier attempt ended; None where none is asked for.

    An error that ends the rank is its last entry, with the calls that led to it. Errors: ConfigError for a place that
    cannot be opened; DataError for one without room for the first line.
    """
    if not settings.log_dir:
        yield None
        return
    path = Path(settings.log_dir) / f"rank-{env.rank:05d}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_kept(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        file = os.fdopen(descriptor, "a", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another [run] log_dir") from error
    try:
        with writing_in(path):
            file.write(
                _dated(f"rank {env.rank} of {env.world_size} is process {os.getpid()} on {socket.gethostname()}")
            )
        log = RankLog(LogFile(file), settings.log_level == "debug")
        try:
            yield log
        except BaseException as error:
            log.say("ended by an error\n" + "".join(traceback.format_exception(error)))
            raise
        log.say("ended well")
    finally:
        with suppress(OSError):  # what a full disk could not take has been told by `LogFile`
            file.close()


@dataclass(slots=True)
class Dispensable:
    """A listener that a run does without. Where `inner` fails, one line says why, and it hears of no more steps."""

    inner: Listener
    name: str
    failed: bool = False

    def step_done(self, done: StepDone) -> None:
        if not self.failed:
            self._attempt(lambda: self.inner.step_done(done), f"after step {done.number}")

    def close(self) -> None:
        self._attempt(self.inner.close, "at the end")

    def _attempt(self, act: Callable[[], None], when: str) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  (loggers of others raise what they like)
            if not self.failed:
                say_at_once(f"{self.name}: no more is written {when}, and the run goes on: {in_one_line(error)}")
            self.failed = True


def written(config: TrainConfig, page: LivePage, variant: Variant, index: int) -> list[Listener]:
    """Those that keep a variant's steps in the run's directory, the run's own one being `index` 0."""
    run_dir = page.run_dir
    events = EventsFile(run_dir / EVENTS_FILE, variant.name, keeps_steps=not index, say=say_at_once)
    listeners: list[Listener] = [events, PageListener(page, variant.name)]
    if "wandb" in config.run.loggers and not index:
        listeners.append(Dispensable(WandbRun(run_dir, config.to_json()), "Weights & Biases"))
    if "tensorboard" in config.run.loggers:
        folder = run_dir / "tensorboard" / re.sub(r"\W+", "-", variant.name)
        listeners.append(Dispensable(TensorBoardFile(folder), "TensorBoard"))
    return listeners


def shown(config: TrainConfig, compared: Sequence[str], first_step: int) -> StepProgress:
    """What people see while variants run, of the first of them, which goes on after `first_step` steps."""
    progress = StepProgress(config.run.steps - first_step, every=config.run.log_every)
    if compared:
        progress.log(f"comparing: {'; '.join(compared)}")
    return progress
