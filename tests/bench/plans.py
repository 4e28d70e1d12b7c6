"""The bars of plans and schedules as one table: ours and the peers on the reference batches, judged independently.

    python tests/bench/plans.py [--shared DIR] [--no-peers] [--no-grid]

DIR (default ../shared beside the repository) holds judge_plan.py, data/a100_layer_costs, data/reference_plans and
data/multitask_lengths.npy; without it only the grid and the balance are measured. Every plan is written as a file and
judged by judge_plan.py in a process of its own. Share of the room closed = (reference - judged) / (reference - bound):
the reference is its planner's own makespan, the bound is the judge's for the whole batch with one stage a rank in even
layers, for placed plans too. Planning times are CPU
seconds, medians of warm runs. Writes results/plans.json. Exit status 1 where a plan is not valid.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import grid
import numpy as np
from contenders import best_topology, provenance
from judged import CASES, MANY, MEMORY_GB, Bench, Case, Measured, closed_share, samples_of, write_many
from peers import peer_plan, renumbered
from proven import proven

from dynapipe_ext.batch.micro_batches import Layout
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.balance import assign_replicas
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.tools.files import read_json

RESULTS = Path(__file__).parent / "results"
SHARED = Path(__file__).resolve().parents[3] / "shared"
OURS = ("ours", "ours, split", "ours, placed", "ours, placed, split")
PEERS = ("DynaPipe", "Megatron", "Megatron, packed", "verl", "verl, packed", "readiness")
_SLOW_S = 5.0  # a plan that takes longer is made once


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bar. `best` says which way is better; without a bar the figure is for information."""

    what: str
    value: float | None
    bar: float | None = None
    best: str = "low"
    unit: str = ""
    note: str = ""

    @property
    def passed(self) -> bool | None:
        if self.value is None or self.bar is None:
            return None
        return self.value <= self.bar if self.best == "low" else self.value >= self.bar


def planner_of(case: Case, costs: CostTable, *, split: bool) -> Planner:
    """Ours, as `dynapipe plan` sets it up for measured tables."""
    return Planner(case.topology, costs, MEMORY_GB * 10**9, pad_multiple=1, split_backward=split)


def placed(planner: Planner, batches: Sequence[Mapping[str, Any]], case: Case) -> Planner:
    """The same under what `--placement auto` takes for these batches, where messages take no bytes."""
    best = best_topology(planner, [samples_of(case, batch) for batch in batches])
    return replace(planner, topology=best, costs=planner.costs.with_topology(best)[0])


def timed(plan: Callable[[], StepPlan], topology: Topology, runs: int) -> tuple[StepPlan, float, bool | None]:
    """The plan, the median CPU seconds of its warm runs, and whether all are the same (None: made once)."""
    start_s = time.process_time()
    found = plan()
    taken, texts = [time.process_time() - start_s], {json.dumps(plan_json(found, topology))}
    if taken[0] > _SLOW_S:  # warming up changes little here
        return found, taken[0], None
    taken.clear()
    for _ in range(runs):
        start_s = time.process_time()
        found = plan()
        taken.append(time.process_time() - start_s)
        texts.add(json.dumps(plan_json(found, topology)))
    return found, statistics.median(taken), len(texts) == 1


def plans_of(bench: Bench, case: Case, *, with_peers: bool) -> Iterator[Callable[[], Measured]]:
    """Plans of every batch, ours first; each with a function that has it judged."""
    costs, limit, batches = bench.costs(case), MEMORY_GB * 10**9, bench.batches(case)
    planners = {column: planner_of(case, costs, split=column.endswith("split")) for column in OURS[:2]}
    if case is not MANY:
        planners |= {f"ours, placed{name[4:]}": placed(one, batches, case) for name, one in planners.items()}
    for index, batch in enumerate(batches):
        samples = samples_of(case, batch)
        plain: StepPlan | None = None
        for column, planner in planners.items():
            plan, cpu_s, same = timed(lambda p=planner, s=samples: p.plan(s), planner.topology, bench.runs)  # type: ignore[misc]
            plain = plain or plan
            yield _to_judge(bench, case, planner.topology, index, column, plan, cpu_s, same)
        for column in PEERS if with_peers else ():
            peer, _, packed = column.partition(", ")
            layout: Layout = "packed" if packed else "padded"
            start_s = time.process_time()
            try:
                plan = peer_plan(peer, samples, costs, case.topology, limit, layout=layout, ours=plain)
            except PlanError as error:
                print(f"{case.name} batch {index}: {column}: {error}", file=sys.stderr)
                continue
            yield _to_judge(
                bench, case, case.topology, index, column, renumbered(plan), time.process_time() - start_s, None
            )


