"""The trace page, the trace file and the Chrome export."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from dynapipe_ext.batch.micro_batches import Piece
from dynapipe_ext.errors import DataError
from dynapipe_ext.timeline import Span, Trace, merge
from dynapipe_ext.tools.show.timeline import (
    TraceRecord,
    pair_steps,
    span_kind,
    summarize,
    write_chrome_trace,
    write_trace_file,
    write_trace_html,
)
from tests.support.limits import LIMIT_S
from tests.support.trace_files import read_trace_file

NAMES = {0: "dp0 pp0 tp0", 1: "dp0 pp1 tp0"}
EVIL = "</script><script>alert(1)</script><!--<script>\u2028&"


def span(rank: int, label: str, start_ms: float, end_ms: float, num_bytes: int = 0) -> Span:
    return Span(
        rank=rank,
        label=label,
        start_s=start_ms / 1e3,
        end_s=end_ms / 1e3,
        cpu_s=(end_ms - start_ms) / 2e3,
        num_bytes=num_bytes,
        shape=(2, 128, 64),
    )


def one_step(name: str = "step 0") -> Trace:
    return Trace(
        (
            span(0, "0F0", 0, 10, 100),
            span(0, "wait 0B0", 10, 50),
            span(0, "0B0", 50, 70, 20),
            span(1, "1F0", 10, 20, 50),
            span(1, "1B0", 20, 50, 10),
        ),
        name,
    )


def in_two_pieces(name: str = "step 0") -> Trace:
    """Micro-batches 0 and 1 of a replica carry sample 17 between them; 2 is whole."""
    pieces = {m: Piece(sample=17, number=m + 1, count=2, start=4096 * m, end=4096 * (m + 1)) for m in (0, 1)}
    actions = ("0F0", "0F1", "0F2", "0B1", "0B2", "0B0")
    return Trace(tuple(span(0, label, 10 * k, 10 * k + 10) for k, label in enumerate(actions)), name).with_pieces(
        pieces
    )


def page_text(tmp_path: Path, **changes: object) -> str:
    given: dict[str, object] = {
        "measured": [one_step()],
        "simulated": [one_step()],
        "title": "Run",
        "subtitle": "sub",
        "notes": [],
        "rank_names": NAMES,
    }
    path = tmp_path / "trace.html"
    write_trace_html(path, **(given | changes))  # type: ignore[arg-type]
    return path.read_text(encoding="utf-8")


def embedded(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, object] = json.loads(found[1])
    return data


def test_page_needs_no_network(tmp_path: Path) -> None:
    page = page_text(tmp_path)
    assert not re.search(r"https?://|@import|url\(|<link|\bsrc=|\bhref=|fetch\(|XMLHttpRequest|\{\{", page)
    assert "default-src 'none'" in page  # the browser itself refuses any request


def test_page_holds_every_span_of_both_panes(tmp_path: Path) -> None:
    data = embedded(page_text(tmp_path))
    (step,) = data["steps"]  # type: ignore[misc]
    for pane in (step["measured"], step["simulated"]):
        labels = [pane["labels"][i] for i in pane["label"]]
        assert labels == ["0F0", "wait 0B0", "0B0", "1F0", "1B0"]
        assert [pane["kinds"][i] for i in pane["label"]] == ["F", "wait", "B", "F", "B"]
        assert pane["start_ns"] == [0, 10_000_000, 50_000_000, 10_000_000, 20_000_000]
        assert pane["bytes"] == [100, 0, 20, 50, 10]
        assert pane["shapes"] == [[2, 128, 64]]
        assert pane["peak_bytes"] == 100


def test_no_text_can_leave_its_element(tmp_path: Path) -> None:
    page = page_text(
        tmp_path,
        measured=[Trace((span(0, EVIL, 0, 1),), EVIL)],
        simulated=[],
        title=EVIL,
        subtitle=EVIL,
        notes=[EVIL],
        rank_names={0: EVIL},
    )
    assert "alert(1)</script" not in page
    assert page.lower().count("<script") == 2
    assert page.lower().count("</script") == 2
    data = embedded(page)
    assert data["rank_names"] == {"0": EVIL}
    assert data["steps"][0]["measured"]["labels"] == [EVIL]  # type: ignore[index]


def test_template_marks_in_names_are_left_alone(tmp_path: Path) -> None:
    assert "{{DATA}} {{STYLE}}" in page_text(tmp_path, title="{{DATA}} {{STYLE}}")


def test_notes_are_shown_only_where_there_are_some(tmp_path: Path) -> None:
    assert "8 ranks share 2 cores" in page_text(tmp_path, notes=["8 ranks share 2 cores"])
    assert '<aside class="notes"' not in page_text(tmp_path)


def test_empty_traces_make_a_page(tmp_path: Path) -> None:
    data = embedded(page_text(tmp_path, measured=[Trace(())], simulated=[]))
    assert data["steps"][0]["measured"]["rank"] == []  # type: ignore[index]
    assert data["steps"][0]["simulated"] is None  # type: ignore[index]
    assert embedded(page_text(tmp_path, measured=[], simulated=[]))["steps"] == []


@pytest.mark.parametrize(("start_s", "end_s"), [(0.0, float("nan")), (float("inf"), float("inf")), (2.0, 1.0)])
def test_impossible_times_are_refused_by_name(tmp_path: Path, start_s: float, end_s: float) -> None:
    bad = Trace((Span(rank=3, label="1F2", start_s=start_s, end_s=end_s),))
    with pytest.raises(DataError, match=r"'1F2' of rank 3"):
        write_trace_html(tmp_path / "t.html", measured=[bad], simulated=[], title="", rank_names={})
    assert not (tmp_path / "t.html").exists()


def test_summary_counts_waits_as_idle() -> None:
    summary = summarize(one_step(), NAMES)
    assert summary.makespan_s == pytest.approx(0.07)
    assert summary.busy == {0: pytest.approx(30 / 70), 1: pytest.approx(40 / 70)}
    assert summary.bubble_ratio == pytest.approx(0.5)
    assert summary.peak_bytes == 100


def test_summary_counts_nested_spans_once_and_micro_batches_by_replica() -> None:
    spans = (
        *(span(0, f"0F{i}", i, i + 1) for i in range(3)),
        span(1, "0F0", 0, 1),
        span(1, "optimizer", 1, 3),
        span(1, "reduce", 1.5, 2.5),
    )
    summary = summarize(Trace(spans), {0: "dp0 pp0 tp0", 1: "dp1 pp0 tp0"})
    assert summary.micro_batches == {"dp0": 3, "dp1": 1}
    assert summary.bubble_ratio == pytest.approx(0.0)


def test_summary_of_nothing_is_zero() -> None:
    summary = summarize(Trace(()), {})
    assert (summary.makespan_s, summary.bubble_ratio, summary.micro_batches, summary.busy) == (0.0, 0.0, {}, {})


def test_steps_pair_by_shared_names_and_else_by_place() -> None:
    a, b, c = Trace((), "step 0"), Trace((), "step 5"), Trace((), "step 9")
    assert pair_steps([a, b], [b, c]) == [("step 0", a, None), ("step 5", b, b), ("step 9", None, c)]
    same = Trace((), "1f1b")
    assert pair_steps([a, b], [same, same]) == [("step 0", a, same), ("step 5", b, same)]
    assert pair_steps([], []) == []


def test_labels_outside_the_notation_have_a_kind() -> None:
    assert span_kind("Wait 1F0") == "wait"
    assert span_kind("optimizer step") == "reduce"
    assert span_kind("0F") == "other"


def test_trace_file_round_trips(tmp_path: Path) -> None:
    record = TraceRecord(
        measured=(one_step("a"), Trace((), "empty")),
        simulated=(one_step("b"),),
        title="Run é",
        subtitle="s",
        notes=("n1", "n2"),
        rank_names=NAMES,
    )
    write_trace_file(tmp_path / "trace.json", record)
    assert read_trace_file(tmp_path / "trace.json") == record


def test_trace_file_holds_the_pieces_of_cut_samples_and_is_as_before_without_any(tmp_path: Path) -> None:
    record = TraceRecord(measured=(in_two_pieces(),), simulated=(one_step(),))
    write_trace_file(tmp_path / "trace.json", record)
    assert read_trace_file(tmp_path / "trace.json") == record
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data["measured"][0].keys() - data["simulated"][0].keys() == {"pieces", "piece"}


def test_measured_spans_take_their_pieces_from_the_planned_step_rank_by_rank() -> None:
    planned = merge([in_two_pieces(), in_two_pieces().with_pieces({}).on_ranks([1])])
    bare = Trace((span(1, "0F1", 0, 1), span(0, "0B1", 1, 2), span(0, "optimizer", 2, 3)))
    pieces = [one.piece for one in bare.with_pieces_of(planned).spans]
    assert list(map(str, pieces)) == ["None", "sample 17, piece 2 of 2, tokens 4096-8191", "None"]


def test_chrome_trace_has_one_process_a_trace_and_every_span(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "c.json", [one_step("measured"), one_step("simulated")])
    events = json.loads((tmp_path / "c.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 10
    assert {event["pid"] for event in complete} == {0, 1}
    assert complete[2] | {"args": None} == {
        "ph": "X", "name": "0B0", "pid": 0, "tid": 0, "ts": 50_000.0, "dur": 20_000.0, "args": None,
    }  # fmt: skip


def test_a_browser_runs_the_page_without_errors(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no chromium on PATH")
    page = page_text(tmp_path, measured=[one_step(), in_two_pieces("step 1")])
    # A style check of its own: state and drawing functions are page globals, so a second script can drive them.
    probe = """<script>
    const canvas = panes[0].canvas, box = canvas.getBoundingClientRect(), seen = [];
    const key = (name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
    key("ArrowDown"); key("ArrowRight"); key("ArrowRight"); seen.push(state.hover.label);
    key("ArrowDown"); seen.push(state.hover.label, byId("card").textContent.includes("2 × 128 × 64"));
    key("Escape"); seen.push(byId("card").hidden);
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -300, clientX: box.left + 400, clientY: box.top + 40 }));
    seen.push(state.to - state.from < state.extent[1]);
    key("0"); seen.push(state.to === state.extent[1]);
    showStep(1);
    const framed = () => {
      const seen = new Set(), frame = view.context.strokeRect;
      view.context.strokeRect = (x) => seen.add(Math.round(nsOf(view, x) / 1e7));
      draw();
      view.context.strokeRect = frame;
      return [...seen].sort().join("");
    };
    const view = panes[0], press = (name) => view.canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
    seen.push(byId("legend").textContent.includes("carries a piece"), framed());
    press("ArrowDown"); press("ArrowRight");
    seen.push(framed(), byId("card").querySelector(".carried").textContent.replaceAll(",", ";"));
    press("ArrowRight"); seen.push(framed(), byId("card").querySelector(".carried"));
    showStep(0);
    const fillText = view.context.fillText, ends = [];
    view.context.fillText = (text, x, y) => {
      if (y === 11 && text !== "busy") ends.push(x + view.context.measureText(text).width / 2);
    };
    state.to = state.from + 4.01e15;
    draw();
    view.context.fillText = fillText;
    seen.push(view.right > 40 && Math.max(...ends) < view.width - 40);
    document.body.dataset.seen = seen.join(",");
    </script></body>"""
    (tmp_path / "probe.html").write_text(page.replace("</body>", probe), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    done = subprocess.run(
        [
            browser,
            *flags.split(),
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1200,900",
            "--dump-dom",
            (tmp_path / "probe.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    sample = "sample 17; piece 2 of 2; tokens 4096-8191"
    assert f'data-seen="0B0,1B0,true,true,true,true,true,,0135,{sample},2,,true"' in done.stdout
    assert "bubble ratio <b>50.0 %</b>" in re.sub(r' class="[^"]*"', "", done.stdout)


def test_shades_units_and_stages_are_told_apart_as_much_as_they_differ() -> None:
    if not (node := shutil.which("node")):
        pytest.skip("no node on PATH")
    view = (files("dynapipe_ext.tools.show") / "trace_page" / "view.js").read_text()
    script = (
        view
        + """
    const shades = (low, high) => [low, high].map((n) => shadeOf(n, { low, high }));
    const pane = { labels: ["0F0", "7F0", "1F0"], label: [0, 1, 2], rank: [0, 0, 1], shapes: [[1, 8]], kinds: {},
      start_ns: [0, 1, 2], end_ns: [1, 2, 3] };
    const made = prepare(pane, {});
    console.log(JSON.stringify([shades(100, 101), shades(100, 6400), [0, 999, 4e6, 36e9].map(bytes), made.chunk,
      made.numChunks, [2.5e5, 9.9e9, 25.913e9].map(timeText),
      [5e3, 5e8, 2e9].map((step) => tickText(3 * step, step) + " " + tickUnit(step).name)]));
    """
    )
    done = subprocess.run([node, "-"], input=script, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    near, far, sizes, chunk, num_chunks, times, ticks = json.loads(done.stdout)
    assert near[1] - near[0] == 0  # 1 % is no difference that a colour should show
    assert far == [0, 8]
    assert sizes == ["0 B", "999 B", "4.00 MB", "36.0 GB"]
    assert (chunk, num_chunks) == ([0, 1, 0], 2)
    assert times == ["0.2500 ms", "9,900 ms", "25.91 s"]
    assert ticks == ["0.015 ms", "1,500 ms", "6 s"]
