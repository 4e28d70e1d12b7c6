"""The bubble of schedules on a synthetic grid: stages x micro-batches x how uneven the micro-batches are.

    python tests/bench/grid.py [--effort N] [--seeds 10] [--workers 2] [--output results/plans_grid.json]

Costs are lognormal of mean 1, the same factor on every stage; F = I = W, bytes in proportion to F and held from F to W,
no communication. The limit of every stage is the stage-0 peak of 1F1B in natural order. Bubble = idle / (stages x
makespan), the mean over the seeds; "bound" is the bubble that the lower bound of the makespan leaves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from contenders import provenance
from peers import readiness_first
from proven import prove_schedule

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.evaluation.bounds import bound_replica
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns, compute_peak_bytes
from dynapipe_ext.schedules.published.full_backward import one_f_one_b
from dynapipe_ext.schedules.search.optimizer import optimize

STAGES, MICRO_BATCHES, VARIATIONS = (4, 8, 16), (16, 32, 64), (0.0, 0.1, 0.3, 0.6, 1.0)
CONTENDERS = ("natural 1F1B", "greedy", "ours", "bound")
BARS = {(8, 64, 0.1): 0.08, (8, 64, 0.3): 0.095, (8, 64, 0.6): 0.16}
MEAN_BAR = 0.4  # of natural 1F1B's, over variations from 0.1
RESULTS = Path(__file__).parent / "results"
_UNIT_NS, _UNIT_BYTES = 1_000_000, 1_000_000
_EFFORT = 2000


@dataclass(frozen=True, slots=True)
class Cell:
    """One case of the grid: the cost of one unit is a millisecond."""

    num_stages: int
    num_micro_batches: int
    variation: float
    seed: int

    def costs(self) -> MicroBatchCosts:
        unit = np.ones(self.num_micro_batches)
        if self.variation:
            sigma = math.sqrt(math.log(1 + self.variation**2))
            draw = np.random.default_rng(self.seed)
            unit = draw.lognormal(-(sigma**2) / 2, sigma, self.num_micro_batches)
        forward = np.maximum(1, np.rint(np.tile(unit, (self.num_stages, 1)) * _UNIT_NS)).astype(np.int64)
        none = np.zeros((self.num_stages - 1, self.num_micro_batches), np.int64)
        return MicroBatchCosts(
            forward_ns=forward,
            backward_ns=2 * forward,
            weight_ns=forward,
            stored_bytes=forward * (_UNIT_BYTES // _UNIT_NS),
            working_bytes=np.zeros_like(forward),
            transfer_ns=none,
            transfer_bytes=none,
            static_bytes=np.zeros(self.num_stages, np.int64),
        )


def ours(costs: MicroBatchCosts, limit_bytes: int, effort: int) -> PipelineSchedule:
    """The one place where the optimizer is called."""
    return optimize(costs, memory_limit_bytes=limit_bytes, split=True, effort=effort, seed=0)


def bubble(costs: MicroBatchCosts, whole_ns: int) -> float:
    """Idle / (stages x makespan)."""
    work = int((costs.forward_ns + costs.backward_ns).sum())
    return 1 - work / (costs.num_stages * whole_ns)


def measure(cell: Cell, effort: int) -> dict[str, float]:
    """Bubble of each contender in one cell, every schedule validated and held to the limit; CPU seconds of ours."""
    costs = cell.costs()
    plain = one_f_one_b(cell.num_stages, cell.num_micro_batches)
    limit = compute_peak_bytes(plain, costs)[0]
    start_s = time.process_time()
    best = ours(costs, limit, effort)
    cpu_s = time.process_time() - start_s
    cheapest_first = costs.take(np.argsort(costs.forward_ns[0], kind="stable").tolist())
    natural_greedy = readiness_first(costs, memory_limit_bytes=limit, split=True)
    sorted_greedy = readiness_first(cheapest_first, memory_limit_bytes=limit, split=True)
    runs = (plain, costs), (natural_greedy, costs), (sorted_greedy, cheapest_first), (best, costs)
    found: dict[str, float] = {}
    for name, (schedule, own) in zip((CONTENDERS[0], CONTENDERS[1], *CONTENDERS[1:]), runs, strict=False):
        prove_schedule(schedule, own)
        if name != "natural 1F1B" and max(compute_peak_bytes(schedule, own)) > limit:
            raise SystemExit(
                f"{name} in {cell} holds {max(compute_peak_bytes(schedule, own))} B but the limit is {limit} B"
            )
        # The greedy is at its best: natural order or cheapest first.
        found[name] = min(found.get(name, 1.0), bubble(own, compute_makespan_ns(schedule, own)))
    bound_ns = bound_replica(range(cell.num_stages), costs, split=True, memory_limit_bytes=limit).best_ns
    found["bound"] = bubble(costs, bound_ns)
    return {**found, "cpu_s": cpu_s}


def run_grid(
    *, effort: int = _EFFORT, seeds: int = 10, workers: int = 2
) -> dict[tuple[int, int, float], dict[str, float]]:
    """Means over the seeds, by (stages, micro-batches, variation)."""
    keys = list(itertools.product(STAGES, MICRO_BATCHES, VARIATIONS))
    cells = [Cell(*key, seed) for key in keys for seed in range(seeds if key[2] else 1)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        # The dearest cells first, so that workers end together.
        order = sorted(cells, key=lambda c: -c.num_stages * c.num_micro_batches)
        results = dict(zip(order, pool.map(partial(measure, effort=effort), order), strict=True))
    table = {}
    for key in keys:
        mine = [
            found for cell, found in results.items() if (cell.num_stages, cell.num_micro_batches, cell.variation) == key
        ]
        table[key] = {name: statistics.fmean(found[name] for found in mine) for name in mine[0]}
    return table


def summary(table: Mapping[tuple[int, int, float], Mapping[str, float]]) -> list[dict[str, Any]]:
    """The bars of the grid: what, value, bar, and whether it is met."""
    uneven = [found for (_, _, variation), found in table.items() if variation >= 0.1]
    means = {name: statistics.fmean(found[name] for found in uneven) for name in CONTENDERS}
    rows: list[dict[str, Any]] = [
        {
            "what": "grid: mean bubble over cv >= .1 / natural 1F1B's",
            "value": means["ours"] / means["natural 1F1B"],
            "bar": MEAN_BAR,
            "note": ", ".join(f"{name} {100 * value:.1f} %" for name, value in means.items()),
        }
    ]
    for key, bar in BARS.items():
        found = table[key]
        note = ", ".join(f"{name} {100 * found[name]:.1f} %" for name in CONTENDERS if name != "ours")
        rows.append(
            {"what": f"grid: bubble at 8 x 64, cv {key[2]:g}", "value": found["ours"], "bar": bar, "note": note}
        )
    return [{**row, "passed": row["value"] <= row["bar"]} for row in rows]


def text(table: Mapping[tuple[int, int, float], Mapping[str, float]]) -> str:
    """Every cell: natural 1F1B / greedy / ours (bound), in percent."""
    lines = ["bubble in %: natural 1F1B / greedy with split / ours (bound)", f"{'stages x micro-batches':<24}"]
    lines[-1] += "".join(f"{f'cv {v:g}':>28}" for v in VARIATIONS)
    for stages, count in itertools.product(STAGES, MICRO_BATCHES):
        row = f"{f'{stages} x {count}':<24}"
        for variation in VARIATIONS:
            a, b, c, d = (100 * table[stages, count, variation][name] for name in CONTENDERS)
            row += f"{f'{a:.1f} / {b:.1f} / {c:.1f} ({d:.1f})':>28}"
        lines.append(row)
    return "\n".join(lines)


def as_json(table: Mapping[tuple[int, int, float], Mapping[str, float]]) -> list[dict[str, Any]]:
    return [
        {"stages": s, "micro_batches": m, "variation": v, **{k: round(x, 6) for k, x in found.items()}}
        for (s, m, v), found in table.items()
    ]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--effort", type=int, default=_EFFORT, help="of the search")
    parser.add_argument("--seeds", type=int, default=10, help="draws of every cell (the bars are for 10)")
    parser.add_argument("--workers", type=int, default=2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, default=RESULTS / "plans_grid.json")
    args = parser.parse_args(argv)
    start_s = time.perf_counter()
    table = run_grid(effort=args.effort, seeds=args.seeds, workers=args.workers)
    print(text(table))
    bars = summary(table)
    for row in bars:
        verdict = "pass" if row["passed"] else "MISS"
        print(f"{verdict}  {row['what']}: {row['value']:.4f}, bar {row['bar']:g} ({row['note']})")
    result = {
        "format": "dynapipe-grid/1",
        **provenance(args.machine),
        "command": f"python tests/bench/grid.py --effort {args.effort} --seeds {args.seeds}",
        "wall_s": round(time.perf_counter() - start_s, 1),
        "bars": bars,
        "cells": as_json(table),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
