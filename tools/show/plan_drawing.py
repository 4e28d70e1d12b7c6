"""Plans as SVG: panes of pipeline ranks one above the other on one time axis, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dynapipe_ext.schedules.actions import Action, Kind
from dynapipe_ext.timeline import Trace

WIDTH, LEFT, RIGHT, BAR, ROW, PANE_GAP, HEAD = 1000, 72, 14, 13, 15, 16, 24
_STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#5b6675}.head{font-weight:650;fill:#1b2330}"
    ".name{text-anchor:end}.tick{text-anchor:middle}.bound{stroke:#1b2330;stroke-dasharray:4 3}"
    ".page{fill:#fff}.row{fill:#f3f5f8}"
    "@media(prefers-color-scheme:dark){text{fill:#9aa6b5}.head{fill:#e7ebf0}.bound{stroke:#e7ebf0}"
    ".page{fill:#12161c}.row{fill:#20262f}}</style>\n"
)
FILLS = {
    Kind.FORWARD: ("#5b9bdb", "forward"),
    Kind.BACKWARD: ("#ec9a4c", "backward"),
    Kind.BACKWARD_INPUT: ("#3fae9c", "input gradient"),
    Kind.BACKWARD_WEIGHT: ("#a583d9", "weight gradient"),
}
FillOf = Callable[[int, Action], str]  # replica, action -> colour


def fill_by_kind(replica: int, action: Action) -> str:
    return FILLS[action.kind][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pane:
    """The pipeline ranks of a step's replicas, the line above them, and the colour of each action."""

    head: str
    replicas: Sequence[Trace]
    fill_of: FillOf = fill_by_kind

    @property
    def end_s(self) -> float:
        return max(span.end_s for trace in self.replicas for span in trace.spans)


def legend_of_kinds() -> Iterator[str]:
    """What the colours of `fill_by_kind` mean."""
    x = LEFT
    for fill, name in FILLS.values():
        yield f'<rect x="{x}" y="8" width="20" height="11" fill="{fill}"/><text x="{x + 25}" y="18">{name}</text>'
        x += 50 + 7 * len(name)
    yield f'<text x="{WIDTH - RIGHT}" y="18" class="name">a row is a rank; the same samples in each</text>'


def drawn(
    panes: Mapping[str, Pane], legend: Iterable[str], *, least_s: float | None = None, tick_s: float = 1.0
) -> str:
    """An SVG of steps of one batch by name, with a dashed line at `least_s`, if given, before which no plan ends."""
    scale = (WIDTH - LEFT - RIGHT) / max(pane.end_s for pane in panes.values())
    parts, top = [], 30
    for pane in panes.values():
        parts.append(f'<text x="{LEFT}" y="{top + 15}" class="head">{pane.head}</text>')
        rows_top = top + HEAD
        parts += _rows(pane, rows_top, scale)
        top = rows_top + _height(pane) + PANE_GAP
    if least_s is not None:
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


def _height(pane: Pane) -> int:
    return sum(len(trace.ranks) * ROW + 5 for trace in pane.replicas)


def _rows(pane: Pane, top: int, scale: float) -> Iterator[str]:
    """The ranks of every replica; actions of one colour are one path."""
    paths: dict[str, list[str]] = {}
    for replica, trace in enumerate(pane.replicas):
        spans = trace.by_rank()
        for rank in trace.ranks:
            y = top + rank * ROW
            yield f'<path d="M{LEFT} {y}h{WIDTH - LEFT - RIGHT}v{BAR}H{LEFT}z" class="row"/>'
            yield f'<text x="{LEFT - 7}" y="{y + 11}" class="name">dp{replica} pp{rank}</text>'
            for span in spans[rank]:
                x, end = (round(LEFT + at_s * scale, 1) for at_s in (span.start_s, span.end_s))
                fill = pane.fill_of(replica, Action.parse(span.label))
                paths.setdefault(fill, []).append(f"M{x:g} {y}H{end:g}v{BAR}H{x:g}z")
        top += len(trace.ranks) * ROW + 5
    for fill, path in paths.items():
        yield f'<path fill="{fill}" stroke="#fff" stroke-width=".15" d="{"".join(path)}"/>'
