"""The timeline of a run as one self-contained HTML page, as Chrome JSON, and as a small file from which to redraw it.

A page shows one step at a time: its simulated spans above the measured ones, on one time axis. Bubble ratios count
waits as idle time, since a rank that waits for a peer does no work.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from dynapipe_ext.errors import DataError
from dynapipe_ext.timeline import Trace, chrome_events
from dynapipe_ext.tools.files import write_atomic, write_output

FORMAT = "dynapipe-trace/1"

SpanKind = Literal["F", "B", "I", "W", "reduce", "wait", "other"]
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_WAITS = ("wait", "recv", "idle", "stall")
_REDUCTIONS = (
    "reduce",
    "all-reduce",
    "allreduce",
    "all_reduce",
    "optimizer",
    "optim",
    "step",
    "finish",
    "clip",
    "sync",
)
_COLUMNS = ("rank", "label", "shape", "start_ns", "end_ns", "cpu_ns", "bytes")


def span_kind(label: str) -> SpanKind:
    """The colour class of a span by its label.

    >>> [span_kind(label) for label in ("2F0", "0I11", "wait 1F3", "reduce gradients", "load")]
    ['F', 'I', 'wait', 'reduce', 'other']
    """
    if match := _ACTION.fullmatch(label):
        kind: SpanKind = match[2]  # type: ignore[assignment]  # the pattern admits only F, B, I and W
        return kind
    lower = label.lower()
    if lower.startswith(_WAITS):
        return "wait"
    return "reduce" if lower.startswith(_REDUCTIONS) else "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """The content of a page. Traces of one name are one step; see `pair_steps`."""

    measured: tuple[Trace, ...] = ()
    simulated: tuple[Trace, ...] = ()
    title: str = ""
    subtitle: str = ""
    notes: tuple[str, ...] = ()
    rank_names: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """The figures above a pane. `micro_batches` counts per replica; `busy` is each rank's busy share of the
    makespan."""

    makespan_s: float
    bubble_ratio: float
    micro_batches: Mapping[str, int]
    peak_bytes: int
    busy: Mapping[int, float]


def replica_of(rank_name: str) -> str:
    """
    >>> replica_of("dp1 pp0 tp0"), replica_of("rank 3")
    ('dp1', '')
    """
    match = re.search(r"\bdp\d+\b", rank_name)
    return match[0] if match else ""


def summarize(trace: Trace, rank_names: Mapping[int, str]) -> TraceSummary:
    """The figures of a trace. Waits count as idle time, and the peak is the largest of all ranks."""
    makespan_s = trace.makespan_s
    worked: dict[int, list[tuple[float, float]]] = {span.rank: [] for span in trace.spans}
    micro_batches: set[tuple[str, str]] = set()
    for span in trace.spans:
        if span_kind(span.label) != "wait":
            worked[span.rank].append((span.start_s, span.end_s))
        if match := _ACTION.fullmatch(span.label):
            micro_batches.add((replica_of(rank_names.get(span.rank, "")), match[3]))
    busy_s = {rank: _covered_s(intervals) for rank, intervals in sorted(worked.items())}
    whole_s = makespan_s * len(busy_s)
    return TraceSummary(
        makespan_s=makespan_s,
        bubble_ratio=1.0 - sum(busy_s.values()) / whole_s if whole_s > 0 else 0.0,
        micro_batches=dict(sorted(Counter(replica for replica, _ in micro_batches).items())),
        peak_bytes=max((span.num_bytes for span in trace.spans), default=0),
        busy={rank: s / makespan_s if makespan_s > 0 else 0.0 for rank, s in busy_s.items()},
    )


def _covered_s(intervals: list[tuple[float, float]]) -> float:
    """Length of the union, so that nested spans (a reduction inside an optimizer step) count once."""
    covered_s, end_s = 0.0, -math.inf
    for start_s, stop_s in sorted(intervals):
        covered_s += max(0.0, stop_s - max(start_s, end_s))
        end_s = max(end_s, stop_s)
    return covered_s


def pair_steps(measured: Sequence[Trace], simulated: Sequence[Trace]) -> list[tuple[str, Trace | None, Trace | None]]:
    """(name, measured, simulated) of every step. Steps pair by name where names are unique and shared, else by
    position.

    >>> [(n, m is not None, s is not None) for n, m, s in pair_steps([Trace((), "step 9")], [Trace(()), Trace(())])]
    [('step 9', True, True), ('step 1', False, True)]
    """
    by_name = {trace.name: trace for trace in measured}, {trace.name: trace for trace in simulated}
    unique = len(by_name[0]) == len(measured) and len(by_name[1]) == len(simulated)
    if unique and "" not in by_name[0] | by_name[1] and by_name[0].keys() & by_name[1].keys():
        names = list(dict.fromkeys([*by_name[0], *by_name[1]]))
        return [(name, by_name[0].get(name), by_name[1].get(name)) for name in names]
    return [
        ((ours.name if ours else "") or (theirs.name if theirs else "") or f"step {i}", ours, theirs)
        for i, (ours, theirs) in enumerate(zip_longest(measured, simulated))
    ]


def write_trace_html(
    path: str | Path,
    *,
    measured: Sequence[Trace],
    simulated: Sequence[Trace],
    title: str,
    subtitle: str = "",
    notes: Sequence[str] = (),
    rank_names: Mapping[int, str],
) -> None:
    """Write one page that needs no network: the timeline of every rank, simulated above measured.

    `rank_names` ("dp0 pp1 tp0") group the rows by replica and order them by pipeline rank. Ranks without a name show
    their number. Errors: DataError for spans with times that are not finite, or that end before they start.
    """
    record = TraceRecord(measured=tuple(measured), simulated=tuple(simulated), rank_names=rank_names)
    heading = f'<h1>{html.escape(title)}</h1><p class="subtitle">{html.escape(subtitle)}</p>'
    body = f'<header class="heading">{heading}</header>\n{notes_html(notes)}\n{timeline_html(record)}'
    write_output(path, page_html(title, body))


def page_html(title: str, body: str, *, styles: Sequence[str] = (), head: str = "") -> str:
    """A whole page around a body, with no part outside of it; `styles` are further files of this package's pages."""
    style = "".join(map(_page_part, ("page.css", *styles)))
    return _filled("page.html", {"TITLE": html.escape(title), "STYLE": style, "HEAD": head, "BODY": body})


