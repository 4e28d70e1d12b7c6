"""The page of a run, `index.html` in its directory: written while it goes on, once more when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.events import StepDone
from dynapipe_ext.settings.removed import translate_saved
from dynapipe_ext.settings.train_config import read_toml
from dynapipe_ext.tools.account.run_events import EVENTS_FILE, read_events, read_history
from dynapipe_ext.tools.account.run_series import RunSoFar
from dynapipe_ext.tools.files import write_atomic
from dynapipe_ext.tools.show.run_page import PAGE_FILE, RUN_FILES, RunPage, run_page_html
from dynapipe_ext.tools.show.run_words import NextMove, SettingTables
from dynapipe_ext.tools.show.timeline import TraceRecord

_LEAST_PAUSE_S = 10.0  # between two pages of a run that goes on
_MOST_SHARE = 1 / 500  # of rank 0's time that goes into them


def read_settings(run_dir: Path) -> SettingTables:
    """Return the tables of a run's config.toml, under their names of today. Raises ConfigError if it cannot be read."""
    tables, _ = translate_saved(read_toml(run_dir / "config.toml"))
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def write_page(
    run_dir: Path,
    run: RunSoFar,
    *,
    going_on: bool = False,
    unfinished: str | None = None,
    record: TraceRecord | None = None,
    moves: Sequence[NextMove] | None = None,
    num_tried: int = 0,
) -> None:
    """Write index.html into a run's directory, whole or not at all. Errors: ConfigError and DataError."""
    page = RunPage(
        name=run_dir.resolve().name,
        now=datetime.now().astimezone(),
        settings=read_settings(run_dir),
        history=read_history(run_dir),
        going_on=going_on,
        unfinished=unfinished,
        record=record,
        moves=moves,
        num_tried=num_tried,
        files=[name for name in RUN_FILES if (run_dir / name).exists() or (name == "report.json" and not going_on)],
    )
    write_atomic(run_dir / PAGE_FILE, run_page_html(run, page))


@dataclass(slots=True)
class LivePage:
    """Writes the page of a run that goes on, on rank 0: after the first step, then so seldom that it takes no more
    than _MOST_SHARE of the time. What the page shows takes a bounded room, however many steps there are. `run` is what
    a run that has been resumed did before; None of a new one."""

    run_dir: Path
    run: RunSoFar | None = None
    clock: Callable[[], float] = time.monotonic
    _due_s: float = 0.0

    def add(self, variant: str, done: StepDone) -> None:
        """One more step of a variant, which the run's events have already, unless there is no room for them."""
        is_first = self.run is None
        if self.run is None:
            self.run = RunSoFar.of(read_events(self.run_dir / EVENTS_FILE))
        series = next(series for series in self.run.variants if series.label.name == variant)
        if not is_first or not series.num_steps:
            series.add(done)
        start_s = self.clock()
        if start_s >= self._due_s:
            with suppress(ConfigError, DataError):  # on a full disk it is the run's own files that say so
                write_page(self.run_dir, self.run, going_on=True)
            now_s = self.clock()
            self._due_s = now_s + max(_LEAST_PAUSE_S, (now_s - start_s) / _MOST_SHARE)


@dataclass(frozen=True, slots=True)
class PageListener:
    """A listener that gives the steps of one variant to the run's page."""

    page: LivePage
    variant: str

    def step_done(self, done: StepDone) -> None:
        self.page.add(self.variant, done)

    def close(self) -> None: ...
