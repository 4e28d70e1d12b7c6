"""Plans as SVG: panes of pipeline ranks one above the other on one time axis, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dynapipe_ext.schedules.actions import Action
from dynapipe_ext.schedules.step_plan import StepPlan

WIDTH, LEFT, RIGHT, BAR, ROW, PANE_GAP, HEAD = 1000, 72, 14, 13, 15, 16, 24
_STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#5b6675}.head{font-weight:650;fill:#1b2330}"
    ".name{text-anchor:end}.tick{text-anchor:middle}.bound{stroke:#1b2330;stroke-dasharray:4 3}"
    ".page{fill:#fff}.row{fill:#f3f5f8}"
    "@media(prefers-color-scheme:dark){text{fill:#9aa6b5}.head{fill:#e7ebf0}.bound{stroke:#e7ebf0}"
    ".page{fill:#12161c}.row{fill:#20262f}}</style>\n"
)
FillOf = Callable[[int, Action], str]  # replica, action -> colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Pane:
    """A plan, the line above it, and the colour of each of its actions."""

    head: str
    plan: StepPlan
    fill_of: FillOf


def drawn(panes: Mapping[str, Pane], legend: Iterator[str], *, least_s: float, tick_s: float = 1.0) -> str:
    """An SVG of plans of one batch by name, with a dashed line at `least_s`, below which no plan ends."""
    scale = (WIDTH - LEFT - RIGHT) / max(pane.plan.makespan_s for pane in panes.values())
    parts, top = [], 30
    for pane in panes.values():
        parts.append(f'<text x="{LEFT}" y="{top + 15}" class="head">{pane.head}</text>')
        rows_top = top + HEAD
        parts += _rows(pane, rows_top, scale)
        top = rows_top + _height(pane.plan) + PANE_GAP
    x = LEFT + least_s * scale
    parts.append(f'<path class="bound" d="M{x:.1f} 30V{top}"/><text x="{x + 4:.1f}" y="{top}">bound</text>')
    for tick in range(0, int((WIDTH - LEFT - RIGHT) / scale / tick_s) + 1):
        at_s = tick * tick_s
        parts.append(f'<text x="{LEFT + at_s * scale:.1f}" y="{top + 16}" class="tick">{at_s:g} s</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 24}" role="img"'
        f' aria-label="{" over ".join(panes)}: the same batch on one time axis">\n'
        f'{_STYLE}<rect width="100%" height="100%" class="page"/>\n' + "\n".join([*legend, *parts]) + "\n</svg>\n"
    )


def _height(plan: StepPlan) -> int:
    return sum(len(schedule.ranks) * ROW + 5 for schedule in plan.schedules)


def _rows(pane: Pane, top: int, scale: float) -> Iterator[str]:
    """The ranks of every replica; actions of one colour are one path."""
    paths: dict[str, list[str]] = {}
    for replica, schedule, trace in zip(pane.plan.batch.replicas, pane.plan.schedules, pane.plan.traces, strict=True):
        spans = trace.by_rank()
        for rank in range(len(schedule.ranks)):
            y = top + rank * ROW
            yield f'<path d="M{LEFT} {y}h{WIDTH - LEFT - RIGHT}v{BAR}H{LEFT}z" class="row"/>'
            yield f'<text x="{LEFT - 7}" y="{y + 11}" class="name">dp{replica.dp_rank} pp{rank}</text>'
            for span in spans[rank]:
                x, end = (round(LEFT + at_s * scale, 1) for at_s in (span.start_s, span.end_s))
                fill = pane.fill_of(replica.dp_rank, Action.parse(span.label))
                paths.setdefault(fill, []).append(f"M{x:g} {y}H{end:g}v{BAR}H{x:g}z")
        top += len(schedule.ranks) * ROW + 5
    for fill, path in paths.items():
        yield f'<path fill="{fill}" stroke="#fff" stroke-width=".15" d="{"".join(path)}"/>'
