"""A run in sentences and short tables: how it stands, where its time goes, what to try next, how two runs differ."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from dynapipe_ext.errors import format_bytes
from dynapipe_ext.timeline import Span, Trace
from dynapipe_ext.tools.account.report import shared_cores_note
from dynapipe_ext.tools.account.run_series import RunSeries, RunSoFar
from dynapipe_ext.tools.console import counted, percent, seconds
from dynapipe_ext.tools.progress import format_eta
from dynapipe_ext.tools.show.timeline import TraceRecord, pair_steps, replica_of, span_kind

SettingTables = Mapping[str, Mapping[str, Any]]  # tables of config.toml

_CREDENTIALS = re.compile(r"://[^/\s@]*@")
_SECRET_NAMES = re.compile(r"password|passwd|secret|api_?key|token$", re.IGNORECASE)
_EQUAL = "the same"
_SAME = 0.005  # figures within half a percent are called equal
_HELD_BACK, _LATE, _LARGE = 0.7, 1.3, 1.5
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class NextMove:
    """A change of settings that was planned on a run's recent batches. `gain` is in tokens a second, by prediction."""

    flags: str
    words: str
    gain: float


def without_credentials(text: str) -> str:
    """
    >>> without_credentials("redis://alice:pass@host:6379/0 and http://host/a@b")
    'redis://…@host:6379/0 and http://host/a@b'
    """
    return _CREDENTIALS.sub("://…@", text)


def shown_setting(name: str, value: Any) -> str:
    """
    >>> shown_setting("steps", 20), shown_setting("mixture", ["a=0.5", "b=0.5"]), shown_setting("password", "x")
    ('20', 'a=0.5, b=0.5', '…')
    """
    if _SECRET_NAMES.search(name):
        return "…"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(shown_setting("", one) for one in value) or "–"
    return without_credentials(str(value)) or "–"


def ratio_text(ratio: float, more: str = "more", less: str = "less") -> str:
    """
    >>> ratio_text(1.251), ratio_text(0.9), ratio_text(1.001)
    ('25.1 % more', '10.0 % less', 'the same')
    """
    if abs(ratio - 1) < _SAME:
        return _EQUAL
    return f"{percent(abs(ratio - 1))} {more if ratio > 1 else less}"


def summary_sentences(run: RunSoFar, *, going_on: bool, unfinished: str | None, limit_bytes: int) -> Iterator[str]:
    """How a run stands, for someone who has just opened its page."""
    own, facts, t = run.own, run.facts, run.facts.topology
    on = f"{counted(t.world_size, 'rank')} (TP{t.tp} × PP{t.pp} × DP{t.dp}), {facts.device}"
    if own.last is None:
        yield f"No step has ended yet, of {counted(run.num_steps, 'step')} on {on}."
        return
    verb = "has done" if going_on else "did"
    so_far = " so far" if going_on else ""
    yield f"The run {verb} {own.last.number:,} of {counted(run.num_steps, 'step')}{so_far}, on {on}."
    if unfinished:
        yield f"It ended early: {without_credentials(unfinished)}."
    if going_on and own.num_steps:
        left_s = (run.num_steps - own.last.number) * own.elapsed_s / own.num_steps
        yield f"At this rate the other steps take {format_eta(left_s)}."
    yield from _loss_sentences(own)
    yield from _speed_sentences(own)
    yield from _memory_sentences(own, limit_bytes)
    if facts.oversubscribed:
        yield shared_cores_note(t.world_size, facts.num_cores)


def _loss_sentences(own: RunSeries) -> Iterator[str]:
    points = own.loss.points()
    if points and len(points) > 1:
        first, last = points[0], points[-1]
        verb = "fell" if last.mean < first.mean else "rose"
        yield f"The loss {verb} from {first.mean:.4f} ({_steps(first)}) to {last.mean:.4f} ({_steps(last)})."
    elif points:
        yield f"The loss is {points[0].mean:.4f}."
    if (last_one := own.last_evaluation) is not None:
        least = own.least_evaluation
        lowest = f"; the least was {least.loss:.4f} (step {least.number:,})" if least not in (None, last_one) else ""
        yield f"The validation loss is {last_one.loss:.4f} after step {last_one.number:,}{lowest}."
    if own.num_not_finite:
        yield f"In {counted(own.num_not_finite, 'step')} the loss was not finite."
    if own.num_refused:
        yield f"{counted(own.num_refused, 'step')} changed no weight."


