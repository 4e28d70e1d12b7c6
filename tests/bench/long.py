"""Batches with long tails: whole samples, samples in pieces, and an ideal dynamic context parallelism beside.

    python tests/bench/long.py [--shared DIR] [--machine TEXT] [--simulated-only]

Simulated on counted costs: Llama 2 7B (TP8 PP4) and Llama 3 70B (TP8 PP8), of "tail" and "one" Llama 3 8B (TP2 PP4)
as well; DP2 and DP4, bf16, sequence parallelism, flash attention, ZeRO 1, 350 TFLOP/s a device, 0.1 ms an action and
0.06 ms a layer, 72 GB of a device planned with.

Data, about a million tokens a batch ("long": two). "tail": one sample of 128k, two of 64k and four of 32k (k = 1,024),
the rest lognormal with median 500, 95 % of it below 2k and none above 8k. "one": one sample of 256k, the rest likewise
with median 200. "long": lognormal, median 12,000, up to 128k. "short": the rest of "tail" alone. With DIR (default
../shared beside the repository) the multi-task lengths and the meetings of QMSum in its data, one to one by tokens.

Every step is proven. Floor: the larger of the work over all ranks, without overheads, and the longest sample's own
work, one rank after the other, with one overhead of an action. Ideal dynamic context parallelism: every sample runs
over all replicas at once, split perfectly and for nothing; that is one replica whose ranks are as many times as fast
and have as many times the memory beside their states, which our planner plans with whole samples. Planning: CPU
seconds. Bound: no order of a plan's own micro-batches, recomputed as they are, ends earlier. One plan of pieces (7B,
"tail", PP4 x DP2) also runs on real ranks that sleep, at an eighth of the pace (emulation.py). Writes
results/long.json; exit status 1 where a bar is missed. long_picture.py draws one of the batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bound import free_bound_s
from contenders import provenance
from proven import planned_step

from dynapipe_ext.batch.micro_batches import Pieces, SampleLength, sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.launch.store import RedisServer
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.evaluation.bounds import find_batch_floor
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan

RESULT = Path(__file__).parent / "results" / "long.json"
SHARED = Path(__file__).resolve().parents[3] / "shared"
FORMAT = "dynapipe-long/1"
LIMIT_BYTES = 72 * 10**9
MOST_OVER_FLOOR = {2: 1.15, 4: 1.25}  # by replicas
MOST_OVER_WHOLE = 0.55
MOST_CPU_OVER_WHOLE = 2.0
MOST_OFF_PREDICTED = 0.03
SLOWER = 8.0  # so that wake-ups on shared cores are small beside actions
_K = 1024


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    tp: int
    pp: int
    dp: int
    data: str
    tokens: int

    @property
    def costs(self) -> AnalyticCosts:
        return AnalyticCosts(
            preset(self.model),
            Topology(tp=self.tp, pp=self.pp, dp=self.dp),
            flops_per_s=350e12,
            overhead_ns=100_000,
            layer_overhead_ns=60_000,
            sequence_parallel=True,
            distributed_optimizer=True,
        )


def cases(shared: Path) -> Iterator[Case]:
    datasets = ["tail", "one", "long", "short"]
    datasets += ["shared"] if (shared / "data" / "qmsum_lengths.npy").is_file() else []
    for model, tp, pp in (("llama-2-7b", 8, 4), ("llama-3-70b", 8, 8), ("llama-3-8b", 2, 4)):
        for data in datasets if tp == 8 else ("tail", "one"):
            for dp in (2, 4):
                yield Case(model, tp, pp, dp, data, 2 * 10**6 if data == "long" else 10**6)


def lengths(case: Case, shared: Path) -> list[SampleLength]:
    rng = np.random.default_rng(0)
    long: list[int] = []
    if case.data == "shared":
        found: list[int] = []
        for name in ("multitask", "qmsum"):
            table = np.load(shared / "data" / f"{name}_lengths.npy").sum(axis=1)
            drawn = rng.permutation(table)
            found += drawn[: int(np.searchsorted(np.cumsum(drawn), case.tokens // 2))].tolist()
        return sample_lengths([int(n) for n in rng.permutation(found)])
    if case.data == "tail":
        long = ([128 * _K] + [64 * _K] * 2 + [32 * _K] * 4) * round(case.tokens / 1e6)
    elif case.data == "one":
        long = [256 * _K]
    median, sigma, most = {"one": (200, 0.84, 8 * _K), "long": (12_000, 1.0, 128 * _K)}.get(
        case.data, (500, 0.84, 8 * _K)
    )
    left = case.tokens - sum(long)
    while left > 0:
        long.append(min(left, int(np.clip(rng.lognormal(np.log(median), sigma), 16, most))))
        left -= long[-1]
    return sample_lengths([int(n) for n in rng.permutation(long)])


def planned(costs: AnalyticCosts, samples: list[SampleLength], pieces: Pieces) -> tuple[StepPlan | None, float]:
    """The plan, or None where nothing fits, and the CPU seconds it took."""
    planner = Planner(costs.topology, costs, LIMIT_BYTES, layout="packed", pieces=pieces)
    start_s = time.process_time()
    try:
        plan = planned_step(planner, samples).step_plan
    except PlanError:
        plan = None
    return plan, time.process_time() - start_s


def spread_over_replicas_s(case: Case, samples: list[SampleLength]) -> float | None:
    """The step of an ideal dynamic context parallelism: see above."""
    costs = case.costs
    static = int(costs.states.device.total.max())
    one = replace(costs, topology=Topology(tp=case.tp, pp=case.pp), flops_per_s=case.dp * costs.flops_per_s)
    limit = int(one.states.device.total.max()) + case.dp * (LIMIT_BYTES - static)
    try:
        return planned_step(Planner(one.topology, one, limit, layout="packed"), samples).step_plan.makespan_s
    except PlanError:
        return None


def floor_s(case: Case, samples: list[SampleLength]) -> float:
    """What no plan of the samples can be faster than: see above."""
    costs = case.costs
    free = replace(costs, overhead_ns=0, layer_overhead_ns=0)
    longest = find_batch_floor(costs, samples, costs.topology.stage_ranks, split=False, packed=True, pieces=True)
    assert longest is not None
    return max(free_bound_s(free, samples, costs.topology, pieces=True), longest.chain_ns / 1e9)


def busiest_s(case: Case, samples: list[SampleLength]) -> float:
    """The floor with the work of the busiest rank of even layers in place of that of all ranks: the bars' measure."""
    free = replace(case.costs, overhead_ns=0, layer_overhead_ns=0)
    work = find_batch_floor(free, samples, free.topology.stage_ranks, split=False, packed=True, pieces=True)
    assert work is not None
    return max(float(work.work_ns.max()) / case.dp / 1e9, floor_s(case, samples))


