"""Line charts as SVG, for pages without scripts: figures over steps, in the colours of the page around them.

A chart is drawn once, on a server's side, so it prints, works from a file, and follows dark and light by the page's
styles (`.line.c0`, `.band.c0` …). Text is escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dynapipe_ext.tools.account.run_series import Point

_WIDTH, _HEIGHT = 440, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 10, 8, 24
_FEW = 40  # points that are marked one by one, or joined without a running mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A figure in a chart. `colour` counts from 0; `dashed` for what was predicted; `dots` alone for rare points."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Figures over steps. `show` spells a value; `from_zero` has the axis begin there; `bound` is a level to draw."""

    title: str
    lines: Sequence[Line]
    show: Callable[[float], str]
    from_zero: bool = False
    bound: float | None = None
    note: str = ""


def chart_html(chart: Chart) -> str:
    """A figure element; empty where no line has a point."""
    lines = [line for line in chart.lines if line.points]
    if not lines:
        return ""
    legend = "".join(_legend_entry(line, chart.show) for line in lines)
    note = f'<p class="chart-note">{html.escape(chart.note)}</p>' if chart.note else ""
    caption = f'<figcaption><h3>{html.escape(chart.title)}</h3><p class="keys">{legend}</p></figcaption>'
    return f'<figure class="chart">{caption}{_svg(chart, lines)}{note}</figure>'


def _legend_entry(line: Line, show: Callable[[float], str]) -> str:
    dash = " dashed" if line.dashed else ""
    shape = "dot" if line.dots else "dash"
    last = html.escape(show(line.points[-1].mean))
    return f'<span><i class="{shape}{dash} c{line.colour}"></i>{html.escape(line.name)} <b>{last}</b></span>'


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to pixels along one axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _svg(chart: Chart, lines: Sequence[Line]) -> str:
    xs = [edge for line in lines for edge in (line.points[0].first, line.points[-1].last)]
    first, last = min(xs), max(xs)
    low, high = _range_of(chart, lines)
    x = _Scale(first, last if last > first else first + 1, _LEFT, _WIDTH - _RIGHT)
    y = _Scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    label = html.escape(f"{chart.title} over steps {first} to {last}")
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">', *_axes(chart, x, y)]
    if chart.bound is not None and low <= chart.bound <= high:
        parts.append(f'<path class="bound" d="M{_LEFT} {y(chart.bound):.1f}H{_WIDTH - _RIGHT}"/>')
    parts += [_band(line, x, y) for line in lines if not line.dashed and not line.dots]
    parts += [part for line in lines for part in _drawn(line, x, y)]
    return "".join([*parts, "</svg>"])


def _range_of(chart: Chart, lines: Sequence[Line]) -> tuple[float, float]:
    """The values that the axis shows: of means, and of single steps where these are not far out."""
    means = [point.mean for line in lines for point in line.points]
    low, high = min(means), max(means)
    room = (high - low) or abs(high) or 1.0
    low = max(low - room, min(point.low for line in lines for point in line.points))
    high = min(high + room, max(point.high for line in lines for point in line.points))
    if chart.bound is not None and chart.bound <= high * 2:
        high = max(high, chart.bound)
    if chart.from_zero:
        low, high = min(0.0, low), max(0.0, high)
    margin = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    bottom = low if chart.from_zero and low == 0 else low - margin
    return bottom, high + margin


def ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Round values within a range.

    >>> ticks(0, 1), ticks(3.2, 7.9, 4), ticks(1, 3, whole=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [4.0, 6.0], [1.0, 2.0, 3.0])
    """
    if not high > low or not math.isfinite(high - low):
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * k for k in (1, 2, 5, 10) if power * k * most >= (high - low) * 0.999)
    step = max(1.0, step) if whole else step
    begin = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(begin, math.floor(high / step + 1e-9) + 1)]


def _axes(chart: Chart, x: _Scale, y: _Scale) -> Iterator[str]:
    for text, value in _told_apart(chart.show, y).items():
        at = y(value)
        yield f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="tick" x="{_LEFT - 7}" y="{at + 3.5:.1f}" text-anchor="end">{html.escape(text)}</text>'
    for value in ticks(x.low, x.high, whole=True):
        at = x(value)
        anchor = "end" if at > _WIDTH - 30 else "middle"
        yield f'<text class="tick" x="{at:.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{short_count(value)}</text>'


def _told_apart(show: Callable[[float], str], axis: _Scale) -> dict[str, float]:
    """As many ticks as have labels that differ: `show` may round narrow steps to the same."""
    for most in range(6, 0, -1):
        values = ticks(axis.low, axis.high, most)
        labels = {show(value + 0.0): value for value in values}
        if len(labels) == len(values):
            break
    return labels


def short_count(value: float) -> str:
    """
    >>> short_count(1200), short_count(20_000), short_count(1_500_000)
    ('1,200', '20k', '1.5M')
    """
    for scale, unit in ((1_000_000, "M"), (1_000, "k")):
        if value >= 10 * scale or (value >= scale and scale > 1_000):
            return f"{value / scale:g}{unit}"
    return f"{value:,.0f}"


def _band(line: Line, x: _Scale, y: _Scale) -> str:
    """From the least to the most of a step, where points are means of several."""
    if all(point.first == point.last for point in line.points):
        return ""
    low = [(x(point.middle), y(min(max(point.low, y.low), y.high))) for point in line.points]
    high = [(x(point.middle), y(min(max(point.high, y.low), y.high))) for point in line.points]
    return f'<path class="band c{line.colour}" d="{_path([*high, *reversed(low)])}Z"/>'


def _drawn(line: Line, x: _Scale, y: _Scale) -> Iterator[str]:
    places = [(x(point.middle), y(point.mean)) for point in line.points]
    few = len(places) <= _FEW
    if not line.dots:
        dash = " dashed" if line.dashed else ""
        faint = "" if few or line.dashed else " faint"
        yield f'<path class="line{dash}{faint} c{line.colour}" d="{_path(places)}"/>'
        if faint:
            yield f'<path class="line c{line.colour}" d="{_path(_running_means(places))}"/>'
    if line.dots or (few and not line.dashed):
        for at_x, at_y in places:
            yield f'<circle class="point c{line.colour}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="{3 if line.dots else 2}"/>'


def _running_means(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Over a twentieth of the points; near the start over fewer on both sides, as figures change fast there."""
    reach = max(1, len(places) // 40)
    means = []
    for i, (at_x, _) in enumerate(places):
        near = min(reach, i)
        around = [at_y for _, at_y in places[i - near : i + near + 1]]
        means.append((at_x, math.fsum(around) / len(around)))
    return means


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{at_x:.1f} {at_y:.1f}" for at_x, at_y in places)