def _to_judge(
    bench: Bench,
    case: Case,
    topology: Topology,
    index: int,
    column: str,
    plan: StepPlan,
    cpu_s: float,
    same: bool | None,
) -> Callable[[], Measured]:
    path = bench.scratch / f"{case.file}.{index}.{column.replace(', ', '-')}.json"
    path.write_text(json.dumps(plan_json(plan, topology)))
    proven(plan, bench.costs(case).with_topology(topology)[0])
    load = os.getloadavg()[0]
    packed = any(m.layout == "packed" for m in plan.batch.micro_batches)

    def judged() -> Measured:
        return Measured(
            case=case.name,
            column=column,
            index=index,
            makespan_s=plan.makespan_s,
            bound_s=plan.lower_bound_s,
            digest=hashlib.sha256(path.read_bytes()).hexdigest(),
            cpu_s=cpu_s,
            load=load,
            repeatable=same,
            # The judge knows padded micro-batches alone: packed ones are as simulated.
            verdict={"valid": True, "makespan_s": plan.makespan_s} if packed else bench.judge(case, index, path),
        )

    return judged


def case_rows(
    case: Case,
    column: str,
    found: Sequence[Measured],
    batches: Sequence[Mapping[str, Any]],
    bounds: Mapping[tuple[str, str, int], float],
    least_s: Sequence[float],
) -> list[Row]:
    """The bars of one setting of ours on one file: means over its batches. `least_s` of each batch is what no plan of
    whole layers beats, wherever they are placed (none where no such bound is known)."""
    split, is_placed = column.endswith("split"), "placed" in column
    name = f"{case.name}, {'placed, ' * is_placed}{'split' if split else 'whole'} backward"
    closed_bars, faster_bars = (case.placed_closed, case.placed_faster) if is_placed else (case.closed, case.faster)
    rows = []
    if "makespan_ms" in batches[0]:
        reference = [max(batches[m.index]["makespan_ms"]) / 1e3 for m in found]
        judged = [m.verdict["makespan_s"] for m in found]
        note = f"judged {_mean(judged):.3f} s, reference {_mean(reference):.3f} s"
        if closed_bars:
            closed = [closed_share(m, r, bounds) for m, r in zip(found, reference, strict=True)]
            note += f", each {' '.join(f'{100 * c:.0f} %' for c in closed)}"
            if is_placed and least_s:
                least = [replace(m, verdict={"makespan_s": least_s[m.index]}) for m in found]
                most = _mean([closed_share(m, r, bounds) for m, r in zip(least, reference, strict=True)])
                note += f"; no plan of whole layers closes more than {100 * most:.1f} %"
            rows.append(Row(what=f"{name}: room closed", value=_mean(closed), bar=closed_bars[split], best="high",
                            note=note))  # fmt: skip
        if faster_bars:
            ratios = [r / j for r, j in zip(reference, judged, strict=True)]
            rows.append(Row(what=f"{name}: reference / judged", value=_mean(ratios), bar=faster_bars[split],
                            best="high", unit="x", note=note))  # fmt: skip
    over = _mean([m.verdict["makespan_s"] / m.bound_s for m in found])
    rows.append(Row(what=f"{name}: judged / own lower bound", value=over, bar=case.over_bound, unit="x",
                    note="an aim; " * bool(case.over_bound) + f"batch bound {_batch_bound(found):.3f} s"))  # fmt: skip
    for what, key in (("makespan", "predicted_over_judged"), ("peak", "predicted_peak_over_judged")):
        off = [abs(r[key] - 1) for m in found for r in m.verdict["replicas"] if r[key] is not None]
        rows.append(Row(what=f"{name}: predicted / judged {what}, worst error", value=max(off), bar=0.005))
    cpu = [m.cpu_s for m in found]
    most_s = case.placed_planning_s if is_placed else case.most_planning_s
    rows.append(Row(what=f"{name}: planning", value=_mean(cpu), bar=most_s, unit="s",
                    note=f"load average {max(m.load for m in found):.1f}, this process included"))  # fmt: skip
    return rows


