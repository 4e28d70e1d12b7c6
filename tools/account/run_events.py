"""events.jsonl (dynapipe-events/1): the facts of a run, then a line for each finished step; and the report made of it.

The first line has the run's facts and its variants (`--compare` runs several). So a run that was interrupted has left
everything that its report needs. Step numbers for people count from 1.

history.jsonl has a line for what happened around the steps: begun, a save, resumed, a fault, ended.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast, get_args

from dynapipe_ext.durable_files import open_kept
from dynapipe_ext.errors import UNWRITABLE, DataError, NoRoomError, writing_move
from dynapipe_ext.executor.events import AllRanks, DriftingShape, StepDone, furthest_off
from dynapipe_ext.models.flops import Work
from dynapipe_ext.tools.account.report import (
    RunFacts,
    RunReport,
    RunResult,
    drifting_from,
    evaluation_from,
    evaluation_json,
    finite,
    fit_from,
    preferences_from,
    preferences_json,
    work_from,
)
from dynapipe_ext.tools.files import Fields, parse_json, write_atomic, writing_in

FORMAT = "dynapipe-events/1"
EVENTS_FILE = "events.jsonl"
HISTORY_FILE = "history.jsonl"
DAMAGED = ".damaged"  # after the name of an events file that a resumed run could not keep in full
_MOST_HAPPENINGS = 500  # that are read, the latest
HappeningKind = Literal["begun", "save", "resumed", "fault", "ended"]


@dataclass(frozen=True, slots=True)
class VariantLabel:
    """One way of planning the job, by its names in the report."""

    name: str
    layout: str
    schedule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvents:
    """A run so far. The first variant is the job itself. Steps are in order, without gaps and without spans."""

    facts: RunFacts
    num_steps: int
    variants: tuple[tuple[VariantLabel, tuple[StepDone, ...]], ...]


def start_events(path: Path, facts: RunFacts, variants: Sequence[VariantLabel], *, num_steps: int) -> None:
    """Write the first line of a new file, in the place of an older one."""
    write_atomic(path, _header(facts, variants, num_steps))


def _header(facts: RunFacts, variants: Sequence[VariantLabel], num_steps: int) -> str:
    header = {"format": FORMAT, "num_steps": num_steps, "variants": [asdict(v) for v in variants], **facts.to_json()}
    return json.dumps(header, allow_nan=False) + "\n"


def _line(variant: str, done: StepDone) -> str:
    return json.dumps({"variant": variant, **step_json(done)}, allow_nan=False) + "\n"


def resume_events(
    path: Path, step: int, facts: RunFacts, label: VariantLabel, *, num_steps: int
) -> tuple[RunEvents, int]:
    """Keep the first `step` steps of a run that resumes there and continues to `num_steps`. Returns what the file then
    has, and of how many of these steps the losses are lost.

    `facts` and `label` are the new ones, since a run may resume with another topology. The file is replaced whole or
    not at all. After a power loss it may be cut, empty or damaged: then the steps that lead to `step` without a gap are
    kept, and the damaged file stays next to the new one, with DAMAGED in its name. Errors: DataError for a file that
    compares ways of planning.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): make it readable") from error
    names, found = _salvaged(text)
    if len(names) > 1:
        raise DataError(f"{path} compares {len(names)} ways of planning: only a run of one way can be resumed")
    first = step
    while first - 1 in found:
        first -= 1
    before = [number for number in found if number < step]
    num_lost = first if not before or min(before) < first else 0
    if num_lost and text:
        write_atomic(path.with_name(f"{path.name}{DAMAGED}"), text)
    kept = tuple(found[number] for number in range(first, step))
    write_atomic(path, _header(facts, [label], num_steps) + "".join(_line(label.name, done) for done in kept))
    return RunEvents(facts=facts, num_steps=num_steps, variants=((label, kept),)), num_lost


