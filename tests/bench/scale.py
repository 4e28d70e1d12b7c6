"""Whether planning keeps up: CPU seconds of a whole step, from lengths to signed plans, and the planner cores of a run.

    python tests/bench/scale.py [--shared DIR] [--machine TEXT] [--runs N]

Cases: GPT 6.7B on measured A100 costs, PP4, the reference batches of 64k and 256k tokens over 2 replicas with one stage
a rank and with two (V), and 24,000 samples over 128 replicas (512 ranks); 36 GB a rank. Llama 3 70B on counted costs,
24,000 samples over 4,096 ranks: TP8 PP8 DP64 and TP8 PP16 DP32; 72 GB a rank.

step: what a planner process does for a step (`prove_step` and `encode` of every rank's plan), planned again where
buffers in flight did not fit ("plans"). The phases are those of one plan: starts (a plan without moves: pricing, first
cuts, replicas, prediction, bounds), search (what the moves add), lower, proof, encode. Each the median of N runs.
cores: planner cores that keep ahead of steps of 1 s; aim: one for 1,000 ranks.
Lengths are of DIR (default ../shared beside the repository): reference_plans, multitask_lengths.npy cut at 2,048.
Writes results/scale.json; exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from contenders import MEMORY_LIMIT_BYTES, REAL_BYTES, TOPOLOGY, V, cost_model, provenance, read_batches

from dynapipe_ext.batch.micro_batches import SampleLength, sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.instructions import ExecutionPlan, lower
from dynapipe_ext.executor.plans.planner_process import collect_seldom
from dynapipe_ext.executor.proven_step import Plans, prove, prove_step
from dynapipe_ext.executor.wire import encode_all
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.planner import Planner

RESULT = Path(__file__).parent / "results" / "scale.json"
SHARED = Path(__file__).resolve().parents[3] / "shared"
FORMAT = "dynapipe-scale/1"
MANY_SAMPLES, MOST_LENGTH = 24_000, 2048
MANY_LIMIT_BYTES = 72 * 10**9
RANKS_A_CORE = 1000
_KEY = bytes(32)
_PHASES = ("starts", "search", "lower", "proof", "encode")


@dataclass(frozen=True, slots=True)
class Case:
    """A planner and a batch; `most_s` is the bar of its step, CPU seconds (None: that of `RANKS_A_CORE`)."""

    name: str
    planner: Planner
    samples: list[SampleLength]
    most_s: float | None

    @property
    def bar_s(self) -> float:
        return self.planner.topology.world_size / RANKS_A_CORE if self.most_s is None else self.most_s


def cases(shared: Path) -> list[Case]:
    found = []
    for tokens, bars in ((65_536, (0.1, 0.1)), (262_144, (0.25, 0.25))):
        batch = read_batches(shared, tokens, limit=1)[0][0]
        samples = sample_lengths([max(1, n - 1) for n in batch.lengths])
        for name, topology, most_s in zip(("one stage", "V"), (TOPOLOGY, V), bars, strict=True):
            found.append(Case(f"{tokens >> 10}k, {name}", _measured(shared, topology), samples, most_s))
    many = _many(shared)
    found.append(Case("512 ranks", _measured(shared, replace(TOPOLOGY, dp=128)), many, 1.5))
    found += [Case(f"4,096 ranks, pp {pp}", _counted(pp, 4096 // 8 // pp), many, None) for pp in (8, 16)]
    return found


def _measured(shared: Path, topology: Topology) -> Planner:
    costs, _ = cost_model(shared / "data" / "a100_layer_costs", topology)
    return Planner(topology, costs, MEMORY_LIMIT_BYTES, format=REAL_BYTES, collectives=ReplicaCollectives())


def _counted(pp: int, dp: int) -> Planner:
    topology = Topology(tp=8, pp=pp, dp=dp)
    costs = AnalyticCosts(
        preset("llama-3-70b"),
        topology,
        flops_per_s=350e12,
        overhead_ns=100_000,
        sequence_parallel=True,
        distributed_optimizer=True,
    )
    return Planner(topology, costs, MANY_LIMIT_BYTES, format=ActivationFormat(8192, "bfloat16", sequence_shards=8))


def _many(shared: Path) -> list[SampleLength]:
    path = shared / "data" / "multitask_lengths.npy"
    try:
        lengths = np.minimum(np.load(path).astype(np.int64).sum(axis=1), MOST_LENGTH)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): name the folder above data/ with --shared") from error
    return sample_lengths(lengths[:MANY_SAMPLES].tolist())


def timed(work: Callable[[], Any], runs: int) -> tuple[Any, float]:
    """What it gives, and its CPU seconds: the median of so many runs."""
    taken = []
    for _ in range(runs):
        gc.collect()
        start_s = time.process_time()
        value = work()
        taken.append(time.process_time() - start_s)
    return value, median(taken)


def _encoded(plans: Plans) -> int:
    """Bytes of all ranks' plans as they go to the store."""
    every: list[ExecutionPlan] = [plan for replica in plans for plan in replica]
    return sum(map(len, encode_all(every, _KEY, contexts=[b"plan"] * len(every))))


