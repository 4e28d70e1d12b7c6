"""Plans beside simple packings under published schedules: lengths x pipelines x layouts x placements, one table.

    python tests/bench/packed.py [--shared DIR] [--out tests/bench/results/packed.json]

Each batch has 64k tokens. A simple packing takes samples in their order or longest first, each into the first row with
room, or balances a number of rows by cost; rows have at most 512 to 8,192 positions, or those of the longest sample. A
simple padding takes samples in their order or shortest first, so many a micro-batch or up to so many positions. They go
to replicas evenly by cost, and each replica runs them in their order, shortest first or longest first: under 1F1B, on
two stages a rank under interleaved 1F1B, and in a V, with split backwards, under ZB-V. All stay within the same memory
limit. Costs are those of Llama 2 7B, counted. A figure is the time of the default plan over that of the best simple
one: 1.003 or less is the aim.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[2]))

from contenders import provenance
from proven import in_best_orders_s, planned_step

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, SampleLength, sample_lengths
from dynapipe_ext.batch.topology import PlacementName, Topology, place_stages
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.partitioning.balance import assign_replicas
from dynapipe_ext.partitioning.packing import (
    RowPackingPolicy,
    compute_document_costs,
    make_evaluate,
    pack,
    sort_by_weight,
)
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.plan_rules import ScheduleName

TOKENS = 65_536
LIMIT_BYTES = 72_000_000_000
ROOMS = (512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
SHAPES = tuple(itertools.product((2, 4, 8, 16), (1, 2, 8)))  # pipeline ranks, replicas
FEWER_SHAPES = ((2, 1), (2, 8), (4, 2), (8, 1), (8, 8))
SCHEDULES: dict[PlacementName, ScheduleName] = {"linear": "1f1b", "interleaved": "interleaved-1f1b", "v": "zb-v"}
PUBLIC = ("alpaca", "gsm8k", "multitask", "openchat_v1")
Rows = list[list[SampleLength]]


def until_full(lengths: npt.ArrayLike) -> list[int]:
    """As many of the lengths as a batch has tokens for."""
    table = np.asarray(lengths, np.int64)
    return [int(n) for n in table[: int(np.searchsorted(np.cumsum(table), TOKENS, side="right"))]]


def batches(shared: Path | None) -> Iterator[tuple[str, list[int]]]:
    """Names and lengths of batches."""
    rng = np.random.default_rng(0)
    yield "half of them half a row and one", until_full([2049] * 16 + [256] * 128)
    yield "equal 512s", until_full([512] * 128)
    yield "lognormal", until_full(np.clip(rng.lognormal(5.5, 1.0, 4000), 16, 4096))
    yield "uniform", until_full(rng.integers(16, 4096, 1000))
    yield "short questions", until_full(np.clip(rng.normal(190, 60, 4000), 60, 500))
    few, many = rng.integers(2000, 4096, 4000), rng.integers(20, 200, 4000)
    yield "few long, many short", until_full(np.where(rng.random(4000) < 0.05, few, many))
    yield "hard to pack", until_full(list(itertools.islice(itertools.cycle([1366, 1366, 700, 900]), 100)))
    yield "long", until_full(np.clip(rng.lognormal(8, 0.6, 400), 500, 8192))
    for name in PUBLIC if shared else ():
        table = np.load(shared / "data" / f"{name}_lengths.npy")
        totals = table if table.ndim == 1 else table.sum(axis=1)
        yield name, until_full(np.clip(totals[rng.permutation(len(totals))], 8, 8192))


def first_fit(samples: Sequence[SampleLength], room: int) -> Rows:
    """Each sample into the first row that has room."""
    rows: Rows = []
    filled: list[int] = []
    for sample in samples:
        place = next((i for i, used in enumerate(filled) if used + sample.encoder <= room), len(rows))
        if place == len(rows):
            rows.append([])
            filled.append(0)
        rows[place].append(sample)
        filled[place] += sample.encoder
    return rows


def simple_packings(samples: Sequence[SampleLength], costs: AnalyticCosts, dp: int) -> Iterator[tuple[str, Rows]]:
    longest = max(s.encoder for s in samples)
    for room in (longest, *(room for room in ROOMS if room > longest)):
        yield f"first fit {room}", first_fit(samples, room)
        yield f"first fit decreasing {room}", first_fit(sorted(samples, key=lambda s: -s.encoder), room)
        weights = compute_document_costs(samples, make_evaluate(costs), RowPackingPolicy(max_tokens=room))
        least = -(-sum(s.encoder for s in samples) // room)
        for count in sorted({-(-least // dp) * dp, -(-(least * 11 // 10) // dp) * dp}):
            if rows := pack(samples, weights, count, room, sort_by_weight(samples, weights)):
                yield f"balanced {room} x {count}", rows


def simple_paddings(samples: Sequence[SampleLength]) -> Iterator[tuple[str, Rows]]:
    longest = max(s.encoder for s in samples)
    for name, ordered in (("in order", list(samples)), ("ascending", sorted(samples, key=lambda s: s.encoder))):
        for count in (1, 2, 4, 8, 16):
            yield f"{name}, {count} each", [ordered[i : i + count] for i in range(0, len(ordered), count)]
        for most in (longest, *(room for room in (1024, 2048, 4096, 8192, 16_384) if room > longest)):
            yield f"{name}, up to {most}", up_to(ordered, most)


def up_to(samples: Sequence[SampleLength], most: int) -> Rows:
    """Samples in their order, as many together as have that many positions, padded."""
    groups: Rows = [[]]
    longest = 0
    for sample in samples:
        longest = max(longest, sample.encoder)
        if groups[-1] and longest * (len(groups[-1]) + 1) > most:
            groups.append([])
            longest = sample.encoder
        groups[-1].append(sample)
    return groups


def simple_s(
    micro_batches: Sequence[MicroBatch], costs: AnalyticCosts, topology: Topology, schedule_name: ScheduleName
) -> float | None:
    """Seconds of a step; None where it does not fit, or has other counts than the schedule."""
    if len(micro_batches) < topology.dp:
        return None
    times = make_evaluate(costs)(micro_batches)[0].tolist()
    groups = assign_replicas(times, topology.dp)
    if schedule_name == "interleaved-1f1b" and any(len(group) % topology.pp for group in groups):
        return None
    replicas = [[micro_batches[i] for i in group] for group in groups]
    return in_best_orders_s(schedule_name, replicas, costs, topology.stage_ranks, LIMIT_BYTES)


def measured(
    pp: int, dp: int, lengths: list[int], layout: Layout = "packed", placement: PlacementName = "linear"
) -> dict[str, Any] | None:
    topology = Topology(pp=pp, dp=dp, placement=() if placement == "linear" else place_stages(placement, pp))
    topology = topology.with_layers(32)
    costs = AnalyticCosts(preset("llama-2-7b"), topology)
    samples = sample_lengths(lengths)
    choices = simple_packings(samples, costs, dp) if layout == "packed" else simple_paddings(samples)
    simple = {
        name: simple_s(
            [MicroBatch(tuple(row), layout, pad_multiple=8) for row in rows], costs, topology, SCHEDULES[placement]
        )
        for name, rows in choices
    }
    fitting = {name: seconds for name, seconds in simple.items() if seconds is not None}
    if not fitting:
        return None
    best = min(fitting, key=lambda name: fitting[name])
    begin = time.process_time()
    planner = Planner(topology, costs, LIMIT_BYTES, layout=layout, split_backward=placement == "v")
    plan = planned_step(planner, samples).step_plan
    cpu_s = time.process_time() - begin
    return {
        "samples": len(lengths),
        "ours_s": round(plan.makespan_s, 4),
        "micro_batches": sum(len(replica.micro_batches) for replica in plan.batch.replicas),
        "planning_cpu_s": round(cpu_s, 3),
        "simple": best,
        "simple_s": round(fitting[best], 4),
        "ratio": round(plan.makespan_s / fitting[best], 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="folder with data/*_lengths.npy")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--machine", default="", help="what it ran on")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, lengths in batches(args.shared):
        for layout, placement in itertools.product(get_args(Layout), SCHEDULES):
            for pp, dp in SHAPES if (layout, placement) == ("packed", "linear") else FEWER_SHAPES:
                key = f"{name}, PP{pp} DP{dp}, {layout}, {placement}"
                row = measured(pp, dp, lengths, layout, placement)
                print(f"{key:64}  {row['ratio'] if row else 'no simple one fits'}", flush=True)
                if row:
                    rows[key] = row
                    print(f"    {row['ours_s']} s in {row['micro_batches']}; {row['simple']}: {row['simple_s']} s")
    ratios = [row["ratio"] for row in rows.values()]
    print(f"worst {max(ratios)}, median {float(np.median(ratios)):.4f}, of {len(ratios)}")
    if args.out:
        result = {"format": "dynapipe-packed/1", **provenance(args.machine), "cases": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if max(ratios) <= 1.003 else 1


if __name__ == "__main__":
    sys.exit(main())