def _salvaged(text: str) -> tuple[set[str], dict[int, StepDone]]:
    """What can be read of an events file, line by line: the names of its variants, and the steps by their number from
    0, of which the last line counts."""
    names: set[str] = set()
    steps: dict[int, StepDone] = {}
    for number, line in enumerate(text.split("\n")[:-1]):
        with suppress(DataError):
            fields = Fields(parse_json(line, "", ""), "")
            if number == 0:
                names |= {_label(Fields(variant, "")).name for variant in fields.one("variants", list)}
            else:
                names.add(fields.one("variant", str))
                done = _step(fields)
                steps[done.step] = done
    return names, steps


class EventsFile:
    """A listener that adds each step of one variant to the file. Where `keeps_steps`, steps for which there is no room
    stay in memory until there is; `say` is told so once. Errors: DataError where the file cannot be written."""

    def __init__(
        self, path: Path, variant: str, *, keeps_steps: bool = False, say: Callable[[str], object] = lambda text: None
    ) -> None:
        self._path, self._variant, self._keeps_steps, self._say = path, variant, keeps_steps, say
        self._kept = b""
        with writing_in(path):
            self._file = os.fdopen(open_kept(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab", buffering=0)

    def step_done(self, done: StepDone) -> None:
        has_room = not self._kept
        self._kept += _line(self._variant, done).encode()
        if (lack := self._write()) and has_room:
            self._say(f"{lack.problem}: {lack.remedy}; the run keeps its steps until then")

    def catch_up(self) -> NoRoomError | None:
        """Have all steps on the disk, also those that wait for room. The error of want of room; None where they are
        there."""
        return self._write(syncs=True)

    def _write(self, *, syncs: bool = False) -> NoRoomError | None:
        num_before = os.fstat(self._file.fileno()).st_size
        try:
            if self._kept and self._file.write(self._kept) != len(self._kept):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if syncs:
                os.fsync(self._file.fileno())
        except OSError as error:
            problem, remedy = f"{self._path} cannot be written ({error.strerror})", writing_move(error.errno)
            if not self._keeps_steps or error.errno not in UNWRITABLE:
                raise DataError(f"{problem}: {remedy}") from error
            with suppress(OSError):
                self._file.truncate(num_before)  # no part of a line stays
            return NoRoomError(problem, remedy, "resume")
        self._kept = b""
        return None

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Happening:
    """What happened to a run after so many `steps` (None: unknown), in words; `date` is ISO 8601."""

    date: str
    kind: HappeningKind
    steps: int | None
    text: str


def note(run_dir: Path, kind: HappeningKind, steps: int | None, text: str) -> None:
    """Add a line to a run's history, now. Errors: DataError where it cannot be written."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    path = run_dir / HISTORY_FILE
    line = json.dumps(asdict(Happening(now, kind, steps, text))) + "\n"
    with writing_in(path), open(open_kept(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
        file.write(line)


def read_history(run_dir: Path) -> tuple[Happening, ...]:
    """The latest of what a run's history holds, in order. Lines that a kill has cut, and those of other versions, are
    left out; so is a file that is absent."""
    try:
        lines = (run_dir / HISTORY_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    happenings = []
    for line in lines[-_MOST_HAPPENINGS:]:
        with suppress(DataError):
            fields = Fields(parse_json(line, HISTORY_FILE, "a run's history"), HISTORY_FILE)
            kind = fields.one("kind", str)
            if kind in get_args(HappeningKind):
                steps = None if fields.raw("steps") is None else fields.one("steps", int)
                words = fields.one("date", str), fields.one("text", str)
                happenings.append(Happening(words[0], cast(HappeningKind, kind), steps, words[1]))
    return tuple(happenings)


def read_events(path: Path) -> RunEvents:
    """The events in a file that a run wrote or still writes. An incomplete last line is left out. Of several lines for
    a step, as resumed runs leave them, the last one counts.

    Errors: DataError naming the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}): give the events of a run") from error
    first, *lines = text.split("\n")[:-1] or [""]
    header = Fields(parse_json(first, f"{path}: line 1", "the events of a run"), f"{path}: line 1")
    if header.raw("format") != FORMAT:
        raise DataError(f"{path} has format {header.raw('format')!r} but {FORMAT!r} is needed: run again")
    labels = [_label(Fields(variant, f"{path}: variants")) for variant in header.one("variants", list)]
    steps: dict[str, dict[int, StepDone]] = {label.name: {} for label in labels}
    for number, line in enumerate(lines, 2):
        where = f"{path}: line {number}"
        fields = Fields(parse_json(line, where, "the events of a run"), where)
        variant, done = fields.one("variant", str), _step(fields)
        if variant not in steps:
            raise DataError(f"{where} is of variant {variant!r}, which the first line does not have: run again")
        steps[variant][done.step] = done
    for name, by_number in steps.items():
        if by_number and max(by_number) - min(by_number) + 1 != len(by_number):
            first_step, last_step = min(by_number) + 1, max(by_number) + 1
            raise DataError(f"{path}: steps of {name!r} are missing between {first_step} and {last_step}")
    return RunEvents(
        facts=RunFacts.from_fields(header),
        num_steps=header.one("num_steps", int),
        variants=tuple((label, tuple(done for _, done in sorted(steps[label.name].items()))) for label in labels),
    )


