"""The README's picture: one batch under packed 1F1B and under ours, on one time axis, as simulated.

    python tests/bench/packed_picture.py --costs DIR --shared DIR [--out FILE]

The first reference batch of 64k tokens, PP4 x DP2, with the settings of readme_table.py. Every rectangle is an action
of a pipeline rank. Without --costs and --shared: made-up costs and the generator's lengths.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bound import batch_bound_s
from contenders import TOPOLOGY, best_plan, cost_model, read_batches, topology_for

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.schedules.step_plan import StepPlan, free_batch_ns
from dynapipe_ext.tools.show.plan_drawing import Pane, drawn, legend_of_kinds

PICTURE = Path(__file__).resolve().parents[2] / ".github" / "packed.svg"
COLUMNS = {"Packed rows, 1F1B": "packing", "Variable micro-batches": "ours, placed, split"}


def says(name: str, plan: StepPlan) -> str:
    count = sum(len(replica.micro_batches) for replica in plan.batch.replicas)
    return f"{name}: {plan.makespan_s:.2f} s, {count} micro-batches, {100 * plan.bubble_ratio:.0f} % idle"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="folder of the A100 layer cost CSVs (default: made-up costs)")
    parser.add_argument("--shared", type=Path, help="folder above data/reference_plans (default: generated lengths)")
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args()
    batches, _ = read_batches(args.shared, 65536)
    costs = cost_model(args.costs)[0]
    panes, least_s = {}, batch_bound_s(costs, batches[0].lengths, dp=TOPOLOGY.dp)
    for name, column in COLUMNS.items():
        topology = topology_for(column, costs, batches)
        over = cost_model(args.costs, topology)[0]
        plan = best_plan(column, over, batches[0].lengths, topology=topology)[0]
        panes[name] = Pane(head=says(name, plan), replicas=plan.traces)
        free_ns = free_batch_ns(plan, over, sample_lengths(batches[0].lengths))
        least_s = min(least_s, free_ns / 1e9) if free_ns else least_s
    args.out.write_text(drawn(panes, legend_of_kinds(), least_s=least_s, tick_s=0.5), encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
