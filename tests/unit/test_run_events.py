"""events.jsonl, and the report that can be made of it at any time."""

from __future__ import annotations

import io
import json
import math
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.events import CostsFit, EvalDone, StepDone
from dynapipe_ext.models.flops import Positions
from dynapipe_ext.tools import step_listeners
from dynapipe_ext.tools.account.report import RunFacts, RunReport, StoreInfo, least_evaluation
from dynapipe_ext.tools.account.report_tables import summary_table
from dynapipe_ext.tools.account.run_events import (
    EventsFile,
    VariantLabel,
    read_events,
    report_of,
    resume_events,
    start_events,
)
from dynapipe_ext.tools.account.run_series import RunSeries
from dynapipe_ext.tools.step_listeners import TensorBoardFile, scalars
from tests.support.steps import a_step

FACTS = RunFacts(
    topology=Topology(pp=2),
    device="cpu",
    num_cores=2,
    seed=0,
    loss_norm="tokens",
    date="2026-11-22T01:30:00+00:00",
    oversubscribed=False,
    store=StoreInfo("valkey", "9"),
)
OURS, THEIRS = VariantLabel("ours", "packed", "adaptive"), VariantLabel("theirs", "padded", "1f1b")


def written(path: Path, *steps: StepDone, facts: RunFacts = FACTS) -> Path:
    start_events(path, facts, [OURS, THEIRS], num_steps=10)
    add(path, "ours", *steps)
    return path


def add(path: Path, variant: str, *steps: StepDone) -> None:
    listener = EventsFile(path, variant)
    for done in steps:
        listener.step_done(done)
    listener.close()


def test_what_was_written_is_read_again_bit_for_bit(tmp_path: Path) -> None:
    steps = (a_step(0, loss=math.pi, gathered=0), a_step(1, bubble_ratio=0.1, gathered=2, fit=CostsFit(0.6, 0.1)))
    path = written(tmp_path / "events.jsonl", *steps)
    add(path, "theirs", a_step(0))
    events = read_events(path)
    assert (events.facts, events.num_steps) == (FACTS, 10)
    assert events.variants == ((OURS, steps), (THEIRS, (a_step(0),)))


def test_each_line_is_on_disk_when_its_step_is_over_and_one_cut_short_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl")
    listener = EventsFile(path, "ours")
    for step in range(3):
        listener.step_done(a_step(step))
        assert [done.step for done in read_events(path).variants[0][1]] == list(range(step + 1))
    path.write_text(path.read_text()[:-5])
    assert [done.step for done in read_events(path).variants[0][1]] == [0, 1]
    listener.close()


