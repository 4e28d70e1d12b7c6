"""report.json and the tables made of it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import DataError
from dynapipe_ext.models.flops import Positions, Work
from dynapipe_ext.tools.account.report import RunFacts, RunReport, RunResult, StoreInfo
from dynapipe_ext.tools.account.report_tables import compare_table, summary_table
from dynapipe_ext.tools.show.run_words import NextMove, next_moves_table


def result(name: str = "dynapipe", step_s: float = 0.5, cpu_s: float = 3.0, last_loss: float = 1.25) -> RunResult:
    return RunResult(
        name=name,
        layout="packed",
        schedule="adaptive",
        losses=(5.0, last_loss),
        real_tokens_per_step=(900, 1100),
        padded_tokens=2500,
        step_s=(step_s, step_s),
        cpu_s=cpu_s,
        num_micro_batches=((3, 4), (5, 4)),
        measured_makespan_s=(0.4, 0.44),
        predicted_makespan_s=(0.4, 0.4),
        measured_bubble_ratio=(0.2, 0.3),
        predicted_bubble_ratio=(0.2, 0.2),
        exposed_planning_s=0.05,
        predicted_peak_bytes=(100, 3 << 20),
        measured_peak_bytes=None,
        work=Work(Positions(2000, 0, 90_000), {"none": Positions(2400, 0, 99_000), "full": Positions(100, 0, 1000)}),
    )


def report(**changes: Any) -> RunReport:
    given: dict[str, Any] = {
        "topology": Topology(tp=2, pp=2, dp=2, layers_per_stage=(3, 1)),
        "device": "cpu",
        "num_cores": 2,
        "seed": 7,
        "loss_norm": "tokens",
        "date": "2026-11-21T10:00:00+00:00",
        "oversubscribed": True,
        "store": StoreInfo("valkey", "9.1.0"),
        "versions": {"dynapipe-ext": "0.1.0"},
        "model": {"layers": 4, "tied": True},
    }
    facts = RunFacts(**(given | {name: value for name, value in changes.items() if name in given}))
    compare = (result("padding, 1F1B", step_s=1.0, cpu_s=4.0), result("fixed rows", cpu_s=2.0))
    outcome: dict[str, Any] = {"result": result(), "compare": compare, "unfinished": None}
    return RunReport(facts=facts, **(outcome | {name: value for name, value in changes.items() if name in outcome}))


# Of two steps, all ranks were asked at the first alone.
SELDOM = replace(
    result(),
    measured_makespan_s=(0.4, None),
    predicted_makespan_s=(0.5, None),
    measured_bubble_ratio=(None, None),
    accounted_steps=(0,),
    exposed_planning_s=None,
    first_step=6,
)


_PER_STEP = "losses real_tokens_per_step step_s num_micro_batches measured_makespan_s predicted_makespan_s"
ONE_STEP: dict[str, Any] = {
    name: getattr(SELDOM, name)[:1] for name in f"{_PER_STEP} measured_bubble_ratio predicted_bubble_ratio".split()
}


def text_of(table: Table, width: int = 160) -> str:
    console = Console(width=width, record=True, color_system=None, file=open("/dev/null", "w"))  # noqa: SIM115 (record)
    console.print(table)
    return console.export_text()


def test_report_round_trips(tmp_path: Path) -> None:
    for written in (
        report(),
        report(compare=None, store=None),
        report(compare=()),
        report(result=SELDOM, unfinished="Ctrl-C"),
    ):
        written.write(tmp_path / "new" / "report.json")
        assert RunReport.read(tmp_path / "new" / "report.json") == written
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_report_has_every_promised_field() -> None:
    data = report().to_json()
    assert data["topology"] == {"tp": 2, "pp": 2, "dp": 2}
    assert data["losses"] == [5.0, 1.25]
    assert data["real_tokens"] == 2000
    assert data["real_tokens_per_s"] == pytest.approx(2000.0)
    assert data["cpu_s_per_token"] == pytest.approx(3.0 / 2000)
    assert data["padding_efficiency"] == pytest.approx(0.8)
    assert data["num_micro_batches"] == [[3, 4], [5, 4]]
    assert data["predicted_makespan_s"] == [0.4, 0.4]
    assert data["measured_makespan_mean_s"] == pytest.approx(0.42)
    assert data["bubble_ratio"]["measured"] == pytest.approx(0.25)
    assert data["peak_bytes"] == {"predicted": [100, 3 << 20], "measured": None}
    assert data["store"] == {"server": "valkey", "version": "9.1.0"}
    assert set(data["compare"][0]) == set(result().to_json())
    assert data["steps"] == 2
    fields = "format date device versions layout schedule seed loss_norm model oversubscribed exposed_planning_s"
    assert set(fields.split()) <= set(data)


def test_a_diverged_loss_is_null_in_the_file_and_nan_again_when_read(tmp_path: Path) -> None:
    report(result=result(last_loss=math.inf), compare=None).write(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["losses"] == [5.0, None]
    assert math.isnan(RunReport.read(tmp_path / "r.json").result.losses[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "dynapipe-report/2"}, "dynapipe-report/2"),
        ({"seed": "7"}, r"seed is '7', expected int"),
        ({"seed": True}, "seed is True, expected int"),
        ({"losses": ["x", 1.0]}, "losses is 'x', expected float"),
        ({"losses": [1.0]}, "real_tokens_per_step has 2 entries for 1 losses"),
        ({"topology": None}, "topology is NoneType"),
        ({"topology": {"tp": 2, "pp": 2}}, "no field 'dp'"),
        ({"compare": {}}, "expected null or a list"),
        ({"compare": [1]}, r"compare\[0\] is int"),
        ({"num_micro_batches": [[3, 4], [5, "4"]]}, r"num_micro_batches\[1\] is '4'"),
        ({"padded_tokens": 10}, "padded_tokens 10 is less than the 2000 real tokens"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "r.json").write_text(json.dumps(report().to_json() | change))
    with pytest.raises(DataError, match=message):
        RunReport.read(tmp_path / "r.json")


@pytest.mark.parametrize("field", sorted(set(report().to_json()) - {"format", "steps"}))
def test_a_missing_field_is_named_unless_it_is_derived(tmp_path: Path, field: str) -> None:
    data = report().to_json()
    del data[field]
    (tmp_path / "r.json").write_text(json.dumps(data))
    derived = {"real_tokens", "real_tokens_per_s", "cpu_s_per_token", "padding_efficiency", "averaged_steps"}
    if field in derived or field.endswith("_mean_s"):
        assert RunReport.read(tmp_path / "r.json") == report()
    else:
        with pytest.raises(DataError, match=repr(field)):
            RunReport.read(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b'{\n"format": }', "line 2"), (b"\xff\xfe", "UTF-8")]
)
def test_files_that_are_no_report_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        RunReport.read(path)


def test_a_failed_write_keeps_the_old_report(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    report().write(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        report(model={"bad": object()}).write(path)
    assert path.read_text() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        report().write(tmp_path / "file" / "r.json")


def test_summary_shows_measured_beside_predicted() -> None:
    text = text_of(summary_table(report()))
    assert "5.0000 → 1.2500" in text
    assert "80.0 %" in text
    assert "3 to 5" in text
    assert "25.0 %" in text
    assert "20.0 %" in text
    assert "420.0 ms" in text
    assert "3.15 MB (rank 1)" in text
    assert "steps 1 to 2" in text
    assert "8 ranks share 2 cores" in text
    assert "share" not in text_of(summary_table(report(oversubscribed=False)))


def test_the_tables_at_a_runs_end_are_readable_in_eighty_columns() -> None:
    lines = text_of(summary_table(report()), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(r"│ loss, first → last +│ +5.0000 → 1.2500 │", "\n".join(lines))
    moves = [NextMove("--tokens-per-batch 16384", "more micro-batches a step; it also changes what is learned", 0.125)]
    lines = text_of(next_moves_table(moves, 6), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(r"│ --tokens-per-batch 16384 │ more .* │ +\+12.5 % │", "\n".join(lines))


def test_means_are_of_the_steps_that_have_every_figure_and_the_table_names_them() -> None:
    data = replace(result(), predicted_makespan_s=(None, 0.5), predicted_bubble_ratio=(None, 0.25)).to_json()
    assert data["averaged_steps"] == [2]
    assert (data["measured_makespan_mean_s"], data["predicted_makespan_mean_s"]) == (0.44, 0.5)
    assert data["bubble_ratio"]["measured"] == 0.3
    text = text_of(summary_table(report(result=SELDOM, unfinished="Ctrl-C")))
    assert "2 steps, unfinished" in text
    assert "step 7 " in text
    assert "400.0 ms │         500.0 ms" in text
    assert f"{1e6 * SELDOM.cpu_s / 900:,.1f} µs" in text  # tokens of the step that is accounted for


def test_summary_of_a_run_without_steps_has_no_figures() -> None:
    empty = RunResult(
        name="x", layout="padded", schedule="1f1b", losses=(), real_tokens_per_step=(), padded_tokens=0, step_s=(),
        cpu_s=0.0, num_micro_batches=(), measured_makespan_s=(),
    )  # fmt: skip
    assert "x: 1 step," in text_of(summary_table(report(result=replace(SELDOM, name="x", **ONE_STEP), compare=None)))
    assert "x: 0 steps" in text_of(summary_table(report(result=empty, compare=None)))


def test_comparison_takes_the_best_baseline_of_each_column_and_marks_losses() -> None:
    text = text_of(compare_table(report()))
    last = next(line for line in text.splitlines() if "over the best baseline" in line)
    cells = [cell.strip() for cell in last.strip("│ ").split("│")]
    # tokens/s 2000 to the best 2000; CPU time 1.5 to 1.0 ms: behind; the rest are equal, a bubble of shared cores idle.
    assert cells == ["over the best baseline", "1.000×", "▼ 1.500×", "1.000×", "-", "1.000×"]
    (worst,) = {name for name in [one.name for one in report().compare or ()] if f"best rival, {name}" in text}
    assert f"a token takes 50.0 % MORE CPU time than the best rival, {worst}" in text
    faster = text_of(compare_table(report(result=result(step_s=0.25), oversubscribed=False)))
    assert "a token takes 50.0 % less time than the best rival" in faster
    assert "2.000×" in faster
    assert "share" not in faster


def test_comparison_takes_bubbles_of_the_same_steps_though_only_one_run_was_simulated() -> None:
    ours = replace(result(), predicted_makespan_s=(None, 0.4), predicted_bubble_ratio=(None, 0.2))
    theirs = replace(result("theirs"), predicted_makespan_s=(), predicted_bubble_ratio=())
    rows = [line for line in text_of(compare_table(report(result=ours, compare=(theirs,)))).splitlines() if "%" in line]
    assert len(rows) == 2
    assert all("25.0 %" in row for row in rows)


def test_comparison_leaves_unknown_figures_out() -> None:
    blind = replace(result(last_loss=math.nan), measured_bubble_ratio=())
    text = text_of(compare_table(report(result=blind)))
    assert "nan" not in text
    with pytest.raises(DataError, match="--compare"):
        compare_table(report(compare=None))


@pytest.mark.parametrize("field", ["step_s", "measured_makespan_s", "num_micro_batches", "predicted_bubble_ratio"])
def test_lists_of_unequal_length_are_refused(field: str) -> None:
    with pytest.raises(DataError, match=field):
        replace(result(), **{field: getattr(result(), field)[:1]})


_OF_STEPS = ("losses", "num_micro_batches", "measured_makespan_s", "predicted_makespan_s")
_OF_STEPS = (*_OF_STEPS, "measured_bubble_ratio", "predicted_bubble_ratio")


def test_a_comparison_says_between_what_rates_the_middle_half_of_the_steps_is() -> None:
    five: dict[str, Any] = {name: getattr(result(), name)[:1] * 5 for name in _OF_STEPS}
    steady = replace(
        result(), real_tokens_per_step=(1000,) * 5, padded_tokens=5000, step_s=(1.0, 0.5, 0.25, 2.0, 0.2), **five
    )
    text = text_of(compare_table(report(result=steady)))
    (line,) = [line for line in text.splitlines() if "middle half" in line]
    assert "1,000-4,000" in line