def _batch_bound(found: Sequence[Measured]) -> float:
    return _mean([m.verdict["batch_bound_s"] for m in found])


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def batch_bounds(found: Sequence[Measured]) -> dict[tuple[str, str, int], float]:
    """By case, column and batch, what the judge says of the batch where each rank holds one stage in even layers.

    Packed plans have none: that bound does not apply to them.
    """
    of_plans = {(m.case, m.column, m.index): m.verdict["batch_bound_s"] for m in found if "batch_bound_s" in m.verdict}
    return {
        key: of_plans.get((key[0], key[1].replace(", placed", ""), key[2]), bound) for key, bound in of_plans.items()
    }


def peer_table(
    found: Sequence[Measured],
    batches: Mapping[str, Sequence[Mapping[str, Any]]],
    bounds: Mapping[tuple[str, str, int], float],
) -> list[dict[str, Any]]:
    """Makespans of every column, judged where the judge can, and relative to the reference; means over the batches."""
    table = []
    for case in CASES:
        for column in (*OURS, *PEERS):
            mine = [m for m in found if m.case == case.name and m.column == column]
            if not mine:
                continue
            reference = [max(batches[case.name][m.index]["makespan_ms"]) / 1e3 for m in mine]
            closed = _mean([closed_share(m, r, bounds) for m, r in zip(mine, reference, strict=True)])
            over = [r / m.verdict["makespan_s"] for m, r in zip(mine, reference, strict=True)]
            table.append(
                {
                    "case": case.name,
                    "column": column,
                    "batches": len(mine),
                    "makespan_s": _mean([m.verdict["makespan_s"] for m in mine]),
                    "reference_over": _mean(over),
                    "room_closed": None if math.isnan(closed) else closed,
                    "planning_cpu_s": _mean([m.cpu_s for m in mine]),
                }
            )
    return table


def balance_rows() -> list[Row]:
    """Largest over mean load on 64 replicas, the worst of heavy-tailed draws in which no item exceeds the mean load."""
    worst, draws = 0.0, 0
    for seed in range(12):
        draw = np.random.default_rng(seed)
        for count in (1024, 4096):
            for costs in (
                draw.lognormal(0, 1 + 1.5 * seed / 11, count),
                draw.pareto(1.5 + seed / 11, count) + 1,
            ):
                whole = [int(c) for c in costs * 1e6]
                if max(whole) * 64 > sum(whole):
                    continue
                loads = [sum(whole[i] for i in group) for group in assign_replicas(whole, 64)]
                worst, draws = max(worst, max(loads) * 64 / sum(whole)), draws + 1
    note = f"worst of {draws} draws, lognormal sigma 1 to 2.5 and Pareto, 1024 and 4096 items"
    return [Row(what="balance: 64 replicas, max / mean cost", value=worst, bar=1.01, unit="x", note=note)]


def emulated_rows() -> list[Row]:
    """What emulated.py measured last; it needs real ranks and minutes, hence is not run here."""
    path = RESULTS / "emulated.json"
    if not path.exists():
        return [Row(what="emulated, measured / predicted", value=None, note="run tests/bench/emulated.py")]
    result = read_json(path, "dynapipe-emulated/1", "a result of emulated.py")
    # Copies of real messages take time from the cores of all ranks, which no plan can know.
    mine = [r for r in result["rows"] if r["column"].startswith("ours") and not r["column"].endswith("real messages")]
    off = max(abs(row["measured_s"] / row["predicted_s"] - 1) for row in mine)
    note = f"from results/emulated.json of {result['date']}, commit {result['commit']}"
    return [Row(what="emulated PP4 x DP2: measured / predicted, worst error", value=off, bar=0.03, note=note)]


