"""Public workloads: our steps next to the best rival, verl's balance and Megatron's dynamic context parallelism.

    python tests/bench/public.py [--shared DIR] [--machine TEXT] [--only TEXT]

Simulated on the counted costs of long.py: packed rows, sequence parallelism, flash attention, ZeRO 1, 350 TFLOP/s a
device, 0.1 ms an action and 0.06 ms a layer, 72 GB of a device planned with. What attention exchanges between joined
ranks is 10 % of their computing, in our steps and in "dynamic CP, taxed".

Data. "wlbllm": the lengths in ../shared/data, those of 10,000 tokens or more twice, cut at 131,072. "prolong" and
"multitask": the lengths there, cut alike. A million tokens a step of each, drawn with seed 0. "lognormal": mean 1,024,
sigma 1.5, clipped to 128 to 8,192, 8 samples a data parallel rank. "256k": one sample of 262,144 tokens among short
ones, a million tokens. Without DIR the last two alone.

Rules, each at its best. "rival": the best of `list_rivals` (packed rows under 1F1B, interleaved 1F1B, ZB-V). "verl":
its token balance (peer_rules.py) at several sizes of a micro-batch, 1F1B. "dynamic CP": dynamic_cp.py, with perfectly
split attention and the best of several sizes; "dynamic CP, taxed" pays for exchanges as ours does. Ours: one stage per
rank with full backwards, or a V with split ones, whichever ends first. All may recompute. All but dynamic CP, which is
a model, are proven steps. So replicas that share experts have equal counts in one published order, 1F1B or ZB-V; only
those that share none are free.

Figure: makespan over the work of all samples divided by all pipeline ranks, without overheads and exchanges: no plan is
below 1. Bars: see BARS. Planning and proof: CPU seconds. Writes results/public.json; exit status 1 if a bar is missed.
public_picture.py draws it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from bound import free_bound_s
from contenders import provenance
from dynamic_cp import best_grouped
from peer_rules import verl_rule
from proven import fastest, planned_step, under_schedule

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, Recompute, SampleLength, sample_lengths
from dynapipe_ext.batch.topology import PlacementName, Topology, list_cp_degrees, place_stages
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.executor.proven_step import ProvenStep
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.evaluation.bounds import find_batch_floor
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.rivals import list_rivals, pick_best_rival
from dynapipe_ext.settings.plan_rules import PlanRules, own_placement

RESULT = Path(__file__).parent / "results" / "public.json"
SHARED = Path(__file__).resolve().parents[3] / "shared"
FORMAT = "dynapipe-public/1"
LIMIT_BYTES = 72 * 10**9
TAX = 0.1
PLANES = (2, 4, 8, 16)
CUT, TOKENS = 131_072, 10**6
SIZES = (8_192, 16_384, 32_768, 65_536, 131_072, 262_144)  # positions of verl's micro-batch
SHARES = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)  # of a rank, under dynamic CP
PEERS = ("rival", "verl", "dynamic CP")
TAXED = "dynamic CP, taxed"
OURS, ALONE = "ours", "ours, width 1"
MODELS = {"7B": ("llama-2-7b", 8, 1), "8B": ("llama-3-8b", 2, 1), "Mixtral": ("mixtral-8x7b", 2, 4)}  # tp, ep
BARS = {  # (data, model, plane): at most, makespan over the busiest rank's work (even layers, whole backwards)
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


Step = dict[str, Any]  # makespan_s, peak_gb, and how it was made


def work_s(case: Case, samples: Sequence[SampleLength]) -> float:
    """Of all samples over all pipeline ranks, without overheads."""
    free = replace(case.costs, overhead_ns=0, layer_overhead_ns=0)
    return free_bound_s(free, samples, free.topology, pieces=True)


def busiest_s(case: Case, samples: Sequence[SampleLength]) -> float:
    """Of all samples on the busiest pipeline rank of even layers, over the replicas, without overheads."""
    free = replace(case.costs, overhead_ns=0, layer_overhead_ns=0)
    floor = find_batch_floor(free, samples, free.topology.stage_ranks, split=False, packed=True, pieces=True)
    assert floor is not None
    return float(floor.work_ns.max()) / case.plane / 1e9


def planner_of(case: Case, placement: PlacementName, widths: tuple[int, ...] = (1,), **rules: Any) -> Planner:
    """The planner of rules on a placement. Costs know whether backwards are split."""
    counts = "equal" if case.has_equal_counts else "free"
    options = PlanRules(**{"layout": "packed", "replica_counts": counts, **rules})
    costs = replace(case.costs, split_backward=options.is_split)
    stages = () if placement == "linear" else place_stages(placement, costs.topology.pp)
    width, several = (widths[0], ()) if len(widths) == 1 else (1, widths)
    topology = replace(costs.topology, placement=stages, width=width)
    return Planner(topology, costs.with_topology(topology)[0], LIMIT_BYTES, widths=several, **options.as_keywords())


def as_step(proven: ProvenStep | None, **more: Any) -> Step | None:
    if proven is None:
        return None
    plan = proven.step_plan
    cut = any(m.attention == "carried" for m in plan.batch.micro_batches)
    return {
        "makespan_s": plan.makespan_s, "peak_gb": proven.peak_bytes / 1e9, "width": plan.width, "in_pieces": cut,
        "schedule": plan.schedules[0].name, "bound_s": plan.lower_bound_s, **more,
    }  # fmt: skip


def best_rival(case: Case, samples: list[SampleLength]) -> Step | None:
    steps: dict[str, Step] = {}
    for rival in list_rivals(case.costs.topology.pp):
        planner = planner_of(case, own_placement(rival.schedule), **rival.rules)
        if step := as_step(fastest([partial(planned_step, planner, samples)]), rival=rival.name):
            steps[rival.name] = step
    return steps[pick_best_rival({name: step["makespan_s"] for name, step in steps.items()})] if steps else None


def verl(case: Case, samples: list[SampleLength]) -> Step | None:
    longest, costs = max(s.encoder for s in samples), case.costs
    ranks = costs.topology.stage_ranks

    def under_1f1b(size: int, kind: Recompute) -> ProvenStep:
        replicas = verl_rule(samples, max_tokens=size, dp=case.plane, pad_multiple=8, recompute=kind)
        if case.has_equal_counts and len({len(replica) for replica in replicas}) > 1:
            raise PlanError("replicas that share experts need equal counts, which this rule did not give: leave it out")
        return under_schedule("1f1b", replicas, costs, ranks, LIMIT_BYTES)

    sizes = sorted({max(size, longest + 8) for size in SIZES})
    return as_step(fastest(partial(under_1f1b, size, kind) for kind in LAYER_RECOMPUTES for size in sizes))


def planned(case: Case, samples: list[SampleLength], widths: tuple[int, ...]) -> Step | None:
    """Ours at one of the widths; where experts lie over the replicas of a width, in a published order."""
    collectives = case.costs.facts.replica_collectives
    start_s = time.process_time()
    meeting = [w for w in widths if collectives and any(collectives.at_width(w).of_micro_batches)]
    free = tuple(w for w in widths if w not in meeting)
    makers = [
        partial(planned_step, planner_of(case, own_placement(schedule), (width,), schedule=schedule), samples)
        for width in meeting
        for schedule in get_args(Literal["1f1b", "zb-v"])
    ]
    for placement, split in (("linear", False), ("v", True)) if free else ():
        rules: dict[str, Any] = {"pieces": "auto", "split_backward": split}
        planner = planner_of(case, cast(PlacementName, placement), free, **rules)
        makers.append(partial(planned_step, planner, samples))
    best = fastest(makers)
    return as_step(best, cpu_s=time.process_time() - start_s)


def measured(case: Case, shared: Path) -> dict[str, Any]:
    samples = lengths(case, shared)
    least_s = work_s(case, samples)
    steps: dict[str, Step | None] = {PEERS[0]: best_rival(case, samples), PEERS[1]: verl(case, samples)}
    for name in (PEERS[2], TAXED):
        grouped = best_grouped(samples, case.costs, SHARES, LIMIT_BYTES, taxed=name == TAXED)
        steps[name] = grouped and {
            "makespan_s": grouped.makespan_s, "peak_gb": grouped.peak_bytes / 1e9, "share": grouped.max_tokens,
        }  # fmt: skip
    steps[ALONE] = planned(case, samples, (1,))
    steps[OURS] = planned(case, samples, list_cp_degrees(case.plane))
    for step in steps.values():
        if step is not None:
            step["over_work"] = step["makespan_s"] / least_s
    row = {
        "data": case.data, "model": case.model, "plane": case.plane, "samples": len(samples), "work_s": least_s,
        "tokens": sum(s.encoder for s in samples), "longest": max(s.encoder for s in samples), "steps": steps,
    }  # fmt: skip
    return row | {"missed": missed(case, steps, busiest_s(case, samples))}


def missed(case: Case, steps: Mapping[str, Step | None], busiest: float) -> list[str]:
    """The bars that a row misses, each with its figure. `busiest`: seconds of the busiest rank's work, layers even."""
    ours, alone = steps[OURS], steps[ALONE]
    if ours is None:
        return ["no plan"]
    faults = []
    bar = BARS.get((case.data, case.model, case.plane))
    if bar is not None and ours["makespan_s"] > bar * busiest:
        faults.append(f"{ours['makespan_s'] / busiest:.3f} of the busiest rank's work, bar {bar}")
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
    columns = (*PEERS, TAXED, ALONE, OURS)
    lines = [
        f"Makespan over work ({result['machine']}, {result['date']}, commit {result['commit']})",
        f"{'data':10} {'model':8} {'DP':>3}" + "".join(f"{name:>18}" for name in columns) + "  width  GB    CPU s",
    ]
    for row in result["rows"]:
        steps = row["steps"]
        shown = [f"{steps[name]['over_work']:.3f}" if steps[name] else "does not fit" for name in columns]
        ours = steps[OURS] or {}
        line = f"{row['data']:10} {row['model']:8} {row['plane']:3}" + "".join(f"{one:>18}" for one in shown)
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
