"""How far the losses of `dynapipe train --model DIR` part from a plain loop, of any causal family of transformers.

    python tests/bench/causal_losses.py [--families olmo2 …] [--most N] [--again]

Of each family that `causal_families.py` has found to pack or to pad, a tiny model with drawn weights is written as a
folder with a tokenizer, as people have them. The command line trains it by transformers in two stages on two ranks, and
so does the loop of tests/integration/test_fine_tuning.py, one sample at a time, from the same folder on the same
samples. A figure is the largest relative difference of a step's loss; "loop" is that of the loop itself under
transformers' other kernel of attention: so far steps drift apart by themselves (None: the family has one kernel).

Without --families those are measured that have no result yet (--again: all), at most --most of them: so the whole is
done in batches. Each result is written at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from causal_families import RESULTS, SIZES
from contenders import provenance
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.executor.stages.transformers.quiet import quietly
from dynapipe_ext.executor.stages.transformers.twin import built_twin, twin_config
from dynapipe_ext.models.module_tree import causal_class
from tests.integration.test_fine_tuning import (
    BATCH,
    DECAY,
    LEAST,
    LR,
    SAMPLES,
    STEPS,
    global_batches,
    plain_losses,
    sample_of,
)
from tests.integration.test_train_command import report_of
from tests.support.model_folders import VOCABULARY, write_model_tokenizer, write_pairs
from tests.support.preloaded import TRANSFORMERS, Preloaded

BAR = 1e-5
NAMED = (
    "granite", "smollm3", "olmo", "olmo2", "olmo3", "olmoe", "glm4", "glm4_moe", "cohere", "cohere2", "stablelm",
    "starcoder2", "exaone4", "ernie4_5", "nemotron", "helium", "seed_oss", "hunyuan_v1_dense", "ministral",
    "llama4_text", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3",
)  # fmt: skip
_OF_GROUPS = {
    "num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 2, "layer_group_size": 2, "kv_lora_rank": 16,
    "qk_head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
_OF_STATES = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_POSITIONS, _SPECIAL = 128, {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}


def tiny_config(family: str) -> Any:
    """With small sizes where the family takes them, else the default one cut to a small model of all its layers."""
    default = CONFIG_MAPPING[family]()
    wanted = SIZES | _SPECIAL | {"vocab_size": VOCABULARY, "max_position_embeddings": _POSITIONS}
    if "num_expert_group" in default.to_dict():  # Kimi Linear, Bailing: their own kinds of layers, and few experts
        wanted = {name: size for name, size in wanted.items() if name != "layer_types"} | _OF_GROUPS
    if "mamba_d_ssm" in default.to_dict():  # Falcon H1, whose other sizes follow from these
        wanted |= _OF_STATES
    sizes = {name: size for name, size in wanted.items() if name in default.to_dict()}
    try:
        config = CONFIG_MAPPING[family](**sizes)
        config = twin_config(causal_class(config), config)
    except Exception:  # noqa: BLE001 (sizes that a family checks in its own way)
        config = twin_config(causal_class(default), default)
    text = config.get_text_config()
    for name in vars(text):
        if name.startswith("vocab_size"):
            setattr(text, name, VOCABULARY)
    if getattr(text, "max_position_embeddings", None):
        text.max_position_embeddings = max(_POSITIONS, text.max_position_embeddings)
    return config


def write_folder(family: str, folder: Path) -> None:
    with quietly():
        config = tiny_config(family)
        model = built_twin(causal_class(config), config)
        model.save_pretrained(folder / "model")
    write_model_tokenizer(folder / "model", starts=False)
    write_pairs(folder / "data.jsonl", SAMPLES)


def train(folder: Path, preloaded: Preloaded) -> Path:
    """The run's folder. Errors: AssertionError with what the command said."""
    given = ["--model", "model", "--data", "data.jsonl", "--backend", "transformers", "--run-dir", "run", "--strict"]
    given += ["--pp", "2", "--memory-limit-gb", "2", "--num-workers", "0", "--steps", str(STEPS), "--lr", str(LR)]
    given += ["--batch-size", str(BATCH), "--min-lr", str(LEAST), "--weight-decay", str(DECAY)]
    given += ["--lr-schedule", "cosine", "--warmup", "0.3", "--betas", "0.9,0.95"]
    preloaded.train(*given, cwd=folder, timeout=3000)
    return folder / "run"


def loop_losses(folder: Path, run: Path, attention: str | None) -> list[float]:
    data = TokenDataset.open(run / "data")
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    options = {"attn_implementation": attention} if attention else {}
    with quietly():
        model = causal_class(config).from_pretrained(folder / "model", **options).train()
    samples = [sample_of(data[i]) for i in range(len(data))]
    return plain_losses(model, samples, global_batches(len(samples)), "cosine")


def measured(family: str, preloaded: Preloaded) -> dict[str, Any]:
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        folder = Path(scratch)
        try:
            write_folder(family, folder)
            run = train(folder, preloaded)
        except AssertionError as error:
            said = " ".join(str(error).split())
            return {"refused": said.partition("error: ")[2][:400] or said[-400:]}
        except Exception as error:  # noqa: BLE001 (of a family's own code; it is the result)
            return {"refused": f"no tiny model is made: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        losses = report_of(run)["losses"]
        try:
            wanted, other = loop_losses(folder, run, "eager"), loop_losses(folder, run, None)
        except (ValueError, RuntimeError):  # no such kernel, or one that fails at these sizes
            try:
                wanted, other = loop_losses(folder, run, None), None
            except Exception as error:  # noqa: BLE001 (of a family's own code; it is the result)
                return {
                    "refused": f"the plain loop fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                }

        def worst(ours: list[float]) -> float:
            return max(abs(a - b) / b for a, b in zip(ours, wanted, strict=True))

        return {
            "losses": worst(losses),
            "loop": None if other is None else worst(other),
            "first": wanted[0],
            "last": wanted[-1],
            "s": round(time.monotonic() - start_s, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+")
    parser.add_argument("--most", type=int, default=1000, help="families to measure in this batch")
    parser.add_argument("--again", action="store_true", help="measure those that have a result, too")
    parser.add_argument("--output", type=Path, default=RESULTS / "causal_losses.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    cut = json.loads((RESULTS / "causal_families.json").read_text())["families"]
    results: dict[str, Any] = json.loads(args.output.read_text())["families"] if args.output.exists() else {}
    runs = [family for family in (*NAMED, *cut) if "rows" in cut.get(family, {})]
    wanted = args.families or [one for one in dict.fromkeys(runs) if args.again or one not in results]
    with Preloaded() as preloaded:
        preloaded.load(*TRANSFORMERS)
        for family in wanted[: args.most]:
            results[family] = measured(family, preloaded) | {"rows": cut.get(family, {}).get("rows", "")}
            print(family, results[family], flush=True)
            result = {**provenance(args.machine), "transformers": transformers.__version__, "steps": STEPS}
            args.output.write_text(json.dumps(result | {"families": dict(sorted(results.items()))}, indent=1) + "\n")
    figures = [one["losses"] for one in results.values() if "losses" in one]
    within = sum(figure <= BAR for figure in figures)
    print(f"{within} of {len(figures)} within {BAR:g}, {len(results) - len(figures)} refused, {len(runs)} to measure")


if __name__ == "__main__":
    main()
