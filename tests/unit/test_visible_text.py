"""What a terminal would obey is shown instead, whoever prints it."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from dynapipe_ext.tools.console import VisibleConsole, show
from dynapipe_ext.visible_text import visible
from tests.support.limits import LIMIT_S

EVIL = "a\x1b]0;mine\x07\x1b[2Kb\u202ec\x9b1A\x7f\rd"
SHOWN = r"a\x1b]0;mine\x07\x1b[2Kb\u202ec\x9b1A\x7f\rd"
PRINTS = f"""
import json, sys
from dynapipe_ext.launch.processes.cluster import say_at_once
from dynapipe_ext.launch.processes.signals import outlive_readers, show_what_terminals_obey
from dynapipe_ext.tools.console import error_console, output
from dynapipe_ext.tools.files import write_data
show_what_terminals_obey()
evil = {EVIL!r}
print(evil)
print("\\rbar", end="\\n", file=sys.stderr)
outlive_readers()
print(evil, file=sys.stderr)
say_at_once(evil)
error_console().print(evil, markup=False, style="red", soft_wrap=True)
output().print(evil, markup=False, soft_wrap=True)
write_data(json.dumps(evil) + "\\n")
"""


def test_text_is_as_it_was_but_for_what_a_terminal_obeys() -> None:
    assert visible(EVIL) == SHOWN
    plain = "line\n\tcolumn, é 你 🙂 👩‍👩‍👧 ‌ عربى"
    assert visible(plain) == plain


def test_tables_and_lines_of_a_console_show_it_and_keep_their_own_colours() -> None:
    console = VisibleConsole(file=io.StringIO(), force_terminal=True, width=200, highlight=False)
    table = Table(EVIL.replace("\r", ""))
    table.add_row(EVIL, style="red")
    show(table, EVIL, console=console)
    console.print("[bold]own[/]")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b]0" not in text
    assert "\x1b[2K" not in text
    assert "\x9b" not in text
    assert r"\x1b]0;mine" in text
    assert "\x1b[1mown" in text


def test_every_way_to_print_shows_it_on_a_terminal() -> None:
    """A progress bar may return to the start of its line, and what programs read stays as it is."""
    screen, terminal = pty.openpty()
    words = [sys.executable, "-c", PRINTS]
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    done = subprocess.run(words, stdout=terminal, stderr=terminal, check=False, timeout=LIMIT_S, env=variables)
    os.close(terminal)
    said = os.read(screen, 1 << 16).decode()
    os.close(screen)
    assert done.returncode == 0, said
    lines = said.replace("\r\n", "\n").split("\n")
    assert lines[0] == SHOWN
    assert lines[1] == "\rbar"
    assert lines[2] == lines[3] == SHOWN
    by_rich = SHOWN.replace(r"\x07", "").replace(r"\r", "")  # which drops these
    red, end = "\x1b[31m", "\x1b[0m"
    assert lines[4].startswith(red)
    assert lines[4].removeprefix(red).removesuffix(end) == by_rich
    assert lines[5] == by_rich
    assert json.loads(lines[6]) == EVIL


@pytest.mark.parametrize("flag", ["--model", "--config"])
def test_a_path_in_an_error_is_shown(flag: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "dynapipe_ext.launch.cli", "train", flag, f"{tmp_path}/{EVIL[:-2]}"]
    done = subprocess.run(words, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert b"\x1b" not in done.stderr
    assert rb"a\x1b]0;mine\x07" in done.stderr