def measured(case: Case, shared: Path) -> dict[str, Any]:
    samples, costs = lengths(case, shared), case.costs
    least_s = floor_s(case, samples)
    whole, whole_cpu_s = planned(costs, samples, "off")
    cut, cut_cpu_s = planned(costs, samples, "auto")
    spread_s = spread_over_replicas_s(case, samples)
    assert cut is not None
    row: dict[str, Any] = {
        "model": case.model, "tp": case.tp, "pp": case.pp, "dp": case.dp, "data": case.data,
        "tokens": sum(s.encoder for s in samples), "longest": max(s.encoder for s in samples), "floor_s": least_s,
        "makespan_s": cut.makespan_s, "bound_s": cut.lower_bound_s,
        "over_floor": cut.makespan_s / least_s,
        "over_busiest": cut.makespan_s / busiest_s(case, samples),
        "over_whole": None if whole is None else cut.makespan_s / whole.makespan_s,
        "whole_over_floor": None if whole is None else whole.makespan_s / least_s,
        "dynamic_cp_over_floor": None if spread_s is None else spread_s / least_s,
        "in_pieces": any(m.attention == "carried" for m in cut.batch.micro_batches),
        "recomputed": Counter(m.recompute for m in cut.batch.micro_batches),
        "peak_gb": cut.peak_bytes / 1e9, "cpu_s": cut_cpu_s, "whole_cpu_s": whole_cpu_s,
        "cpu_over_whole": None if whole is None else cut_cpu_s / whole_cpu_s,
    }  # fmt: skip
    return row | {"missed": missed(row)}


