"""Progress of a run: a live bar on a terminal, one plain line a step in a pipe or a log file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from dynapipe_ext.errors import ConfigError, format_bytes
from dynapipe_ext.executor.events import StepDone
from dynapipe_ext.tools.console import counted, error_console, percent

Clock = Callable[[], float]
_FIRST_LINE = 1 << 14  # pieces before the first line where the total is unknown
_ALL_COLUMNS = 122  # of a terminal that holds all figures of a step
_BAR_COLUMNS = 14  # beside the bar: the count, and what parts them


def format_eta(seconds: float | None) -> str:
    """
    >>> format_eta(None), format_eta(7.2), format_eta(3725)
    ('--:--', '0:07', '1:02:05')
    """
    if seconds is None:
        return "--:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _CountColumn(MofNCompleteColumn):
    """Finished pieces and their total; only the finished ones where the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text(f"{int(task.completed):,}") if task.total is None else super().render(task)


class _EtaColumn(ProgressColumn):
    """Time left, by the mean rate since the start. Steps differ in size, so the rate of a short window would jump."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        return Text(f"ETA {format_eta(_left_s(task.completed, task.total, task.elapsed))}", style="cyan")


def _left_s(done: float, total: float | None, elapsed_s: float | None) -> float | None:
    if not done or total is None or elapsed_s is None:
        return None
    return max(0.0, (total - done) * elapsed_s / done)


class _Meter:
    """A bar on a terminal, and nothing elsewhere. Text printed by `log` stays above the bar."""

    def __init__(
        self,
        description: str,
        total: int | None,
        *,
        console: Console | None,
        enabled: bool,
        clock: Clock,
        figures: bool,
    ) -> None:
        if total is not None and total < 0:
            raise ConfigError(f"a progress bar over {total} pieces: the total must be at least 0")
        self._console = console or error_console()
        self._clock = clock
        self._total, self._done = total, 0
        self._enabled = enabled
        self._live = enabled and self._console.is_terminal
        self._started_s = 0.0
        # _ALL_COLUMNS hold step, figures and time left. A wider terminal also shows the bar and the count.
        bar_width = min(28, self._console.width - _ALL_COLUMNS - _BAR_COLUMNS) if figures else 24
        bar = [BarColumn(bar_width=bar_width), _CountColumn()] if bar_width >= 8 else []
        self._room = self._console.width - (bar_width + _BAR_COLUMNS if bar else 0)
        self._bar = Progress(
            TextColumn("{task.description}"),
            *bar,
            *([TextColumn("{task.fields[figures]}")] if figures else []),
            _EtaColumn(),
            console=self._console,
            get_time=clock,
            disable=not self._live,
        )
        self._task = self._bar.add_task(description, total=total, figures="", start=False)

    def _start(self) -> None:
        self._started_s = self._clock()
        self._bar.start_task(self._task)
        self._bar.start()

    def _stop(self) -> None:
        self._bar.stop()

    def log(self, message: str) -> None:
        """Print a line above the bar."""
        if self._enabled:
            self._print(message)

    def _print(self, line: str) -> None:
        # No wrapping, markup or colours, so that a line of a log stays one line.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _left(self) -> str:
        return format_eta(_left_s(self._done, self._total, self._clock() - self._started_s))


class StepProgress(_Meter):
    """A listener that shows the progress of training over `total_steps`, until `close`.

    On a terminal it is a bar, elsewhere a line every `every` steps and for the last step. `console` defaults to
    standard error, so that standard output holds only results.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        console: Console | None = None,
        every: int = 1,
        clock: Clock = time.monotonic,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every is {every} but must be at least 1: it is the number of steps between lines")
        super().__init__("step", total_steps, console=console, enabled=True, clock=clock, figures=True)
        self._every = every
        self._left_out = 0  # steps down from the fullest line, so that figures do not come and go
        self._start()

    def step_done(self, done: StepDone) -> None:
        """One more step is done. `norm` is that of the gradients before clipping, "-" where the step changed nothing.
        Of preferences, by how much rewards of chosen answers are higher, and the share of pairs where they are. The
        bubble is "-" where it was not measured. Padding is the share of padding among all tokens. Drift is how far
        the measured makespan exceeds the predicted one. Memory is the most bytes of a rank so
        far. A narrow terminal has them in short, a narrower one without padding, memory and bubble."""
        self._done += 1
        lines = _lines_of_figures(done)
        if self._live:
            room = self._room - len(f"step {done.number}  ETA {self._left()}")
            lengths = [len(line) for line in lines[:-1]]
            self._left_out = max(self._left_out, next((i for i, n in enumerate(lengths) if n <= room), len(lengths)))
            figures = lines[self._left_out]
            self._bar.update(self._task, completed=self._done, description=f"step {done.number}", figures=figures)
        if done.refused:
            self._print(f"step {done.number} changed no weight: {done.refused}")
        if not self._live and (done.number % self._every == 0 or self._done == self._total):
            drift = f"  drift {percent(done.all_ranks.drift, 0, signed=True)}" if done.all_ranks else ""
            self._print(f"step {done.number} ({self._done}/{self._total})  {lines[0]}{drift}  ETA {self._left()}")
        if done.fit is not None:
            errors = f"{percent(done.fit.error_before)} off, the new ones {percent(done.fit.error_after)}"
            self._print(f"after step {done.number}: costs fitted anew: actions were {errors}")
        if (evaluation := done.evaluation) is not None:
            size = f"{counted(evaluation.num_samples, 'sample')}, {counted(evaluation.real_tokens, 'token')}"
            loss_text = f"validation loss {evaluation.loss:.4f} over {size}, in {evaluation.seconds:.1f} s"
            self._print(f"after step {done.number}: {loss_text}")

    def close(self) -> None:
        self._stop()