def test_steps_that_a_resumed_run_does_again_count_once(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl", a_step(4), a_step(5), a_step(6))
    again = replace(a_step(5), loss=0.125)
    add(path, "ours", again, replace(a_step(6), loss=0.25))
    report = report_of(read_events(path), unfinished=None)
    assert report.result.losses == (0.4, 0.125, 0.25)
    assert report.result.first_step == 4
    assert report.result.real_tokens_per_step == (900, 900, 900)


def test_a_run_that_goes_on_keeps_the_steps_before_and_says_what_it_runs_on_now(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    start_events(path, FACTS, [OURS], num_steps=10)
    add(path, "ours", a_step(0), a_step(1), a_step(2))
    now = replace(FACTS, topology=Topology(tp=1, pp=4, dp=1))
    assert resume_events(path, 2, now, OURS, num_steps=20) == (read_events(path), 0)
    events = read_events(path)
    assert (events.facts, events.num_steps) == (now, 20)
    assert [done.step for done in events.variants[0][1]] == [0, 1]


@pytest.mark.parametrize(
    ("damage", "kept", "num_lost"),
    [
        (lambda data: data, [0, 1, 2, 3], 0),
        (lambda data: b"", [], 4),
        (lambda data: bytes(len(data)), [], 4),  # as a file system leaves a file whose content was not written
        (lambda data: data[: len(data) // 2], [], 4),  # it ends before the checkpoint
        (lambda data: data.replace(b'"step": 2,', b'"step": 2\0', 1), [2, 3], 2),
        (lambda data: data[9:], [0, 1, 2, 3], 0),  # the first line, which is written again
        (None, [], 4),
    ],
    ids=["whole", "empty", "zeros", "cut", "a line", "the first line", "gone"],
)
def test_damaged_events_lose_steps_and_never_the_run(
    damage: Any, kept: list[int], num_lost: int, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    start_events(path, FACTS, [OURS], num_steps=10)
    add(path, "ours", *map(a_step, range(6)))
    data = path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage(data))
    events, lost = resume_events(path, 4, FACTS, OURS, num_steps=20)
    assert (lost, [done.step for done in events.variants[0][1]]) == (num_lost, kept)
    assert read_events(path) == events
    aside = tmp_path / "events.jsonl.damaged"
    assert aside.exists() == bool(num_lost and damage and damage(data))
    assert resume_events(path, 4, FACTS, OURS, num_steps=20) == (events, num_lost if not kept else 0)
    add(path, "ours", a_step(4))
    assert [done.step for done in read_events(path).variants[0][1]] == [*kept, 4]


def test_events_that_compare_ways_of_planning_are_not_resumed(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl", a_step(0))
    with pytest.raises(DataError, match="compares 2 ways of planning: only a run of one way can be resumed"):
        resume_events(path, 1, FACTS, OURS, num_steps=20)


def test_a_loss_that_is_no_number_is_null_and_read_again(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl", a_step(0, loss=math.nan, grad_norm=math.inf))
    assert json.loads(path.read_text().splitlines()[1])["loss"] is None
    (done,) = read_events(path).variants[0][1]
    assert math.isnan(done.loss)


def test_a_report_accounts_for_the_steps_that_all_ranks_told_of_and_no_others(tmp_path: Path) -> None:
    steps = [a_step(0, gathered=0), a_step(1, gathered=2), a_step(2, gathered=0), a_step(3, gathered=2)]
    path = written(tmp_path / "events.jsonl", *steps, a_step(4, gathered=0))
    report = report_of(read_events(path), unfinished="Ctrl-C")
    result = report.result
    assert (result.accounted_steps, result.cpu_s, result.work.real) == ((0, 1, 2, 3), 6.0, Positions(3600))
    assert result.cpu_s_per_token == 6.0 / 3600
    assert result.measured_makespan_s == (None, 0.4, None, 0.4, None)
    assert result.averaged_steps == (1, 3)
    assert (result.measured_peak_bytes, result.predicted_peak_bytes) == ((40, 60), (50, 70))
    assert (report.unfinished, report.compare[0].losses if report.compare else None) == ("Ctrl-C", ())
    report.write(tmp_path / "report.json")
    assert RunReport.read(tmp_path / "report.json") == report


def test_evaluations_are_kept_with_their_steps(tmp_path: Path) -> None:
    done = [EvalDone(step=s, loss=x, real_tokens=70, num_samples=5, seconds=0.5) for s, x in ((5, 2.5), (6, math.inf))]
    path = written(tmp_path / "events.jsonl", a_step(4), a_step(5, evaluation=done[0]), a_step(6, evaluation=done[1]))
    report = report_of(read_events(path), unfinished=None)
    finite, infinite = report.result.evaluations
    assert (finite, math.isnan(infinite.loss)) == (done[0], True)
    assert finite.number == 6
    report.write(tmp_path / "report.json")
    assert RunReport.read(tmp_path / "report.json").result.evaluations[0] == done[0]
    assert scalars(a_step(5, evaluation=done[0]))["validation/loss"] == 2.5


@pytest.mark.parametrize(
    ("evaluations", "least"),
    [
        ([("a", 3.0), ("a", 1.0), ("a", 2.0)], 1),
        ([("a", 1.0), ("b", 5.0), ("b", 6.0)], 1),  # other data are harder
        ([("", 1.0), ("b", 5.0)], 0),  # of a version that did not say
        ([("a", math.inf), ("a", math.nan)], None),
        ([], None),
    ],
)
def test_the_least_validation_loss_is_among_those_of_the_last_ones_data(
    evaluations: list[tuple[str, float]], least: int | None
) -> None:
    done = [
        EvalDone(step=step, loss=loss, real_tokens=1, num_samples=1, seconds=0.1, validated_on=name)
        for step, (name, loss) in enumerate(evaluations)
    ]
    assert least_evaluation(done) is (None if least is None else done[least])
    series = RunSeries(VariantLabel("ours", "dynamic", "adaptive"))
    for evaluation in done:
        series.add(a_step(evaluation.step, evaluation=evaluation))
    assert series.least_evaluation is (None if least is None else done[least])


def test_steps_that_changed_nothing_are_counted_and_named(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl", a_step(0), a_step(1, refused="the loss is nan"), a_step(2))
    report = report_of(read_events(path), unfinished=None)
    assert report.result.refused == ((2, "the loss is nan"),)
    report.write(tmp_path / "report.json")
    assert RunReport.read(tmp_path / "report.json") == report
    console = Console(width=120, file=io.StringIO())
    console.print(summary_table(report))
    assert "steps that changed no weight" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_report_of_no_step_and_of_none_gathered_claims_nothing(tmp_path: Path) -> None:
    for steps in ((), (a_step(0, gathered=0),)):
        path = written(tmp_path / "events.jsonl", *steps)
        result = report_of(read_events(path), unfinished="why").result
        assert (result.cpu_s_per_token, result.exposed_planning_s, result.measured_peak_bytes) == (None, None, None)
        assert result.averaged_steps == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0].replace("events/1", "events/2"), *lines[1:]], "'dynapipe-events/2' but"),
        (lambda lines: [lines[0], "{", *lines[2:]], "line 2 is not JSON"),
        (lambda lines: [*lines[:2], lines[2].replace('"ours"', '"his"')], "line 3 is of variant 'his'"),
        (lambda lines: [lines[0], lines[1].replace('"cpu_s": 0.5', '"cpu_s": "x"')], "line 2: cpu_s is 'x'"),
        (lambda lines: [lines[0], lines[1], lines[3]], "steps of 'ours' are missing between 1 and 3"),
        (lambda lines: [], "line 1 is not JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, change: Any, message: str) -> None:
    path = written(tmp_path / "events.jsonl", a_step(0), a_step(1), a_step(2))
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    with pytest.raises(DataError, match=message):
        read_events(path)


def test_steps_without_room_wait_for_it_and_no_part_of_a_line_stays(tmp_path: Path) -> None:
    said: list[str] = []
    path = written(tmp_path / "events.jsonl", a_step(0))
    listener = EventsFile(path, "ours", keeps_steps=True, say=said.append)
    before, limits = path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        for step in (1, 2):
            listener.step_done(a_step(step))
        lack, left = listener.catch_up(), path.read_text()
        with pytest.raises(DataError, match=r"events\.jsonl cannot be written"):  # where nothing may wait
            EventsFile(path, "theirs").step_done(a_step(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(lack) == f"{path} cannot be written (No space left on device): make room there, then resume"
    assert left == before
    path.write_text(before)
    (once,) = said
    assert once.endswith("make room there; the run keeps its steps until then")
    listener.step_done(a_step(3))
    assert listener.catch_up() is None
    listener.close()
    _, steps = read_events(path).variants[0]
    assert [done.step for done in steps] == [0, 1, 2, 3]


def test_tensorboard_reads_the_figures_of_each_step(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    listener = TensorBoardFile(tmp_path)
    steps = [a_step(0, gathered=0), a_step(1, bubble_ratio=0.25)]
    for done in steps:
        listener.step_done(done)
    listener.close()
    (path,) = tmp_path.iterdir()
    found: dict[int, dict[str, float]] = {}
    for event in loader.LegacyEventFileLoader(str(path)).Load():
        if event.HasField("summary"):
            found[event.step] = {value.tag: value.simple_value for value in event.summary.value}
    assert found == {done.number: pytest.approx(scalars(done)) for done in steps}
    assert found[2]["plan/bubble_ratio"] == 0.25


def test_tensorboard_forgets_the_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for name, losses in (("1", {0: 5.0, 1: 4.0, 2: 3.0, 3: 2.0}), ("2", {2: 3.5})):
        listener = TensorBoardFile(tmp_path)
        for step, loss in losses.items():
            listener.step_done(a_step(step, loss=loss))
        listener.close()
        (new,) = [path for path in tmp_path.iterdir() if "tfevents" in path.name and ".run" not in path.name]
        new.rename(tmp_path / f"events.out.tfevents.{name}.run")
    found = accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(one.step, one.value) for one in found] == [(1, 5.0), (2, 4.0), (3, 3.5)]


def test_tensorboard_that_has_no_room_is_named_at_its_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    listener, limits = TensorBoardFile(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    listener.step_done(a_step(0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (next(tmp_path.iterdir()).stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(
            DataError, match=r"events\.out\.tfevents\..* cannot be written \(File too large\): make room"
        ):
            listener.step_done(a_step(1))
        listener.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_tensorboard_that_is_not_installed_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_listeners.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[tensorboard\]'"):
        TensorBoardFile(tmp_path)
