"""Megatron-LM's pretrain_gpt.py by planned schedules in many combinations, beside its own schedule, 20 steps each.

    python tests/bench/megatron.py [--only NAME ...] [--output results/megatron.json]

Needs Megatron-LM (`../shared`, or DYNAPIPE_MEGATRON_LM=DIR). Weights depend on their names, so that one stock run of
two ranks is the measure of all on the same data. Losses, gradient norms and final weights are compared unrounded.
Seconds are means of the steps after the first two, on whatever cores there are; CPU seconds are those of all ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contenders import provenance

RESULTS = Path(__file__).parent / "results"
PP2, TP2 = ["--pipeline-model-parallel-size", "2"], ["--tensor-model-parallel-size", "2"]
PP4 = ["--pipeline-model-parallel-size", "4"]
TP2_PP2 = [*PP2, *TP2, "--make-vocab-size-divisible-by", "64"]  # times TP 2
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
VIRTUAL = [*OVERLAP, "--num-layers-per-virtual-pipeline-stage", "1"]
SPLIT = ["--dynapipe-split-backward", "--dynapipe-memory-limit-gb", "1"]
PACKED = ["--dynapipe-layout", "packed"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
_SHAPE = "--seq-length 96 --max-position-embeddings 96 --vocab-size 257 --train-iters 20 --split 80,10,10"
SHAPE = _SHAPE.split()

# Whose data, name: ranks, arguments. Megatron's own data have one length.
PLANNED: dict[str, dict[str, tuple[int, list[str]]]] = {
    "mock": {
        "pp2": (2, PP2),
        "pp4": (4, PP4),
        "tp2 pp2": (4, TP2_PP2),
        "tp2 pp2 split": (4, [*TP2_PP2, *SPLIT]),
        "tp2 pp2 sequence parallel": (4, [*TP2_PP2, "--sequence-parallel"]),
        "pp2 dp2": (4, PP2),
        "pp2 dp2 split": (4, [*PP2, *SPLIT]),
        "pp2 dp2 overlap": (4, [*PP2, *OVERLAP]),
        "pp2 dp2 overlap split": (4, [*PP2, *OVERLAP, *SPLIT]),
        "pp2 dp2 virtual stages": (4, [*PP2, *VIRTUAL]),
        "pp2 recompute": (2, [*PP2, *RECOMPUTE]),
    },
    "uneven": {
        "pp1": (1, []),
        "pp2": (2, PP2),
        "tp2 pp2": (4, TP2_PP2),
        "tp2 pp2 split": (4, [*TP2_PP2, *SPLIT]),
        "tp2 pp2 packed": (4, [*TP2_PP2, *PACKED]),
        "tp2 pp2 packed split": (4, [*TP2_PP2, *PACKED, *SPLIT]),
        "tp2 pp2 packed sequence parallel": (4, [*TP2_PP2, *PACKED, "--sequence-parallel"]),
        "pp2 dp2": (4, PP2),
        "pp2 dp2 split": (4, [*PP2, *SPLIT]),
        "pp2 dp2 packed": (4, [*PP2, *PACKED]),
        "pp2 dp2 packed split": (4, [*PP2, *PACKED, *SPLIT]),
        "pp2 dp2 overlap": (4, [*PP2, *OVERLAP]),
        "pp2 dp2 overlap packed split": (4, [*PP2, *OVERLAP, *PACKED, *SPLIT]),
        "pp2 dp2 virtual stages": (4, [*PP2, *VIRTUAL]),
        "pp4 packed split": (4, [*PP4, *PACKED, *SPLIT]),
        "pp2 recompute packed": (2, [*PP2, *RECOMPUTE, *PACKED]),
    },
}
NAMES = [f"{data} {case}" for data, cases in PLANNED.items() for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--output", type=Path, default=RESULTS / "megatron.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from dynapipe_ext.data.dataset import prepare
    from dynapipe_ext.data.generation import generate_examples
    from tests.support.megatron_lm_record import apart
    from tests.support.megatron_lm_runs import ARGUMENTS, Run, megatron_lm_runs

    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), str(Path(name) / "data")
        prepare(
            lambda: generate_examples(num_samples=240, seed=0), data, tokenizer="bytes", max_seq_len=96, truncate=True
        )
        common = [*ARGUMENTS, *SHAPE]
        sources = {"mock": ["--mock-data"], "uneven": ["--dynapipe-data", data]}
        runs = [
            Run("mock stock", 2, [*common, *PP2, "--mock-data"], planned=False),
            Run("uneven stock", 2, [*common, *PP2, "--padded-data", data], planned=False, script="pretrain_padded.py"),
        ]
        for kind, cases in PLANNED.items():
            for case, (num_ranks, arguments) in cases.items():
                if f"{kind} {case}" in args.only:
                    runs.append(Run(f"{kind} {case}", num_ranks, [*common, *arguments, *sources[kind]]))
        ran = megatron_lm_runs(runs, folder, timeout_s=3600)
    found: dict[str, Any] = {}
    for case, one in ran.items():
        stock = ran[f"{case.split()[0]} stock"]
        found[case] = {"failed": one.log[-2000:]} if one.status else figures(one.records, apart(one.records, stock.records))
        print(json.dumps({case: found[case]}), flush=True)
    args.output.write_text(json.dumps({**provenance(args.machine), "cases": found}, indent=1) + "\n")


def figures(records: Any, found: Any) -> dict[str, Any]:
    steps = [record["steps"][2:] for record in records]
    num_steps = len(steps[0])
    return {
        "last_loss": next(iter(records[-1]["steps"][-1]["losses"].values())),
        "largest_relative_differences": asdict(found),
        "step_s": round(sum(step["step_s"] for step in steps[0]) / num_steps, 4),
        "cpu_s": round(sum(step["cpu_s"] for rank in steps for step in rank) / num_steps, 4),
    }


if __name__ == "__main__":
    main()
