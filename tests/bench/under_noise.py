"""What plans that are searched for noise take as predicted, and under draws that the search has not seen.

    python tests/bench/under_noise.py [--costs DIR] [--shared DIR] [--tokens 65536] [--batches N] [--seeds N]

Every action takes a factor drawn evenly from 0.8 to 1.2 (noise.py: its own draws, not those of the search). A step ends
with its slowest replica. Rows: one stage a rank and a V, whole and split backwards, planned with `noise` 0, 0.1 and
0.2; and ZB-V on balanced packed rows, an order that knows no times. Without --costs the costs are made up, without
--shared the lengths are the generator's. Writes results/under_noise.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import (
    MEMORY_LIMIT_BYTES,
    TOPOLOGY,
    Batch,
    V,
    cost_model,
    measured_to_file,
    provenance,
    read_batches,
)
from noise import Noise, noisy_costs
from proven import planned_step

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.rivals import list_rivals
from dynapipe_ext.schedules.step_plan import StepPlan

RESULT = Path(__file__).parent / "results" / "under_noise.json"
SPREAD = 0.2
ASKED = (0.0, 0.1, 0.2)
PLACED: Mapping[str, Topology] = {"one stage a rank": TOPOLOGY, "v": V}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="folder of the A100 layer cost CSVs")
    parser.add_argument("--shared", type=Path, help="folder above data/reference_plans")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=40, help="draws of noise")
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, default=RESULT)
    return measured_to_file(parser, measure, text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    batches, lengths = read_batches(args.shared, args.tokens, limit=args.batches)
    rows = list(searched(args.costs, batches, range(args.seeds)))
    rows.append(of_plans("ZB-V on packed rows", published(args.costs, batches), range(args.seeds)))
    return {
        "format": "dynapipe-under-noise/1",
        **provenance(args.machine),
        "costs": cost_model(args.costs)[1],
        "lengths": lengths,
        "tokens": batches[0].tokens,
        "num_batches": len(batches),
        "seeds": args.seeds,
        "spread": SPREAD,
        "rows": rows,
    }


def searched(directory: Path | None, batches: Sequence[Batch], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    for split in (False, True):
        for name, topology in PLACED.items():
            costs, _ = cost_model(directory, topology)
            for noise in ASKED:
                planner = Planner(
                    topology, costs, MEMORY_LIMIT_BYTES, pad_multiple=1, split_backward=split, noise=noise
                )
                plans, start_s = [], time.process_time()
                for batch in batches:
                    plans.append(planned_step(planner, sample_lengths(batch.lengths)).step_plan)
                cpu_s = (time.process_time() - start_s) / len(batches)
                what = f"{name}, {'split' if split else 'whole'} backwards"
                yield of_plans(what, plans, seeds) | {"noise": noise, "planning_cpu_s": cpu_s}


def published(directory: Path | None, batches: Sequence[Batch]) -> list[StepPlan]:
    """The packed rows of ZB-V, the rival with the least idle time."""
    costs, _ = cost_model(directory, V)
    (rules,) = (rival.rules for rival in list_rivals(V.pp) if rival.schedule == "zb-v")
    planner = Planner(V, costs, MEMORY_LIMIT_BYTES, pad_multiple=1, **rules)
    return [planned_step(planner, sample_lengths(batch.lengths)).step_plan for batch in batches]


def of_plans(what: str, plans: Sequence[StepPlan], seeds: Sequence[int]) -> dict[str, Any]:
    predicted_s = statistics.fmean(plan.makespan_s for plan in plans)
    noisy_s = statistics.fmean(under_noise_s(plan, seed) for plan in plans for seed in seeds)
    return {"what": what, "predicted_s": predicted_s, "noisy_s": noisy_s, "loss": noisy_s / predicted_s - 1}


def under_noise_s(plan: StepPlan, seed: int) -> float:
    """One draw, in which each replica has its own."""
    times = []
    for d, (schedule, costs) in enumerate(zip(plan.schedules, plan.costs, strict=True)):
        turned_out = noisy_costs(costs, Noise(SPREAD), seed=1000 * (d + 1) + seed, split=schedule.is_split)
        times.append(compute_makespan_ns(schedule, turned_out))
    return max(times) / 1e9


def text(result: Mapping[str, Any]) -> str:
    lines = [
        f"{result['costs']}, {result['tokens']} real tokens, {result['num_batches']} batches, PP4 x DP2; times drawn"
        f" from 1 -+ {result['spread']:g}, {result['seeds']} draws ({result['machine']}, {result['date']})",
        f"{'':38}{'noise':>6}{'predicted':>12}{'under noise':>13}{'loss':>8}{'planning':>11}",
    ]
    for row in result["rows"]:
        noise = f"{row['noise']:g}" if "noise" in row else "-"
        cpu = f"{row['planning_cpu_s']:.3f} s" if "planning_cpu_s" in row else "-"
        lines.append(
            f"{row['what']:38}{noise:>6}{row['predicted_s']:>10.4f} s{row['noisy_s']:>11.4f} s"
            f"{100 * row['loss']:>6.2f} %{cpu:>11}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