def _steps(point: Any) -> str:
    return f"step {point.first:,}" if point.first == point.last else f"steps {point.first:,} to {point.last:,}"


def _speed_sentences(own: RunSeries) -> Iterator[str]:
    if (rate := own.real_tokens_per_s) is not None:
        padding = percent(own.padding_share)
        yield f"It learned from {rate:,.0f} real tokens a second; {padding} of the positions it computed were padding."
    if (measured := own.measured_bubble.mean) is not None:
        predicted = percent(own.predicted_bubble.mean)
        yield f"Ranks were idle for {percent(measured)} of a step; the plans predicted {predicted}."
    if (drift := own.drift_share) is not None:
        yield f"A step took {_as_long(1 + drift)} predicted."
    if own.gathered is not None and own.elapsed_s > 0:
        waited_s = own.gathered.exposed_planning_s
        if waited_s / own.elapsed_s >= _SAME:
            yield f"Ranks waited {seconds(waited_s)} for plans, {percent(waited_s / own.elapsed_s)} of the time."


def _as_long(ratio: float) -> str:
    """
    >>> _as_long(1.001), _as_long(1.2), _as_long(0.9), _as_long(3.55)
    ('as long as', '20.0 % longer than', '10.0 % less than', '3.5 times as long as')
    """
    if ratio >= 2:
        return f"{ratio:.1f} times as long as"
    return "as long as" if abs(ratio - 1) < _SAME else f"{ratio_text(ratio, 'longer', 'less')} than"


