"""Batch inference on one GPU: how full batches are of the peak that they may have, and whether any ran out of memory.

    PYTHONPATH=. python -P tests/bench/gpu_inference.py [--texts 10000]

A Llama of the sizes of Llama 3.2 1B but half its layers, in bfloat16, with weights drawn at random. Texts are of 4 to
1,024 tokens; 8 new tokens each. Batches keep to the peak of the first one (`peak_fraction` of it), by bytes that are
counted from the model's config and calibrated as batches run, and by a memory model that is learnt on this device
beforehand (`dynapipe collect-memory`, `dynapipe train-memory-model`). Beside them batches of a fixed size: the first
one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from dynapipe_ext.batching.inference.generation import generate_batches
from dynapipe_ext.batching.inference.loader import build_dynamic_batch_dataloader
from dynapipe_ext.launch.cli import main as dynapipe
from dynapipe_ext.peak_memory import measure_on
from tests.bench.contenders import provenance
from tests.bench.gpu_peers import SIZES
from tests.support.model_folders import WORDS, write_model_tokenizer

RESULTS = Path(__file__).parent / "results"
NEW_TOKENS, LONGEST, PEAK_FRACTION = 8, 1024, 0.9


def texts_of(count: int) -> list[str]:
    random = np.random.default_rng(3)
    lengths = np.clip(random.lognormal(5.0, 1.0, count), 4, LONGEST).astype(int)
    return [" ".join(random.choice(WORDS, n)) for n in lengths]


def run(model: Any, tokenizer: Any, texts: list[str], batch_size: int, **rule: Any) -> dict[str, Any]:
    loader = build_dynamic_batch_dataloader(
        texts, tokenizer, batch_size, LONGEST, peak_fraction=PEAK_FRACTION, num_workers=0, **rule
    )
    begun, batches = time.perf_counter(), []
    measured = generate_batches(
        model, loader, max_new_tokens=NEW_TOKENS, measure=measure_on(model.device), do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    for batch in measured:
        batches.append((len(batch.indices), batch.peak_bytes or 0, batch.num_splits))
    seconds = time.perf_counter() - begun
    budget = PEAK_FRACTION * batches[0][1]
    fills = [peak / budget for _, peak, _ in batches[1:-1]]
    return {
        "texts": sum(size for size, _, _ in batches),
        "texts_per_s": len(texts) / seconds,
        "batches": len(batches),
        "first_peak_bytes": batches[0][1],
        "median_fill": statistics.median(fills) if fills else None,
        "least_fill": min(fills, default=None),
        "most_fill": max(fills, default=None),
        "halved": sum(splits for _, _, splits in batches),
        "sizes_and_peaks": batches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=64, help="of the first batch")
    parser.add_argument("--measured", type=int, default=64, help="batches that the memory model learns from")
    parser.add_argument("--sizes", type=json.loads, default={}, help="JSON of a model's config, for some sizes")
    parser.add_argument("--machine", default="")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_inference.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 8, **args.sizes}, dtype="bfloat16")
    texts, max_tokens = texts_of(args.texts), args.batch_size * LONGEST
    result: dict[str, Any] = {**provenance(args.machine), "device": device, "peak_fraction": PEAK_FRACTION}
    if device == "cuda":
        result["device"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config.save_pretrained(folder)
        tokenizer = write_model_tokenizer(folder, starts=False)
        tokenizer.pad_token, tokenizer.padding_side = "</s>", "left"
        records, learned = folder / "records.jsonl", folder / "memory.json"
        begun = time.perf_counter()
        words = ["--model", scratch, "--out", str(records), "--generate", str(NEW_TOKENS), "--device", device]
        words += [
            "--max-length",
            str(LONGEST),
            "--max-tokens",
            str(max_tokens),
            "--max-rows",
            str(16 * args.batch_size),
        ]
        for command in (
            ["collect-memory", *words, "--batches", str(args.measured)],
            ["train-memory-model", str(records), "--out", str(learned), "--json", str(folder / "errors.json")],
        ):
            if status := dynapipe(command):
                raise SystemExit(status)
        result["learning_s"] = time.perf_counter() - begun
        result["held_out"] = json.loads((folder / "errors.json").read_text())
        torch.manual_seed(0)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ways: dict[str, dict[str, Any]] = {
            "learned": {"memory_model": learned},
            "counted": {},
            "fixed size": {"batch_end_range": 1.0},
        }
        result["ways"] = {}
        for name, rule in ways.items():
            found = result["ways"][name] = run(model, tokenizer, texts, args.batch_size, **rule)
            print(name, {key: value for key, value in found.items() if key != "sizes_and_peaks"}, flush=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
