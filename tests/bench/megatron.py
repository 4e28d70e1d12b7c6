"""Megatron-LM's pretraining scripts by planned schedules in many combinations, beside its own, 20 steps each.

    python tests/bench/megatron.py [--only NAME ...] [--output results/megatron.json]

Needs Megatron-LM (`../shared`, or DYNAPIPE_MEGATRON_LM=DIR). Weights depend on their names, so that one stock run of
few ranks is the measure of all of its kind. Losses, gradient norms and final weights are compared unrounded. A run
named "by 1f1b" has the micro-batches of the one before it under Megatron's own schedule, and is compared with it.
Seconds are means of the steps after the first two, on whatever cores there are; CPU seconds are those of all ranks.
results/megatron_1f1b.json has the runs beside 1F1B, those in a V and those in fp16; results/megatron_stages.json those
of uneven stages, of layers recomputed in part, of experts in virtual stages, in bf16 and with tokens ahead;
results/megatron.json the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from contenders import provenance

RESULTS = Path(__file__).parent / "results"
PP2, TP2 = ["--pipeline-model-parallel-size", "2"], ["--tensor-model-parallel-size", "2"]
PP4 = ["--pipeline-model-parallel-size", "4"]
TP2_PP2 = [*PP2, *TP2, "--make-vocab-size-divisible-by", "64"]  # times TP 2
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
VIRTUAL = [*OVERLAP, "--num-layers-per-virtual-pipeline-stage", "1"]
UNTIED = ["--untie-embeddings-and-output-weights"]
IN_V = [*UNTIED, "--pipeline-model-parallel-layout", "Et|t|t|tL", "--dynapipe-placement", "v"]
SPLIT = ["--dynapipe-split-backward", "--dynapipe-memory-limit-gb", "1"]
PACKED = ["--dynapipe-layout", "packed"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
BLOCK = ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"]
SELECTIVE = ["--recompute-granularity", "selective"]
FIRST_SMALL = ["--decoder-first-pipeline-num-layers", "1"]
FIVE_LAYERS = ["--num-layers", "5"]
ENDS = ["--pipeline-model-parallel-layout", "E|tt|tt|L"]  # stages without layers
_SHAPE = "--seq-length 96 --max-position-embeddings 96 --vocab-size 257 --train-iters 20 --split 80,10,10"
SHAPE = _SHAPE.split()

EXPERTS = [
    "--num-experts",
    "4",
    "--moe-router-topk",
    "2",
    "--moe-token-dispatcher-type",
    "alltoall",
    "--disable-bias-linear",
    "--pipeline-model-parallel-size",
    "2",
]
BALANCED = [*EXPERTS, "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01"]
UNBALANCED = [*EXPERTS, "--moe-router-load-balancing-type", "none"]  # an auxiliary loss depends on how batches are cut
TWO_AHEAD = [*UNTIED, "--mtp-num-layers", "1"]  # multi-token prediction
EP2 = ["--expert-model-parallel-size", "2"]
FP16 = ["--fp16", "--initial-loss-scale", "65536", "--hysteresis", "1", *PP2]  # some first steps are skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Runs that are compared with one stock run: all with `arguments`, those of `cases` (ranks, arguments) besides.
    Those `beside_1f1b` run a second time, their micro-batches by Megatron's own 1F1B with variable_seq_lengths.

    `data`: of uneven length; Megatron's own random samples, of one; or documents for pretrain_t5.py.
    """

    data: Literal["uneven", "mock", "t5"]
    stock: tuple[int, list[str]]
    arguments: list[str] = field(default_factory=list)
    cases: dict[str, tuple[int, list[str]]]
    beside_1f1b: tuple[str, ...] = ()


