"""What tools print: tables, numbers in words, and lines that go on."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from dynapipe_ext.tools.files import ALONE, write_atomic

_PIPE_COLUMNS = 160


def output(columns: int = _PIPE_COLUMNS, *, json_to: str | None = None) -> Console:
    """Standard output as it is now, `columns` wide where nobody looks; silent where JSON stands alone there."""
    console = Console(highlight=False, quiet=json_to == ALONE)
    return console if console.is_terminal else Console(highlight=False, width=columns, quiet=json_to == ALONE)


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
    show(*parts, console=output(json_to=where))
    if where:
        deliver_json(where, value)


def deliver_json(where: str, value: Any) -> None:
    text = json.dumps(value, indent=1) + "\n"
    if where == ALONE:
        sys.stdout.write(text)
    else:
        write_atomic(where, text)
        show(f"as JSON in {where}")


def say_loading(*packages: str) -> None:
    """Tell that slow imports come, where they are not done yet: nobody waits in silence."""
    if waiting := [name for name in packages if name.partition("-")[0] not in sys.modules]:
        print(f"loading {' and '.join(waiting)}", file=sys.stderr, flush=True)
