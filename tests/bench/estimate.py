"""How well `dynapipe estimate` knows memory and time, and how long it takes.

    python tests/bench/estimate.py [--shapes 100] [--output results/estimate.json]

Memory: models and micro-batches drawn at random, none of which was looked at when the count was made; real
megatron-core ranks on this CPU, states to the byte, stored activations by saved-tensor hooks, the peak of forward and
backward by the profiler's memory events. Time: predicted seconds of a step beside those that Korthikanti et al. 2022
(table 5) measured on A100s, whose pipelines interleave, as the estimate's may. Rates: MFU of the best option that
`dynapipe train` runs, beside what published runs reached (their tensor and pipeline parallel ranks, where published).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from contenders import provenance

from dynapipe_ext.costs.cluster import DEVICES, Cluster
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.tools.estimate.lengths import distribution_data
from dynapipe_ext.tools.estimate.options import Limits, Question, RecomputeChoice
from dynapipe_ext.tools.estimate.ranking import Search, estimate

RESULTS = Path(__file__).parent / "results"
_FIRST_SEED = 3000
# Layers, hidden size, heads, devices, tp, pp, rows of a batch; seconds with selective and with full recomputation.
_PUBLISHED = {
    "22B": ((48, 6144, 64, 8, 8, 1, 4), 1.10, 1.42),
    "175B": ((96, 12_288, 96, 64, 8, 8, 64), 13.75, 18.13),
    "530B": ((105, 20_480, 128, 280, 8, 35, 280), 37.83, 49.05),
    "1T": ((128, 25_600, 160, 512, 8, 64, 512), 71.49, 94.42),
}
# Model, device, devices, tp, pp (none: any), tokens of a batch, length; MFU. Dubey et al. 2024 (table 4); Touvron et
# al. 2023 (table 2: 2T tokens in 1,720,320 hours of A100s).
_RUNS = {
    "Llama 3.1 405B on 16,384": (("llama-3.1-405b", "h100", 16_384, (8,), (16,), 1 << 24, 8192), 0.41),
    "Llama 3.1 405B on 8,192": (("llama-3.1-405b", "h100", 8_192, (8,), (16,), 1 << 24, 8192), 0.43),
    "Llama 2 70B on 2,000": (("llama-2-70b", "a100", 2_000, (), (), 1 << 22, 4096), 0.445),
}
_KINDS: tuple[RecomputeChoice, ...] = ("selective", "full")


def memory(num_shapes: int) -> dict[str, Any]:
    """Errors of the predictions, relative to what was measured."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.path.remove(str(Path(__file__).parent))  # in which megatron.py lies
    from tests.support.estimated_memory import PARTS, measure, random_case

    cases = [random_case(seed) for seed in range(_FIRST_SEED, _FIRST_SEED + num_shapes)]
    measured = measure(cases)
    errors: dict[str, list[float]] = {"stored": [], "peak": []}
    exact, worst = 0, ("", 0.0)
    for case in cases:
        (real,), (predicted,) = measured[str(case)], case.predicted()
        exact += all(real[part] == predicted[part] for part in PARTS)
        for part, found in errors.items():
            found.append(predicted[part] / real[part] - 1)
            if abs(found[-1]) > abs(worst[1]):
                worst = f"{part} of {case}", found[-1]
    return {
        "shapes": num_shapes,
        "states_exact": exact,
        **{
            part: {
                "mean_absolute": float(np.mean(np.abs(found))),
                "largest": float(np.max(np.abs(found))),
                "within_10_percent": int((np.abs(found) <= 0.1).sum()),
            }
            for part, found in errors.items()
        },
        "worst": {"what": worst[0], "error": worst[1]},
    }


def published() -> list[dict[str, Any]]:
    """Predicted against measured step times."""
    rows = []
    for name, ((layers, hidden, heads, devices, tp, pp, batch), *seconds) in _PUBLISHED.items():
        a = read_config(
            {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048}
            | {"vocab_size": 51_200}
        )
        for kind, measured_s in zip(_KINDS, seconds, strict=True):
            question = Question(
                architecture=a,
                name=name,
                cluster=Cluster.from_device(DEVICES["a100"], nodes=devices // 8, gpus_per_node=8),
                data=distribution_data("uniform:2048", a, 0),
                limits=Limits(tp=(tp,), pp=(pp,), recomputes=(kind,), offloads=("none",)),
            )
            tokens = batch * 2048
            (best, *_) = estimate(question, Search(tokens_per_batch=(tokens, tokens), effort=200)).options
            rows.append(
                {
                    "model": name,
                    "recompute": kind,
                    "measured_s": measured_s,
                    "predicted_s": round(best.time.total_s, 2),
                    "error": round(best.time.total_s / measured_s - 1, 3),
                    "bubble_ratio": round(best.bubble_ratio, 3),
                }
            )
    return rows


def runs() -> list[dict[str, Any]]:
    """Predicted beside published MFU."""
    rows = []
    for name, ((model, device, devices, tp, pp, tokens, length), mfu) in _RUNS.items():
        a, start_s = preset(model), time.process_time()
        question = Question(
            architecture=a,
            name=model,
            cluster=Cluster.from_device(DEVICES[device], nodes=devices // 8, gpus_per_node=8),
            data=distribution_data(f"uniform:{length}", a, 0),
            limits=Limits(tp=tp, pp=pp),
        )
        best = estimate(question, Search(tokens_per_batch=(tokens, tokens), most_samples=1 << 12)).options[0]
        rows.append(
            {
                "run": name,
                "mfu": mfu,
                "predicted_mfu": round(best.mfu, 3),
                "error": round(best.mfu / mfu - 1, 3),
                "option": best.candidate.name,
                "bubble_ratio": round(best.bubble_ratio, 3),
                "cpu_s": round(time.process_time() - start_s, 2),
            }
        )
    return rows


def question_of_70b() -> dict[str, Any]:
    """CPU seconds of an answer, and its first option."""
    a = preset("llama-2-70b")
    question = Question(
        architecture=a,
        name="llama-2-70b",
        cluster=Cluster.from_device(DEVICES["a100"], nodes=6, gpus_per_node=4),
        data=distribution_data("", a, 0),
    )
    start_s = time.process_time()
    answer = estimate(question, Search(tokens_per_batch=(1, 4 << 20)))
    return {"cpu_s": round(time.process_time() - start_s, 2), "first": answer.options[0].candidate.name}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=100)
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, default=RESULTS / "estimate.json")
    args = parser.parse_args()
    result = {
        "format": "dynapipe-estimate-bench/1",
        **provenance(args.machine),
        "command": f"python tests/bench/estimate.py --shapes {args.shapes}",
        "question_of_70b": question_of_70b(),
        "published_step_times": published(),
        "published_runs": runs(),
        "memory": memory(args.shapes),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
