"""What a run leaves behind in figures: `report.json` (dynapipe-report/1) and the tables that a person reads.

`RunReport` is one run; its `result` and each entry of `compare` are `RunResult`s with the same figures, so a baseline
is compared like with like. Rates are never stored: they follow from tokens and seconds. In JSON, an unknown figure is
null, and so is a loss that is not finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.flops import Positions, Work
from dynapipe_ext.plan import RECOMPUTES
from dynapipe_ext.tools.json_file import Fields, read_json, write_atomic
from dynapipe_ext.topology import Topology

FORMAT = "dynapipe-report/1"


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """The store that carried the plans: "valkey" "9.1.0"."""

    server: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The figures of one run over S steps.

    Per step (length S): `losses`, `real_tokens_per_step`, `step_s` (wall seconds), `num_micro_batches` (one count a
    replica), `measured_makespan_s` and, where a prediction was made, `predicted_makespan_s` and both bubble ratios
    (empty otherwise). Over the run: `cpu_s` of all ranks together, `padded_tokens`, `exposed_planning_s` (time ranks
    waited for plans), `work` (what FLOPs are counted from). Per rank, in rank order: `predicted_peak_bytes` and
    `measured_peak_bytes` (None where unknown).
    """

    name: str
    layout: str
    schedule: str
    losses: tuple[float, ...]
    real_tokens_per_step: tuple[int, ...]
    padded_tokens: int
    step_s: tuple[float, ...]
    cpu_s: float
    num_micro_batches: tuple[tuple[int, ...], ...]
    measured_makespan_s: tuple[float, ...]
    predicted_makespan_s: tuple[float, ...] = ()
    measured_bubble_ratio: tuple[float, ...] = ()
    predicted_bubble_ratio: tuple[float, ...] = ()
    exposed_planning_s: float = 0.0
    predicted_peak_bytes: tuple[int, ...] | None = None
    measured_peak_bytes: tuple[int, ...] | None = None
    work: Work = field(default_factory=Work)

    def __post_init__(self) -> None:
        steps = len(self.losses)
        for name in ("real_tokens_per_step", "step_s", "num_micro_batches", "measured_makespan_s"):
            if len(getattr(self, name)) != steps:
                raise DataError(f"{self.name}: {name} has {len(getattr(self, name))} entries for {steps} losses")
        for name in ("predicted_makespan_s", "measured_bubble_ratio", "predicted_bubble_ratio"):
            if len(getattr(self, name)) not in (0, steps):
                raise DataError(f"{self.name}: {name} has {len(getattr(self, name))} entries: give none or {steps}")
        if self.padded_tokens < self.real_tokens:
            raise DataError(
                f"{self.name}: padded_tokens {self.padded_tokens} is less than the {self.real_tokens} real tokens:"
                " padded counts every position, real ones included"
            )

    @property
    def real_tokens(self) -> int:
        return sum(self.real_tokens_per_step)

    @property
    def elapsed_s(self) -> float:
        return sum(self.step_s)

    @property
    def real_tokens_per_s(self) -> float:
        return self.real_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def cpu_s_per_token(self) -> float:
        return self.cpu_s / self.real_tokens if self.real_tokens else 0.0

    @property
    def padding_efficiency(self) -> float:
        """Real over padded tokens."""
        return self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layout": self.layout,
            "schedule": self.schedule,
            "losses": [_finite(loss) for loss in self.losses],
            "real_tokens": self.real_tokens,
            "real_tokens_per_step": list(self.real_tokens_per_step),
            "padded_tokens": self.padded_tokens,
            "padding_efficiency": self.padding_efficiency,
            "real_tokens_per_s": self.real_tokens_per_s,
            "step_s": list(self.step_s),
            "cpu_s": self.cpu_s,
            "cpu_s_per_token": self.cpu_s_per_token,
            "num_micro_batches": [list(counts) for counts in self.num_micro_batches],
            "predicted_makespan_s": list(self.predicted_makespan_s),
            "measured_makespan_s": list(self.measured_makespan_s),
            "predicted_makespan_mean_s": mean(self.predicted_makespan_s),
            "measured_makespan_mean_s": mean(self.measured_makespan_s),
            "bubble_ratio": {
                "predicted": mean(self.predicted_bubble_ratio),
                "measured": mean(self.measured_bubble_ratio),
                "predicted_per_step": list(self.predicted_bubble_ratio),
                "measured_per_step": list(self.measured_bubble_ratio),
            },
            "exposed_planning_s": self.exposed_planning_s,
            "work": self.work.to_json(),
            "peak_bytes": {
                "predicted": None if self.predicted_peak_bytes is None else list(self.predicted_peak_bytes),
                "measured": None if self.measured_peak_bytes is None else list(self.measured_peak_bytes),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run with what is needed to repeat it. `date` is ISO 8601; `compare` holds the baselines, or is None."""

    result: RunResult
    topology: Topology
    device: str
    num_cores: int
    seed: int
    loss_norm: str
    date: str
    oversubscribed: bool
    store: StoreInfo | None
    versions: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    compare: tuple[RunResult, ...] | None = None

    @property
    def steps(self) -> int:
        return len(self.result.losses)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "date": self.date,
            "device": self.device,
            "num_cores": self.num_cores,
            "oversubscribed": self.oversubscribed,
            "versions": dict(self.versions),
            "topology": {"tp": self.topology.tp, "pp": self.topology.pp, "dp": self.topology.dp},
            "layers_per_stage": list(self.topology.layers_per_stage),
            "placement": list(self.topology.placement),
            "model": dict(self.model),
            "seed": self.seed,
            "loss_norm": self.loss_norm,
            "steps": self.steps,
            "store": self.store and {"server": self.store.server, "version": self.store.version},
            **self.result.to_json(),
            "compare": None if self.compare is None else [result.to_json() for result in self.compare],
        }

    def write(self, path: str | Path) -> None:
        """Write the report; readers see the old file or the whole new one, never a part."""
        write_atomic(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> RunReport:
        """The report in a file. Raises DataError naming the file and the field that is absent or of the wrong type."""
        fields = Fields(read_json(path, FORMAT, "a run report"), str(path))
        topology, compare = fields.sub("topology"), fields.raw("compare")
        store = None if fields.raw("store") is None else fields.sub("store")
        if compare is not None and not isinstance(compare, list):
            raise DataError(f"{path}: compare is {type(compare).__name__}: expected null or a list of results")
        return cls(
            result=_result(fields),
            topology=Topology(
                tp=topology.one("tp", int),
                pp=topology.one("pp", int),
                dp=topology.one("dp", int),
                layers_per_stage=fields.many("layers_per_stage", int),
                placement=fields.many("placement", int),
            ),
            device=fields.one("device", str),
            num_cores=fields.one("num_cores", int),
            seed=fields.one("seed", int),
            loss_norm=fields.one("loss_norm", str),
            date=fields.one("date", str),
            oversubscribed=fields.one("oversubscribed", bool),
            store=None if store is None else StoreInfo(store.one("server", str), store.one("version", str)),
            versions=fields.one("versions", dict),
            model=fields.one("model", dict),
            compare=None
            if compare is None
            else tuple(_result(Fields(entry, f"{path}: compare[{i}]")) for i, entry in enumerate(compare)),
        )


def mean(values: Sequence[float]) -> float | None:
    """The mean, None of nothing."""
    return math.fsum(values) / len(values) if values else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _result(fields: Fields) -> RunResult:
    bubble, peaks = fields.sub("bubble_ratio"), fields.sub("peak_bytes")
    losses = fields.one("losses", list)
    return RunResult(
        name=fields.one("name", str),
        layout=fields.one("layout", str),
        schedule=fields.one("schedule", str),
        losses=tuple(math.nan if loss is None else fields.check("losses", loss, float) for loss in losses),
        real_tokens_per_step=fields.many("real_tokens_per_step", int),
        padded_tokens=fields.one("padded_tokens", int),
        step_s=fields.many("step_s", float),
        cpu_s=fields.one("cpu_s", float),
        num_micro_batches=tuple(
            tuple(fields.check(f"num_micro_batches[{i}]", count, int) for count in counts)
            for i, counts in enumerate(fields.many("num_micro_batches", list))
        ),
        predicted_makespan_s=fields.many("predicted_makespan_s", float),
        measured_makespan_s=fields.many("measured_makespan_s", float),
        predicted_bubble_ratio=bubble.many("predicted_per_step", float),
        measured_bubble_ratio=bubble.many("measured_per_step", float),
        exposed_planning_s=fields.one("exposed_planning_s", float),
        work=_work(fields.sub("work")),
        predicted_peak_bytes=None if peaks.raw("predicted") is None else peaks.many("predicted", int),
        measured_peak_bytes=None if peaks.raw("measured") is None else peaks.many("measured", int),
    )


def _work(fields: Fields) -> Work:
    executed = fields.sub("executed")
    executed.only(RECOMPUTES)
    by_kind = {kind: _positions(executed.sub(kind)) for kind in RECOMPUTES}
    return Work(_positions(fields.sub("real")), {kind: p for kind, p in by_kind.items() if p != Positions()})


def _positions(fields: Fields) -> Positions:
    return Positions(**{name: fields.one(name, int) for name in Positions.__slots__})


def shared_cores_note(num_ranks: int, num_cores: int) -> str:
    """
    >>> shared_cores_note(8, 2)
    '8 ranks share 2 cores: an idle rank lends its core, so compare CPU time a token, not tokens/s, makespan or bubble.'
    """
    cores = f"{num_cores} core{'' if num_cores == 1 else 's'}"
    return (
        f"{num_ranks} ranks share {cores}: an idle rank lends its core, so compare CPU time a token, not tokens/s,"
        " makespan or bubble."
    )


def format_bytes(num_bytes: int) -> str:
    """
    >>> format_bytes(900), format_bytes(3 << 29)
    ('900 B', '1.50 GiB')
    """
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{num_bytes} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _peak(peaks: Sequence[int] | None) -> str:
    return "-" if not peaks else f"{format_bytes(max(peaks))} (rank {peaks.index(max(peaks))})"


def summary_table(report: RunReport) -> Table:
    """The end-of-run table: what was measured beside what was predicted."""
    result, t = report.result, report.topology
    table = Table(
        title=f"{result.name}: {report.steps} steps, TP{t.tp} × PP{t.pp} × DP{t.dp}, {result.layout} {result.schedule}",
        title_justify="left",
        title_style="bold",
        caption=shared_cores_note(t.world_size, report.num_cores) if report.oversubscribed else None,
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
    share = result.exposed_planning_s / result.elapsed_s if result.elapsed_s > 0 else None
    rows = (
        ("loss, first → last step", losses, ""),
        ("real tokens", f"{result.real_tokens:,}", ""),
        ("real tokens/s", f"{result.real_tokens_per_s:,.0f}", ""),
        ("CPU time a token", f"{1e6 * result.cpu_s_per_token:,.1f} µs", ""),
        ("padding efficiency", _percent(result.padding_efficiency), ""),
        ("micro-batches a replica and step", spread, ""),
        ("makespan, mean", _seconds(mean(result.measured_makespan_s)), _seconds(mean(result.predicted_makespan_s))),
        ("bubble, mean", _percent(mean(result.measured_bubble_ratio)), _percent(mean(result.predicted_bubble_ratio))),
        ("exposed planning", f"{_seconds(result.exposed_planning_s)} ({_percent(share)} of the time)", ""),
        ("peak bytes of a rank", _peak(result.measured_peak_bytes), _peak(result.predicted_peak_bytes)),
    )
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True, slots=True)
class _Metric:
    heading: str
    value: Callable[[RunResult], float | None]
    show: Callable[[float], str]
    more_is_better: bool


_METRICS = (
    _Metric("real\ntokens/s", lambda r: r.real_tokens_per_s, lambda v: f"{v:,.0f}", True),
    _Metric("CPU time\na token", lambda r: r.cpu_s_per_token, lambda v: f"{1e6 * v:,.1f} µs", False),
    _Metric("padding\nefficiency", lambda r: r.padding_efficiency, _percent, True),
    _Metric("bubble", lambda r: mean(r.measured_bubble_ratio), _percent, False),
    _Metric("last\nloss", lambda r: _finite(r.losses[-1]) if r.losses else None, lambda v: f"{v:.4f}", False),
)


def compare_table(report: RunReport) -> Table:
    """This run against its baselines; the last row is this run over the best baseline, marked where it loses.

    Raises DataError for a report without baselines.
    """
    if not report.compare:
        raise DataError("this report has no baselines to compare with: run again with --compare")
    notes = ["▼ behind the best baseline of that column"]
    if report.oversubscribed:
        notes.append(shared_cores_note(report.topology.world_size, report.num_cores))
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
    table.add_section()
    table.add_row("over the best baseline", *(_ratio(metric, report.result, report.compare) for metric in _METRICS))
    return table


def _ratio(metric: _Metric, ours: RunResult, baselines: Sequence[RunResult]) -> Text:
    known = [value for value in map(metric.value, baselines) if value is not None]
    mine = metric.value(ours)
    if mine is None or not known:
        return Text("-")
    best = max(known) if metric.more_is_better else min(known)
    if best == 0:
        return Text("-")
    behind = mine < best if metric.more_is_better else mine > best
    ahead = mine != best and not behind
    return Text(f"{'▼ ' if behind else ''}{mine / best:.3f}×", style="red" if behind else "green" if ahead else "")
