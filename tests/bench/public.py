"""Public workloads: our steps beside those of Megatron's dynamic context parallelism, verl's balance, packed 1F1B.

    python tests/bench/public.py [--shared DIR] [--machine TEXT] [--only TEXT]

Simulated on the counted costs of long.py: packed rows, sequence parallelism, flash attention, ZeRO 1, 350 TFLOP/s a
device, 0.1 ms an action and 0.06 ms a layer, 72 GB of a device planned with. What attention exchanges between joined
ranks is 10 % of their computing, in our steps alone.

Data. "wlbllm": the lengths in ../shared/data, those of 10,000 tokens or more twice, cut at 131,072. "prolong" and
"multitask": the lengths there, cut alike. A million tokens a step of each, drawn with seed 0. "lognormal": mean 1,024,
sigma 1.5, clipped to 128 to 8,192, 8 samples a data parallel rank. "256k": one sample of 262,144 tokens among short
ones, a million tokens. Without DIR the last two alone.

Rules, each at its best. "balanced": packed rows of several sizes, Karmarkar-Karp by costs over replicas, 1F1B.
"verl": its token balance (peer_rules.py) at several sizes of a micro-batch, 1F1B. "dynamic CP": dynamic_cp.py, with
free communication, perfectly split attention and the best of several sizes. All three may recompute, need no transfers
of their own choosing, and their best size is known to them for every step. Where experts lie over data parallel ranks,
replicas have equal counts under all rules but dynamic CP.

Figure: makespan over (work / replicas), the work of all samples on the busiest pipeline rank without overheads and
exchanges. Bars: see BARS. Planning: CPU seconds. Writes results/public.json; exit status 1 where a bar is missed.
public_picture.py draws it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contenders import provenance
from dynamic_cp import best_grouped
from peer_rules import verl_rule

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, SampleLength, sample_lengths
from dynapipe_ext.batch.topology import Topology, widths_of
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.judge.bounds import batch_floor
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import predicted, replica_costs, shared_by_twins
from dynapipe_ext.schedules.tables.published import schedule_of_costs
from dynapipe_ext.splits.packing import micro_batch_evaluate
from dynapipe_ext.splits.rules import packed_documents

RESULT = Path(__file__).parent / "results" / "public.json"
SHARED = Path(__file__).resolve().parents[3] / "shared"
FORMAT = "dynapipe-public/1"
LIMIT_BYTES = 72 * 10**9
TAX = 0.1
PLANES = (2, 4, 8, 16)
CUT, TOKENS = 131_072, 10**6
SIZES = (8_192, 16_384, 32_768, 65_536, 131_072, 262_144)  # positions of a peer's micro-batch
SHARES = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)  # of a rank, under dynamic CP
PEERS = ("balanced", "verl", "dynamic CP")
OURS, ALONE = "ours", "ours, width 1"
MODELS = {"7B": ("llama-2-7b", 8, 1), "8B": ("llama-3-8b", 2, 1), "Mixtral": ("mixtral-8x7b", 2, 4)}  # tp, ep
BARS = {  # (data, model, plane): at most, makespan over work
    ("wlbllm", "7B", 8): 1.28,
    ("wlbllm", "7B", 16): 1.30,
    ("wlbllm", "8B", 8): 1.18,
    ("wlbllm", "8B", 16): 1.20,
    ("wlbllm", "Mixtral", 8): 1.30,
    ("wlbllm", "Mixtral", 16): 1.30,
    ("256k", "7B", 8): 1.20,
}
NEVER_BEHIND, MOST_OF_BEST, MOST_CPU = ("prolong", "multitask"), 0.97, 2.0


@dataclass(frozen=True, slots=True)
class Case:
    data: str
    model: str
    plane: int

    @property
    def costs(self) -> AnalyticCosts:
        name, tp, ep = MODELS[self.model]
        return AnalyticCosts(
            preset(name),
            Topology(tp=tp, pp=4, dp=self.plane),
            flops_per_s=350e12,
            overhead_ns=100_000,
            layer_overhead_ns=60_000,
            sequence_parallel=True,
            distributed_optimizer=True,
            ep=min(ep, self.plane),
            width_tax=TAX,
        )

    @property
    def has_equal_counts(self) -> bool:
        return self.costs.ep > 1


def cases(shared: Path) -> Iterator[Case]:
    datasets = ["lognormal"]
    if (shared / "data" / "wlbllm_lengths.npy").is_file():
        datasets = ["wlbllm", "prolong", "multitask", *datasets]
    for data in datasets:
        for model in MODELS:
            yield from (Case(data, model, plane) for plane in PLANES)
    yield Case("256k", "7B", 8)


def lengths(case: Case, shared: Path) -> list[SampleLength]:
    rng = np.random.default_rng(0)
    if case.data == "lognormal":
        drawn = rng.lognormal(np.log(1024) - 1.5**2 / 2, 1.5, 8 * case.plane)
        return sample_lengths([int(n) for n in np.clip(drawn, 128, 8192)])
    if case.data == "256k":
        short = np.clip(rng.lognormal(np.log(200), 0.84, TOKENS // 200), 16, 8192).astype(int)
        count = int(np.searchsorted(np.cumsum(short), TOKENS - 262_144))
        return sample_lengths([int(n) for n in rng.permutation([262_144, *short[:count]])])
    table = np.load(shared / "data" / f"{case.data}_lengths.npy")
    every = np.minimum(table if table.ndim == 1 else table.sum(axis=1), CUT)
    if case.data == "wlbllm":
        every = np.concatenate([every, every[every >= 10_000]])
    every = rng.permutation(every)
    return sample_lengths([int(n) for n in every[: int(np.searchsorted(np.cumsum(every), TOKENS))]])


def work_s(case: Case, samples: Sequence[SampleLength]) -> float:
    """Of all samples on the busiest pipeline rank, over the replicas, without overheads."""
    free = replace(case.costs, overhead_ns=0, layer_overhead_ns=0)
    ranks = free.topology.stage_ranks
    floor = batch_floor(free, [(s.encoder, 0) for s in samples], ranks, split=False, packed=True, pieces=True)
    assert floor is not None
    return float(floor.work_ns.max()) / case.plane / 1e9


Step = dict[str, Any]  # makespan_s, peak_gb, and how it was made


def under_1f1b(case: Case, splits: Iterator[Callable[[], Any]]) -> Step | None:
    """The best of several splits; those that do not fit are left out."""
    costs, best = case.costs, None
    for make in splits:
        try:
            replicas = make()
            priced = replica_costs(costs, replicas)
            named = [schedule_of_costs("1f1b", costs.topology.stage_ranks, LIMIT_BYTES, one) for one in priced]
            schedules, priced = shared_by_twins(replicas, named, priced)
            steps = predicted(replicas, schedules, priced, cores=None, memory_limit_bytes=LIMIT_BYTES)
        except PlanError:
            continue
        end_s = max(one.makespan_ns for one in steps) / 1e9
        if best is None or end_s < best["makespan_s"]:
            best = {"makespan_s": end_s, "peak_gb": max(max(one.peak_bytes) for one in steps) / 1e9}
    return best


def splits(case: Case, samples: list[SampleLength], rule: str) -> Iterator[Callable[[], Any]]:
    longest = max(s.encoder for s in samples)
    for kind in LAYER_RECOMPUTES:
        for size in sorted({max(size, longest + 8) for size in SIZES}):
            options: dict[str, Any] = {"max_tokens": size, "dp": case.plane, "pad_multiple": 8, "recompute": kind}
            if rule == "verl":
                yield partial(verl_rule, samples, **options)
            else:
                evaluate = micro_batch_evaluate(case.costs)
                yield partial(packed_documents, samples, evaluate, equal_counts=case.has_equal_counts, **options)


def planned(case: Case, samples: list[SampleLength], widths: tuple[int, ...]) -> Step | None:
    costs = case.costs
    counts = "equal" if case.has_equal_counts else "free"
    pieces = "off" if case.has_equal_counts and not widths else "auto"
    options: dict[str, Any] = {"layout": "packed", "pieces": pieces, "replica_counts": counts, "widths": widths}
    planner = Planner(costs.topology, costs, LIMIT_BYTES, **options)
    start_s = time.process_time()
    try:
        plan = planner.plan(samples)
    except PlanError:
        return None
    cpu_s = time.process_time() - start_s
    cut = any(m.attention == "carried" for m in plan.batch.micro_batches)
    return {
        "makespan_s": plan.makespan_s, "peak_gb": plan.peak_bytes / 1e9, "cpu_s": cpu_s, "width": plan.width,
        "in_pieces": cut, "bound_s": plan.lower_bound_s,
    }  # fmt: skip


def measured(case: Case, shared: Path) -> dict[str, Any]:
    samples, least_s = lengths(case, shared), 0.0
    least_s = work_s(case, samples)
    steps: dict[str, Step | None] = {rule: under_1f1b(case, splits(case, samples, rule)) for rule in PEERS[:2]}
    grouped = best_grouped(samples, case.costs, SHARES, LIMIT_BYTES)
    steps[PEERS[2]] = grouped and {
        "makespan_s": grouped.makespan_s, "peak_gb": grouped.peak_bytes / 1e9, "share": grouped.max_tokens,
    }  # fmt: skip
    steps[OURS] = planned(case, samples, widths_of(case.plane))
    steps[ALONE] = planned(case, samples, ())
    for step in steps.values():
        if step is not None:
            step["over_work"] = step["makespan_s"] / least_s
    row = {
        "data": case.data, "model": case.model, "plane": case.plane, "samples": len(samples), "work_s": least_s,
        "tokens": sum(s.encoder for s in samples), "longest": max(s.encoder for s in samples), "steps": steps,
    }  # fmt: skip
    return row | {"missed": missed(case, steps)}


def missed(case: Case, steps: Mapping[str, Step | None]) -> list[str]:
    """The bars that a row misses, each with its figure."""
    ours, alone = steps[OURS], steps[ALONE]
    if ours is None:
        return ["no plan"]
    faults = []
    bar = BARS.get((case.data, case.model, case.plane))
    if bar is not None and ours["over_work"] > bar:
        faults.append(f"{ours['over_work']:.3f} of work, bar {bar}")
    best = min((step["makespan_s"] for name in PEERS if (step := steps[name])), default=None)
    if best is not None and case.data in NEVER_BEHIND and ours["makespan_s"] > MOST_OF_BEST * best:
        faults.append(f"{ours['makespan_s'] / best:.3f} of the best rule, bar {MOST_OF_BEST}")
    if alone is not None and ours["makespan_s"] > alone["makespan_s"]:
        faults.append("width 1 ends earlier")
    return faults


def cpu_over_width_1(rows: Sequence[Mapping[str, Any]]) -> float:
    """Planning of all steps that have a plan at width 1."""
    both = [(row["steps"][OURS], row["steps"][ALONE]) for row in rows if row["steps"][OURS] and row["steps"][ALONE]]
    return float(sum(ours["cpu_s"] for ours, _ in both) / sum(alone["cpu_s"] for _, alone in both))


def text(result: Mapping[str, Any]) -> str:
    columns = (*PEERS, ALONE, OURS)
    lines = [
        f"Makespan over work ({result['machine']}, {result['date']}, commit {result['commit']})",
        f"{'data':10} {'model':8} {'DP':>3}" + "".join(f"{name:>14}" for name in columns) + "  width  GB    CPU s",
    ]
    for row in result["rows"]:
        steps = row["steps"]
        shown = [f"{steps[name]['over_work']:.3f}" if steps[name] else "does not fit" for name in columns]
        ours = steps[OURS] or {}
        line = f"{row['data']:10} {row['model']:8} {row['plane']:3}" + "".join(f"{one:>14}" for one in shown)
        line += f"  {ours.get('width', 0):5} {ours.get('peak_gb', 0):5.1f} {ours.get('cpu_s', 0):6.2f}"
        lines.append(line + ("   missed: " + ", ".join(row["missed"]) if row["missed"] else ""))
    lines.append(f"planning: {result['cpu_over_width_1']:.2f} of the CPU seconds of width 1")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--machine", default="")
    parser.add_argument(
        "--only", default="", help="cases whose words hold this text, like 'wlbllm 7B'; nothing written"
    )
    args = parser.parse_args()
    rows = []
    for case in cases(args.shared):
        if args.only in f"{case.data} {case.model} {case.plane}":
            rows.append(measured(case, args.shared))
            print(case, rows[-1]["missed"], file=sys.stderr, flush=True)
    ratio = cpu_over_width_1(rows)
    result = {"format": FORMAT, **provenance(args.machine), "rows": rows, "cpu_over_width_1": ratio}
    if not args.only:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(text(result))
    return 1 if ratio > MOST_CPU or any(row["missed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
