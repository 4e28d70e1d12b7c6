"""A schedule as a picture: colours over its actions, within the width, with figures that agree with the simulation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dynapipe_ext.batch.micro_batches import Piece
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.launch.cli import main
from dynapipe_ext.launch.commands.show_schedule import DEFAULT_EFFORT, schedule_for
from dynapipe_ext.schedules.actions import Kind
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns, compute_peak_bytes
from dynapipe_ext.schedules.notation import draw_cells, format_lines, parse_lines
from dynapipe_ext.schedules.published.by_name import PUBLISHED, make_published_schedule
from dynapipe_ext.tools.show.schedule import (
    FOR_COSTS,
    ScheduleView,
    rank_costs,
    read_schedule,
    rendered_schedule,
    uneven_factors,
    view_of,
    write_html,
)


def uniform_view(name: str, num_ranks: int = 4, num_micro_batches: int = 8) -> ScheduleView:
    schedule = make_published_schedule(name, num_ranks, num_micro_batches)
    return view_of(schedule, rank_costs(schedule.stage_ranks, num_micro_batches, (1, 1, 1)), "1 ms each")


def printed(view: ScheduleView, width: int, *, colours: bool = False) -> str:
    console = Console(
        width=width, highlight=False, force_terminal=colours, color_system="standard" if colours else None
    )
    with console.capture() as capture:
        console.print(rendered_schedule(view, width=width))
    return capture.get()


def test_figures_are_those_of_the_papers() -> None:
    h1, h2, half = (uniform_view(name) for name in ("zb-h1", "zb-h2", "v-half"))
    assert (h1.makespan_ns, h2.makespan_ns) == (27_000_000, 27_000_000)
    assert (h1.in_flight, h2.in_flight, half.in_flight) == ((4,) * 4, (7,) * 4, (3,) * 4)
    assert h1.bubble_ratio == pytest.approx(3 / 27)
    assert (h1.inner_bubble_ratio > 0.05, h2.inner_bubble_ratio) == (True, 0)
    assert all(view.lower_bound_ns <= view.makespan_ns for view in (h1, h2, half))


def test_stages_share_the_time_of_their_rank_so_that_schedules_compare() -> None:
    assert uniform_view("interleaved-1f1b").makespan_ns == 28_500_000  # 1F1B's 33 ms with half its bubble of 9
    assert uniform_view("1f1b").makespan_ns == 33_000_000


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("width", [30, 80, 200])
def test_every_row_of_the_picture_is_as_wide_as_it_may_be(name: str, width: int) -> None:
    lines = printed(uniform_view(name, 12, 8), width).splitlines()
    rows = [line for line in lines if line.endswith("|")]
    assert [len(row) for row in rows] == [width] * 12
    assert max(map(len, lines)) <= width


def test_stages_are_named_where_there_is_room_in_every_action_and_nowhere_else() -> None:
    assert "3.0i=" in printed(uniform_view("zb-v", 2, 3), 100)
    narrow = printed(uniform_view("zb-v", 4, 8), 100)
    assert narrow.splitlines()[1].startswith("0 |0-1-2-3-")
    assert "too narrow for stages" in " ".join(narrow.split())


def test_each_kind_has_a_colour_of_its_own() -> None:
    view = uniform_view("zb-h1", 1, 1)
    assert draw_cells(view.schedule, view.trace, width=12) == [
        [("0---", Kind.FORWARD), ("0i==", Kind.BACKWARD_INPUT), ("0w~~", Kind.BACKWARD_WEIGHT)]
    ]
    row = next(line for line in printed(view, 16, colours=True).splitlines() if line.startswith("0 |"))
    colours = re.findall(r"\x1b\[([\d;]+)m0", row)
    assert len(set(colours)) == len(colours) == 3


def test_what_is_printed_names_the_figures() -> None:
    text = printed(uniform_view("zb-v"), 120)
    for part in (
        "zb-v: 8 stages on 4 ranks, 8 micro-batches",
        "makespan        25.5 ms",
        "lower bound     25.5 ms",
        "the makespan is 0.0 % above",
        "bubble ratio    5.9 %, 0.0 % between",
        "peak in flight  4 micro-batches (by rank: 4 4 4 4)",
        "peak memory     4 MB (by rank: 4 4 4 4)",
    ):
        assert part in text


def test_memory_is_in_proportion_to_uneven_times_and_shared_by_the_stages_of_a_rank() -> None:
    factors = np.array([2.0, 0.5])
    for name, peak, in_flight in (("gpipe", 2.5e6, 2), ("1f1b", 2e6, 1), ("interleaved-1f1b", 2e6, 1)):
        schedule = make_published_schedule(name, 1, 2)
        view = view_of(schedule, rank_costs(schedule.stage_ranks, 2, (1, 1, 1), factors), "")
        assert (view.peak_bytes, view.in_flight) == ((peak,), (in_flight,))


@pytest.mark.parametrize("name", FOR_COSTS)
def test_a_schedule_made_for_costs_keeps_the_limit_and_beats_1f1b_on_uneven_micro_batches(name: str) -> None:
    plain = make_published_schedule("1f1b", 4, 12)
    costs = rank_costs(plain.stage_ranks, 12, (1, 1, 1), uneven_factors(12, cv=0.6, seed=1))
    limit = max(compute_peak_bytes(plain, costs))
    found = schedule_for(name, costs, plain.stage_ranks, memory_limit_bytes=limit, effort=200)
    assert max(compute_peak_bytes(found, costs)) <= limit
    assert compute_makespan_ns(found, costs) < compute_makespan_ns(plain, costs)


def test_the_search_takes_any_placement_and_split_backwards() -> None:
    costs = rank_costs((0, 1, 1, 0), 6, (1, 1, 1))
    found = schedule_for("adaptive", costs, (0, 1, 1, 0), memory_limit_bytes=3_000_000, effort=50, split=True)
    assert (found.stage_ranks, found.is_split) == ((0, 1, 1, 0), True)


def test_uneven_factors_have_the_variation_asked_for_and_come_again() -> None:
    factors = uneven_factors(20_000, cv=0.5, seed=3)
    assert factors.mean() == pytest.approx(1, rel=0.02)
    assert factors.std() == pytest.approx(0.5, rel=0.05)
    assert np.array_equal(uneven_factors(9, cv=0.5, seed=3), uneven_factors(9, cv=0.5, seed=3))
    assert not np.array_equal(uneven_factors(9, cv=0.5, seed=3), uneven_factors(9, cv=0.5, seed=4))
    assert uneven_factors(3, cv=0, seed=0).tolist() == [1, 1, 1]


@pytest.mark.parametrize("cv", [-0.1, 11, float("nan"), float("inf")])
def test_impossible_variations_are_refused(cv: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 10"):
        uneven_factors(3, cv=cv, seed=0)


@pytest.mark.parametrize(
    "times", [(0, 1, 1), (1, 0, 1), (-1, 1, 1), (float("nan"), 1, 1), (1, 1, float("inf")), (1, 1), (1, 1e-9, 1)]
)
def test_impossible_times_are_refused(times: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="must be F,I,W"):
        rank_costs((0, 1), 2, times)


PAGE_ROW = re.compile(r"\| `([^`]+)` \|[^|]*\| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \|")


def test_the_page_of_plans_lists_every_schedule_with_figures_that_are_true(root: Path) -> None:
    """The search may do better than it says there, in steps of a tenth."""
    part = (
        (root / ".github/docs/plans.md")
        .read_text()
        .partition("<!-- schedules:begin -->")[2]
        .partition("<!-- schedules:end")[0]
    )
    told = {row[0]: [float(figure) for figure in row[1:]] for row in PAGE_ROW.findall(part)}
    assert list(told) == [*PUBLISHED, *FOR_COSTS, "adaptive --split-backward"]
    for title, figures in told.items():
        found = []
        for factors in (None, uneven_factors(16, cv=0.6, seed=1)):
            name, _, split = title.partition(" ")
            linear = rank_costs(range(4), 16, (1, 1, 1), factors)
            if name in PUBLISHED:
                schedule = make_published_schedule(name, 4, 16)
            else:
                limit = max(compute_peak_bytes(make_published_schedule("1f1b", 4, 16), linear))
                schedule = schedule_for(
                    name, linear, range(4), memory_limit_bytes=limit, effort=DEFAULT_EFFORT, split=bool(split)
                )
            view = view_of(schedule, rank_costs(schedule.stage_ranks, 16, (1, 1, 1), factors), "")
            found += [100 * view.bubble_ratio, max(view.peak_bytes) / 1e6]
        if name == "adaptive":
            assert found[0] < figures[0] + 0.05
            assert found[2] < figures[2] + 0.05
        else:
            assert found == pytest.approx(figures, abs=0.051)


def test_the_page_needs_no_network_and_holds_every_action(tmp_path: Path) -> None:
    view = uniform_view("zb-v", 2, 4)
    write_html(tmp_path / "page.html", view)
    text = (tmp_path / "page.html").read_text()
    assert "src=" not in text
    assert "default-src 'none'" in text
    assert all(f'"{action}"' in text for actions in view.schedule.ranks for action in actions)
    assert "by rank: 2 2" in text


def test_actions_of_a_cut_sample_are_marked_on_the_page(tmp_path: Path) -> None:
    pieces = {m: Piece(sample=7, number=m + 1, count=2, start=64 * m, end=64 * m + 64) for m in (0, 1)}
    view = view_of(parse_lines("0: 0F0 0F1 0F2 0B2 0B1 0B0"), rank_costs([0], 3, (1, 1, 1)), "", pieces=pieces)
    assert [span.piece for span in view.trace.spans] == [pieces.get(int(span.label[-1])) for span in view.trace.spans]
    write_html(tmp_path / "page.html", view)
    assert '"pieces":[[7,1,2,0,64],[7,2,2,64,128]],"piece":[0,1,null,null,1,0]' in (tmp_path / "page.html").read_text()


def test_one_of_a_thing_is_not_called_several() -> None:
    assert uniform_view("1f1b", 1, 1).title == "1f1b: 1 rank, 1 micro-batch"
    assert "1 micro-batch (by rank: 1)" in printed(uniform_view("1f1b", 1, 1), 80)
    assert uniform_view("zb-v", 1, 2).title == "zb-v: 2 stages on 1 rank, 2 micro-batches"


def test_files_of_lines_and_csv_are_read_and_faults_name_file_and_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    schedule = make_published_schedule("v-half", 3, 4)
    file.write_text(format_lines(schedule))
    assert read_schedule(file)[0].ranks == schedule.ranks
    file.write_text("0: 0F0 0B0\n1: 1B0 1F0\n")
    with pytest.raises(PlanError, match=r"mine\.txt: micro-batch 0 on stage 1 runs BF"):
        read_schedule(file)
    file.write_text("0: 0F0 0B0 999999999999F0\n")
    with pytest.raises(
        PlanError, match=r"mine\.txt: line 1 names stage 999999999999 but there is no action of stage 1"
    ):
        read_schedule(file)
    file.write_text("0:\n")
    with pytest.raises(PlanError, match="no rank has an action"):
        read_schedule(file)
    cells = tmp_path / "mine.csv"
    for text, says in (
        ("0F0,0B0,0F0\n", "micro-batch 0 on stage 0 runs FBF"),
        ("", "no rank has an action"),
        (",,\n", "no rank has an action"),
    ):
        cells.write_text(text)
        with pytest.raises(PlanError, match=rf"mine\.csv: {says}"):
            read_schedule(cells)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        read_schedule(file)
    with pytest.raises(DataError, match="cannot be read"):
        read_schedule(tmp_path / "absent.csv")


def test_a_schedule_as_json_has_the_figures_and_orders_of_its_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-schedule", "zb-h1", "--pp", "2", "--micro-batches", "3", "--json"]) == 0
    shown, view = json.loads(capsys.readouterr().out), uniform_view("zb-h1", 2, 3)
    assert [" ".join(actions) for actions in shown["ranks"]] == [
        " ".join(map(str, actions)) for actions in view.schedule.ranks
    ]
    assert shown["makespan_s"] == view.makespan_ns / 1e9
    assert shown["bubble_ratio"] == view.bubble_ratio
    assert (shown["peak_bytes"], shown["micro_batches"]) == ([*view.peak_bytes], 3)