def _lines_of_figures(done: StepDone) -> list[str]:
    """The figures of a step, ever shorter: all, all but padding, in short, and in short without the last ones."""
    padding = 1 - done.real_tokens / max(1, done.padded_tokens)
    bubble = done.all_ranks.bubble_ratio if done.all_ranks else None
    peak = format_bytes(max(done.all_ranks.peak_bytes) if done.all_ranks else done.peak_bytes)
    norm = f"norm {done.grad_norm:.3g}" if math.isfinite(done.grad_norm) else "norm -"
    learned, rate = done.preferences, done.real_tokens_per_s
    whole = [f"loss {done.loss:.4f}", f"lr {done.learning_rate:.3g}", norm]
    short = [f"loss {done.loss:.3f}", f"lr {done.learning_rate:.2g}", norm]
    if learned is not None:
        whole += [f"margin {learned.margin:.3g}", f"right {percent(learned.accuracy)}"]
        short += [f"margin {learned.margin:.2g}", f"right {percent(learned.accuracy, 0)}"]
    whole += [f"{rate:,.0f} tok/s", f"bubble {percent(bubble)}", f"memory {peak}", f"padding {percent(padding)}"]
    short += [f"{rate / 1e3:.3g}k tok/s" if 1e3 <= rate < 1e6 else whole[-4], f"bubble {percent(bubble, 0)}", peak]
    return ["  ".join(whole), "  ".join(whole[:-1]), " ".join(short), " ".join(short[:-1]), " ".join(short[:-2])]


class WorkProgress(_Meter):
    """Progress of preparation such as tokenizing. In a pipe it prints a line at each tenth of the total; where the
    total is unknown, whenever the count has doubled."""

    def __init__(
        self,
        description: str,
        total: int | None,
        *,
        console: Console | None = None,
        enabled: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(description, total, console=console, enabled=enabled, clock=clock, figures=False)
        self._description = description

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop()

    def advance(self, amount: int = 1) -> None:
        """`amount` more pieces are done."""
        before, self._done = self._done, self._done + amount
        if self._live:
            self._bar.update(self._task, completed=self._done)
        elif self._enabled and self._total is None:
            if self._done >= _FIRST_LINE and self._done.bit_length() > before.bit_length():
                self._print(f"{self._description}: {self._done:,}")
        elif self._enabled and self._total and 10 * self._done // self._total > 10 * before // self._total:
            percent = 100 * self._done // self._total
            self._print(f"{self._description}: {self._done:,}/{self._total:,} ({percent} %)  ETA {self._left()}")
