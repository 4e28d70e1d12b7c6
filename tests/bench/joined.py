"""Predicted and measured makespan of sleeping ranks that join, PP2 x plane 4, one width a row, and each step's best.

    python tests/bench/joined.py

Each rank is a process. In every forward and input gradient joined ranks meet in a real all-to-all over gloo. Costs are
counted for Llama 3 8B at TP8; every step has one sample of 64k among short ones. Writes results/joined.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from contenders import provenance
from emulation import Case, run_emulated

from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.launch.store import RedisServer
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.planner import Planner

RESULT = Path(__file__).parent / "results" / "joined.json"
FORMAT = "dynapipe-joined/1"
PLANE = Topology(pp=2, dp=4)
LENGTHS = ((65536, *(2048, 1024, 4096, 512, 8192, 3072) * 6), (16384, *(2048, 1024, 4096, 512, 8192, 3072) * 6))
WAYS = {"width 1": (1, ()), "width 2": (2, ()), "width 4": (4, ()), "auto": (1, (1, 2, 4))}


def planner_of_way(way: str) -> Planner:
    width, widths = WAYS[way]
    topology = PLANE.at_width(width)
    # One rank of eight tensor parallel ones is enough to sleep: its costs are those of all.
    costs = AnalyticCosts(
        preset("llama-3-8b"), topology, flops_per_s=8 * 350e12, overhead_ns=100_000, layer_overhead_ns=60_000
    )
    options: dict[str, Any] = {"layout": "packed", "pieces": "auto", "split_backward": True, "widths": widths}
    options |= {"format": ActivationFormat(1), "collectives": ReplicaCollectives()}
    return Planner(topology, costs, 640e9, seed=0, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=10.0, help="seconds slept for a second of the plan")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    rows = []
    with RedisServer() as server:
        for way in WAYS:
            case = Case(planner=planner_of_way(way), batches=LENGTHS * args.repeats, scale=args.scale)
            steps = run_emulated(case, server.address, timeout_s=500)
            of_batches = [steps[i :: len(LENGTHS)] for i in range(len(LENGTHS))]
            predicted = [of_one[0].predicted_s / args.scale for of_one in of_batches]
            measured = [statistics.median(step.measured_s for step in of_one) / args.scale for of_one in of_batches]
            counts = [list(of_one[0].num_micro_batches) for of_one in of_batches]
            ratio = statistics.median(step.ratio for step in steps)
            rows.append(
                {"way": way, "micro_batches": counts, "predicted_s": predicted, "measured_s": measured, "ratio": ratio}
            )
            print(f"{way}: {rows[-1]}", file=sys.stderr)
    result = {"format": FORMAT, **provenance(args.machine), "scale": args.scale, "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
