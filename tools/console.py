"""What tools print: tables and lines, and how figures read there: one spelling for a share, a size, a count, a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from dynapipe_ext.tools.files import ALONE, write_data, write_output
from dynapipe_ext.visible_text import visible

_PIPE_COLUMNS = 160


class VisibleConsole(Console):
    """A console whose text shows control characters as escapes, whatever is printed. It colours text itself."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def error_console() -> Console:
    """Return standard error as it is now."""
    return VisibleConsole(stderr=True, highlight=False)


def output(columns: int = _PIPE_COLUMNS, *, json_to: str | None = None) -> Console:
    """Standard output as it is now, `columns` wide where nobody looks; silent where JSON stands alone there."""
    console = VisibleConsole(highlight=False, quiet=json_to == ALONE)
    return console if console.is_terminal else VisibleConsole(highlight=False, width=columns, quiet=json_to == ALONE)


def show(*parts: RenderableType, console: Console | None = None) -> None:
    """Print tables and lines; in a pipe a table is its columns, without a frame."""
    console = console or output()
    for part in parts:
        if isinstance(part, Table) and not console.is_terminal:
            part.box, part.title_justify = None, "left"
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def deliver(where: str | None, value: Any, *parts: RenderableType) -> None:
    """`value` as --json says: "-" alone on standard output, else `parts` are shown, and it goes to the file that is
    named, if any. Errors: DataError where that cannot be written."""
    with delivering(where, value):
        show(*parts, console=output(json_to=where))


@contextmanager
def delivering(where: str | None, value: Any) -> Iterator[None]:
    """The same around what shows its parts by itself. The file is written first: who reads along may stop early."""
    text = "" if where is None else json.dumps(value, indent=1) + "\n"
    if where and where != ALONE:
        write_output(where, text)
    yield
    if where == ALONE:
        write_data(text)
    elif where:
        show(f"as JSON in {where}")


def say_loading(*packages: str) -> None:
    """Tell that slow imports come, where they are not done yet: nobody waits in silence."""
    if waiting := [name for name in packages if name.partition("-")[0] not in sys.modules]:
        print(f"loading {' and '.join(waiting)}", file=sys.stderr, flush=True)


def percent(share: float | None, digits: int = 1, *, signed: bool = False) -> str:
    """
    >>> percent(0.1234), percent(-1e-17), percent(None), percent(-1e-5, 2)
    ('12.3 %', '0.0 %', '-', '0.00 %')
    >>> percent(0.25, signed=True), percent(-1e-5, 0, signed=True)
    ('+25.0 %', '+0 %')
    """
    sign = "+" if signed else ""
    return "-" if share is None else f"{round(100 * share, digits) + 0.0:{sign}.{digits}f} %"  # -0.0 + 0.0 is 0.0


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "step"), counted(1200, "step"), counted(3, "batch")
    ('1 step', '1,200 steps', '3 batches')
    """
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def figure(value: float, digits: int = 4) -> str:
    """
    >>> figure(0.08041), figure(1632.4, 3), figure(16_210.0), figure(0.0)
    ('0.08041', '1,632', '16,210', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def seconds(duration_s: float | None) -> str:
    """
    >>> seconds(1.234), seconds(0.0123), seconds(None)
    ('1.23 s', '12.3 ms', '-')
    """
    if duration_s is None:
        return "-"
    return f"{duration_s:.2f} s" if duration_s >= 1 else f"{1e3 * duration_s:.1f} ms"


def step_range(numbers: tuple[int, ...]) -> str:
    """The steps that a mean is over; numbers rise.

    >>> step_range((38, 39, 40)), step_range((7,)), step_range((10, 20, 30)), step_range(())
    ('steps 38 to 40', 'step 7', '3 of steps 10 to 30', 'no step')
    """
    if not numbers:
        return "no step"
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"step {first}"
    steps = f"steps {first} to {last}"
    return steps if len(numbers) == last - first + 1 else f"{len(numbers)} of {steps}"
