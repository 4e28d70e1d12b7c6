"""The README's picture: one batch under packed 1F1B and under ours, on one time axis, as simulated.

    python tests/bench/packed_picture.py --costs DIR --shared DIR [--out FILE]

The first reference batch of 64k tokens, PP4 x DP2, with the settings of readme_table.py. Every rectangle is an action
of a pipeline rank. Without --costs and --shared: made-up costs and the generator's lengths.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from bound import batch_bound_s
from contenders import TOPOLOGY, best_plan, cost_model, read_batches, topology_for
from plan_drawing import LEFT, RIGHT, WIDTH, Pane, drawn

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.schedules.actions import Kind
from dynapipe_ext.schedules.step_plan import StepPlan, free_batch_ns

PICTURE = Path(__file__).resolve().parents[2] / ".github" / "packed.svg"
COLUMNS = {"Packed rows, 1F1B": "packing", "Variable micro-batches": "ours, placed, split"}
FILLS = {
    Kind.FORWARD: ("#5b9bdb", "forward"),
    Kind.BACKWARD: ("#ec9a4c", "backward"),
    Kind.BACKWARD_INPUT: ("#3fae9c", "input gradient"),
    Kind.BACKWARD_WEIGHT: ("#a583d9", "weight gradient"),
}


def says(name: str, plan: StepPlan) -> str:
    count = sum(len(replica.micro_batches) for replica in plan.batch.replicas)
    return f"{name}: {plan.makespan_s:.2f} s, {count} micro-batches, {100 * plan.bubble_ratio:.0f} % idle"


def _legend() -> Iterator[str]:
    x = LEFT
    for fill, name in FILLS.values():
        yield f'<rect x="{x}" y="8" width="20" height="11" fill="{fill}"/><text x="{x + 25}" y="18">{name}</text>'
        x += 50 + 7 * len(name)
    yield f'<text x="{WIDTH - RIGHT}" y="18" class="name">a row is a rank; the same samples in both</text>'


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
        panes[name] = Pane(head=says(name, plan), plan=plan, fill_of=lambda _, action: FILLS[action.kind][0])
        free_ns = free_batch_ns(plan, over, sample_lengths(batches[0].lengths))
        least_s = min(least_s, free_ns / 1e9) if free_ns else least_s
    args.out.write_text(drawn(panes, _legend(), least_s=least_s, tick_s=0.5), encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
