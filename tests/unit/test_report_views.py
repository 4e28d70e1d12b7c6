"""Progress: what a person sees of a run on a terminal and in a log."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.events import CostsFit, StepDone
from dynapipe_ext.tools.progress import StepProgress, WorkProgress
from tests.support.steps import a_step


def pipe() -> Console:
    return Console(file=io.StringIO(), width=40)


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def step(number: int, loss: float = 1.0, padding: float = 0.0, bubble_ratio: float | None = None) -> StepDone:
    """A step of 1,000 positions a second."""
    return a_step(number - 1, loss=loss, real_tokens=round(1000 * (1 - padding)), bubble_ratio=bubble_ratio)


def test_a_pipe_gets_one_line_a_step_without_control_codes() -> None:
    console = pipe()
    progress = StepProgress(3, console=console, clock=lambda: 0.0)
    progress.step_done(replace(step(1, 5.0, 0.044, 0.25), learning_rate=1.5e-4, grad_norm=2.3456))
    as_told = replace(step(2, 4.0, 0.1), grad_norm=math.nan)
    assert as_told.all_ranks is not None
    progress.step_done(replace(as_told, all_ranks=replace(as_told.all_ranks, predicted_makespan_s=0.4001)))
    progress.step_done(replace(step(3, 3.0, 0.0, -1e-17), fit=CostsFit(0.62, 0.04)))
    progress.log("[a message] that is as it was")
    progress.close()
    first, second, third, fitted, message = lines(console)
    figures = "loss 5.0000  lr 0.00015  norm 2.35  956 tok/s  bubble 25.0 %  memory 60 B  padding 4.4 %"
    assert first == f"step 1 (1/3)  {figures}  drift +33 %  ETA 0:00"
    assert "  norm -  " in second
    assert second.endswith("bubble -  memory 60 B  padding 10.0 %  drift +0 %  ETA 0:00")  # not -0 %
    assert third.endswith("bubble 0.0 %  memory 60 B  padding 0.0 %  drift +33 %  ETA 0:00")
    assert fitted == "after step 3: costs fitted anew: actions were 62.0 % off, the new ones 4.0 %"
    assert message == "[a message] that is as it was"


def test_time_left_follows_the_mean_rate() -> None:
    console, now = pipe(), [0.0]
    progress = StepProgress(10, console=console, clock=lambda: now[0])
    for number in (1, 2):
        now[0] += 15.0
        progress.step_done(step(number))
    assert [line.split("ETA ")[1] for line in lines(console)] == ["2:15", "2:00"]


def test_every_k_th_step_and_the_last_have_a_line() -> None:
    console = pipe()
    progress = StepProgress(7, console=console, every=3)
    for number in range(101, 108):
        progress.step_done(step(number))
    assert [line.split()[1] for line in lines(console)] == ["102", "105", "107"]


def test_a_terminal_gets_a_bar_with_the_figures() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    progress = StepProgress(4, console=console)
    progress.step_done(step(9, 2.5, 0.5, 0.125))
    progress.log("a message")
    progress.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    figures = r"loss 2.5000  lr 0.001  norm 0.5  500 tok/s  bubble 12.5 %  memory 60 B  padding 50.0 %"
    assert re.search(rf"step 9 ━+\S* +\S*1/4 {figures} ETA", plain), plain
    assert "a message\n" in text.replace("\r", "")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is given back


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (70, "loss 12.346 lr 1.3e-05 norm 0.00125 19.1k tok/s"),
        (80, "loss 12.346 lr 1.3e-05 norm 0.00125 19.1k tok/s bubble 11 %"),
        (90, "loss 12.346 lr 1.3e-05 norm 0.00125 19.1k tok/s bubble 11 % 64.2 MB"),
        (107, "loss 12.3456  lr 1.25e-05  norm 0.00125  19,140 tok/s  bubble 11.2 %  memory 64.2 MB"),
        (122, "loss 12.3456  lr 1.25e-05  norm 0.00125  19,140 tok/s  bubble 11.2 %  memory 64.2 MB  padding 4.3 %"),
    ],
)
def test_a_terminal_has_as_many_figures_as_fit_in_its_columns(width: int, figures: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    progress = StepProgress(9999, console=console, clock=lambda: 0.0)
    longest = replace(step(1000, 12.3456, 0.043, 0.112), step_s=0.05, learning_rate=1.25e-5, grad_norm=1.25e-3)
    assert longest.all_ranks is not None
    longest = replace(longest, all_ranks=replace(longest.all_ranks, peak_bytes=(64_250_000, 40)))
    progress.step_done(longest)
    progress.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert f"step 1000 {figures} ETA 0:00" in plain
    assert "…" not in plain


def test_eighty_columns_hold_every_figure_of_a_small_run_which_do_not_come_and_go() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    progress = StepProgress(40, console=console, clock=lambda: 0.0)
    small = replace(step(12, 5.0941, 0.002, 0.44), step_s=0.35, learning_rate=2e-4, grad_norm=2.07)
    for one in (small, replace(small, step=1_000_000), small):
        progress.step_done(one)
        progress._bar.refresh()
    progress.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    shown = re.findall(r"step 12 (.*?) ETA", plain)
    assert shown[0] == "loss 5.094 lr 0.0002 norm 2.07 2.85k tok/s bubble 44 % 60 B"
    assert shown[-1] == "loss 5.094 lr 0.0002 norm 2.07 2.85k tok/s bubble 44 %"


def test_disabled_progress_writes_nothing() -> None:
    for console in (pipe(), Console(file=io.StringIO(), force_terminal=True)):
        with WorkProgress("tokenizing", 5, console=console, enabled=False) as work:
            work.advance(5)
            work.log("quiet")
        assert lines(console) == []


def test_work_in_a_pipe_has_a_line_at_each_tenth() -> None:
    console = pipe()
    with WorkProgress("tokenizing", 1000, console=console, clock=lambda: 0.0) as work:
        for _ in range(500):
            work.advance(2)
    assert len(lines(console)) == 10
    assert lines(console)[0] == "tokenizing: 100/1,000 (10 %)  ETA 0:00"
    assert lines(console)[-1] == "tokenizing: 1,000/1,000 (100 %)  ETA 0:00"


def test_work_of_unknown_size_and_of_no_size_ends() -> None:
    for total in (None, 0):
        console = pipe()
        with WorkProgress("reading", total, console=console) as work:
            work.advance(3)
        assert lines(console) == []


def test_work_of_unknown_size_is_counted_without_a_question_mark() -> None:
    console = pipe()
    with WorkProgress("tokenizing", None, console=console) as work:
        for _ in range(5):
            work.advance(10_000)
    assert lines(console) == ["tokenizing: 20,000", "tokenizing: 40,000"]
    live = Console(file=io.StringIO(), force_terminal=True, width=80)
    with WorkProgress("tokenizing", None, console=live) as work:
        work.advance(800)
    shown = live.file.getvalue()  # type: ignore[attr-defined]
    assert "800" in shown
    assert "/?" not in shown
    assert "ETA" not in shown


def test_impossible_totals_are_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        StepProgress(-1)
    with pytest.raises(ConfigError, match="every is 0"):
        StepProgress(5, every=0)