def report_of(events: RunEvents, *, unfinished: str | None) -> RunReport:
    """The report of the steps that have run."""
    ours, *others = (_result(label, steps) for label, steps in events.variants)
    return RunReport(facts=events.facts, result=ours, compare=tuple(others) or None, unfinished=unfinished)


def _result(label: VariantLabel, steps: Sequence[StepDone]) -> RunResult:
    by_step = [done.all_ranks for done in steps]
    gathered = [ranks for ranks in by_step if ranks is not None]
    accounted = [i for last, ranks in enumerate(by_step) if ranks for i in range(last - ranks.num_steps + 1, last + 1)]
    latest = gathered[-1] if gathered else None
    return RunResult(
        name=label.name,
        layout=label.layout,
        schedule=label.schedule,
        losses=tuple(done.loss for done in steps),
        real_tokens_per_step=tuple(done.real_tokens for done in steps),
        padded_tokens=sum(done.padded_tokens for done in steps),
        step_s=tuple(done.step_s for done in steps),
        cpu_s=sum(ranks.cpu_s for ranks in gathered),
        num_micro_batches=tuple(done.num_micro_batches for done in steps),
        measured_makespan_s=tuple(ranks.makespan_s if ranks else None for ranks in by_step),
        measured_bubble_ratio=tuple(ranks.bubble_ratio if ranks else None for ranks in by_step),
        predicted_makespan_s=tuple(ranks.predicted_makespan_s if ranks else None for ranks in by_step),
        predicted_bubble_ratio=tuple(ranks.predicted_bubble_ratio if ranks else None for ranks in by_step),
        exposed_planning_s=latest.exposed_planning_s if latest else None,
        predicted_peak_bytes=latest.predicted_peak_bytes if latest else None,
        measured_peak_bytes=latest.peak_bytes if latest else None,
        work=sum((ranks.work for ranks in gathered), Work()),
        accounted_steps=None if len(accounted) == len(steps) else tuple(accounted),
        first_step=steps[0].step if steps else 0,
        evaluations=tuple(done.evaluation for done in steps if done.evaluation is not None),
        preferences=tuple((done.number, done.preferences) for done in steps if done.preferences is not None),
        furthest_off=_furthest_off_in_sum([ranks.furthest_off for ranks in gathered]),
        fits=tuple((done.number, done.fit) for done in steps if done.fit is not None),
        refused=tuple((done.number, done.refused) for done in steps if done.refused),
    )


