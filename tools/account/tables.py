"""What a person reads of a run: the table of its figures, and the one that compares it with its baselines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.account.report import RunReport, RunResult, finite
from dynapipe_ext.tools.wording import counted, format_bytes, percent, seconds, step_range


def shared_cores_note(num_ranks: int, num_cores: int) -> str:
    """
    >>> shared_cores_note(8, 2)
    '8 ranks share 2 cores: an idle rank lends its core, so compare CPU time a token, not tokens/s, makespan or bubble.'
    """
    return (
        f"{num_ranks} ranks share {counted(num_cores, 'core')}: an idle rank lends its core, so compare CPU time a"
        " token, not tokens/s, makespan or bubble."
    )


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
    """The end-of-run table: what was measured beside what was predicted."""
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
    rows = (
        ("loss, first → last step", losses, ""),
        ("real tokens", f"{result.real_tokens:,}", ""),
        ("real tokens/s", f"{result.real_tokens_per_s:,.0f}", ""),
        ("CPU time a token", _microseconds(cpu_s), ""),
        ("padding efficiency", percent(result.padding_efficiency), ""),
        ("micro-batches a replica and step", spread, ""),
        ("makespan, mean", *(seconds(result.mean(of)) for of in makespans)),
        ("  longer than predicted", _drift(*(result.mean(of) for of in makespans)), ""),
        ("bubble, mean", *(percent(result.mean(of)) for of in bubbles)),
        ("  both means are of", step_range(numbers), ""),
        ("exposed planning", f"{seconds(exposed_s)} ({percent(share)} of the time)", ""),
        (
            "peak bytes of a rank" + (f", part of {format_bytes(facts.device_bytes)}" if facts.device_bytes else ""),
            *(_peak(peaks, facts.device_bytes) for peaks in (result.measured_peak_bytes, result.predicted_peak_bytes)),
        ),
    )
    for row in rows:
        table.add_row(*row)
    if (off := result.furthest_off) is not None:
        table.add_row(f"furthest off: {off}", seconds(off.measured_s), seconds(off.predicted_s))
    for number, fit in result.fits:
        errors = (percent(fit.error_before), percent(fit.error_after))
        table.add_row(f"costs fitted after step {number}", f"{errors[0]} off before", f"{errors[1]} after")
    if result.evaluations:
        least = min(result.evaluations, key=lambda done: (not math.isfinite(done.loss), done.loss))
        last = result.evaluations[-1]
        table.add_row("validation loss, last", f"{last.loss:.4f} (step {last.number})", "")
        table.add_row("validation loss, least", f"{least.loss:.4f} (step {least.number})", "")
    return table


@dataclass(frozen=True, slots=True)
class _Metric:
    heading: str
    value: Callable[[RunResult], float | None]
    show: Callable[[float], str]
    more_is_better: bool


def _measured_mean(values: Sequence[float | None]) -> float | None:
    """Over all measured steps: all runs of a comparison are measured at the same ones."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


_IDLE = "bubble"
_METRICS = (
    _Metric("real\ntokens/s", lambda r: r.real_tokens_per_s, lambda v: f"{v:,.0f}", True),
    _Metric("CPU time\na token", lambda r: r.cpu_s_per_token, _microseconds, False),
    _Metric("padding\nefficiency", lambda r: r.padding_efficiency, percent, True),
    _Metric(_IDLE, lambda r: _measured_mean(r.measured_bubble_ratio), percent, False),
    _Metric("last\nloss", lambda r: finite(r.losses[-1]) if r.losses else None, lambda v: f"{v:.4f}", False),
)


def compare_table(report: RunReport) -> Table:
    """This run against its baselines; the last row is this run over the best baseline, marked where it loses.

    Raises DataError for a report without baselines.
    """
    if not report.compare:
        raise DataError("this report has no baselines to compare with: run again with --compare")
    notes = ["▼ behind the best baseline of that column"]
    if report.facts.oversubscribed:
        notes.append(shared_cores_note(report.facts.topology.world_size, report.facts.num_cores))
    table = Table(
        title="Comparison: same model, same data, same executor",
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
        table.add_row(Text(result.name, style="bold" if result is report.result else ""), *cells)
        if (middle := _middle_half(result)) is not None:
            table.add_row(Text("  middle half of its steps", style="dim"), Text(middle, style="dim"))
    table.add_section()
    told = [m for m in _METRICS if m.heading != _IDLE or not report.facts.oversubscribed]  # an idle rank lends its core
    table.add_row(
        "over the best baseline",
        *(_ratio(metric, report.result, report.compare) if metric in told else Text("-") for metric in _METRICS),
    )
    return table


def _middle_half(result: RunResult) -> str | None:
    """Quartiles of the steps' rates; None of fewer than four."""
    rates = sorted(n / s for n, s in zip(result.real_tokens_per_step, result.step_s, strict=True) if s > 0)
    if len(rates) < 4:
        return None
    low, _, high = statistics.quantiles(rates, method="inclusive")
    return f"{low:,.0f}-{high:,.0f}"


def _ratio(metric: _Metric, ours: RunResult, baselines: Sequence[RunResult]) -> Text:
    known = [value for value in map(metric.value, baselines) if value is not None]
    mine = metric.value(ours)
    if mine is None or not known:
        return Text("-")
    best = max(known) if metric.more_is_better else min(known)
    if best == 0:
        return Text("-")
    differs = f"{mine / best:.3f}" != "1.000"  # else rounding decides, as of losses of equal steps
    behind = differs and (mine < best if metric.more_is_better else mine > best)
    ahead = differs and not behind
    return Text(f"{'▼ ' if behind else ''}{mine / best:.3f}×", style="red" if behind else "green" if ahead else "")
