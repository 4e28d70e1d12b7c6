"""A verdict on a plan's file for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from dynapipe_ext.tools.check.check_plan import Verdict
from dynapipe_ext.tools.console import percent


def verdict_table(verdict: Verdict) -> Table:
    """Claims beside what was found."""
    title = f"The plan is {'not valid' if verdict.faults else 'valid'}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("", "", "claimed", "found"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)

    def text(value: float | None, unit: str) -> str:
        if value is None:
            return "-"
        return f"{value:,.0f} B" if unit == "B" else f"{value:.6f} s"

    for figure in verdict.figures:
        name = figure.what.replace("_", " ")
        table.add_row(figure.where, name, text(figure.claimed, figure.unit), text(figure.found, figure.unit))
    for name, seconds in (("makespan", verdict.makespan_s), ("bound of these micro-batches", verdict.bound_s)):
        table.add_row("step", name, "", text(seconds, "s"))
    for name, gap in (("gap to that bound", verdict.gap), ("gap to the bound of every plan", verdict.batch_gap)):
        table.add_row("step", name, "", percent(gap, 2))
    return table


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict, ready for json.dump."""
    return {
        "valid": not verdict.faults,
        "faults": list(verdict.faults),
        "makespan_s": verdict.makespan_s,
        "bound_s": verdict.bound_s,
        "gap": verdict.gap,
        "batch_bound_s": verdict.batch_bound_s,
        "free_batch_bound_s": verdict.free_batch_bound_s,
        "batch_gap": verdict.batch_gap,
        "figures": [asdict(figure) for figure in verdict.figures],
    }
