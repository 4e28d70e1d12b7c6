"""Megatron-LM's pretrain_gpt.py by planned schedules in many combinations, beside its own schedule: losses, times.

    python tests/bench/megatron.py [--only NAME ...] [--output results/megatron.json]

Needs Megatron-LM (`../shared`, or DYNAPIPE_MEGATRON_LM=DIR). Weights depend on their names, so that one stock run of
two ranks is the measure of all. Seconds are the mean of the steps after the first two, on whatever cores there are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from contenders import provenance

RESULTS = Path(__file__).parent / "results"
PP2, TP2 = ["--pipeline-model-parallel-size", "2"], ["--tensor-model-parallel-size", "2"]
PP4 = ["--pipeline-model-parallel-size", "4"]
HALF_VOCAB = ["--make-vocab-size-divisible-by", "64"]  # times TP 2
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
SPLIT = ["--dynapipe-split-backward", "--dynapipe-memory-limit-gb", "1"]
PACKED = ["--dynapipe-layout", "packed"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
_SHAPE = "--seq-length 96 --max-position-embeddings 96 --vocab-size 257 --train-iters 20 --split 80,10,10"
SHAPE = _SHAPE.split()

# name: ranks, arguments, whether data are uneven
PLANNED: dict[str, tuple[int, list[str], bool]] = {
    "pp2": (2, PP2, False),
    "pp4": (4, PP4, False),
    "tp2 pp2": (4, [*PP2, *TP2, *HALF_VOCAB], False),
    "pp2 dp2 overlap": (4, [*PP2, *OVERLAP], False),
    "pp2 dp2 overlap split": (4, [*PP2, *OVERLAP, *SPLIT], False),
    "virtual stages": (4, [*PP2, *OVERLAP, "--num-layers-per-virtual-pipeline-stage", "1"], False),
    "recompute": (2, [*PP2, *RECOMPUTE], False),
    "uneven pp1": (1, [], True),
    "uneven pp2": (2, PP2, True),
    "uneven pp2 packed": (2, [*PP2, *PACKED], True),
    "uneven tp2 pp2": (4, [*PP2, *TP2, *HALF_VOCAB], True),
    "uneven tp2 pp2 packed split": (4, [*PP2, *TP2, *HALF_VOCAB, *PACKED, *SPLIT], True),
    "uneven pp2 dp2 overlap": (4, [*PP2, *OVERLAP], True),
    "uneven pp4 packed split": (4, [*PP4, *PACKED, *SPLIT], True),
    "uneven virtual stages": (4, [*PP2, *OVERLAP, "--num-layers-per-virtual-pipeline-stage", "1"], True),
    "uneven recompute packed": (2, [*PP2, *RECOMPUTE, *PACKED], True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(PLANNED))
    parser.add_argument("--output", type=Path, default=RESULTS / "megatron.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from dynapipe_ext.data.dataset import prepare
    from dynapipe_ext.data.generation import generate_examples
    from tests.support.megatron_lm_runs import ARGUMENTS, Run, megatron_lm_runs

    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), str(Path(name) / "data")
        prepare(
            lambda: generate_examples(num_samples=240, seed=0), data, tokenizer="bytes", max_seq_len=96, truncate=True
        )
        common = [*ARGUMENTS, *SHAPE]
        runs = [
            Run("stock", 2, [*common, *PP2, "--mock-data"], planned=False),
            Run("uneven stock", 2, [*common, *PP2, "--padded-data", data], planned=False, script="pretrain_padded.py"),
        ]
        for case in args.only:
            num_ranks, arguments, is_uneven = PLANNED[case]
            source = ["--dynapipe-data", data] if is_uneven else ["--mock-data"]
            runs.append(Run(case, num_ranks, [*common, *arguments, *source]))
        ran = megatron_lm_runs(runs, folder, timeout_s=3600)
    found: dict[str, Any] = {}
    for case, one in ran.items():
        stock = ran["uneven stock" if case.startswith("uneven") else "stock"]
        if one.status:
            found[case] = {"failed": one.log[-2000:]}
            continue
        times_ms = one.column("elapsed time per iteration (ms)")[2:]
        found[case] = {
            "last_loss": one.losses[-1],
            "largest_relative_error": max(abs(a - b) / b for a, b in zip(one.losses, stock.losses, strict=True)),
            "largest_norm_error": max(
                abs(a - b) / b for a, b in zip(one.column("grad norm"), stock.column("grad norm"), strict=True)
            ),
            "step_s": round(sum(times_ms) / len(times_ms) / 1e3, 4),
        }
    args.output.write_text(json.dumps({**provenance(args.machine), "cases": found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
