"""The page of a run: how it stands in sentences, its figures over steps, a step's timeline, and what happened around.

    RunSoFar, RunPage ─► run_page_html ─► index.html in the run's directory

The page is one file without network. It is written while the run goes on, too, at a cost that does not grow with it.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from dynapipe_ext.errors import format_bytes
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import shared_cores_note
from dynapipe_ext.tools.account.run_events import Happening
from dynapipe_ext.tools.account.run_series import RunSeries, RunSoFar, Thinned
from dynapipe_ext.tools.console import counted, figure, percent, seconds
from dynapipe_ext.tools.progress import format_eta
from dynapipe_ext.tools.show.charts import Chart, Line, chart_html
from dynapipe_ext.tools.show.run_words import (
    NextMove,
    SettingTables,
    shown_setting,
    slowest_actions,
    summary_sentences,
    without_credentials,
)
from dynapipe_ext.tools.show.timeline import TraceRecord, notes_html, page_html, timeline_html

PAGE_FILE = "index.html"
_FILES_END = "</ul><!-- files -->"
_REFRESH_S = 30
_MOST_RANKS = 64
_MOST_COLOURS = 5

# What a run's directory may hold, by its name.
RUN_FILES = {
    "report.json": "the figures of the run",
    "events.jsonl": "a line a step",
    "history.jsonl": "saves, restarts and faults",
    "config.toml": "the settings, defaults included",
    "costs.json": "the costs that its plans start from",
    "trace.json": "the recorded steps, to be read again",
    "trace.chrome.json": "the same for ui.perfetto.dev",
    "emulated.html": "the same samples under other schedules, on emulated ranks",
    "checkpoints": "what --resume goes on from",
    "tensorboard": "for TensorBoard",
    "data": "the tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """What a page shows beside the figures of its steps.

    `unfinished` says why the run ended early. `record` has the recorded steps, None until the end; `moves` what was
    tried for the next run, None where nothing was. `files` are those of RUN_FILES that are there.
    """

    name: str
    now: datetime
    settings: SettingTables
    history: Sequence[Happening] = ()
    going_on: bool = False
    unfinished: str | None = None
    record: TraceRecord | None = None
    moves: Sequence[NextMove] | None = None
    num_tried: int = 0
    files: Sequence[str] = ()

    @property
    def limit_bytes(self) -> int:
        gigabytes = self.settings.get("plan", {}).get("memory_limit_gb", 0)
        return round(gigabytes * 1e9) if isinstance(gigabytes, int | float) else 0


def text(value: str) -> str:
    """As it stands in a page: no markup, and no credentials of an address."""
    return html.escape(without_credentials(value))


def run_page_html(run: RunSoFar, page: RunPage) -> str:
    """The whole page. Errors: DataError for a record with impossible times."""
    sections = (
        _heading(run, page),
        _charts(run, page),
        _compared(run),
        _memory(run),
        _timeline(run, page),
        _slowest(run, page),
        _furthest_off(run.own),
        _next_moves(page),
        _history(run.own, page),
        _settings(page.settings),
        _files(page.files),
        f'<p class="written">Written {text(page.now.isoformat(sep=" ", timespec="seconds"))}.</p>',
    )
    body = "\n".join(('<div class="page">', *filter(None, sections), "</div>", ""))
    head = f'<meta http-equiv="refresh" content="{_REFRESH_S}">\n' if page.going_on else ""
    return page_html(f"Run {page.name}", body, styles=("run.css",), head=head)


def table_html(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = (), stacks: bool = False
) -> str:
    """A table that scrolls by itself where it is too wide; one that `stacks` breaks its rows there instead. Cells are
    markup. `numbers` are columns set to the right; of the others the last one is the widest."""
    kinds = ["n" if i in numbers else "w" if i == len(headings) - 1 else "k" for i in range(len(headings))]
    columns = [f'class="{kind}" data-name="{text(name)}"' for kind, name in zip(kinds, headings, strict=True)]
    head = "".join(f"<th {column}>{text(name)}</th>" for column, name in zip(columns, headings, strict=True))
    lines = [[f"<td {column}>{cell}</td>" for column, cell in zip(columns, row, strict=True)] for row in rows]
    body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll{" stack" * stacks}">{table}</div>'


def _heading(run: RunSoFar, page: RunPage) -> str:
    kind, state = ("early", "ended early") if page.unfinished else ("done", "done")
    kind, state = ("going", "goes on") if page.going_on else (kind, state)
    label = run.own.label
    sentences = list(
        summary_sentences(run, going_on=page.going_on, unfinished=page.unfinished, limit_bytes=page.limit_bytes)
    )
    notes = [sentences[-1]] if run.facts.oversubscribed and run.own.last is not None else []
    summary = "".join(f"<p>{text(sentence)}</p>" for sentence in (sentences[:-1] if notes else sentences))
    versions = ", ".join(f"{name} {version}" for name, version in run.facts.versions.items())
    return (
        f'<header><h1>Run {text(page.name)} <span class="badge {kind}">{state}</span></h1>'
        f'<p class="subtitle">{text(f"{label.layout} layout, {label.schedule} schedule; begun {run.facts.date}")}<br>'
        f"{text(versions)}</p></header>"
        f'<section class="summary" aria-label="Summary">{summary}</section>{_tiles(run.own)}{notes_html(notes)}'
    )


def _tiles(own: RunSeries) -> str:
    if own.last is None:
        return ""
    peak = max(own.gathered.peak_bytes, default=None) if own.gathered else None
    loss = own.loss.points()
    tiles = (
        ("loss", f"{loss[-1].mean:.4f}" if loss else "not finite"),
        ("tokens a second", "–" if own.real_tokens_per_s is None else f"{own.real_tokens_per_s:,.0f}"),
        ("padding", percent(own.padding_share)),
        ("bubble", percent(own.measured_bubble.mean)),
        ("longer than predicted", percent(own.drift_share, signed=True)),
        ("fullest rank", "–" if peak is None else format_bytes(peak)),
        ("time in steps", format_eta(own.elapsed_s)),
    )
    cells = "".join(f'<div class="tile"><span>{text(name)}</span><b>{text(shown)}</b></div>' for name, shown in tiles)
    return f'<section class="tiles" aria-label="Figures">{cells}</section>'


def _bytes(value: float) -> str:
    return format_bytes(round(value)) if value > 0 else "0"


def _signed(value: float) -> str:
    return percent(value, 0, signed=True)


def _count(value: float) -> str:
    return figure(value, 3)


def _charts(run: RunSoFar, page: RunPage) -> str:
    charts = _loss_chart(run), *figure_charts([("", run.own)], page.limit_bytes)
    drawn = "".join(map(chart_html, charts))
    return f'<h2>Over the steps</h2><section class="charts">{drawn}</section>' if drawn else ""


def _loss_chart(run: RunSoFar) -> Chart:
    """The losses of all ways of planning, and the validation losses of the job itself."""
    one_way = len(run.variants) == 1
    lines = [
        Line(name="loss" if one_way else one.label.name, points=one.loss.points(), colour=i % (_MOST_COLOURS - 1))
        for i, one in enumerate(run.variants)
    ]
    lines.append(Line(name="validation", points=run.own.validation.points(), colour=_MOST_COLOURS - 1, dots=True))
    return Chart(title="Loss", lines=lines, show=_count)


def figure_charts(runs: Sequence[tuple[str, RunSeries]], limit_bytes: int = 0) -> Iterator[Chart]:
    """The figures of one run, or of several on the same axes, by their names; the loss apart."""

    def chart(
        title: str,
        series: Callable[[RunSeries], Thinned],
        show: Callable[[float], str] = _count,
        predicted: Callable[[RunSeries], Thinned] | None = None,
        *,
        from_zero: bool = True,
        bound: float | None = None,
        note: str = "",
    ) -> Chart:
        lines = []
        for i, (name, one) in enumerate(runs):
            measured_name = name if len(runs) > 1 else "measured" if predicted else ""
            lines.append(Line(name=measured_name, points=series(one).points(), colour=i))
            if predicted:
                predicted_name = f"{name}, predicted" if len(runs) > 1 else "predicted"
                colour = i if len(runs) > 1 else 1
                lines.append(Line(name=predicted_name, points=predicted(one).points(), colour=colour, dashed=True))
        return Chart(title=title, lines=lines, show=show, from_zero=from_zero, bound=bound, note=note)

    yield chart("Learning rate", lambda one: one.learning_rate)
    yield chart("Gradient norm before clipping", lambda one: one.grad_norm)
    yield chart("Real tokens a second", lambda one: one.tokens_per_s)
    yield chart("Padding, of all positions", lambda one: one.padding, percent)
    yield chart("Bubble", lambda one: one.measured_bubble, percent, lambda one: one.predicted_bubble)
    yield chart(
        "Most bytes of a rank",
        lambda one: one.measured_bytes,
        _bytes,
        lambda one: one.predicted_bytes,
        bound=limit_bytes or None,
    )
    note = _fits_note(runs[0][1]) if len(runs) == 1 else ""
    yield chart("Drift: longer than predicted", lambda one: one.drift, _signed, note=note)
    yield chart("Reward margin", lambda one: one.margin, from_zero=False)
    yield chart("Preferred rightly, of pairs", lambda one: one.accuracy, percent, from_zero=False)


def _fits_note(own: RunSeries) -> str:
    if not own.fits:
        return ""
    shown = [
        f"after step {number:,} ({percent(f.error_before)} off → {percent(f.error_after)})" for number, f in own.fits
    ]
    return f"Costs were fitted {', '.join(shown[-3:])}."


def _compared(run: RunSoFar) -> str:
    """The ways of planning that ran beside one another."""
    if len(run.variants) < 2:
        return ""
    rows = []
    for one in run.variants:
        loss, rate, cpu_s = one.loss.points(), one.real_tokens_per_s, one.cpu_s_per_token
        rows.append(
            [
                f"<b>{text(one.label.name)}</b>" if one is run.own else text(one.label.name),
                "–" if rate is None else f"{rate:,.0f}",
                "–" if cpu_s is None else f"{1e6 * cpu_s:,.1f} µs",
                percent(one.padding_share),
                percent(one.measured_bubble.mean),
                f"{loss[-1].mean:.4f}" if loss else "–",
            ]
        )
    headings = ("planned by", "tokens/s", "CPU a token", "padding", "bubble", "last loss")
    return f"<h2>The same samples, planned otherwise</h2>{table_html(headings, rows, numbers=range(1, 6))}"


def _memory(run: RunSoFar) -> str:
    """The most bytes of each rank, measured and predicted."""
    ranks, topology = run.own.gathered, run.facts.topology
    if ranks is None or not any(ranks.peak_bytes) or len(ranks.peak_bytes) != topology.world_size:
        return ""  # also of a run that has gone on with other ranks, until they have run a step
    most = max(*ranks.peak_bytes, *ranks.predicted_peak_bytes, 1)
    rows = []
    for rank, (measured, predicted) in enumerate(zip(ranks.peak_bytes, ranks.predicted_peak_bytes, strict=False)):
        me = topology.coordinates(rank)
        off = percent(measured / predicted - 1, 0, signed=True) if predicted else "–"
        bar = f'<span class="bar"><i style="width:{100 * measured / most:.1f}%"></i></span>'
        place = f"dp{me.dp_rank} pp{me.pp_rank} tp{me.tp_rank}"
        rows.append([str(rank), place, format_bytes(measured), format_bytes(predicted), off, bar])
    shown = rows[:_MOST_RANKS]
    rest = f'<p class="quiet">and {counted(len(rows) - len(shown), "rank")} more</p>' if len(rows) > len(shown) else ""
    headings = ("rank", "place", "measured", "predicted", "off by", "")
    return f"<h2>Most memory of each rank</h2>{table_html(headings, shown, numbers=(0, 2, 3, 4))}{rest}"


def _timeline(run: RunSoFar, page: RunPage) -> str:
    """Its notes, but what the heading says already."""
    heading = "<h2>A step's timeline, simulated above measured</h2>"
    if page.record is None or not (page.record.measured or page.record.simulated):
        words = (
            "The last steps are recorded, and drawn here once the run has ended."
            if page.going_on
            else ("No step was recorded: the run ended before its last ones.")
        )
        return f'{heading}<p class="quiet">{words}</p>'
    facts = run.facts
    shared = shared_cores_note(facts.topology.world_size, facts.num_cores) if facts.oversubscribed else None
    notes = notes_html([note for note in page.record.notes if note != shared])
    return f"{heading}{notes}{timeline_html(page.record)}"


def _slowest(run: RunSoFar, page: RunPage) -> str:
    actions = slowest_actions(page.record, on_cpu=run.facts.device.startswith("cpu")) if page.record else []
    if not actions:
        return ""
    rows = [
        [
            text(one.step),
            text(f"{one.label} on {one.rank}"),
            text(one.shape),
            seconds(one.measured_s),
            seconds(one.predicted_s),
            text(one.why),
        ]
        for one in actions
    ]
    headings = ("step", "action", "rows × length", "measured", "predicted", "why")
    return f"<h2>Slowest actions</h2>{table_html(headings, rows, numbers=(3, 4), stacks=True)}"


def _furthest_off(own: RunSeries) -> str:
    shapes = own.furthest_off(8)
    if not shapes:
        return ""
    rows = [
        [
            text(str(one)),
            seconds(one.measured_s),
            seconds(one.predicted_s),
            percent(one.measured_s / one.predicted_s - 1 if one.predicted_s > 0 else None, 0, signed=True),
        ]
        for one in shapes
    ]
    headings = ("actions", "measured", "predicted", "off by")
    table = table_html(headings, rows, numbers=(1, 2, 3))
    words = "Of each step's actions the shape that was furthest from its plan, in seconds over all steps."
    return f'<h2>Furthest from prediction</h2><p class="quiet">{words}</p>{table}'


def _next_moves(page: RunPage) -> str:
    if page.moves is None:
        return ""
    heading = "<h2>What to try next</h2>"
    tried = f"{counted(page.num_tried, 'change')} of settings, each planned on the last batches of this run"
    if not page.moves:
        return f'{heading}<p class="quiet">Tried: {tried}. None is predicted to be faster.</p>'
    rows = [[f"<code>{text(m.flags)}</code>", percent(m.gain, signed=True), text(m.words)] for m in page.moves]
    table = table_html(("flags", "predicted", "what it changes"), rows, numbers=(1,), stacks=True)
    words = f"Tried: {tried}. The gain is in tokens a second, by prediction; measure before you rely on it."
    return f'{heading}<p class="quiet">{words}</p>{table}'


def _history(own: RunSeries, page: RunPage) -> str:
    steps = [(number, "refused", f"the step changed no weight: {why}") for number, why in own.refused]
    steps += [
        (number, "fitted", f"costs: actions were {percent(fit.error_before)} off, now {percent(fit.error_after)}")
        for number, fit in own.fits
    ]
    rows = [[text(one.date), str(one.steps or ""), one.kind, text(one.text)] for one in page.history]
    rows += [["", str(number), kind, text(words)] for number, kind, words in sorted(steps)]
    if not rows:
        return ""
    headings = ("when", "after step", "what", "")
    return f"<h2>Events</h2>{table_html(headings, rows, numbers=(1,), stacks=True)}"


def changed_settings(settings: SettingTables) -> Iterator[tuple[str, str, str]]:
    """(name, value, default) of the settings that are not at their defaults."""
    defaults = TrainConfig().to_json()
    for table, values in settings.items():
        for name, value in values.items():
            default = defaults.get(table, {}).get(name)
            if value != (list(default) if isinstance(default, tuple) else default):
                yield f"[{table}] {name}", shown_setting(name, value), shown_setting(name, default)


def _settings(settings: SettingTables) -> str:
    if not settings:
        return ""
    changed = [[text(name), text(default), text(value)] for name, value, default in changed_settings(settings)]
    every = [
        [text(f"[{table}] {name}"), text(shown_setting(name, value))]
        for table, values in settings.items()
        for name, value in values.items()
    ]
    other = table_html(("setting", "default", "here"), changed) if changed else '<p class="quiet">All are defaults.</p>'
    return (
        f"<h2>Settings that are not defaults</h2>{other}"
        f"<details><summary>All {len(every)} settings</summary>{table_html(('setting', 'value'), every)}</details>"
    )


def _files(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f'<h2>Files</h2><ul class="files">{"".join(map(_file_entry, names))}{_FILES_END}'


def _file_entry(name: str) -> str:
    return f'<li><a href="{name}">{name}</a> {text(RUN_FILES[name])}</li>'


def with_file(page: str, name: str) -> str:
    """A written page with a link to one more of RUN_FILES, which was made after it."""
    entry = _file_entry(name)
    return page if entry in page else page.replace(_FILES_END, entry + _FILES_END)
