"""The tables that people read of a run's report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from dynapipe_ext.errors import DataError, format_bytes
from dynapipe_ext.schedules.rivals import describe_gain
from dynapipe_ext.tools.account.report import RunReport, RunResult, finite, least_evaluation, shared_cores_note
from dynapipe_ext.tools.console import counted, percent, seconds, step_range


def _peak(peaks: Sequence[int] | None, device_bytes: int | None) -> str:
    if not peaks:
        return "-"
    share = f", {percent(max(peaks) / device_bytes)}" if device_bytes else ""
    return f"{format_bytes(max(peaks))} (rank {peaks.index(max(peaks))}){share}"


def _microseconds(duration_s: float | None) -> str:
    return "-" if duration_s is None else f"{1e6 * duration_s:,.1f} µs"


def _drift(measured_s: float | None, predicted_s: float | None) -> str:
    return percent(measured_s / predicted_s - 1 if measured_s and predicted_s else None, signed=True)


def summary_table(report: RunReport) -> Table:
    """The table at the end of a run: measured figures beside predicted ones."""
    result, facts, t = report.result, report.facts, report.facts.topology
    steps = counted(report.steps, "step") + (", unfinished" if report.unfinished else "")
    table = Table(
        title=f"{result.name}: {steps}, TP{t.tp} × PP{t.pp} × DP{t.dp}, {result.layout} {result.schedule}",
        title_justify="left",
        title_style="bold",
        caption=shared_cores_note(t.world_size, facts.num_cores) if facts.oversubscribed else None,
        caption_justify="left",
        caption_style="yellow",
    )
    table.add_column("")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    for row in (*_measured_rows(report), *_fitted_rows(result)):
        table.add_row(*row)
    return table


def _measured_rows(report: RunReport) -> Iterator[tuple[str, str, str]]:
    """(label, measured, predicted) of every figure of the run."""
    result, facts = report.result, report.facts
    losses = f"{result.losses[0]:.4f} → {result.losses[-1]:.4f}" if result.losses else "-"
    counts = [count for step in result.num_micro_batches for count in step]
    spread = (
        f"{min(counts)} to {max(counts)}" if counts and min(counts) < max(counts) else str(counts[0] if counts else "-")
    )
    exposed_s, cpu_s = result.exposed_planning_s, result.cpu_s_per_token
    share = exposed_s / result.elapsed_s if exposed_s is not None and result.elapsed_s > 0 else None
    makespans = (result.measured_makespan_s, result.predicted_makespan_s)
    bubbles = (result.measured_bubble_ratio, result.predicted_bubble_ratio)
    numbers = tuple(result.first_step + step + 1 for step in result.averaged_steps)
    measured_s, predicted_s = (result.mean(values) for values in makespans)
    measured_bubble, predicted_bubble = (result.mean(values) for values in bubbles)
    measured_peak, predicted_peak = (
        _peak(peaks, facts.device_bytes) for peaks in (result.measured_peak_bytes, result.predicted_peak_bytes)
    )
    device = f" of {format_bytes(facts.device_bytes)}" if facts.device_bytes else ""
    yield "loss, first → last", losses, ""
    if result.preferences:
        first, last = (figures for _, figures in (result.preferences[0], result.preferences[-1]))
        yield "reward margin, first → last", f"{first.margin:.4f} → {last.margin:.4f}", ""
        yield "preferred rightly, first → last", f"{percent(first.accuracy)} → {percent(last.accuracy)}", ""
    yield "real tokens", f"{result.real_tokens:,}", ""
    yield "real tokens/s", f"{result.real_tokens_per_s:,.0f}", ""
    yield "CPU time a token", _microseconds(cpu_s), ""
    yield "padding efficiency", percent(result.padding_efficiency), ""
    yield "micro-batches a replica", spread, ""
    yield "makespan, mean", seconds(measured_s), seconds(predicted_s)
    yield "  over predicted", _drift(measured_s, predicted_s), ""
    yield "bubble, mean", percent(measured_bubble), percent(predicted_bubble)
    yield "  means are of", step_range(numbers), ""
    yield "exposed planning", f"{seconds(exposed_s)} ({percent(share)})", ""
    yield f"fullest rank{device}", measured_peak, predicted_peak


def _fitted_rows(result: RunResult) -> Iterator[tuple[str, str, str]]:
    """(label, measured, predicted) of steps without effect, fitted costs and evaluations, where the run has any."""
    if result.refused:
        yield "steps that changed no weight", f"{len(result.refused)} (the last: {result.refused[-1][0]})", ""
    if (off := result.furthest_off) is not None:
        yield f"furthest off: {off}", seconds(off.measured_s), seconds(off.predicted_s)
    for number, fit in result.fits:
        before, after = percent(fit.error_before), percent(fit.error_after)
        yield f"costs fitted after step {number}", f"{before} off before", f"{after} after"
    if result.evaluations:
        last, least = result.evaluations[-1], least_evaluation(result.evaluations)
        yield "validation loss, last", f"{last.loss:.4f} (step {last.number})", ""
        if least is not None:
            yield "validation loss, least", f"{least.loss:.4f} (step {least.number})", ""


@dataclass(frozen=True, slots=True)
class _Metric:
    heading: str
    value: Callable[[RunResult], float | None]
    show: Callable[[float], str]
    more_is_better: bool


def _measured_mean(values: Sequence[float | None]) -> float | None:
    """The mean over all measured steps; all runs of a comparison are measured at the same steps."""
    measured = [value for value in values if value is not None]
    return math.fsum(measured) / len(measured) if measured else None


_IDLE = "bubble"
_METRICS = (
    _Metric("real\ntokens/s", lambda r: r.real_tokens_per_s, lambda v: f"{v:,.0f}", True),
    _Metric("CPU time\na token", lambda r: r.cpu_s_per_token, _microseconds, False),
    _Metric("padding\nefficiency", lambda r: r.padding_efficiency, percent, True),
    _Metric(_IDLE, lambda r: _measured_mean(r.measured_bubble_ratio), percent, False),
    _Metric("last\nloss", lambda r: finite(r.losses[-1]) if r.losses else None, lambda v: f"{v:.4f}", False),
)


def compare_table(report: RunReport) -> Table:
    """Return a table of this run and its baselines, with the gain over the best one as its title. The last row divides
    this run by the best baseline, and marks where it is behind. A baseline that ended early, as it had no plan, is
    shown and not compared. Raises DataError for a report without baselines.
    """
    if not report.compare:
        raise DataError("this report has no baselines to compare with: run again with --compare")
    baselines = [result for result in report.compare if len(result.losses) == len(report.result.losses)]
    notes = ["same model, same data, same executor", "▼ behind the best baseline of that column"]
    if report.facts.oversubscribed:
        notes.append(shared_cores_note(report.facts.topology.world_size, report.facts.num_cores))
    table = Table(
        title=_gain(report, baselines),
        title_justify="left",
        title_style="bold",
        caption="\n".join(notes),
        caption_justify="left",
        caption_style="dim",
    )
    table.add_column("run")
    for metric in _METRICS:
        table.add_column(metric.heading, justify="right", no_wrap=True)
    for result in (report.result, *report.compare):
        values = [(metric, metric.value(result)) for metric in _METRICS]
        cells = ["-" if value is None else metric.show(value) for metric, value in values]
        early = "" if result is report.result or result in baselines else f" (to step {len(result.losses)})"
        table.add_row(Text(result.name + early, style="bold" if result is report.result else ""), *cells)
        if (middle := _middle_half(result)) is not None:
            table.add_row(Text("  middle half of its steps", style="dim"), Text(middle, style="dim"))
    table.add_section()
    # Where ranks share cores an idle rank lends its core, so bubbles do not compare.
    compared = [m for m in _METRICS if m.heading != _IDLE or not report.facts.oversubscribed]
    table.add_row(
        "over the best baseline",
        *(_ratio(metric, report.result, baselines) if metric in compared else Text("-") for metric in _METRICS),
    )
    return table


def _gain(report: RunReport, baselines: Sequence[RunResult]) -> str:
    """Say in one line what a token takes in this run against the best baseline: CPU time if ranks share cores."""

    def seconds_per_token(result: RunResult) -> float | None:
        rate = result.real_tokens_per_s
        return result.cpu_s_per_token if report.facts.oversubscribed else 1 / rate if rate else None

    ours_s = seconds_per_token(report.result)
    if ours_s is None:
        return "Comparison: no step was measured"
    rivals = {result.name: value for result in baselines if (value := seconds_per_token(result)) is not None}
    kind = "CPU time" if report.facts.oversubscribed else "time"
    return f"Comparison: a token takes {describe_gain(ours_s, rivals).replace('time', kind)}"


def _middle_half(result: RunResult) -> str | None:
    """Quartiles of the steps' rates; None for fewer than four steps."""
    rates = sorted(n / s for n, s in zip(result.real_tokens_per_step, result.step_s, strict=True) if s > 0)
    if len(rates) < 4:
        return None
    low, _, high = statistics.quantiles(rates, method="inclusive")
    return f"{low:,.0f}-{high:,.0f}"


def _ratio(metric: _Metric, ours: RunResult, baselines: Sequence[RunResult]) -> Text:
    theirs = [value for value in map(metric.value, baselines) if value is not None]
    mine = metric.value(ours)
    if mine is None or not theirs:
        return Text("-")
    best = max(theirs) if metric.more_is_better else min(theirs)
    if best == 0:
        return Text("-")
    differs = f"{mine / best:.3f}" != "1.000"  # else rounding would decide, as for losses of equal steps
    behind = differs and (mine < best if metric.more_is_better else mine > best)
    ahead = differs and not behind
    return Text(f"{'▼ ' if behind else ''}{mine / best:.3f}×", style="red" if behind else "green" if ahead else "")
