"""Real tokens a second of fine-tuning on one GPU: `dynapipe train`, and TRL's trainer with the same attention.

    pip install --no-deps --target site trl datasets dill multiprocess xxhash
    PYTHONPATH=.:site python -P tests/bench/gpu_peers.py [--steps N] [--only WAY]

A Llama of the sizes of Llama 3.2 1B with weights drawn at random, in bfloat16, on texts whose lengths differ by a
factor of 250, about 65,536 tokens a step. Every way is a process of its own, one after the other:

    megatron      dynapipe train, by megatron-core
    transformers  dynapipe train --backend transformers
    packed        SFTTrainer(packing=True), "bfd": rows of 4,096, documents apart
    padding-free  SFTTrainer(padding_free=True): as many samples as fit whatever they are, end to end, none packed
    padded        SFTTrainer, samples grouped by length

TRL attends by the kernel that our plans run by (`register_document_attention`, with the document borders that TRL's
collator gives), as no wheel of flash-attn is needed for that. Its weights and AdamW's moments are bfloat16, which is
less work than our float32 masters; fused AdamW, no activation checkpointing. Seconds are those of whole steps as each
trainer counts them, from the end of the third step to the end of the last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from dynapipe_ext.batch.document_attention import register_document_attention
from tests.bench.contenders import provenance
from tests.support.model_folders import WORDS, write_lines, write_model_tokenizer

RESULTS = Path(__file__).parent / "results"
ROW, TOKENS_PER_STEP, WARM_STEPS = 4096, 65536, 3
SIZES: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": ROW,
    "tie_word_embeddings": True,
}  # fmt: skip
OURS: dict[str, list[str]] = {"megatron": [], "transformers": ["--backend", "transformers"]}
# TRL's settings, and samples (rows, where packed) of a device's batch with the batches of a step.
THEIRS: dict[str, tuple[dict[str, Any], int, int]] = {
    "packed": ({"packing": True}, 4, 4),
    "padding-free": ({"padding_free": True, "max_length": None}, 4, 26),
    "padded": ({"train_sampling_strategy": "group_by_length"}, 4, 26),
}


def write_job(folder: Path, sizes: dict[str, Any], num_tokens: int) -> None:
    """`model` and `data.jsonl` in the folder: texts of at least so many tokens in all."""
    config = transformers.LlamaConfig(**sizes, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    write_model_tokenizer(folder / "model", starts=False)
    random, longest = np.random.default_rng(1), int(sizes["max_position_embeddings"]) - 6
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(int(np.clip(random.lognormal(5.6, 1.3), 16, longest)))
    write_lines(folder / "data.jsonl", [{"text": " ".join(random.choice(WORDS, n))} for n in lengths])


def ours(folder: Path, way: str, steps: int, sizes: dict[str, Any], memory_limit_gb: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "dynapipe_ext.launch.cli", "train", "--model", "model", "--data", "data.jsonl"]
    command += ["--steps", str(steps), "--tokens-per-batch", str(TOKENS_PER_STEP), "--run-dir", way]
    command += [
        "--max-seq-len",
        str(sizes["max_position_embeddings"]),
        "--dtype",
        "bfloat16",
        "--save-every",
        "0",
        "--truncate",
    ]
    command += ["--memory-limit-gb", str(memory_limit_gb), *OURS[way]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    lines = [json.loads(line) for line in (folder / way / "events.jsonl").read_text().splitlines()]
    done_steps = [line for line in lines if "step_s" in line][WARM_STEPS:]
    tokens, seconds = (sum(one[name] for one in done_steps) for name in ("real_tokens", "step_s"))
    return {
        "real_tokens_per_s": tokens / seconds,
        "tokens_per_step": tokens / len(done_steps),
        "step_s": [one["step_s"] for one in done_steps],
        "padding_efficiency": tokens / sum(one["padded_tokens"] for one in done_steps),
        "most_bytes": max(one["peak_bytes"] for one in done_steps),
        "predicted_over_measured_s": sum(one["predicted_makespan_s"] for one in done_steps)
        / sum(one["executed_s"] for one in done_steps),
        "micro_batches": [one["num_micro_batches"] for one in done_steps],
        "last_loss": done_steps[-1]["loss"],
    }


def theirs(folder: Path, way: str, steps: int) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokens, positions, ends, losses = [0], [0], [], []
    on_gpu = torch.cuda.is_available()

    class Counted(SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            mask = inputs.get("attention_mask")
            real = inputs["input_ids"].numel() if mask is None else int(mask.sum())
            tokens[-1] += real
            positions[-1] += inputs["input_ids"].numel()
            return super().training_step(model, inputs, *arguments, **named)

        def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
            if "loss" in logs:
                losses.append(logs["loss"])
            super().log(logs, *arguments, **named)

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            tokens.append(0)
            positions.append(0)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", pad_token="</s>")
    texts = [json.loads(line)["text"] for line in (folder / "data.jsonl").read_text().splitlines()]
    ids = [own[:ROW] for own in tokenizer([text + "</s>" for text in texts])["input_ids"]]
    settings, batch_size, batches = THEIRS[way]
    attention = "sdpa" if way == "padded" else register_document_attention()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation=attention, dtype=torch.bfloat16
    )
    trainer = Counted(
        model=model,
        args=SFTConfig(
            output_dir=str(folder / way),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=batches,
            max_steps=steps,
            learning_rate=2e-5,
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **{"max_length": ROW, **settings},
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=tokenizer,
        callbacks=[Ends()],
    )
    trainer.train()
    seconds = np.diff(ends[WARM_STEPS - 1 :])
    own_tokens, own_positions = (of[WARM_STEPS : len(ends)] for of in (tokens, positions))
    return {
        "real_tokens_per_s": sum(own_tokens) / seconds.sum(),
        "tokens_per_step": sum(own_tokens) / len(own_tokens),
        "step_s": seconds.tolist(),
        "padding_efficiency": sum(own_tokens) / sum(own_positions),
        "most_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "batches": [batch_size, batches],
        "last_loss": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="", help="ways with this in their name; the others keep their figures")
    parser.add_argument("--sizes", type=json.loads, default={}, help="JSON of a model's config, for some sizes")
    parser.add_argument("--memory-limit-gb", type=float, default=70.0)
    parser.add_argument("--machine", default="")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_peers.json")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)  # in a process of its own: one of TRL's ways, in a folder
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        print(json.dumps(theirs(args.folder, args.trainer, args.steps)))
        return
    sizes = {**SIZES, **args.sizes}
    result: dict[str, Any] = {**provenance(args.machine), "steps": args.steps, "sizes": sizes}
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result["ways"] = json.loads(args.output.read_text())["ways"] if args.only and args.output.is_file() else {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_job(folder, sizes, (args.steps + 2) * TOKENS_PER_STEP)
        torch.cuda.empty_cache()
        for way in [*OURS, *THEIRS]:
            if args.only not in way:
                continue
            begun = time.perf_counter()
            if way in OURS:
                found = ours(folder, way, args.steps, sizes, args.memory_limit_gb)
            else:
                words = ["--trainer", way, "--folder", scratch, "--steps", str(args.steps)]
                command = [sys.executable, "-P", "-W", "ignore", __file__, *words]
                done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
                if done.returncode:
                    found = {"failed": (done.stderr.strip().splitlines() or [""])[-1]}
                    print(done.stderr[-3000:], file=sys.stderr)
                else:
                    found = json.loads(done.stdout.strip().splitlines()[-1])
            result["ways"][way] = found
            shown = {name: round(value, 3) for name, value in found.items() if isinstance(value, int | float)}
            print(f"{way} ({time.perf_counter() - begun:.0f} s): {shown or found}", flush=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
