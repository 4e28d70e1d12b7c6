"""What schedules lose when times are not as predicted, beside readiness-first dispatch. Writes results/slack.json.

    python tests/bench/slack.py --costs DIR --shared DIR [--simulated-only]

Every action takes 0.8 to 1.2 times its predicted time, and one stage 1.3 times that. The loss is the makespan under
noise less the noise-free makespan of the same way of running: the schedule in its order, and readiness-first
dispatch on the same micro-batches under the same byte limit.
Simulated on every batch, measured on PP4 x DP2 sleeping ranks on the first one; there readiness-first dispatch runs the
order that it would choose under the very same times. Without --costs the costs are made up, without --shared the
lengths are the generator's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from contenders import TOPOLOGY, Batch, Costs, cost_model, measured_to_file, provenance, read_batches
from emulation import GivenStep, run_steps
from noise import Noise, measure_slack, noisy_costs, readiness_first
from proven import planned_step

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.executor.instructions import lower
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan

RESULT = Path(__file__).parent / "results" / "slack.json"
FORMAT = "dynapipe-slack/1"
ALLOWED = 1.5  # times the loss of readiness-first dispatch
_LEAST = 0.01  # of the makespan: the ratio to a loss below it says nothing
WAYS = ("in order", "readiness first")
SLOW_STAGES = (None, *range(TOPOLOGY.num_stages))
_TENSORS = ActivationFormat(4)


@dataclass(frozen=True, slots=True)
class Kind:
    """A way of scheduling: planner settings, and the limit under which it and readiness-first dispatch run."""

    name: str
    settings: Mapping[str, Any]
    limit_bytes: float

    def planner(self, costs: Costs) -> Planner:
        return Planner(TOPOLOGY, costs, self.limit_bytes, format=_TENSORS, **self.settings)


KINDS = (
    Kind("whole backward, adaptive", {}, 36e9),
    Kind("split backward, adaptive", {"split_backward": True}, 36e9),
    Kind("split backward, adaptive, 60 GB", {"split_backward": True}, 60e9),
    Kind("zb-h1, 60 GB", {"schedule": "zb-h1"}, 60e9),
)
EMULATED_SLOW_STAGES = (None, 1, 2)
EMULATED = ("whole backward, adaptive", "split backward, adaptive", "zb-h1, 60 GB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="folder of the A100 layer cost CSVs")
    parser.add_argument("--shared", type=Path, help="folder above data/reference_plans")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=20, help="draws of noise in the simulation")
    parser.add_argument("--draws", type=int, default=2, help="draws of noise on sleeping ranks, for each slow stage")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each draw on sleeping ranks, far apart in time")
    parser.add_argument("--scale", type=float, default=1.0, help="seconds slept for a second of the plan")
    parser.add_argument("--simulated-only", action="store_true")
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, default=RESULT)
    return measured_to_file(parser, measure, text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    costs, cost_name = cost_model(args.costs)
    batches, length_name = read_batches(args.shared, args.tokens, limit=args.batches)
    rows = [row for kind in KINDS for row in simulated(kind, costs, batches, args.seeds)]
    if not args.simulated_only:
        for kind in KINDS:
            if kind.name in EMULATED:
                rows += emulated(kind, costs, batches[0], args)
    return {
        "format": FORMAT,
        **provenance(args.machine),
        "topology": {"tp": TOPOLOGY.tp, "pp": TOPOLOGY.pp, "dp": TOPOLOGY.dp},
        "costs": cost_name,
        "costs_fingerprint": costs.fingerprint(),
        "lengths": length_name,
        "tokens": batches[0].tokens,
        "num_batches": len(batches),
        "seeds": args.seeds,
        "draws": args.draws,
        "rounds": args.rounds,
        "scale": args.scale,
        "allowed": ALLOWED,
        "rows": rows,
    }


def simulated(kind: Kind, costs: Costs, batches: Sequence[Batch], num_seeds: int) -> Iterator[dict[str, Any]]:
    """A row for each slow stage; every replica of every batch under every seed is a sample."""
    planner = kind.planner(costs)
    plans = [planned_step(planner, sample_lengths(batch.lengths)).step_plan for batch in batches]
    cases = [case for plan in plans for case in zip(plan.schedules, plan.costs, strict=True)]
    for slow_stage in SLOW_STAGES:
        slacks = [
            measure_slack(
                schedule,
                replica_costs,
                Noise(slow_stage=slow_stage),
                memory_limit_bytes=int(kind.limit_bytes),
                seeds=range(num_seeds),
            )
            for schedule, replica_costs in cases
        ]
        ways = {
            "in order": [slack.in_order for slack in slacks],
            "readiness first": [slack.readiness_first for slack in slacks],
        }
        yield row_of(
            "simulated",
            kind,
            slow_stage,
            {way: statistics.mean(loss.noise_free_s for loss in losses) for way, losses in ways.items()},
            {way: [s for loss in losses for s in loss.noisy_s] for way, losses in ways.items()},
            {way: [s for loss in losses for s in loss.losses_s] for way, losses in ways.items()},
        )


def row_of(
    how: str,
    kind: Kind,
    slow_stage: int | None,
    noise_free_s: Mapping[str, float],
    noisy_s: Mapping[str, Sequence[float]],
    losses_s: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    bar_s = statistics.median(losses_s["readiness first"])
    counts = bar_s > _LEAST * noise_free_s["readiness first"]
    return {
        "how": how,
        "kind": kind.name,
        "slow_stage": slow_stage,
        "ways": {
            way: {
                "noise_free_s": noise_free_s[way],
                "mean_noisy_s": statistics.mean(noisy_s[way]),
                "median_loss_s": statistics.median(losses),
                "p95_loss_s": float(np.percentile(losses, 95)),
                "loss_ratio": statistics.median(losses) / bar_s if counts else None,
            }
            for way, losses in losses_s.items()
        },
    }


def emulated(kind: Kind, costs: Costs, batch: Batch, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each of a few slow stages, as all ranks of a step together measure it.

    Of a draw's rounds the fastest counts: whatever else the machine does only ever delays sleeping ranks.
    """
    planner = kind.planner(costs)
    plan = planned_step(planner, sample_lengths(batch.lengths)).step_plan
    draws: list[tuple[int | None, int]] = [(slow, seed) for slow in EMULATED_SLOW_STAGES for seed in range(args.draws)]
    cases, steps = [], []
    for draw in (None, *draws):
        turned_out = plan.costs
        if draw is not None:
            noise, split = Noise(slow_stage=draw[0]), plan.schedules[0].is_split
            turned_out = tuple(noisy_costs(c, noise, seed=draw[1], split=split) for c in plan.costs)
        for way in WAYS:
            cases.append((way, draw))
            steps.append(given_step(way, plan, turned_out, int(kind.limit_bytes)))
    traces = run_steps(TOPOLOGY, steps * args.rounds, planner.activation_format, scale=args.scale, timeout_s=550)
    measured: dict[Any, list[float]] = {case: [] for case in cases}
    for case, trace in zip(cases * args.rounds, traces, strict=True):
        measured[case].append(trace.makespan_s)
    free_s = {way: min(measured[way, None]) for way in WAYS}
    predicted = {"predicted_s": plan.makespan_s, "measured_s": statistics.median(measured["in order", None])}
    for slow in EMULATED_SLOW_STAGES:
        noisy_s = {way: [min(measured[way, draw]) for draw in draws if draw[0] == slow] for way in WAYS}
        losses_s = {way: [s - free_s[way] for s in noisy_s[way]] for way in WAYS}
        yield row_of("emulated", kind, slow, free_s, noisy_s, losses_s) | predicted


