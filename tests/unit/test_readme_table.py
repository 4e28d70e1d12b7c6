"""The table of results: its bound holds, it shows where we lose, and it leaves empty what nobody measured."""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.schedules.judge.simulate import simulate
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.tables.one_f_one_b import one_f_one_b
from dynapipe_ext.tools.account.report import RunFacts, RunReport, RunResult

BENCH = Path(__file__).resolve().parent.parent / "bench"
LENGTHS = (8, 8, 8, 16, 16, 24, 40, 8, 64, 8, 120, 16)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The scripts, which are no package: each imports the ones before it."""
    names = ("bound", "contenders", "readme_table")
    yield {name: load(name) for name in names}
    for name in names:
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def table(bench: Any) -> ModuleType:
    module: ModuleType = bench["readme_table"]
    return module


def cost_table(topology: Topology) -> CostTable:
    """Times that are no polynomial in tokens: few rows are dear, long rows dearer, and corners are missing."""
    shapes = itertools.product((1, 2, 4, 8, 16), (8, 16, 32, 64, 128))
    points = [(rows, n) for rows, n in shapes if rows * n <= 256]

    def column(ms: float, square: float) -> dict[tuple[int, ...], float]:
        return {(r, n): 0.3 + ms * r * n * (1 + 0.5 / r) + square * r * n * n for r, n in points}

    mb = {(r, n): 0.01 * r * n for r, n in points}
    layer = Grid.from_points(
        {"forward_ms": column(0.01, 1e-4), "backward_ms": column(0.02, 2e-4), "stored_mb": mb, "peak_mb": mb}
    )
    head = Grid.from_points({"forward_ms": column(0.004, 0), "backward_ms": column(0.008, 0)})
    return CostTable(
        grids={("none", "encoder"): layer, ("none", "postprocess"): head},
        parameter_bytes={"encoder": 1e6, "embedding": 1e6},
        hidden_size=8,
        num_layers=16,
        topology=topology,
    )


def token_costs(topology: Topology) -> TokenCosts:
    return TokenCosts(topology.num_stages, ns_per_token=1000, ns_per_token_squared=3, overhead_ns=5000)


@pytest.mark.parametrize("make_costs", [cost_table, token_costs])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_plan_beats_the_bound(bench: Any, make_costs: Any, data: st.DataObject) -> None:
    topology = Topology(pp=data.draw(st.integers(1, 3)), dp=data.draw(st.integers(1, 2)))
    costs = make_costs(topology)
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=14))
    micro_batches: list[list[MicroBatch]] = [[] for _ in range(topology.dp)]
    waiting = sample_lengths(data.draw(st.permutations(lengths)))
    while waiting:
        count = data.draw(st.integers(1, 4))
        taken, waiting = tuple(waiting[:count]), waiting[count:]
        layout = "packed" if sum(s.tokens for s in taken) <= 128 and data.draw(st.booleans()) else "padded"
        replica = data.draw(st.integers(0, topology.dp - 1))
        micro_batches[replica].append(MicroBatch(taken, layout, pad_multiple=data.draw(st.sampled_from([1, 8]))))
    makespan_s = max(
        simulate(one_f_one_b(topology.pp, len(replica)), costs.evaluate(replica)).makespan_s
        for replica in micro_batches
        if replica
    )
    assert bench["bound"].batch_bound_s(costs, lengths, dp=topology.dp) <= makespan_s


def test_the_bound_is_reached_where_nothing_is_lost(bench: Any) -> None:
    costs = TokenCosts(1, ns_per_token=1000, ns_per_token_squared=2, overhead_ns=0)
    plan = Planner(Topology(), costs, 1e12, layout="packed", pad_multiple=1, max_tokens=100).plan([10, 30, 60])
    bound_s = bench["bound"].batch_bound_s(costs, [10, 30, 60], dp=1)
    assert bound_s == pytest.approx(3 * (100 * 1e-6 + 2e-9 * (100 + 900 + 3600)), rel=1e-3)
    assert plan.makespan_s == pytest.approx(bound_s, rel=1e-3)


@pytest.mark.parametrize(("rows", "length"), [(8, 32), (4, 64), (2, 128)])
def test_the_bound_is_reached_at_the_cheapest_shapes_of_a_table(bench: Any, rows: int, length: int) -> None:
    costs = cost_table(Topology())
    micro_batches = [MicroBatch(tuple(sample_lengths([length] * rows)))] * 50
    makespan_s = simulate(one_f_one_b(1, 50), costs.evaluate(micro_batches)).makespan_s
    bound_s = bench["bound"].batch_bound_s(costs, [length] * rows * 50, dp=1)
    assert bound_s == pytest.approx(makespan_s, rel=1e-3)


def test_the_bound_counts_head_tail_and_the_longest_chain(bench: Any) -> None:
    batch_bound_s = bench["bound"].batch_bound_s
    costs = TokenCosts(4, ns_per_token=1_000_000, overhead_ns=0)
    # 20 samples of 10: the last stage works 20 x 30 ms after 30 ms of other stages' forwards, and 60 ms follow.
    assert batch_bound_s(costs, [10] * 20, dp=1) == pytest.approx(0.690, rel=1e-3)
    assert batch_bound_s(costs, [10] * 20, dp=2) == pytest.approx(0.390, rel=1e-3)
    assert batch_bound_s(costs, [1000], dp=2) == pytest.approx(12.0, rel=1e-3)


def test_the_bound_refuses_what_it_does_not_know(bench: Any) -> None:
    with pytest.raises(PlanError, match="at least one sample"):
        bench["bound"].batch_bound_s(TokenCosts(1), [], dp=1)
    with pytest.raises(ConfigError, match="object"):
        bench["bound"].batch_bound_s(object(), [1], dp=1)


@pytest.fixture(scope="module")
def figures(bench: Any) -> Any:
    batches = [bench["contenders"].Batch(LENGTHS), bench["contenders"].Batch(LENGTHS[:8])]
    found = bench["readme_table"].simulated(cost_table, batches, limit_bytes=1e12)
    return batches, found


def test_every_column_is_simulated_on_every_batch_and_none_beats_the_bound(bench: Any, figures: Any) -> None:
    batches, found = figures
    makespans = found["makespan_s"]
    assert {*bench["contenders"].COLUMNS, "bound"} <= makespans.keys()
    for column, values in makespans.items():
        assert len(values) == len(batches)
        bounds = found["free"][column] if column == "ours, placed, split" else makespans["bound"]
        assert all(value >= bound for value, bound in zip(values, bounds, strict=True)), column
    assert all(0 < x <= 1 for column in found["padding_efficiency"].values() for x in column)
    assert found["padding_efficiency"].keys() == makespans.keys() - {"bound"}


def few_bytes(topology: Topology) -> TokenCosts:
    return TokenCosts(topology.num_stages, bytes_per_token=4000 // topology.num_stages)


def test_a_column_that_fits_nowhere_stays_empty(bench: Any, table: Any, capsys: pytest.CaptureFixture[str]) -> None:
    batch = bench["contenders"].Batch(LENGTHS)
    found = table.simulated(few_bytes, [batch], limit_bytes=160_000)  # a row of 120 fits, half of the batch not
    assert "packing" not in found["makespan_s"]
    assert "packing: " in capsys.readouterr().err
    row = table.simulated_rows(65536, found)[0]
    cells = [cell.strip() for cell in table.markdown([row], []).splitlines()[3].split("|")[1:-1]]
    assert cells[2] == ""
    assert all(cell for i, cell in enumerate(cells) if i != 2)


def test_rows_are_medians_and_the_bound_says_how_far_ours_is(table: Any, figures: Any) -> None:
    _, found = figures
    row = table.simulated_rows(65536, found)[0]
    assert row.values["ours"] == statistics.median(found["makespan_s"]["ours"])
    over = [a / b for a, b in zip(found["makespan_s"]["ours"], found["makespan_s"]["bound"], strict=True)]
    assert row.notes["ours"] == f"{np.median(over):.3f} x its bound"
    placed = zip(found["makespan_s"]["ours, placed, split"], found["free"]["ours, placed, split"], strict=True)
    assert row.notes["ours, placed, split"] == f"{np.median([a / b for a, b in placed]):.3f} x its bound"


def test_each_cell_has_its_tag_and_a_lost_row_is_marked(table: Any) -> None:
    lost = table.Row(name="t", tag="simulated", values={"padding": 9.0, "dynapipe": 1.0, "ours": 2.0}, unit=" s")
    won = table.Row(name="e", tag="emulated", values={"dynapipe": 0.5, "ours": 0.9, "reference": 0.7}, best="high")
    tied = table.Row(name="c", tag="measured", values={"packing": 0.999, "ours": 1.0, "bound": 0.1})
    placed = table.Row(name="p", tag="simulated", values={"dynapipe": 1.5, "ours": 2.0, "ours, placed, split": 1.4})
    lines = table.markdown([lost, won, tied, placed], ["a note"]).splitlines()
    assert lines[0] == table.BEGIN
    assert lines[-2:] == ["- a note", table.END]
    behind = "2.00 s simulated; *ours is behind*"
    assert lines[3] == f"| t | 9.00 s simulated |  |  | **1.00 s** simulated | {behind} |  |  |"
    assert lines[4] == "| e |  |  |  | 0.50 emulated; 0.70 reference | 0.90 emulated |  |  |"
    assert lines[5] == "| c |  | 1.00 measured |  |  | 1.00 measured |  | 0.10 measured |"
    assert lines[6] == "| p |  |  |  | 1.50 simulated | 2.00 simulated | 1.40 simulated |  |"
    assert [sorted(row.leaders()) for row in (lost, won, tied, placed)] == [["dynapipe"], [], [], []]


def test_the_block_between_the_markers_is_replaced_and_nothing_else(table: Any) -> None:
    new = table.markdown([], [r"a \1 in a note"])
    readme = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.written(readme, new) == f"before\n{new}\nafter\n"
    assert table.written(table.written(readme, new), new) == table.written(readme, new)
    for broken in ("no markers", f"{table.END}{table.BEGIN}", readme * 2):
        with pytest.raises(DataError, match="must hold"):
            table.written(broken, new)


def run_result(name: str, cpu_s: float, loss: float) -> RunResult:
    return RunResult(
        name=name,
        layout="padded",
        schedule="1f1b",
        losses=(9.0, loss),
        real_tokens_per_step=(500, 500),
        padded_tokens=1200,
        step_s=(1.0, 1.0),
        cpu_s=cpu_s,
        num_micro_batches=((1,), (1,)),
        predicted_makespan_s=(1.0, 1.0),
        measured_makespan_s=(1.0, 1.0),
        predicted_bubble_ratio=(0.1, 0.1),
        measured_bubble_ratio=(0.1, 0.1),
        exposed_planning_s=0.0,
    )


def run_report(compare: tuple[RunResult, ...] | None) -> RunReport:
    facts = RunFacts(
        topology=Topology(tp=2, pp=2, dp=2),
        device="cpu",
        num_cores=2,
        seed=0,
        loss_norm="tokens",
        date="2026-01-01T00:00:00",
        oversubscribed=True,
        store=None,
    )
    return RunReport(facts=facts, result=run_result("dynapipe-ext", 0.5, 2.5), compare=compare)


def test_a_report_fills_the_measured_rows_and_leaves_the_rest_empty(table: Any, tmp_path: Path) -> None:
    baselines = (run_result("padding to the batch maximum, 1F1B", 2.0, 2.6), run_result("something else", 0.1, 1.0))
    run_report(baselines).write(tmp_path / "report.json")
    cpu, loss = table.report_rows(RunReport.read(tmp_path / "report.json"))
    assert cpu.values == {"padding": pytest.approx(2000.0), "ours": pytest.approx(500.0)}
    assert loss.values == {"padding": 2.6, "ours": 2.5}
    assert cpu.name.endswith("TP2 PP2 DP2")
    assert loss.name.startswith("loss after 2 steps")
    with pytest.raises(DataError, match="--compare"):
        table.report_rows(run_report(None))


def test_the_compared_runs_have_the_names_that_train_gives_them(table: Any) -> None:
    from dynapipe_ext.launch.job.configured import variants
    from dynapipe_ext.settings.train_config import TrainConfig

    assert set(table._RUNS.values()) <= {variant.name for variant in variants(TrainConfig(), compare=True)}


def test_reference_plans_are_read_and_a_missing_file_is_named(bench: Any, tmp_path: Path) -> None:
    read_batches = bench["contenders"].read_batches
    folder = tmp_path / "data" / "reference_plans"
    folder.mkdir(parents=True)
    raw = {"lengths": [[8, 0], [16, 0]], "makespan_ms": [1.0, 3.0], "efficiency": 0.9}
    (folder / "gpt_64k.json").write_text(json.dumps([raw | {"partition_cpu_s": 1.0, "sched_cpu_s": 2.0}]))
    batches, _ = read_batches(tmp_path, 65536)
    assert [batch.lengths for batch in batches] == [(8, 16)]
    with pytest.raises(DataError, match=r"gpt_256k\.json"):
        read_batches(tmp_path, 262144)


def test_generated_batches_reach_the_budget_and_are_the_same_each_time(bench: Any) -> None:
    read_batches = bench["contenders"].read_batches
    first, _ = read_batches(None, 2000, limit=2)
    assert len(first) == 2
    assert first[0].lengths != first[1].lengths
    assert all(2000 <= batch.tokens < 2000 + 2048 for batch in first)
    assert first == read_batches(None, 2000, limit=2)[0]
