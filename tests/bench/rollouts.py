"""Batches of rollouts of reasoning models: our planning call beside verl's, slime's and NeMo-RL's rules under 1F1B.

    python tests/bench/rollouts.py [--machine TEXT]

Simulated on counted costs, PP4 x DP4: Llama 2 7B (TP8) and Llama 3 8B (TP4), bf16, sequence parallelism, flash
attention, ZeRO 1, 350 TFLOP/s a device, 0.1 ms an action and 0.06 ms a layer, 72 GB of a device planned with.

Lengths are lognormal, cut at a cap as generation is. "swe": 128 rollouts of mean 36k, cap 131,072. "20k" and "8k": 128
and 512 rollouts, caps of 20,480 and 8,192, means of about 9k and 3k.

The peers' rules are written from their sources (peer_rules.py), and flattered. Each has the best of caps of 1, 1.5, 2
and 4 times the longest rollout, of its releases' variants, of recomputation none, selective and full, and of three
orders a replica (its own, shortest first, longest first). None pads rows to one length, and replicas wait for each
other at the end of a step alone. All steps are proven. "rival": the best of `list_rivals` (packed rows under 1F1B,
interleaved 1F1B, ZB-V). Ours are `plan_micro_batches` with recompute "auto": whole rollouts, and with pieces "auto", on
the loop's own even layers with whole backwards. "placed": whole rollouts, where the loop lets layers be placed as
`--placement auto` places them (linear or a V, half layers) and backwards be split. Floor: as in long.py, the larger of
the work over all ranks and the longest rollout's own, without overheads. "order": what no order of the planned rows is
below; "cuts": what no plan of whole rollouts on these layers is below.

Planning: CPU milliseconds of the call, the least of five. "ms, cap" is a call as loops make it, with the longest
rollout as a cap of tokens, and "cap" its step. Writes results/rollouts.json; exit status 1 if a bar is missed: 1.05
times the busiest rank's work (swe, pieces), 1.08 (20k, 8k), never behind a peer, 50 ms for 512 rollouts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contenders import provenance
from long import LIMIT_BYTES, Case, busiest_s, floor_s
from peer_rules import Replicas, nemo_rl_rule, slime_rule, verl_rule
from proven import fastest, in_best_orders_s, planned_step, proven

from dynapipe_ext import plan_micro_batches
from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, SampleLength, sample_lengths
from dynapipe_ext.batch.topology import Topology, place_stages
from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.placements import PlacementSearch
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.rivals import list_rivals, pick_best_rival
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.settings.plan_rules import SPLIT_SCHEDULES, own_placement

RESULT = Path(__file__).parent / "results" / "rollouts.json"
FORMAT = "dynapipe-rollouts/1"
MOST_OVER_FLOOR = {"swe": 1.05, "20k": 1.08, "8k": 1.08}
MOST_MS_OF_512 = 50.0
CAPS = (1.0, 1.5, 2.0, 4.0)  # times the longest rollout
DATA = {"swe": (36_000, 131_072, (128,)), "20k": (9_000, 20_480, (128, 512)), "8k": (3_000, 8_192, (128, 512))}
RULES_OF_CALL: dict[str, Any] = {"layout": "packed", "recompute": "auto", "effort": 500}
RULES: dict[str, tuple[Callable[..., Replicas], ...]] = {
    "verl": (verl_rule,),
    "slime": (slime_rule, partial(slime_rule, longest_first=True)),
    "nemo-rl": (nemo_rl_rule, partial(nemo_rl_rule, largest_first=True)),
}


def lengths(data: str, count: int) -> list[SampleLength]:
    """Lognormal, of the mean before the cap that leaves the mean of `DATA` after it."""
    mean, cap, _ = DATA[data]
    drawn = np.random.default_rng(0).lognormal(0.0, 0.8, count)
    low, high = 0.0, 10.0 * mean
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(scale * drawn, 64, cap).mean() < mean else (low, scale)
    return sample_lengths(np.clip(high * drawn, 64, cap).astype(np.int64))


def peer_s(rules: tuple[Callable[..., Replicas], ...], samples: list[SampleLength], case: Case) -> float | None:
    """The fastest step of any variant under 1F1B; None where none fits."""
    found = []
    longest = max(s.encoder for s in samples)
    for rule in rules:
        for cap in CAPS:
            for kind in LAYER_RECOMPUTES:
                replicas = rule(
                    samples, max_tokens=int(cap * longest), dp=case.dp, pad_multiple=case.tp, recompute=kind
                )
                found.append(
                    in_best_orders_s("1f1b", replicas, case.costs, case.costs.topology.stage_ranks, LIMIT_BYTES)
                )
    return min((seconds for seconds in found if seconds is not None), default=None)


def rival_s(case: Case, samples: list[SampleLength]) -> float | None:
    """The step of the best rival: packed rows under a published schedule, on even layers."""
    step_s: dict[str, float] = {}
    for rival in list_rivals(case.pp):
        name = own_placement(rival.schedule)
        stages = () if name == "linear" else place_stages(name, case.pp)
        costs = replace(case.costs, split_backward=rival.schedule in SPLIT_SCHEDULES)
        costs, topology = costs.with_topology(replace(case.costs.topology, placement=stages))
        planner = Planner(topology, costs, LIMIT_BYTES, pad_multiple=case.tp, **rival.rules)
        if step := fastest([partial(planned_step, planner, samples)]):
            step_s[rival.name] = step.step_plan.makespan_s
    return step_s[pick_best_rival(step_s)] if step_s else None


def ours(case: Case, samples: list[SampleLength], pieces: str) -> tuple[StepPlan | None, float]:
    """The plan of the planning call, and its CPU milliseconds."""
    least_ms, costs = float("inf"), case.costs
    try:
        for _ in range(5):
            begin = time.process_time()
            planned = plan_micro_batches(
                samples,
                costs.topology,
                costs,
                memory_limit_bytes=LIMIT_BYTES,
                recompute="auto",
                pad_multiple=case.tp,
                pieces=pieces,
            )
            least_ms = min(least_ms, 1000 * (time.process_time() - begin))
    except PlanError:
        return None, least_ms
    return proven(planned.plan, costs).step_plan, least_ms


def placed_s(case: Case, samples: list[SampleLength]) -> float:
    """The step of whole rollouts where layers are placed for it and backwards are split."""

    def planner_over(topology: Topology) -> Planner:
        costs, placed = replace(case.costs, split_backward=True).with_topology(topology)
        return Planner(placed, costs, LIMIT_BYTES, **RULES_OF_CALL, pad_multiple=case.tp, split_backward=True)

    search = PlacementSearch(
        base=case.costs.topology,
        planner_over=planner_over,
        step_of=lambda planner, batch: planned_step(planner, batch).step_plan,
        num_layers=case.costs.architecture.num_layers,
        batches=[samples],
        halves=True,
    )
    return search.list_trials(("linear", "v"))[0].makespan_s


def call(case: Case, samples: list[SampleLength]) -> tuple[float, float]:
    """The step and the CPU milliseconds as a loop calls: a cap on tokens, one kind of recomputation."""
    least_ms, costs = float("inf"), case.costs
    cap = max(s.encoder for s in samples)
    for _ in range(5):
        begin = time.process_time()
        planned = plan_micro_batches(samples, costs.topology, costs, max_tokens=cap)
        least_ms = min(least_ms, 1000 * (time.process_time() - begin))
    return proven(planned.plan, costs).step_plan.makespan_s, least_ms


def measured(case: Case, count: int) -> dict[str, Any]:
    samples = lengths(case.data, count)
    least_s = floor_s(case, samples)
    times: dict[str, float | None] = {name: peer_s(rules, samples, case) for name, rules in RULES.items()}
    whole, whole_ms = ours(case, samples, "off")
    pieces, pieces_ms = ours(case, samples, "auto")
    cap_s, call_ms = call(case, samples)
    times |= {"rival": rival_s(case, samples), "cap": cap_s, "placed": placed_s(case, samples)}
    times |= {"whole": whole and whole.makespan_s, "pieces": pieces and pieces.makespan_s}
    times |= {"order": whole and whole.lower_bound_s, "cuts": whole and cuts_s(whole)}
    row: dict[str, Any] = {
        "model": case.model, "data": case.data, "rollouts": count,
        "mean": float(np.mean([s.encoder for s in samples])), "longest": max(s.encoder for s in samples),
        "floor_s": least_s, "busiest_s": busiest_s(case, samples),
        "over_floor": {name: None if seconds is None else seconds / least_s for name, seconds in times.items()},
        "whole_ms": whole_ms, "pieces_ms": pieces_ms, "call_ms": call_ms,
    }  # fmt: skip
    return row | {"missed": missed(row)}


def cuts_s(plan: StepPlan) -> float:
    assert plan.certificate is not None
    assert plan.certificate.batch_ns is not None
    return plan.certificate.batch_ns / 1e9


def missed(row: Mapping[str, Any]) -> list[str]:
    over, faults = row["over_floor"], []
    of_busiest = over["pieces"] * row["floor_s"] / row["busiest_s"]
    if row["rollouts"] == 128 and of_busiest > MOST_OVER_FLOOR.get(row["data"], float("inf")):
        faults.append(f"pieces {of_busiest:.3f} of the busiest rank's work")
    best_peer = min((over[name] for name in RULES if over[name]), default=float("inf"))
    faults += [name for name in ("whole", "pieces") if (over[name] or 0) > best_peer]
    if row["rollouts"] == 512 and row["call_ms"] > MOST_MS_OF_512:
        faults.append("call_ms")
    return faults


def cases() -> Iterator[tuple[Case, int]]:
    for model, tp in (("llama-2-7b", 8), ("llama-3-8b", 4)):
        for data, (_, _, counts) in DATA.items():
            for count in counts:
                yield Case(model, tp, 4, 4, data, 0), count


def text(result: Mapping[str, Any]) -> str:
    names = [*RULES, "rival", "whole", "pieces", "cap", "placed", "order", "cuts"]
    lines = [
        f"Makespan over the floor, PP4 x DP4 ({result['machine']}, {result['date']}, commit {result['commit']})",
        f"{'model':12}{'data':>5}{'n':>5}" + "".join(f"{name:>9}" for name in names) + f"{'ms':>7}{'ms, cap':>9}",
    ]
    for row in result["rows"]:
        shown = [row["over_floor"][name] for name in names]
        figures = "".join(f"{'-' if value is None else format(value, '.3f'):>9}" for value in shown)
        line = (
            f"{row['model']:12}{row['data']:>5}{row['rollouts']:5}{figures}{row['whole_ms']:7.0f}{row['call_ms']:9.0f}"
        )
        lines.append(line + ("   missed: " + ", ".join(row["missed"]) if row["missed"] else ""))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    rows = [measured(case, count) for case, count in cases()]
    result = {"format": FORMAT, **provenance(args.machine), "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(text(result))
    return 1 if any(row["missed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