def measured(case: Case, runs: int) -> dict[str, Any]:
    planner, samples = case.planner, case.samples
    asked: list[int] = []

    class Asked(Planner):
        """The planner, counting how often it plans the step."""

        def plan(self, *args: Any, **settings: Any) -> Any:
            asked.append(0)
            return planner.plan(*args, **settings)

        def replan(self, *args: Any, reserve_bytes: int) -> Any:
            asked.append(reserve_bytes)
            return planner.replan(*args, reserve_bytes=reserve_bytes)

    counting = Asked(planner.topology, planner.costs, planner.memory_limit_bytes, format=planner.format,
                     collectives=planner.collectives)  # fmt: skip
    proven, step_s = timed(lambda: prove_step(counting, samples, step=0), runs)
    num_bytes, encode_s = timed(lambda: _encoded(proven.plans), runs)
    _, starts_s = timed(lambda: replace(planner, effort=0).plan(samples), runs)
    plan, plan_s = timed(lambda: planner.plan(samples), runs)
    form, collectives = planner.activation_format, planner.replica_collectives
    _, lower_s = timed(lambda: lower(plan, form), runs)
    _, prove_s = timed(lambda: prove(plan, form, collectives), runs)
    phases = (starts_s, plan_s - starts_s, lower_s, prove_s - lower_s, encode_s)
    ranks = planner.topology.world_size
    row: dict[str, Any] = {
        "case": case.name, "ranks": ranks, "samples": len(samples), "tokens": sum(s.tokens for s in samples),
        "micro_batches": len(plan.batch.micro_batches), "predicted_s": proven.step_plan.makespan_s,
        "kb": num_bytes / 1e3, "plans": len(asked) // runs, "step_cpu_s": step_s + encode_s,
        "one_plan_cpu_s": plan_s + prove_s + encode_s, "bar_s": case.bar_s,
        "phases_cpu_s": dict(zip(_PHASES, phases, strict=True)), "cores_for_steps_of_1_s": step_s + encode_s,
        "ranks_a_core": ranks / (step_s + encode_s), "load": os.getloadavg()[0],
    }  # fmt: skip
    return row | {"missed": row["step_cpu_s"] > row["bar_s"]}


def text(result: Mapping[str, Any]) -> str:
    lines = [
        f"CPU seconds of planning a step ({result['machine']}, {result['date']}, commit {result['commit']})",
        f"{'':20} {'ranks':>5}{'step':>8}{'bar':>7}{'plans':>6}" + "".join(f"{phase:>8}" for phase in _PHASES),
    ]
    for row in result["rows"]:
        line = f"{row['case']:20} {row['ranks']:5}{row['step_cpu_s']:8.3f}{row['bar_s']:7.2f}{row['plans']:6}"
        line += "".join(f"{row['phases_cpu_s'][phase]:8.3f}" for phase in _PHASES)
        lines.append(line + ("   missed" if row["missed"] else ""))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--machine", default="")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    collect_seldom()  # as planner processes do
    rows = []
    for case in cases(args.shared):
        rows.append(measured(case, args.runs))
        print(case.name, round(rows[-1]["step_cpu_s"], 3), file=sys.stderr, flush=True)
    result = {"format": FORMAT, **provenance(args.machine), "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(text(result))
    return 1 if any(row["missed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