def _furthest_off_in_sum(shapes: Sequence[DriftingShape | None]) -> DriftingShape | None:
    """The shape with the largest error over all steps, of those that were the furthest off in a step; with its sums."""
    sums: dict[tuple[int, str, tuple[int, int, int]], DriftingShape] = {}
    for drifting in shapes:
        if drifting is not None:
            key = drifting.stage, drifting.letter, drifting.shape
            so_far = sums.get(key, replace(drifting, measured_s=0.0, predicted_s=0.0))
            sums[key] = replace(
                drifting,
                measured_s=so_far.measured_s + drifting.measured_s,
                predicted_s=so_far.predicted_s + drifting.predicted_s,
            )
    return furthest_off(sums.values())


def step_json(done: StepDone) -> dict[str, Any]:
    """A step as its line in the file, without spans. Figures that are not finite are null."""
    ranks, preferences = done.all_ranks, done.preferences
    return {
        "step": done.number,
        "epoch": done.epoch,
        "epoch_step": done.epoch_step,
        "loss": finite(done.loss),
        "grad_norm": finite(done.grad_norm),
        "learning_rate": done.learning_rate,
        "real_tokens": done.real_tokens,
        "padded_tokens": done.padded_tokens,
        "num_micro_batches": list(done.num_micro_batches),
        "step_s": done.step_s,
        "executed_s": done.executed_s,
        "cpu_s": done.cpu_s,
        "peak_bytes": done.peak_bytes,
        "predicted_makespan_s": done.predicted_makespan_s,
        "predicted_bubble_ratio": done.predicted_bubble_ratio,
        "predicted_peak_bytes": done.predicted_peak_bytes,
        "refused": done.refused,
        **({"preferences": preferences_json(preferences)} if preferences else {}),
        "all_ranks": None if ranks is None else asdict(ranks) | {"work": ranks.work.to_json(), "drift": ranks.drift},
        "evaluation": None if done.evaluation is None else evaluation_json(done.evaluation),
        "fit": None if done.fit is None else asdict(done.fit),
    }


def _label(fields: Fields) -> VariantLabel:
    return VariantLabel(*(fields.one(name, str) for name in VariantLabel.__slots__))


def _step(fields: Fields) -> StepDone:
    floats = ("learning_rate", "step_s", "executed_s", "cpu_s", "predicted_makespan_s", "predicted_bubble_ratio")
    integers = ("epoch", "epoch_step", "real_tokens", "padded_tokens", "peak_bytes", "predicted_peak_bytes")
    figures: dict[str, Any] = {name: fields.one(name, float) for name in floats}
    figures |= {name: fields.one(name, int) for name in integers}
    for name in ("loss", "grad_norm"):
        figures[name] = math.nan if fields.raw(name) is None else fields.one(name, float)
    return StepDone(
        step=fields.one("step", int) - 1,
        refused=fields.one("refused", str),
        num_micro_batches=fields.many("num_micro_batches", int),
        all_ranks=None if fields.raw("all_ranks") is None else _all_ranks(fields.sub("all_ranks")),
        evaluation=None if fields.raw("evaluation") is None else evaluation_from(fields.sub("evaluation")),
        fit=None if fields.raw("fit") is None else fit_from(fields.sub("fit")),
        preferences=preferences_from(fields.sub("preferences")) if fields.has("preferences") else None,
        **figures,
    )


def _all_ranks(fields: Fields) -> AllRanks:
    floats = ("makespan_s", "cpu_s", "predicted_makespan_s", "predicted_bubble_ratio", "exposed_planning_s")
    return AllRanks(
        num_steps=fields.one("num_steps", int),
        bubble_ratio=None if fields.raw("bubble_ratio") is None else fields.one("bubble_ratio", float),
        work=work_from(fields.sub("work")),
        predicted_peak_bytes=fields.many("predicted_peak_bytes", int),
        peak_bytes=fields.many("peak_bytes", int),
        furthest_off=None if fields.raw("furthest_off") is None else drifting_from(fields.sub("furthest_off")),
        **{name: fields.one(name, float) for name in floats},
    )
