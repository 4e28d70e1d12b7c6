"""Real training loops, their own step, by their own schedule and by ours: 20 steps each on this machine's CPU.

    python tests/bench/loops.py LOOP --python PYTHON [--machine TEXT]

PYTHON is the interpreter of an environment in which the loop and this package are importable; wheels without their
dependencies (`pip install --no-deps`) beside this project's own environment are enough. What stands in for a GPU, and
for packages that need one, lies outside of the loop's step; each file of real_loops/ says what.

"stock" is the loop as it is; "installed" its own micro-batches by our schedules, whose figures must be its bits;
"planned" the loop within its adapter (executor/loops). torchtitan's stock is its model in one process.
Differences are of losses over all steps, against stock. Seconds are means of the steps after the first two, CPU seconds
those of all ranks: ranks share the cores, so neither shows a bubble. Makespans are simulated, PP2: the micro-batches
that ran, each token standing for 16, of Llama 2 7B under 1F1B in order of entry. Writes results/loops.json, in which
other loops keep their figures; exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from contenders import provenance

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.evaluation.simulate import simulate
from dynapipe_ext.schedules.published.full_backward import interleaved_1f1b

ROOT = Path(__file__).resolve().parents[2]
RESULT = Path(__file__).parent / "results" / "loops.json"
FORMAT = "dynapipe-loops/1"
SCALE, LIMIT_S = 16, 900.0


@dataclass(frozen=True, slots=True)
class Loop:
    """How a loop is run: on `ranks`, its stock on `stock_ranks` where given; `packages` have versions that count."""

    module: str
    ranks: int
    packages: tuple[str, ...]
    kinds: tuple[str, ...] = ("stock", "installed", "planned")
    stock_ranks: int = 0
    choices: tuple[str, ...] = ()
    most_off: float = 1e-5


_MEGATRON = ("megatron-core", "torch", "transformers")
_BRIDGE = ("megatron-bridge", *_MEGATRON)
LOOPS = {
    "verl": Loop("verl_ranks", 2, ("verl", "mbridge", *_MEGATRON)),
    "megatron-bridge": Loop("bridge_ranks", 4, _BRIDGE, choices=("llama",)),
    "megatron-bridge-experts": Loop("bridge_ranks", 4, _BRIDGE, choices=("qwen3-moe",)),
    **{
        name: Loop("slime_ranks", ranks, ("megatron-core", "torch"), choices=(loss,))  # from its sources, on PYTHONPATH
        for name, ranks, loss in (("slime", 2, "sft"), ("slime-grpo", 4, "grpo"), ("slime-gspo", 4, "gspo"))
    },
    "ms-swift": Loop("swift_ranks", 2, ("ms-swift", "mcore-bridge", *_MEGATRON)),
    "ms-swift-replicas": Loop("swift_ranks", 4, ("ms-swift", "mcore-bridge", *_MEGATRON)),
    "torchtitan": Loop(
        "titan_ranks", 2, ("torchtitan", "torch"), kinds=("stock", "planned"), stock_ranks=1, most_off=1e-6
    ),
}
Steps = list[list[dict[str, Any]]]  # by rank


def ran(loop: Loop, kind: str, python: Path, folder: Path) -> Steps:
    """The steps of every rank."""
    count = {"data": 1, "stock": loop.stock_ranks or loop.ranks}.get(kind, loop.ranks)
    port = str(random.randint(20_000, 40_000))
    shared = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "WORLD_SIZE": str(count)}
    shared |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [str(python), "-m", "tests.bench.real_loops.run_rank", loop.module, str(folder), kind, *loop.choices]
    with (folder / f"{kind}.log").open("w") as log:
        ranks = [
            subprocess.Popen(
                command, cwd=ROOT, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log, stderr=log,
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            codes = [rank.wait(LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(codes):
        sys.exit(f"{kind} ended with {codes}:\n" + (folder / f"{kind}.log").read_text()[-4000:])
    if kind == "data":
        return []
    return [json.loads((folder / f"{kind}.{rank}.json").read_text())["steps"] for rank in range(count)]


def losses(steps: Steps) -> list[list[float]]:
    """Of each step, by the ranks of the last stage."""
    return [[loss for rank in ranks for loss in rank["loss"]] for ranks in zip(*steps, strict=True)]


def makespan_s(steps: Steps) -> float:
    """The mean of the simulated updates of the first replica."""
    topology = Topology(pp=2)
    costs = AnalyticCosts(preset("llama-2-7b"), topology, flops_per_s=350e12, overhead_ns=100_000)
    found = []
    for step in steps[0]:
        for groups in step["micro_batches"]:
            micro_batches = tuple(_micro_batches(groups))
            schedule = interleaved_1f1b(2, len(micro_batches), 1)
            found.append(simulate(schedule, costs.evaluate(micro_batches)).makespan_s)
    return mean(found)


def _micro_batches(groups: list[list[int]]) -> Iterator[MicroBatch]:
    first = 0
    for lengths in groups:
        samples = tuple(SampleLength(first + i, SCALE * n, 0, SCALE * n) for i, n in enumerate(lengths))
        first += len(lengths)
        yield MicroBatch(samples, layout="packed", pad_multiple=1, recompute="none")


def figures(steps: Steps, stock: Steps) -> dict[str, Any]:
    pairs = [
        abs(own - theirs)
        for step, stock_step in zip(losses(steps), losses(stock), strict=True)
        for own, theirs in zip(step, stock_step, strict=True)
    ]
    late = [step for rank in steps for step in rank[2:]]
    positions = sum(n for step in steps[0] for groups in step["micro_batches"] for group in groups for n in group)
    found = {
        "losses_off": max(pairs),
        "step_s": round(mean(step["seconds"] for step in late), 3),
        "cpu_s_a_step": round(mean(step["cpu_seconds"] for step in late) * len(steps), 3),
        "micro_batches_a_step": round(mean(sum(map(len, step["micro_batches"])) for step in steps[0]), 2),
        "padding_ratio": round(sum(step["padding"] for step in steps[0]) / positions, 4),
        "simulated_s": round(makespan_s(steps), 4),
    }
    ratios = [step["first_ratio"] for rank in steps for step in rank if "first_ratio" in step]
    return found | ({"first_ratio_off_1": max(ratios)} if ratios else {})


def versions(loop: Loop, python: Path) -> dict[str, str]:
    script = f"import importlib.metadata as m; print({{p: m.version(p) for p in {loop.packages!r}}})".replace("'", '"')
    done = subprocess.run([str(python), "-c", f"import json; {script}"], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.strip().replace("'", '"'))
    return found


def missed(loop: Loop, kinds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = [f"{kind}: losses off by {one['losses_off']:.1e}" for kind, one in kinds.items()
             if one["losses_off"] > (0 if kind == "installed" else loop.most_off)]  # fmt: skip
    if kinds["planned"].get("first_ratio_off_1", 0) != 0:
        found.append(f"the first ratio is off 1 by {kinds['planned']['first_ratio_off_1']:.1e}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), metavar="PYTHON")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    loop = LOOPS[args.loop]
    with tempfile.TemporaryDirectory() as scratch:
        ran(loop, "data", args.python, Path(scratch))
        runs = {kind: ran(loop, kind, args.python, Path(scratch)) for kind in loop.kinds}
    kinds = {kind: figures(steps, runs["stock"]) for kind, steps in runs.items()}
    for kind, one in kinds.items():
        print(args.loop, kind, one, flush=True)
    stock, planned = kinds["stock"], kinds["planned"]
    print(
        f"{args.loop}: gained {1 - planned['simulated_s'] / stock['simulated_s']:.1%} of the simulated step, padding"
        f" {stock['padding_ratio']:.1%} → {planned['padding_ratio']:.1%}"
    )
    entry = {**provenance(args.machine), "versions": versions(loop, args.python), "kinds": kinds}
    before = json.loads(RESULT.read_text())["loops"] if RESULT.exists() else {}
    RESULT.write_text(json.dumps({"format": FORMAT, "loops": before | {args.loop: entry}}, indent=1) + "\n")
    if told := missed(loop, kinds):
        sys.exit("missed: " + "; ".join(told))


if __name__ == "__main__":
    main()
