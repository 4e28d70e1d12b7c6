"""Predicted and measured makespan of sleeping ranks, PP4 x DP2, one schedule a row. Writes results/emulated.json.

    python tests/bench/emulated.py --costs DIR --shared DIR

Every row is a proven step; headlines.py writes the pages' figures from the result. Without --costs the costs are made
up, without --shared the lengths are the generator's. Between two nodes, pipeline
ranks 1 and 2, a message takes 10 us and its bytes at 25 GB/s. Whole-row attention prices a row of documents as one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from contenders import (
    EVEN,
    FEW_BYTES,
    MEMORY_LIMIT_BYTES,
    PLACED,
    REAL_BYTES,
    RIVALS,
    TOPOLOGY,
    best_step,
    cost_model,
    measured_to_file,
    provenance,
    read_batches,
    topology_for,
)
from emulation import Case, run_emulated

from dynapipe_ext.launch.store import RedisServer

RESULT = Path(__file__).parent / "results" / "emulated.json"
FORMAT = "dynapipe-emulated/1"
_REAL = ", real messages"
_APART = ", two nodes"
ROWS = {
    "padding": "padding to the batch maximum, 1F1B",
    "whole rows": "packing into fixed rows, whole-row attention, 1F1B",
    **{name: name for name in RIVALS},
    "DynaPipe's split, 1F1B": "DynaPipe's split, 1F1B in natural order",
    "DynaPipe's split, cyclic": "DynaPipe's split, its cyclic order",
    "dynapipe": "DynaPipe's split, adaptive",
    "ours, 1F1B": "our split, 1F1B in natural order",
    "ours": "our split, adaptive",
    "ours, split": "our split, adaptive, backward as I and W",
    "ours, ZB-H1": "our split, ZB-H1 in natural order",
    "ours, ZB-H2": "our split, ZB-H2 in natural order",
    "ours, ZB-V": "our split, ZB-V in natural order",
    "ours, V-Half": "our split, V-Half in natural order",
    "ours, V": "our split, adaptive on a V",
    "ours, V, split": "our split, adaptive on a V, backward as I and W",
    "ours, placed": "our split, adaptive, --placement auto",
    "ours, placed, split": "our split, adaptive, --placement auto, I and W",
    EVEN: "ours in packed rows, adaptive on a V, I and W",
    PLACED: "ours in packed rows, --placement auto, I and W",
    **{name + _APART: f"{name}; two nodes" for name in RIVALS},
    PLACED + _APART: "ours in packed rows, --placement auto, I and W; two nodes",
    "ours" + _REAL: "our split, adaptive; real messages, copied by gloo",
}
LIMITS = {
    "ours, ZB-H1": 60e9,
    "ours, ZB-H2": 78e9,
    "ours, ZB-V": 60e9,
}  # bytes a rank, where it is not the others'; these need more


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="folder of the A100 layer cost CSVs")
    parser.add_argument("--shared", type=Path, help="folder above data/reference_plans")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--scale", type=float, default=1.0, help="seconds slept for a second of the plan")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", action="append", choices=ROWS, help="this row; may be given several times")
    parser.add_argument("--transport", choices=("torch", "strict"), default="torch")
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, default=RESULT)
    return measured_to_file(parser, measure, text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    batches, length_name = read_batches(args.shared, args.tokens)
    batch, rows = batches[0], []
    with RedisServer() as server:
        store = f"{server.name} {server.version}"
        for column in args.only or ROWS:
            name = ROWS[column]
            apart, real = column.endswith(_APART), column.endswith(_REAL)
            setting = column.removesuffix(_APART).removesuffix(_REAL)
            costs, cost_name = cost_model(args.costs, apart=apart)
            topology = topology_for(setting, costs, batches)
            costs, _ = cost_model(args.costs, topology, apart=apart)
            limit_bytes = LIMITS.get(column, MEMORY_LIMIT_BYTES)
            _, planner, _ = best_step(
                setting,
                costs,
                batch.lengths,
                topology=topology,
                limit_bytes=limit_bytes,
                messages=REAL_BYTES if real else FEW_BYTES,
            )
            case = Case(
                planner=planner,
                batches=(batch.lengths,) * args.steps,
                transport=args.transport,
                scale=args.scale,
                real_messages=real,
            )
            steps = run_emulated(case, server.address, timeout_s=500)
            rows.append(
                {
                    "column": column,
                    "name": name,
                    "memory_limit_bytes": limit_bytes,
                    "placement": topology.placement_name,
                    "layers_per_stage": list(topology.layers_per_stage),
                    "micro_batches": list(steps[0].num_micro_batches),
                    "predicted_s": steps[0].predicted_s,
                    "measured_s": statistics.median(step.measured_s for step in steps),
                    "steps_s": [step.measured_s for step in steps],
                    "measured_bubble_ratio": statistics.median(step.trace.bubble_ratio for step in steps),
                }
            )
            print(f"{name}: {rows[-1]['predicted_s']:.3f} s predicted, {rows[-1]['measured_s']:.3f} s", file=sys.stderr)
    return {
        "format": FORMAT,
        **provenance(args.machine),
        "store": store,
        "transport": {"torch": "gloo", "strict": "gloo under NCCL's rules"}[args.transport],
        "topology": {"tp": TOPOLOGY.tp, "pp": TOPOLOGY.pp, "dp": TOPOLOGY.dp},
        "costs": cost_name,
        "costs_fingerprint": cost_model(args.costs)[0].fingerprint(),
        "lengths": length_name,
        "tokens": batch.tokens,
        "scale": args.scale,
        "rows": rows,
    }


def text(result: dict[str, Any]) -> str:
    """The result as lines for a terminal."""
    lines = [
        f"Emulated ({result['costs']}, {result['tokens']} real tokens, PP4 x DP2, time x {result['scale']:g};"
        f" {result['machine']}, {result['date']}, commit {result['commit']}, {result['store']}, {result['transport']})",
        f"{'':46} {'micro-batches':>13} {'predicted':>10} {'measured':>10} {'ratio':>7} {'bubble':>7}",
    ]
    for row in result["rows"]:
        counts = " + ".join(map(str, row["micro_batches"]))
        lines.append(
            f"{row['name']:46} {counts:>13} {row['predicted_s']:8.3f} s {row['measured_s']:8.3f} s"
            f" {row['measured_s'] / row['predicted_s']:7.3f} {row['measured_bubble_ratio']:7.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
