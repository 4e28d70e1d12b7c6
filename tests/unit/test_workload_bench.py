"""The README's workload: its steps are proven, its table says where we lose, and what nobody measured is empty."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import DataError, PlanError, VerificationError
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.planner import Planner
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
    names = ("bound", "contenders", "headlines", "workload", "proven")
    yield {name: load(name) for name in names}
    for name in names:
        sys.modules.pop(name)


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


@pytest.fixture(scope="module")
def figures(bench: Any) -> Any:
    contenders, workload = bench["contenders"], bench["workload"]
    batches = [contenders.Batch(LENGTHS), contenders.Batch(LENGTHS[:8])]
    placed = {c: contenders.topology_for(c, token_costs(Topology(pp=4)), batches) for c in contenders.COLUMNS}
    return [workload.measure_batch(cost_table, placed, batch, 1e12) for batch in batches]


def test_every_way_is_a_proven_step_and_none_beats_the_bound(bench: Any, figures: Any) -> None:
    for found, steps in figures:
        assert found["ways"].keys() == steps.keys() == bench["contenders"].COLUMNS.keys()
        for column, way in found["ways"].items():
            assert found["bound_s"] <= way["makespan_s"] == steps[column].step_plan.makespan_s, column
            assert 0 < way["padding_efficiency"] <= 1
            assert len(steps[column].plans) == 2  # instructions of both replicas, proven
    assert figures[0][1]["packed ZB-V"].plans[0][0].stage_ranks == (0, 1, 2, 3, 3, 2, 1, 0)


def few_bytes(topology: Topology) -> TokenCosts:
    return TokenCosts(topology.num_stages, bytes_per_token=4000 // topology.num_stages)


def test_a_way_that_does_not_fit_says_why(bench: Any) -> None:
    contenders, workload = bench["contenders"], bench["workload"]
    batch = contenders.Batch(LENGTHS)
    placed = {c: contenders.topology_for(c, token_costs(Topology(pp=4)), [batch]) for c in contenders.COLUMNS}
    found, steps = workload.measure_batch(few_bytes, placed, batch, 72_000)  # rows of 120 fit, few of them
    assert "packed 1F1B" not in steps
    assert re.match(r"replica \d: 1f1b needs \d+ B on", found["ways"]["packed 1F1B"]["misfit"])
    assert max(step.peak_bytes for step in steps.values()) <= 72_000


def made(bench: Any, **ways: float) -> dict[str, Any]:
    """A result of one batch with these makespans."""
    one = {"padding_efficiency": 1.0, "bubble_ratio": 0.1, "planning_cpu_s": 0.1, "micro_batches": 3}
    measured = {name.replace("_", " "): one | {"makespan_s": seconds} for name, seconds in ways.items()}
    figures = {"bound_s": 1.0, "ways": {c: {"misfit": "too large"} for c in bench["contenders"].COLUMNS} | measured}
    return {
        "columns": bench["contenders"].COLUMNS, "rivals": list(bench["contenders"].RIVALS), "machine": "m", "date": "d",
        "costs": "c", "costs_fingerprint": "f", "lengths": "l", "topology": {"tp": 1, "pp": 4, "dp": 2}, "limit_gb": 36,
        "sizes": [{"tokens": 65536, "batches": [figures], "layers_per_stage": {}}], "compared_run": [],
    }  # fmt: skip


def test_the_table_begins_with_the_gain_over_the_best_rival_and_shows_emulated_seconds_of_the_same_plans(
    bench: Any,
) -> None:
    headlines = bench["headlines"]
    step_s = {"packed 1F1B": 3.0, "packed ZB-V": 2.0, headlines.EVEN: 1.9, headlines.OURS: 2.2}
    result = made(bench, **step_s)
    rows = [{"column": name, "predicted_s": s, "measured_s": s + 0.1} for name, s in step_s.items()]
    rows[0]["predicted_s"] = 3.5  # of an older plan
    emulated = {"costs_fingerprint": "f", "scale": 1, "rows": rows}
    text = headlines.workload(result, emulated).splitlines()
    assert text[0] == (
        "- first batch, simulated: **10.0 % MORE time than the best rival, packed ZB-V**; on the even layers of ZB-V"
        " 5.0 % less."
    )
    assert text[1] == "- first batch, emulated: not yet measured with these rivals."
    assert "| packed 1F1B | 3.000 s |  | 3.000 s | 1.000 | 0.100 | 0.10 s |" in text
    assert "| packed ZB-V | 2.000 s | 2.100 s | 2.000 s | 1.000 | 0.100 | 0.10 s |" in text
    assert "| packed interleaved 1F1B |  |  | does not fit |  |  |  |" in text
    for stale in (None, emulated | {"scale": 2}, emulated | {"costs_fingerprint": "g"}):
        assert "2.100 s" not in headlines.workload(result, stale)


def test_a_plan_that_the_proof_rejects_is_not_timed(bench: Any) -> None:
    """Replicas that share experts meet in every micro-batch, so that orders of their own would wait for ever."""
    proven, topology = bench["proven"], Topology(tp=2, pp=2, dp=2)
    costs = AnalyticCosts(preset("mixtral-8x7b"), topology, flops_per_s=350e12, overhead_ns=100_000, ep=2)
    planner = Planner(topology, costs, 1e15, layout="packed", replica_counts="equal")
    samples = sample_lengths([4000, 300, 300, 2500, 900, 900, 100, 50, 50, 1800, 700, 20])
    with pytest.raises(VerificationError):
        proven.planned_step(planner, samples)
    step = proven.planned_step(replace(planner, schedule="1f1b"), samples)
    assert proven.fastest([lambda: step]) is step
    replicas = [replica.micro_batches for replica in step.step_plan.batch.replicas]
    with pytest.raises(PlanError, match="needs"):
        proven.under_schedule("1f1b", replicas, costs, topology.stage_ranks, step.peak_bytes - 1)


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


def test_a_report_gives_the_figures_of_all_that_was_compared(bench: Any) -> None:
    baselines = (run_result("packed ZB-V", 2.0, 2.6), run_result("something else", 0.1, 1.0))
    cpu, loss = bench["workload"].report_rows(run_report(baselines))
    assert cpu["values"] == {"ours": 500.0, "packed ZB-V": 2000.0, "something else": 100.0}
    assert loss["values"] == {"ours": 2.5, "packed ZB-V": 2.6, "something else": 1.0}
    with pytest.raises(DataError, match="--compare"):
        bench["workload"].report_rows(run_report(None))


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
