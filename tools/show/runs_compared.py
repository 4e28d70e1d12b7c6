"""Two runs side by side: how the second differs from the first in words, and their figures on the same axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from dynapipe_ext.errors import format_bytes
from dynapipe_ext.tools.account.run_series import RunSeries
from dynapipe_ext.tools.console import percent
from dynapipe_ext.tools.files import write_output
from dynapipe_ext.tools.show.charts import Chart, Line, chart_html
from dynapipe_ext.tools.show.run_page import figure_charts, table_html, text
from dynapipe_ext.tools.show.run_words import NamedRun, difference_sentences, settings_that_differ
from dynapipe_ext.tools.show.timeline import notes_html, page_html


def named_apart(paths: Sequence[Path]) -> list[str]:
    """A name for each run: that of its directory, and of as many above it as tell them apart.

    >>> named_apart([Path("runs/a"), Path("runs/b")]), named_apart([Path("x/run"), Path("y/run")])
    (['a', 'b'], ['x/run', 'y/run'])
    """
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]


def figures_table(one: NamedRun, other: NamedRun) -> list[tuple[str, str, str]]:
    """(figure, of the first run, of the second) for a table."""
    rows = zip(_figures(one.run.own), _figures(other.run.own), strict=True)
    return [(name, here, there) for (name, here), (_, there) in rows]


def _figures(own: RunSeries) -> list[tuple[str, str]]:
    losses, peaks = own.loss.points(), own.gathered.peak_bytes if own.gathered else ()
    rate, cpu_s, evaluation = own.real_tokens_per_s, own.cpu_s_per_token, own.last_evaluation
    return [
        ("steps", f"{own.last.number:,}" if own.last else "0"),
        ("last loss", f"{losses[-1].mean:.4f}" if losses else "–"),
        ("last validation loss", f"{evaluation.loss:.4f}" if evaluation else "–"),
        ("real tokens", f"{own.real_tokens:,}"),
        ("tokens a second", "–" if rate is None else f"{rate:,.0f}"),
        ("CPU time a token", "–" if cpu_s is None else f"{1e6 * cpu_s:,.1f} µs"),
        ("padding", percent(own.padding_share)),
        ("bubble", percent(own.measured_bubble.mean)),
        ("bubble as predicted", percent(own.predicted_bubble.mean)),
        ("longer than predicted", percent(own.drift_share, signed=True)),
        ("most bytes of a rank", format_bytes(max(peaks)) if peaks else "–"),
    ]


def compared_table(one: NamedRun, other: NamedRun) -> Table:
    """The figures of both for a terminal."""
    table = Table(title=f"{one.name} and {other.name}", title_justify="left", title_style="bold")
    table.add_column("")
    for run in (one, other):
        table.add_column(run.name, justify="right", no_wrap=True)
    for row in figures_table(one, other):
        table.add_row(*row)
    return table


def write_comparison(path: str | Path, one: NamedRun, other: NamedRun) -> None:
    """Write the page of two runs, one file without network. Errors: DataError where it cannot be written."""
    runs = [(run.name, run.run.own) for run in (one, other)]
    losses = [Line(name=name, points=own.loss.points(), colour=i) for i, (name, own) in enumerate(runs)]
    losses += [
        Line(name=f"{name}, validation", points=own.validation.points(), colour=i, dots=True)
        for i, (name, own) in enumerate(runs)
    ]
    charts = Chart(title="Loss", lines=losses, show=lambda value: f"{value:.4g}"), *figure_charts(runs)
    drawn = "".join(map(chart_html, charts))
    words = "".join(f"<p>{text(sentence)}</p>" for sentence in difference_sentences(one, other))
    rows = [[text(cell) for cell in row] for row in figures_table(one, other)]
    settings = [[text(cell) for cell in row] for row in settings_that_differ(one.settings, other.settings)]
    title = f"{one.name} and {other.name}"
    shared = any(run.run.facts.oversubscribed for run in (one, other))
    note = "Ranks share cores in at least one of these runs: compare CPU time a token, not tokens a second or bubble."
    parts = [
        '<div class="page">',
        f'<header><h1>{text(title)}</h1><p class="subtitle">two runs on the same axes</p></header>',
        f'<section class="summary">{words}</section>{notes_html([note] if shared else [])}',
        f'<h2>Over the steps</h2><section class="charts">{drawn}</section>' if drawn else "",
        f"<h2>Figures</h2>{table_html(('', one.name, other.name), rows, numbers=(1, 2))}",
        f"<h2>Settings that differ</h2>{table_html(('setting', one.name, other.name), settings)}" if settings else "",
        "</div>\n",
    ]
    write_output(path, page_html(title, "\n".join(filter(None, parts)), styles=("run.css",)))
