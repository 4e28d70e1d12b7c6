"""Where commands show what they found: tables on a terminal, plain columns in a pipe."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.table import Table

_PIPE_COLUMNS = 160


def output() -> Console:
    """Standard output as it is now; wide where nobody looks."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_COLUMNS)


def show(*parts: RenderableType, console: Console | None = None) -> None:
    """Print tables and lines; in a pipe a table is its columns, without a frame."""
    console = console or output()
    for part in parts:
        if isinstance(part, Table) and not console.is_terminal:
            part.box, part.title_justify = None, "left"
        console.print(part, markup=False, soft_wrap=isinstance(part, str))
