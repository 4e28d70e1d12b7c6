"""A comparison as one self-contained HTML page: its sentence, the ways above one another on one time axis, a table."""

from __future__ import annotations

import html
from pathlib import Path

from dynapipe_ext.tools.console import figure, percent
from dynapipe_ext.tools.files import write_output
from dynapipe_ext.tools.show.comparison import Comparison, Way
from dynapipe_ext.tools.show.plan_drawing import Pane, drawn, legend_of_kinds
from dynapipe_ext.tools.show.run_page import PAGE_FILE, RUN_FILES, with_file

_TICKS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1b2330; --soft: #5b6675; --paper: #fff; --line: #d9dee6 }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e7ebf0; --soft: #9aa6b5; --paper: #12161c; --line: #323b47 }} }}
a {{ color: inherit }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5rem auto;
  max-width: 1040px; padding: 0 1rem }}
h1 {{ font-size: 1.3rem }} p {{ max-width: 48rem }} p.how, figcaption {{ color: var(--soft); font-size: .9rem }}
.wide {{ overflow-x: auto }} figure {{ margin: 1rem 0 }} svg {{ min-width: 720px; width: 100%; height: auto }}
table {{ border-collapse: collapse }} th, td {{ text-align: right; padding: .3rem .7rem; font-weight: inherit;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; vertical-align: top }}
thead th {{ font-weight: 650; white-space: nowrap }} tbody th {{ min-width: 14rem }}
th:first-child {{ text-align: left }} td {{ white-space: nowrap }} small {{ display: block; color: var(--soft) }}
@media (max-width: 600px) {{ svg {{ min-width: 0 }} svg .head {{ font-size: 20px }} svg .tick {{ font-size: 17px }}
  table {{ font-size: .8rem }} th, td {{ padding: .25rem .3rem }} tbody th {{ min-width: 6rem }}
  thead th {{ white-space: normal }} }}
@media print {{ body {{ margin: 0 }} svg {{ min-width: 0 }} figure, tr {{ break-inside: avoid }} }}
</style></head><body>
<h1>{title}</h1>
<p>{result}</p>
<p class="how">{how}</p>
<figure><div class="wide">{picture}</div>
<figcaption>The first of these steps. Gaps are idle time.</figcaption></figure>
<div class="wide"><table><thead><tr><th>way</th><th>step</th><th>as planned</th><th>idle</th><th>padding</th>
<th>micro-batches</th></tr></thead><tbody>
{rows}
</tbody></table></div>
{link}</body></html>
"""
_LINK = f'<p><a href="{PAGE_FILE}">The page of the run that was trained</a></p>\n'


def write_comparison_page(path: Path, comparison: Comparison) -> None:
    """With a link to the page of the run in the same directory, if any, and one from there. Errors: DataError where the
    place cannot be written."""
    panes = {way.name: _pane(way) for way in comparison.ways}
    longest_s = max(pane.end_s for pane in panes.values())
    tick_s = next((tick for tick in _TICKS_S if longest_s / tick <= 8), _TICKS_S[-1])
    page = _PAGE.format(
        title="The same samples, packed and by variable micro-batches",
        result=html.escape(comparison.result[0].upper() + comparison.result[1:] + "."),
        how=html.escape(comparison.how[0].upper() + comparison.how[1:]),
        picture=drawn(panes, legend_of_kinds(), tick_s=tick_s),
        rows="\n".join(_row(way) for way in comparison.ways),
        link=_LINK if (of_run := path.parent / PAGE_FILE).exists() else "",
    )
    write_output(path, page)
    if path.name in RUN_FILES and of_run.exists():
        write_output(of_run, with_file(of_run.read_text(encoding="utf-8"), path.name))


def _pane(way: Way) -> Pane:
    step = way.steps[0]
    head = f"{way.name}: {figure(step.step_s, 3)} s, {percent(step.idle_ratio, 0)} idle"
    return Pane(head=html.escape(head), replicas=step.replicas)


def _row(way: Way) -> str:
    figures = (
        f"{figure(way.step_s, 3)} s",
        f"{figure(way.predicted_s, 3)} s",
        percent(way.idle_ratio),
        percent(way.padding_ratio),
        way.micro_batches,
    )
    cells = "".join(f"<td>{html.escape(one)}</td>" for one in figures)
    return f"<tr><th>{html.escape(way.name)}<small>{html.escape(way.detail)}</small></th>{cells}</tr>"