def notes_html(notes: Sequence[str]) -> str:
    """A box with what readers must know; empty without any."""
    shown_notes = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f'<aside class="notes" role="note">{shown_notes}</aside>' if notes else ""


def timeline_html(record: TraceRecord) -> str:
    """The part of a page that draws the steps of a record, with all that it needs; once a page. Errors: DataError, as
    of `write_trace_html`."""
    names = record.rank_names
    steps = [
        {
            "name": name,
            "measured": _pane(ours, names) if ours else None,
            "simulated": _pane(theirs, names) if theirs else None,
        }
        for name, ours, theirs in pair_steps(record.measured, record.simulated)
    ]
    data = {"steps": steps, "rank_names": {str(rank): name for rank, name in sorted(names.items())}}
    scripts = {"VIEW": _page_part("view.js"), "DRAW": _page_part("draw.js"), "INPUT": _page_part("input.js")}
    return _filled("timeline.html", {**scripts, "DATA": script_json(data)})


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """What a template has in double braces, replaced once: marks in what is filled in stay."""
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], _page_part(template))


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element: it cannot end the element or open a comment.

    >>> script_json("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII only, so U+2028 is escaped already
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _page_part(name: str) -> str:
    return (files("dynapipe_ext.tools.show") / "trace_page" / name).read_text(encoding="utf-8")


def _pane(trace: Trace, rank_names: Mapping[int, str]) -> dict[str, Any]:
    columns = _columns(trace)
    summary = summarize(trace, rank_names)
    return {
        **columns,
        "kinds": [span_kind(label) for label in columns["labels"]],
        "makespan_ns": round(summary.makespan_s * 1e9),
        "bubble_ratio": summary.bubble_ratio,
        "micro_batches": summary.micro_batches,
        "peak_bytes": summary.peak_bytes,
        "busy": {str(rank): share for rank, share in summary.busy.items()},
    }


def _columns(trace: Trace) -> dict[str, Any]:
    """A trace as parallel lists with tables of labels and shapes, a third of the size of one object for each span.

    Pieces of cut samples are a table as well, with null for spans of other micro-batches.
    """
    labels: dict[str, int] = {}
    shapes: dict[tuple[int, ...], int] = {}
    columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}
    for span in trace.spans:
        times = (span.start_s, span.end_s, span.cpu_s)
        if not all(map(math.isfinite, times)) or span.end_s < span.start_s:
            raise DataError(
                f"span {span.label!r} of rank {span.rank} runs from {span.start_s} to {span.end_s} s with {span.cpu_s}"
                " CPU s: times must be finite and end after they start; check the clock of the recorder"
            )
        row = (
            span.rank,
            labels.setdefault(span.label, len(labels)),
            shapes.setdefault(span.shape, len(shapes)),
            *(round(t * 1e9) for t in times),
            span.num_bytes,
        )
        for name, value in zip(_COLUMNS, row, strict=True):
            columns[name].append(value)
    pieces = {piece: place for place, piece in enumerate(dict.fromkeys(s.piece for s in trace.spans if s.piece))}
    carried = {
        "pieces": [astuple(piece) for piece in pieces],
        "piece": [pieces[span.piece] if span.piece else None for span in trace.spans],
    }
    return {
        "name": trace.name,
        "labels": list(labels),
        "shapes": [list(shape) for shape in shapes],
        **columns,
        **(carried if pieces else {}),
    }


def write_trace_file(path: str | Path, record: TraceRecord) -> None:
    """Write a record as `dynapipe-trace/1` JSON, with times in nanoseconds."""
    data = {
        "format": FORMAT,
        "title": record.title,
        "subtitle": record.subtitle,
        "notes": list(record.notes),
        "rank_names": {str(rank): name for rank, name in sorted(record.rank_names.items())},
        "measured": [_columns(trace) for trace in record.measured],
        "simulated": [_columns(trace) for trace in record.simulated],
    }
    write_atomic(path, json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n")


def write_chrome_trace(path: str | Path, traces: Sequence[Trace]) -> None:
    """Chrome trace JSON (chrome://tracing, ui.perfetto.dev): one process a trace, one thread a rank."""
    events = [event for process, trace in enumerate(traces) for event in chrome_events(trace, process)]
    write_atomic(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False) + "\n")
