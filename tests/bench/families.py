"""How far the losses of `dynapipe train` part from a plain transformers loop, of every family at every arrangement.

    python tests/bench/families.py [--variants llama t5 …] [--output results/families.json]

Each variant of a published family, tiny, is trained for 20 steps from the same folder on the same samples: by
megatron-core and, of the families that can be cut so, by transformers; and by the loop of
tests/integration/test_fine_tuning.py, one sample at a time. A figure is the largest relative difference of a step's
loss; "loop" is that of the loop itself under transformers' other kernel of attention, if it has one: so far steps drift
apart by themselves. Weights are halved: large ones drift further. What cannot be trained so says why. A variant's
result is kept until it is measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from contenders import provenance

from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.pairs import PairDataset
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of
from dynapipe_ext.models.architecture import ENCODER_DECODER_FAMILIES
from dynapipe_ext.settings.train_config import TrainConfig
from tests.integration.test_fine_tuning import (
    BATCH,
    DECAY,
    LEAST,
    LR,
    SAMPLES,
    STEPS,
    global_batches,
    pair_loss,
    pair_targets,
    plain_losses,
    sample_of,
)
from tests.integration.test_train_command import report_of
from tests.support.checkpoints import VARIANTS, saved, tiny_variant
from tests.support.model_folders import VOCABULARY, write_model_tokenizer, write_pairs
from tests.support.preloaded import TRANSFORMERS, Preloaded

RESULTS = Path(__file__).parent / "results"
BACKENDS = {
    "megatron": {"TP1": (1, 1, 1), "TP2": (2, 1, 1), "PP2": (1, 2, 1), "TP2 x PP2 x DP2": (2, 2, 2)},
    "transformers": {"TP1": (1, 1, 1), "PP2": (1, 2, 1), "PP2 x DP2": (1, 2, 2)},
}


def prepared(variant: str, folder: Path) -> Any:
    """The model of a variant; a folder has it then, with its tokenizer, data and settings."""
    lengths = {"n_positions": 128} if variant == "gpt2" else {"max_position_embeddings": 128}
    sizes = {} if VARIANTS[variant][0] in ENCODER_DECODER_FAMILIES else lengths
    model = tiny_variant(variant, vocab_size=VOCABULARY, **sizes)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    saved(model, folder / "model")
    write_model_tokenizer(folder / "model", starts=False)
    write_pairs(folder / "data.jsonl", SAMPLES)
    (folder / "settings.toml").write_text("[topology]\nsequence_parallel = true\n")
    return model


def runs(variant: str, folder: Path, preloaded: Preloaded) -> Iterator[tuple[str, str, Path | str]]:
    """(backend, arrangement, directory of the run or why there is none)."""
    family = VARIANTS[variant][0]
    is_pairs = family in ENCODER_DECODER_FAMILIES
    for backend, arrangements in BACKENDS.items():
        named = {"architecture": str(folder / "model"), "backend": backend}
        config = TrainConfig().with_values(model=named, topology={"tp": 1, "pp": 1, "dp": 1})
        costs = analytic_costs(config, architecture_of(config, VOCABULARY), flops_per_s=50e9, overhead_ns=1_000_000)
        (folder / f"{backend}.json").write_text(json.dumps(cost_model_to_json(costs)))
        for name, (tp, pp, dp) in arrangements.items():
            run = f"{backend}-{tp}-{pp}-{dp}"
            given = ["--model", "model", "--data", "data.jsonl", "--backend", backend, "--run-dir", run, "--strict"]
            given += ["--tp", str(tp), "--pp", str(pp), "--dp", str(dp), "--costs", f"{backend}.json"]
            given += ["--memory-limit-gb", "1", "--num-workers", "0", "--steps", str(STEPS), "--lr", str(LR)]
            given += ["--batch-size", str(BATCH), "--min-lr", str(LEAST), "--weight-decay", str(DECAY)]
            given += ["--lr-schedule", "cosine", "--warmup", "0.3", "--betas", "0.9,0.95"]
            given += ["--layout", "padded"] * (is_pairs and backend == "transformers")
            given += ["--config", "settings.toml"] * (tp > 1 and not is_pairs)
            try:
                preloaded.train(*given, cwd=folder, timeout=500)
                yield backend, name, folder / run
            except AssertionError as error:
                yield backend, name, " ".join(str(error).split()).partition("error: ")[2][:400] or str(error)[-400:]


def loop_losses(variant: str, folder: Path, run: Path, attention: str) -> list[float]:
    data = TokenDataset.open(run / "data")
    if VARIANTS[variant][0] in ENCODER_DECODER_FAMILIES:
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "model", attn_implementation=attention)
        pairs = PairDataset.of(data)
        samples: list[Any] = [pairs[i] for i in range(len(pairs))]
        batches = global_batches(len(samples))
        return plain_losses(model, samples, batches, "cosine", loss_of=pair_loss, targets_of=pair_targets)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation=attention)
    samples = [sample_of(data[i]) for i in range(len(data))]
    return plain_losses(model, samples, global_batches(len(samples)), "cosine")


def measured(variant: str, preloaded: Preloaded) -> dict[str, dict[str, float | str]]:
    found: dict[str, dict[str, float | str]] = {}
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        folder = Path(scratch)
        model = prepared(variant, folder)
        has_two_kernels = model._supports_sdpa and not getattr(model.config, "attn_logit_softcapping", None)
        wanted: list[float] = []

        def worst(losses: list[float]) -> float:
            return max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))

        for backend, name, run in runs(variant, folder, preloaded):
            figure: float | str = run if isinstance(run, str) else ""
            if isinstance(run, Path):
                if not wanted:
                    wanted = loop_losses(variant, folder, run, "eager")
                    if has_two_kernels:
                        found["loop"] = {"sdpa": worst(loop_losses(variant, folder, run, "sdpa"))}
                figure = worst(report_of(run)["losses"])
            found.setdefault(backend, {})[name] = figure
            print(variant, backend, name, figure, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=tuple(VARIANTS))
    parser.add_argument("--output", type=Path, default=RESULTS / "families.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {"variants": {}}
    with Preloaded() as preloaded:
        preloaded.load(*TRANSFORMERS)
        for variant in args.variants:
            figures = measured(variant, preloaded)
            result = {
                **provenance(args.machine),
                "steps": STEPS,
                "variants": {**result["variants"], variant: figures},
            }
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    by_backend = [one[backend] for one in result["variants"].values() for backend in BACKENDS if backend in one]
    all_figures = [figure for by_name in by_backend for figure in by_name.values()]
    numbers = [figure for figure in all_figures if isinstance(figure, float)]
    print(f"{len(numbers)} arrangements of {len(result['variants'])} variants, at most {max(numbers):.1e} apart")


if __name__ == "__main__":
    main()