def given_step(
    way: str,
    plan: StepPlan,
    turned_out: tuple[MicroBatchCosts, ...],
    limit_bytes: int,
) -> GivenStep:
    """A proven step of sleeping ranks that plan with the predicted costs; readiness first with those that turn out."""
    if way == "readiness first":
        orders = tuple(
            readiness_first(costs, schedule.stage_ranks, memory_limit_bytes=limit_bytes, split=schedule.is_split)
            for costs, schedule in zip(turned_out, plan.schedules, strict=True)
        )
        plans = lower(replace(plan, schedules=orders, costs=turned_out), _TENSORS)
    else:
        plans = lower(plan, _TENSORS)
    for replica in plans:
        verify([rank.instructions for rank in replica], replica[0].stage_ranks, len(replica[0].micro_batches))
    return GivenStep(plans=plans, costs=turned_out)


def text(result: Mapping[str, Any]) -> str:
    """The result as lines for a terminal."""
    lines = [
        f"Loss under noise ({result['costs']}, {result['tokens']} real tokens, PP4 x DP2; {result['machine']},"
        f" {result['date']}, commit {result['commit']}). In ms: median loss (95th percentile), over readiness-first's"
        f" where that is at least {_LEAST:.0%} of the makespan (allowed: {result['allowed']:g}x), and mean makespan.",
        f"{'':10} {'':32} {'slow':>4}" + "".join(f"{way:>29}" for way in WAYS),
    ]
    for row in result["rows"]:
        slow = "-" if row["slow_stage"] is None else row["slow_stage"]
        line = f"{row['how']:10} {row['kind']:32} {slow:>4}"
        for way in WAYS:
            line += f"{figures(row['ways'][way]) if way in row['ways'] else '':>29}"
        if "predicted_s" in row:
            line += f"   in order, noise-free: {row['measured_s'] / row['predicted_s']:.4f} of predicted"
        lines.append(line)
    return "\n".join(lines)


def figures(way: Mapping[str, Any]) -> str:
    ratio = "-" if way["loss_ratio"] is None else f"{way['loss_ratio']:.2f}x"
    loss = f"{1e3 * way['median_loss_s']:.0f} ({1e3 * way['p95_loss_s']:.0f})"
    return f"{loss} {ratio:>6} {1e3 * way['mean_noisy_s']:6.0f}"


if __name__ == "__main__":
    sys.exit(main())