def table_text(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        verdict = {True: "pass", False: "MISS", None: "-"}[row.passed]
        value = "-" if row.value is None else f"{row.value:.4f}{row.unit}"
        bar = "" if row.bar is None else f"{'<=' if row.best == 'low' else '>='} {row.bar:g}{row.unit}"
        lines.append(f"{verdict:<5}{row.what:<70}{value:>10}  {bar:<11}{row.note}".rstrip())
    return "\n".join(lines)


def peer_text(table: Sequence[Mapping[str, Any]]) -> str:
    """Means over the batches; what is simulated only says so."""
    lines = [f"{'':<10}{'':<18}{'makespan':>10}{'reference /':>15}{'room closed':>13}{'planning':>12}"]
    for r in table:
        closed = f"{100 * r['room_closed']:.1f} %" if r["room_closed"] is not None else "simulated"
        lines.append(
            f"{r['case']:<10}{r['column']:<18}{r['makespan_s']:>8.3f} s{r['reference_over']:>14.3f}x{closed:>13}"
            f"{r['planning_cpu_s']:>10.3f} s"
        )
    return "\n".join(lines)


def run_cases(bench: Bench, *, with_peers: bool) -> tuple[list[Row], list[Measured], list[dict[str, Any]]]:
    """Plans are made and timed one at a time; only then are they judged, two at a time."""
    write_many(bench)
    cases = (*CASES, MANY)
    pending: list[Callable[[], Measured]] = []
    for case in cases:
        for judged in plans_of(bench, case, with_peers=with_peers and case is not MANY):
            pending.append(judged)
        print(f"planned {case.name}", file=sys.stderr)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda judged: judged(), pending))
    batches = {case.name: bench.batches(case) for case in cases}
    valid = [m for m in found if m.verdict["valid"]]
    bounds = batch_bounds(valid)
    rows = []
    for case in cases:
        least_s = bench.least_s(case)
        for column in OURS:
            mine = [m for m in valid if m.case == case.name and m.column == column]
            if not mine:
                continue
            rows += case_rows(case, column, mine, batches[case.name], bounds, least_s)
    ours = [m for m in found if m.column.startswith("ours")]
    rows.append(Row(what="plans of ours that are not valid", value=sum(not m.verdict["valid"] for m in ours), bar=0))
    changed = sum(m.repeatable is False for m in ours)
    rows.append(Row(what="plans of ours that changed when made again", value=changed, bar=0,
                    note="for other machines: results/plans.json has the digest of every plan"))  # fmt: skip
    return rows, found, peer_table(valid, batches, bounds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--runs", type=int, default=5, help="warm runs of each plan, of which the median counts")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-grid", action="store_true")
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, default=RESULTS / "plans.json")
    grid.arguments(parser)
    args = parser.parse_args(argv)
    command = shlex.join(["python", "tests/bench/plans.py", *(sys.argv[1:] if argv is None else argv)])
    made, start_s, load = provenance(args.machine), time.perf_counter(), os.getloadavg()[0]
    rows: list[Row] = []
    found: list[Measured] = []
    peers: list[dict[str, Any]] = []
    if (args.shared / "data" / "reference_plans").is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            rows, found, peers = run_cases(Bench(args.shared, Path(scratch), args.runs), with_peers=not args.no_peers)
    else:
        print(f"skipped: {args.shared} has no data/reference_plans, so no batches are planned (give --shared DIR)")
    rows += emulated_rows() + balance_rows()
    cells = None
    if not args.no_grid:
        cells = grid.run_grid(effort=args.effort, seeds=args.seeds, workers=args.workers)
        rows += [Row(what=r["what"], value=r["value"], bar=r["bar"], note=r["note"]) for r in grid.summary(cells)]
        print(grid.text(cells) + "\n")
    if peers:
        print(peer_text(peers) + "\n")
    print(table_text(rows))
    wall_s = time.perf_counter() - start_s
    print(f"\n{command}\n{made['machine']}, {made['date']}, commit {made['commit']}, {wall_s:.0f} s")
    print(f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after")
    result = {
        "format": "dynapipe-plans/1",
        **made,
        "command": command,
        "load_average": load,
        "wall_s": round(wall_s, 1),
        "bars": [{**{f.name: getattr(r, f.name) for f in fields(r)}, "passed": r.passed} for r in rows],
        "columns": peers,
        "plans": [{f.name: getattr(m, f.name) for f in fields(m)} for m in found],
        "grid": None if cells is None else grid.as_json(cells),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    invalid = [m for m in found if not m.verdict["valid"] and m.column.startswith("ours")]
    for m in invalid:
        print(f"not valid: {m.case} batch {m.index}, {m.column}: {m.verdict['errors'][:3]}", file=sys.stderr)
    return 1 if invalid else 0


if __name__ == "__main__":
    sys.exit(main())
