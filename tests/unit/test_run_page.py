"""The page of a run: what it says, what it never holds, and that it is written seldom and of any run."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.events import CostsFit, DriftingShape, EvalDone, StepDone
from dynapipe_ext.launch.run.page import LivePage, PageListener, write_page
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.timeline import Span, Trace
from dynapipe_ext.tools.account.report import RunFacts, shared_cores_note
from dynapipe_ext.tools.account.run_events import (
    EVENTS_FILE,
    EventsFile,
    VariantLabel,
    note,
    read_events,
    read_history,
    start_events,
)
from dynapipe_ext.tools.account.run_series import Point, RunSeries, RunSoFar, Thinned
from dynapipe_ext.tools.console import percent
from dynapipe_ext.tools.files import toml_of
from dynapipe_ext.tools.show.charts import Chart, Line, chart_html
from dynapipe_ext.tools.show.run_page import RUN_FILES, with_file
from dynapipe_ext.tools.show.run_words import NextMove, slowest_actions
from dynapipe_ext.tools.show.timeline import TraceRecord
from tests.support.limits import LIMIT_S
from tests.support.steps import a_step

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\" onload='alert(3)' {{STYLE}}"
NAMES = {0: "dp0 pp0 tp0", 1: "dp0 pp1 tp0"}


def facts(**changes: Any) -> RunFacts:
    given: dict[str, Any] = {
        "topology": Topology(tp=1, pp=2, dp=1, layers_per_stage=(1, 1)),
        "device": "cpu (x86_64, 2 cores)",
        "num_cores": 2,
        "seed": 0,
        "loss_norm": "tokens",
        "date": "2026-11-24T00:43:09+00:00",
        "oversubscribed": False,
        "store": None,
        "versions": {"python": "3.11.7"},
    }
    return RunFacts(**(given | changes))


def span(rank: int, label: str, start_ms: float, end_ms: float, length: int = 128, cpu: float = 1.0) -> Span:
    start_s, end_s = start_ms / 1e3, end_ms / 1e3
    return Span(
        rank=rank, label=label, start_s=start_s, end_s=end_s, cpu_s=cpu * (end_s - start_s), shape=(1, length, 0)
    )


SIMULATED = Trace(
    (span(0, "0F0", 0, 10), span(0, "0F1", 10, 40, 512), span(1, "1F0", 10, 20), span(1, "1F1", 40, 90, 512))
)
MEASURED = Trace(
    (
        span(0, "0F0", 0, 20, cpu=0.5),
        span(0, "0F1", 20, 52, 512),
        span(1, "wait 1F1", 30, 99),
        span(1, "1F0", 20, 30),
        span(1, "1F1", 99, 150, 512),
    )
)
RECORD = TraceRecord(measured=(MEASURED,), simulated=(SIMULATED,), rank_names=NAMES)


def a_run(
    run_dir: Path,
    steps: Sequence[StepDone],
    *,
    labels: Sequence[str] = ("ours",),
    settings: Any = None,
    **of_facts: Any,
) -> Path:
    """A run's directory as ranks leave it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    variants = [VariantLabel(name, "packed", "adaptive") for name in labels]
    start_events(run_dir / EVENTS_FILE, facts(**of_facts), variants, num_steps=20)
    for label in labels:
        file = EventsFile(run_dir / EVENTS_FILE, label)
        for done in steps:
            file.step_done(done)
        file.close()
    config = TrainConfig().with_values(run={"steps": 20}).to_json() if settings is None else settings
    (run_dir / "config.toml").write_text(toml_of(config))
    return run_dir


def page_of(run_dir: Path, **about: Any) -> str:
    write_page(run_dir, RunSoFar.of(read_events(run_dir / EVENTS_FILE)), **about)
    return (run_dir / "index.html").read_text(encoding="utf-8")


