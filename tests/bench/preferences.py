"""Losses of `dynapipe train --preferences dpo` beside TRL's own DPOTrainer on the same pairs; CPU seconds a real token.

    pip install --no-deps --target site trl datasets dill multiprocess xxhash
    PYTHONPATH=site python tests/bench/preferences.py [--steps N] [--only TEXT] [--output results/preferences.json]

A tiny Llama, pairs of texts and of chats whose answers differ much in length, the same global batches for all. Losses:
the largest relative difference of a step's from TRL's, on one rank, PP 2, DP 2 and V, computed by megatron-core and by
transformers, and of adapters. Seconds: of a larger one, on one core each. TRL's are of its training steps alone, with
the reference's log probabilities computed before (`precompute_ref_log_probs`); ours are of steps, planning included,
after the pass for the reference. TRL pads a batch to its longest answer; its padding_free needs flash-attn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
import transformers
from contenders import provenance
from torch.utils.data import SequentialSampler

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.data.batches import permutation
from dynapipe_ext.executor.stages.transformers.adapters import add_adapters
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.settings.train_config import TrainConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.given_costs import write_costs
from tests.support.model_folders import (
    VOCABULARY,
    WORDS,
    model_folder,
    write_chat_preferences,
    write_lines,
    write_model_tokenizer,
    write_preferences,
)

RESULTS = Path(__file__).parent / "results"
BATCH, PAIRS, BETA, LR, LIMIT_S = 4, 80, 0.1, 2e-4, 600
TRANSFORMERS = ("--backend", "transformers")
# Form of the data, and flags.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "one rank, megatron-core": ("texts", ()),
    "PP 2, megatron-core": ("texts", ("--pp", "2")),
    "DP 2, megatron-core": ("texts", ("--dp", "2")),
    "V on PP 2, megatron-core": ("texts", ("--pp", "2", "--placement", "v")),
    "V on PP 2, transformers": ("texts", ("--pp", "2", "--placement", "v", *TRANSFORMERS)),
    "one rank, megatron-core, chats": ("chats", ()),
    "DP 2, padded, transformers, chats": ("chats", ("--dp", "2", "--layout", "padded", *TRANSFORMERS)),
    "LoRA, PP 2, chats": ("chats", ("--pp", "2", "--lora", "--lora-target-modules", "all-linear")),
}


def ours(folder: Path, run: str, flags: Sequence[str], *, steps: int, batch: int = BATCH) -> dict[str, Any]:
    """The report of a run."""
    command = [str(Path(sys.executable).with_name("dynapipe")), "train", "--model", "model", "--data", "data.jsonl"]
    command += ["--preferences", "dpo", "--beta", str(BETA), "--run-dir", run, "--steps", str(steps)]
    command += ["--batch-size", str(batch), "--lr", str(LR), "--lr-schedule", "constant", "--warmup", "0"]
    command += ["--weight-decay", "0", "--memory-limit-gb", "2", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    report: dict[str, Any] = json.loads((folder / run / "report.json").read_text())
    return report


def theirs(folder: Path, *, steps: int, adapters: Path | None = None, batch: int = BATCH) -> tuple[list[float], float]:
    """Losses of TRL's trainer on the same global batches, and its CPU seconds from the second step to the last."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []
    stamps: list[float] = []

    class InOrder(DPOTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            stamps.append(time.process_time())
            loss = super().compute_loss(*arguments, **named)
            losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
            return loss

    records = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    order, epoch = [], 0
    while len(order) < steps * batch:
        order += permutation(len(records), seed=0, epoch=epoch).tolist()
        epoch += 1
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    if adapters is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)
    settings = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=batch,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        beta=BETA,
        max_length=None,
        precompute_ref_log_probs=adapters is None,
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        max_grad_norm=1.0,
        disable_tqdm=True,
    )
    trainer = InOrder(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list([records[i] for i in order[: steps * batch]]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model", pad_token="</s>"),
    )
    trainer.train()
    return losses[-steps:], time.process_time() - stamps[-steps + 1]


def first_adapters(folder: Path, run: str) -> Path:
    """The adapters that a run of ours starts from, as a folder of peft's."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    parts = parts_of_model(model, Topology())
    with chdir(folder):  # its settings name the model from there
        add_adapters(parts, TrainConfig.read(f"{run}/config.toml").lora, seed=0)
    parts[0].model.save_pretrained(folder / "adapters")
    return folder / "adapters"


def furthest(losses: Sequence[float], wanted: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


def compared(folder: Path, steps: int, only: str) -> Iterator[tuple[str, float]]:
    """By case, the largest relative difference of a step's loss from TRL's."""
    wanted: dict[str, list[float]] = {}
    for form, write in (("texts", write_preferences), ("chats", write_chat_preferences)):
        place = folder / form
        model_folder("llama", place / "model", num_hidden_layers=4)
        write(place / "data.jsonl", PAIRS)
        _with_prompts(place / "data.jsonl")
        for backend in ("auto", "transformers"):
            named = {"architecture": str(place / "model"), "backend": backend}
            config = TrainConfig().with_values(model=named, topology={"tp": 1, "pp": 1, "dp": 1})
            write_costs(config, VOCABULARY, place / f"costs-{backend}.json")  # measuring them takes longer than a run
        wanted[form] = theirs(place, steps=steps)[0]
    for number, (name, (form, flags)) in enumerate(CASES.items()):
        if only not in name:
            continue
        place, run = folder / form, f"run-{number}"
        by_transformers = "--lora" in flags or "--backend" in flags
        costs = f"costs-{'transformers' if by_transformers else 'auto'}.json"
        losses = ours(place, run, (*flags, "--costs", costs), steps=steps)["losses"]
        if "--lora" in flags:
            yield name, furthest(losses, theirs(place, steps=steps, adapters=first_adapters(place, run))[0])
        else:
            yield name, furthest(losses, wanted[form])


def _with_prompts(path: Path) -> None:
    """Chats with their prompt apart in every record: TRL takes the form of the first for that of all."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if "prompt" not in record:
            record["prompt"] = record["chosen"][:1]
            record |= {name: record[name][1:] for name in ("chosen", "rejected")}
    write_lines(path, records)


def seconds(folder: Path, steps: int) -> dict[str, Any]:
    """CPU seconds a real token of ours and of TRL's, and the padding of both, on answers of 4 to 400 words."""
    folder.mkdir()
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=8, **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    write_model_tokenizer(folder / "model")
    draw = random.Random(7)

    def say(words: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(words))

    def length() -> int:
        return int(4 * 100 ** draw.random())

    batch = 8
    records = [
        {"prompt": say(length() // 4 + 1) + " ", "chosen": say(length()), "rejected": say(length())}
        for _ in range(batch * (steps + 1))
    ]
    write_lines(folder / "data.jsonl", records)
    report = ours(folder, "run", ("--backend", "transformers"), steps=steps, batch=batch)
    losses, cpu_s = theirs(folder, steps=steps, batch=batch)
    tokens = report["real_tokens_per_step"]
    lengths = padded_positions(folder, steps, batch)
    return {
        "pairs_a_step": batch,
        "ours_us_a_token": 1e6 * report["cpu_s_per_token"],
        "trl_us_a_token": 1e6 * cpu_s / sum(tokens[1:]),
        "ours_padding": 1 - report["padding_efficiency"],
        "trl_padding": 1 - sum(tokens) / lengths,
        "largest_difference": furthest(report["losses"], losses),
    }


def padded_positions(folder: Path, steps: int, batch: int) -> int:
    """Model input positions of TRL's batches: every answer padded to the longest of its batch."""
    from dynapipe_ext.batch.micro_batches import get_document_lengths
    from dynapipe_ext.launch.job.run_data import run_data

    with chdir(folder):
        documents = get_document_lengths(run_data(TrainConfig.read("run/config.toml")).train.lengths)
    order = permutation(len(documents), seed=0, epoch=0)
    rows = [documents[order[step * batch : (step + 1) * batch]] for step in range(steps)]
    return sum(int(row.max()) * row.size for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="cases with this in their name; the others keep their figures")
    parser.add_argument("--output", type=Path, default=RESULTS / "preferences.json")
    args = parser.parse_args()
    import trl

    torch.set_num_threads(1)
    result: dict[str, Any] = {**provenance(""), "trl": trl.__version__, "steps": args.steps}
    kept = json.loads(args.output.read_text()) if args.only and args.output.is_file() else {}
    result["largest_differences"] = kept.get("largest_differences", {})
    with tempfile.TemporaryDirectory() as scratch:
        for name, difference in compared(Path(scratch), args.steps, args.only):
            result["largest_differences"][name] = difference
            print(f"{name}: {difference:.2g}", flush=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")
        result["seconds"] = seconds(Path(scratch) / "seconds", args.steps // 2)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["seconds"], indent=1))


if __name__ == "__main__":
    main()
