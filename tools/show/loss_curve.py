"""A picture of losses over steps and over real tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError, DataError, install_advice
from dynapipe_ext.tools.account.report import RunReport

CurvePoint = tuple[int, int, float]  # step, real tokens seen up to and including it, loss

# Okabe and Ito's colours, which stay apart under the common colour blindnesses; dashes tell lines apart in grey print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", (0, (5, 1.6)), (0, (1.5, 1.3)), (0, (6, 1.5, 1.5, 1.5)))
_INK, _GRID = "#2b3440", "#e4e8ed"


def curves(report: RunReport) -> dict[str, list[CurvePoint]]:
    """The loss curves of a report, by name."""
    return {
        result.name: [
            (number, tokens, loss)
            for number, (tokens, loss) in enumerate(
                zip(accumulate(result.real_tokens_per_step), result.losses, strict=True), result.first_step + 1
            )
        ]
        for result in (report.result, *(report.compare or ()))
    }


def validation_points(report: RunReport) -> list[CurvePoint]:
    """The validation losses of the job itself, as points for its loss curve."""
    result = report.result
    tokens = list(accumulate(result.real_tokens_per_step))
    return [(done.number, tokens[done.step - result.first_step], done.loss) for done in result.evaluations]


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Running means over up to `window` finite losses around each; nan stays nan. The sums are exact, and each loss
    enters and leaves them once.

    Near the start, where losses fall fast, the window shrinks on both sides; at the end only on the right.

    >>> smooth([4.0, 2.0, 3.0, 1.0, 5.0], 3)
    [4.0, 3.0, 2.0, 3.0, 3.0]
    """
    means: list[float] = []
    total = num_finite = 0
    begin = end = 0
    for i, loss in enumerate(losses):
        reach = min(window // 2, i)
        for sign, moved in (1, losses[end : i + reach + 1]), (-1, losses[begin : i - reach]):
            finite = [value for value in moved if math.isfinite(value)]
            total += sign * sum(map(_in_least_units, finite))
            num_finite += sign * len(finite)
        begin, end = i - reach, i + reach + 1
        means.append(total / (num_finite * _UNITS) if math.isfinite(loss) else math.nan)
    return means


_UNITS = 2**1074  # in 1: a float is a whole number of the smallest positive one


def _in_least_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * (_UNITS // denominator)


def write_loss_png(
    path: str | Path,
    curves: Mapping[str, Sequence[CurvePoint]],
    title: str,
    *,
    validation: Sequence[CurvePoint] = (),
) -> None:
    """Draw losses over steps: a line for each curve, labelled with its name and last value.

    Several curves are also drawn over real tokens. Where some lie on the first curve, another panel shows the distance
    of all from it. Long curves are faint, with their running mean on top. `validation` losses are points.

    Errors: DataError where no curve has a point; ConfigError without matplotlib.
    """
    drawn = {name: sorted(points) for name, points in curves.items() if points}
    if not drawn:
        raise DataError(f"no curve of {sorted(curves)} has a point: a loss curve needs at least one trained step")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ConfigError(f"the loss curve needs matplotlib: {install_advice('train')}") from error

    apart = differences(drawn)
    num_panels = min(len(drawn), 2) + bool(apart)
    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.07, wspace=0.05)
    figure = Figure(figsize=(6.0 * num_panels + 0.6, 4.3), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    for panel in panels[1 : min(len(drawn), 2)]:
        panel.sharey(panels[0])
    scale, unit = _token_unit(max(points[-1][1] for points in drawn.values()))
    for panel, column, label, per in zip(panels, (0, 1), ("step", f"real tokens{unit}"), (1, scale), strict=False):
        for i, (name, points) in enumerate(drawn.items()):
            xs = [point[column] / per for point in points]
            _line(panel, xs, [point[2] for point in points], name, i)
        _points(panel, [(point[column] / per, point[2]) for point in validation if math.isfinite(point[2])])
        _style(panel, label)
    panels[0].set_ylabel("loss", color=_INK)
    if apart:
        _distances(panels[-1], apart, next(iter(drawn)))
    _legend(figure, panels[0])
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold", color=_INK)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format="png", metadata={"Software": None})
    except OSError as error:
        raise DataError(f"{target} cannot be written ({error.strerror}): choose another directory") from error


def _legend(figure: Any, panel: Any) -> None:
    handles, labels = panel.get_legend_handles_labels()
    # A character of the legend takes about a fourteenth of an inch; a line sample and its margins about nine of them.
    fits = int(14 * figure.get_figwidth() // (9 + max(len(label) for label in labels)))
    columns = max(1, min(fits, len(labels)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _distances(panel: Any, apart: Mapping[str, Sequence[tuple[int, float]]], first: str) -> None:
    """How far the other curves are from the first one, on a logarithmic scale."""
    for i, distances in enumerate(apart.values(), 1):
        look = {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _DASHES[i % len(_DASHES)], "linewidth": 1.6}
        if distances:
            panel.plot(*zip(*distances, strict=True), marker="o", markersize=3, **look)
    _style(panel, "step")
    panel.set_yscale("log")
    panel.set_ylabel(f"distance from {first}", color=_INK)


def differences(curves: Mapping[str, Sequence[CurvePoint]]) -> dict[str, list[tuple[int, float]]]:
    """(step, distance from the first curve) of the other curves, where a picture of losses would hide them.

    The result is empty unless some curve lies on the first one, within a hundredth of its range. Distances of 0 are
    left out, since a logarithmic scale has no place for them.

    >>> line = [(1, 10, 6.0), (2, 20, 4.0)]
    >>> differences({"ours": line, "near": [(1, 10, 6.0), (2, 20, 4.001)]})["near"]
    [(2, 0.001)]
    >>> differences({"ours": line, "far": [(1, 10, 5.0), (2, 20, 4.5)]})
    {}
    """
    (_, first), *others = curves.items()
    reference = {step: loss for step, _, loss in first if math.isfinite(loss)}
    if not reference or not others:
        return {}
    close = (max(reference.values()) - min(reference.values())) / 100
    apart = {
        name: [(s, round(abs(x - reference[s]), 12)) for s, _, x in points if s in reference and math.isfinite(x)]
        for name, points in others
    }
    if not any(points and max(far for _, far in points) <= close for points in apart.values()):
        return {}
    shown = {name: [(step, far) for step, far in points if far] for name, points in apart.items()}
    return shown if any(shown.values()) else {}


def _line(panel: Any, xs: Sequence[float], losses: Sequence[float], name: str, index: int) -> None:
    colour, dashes = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
    window = 2 * (len(losses) // 40) + 1
    if window > 1:
        panel.plot(xs, losses, color=colour, linewidth=0.8, alpha=0.28)
    means = smooth(losses, window)
    finite = [(x, loss) for x, loss in zip(xs, means, strict=True) if math.isfinite(loss)]
    last = finite[-1] if finite else None
    panel.plot(
        xs,
        means,
        color=colour,
        linestyle=dashes,
        linewidth=2,
        label=f"{name}: {_last(losses)}",
        marker="o" if len(xs) < 12 else "",
        markersize=4,
    )
    if last:
        panel.plot(*last, marker="o", markersize=5, color=colour)


def _points(panel: Any, points: Sequence[tuple[float, float]]) -> None:
    """Validation losses, joined by a dotted line. White rings keep them visible on the line of training losses."""
    if points:
        xs, losses = zip(*points, strict=True)
        look = {"marker": "D", "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 1.0, "zorder": 4}
        panel.plot(
            xs, losses, linestyle=":", linewidth=1.2, color=_INK, label=f"validation loss: {_last(losses)}", **look
        )


def _style(panel: Any, label: str) -> None:
    panel.set_xlabel(label, color=_INK)
    panel.grid(color=_GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#aab3be")
    panel.tick_params(colors=_INK, labelsize=9, length=3)
    panel.xaxis.get_major_locator().set_params(integer=label == "step", min_n_ticks=1)
    panel.xaxis.get_major_formatter().set_useOffset(False)
    panel.margins(x=0.02)


def _last(losses: Sequence[float]) -> str:
    """The last loss, in the words of the legend.

    >>> _last([5.0, 4.25]), _last([3e-7]), _last([5.0, math.nan]), _last([math.nan])
    ('4.250', '3e-07', '5.000, then not finite', 'not finite')
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return "not finite"
    shown = f"{finite[-1]:.3f}" if 1e-2 <= abs(finite[-1]) < 1e6 else f"{finite[-1]:.3g}"
    return shown if math.isfinite(losses[-1]) else f"{shown}, then not finite"


def _token_unit(most: int) -> tuple[int, str]:
    """Divisor and suffix of an axis of tokens.

    >>> _token_unit(3_200_000)
    (1000000, ' (millions)')
    """
    for scale, name in ((10**12, "trillions"), (10**9, "billions"), (10**6, "millions"), (10**3, "thousands")):
        if most >= 2 * scale:
            return scale, f" ({name})"
    return 1, ""