class Texts(HTMLParser):
    """What people see, by element; what is not closed is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs)
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "br", "input"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & {*self._open[-1:]}:
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(filter(None, self.words))


def steps_of_a_run() -> list[StepDone]:
    steps = [a_step(step, bubble_ratio=0.25) for step in range(12)]
    evaluation = EvalDone(step=5, loss=0.4, real_tokens=90, num_samples=3, seconds=0.1)
    steps[5] = replace(steps[5], evaluation=evaluation, fit=CostsFit(0.62, 0.04))
    steps[7] = replace(steps[7], refused="the gradient norm is inf", grad_norm=math.nan, loss=math.nan)
    return steps


def test_a_page_says_how_a_run_stands_and_shows_every_figure(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "mine", steps_of_a_run())
    note(run_dir, "begun", 0, "2 ranks")
    note(run_dir, "save", 8, "a checkpoint")
    note(run_dir, "fault", None, "rank 1 was killed")
    moves = [NextMove("--pieces auto", "cuts long samples", 0.123)]
    page = Texts(page_of(run_dir, record=RECORD, moves=moves, num_tried=4))
    for sentence in (
        "The run did 12 of 20 steps, on 2 ranks (TP1 × PP2 × DP1), cpu (x86_64, 2 cores).",
        "The loss fell from 2.0000 (step 1) to 0.1667 (step 12).",
        "The validation loss is 0.4000 after step 6.",
        "In 1 step the loss was not finite.",
        "1 step changed no weight.",
        "It learned from 900 real tokens a second; 10.0 % of the positions it computed were padding.",
        "Ranks were idle for 25.0 % of a step; the plans predicted 20.0 %.",
        "A step took 33.3 % longer than predicted.",
        "The fullest rank (1) held 60 B at most; predicted were 70 B, of a limit of 1.00 GB.",
        "Costs were fitted after step 6 (62.0 % off → 4.0 %).",
        "B of 4 x 512 on stage 1",
        "Settings that are not defaults",
        "[run] steps 40 20",
        "fault rank 1 was killed",
        "8 save a checkpoint",
        "8 refused the step changed no weight: the gradient norm is inf",
        "--pieces auto +12.3 % cuts long samples",
        "4 changes of settings",
    ):
        assert sentence in page.text, sentence
    charts = (
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Real tokens a second",
        "Padding",
        "Bubble",
        "Most bytes",
        "Drift",
    )
    for chart in charts:
        assert re.search(rf"{chart}[^.]*", page.text)
    assert page.tags.count("svg") == len(charts)
    assert {"config.toml", "events.jsonl", "history.jsonl", "report.json"} == set(page.links) <= set(RUN_FILES)
    assert "refresh" not in page_of(run_dir)


def test_a_file_made_after_the_page_is_linked_once(tmp_path: Path) -> None:
    page = page_of(a_run(tmp_path / "r", steps_of_a_run()))
    linked = with_file(page, "emulated.html")
    assert Texts(linked).links == [*Texts(page).links, "emulated.html"]
    assert with_file(linked, "emulated.html") == linked


def test_what_the_heading_says_is_not_said_again_above_the_timeline(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "r", steps_of_a_run(), oversubscribed=True)
    shared = shared_cores_note(2, 2)
    said = Texts(page_of(run_dir, record=replace(RECORD, notes=(shared, "Ranks filled waits.")))).text
    assert said.count(shared) == 1
    assert said.count("Ranks filled waits.") == 1


def test_a_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    page = page_of(a_run(tmp_path / "r", steps_of_a_run()), record=RECORD)
    assert not re.search(r"https?:|@import|url\(|<link|\bsrc=|fetch\(|XMLHttpRequest|\{\{", page)
    assert "default-src 'none'" in page  # the browser itself refuses any request


def test_no_text_of_a_run_can_leave_its_element_and_no_credential_is_in_a_page(tmp_path: Path) -> None:
    settings = {"data": {"path": EVIL, "mixture": [EVIL, "s3://key:wordpass@bucket/x"]}, EVIL: {EVIL: EVIL}}
    settings["job"] = {"redis_server": "redis://alice:wordpass@host", "store_password": "wordpass"}
    steps = [replace(one, refused=EVIL) for one in steps_of_a_run()]
    run_dir = a_run(tmp_path / "r", steps, labels=[EVIL, "other"], settings={}, device=EVIL, versions={EVIL: EVIL})
    (run_dir / "config.toml").write_text("")
    note(run_dir, "ended", 3, f"{EVIL} redis://bob:wordpass@host/0")
    run = RunSoFar.of(read_events(run_dir / EVENTS_FILE))
    evil_record = TraceRecord(measured=(Trace((span(0, EVIL, 0, 1),), EVIL),), notes=(EVIL,), rank_names={0: EVIL})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynapipe_ext.launch.run.page.read_settings", lambda _: settings)
        write_page(
            run_dir,
            run,
            unfinished=f"{EVIL} redis://:wordpass@host",
            record=evil_record,
            moves=[NextMove(EVIL, EVIL, 1.0)],
        )
    text = (run_dir / "index.html").read_text()
    page = Texts(text)
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert page.text.count("alert(1)") > 10
    assert "wordpass" not in text
    assert "redis://…@host" in page.text


@pytest.mark.parametrize(
    "content", ["", '{"date": "x"', "null\n[]\n{}\n", '{"kind": "other", "date": "", "text": ""}\n']
)
def test_a_killed_run_has_a_page_of_what_it_left(content: str, tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "r", steps_of_a_run()[:3])
    note(run_dir, "begun", 0, "2 ranks")
    with (run_dir / EVENTS_FILE).open("a") as file:
        file.write('{"variant": "ours", "step": 4, "lo')
    with (run_dir / "history.jsonl").open("a") as file:
        file.write(content)
    assert [one.kind for one in read_history(run_dir)] == ["begun"]
    text = Texts(page_of(run_dir, unfinished="ended by a signal (SIGKILL)")).text
    assert "did 3 of 20 steps" in text
    assert "It ended early: ended by a signal (SIGKILL)." in text


def test_a_run_that_goes_on_with_other_ranks_has_a_page_before_its_first_step(tmp_path: Path) -> None:
    steps = [a_step(step, gathered=1) for step in range(2)]  # of two ranks
    text = Texts(page_of(a_run(tmp_path / "r", steps, topology=Topology()), unfinished="refused")).text
    assert "did 2 of 20 steps" in text
    assert "Most memory of each rank" not in text
    assert "Most memory of each rank" in Texts(page_of(a_run(tmp_path / "s", steps), unfinished="refused")).text


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    text = Texts(page_of(a_run(tmp_path / "r", []), unfinished="no memory")).text
    assert "No step has ended yet, of 20 steps" in text


def test_the_page_of_a_run_that_goes_on_refreshes_is_written_seldom_and_is_that_of_its_events(tmp_path: Path) -> None:
    run_dir, now, pages = a_run(tmp_path / "r", []), [0.0], 0
    events, page = EventsFile(run_dir / EVENTS_FILE, "ours"), LivePage(run_dir, clock=lambda: now[0])
    listener = PageListener(page, "ours")
    for done in steps_of_a_run():
        now[0] += 4.0
        events.step_done(done)
        (run_dir / "index.html").unlink(missing_ok=True)
        listener.step_done(done)
        pages += (run_dir / "index.html").exists()
    assert pages == 4  # of 48 s: after the first step, then every 10 s at most
    assert page.run is not None
    read = RunSoFar.of(read_events(run_dir / EVENTS_FILE))
    assert [one.loss.points() for one in page.run.variants] == [one.loss.points() for one in read.variants]
    assert page.run.own.real_tokens == read.own.real_tokens
    text = page_of(run_dir, going_on=True)
    assert '<meta http-equiv="refresh"' in text
    assert "has done 12 of 20 steps so far" in Texts(text).text
    assert "At this rate the other steps take 0:08" in Texts(text).text
    assert "report.json" not in Texts(text).links  # it comes with the end


def test_pages_take_no_more_than_their_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [0.0], []

    def writing(*_: Any, **__: Any) -> None:
        now[0] += 2.0
        written.append(now[0])

    monkeypatch.setattr("dynapipe_ext.launch.run.page.write_page", writing)
    page = LivePage(a_run(tmp_path / "r", [a_step(0)]), clock=lambda: now[0])
    for step in range(3000):
        now[0] += 1.0
        page.add("ours", a_step(step))
    assert 2.0 * len(written) <= 2.0 + now[0] / 500


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=200), st.integers(1, 9))
def test_a_thinned_figure_keeps_its_mean_and_its_range(values: list[float | None], most: int) -> None:
    thinned = Thinned(most)
    for number, value in enumerate(values, 5):
        thinned.add(number, value)
    known, points = [value for value in values if value is not None], thinned.points()
    assert len(points) <= most
    assert all(one.last < other.first for one, other in pairwise(points))
    assert all(point.low - 1e-6 <= point.mean <= point.high + 1e-6 for point in points)
    if known:
        assert thinned.mean == pytest.approx(math.fsum(known) / len(known), abs=1e-4)
        assert (min(p.low for p in points), max(p.high for p in points)) == (min(known), max(known))
    else:
        assert thinned.mean is None


def test_a_run_of_any_length_takes_the_same_room() -> None:
    series = RunSeries(VariantLabel("ours", "packed", "adaptive"))
    for step in range(20_000):
        done = a_step(step, bubble_ratio=0.1, refused="no")
        assert done.all_ranks is not None
        shape = DriftingShape(0, "F", (1, step, 0), 1.0 + step, 0.1)
        series.add(replace(done, all_ranks=replace(done.all_ranks, furthest_off=shape)))
    assert (series.num_steps, series.num_refused, len(series.refused)) == (20_000, 20_000, 50)
    assert max(len(figure.points()) for figure in (series.loss, series.drift, series.padding)) <= 300
    assert len(series.drifting) <= 201
    assert series.furthest_off(1)[0].shape == (1, 19_999, 0)


@pytest.mark.parametrize("most", [0.001, 0.004, 0.3, 40.0])
def test_the_labels_of_an_axis_differ(most: float) -> None:
    points = [Point(first=1, last=1, mean=most, low=0.0, high=most)]
    drawn = chart_html(Chart(title="Padding", lines=[Line(name="a run", points=points)], show=percent, from_zero=True))
    labels = re.findall(r'text-anchor="end">([^<]* %)<', drawn)
    assert labels
    assert len(set(labels)) == len(labels)


def test_slow_actions_are_named_with_their_reasons() -> None:
    slow = slowest_actions(RECORD, on_cpu=True)
    assert [(one.label, one.shape, round(one.measured_s, 3)) for one in slow] == [
        ("1F1", "1 × 512", 0.051),
        ("0F1", "1 × 512", 0.032),
        ("0F0", "1 × 128", 0.02),
        ("1F0", "1 × 128", 0.01),
    ]
    assert [one.why for one in slow] == [
        "the largest micro-batch of the step; stage 1 has the most work a position",
        "the largest micro-batch of the step",
        "2.0 × its predicted time; on a core for 50 % of the time",
        "about as predicted",
    ]
    assert slowest_actions(RECORD, on_cpu=False)[2].why == "2.0 × its predicted time"


def test_a_browser_shows_the_page_without_errors_on_a_narrow_screen(tmp_path: Path) -> None:
    if not (browser := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("no chromium on PATH")
    page = page_of(a_run(tmp_path / "r", steps_of_a_run()), record=RECORD)
    probe = """<script>document.body.dataset.seen =
      [document.documentElement.scrollWidth <= innerWidth, panes[0].data.makespan_ns, panes[1].data.makespan_ns].join()
    </script></body>"""
    (tmp_path / "probe.html").write_text(page.replace("</body>", probe))
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --window-size=420,900"
    words = [browser, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [*words, (tmp_path / "probe.html").as_uri()], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert 'data-seen="true,150000000,90000000"' in done.stdout