def _memory_sentences(own: RunSeries, limit_bytes: int) -> Iterator[str]:
    if own.gathered is None or not own.gathered.peak_bytes:
        return
    peaks, predicted = own.gathered.peak_bytes, own.gathered.predicted_peak_bytes
    limit = f", of a limit of {format_bytes(limit_bytes)}" if limit_bytes else ""
    yield (
        f"The fullest rank ({peaks.index(max(peaks))}) held {format_bytes(max(peaks))} at most; predicted were"
        f" {format_bytes(max(predicted))}{limit}."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowAction:
    """An action of a recorded step, and why it took long. `predicted_s` is None where nothing was simulated."""

    step: str
    rank: str
    label: str
    shape: str
    measured_s: float
    predicted_s: float | None
    why: str


def slowest_actions(record: TraceRecord, *, on_cpu: bool, most: int = 10) -> list[SlowAction]:
    """The actions that took longest in the recorded steps, of each replica's pipeline rank once."""
    slow: dict[tuple[str, str, str], tuple[Span, Trace, Trace | None]] = {}
    for name, measured, simulated in pair_steps(record.measured, record.simulated):
        for span in measured.spans if measured else ():
            if span_kind(span.label) != "wait":
                key = name, _without_tp(record.rank_names.get(span.rank, f"rank {span.rank}")), span.label
                if key not in slow or slow[key][0].duration_s < span.duration_s:
                    assert measured is not None
                    slow[key] = span, measured, simulated
    ranked = sorted(slow.items(), key=lambda item: item[1][0].duration_s, reverse=True)[:most]
    reasons: dict[int, _StepReasons] = {}
    actions = []
    for (name, rank, label), (span, measured, simulated) in ranked:
        step = reasons.setdefault(id(measured), _StepReasons.of(measured, simulated, record.rank_names))
        actions.append(
            SlowAction(
                step=name,
                rank=rank,
                label=label,
                shape=_shape_text(span.shape),
                measured_s=span.duration_s,
                predicted_s=step.predicted_s.get((span.rank, label)),
                why=step.why(span, on_cpu=on_cpu),
            )
        )
    return actions


def _without_tp(rank_name: str) -> str:
    return re.sub(r"\s*\btp\d+\b", "", rank_name) or rank_name


def _positions(shape: Sequence[int]) -> int:
    return shape[0] * sum(shape[1:]) if len(shape) > 1 else 0


def _shape_text(shape: Sequence[int]) -> str:
    """
    >>> _shape_text((2, 1024, 0)), _shape_text((4, 128, 16)), _shape_text(())
    ('2 × 1,024', '4 × (128 + 16)', '–')
    """
    if len(shape) < 2:
        return "–"
    rows, encoder_len, *decoder = shape
    sides = f"({encoder_len:,} + {decoder[0]:,})" if decoder and decoder[0] else f"{encoder_len:,}"
    return f"{rows:,} × {sides}"


@dataclass(frozen=True, slots=True)
class _StepReasons:
    """What explains the actions of one step: predicted seconds by rank and label, and sizes of its micro-batches."""

    predicted_s: Mapping[tuple[int, str], float]
    of_stages_s: Mapping[tuple[str, str, str], Mapping[str, float]]  # replica, letter, micro-batch: stage: seconds
    sizes: Sequence[int]
    names: Mapping[int, str]

    @classmethod
    def of(cls, measured: Trace, simulated: Trace | None, names: Mapping[int, str]) -> _StepReasons:
        predicted = {(span.rank, span.label): span.duration_s for span in simulated.spans} if simulated else {}
        of_stages: dict[tuple[str, str, str], dict[str, float]] = {}
        for (rank, label), duration_s in predicted.items():
            if match := _ACTION.fullmatch(label):
                stage, letter, micro_batch = match.groups()
                of_stages.setdefault((replica_of(names.get(rank, "")), letter, micro_batch), {})[stage] = duration_s
        sizes = {_positions(span.shape) for span in measured.spans} - {0}
        return cls(predicted, of_stages, sorted(sizes), names)

    def why(self, span: Span, *, on_cpu: bool) -> str:
        reasons = [*self._of_size(span), *self._of_stage(span), *self._of_time(span, on_cpu=on_cpu)]
        return "; ".join(reasons) or "about as predicted"

    def _of_size(self, span: Span) -> Iterator[str]:
        size = _positions(span.shape)
        if not size or len(self.sizes) < 2:
            return
        middle = statistics.median(self.sizes)
        if size == self.sizes[-1] > middle:
            yield "the largest micro-batch of the step"
        elif size > _LARGE * middle:
            yield f"{size / middle:.1f} × the step's median micro-batch"

    def _of_stage(self, span: Span) -> Iterator[str]:
        if match := _ACTION.fullmatch(span.label):
            stage, letter, micro_batch = match.groups()
            stages = self.of_stages_s.get((replica_of(self.names.get(span.rank, "")), letter, micro_batch), {})
            others = [duration_s for other, duration_s in stages.items() if other != stage]
            if others and stages.get(stage, 0.0) > _LATE * max(others):
                yield f"stage {stage} has the most work a position"

    def _of_time(self, span: Span, *, on_cpu: bool) -> Iterator[str]:
        predicted_s = self.predicted_s.get((span.rank, span.label))
        if predicted_s and span.duration_s > _LATE * predicted_s:
            yield f"{span.duration_s / predicted_s:.1f} × its predicted time"
        if on_cpu and 0 < span.cpu_s < _HELD_BACK * span.duration_s:
            yield f"on a core for {percent(span.cpu_s / span.duration_s, 0)} of the time"


def next_moves_table(moves: Sequence[NextMove], num_tried: int) -> Table:
    """What to try next, the largest gain first, for a terminal."""
    tried = f"planned on this run's last batches; {counted(num_tried, 'change')} tried"
    table = Table(title=f"What to try next ({tried})", title_justify="left", title_style="bold")
    for name in ("flags", "what it changes"):
        table.add_column(name)
    table.add_column("predicted tokens/s", justify="right", no_wrap=True)
    for move in moves:
        table.add_row(move.flags, move.words, percent(move.gain, signed=True))
    return table


def settings_that_differ(one: SettingTables, other: SettingTables) -> list[tuple[str, str, str]]:
    """(name, value here, value there) of every setting that differs between two runs."""
    names = dict.fromkeys((table, name) for settings in (one, other) for table, of in settings.items() for name in of)
    differing = []
    for table, name in names:
        values = [settings.get(table, {}).get(name) for settings in (one, other)]
        if values[0] != values[1]:
            shown = ["not known" if value is None else shown_setting(name, value) for value in values]
            differing.append((f"[{table}] {name}", shown[0], shown[1]))
    return differing


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A run that is compared with another."""

    name: str
    run: RunSoFar
    settings: SettingTables


# Settings under which two losses are of other words, or of other tokens for them.
_OF_DATA = {
    f"[data] {name}"
    for name in ("path", "mixture", "num_samples", "tokenizer", "vocab_size", "template", "loss_on", "tasks")
}


def difference_sentences(one: NamedRun, other: NamedRun) -> Iterator[str]:
    """How the second run differs from the first, in words."""
    differing = [row for row in settings_that_differ(one.settings, other.settings) if row[0] != "[run] run_dir"]
    a, b = one.run.own, other.run.own
    if differing:
        named = ", ".join(f"{name} ({here} → {there})" for name, here, there in differing[:4])
        rest = f", and {counted(len(differing) - 4, 'other')}" if len(differing) > 4 else ""
        yield f"{counted(len(differing), 'setting')} differ{'s' * (len(differing) == 1)}: {named}{rest}."
    else:
        yield "All settings are the same."
    if a.last is None or b.last is None:
        without = " and ".join(each.name for each, own in ((one, a), (other, b)) if own.last is None)
        yield f"{without} has no finished step, so there is nothing to compare."
        return
    if one.run.facts.device != other.run.facts.device:
        yield f"The devices differ ({one.run.facts.device}; {other.run.facts.device}), so speeds do not compare."
    if a.last.number != b.last.number:
        yield f"{one.name} has {counted(a.last.number, 'step')}, {other.name} {b.last.number:,}."
    if any(name in _OF_DATA for name, _, _ in differing):
        yield "The samples or their tokens differ, so losses do not compare."
    else:
        yield from _loss_difference(one, other)
    for what, here, there, more, less in (
        ("real tokens a step", a.real_tokens / a.num_steps, b.real_tokens / b.num_steps, "more", "fewer"),
        ("tokens a second", a.real_tokens_per_s, b.real_tokens_per_s, "more", "fewer"),
        ("CPU time a token", a.cpu_s_per_token, b.cpu_s_per_token, "more", "less"),
    ):
        if here and there:
            ratio = ratio_text(there / here, more, less)
            yield f"Both have the same {what}." if ratio == _EQUAL else f"{other.name} has {ratio} {what}."
    yield from _share_differences(one, other)


def _loss_difference(one: NamedRun, other: NamedRun) -> Iterator[str]:
    a, b = one.run.own, other.run.own
    assert a.last is not None
    assert b.last is not None
    number = min(a.last.number, b.last.number)
    here, there = a.loss.at(number), b.loss.at(number)
    if here is None or there is None or not math.isfinite(here + there):
        return
    if here == there:
        yield f"At step {number:,}, the last that both have, the losses are equal ({here:.4f})."
    else:
        lower = "lower" if there < here else "higher"
        yield (
            f"At step {number:,}, the last that both have, the loss of {other.name} is {abs(there - here):.4g} {lower}"
            f" ({here:.4f} → {there:.4f})."
        )


def _share_differences(one: NamedRun, other: NamedRun) -> Iterator[str]:
    a, b = one.run.own, other.run.own
    shares = (
        ("of positions are padding", a.padding_share, b.padding_share),
        ("of a step are idle", a.measured_bubble.mean, b.measured_bubble.mean),
    )
    for what, here, there in shares:
        if here is not None and there is not None:
            same = f"{here:.3f}" == f"{there:.3f}"
            yield f"{percent(here)} {what} in both." if same else f"{percent(here)} → {percent(there)} {what}."
    if a.gathered and b.gathered and a.gathered.peak_bytes and b.gathered.peak_bytes:
        here_bytes, there_bytes = max(a.gathered.peak_bytes), max(b.gathered.peak_bytes)
        change = ratio_text(there_bytes / here_bytes) if here_bytes else ""
        yield f"The fullest rank holds {format_bytes(here_bytes)} → {format_bytes(there_bytes)} ({change})."
