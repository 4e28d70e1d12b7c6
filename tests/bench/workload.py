"""One workload: the rivals, other rules and ours on the same batches, costs and memory limit, every step proven.

    python tests/bench/workload.py --costs DIR --shared DIR [--report RUN/report.json] [--machine TEXT]

Global batches of about 64k and 256k tokens, GPT 6.7B, PP4 x DP2, 36 GB. Writes results/workload.json, the README's
picture (the first batch of 64k tokens) and, by headlines.py, every figure of the pages that is from result files. So no
two pages disagree. `--report` adds what a run with --compare measured; without it, the former rows stay.

Without --costs and --shared: made-up costs and the generator's lengths, for a look; then no page is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import headlines
from bound import free_bound_s
from contenders import (
    COLUMNS,
    MEMORY_LIMIT_BYTES,
    RIVALS,
    TOPOLOGY,
    Batch,
    Costs,
    best_step,
    cost_model,
    provenance,
    read_batches,
    topology_for,
)

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import DataError, DynaPipeError, PlanError
from dynapipe_ext.executor.proven_step import ProvenStep
from dynapipe_ext.tools.account.report import RunReport, RunResult
from dynapipe_ext.tools.show.plan_drawing import Pane, drawn, legend_of_kinds

FORMAT = "dynapipe-workload/1"
RESULT = Path(__file__).parent / "results" / "workload.json"
PICTURE = Path(__file__).resolve().parents[2] / ".github" / "packed.svg"
Steps = dict[str, ProvenStep]  # by column; a column that does not fit is absent


def measure_batch(
    costs_over: Callable[[Topology], Costs],
    placed: Mapping[str, Topology],
    batch: Batch,
    limit_bytes: float = MEMORY_LIMIT_BYTES,
) -> tuple[dict[str, Any], Steps]:
    """Return the figures of every column on one batch, and the steps."""
    ways: dict[str, Any] = {}
    steps: Steps = {}
    for column in COLUMNS:
        topology = placed[column]
        try:
            proven, _, cpu_s = best_step(
                column, costs_over(topology), batch.lengths, topology=topology, limit_bytes=limit_bytes
            )
        except PlanError as error:
            ways[column] = {"misfit": str(error)}
            continue
        plan, steps[column] = proven.step_plan, proven
        ways[column] = {
            "makespan_s": plan.makespan_s,
            "padding_efficiency": plan.batch.padding_efficiency,
            "bubble_ratio": plan.bubble_ratio,
            "planning_cpu_s": cpu_s,
            "micro_batches": sum(len(replica.micro_batches) for replica in plan.batch.replicas),
            "peak_gb": proven.peak_bytes / 1e9,
        }
    figures: dict[str, Any] = {
        "bound_s": free_bound_s(costs_over(TOPOLOGY), sample_lengths(batch.lengths), TOPOLOGY),
        "ways": ways,
    }
    if raw := batch.reference:
        figures["reference"] = {
            "makespan_s": max(raw["makespan_ms"]) / 1e3,
            "padding_efficiency": raw["efficiency"],
            "planning_cpu_s": raw["partition_cpu_s"] + raw["sched_cpu_s"],
        }
    return figures, steps


def report_rows(report: RunReport) -> list[dict[str, Any]]:
    """Return CPU time per real token and the last loss of a run and of those it was compared with. Raises DataError for
    a run without --compare."""
    if not report.compare:
        raise DataError("the report has no baselines: make it with dynapipe train --compare")
    results: dict[str, RunResult] = {"ours": report.result} | {one.name: one for one in report.compare}
    t = report.facts.topology
    where = f"small CPU model, TP{t.tp} PP{t.pp} DP{t.dp}"
    costs = {name: one.cpu_s_per_token for name, one in results.items()}
    losses = {name: one.losses[-1] for name, one in results.items() if one.losses}
    return [
        {
            "name": f"CPU time per real token, {where}",
            "unit": " µs",
            "digits": 0,
            "values": {name: cost * 1e6 for name, cost in costs.items() if cost is not None},
        },
        {"name": f"loss after {report.steps} steps, {where}", "unit": "", "digits": 3, "values": losses},
    ]


def draw_first_batch(result: Mapping[str, Any], steps: Steps) -> str:
    """Return the picture of the first batch, with the bound."""
    heads = headlines.pictured(result)
    panes = {head: Pane(head=head, replicas=steps[name].step_plan.traces) for name, head in heads.items()}
    return drawn(panes, legend_of_kinds(), least_s=result["sizes"][0]["batches"][0]["bound_s"], tick_s=0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="folder of the A100 layer cost CSVs (default: made-up costs)")
    parser.add_argument("--shared", type=Path, help="folder above data/reference_plans (default: generated lengths)")
    parser.add_argument("--report", type=Path, help="report.json of a run with --compare")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--batches", type=int, default=0, help="maximum number of batches of each size (0: all)")
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, help="write the result there, and neither picture nor pages")
    args = parser.parse_args()
    try:
        if args.report and not args.costs:
            return add_report(RunReport.read(args.report))
        result, picture = measure(args)
    except (DynaPipeError, OSError) as error:
        parser.error(str(error))
    output = args.output or RESULT
    if args.output or (args.costs and args.shared):
        output.write_text(json.dumps(result, indent=1) + "\n")
    print(headlines.workload(result, None))
    if args.costs and args.shared and not args.output:
        PICTURE.write_text(picture, encoding="utf-8")
        headlines.write_pages()
    return 0


def add_report(report: RunReport) -> int:
    """Put a compared run into the result file and its figures into the pages; all else stays."""
    result = json.loads(RESULT.read_text()) | {"compared_run": report_rows(report)}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    headlines.write_pages()
    return 0


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    costs, cost_name = cost_model(args.costs)

    def costs_over(topology: Topology) -> Costs:
        return cost_model(args.costs, topology)[0]

    sizes: list[dict[str, Any]] = []
    first_steps: Steps = {}
    length_name = ""
    for tokens in args.tokens:
        batches, length_name = read_batches(args.shared, tokens, limit=args.batches)
        placed = {column: topology_for(column, costs, batches) for column in COLUMNS}
        measured = []
        for batch in batches:
            figures, steps = measure_batch(costs_over, placed, batch)
            first_steps = first_steps or steps
            measured.append(figures)
            print(f"{tokens} tokens, batch {len(measured)} of {len(batches)}", file=sys.stderr, flush=True)
        layers = {column: list(topology.layers_per_stage) for column, topology in placed.items()}
        sizes.append({"tokens": tokens, "batches": measured, "layers_per_stage": layers})
    measured_rows = report_rows(RunReport.read(args.report)) if args.report else _former_rows()
    result = {
        "format": FORMAT,
        **provenance(args.machine),
        "costs": cost_name,
        "costs_fingerprint": costs.fingerprint(),
        "lengths": length_name,
        "topology": {"tp": TOPOLOGY.tp, "pp": TOPOLOGY.pp, "dp": TOPOLOGY.dp},
        "limit_gb": MEMORY_LIMIT_BYTES / 1e9,
        "columns": COLUMNS,
        "rivals": list(RIVALS),
        "sizes": sizes,
        "compared_run": measured_rows,
    }
    return result, draw_first_batch(result, first_steps)


def _former_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text()).get("compared_run", []) if RESULT.exists() else []
    return rows


if __name__ == "__main__":
    sys.exit(main())