def emulated(case: Case, samples: list[SampleLength]) -> dict[str, Any]:
    """Predicted and measured makespan of a step on real ranks that sleep."""
    from emulation import Case as Emulated
    from emulation import run_emulated

    few = ActivationFormat(1)
    topology = Topology(pp=case.pp, dp=case.dp)  # tensor parallel ranks would sleep alike
    planner = Planner(topology, case.costs, LIMIT_BYTES, layout="packed", pieces="auto", format=few)
    batch = tuple(s.encoder for s in samples)
    with RedisServer() as server:
        steps = run_emulated(Emulated(planner=planner, batches=(batch,) * 3, scale=SLOWER), server.address)
    predicted_s, measured_s = steps[0].predicted_s, statistics.median(step.measured_s for step in steps)
    faults = ["emulated"] if abs(measured_s / predicted_s - 1) > MOST_OFF_PREDICTED else []
    return {"predicted_s": predicted_s, "measured_s": measured_s, "missed": faults}


def missed(row: Mapping[str, Any]) -> list[str]:
    """The bars that a row misses; those of long tails are for the data named so."""
    faults = []
    over_whole = row["over_whole"]
    if over_whole is not None and over_whole > (MOST_OVER_WHOLE if row["data"] == "tail" else 1.0):
        faults.append("over_whole")
    if row["data"] in ("tail", "one", "long") and row["over_busiest"] > MOST_OVER_FLOOR[row["dp"]]:
        faults.append("over_busiest")
    if (row["cpu_over_whole"] or 0) > MOST_CPU_OVER_WHOLE:
        faults.append("cpu_over_whole")
    return faults


def text(result: Mapping[str, Any]) -> str:
    lines = [
        f"Makespan over the floor ({result['machine']}, {result['date']}, commit {result['commit']})",
        f"{'model':12} {'dp':>2} {'data':7}"
        + "".join(f"{name:>9}" for name in ("pieces", "whole", "dyn. CP", "÷ whole", "CPU s", "÷ whole")),
    ]
    for row in result["rows"]:
        shown = [row[key] for key in ("over_floor", "whole_over_floor", "dynamic_cp_over_floor", "over_whole")]
        shown += [row["cpu_s"], row["cpu_over_whole"]]
        figures = "".join(f"{'-' if value is None else format(value, '.3f'):>9}" for value in shown)
        line = f"{row['model']:12} {row['dp']:2} {row['data']:7}{figures}"
        lines.append(line + ("   missed: " + ", ".join(row["missed"]) if row["missed"] else ""))
    slept = result["emulated"]
    lines.append(f"emulated: {slept['measured_s']:.3f} s, predicted {slept['predicted_s']:.3f} s")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--machine", default="")
    parser.add_argument("--simulated-only", action="store_true", help="keep the emulated step of the former result")
    args = parser.parse_args()
    rows = []
    for case in cases(args.shared):
        rows.append(measured(case, args.shared))
        print(case, rows[-1]["over_floor"], rows[-1]["over_whole"], file=sys.stderr, flush=True)
    tail = next(cases(args.shared))
    former = json.loads(RESULT.read_text())["emulated"] if args.simulated_only else None
    slept = former or emulated(tail, lengths(tail, args.shared))
    result = {"format": FORMAT, **provenance(args.machine), "rows": rows, "emulated": slept}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(text(result))
    return 1 if any(row["missed"] for row in (*rows, slept)) else 0


if __name__ == "__main__":
    sys.exit(main())