KINDS = {
    "mock": Kind(
        data="mock",
        stock=(2, PP2),
        cases={
            "pp2": (2, PP2),
            "pp4": (4, PP4),
            "tp2 pp2": (4, TP2_PP2),
            "tp2 pp2 split": (4, [*TP2_PP2, *SPLIT]),
            "pp2 dp2": (4, PP2),
            "pp2 dp2 split": (4, [*PP2, *SPLIT]),
            "pp2 dp2 overlap split": (4, [*PP2, *OVERLAP, *SPLIT]),
            "pp2 dp2 virtual stages": (4, [*PP2, *VIRTUAL]),
            "pp2 recompute": (2, [*PP2, *RECOMPUTE]),
            "pp2 recompute block split": (2, [*PP2, *BLOCK, *SPLIT]),
            "tp2 pp2 recompute selective split": (4, [*TP2_PP2, *SELECTIVE, *SPLIT]),
            "pp2 uneven stages split": (2, [*PP2, *FIRST_SMALL, *SPLIT]),
            "pp4 stages without layers split": (4, [*PP4, *ENDS, *SPLIT]),
        },
    ),
    "five layers": Kind(
        data="mock",
        stock=(1, FIVE_LAYERS),
        cases={"pp2 embedding as a layer": (2, [*FIVE_LAYERS, *PP2, "--account-for-embedding-in-pipeline-split"])},
    ),
    "bf16": Kind(
        data="mock",
        stock=(4, [*PP2, "--bf16"]),
        cases={"pp2 dp2 overlap split": (4, [*PP2, "--bf16", *OVERLAP, *SPLIT])},
    ),
    "two tokens ahead": Kind(
        data="mock",
        stock=(4, [*PP2, *TWO_AHEAD]),
        cases={"pp2 dp2": (4, [*PP2, *TWO_AHEAD]), "pp2 dp2 split": (4, [*PP2, *TWO_AHEAD, *SPLIT])},
    ),
    "uneven": Kind(
        data="uneven",
        stock=(2, PP2),
        cases={
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
            "pp2 dp2 virtual stages": (4, [*PP2, *VIRTUAL]),
            "pp4 packed split": (4, [*PP4, *PACKED, *SPLIT]),
            "pp2 recompute packed": (2, [*PP2, *RECOMPUTE, *PACKED]),
            "tp2 pp2 recompute selective packed": (4, [*TP2_PP2, *SELECTIVE, *PACKED]),
            "pp2 uneven stages": (2, [*PP2, *FIRST_SMALL]),
            "pp2 little memory": (2, [*PP2, "--dynapipe-memory-limit-gb", "0.004"]),
        },
        beside_1f1b=("pp2", "tp2 pp2", "pp2 dp2"),
    ),
    "mock untied": Kind(
        data="mock",
        stock=(2, [*PP2, *UNTIED]),
        cases={"pp2 v": (2, [*PP2, *IN_V]), "tp2 pp2 v split": (4, [*TP2_PP2, *IN_V, *SPLIT])},
    ),
    "uneven untied": Kind(
        data="uneven",
        stock=(2, [*PP2, *UNTIED]),
        cases={"pp2 dp2 v": (4, [*PP2, *IN_V, *OVERLAP]), "pp2 v packed split": (2, [*PP2, *IN_V, *PACKED, *SPLIT])},
    ),
    "experts": Kind(data="mock", stock=(2, []), arguments=BALANCED, cases={"pp2": (2, [])}),
    "experts ep2": Kind(
        data="mock",
        stock=(4, []),
        arguments=[*BALANCED, *EP2],
        cases={"pp2": (4, []), "pp2 split": (4, SPLIT), "pp2 virtual stages": (4, VIRTUAL)},
    ),
    "uneven experts": Kind(
        data="uneven", stock=(2, []), arguments=UNBALANCED, cases={"pp2": (2, []), "pp2 packed": (2, PACKED)}
    ),
    "uneven experts ep2": Kind(
        data="uneven",
        stock=(4, []),
        arguments=[*UNBALANCED, *EP2],
        cases={
            "pp2": (4, []),
            "pp2 packed": (4, PACKED),
            "pp2 split": (4, SPLIT),
            "pp2 virtual stages": (4, VIRTUAL),
        },
    ),
    "t5": Kind(
        data="t5",
        stock=(2, []),
        cases={"dp2": (2, []), "tp2": (2, TP2), "dp2 overlap": (2, OVERLAP)},
    ),
    "fp16": Kind(data="mock", stock=(2, FP16), cases={"pp2": (2, FP16)}),
}
NAMES = [f"{kind}: {case}" for kind, one in KINDS.items() for case in one.cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--output", type=Path, default=RESULTS / "megatron.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from dynapipe_ext.data.dataset import prepare
    from dynapipe_ext.data.examples import generate_examples
    from tests.support.megatron_lm_record import apart
    from tests.support.megatron_lm_runs import ARGUMENTS, Run, megatron_lm_runs
    from tests.support.megatron_lm_t5 import t5_arguments

    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), str(Path(name) / "data")
        prepare(
            lambda: generate_examples(num_samples=240, seed=0), data, tokenizer="bytes", max_seq_len=96, truncate=True
        )
        gpt, t5 = [*ARGUMENTS, *SHAPE], [*t5_arguments(folder / "t5"), "--train-iters", "20"]
        # Of each kind of data: the script of the stock run and its arguments, the script of the others and theirs.
        sources = {
            "mock": ("pretrain_gpt.py", [*gpt, "--mock-data"], "pretrain_gpt.py", [*gpt, "--mock-data"]),
            "uneven": (
                "pretrain_padded.py", [*gpt, "--padded-data", data], "pretrain_gpt.py", [*gpt, "--dynapipe-data", data]
            ),
            "t5": ("pretrain_t5.py", t5, "pretrain_t5.py", t5),
        }  # fmt: skip
        runs, stock_of = [], {}
        for kind, one in KINDS.items():
            wanted = {f"{kind}: {case}": ran for case, ran in one.cases.items() if f"{kind}: {case}" in args.only}
            if not wanted:
                continue
            stock_script, stock_arguments, script, arguments = sources[one.data]
            num_ranks, own = one.stock
            stock = Run(f"{kind}: stock", num_ranks, [*stock_arguments, *one.arguments, *own], False, stock_script)
            runs.append(stock)
            for case, (num_ranks, own) in wanted.items():
                runs.append(Run(case, num_ranks, [*arguments, *one.arguments, *own], True, script))
                stock_of[case] = stock.name
                if case.removeprefix(f"{kind}: ") in one.beside_1f1b:
                    runs.append(Run(f"{case} by 1f1b", num_ranks, runs[-1].arguments, True, script, by_1f1b=True))
                    stock_of[runs[-1].name] = case
        ran = megatron_lm_runs(runs, folder, timeout_s=3600)
    found: dict[str, Any] = {}
    for case, one_run in ran.items():
        if one_run.status:
            found[case] = {"failed": one_run.log[-2000:]}
        else:
            found[case] = figures(one_run.records)
            if case in stock_of and not ran[stock_of[case]].status:
                differences = apart(one_run.records, ran[stock_of[case]].records)
                found[case] |= {"largest_relative_differences": asdict(differences)}
        print(json.dumps({case: found[case]}), flush=True)
    args.output.write_text(json.dumps({**provenance(args.machine), "cases": found}, indent=1) + "\n")


def figures(records: Any) -> dict[str, Any]:
    steps = [record["steps"][2:] for record in records]
    num_steps = len(steps[0])
    return {
        "last_loss": next(iter(records[-1]["steps"][-1]["losses"].values())),
        "skipped_steps": sum(step["skipped"] for step in records[0]["steps"]),
        "step_s": round(sum(step["step_s"] for step in steps[0]) / num_steps, 4),
        "cpu_s": round(sum(step["cpu_s"] for rank in steps for step in rank) / num_steps, 4),
    }


if __name__ == "__main__":
    main()
