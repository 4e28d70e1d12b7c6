"""What steps of changing shapes leave of a GPU's memory: bytes reserved beside bytes allocated and the limit.

    PYTHONPATH=. python -P tests/bench/gpu_memory.py [--steps 200] [--memory-limit-gb 24]

A GPT of .5B parameters in bfloat16 takes global batches of other lengths by our plans under a memory limit, whole
training steps with the optimizer's. torch's allocator may take the limit and not a byte more (what it keeps of freed
blocks counts): where plans promise what fragments do not leave, a step runs out of memory, or the allocator has to give
its blocks back and ask again ("retries"). With torch's own segments and with expandable ones, each in a process of its
own, at once where the device holds both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.launch.job.configured import architecture_of
from dynapipe_ext.launch.job.run_costs import settle_costs
from dynapipe_ext.peak_memory import is_out_of_memory
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig
from tests.bench.contenders import provenance
from tests.bench.gpu import CONFIG, FORMAT, Job, sample
from tests.gpu.steps import ALONE, alone

RESULTS = Path(__file__).parent / "results"
SEGMENTS = {"own": "expandable_segments:False", "expandable": "expandable_segments:True"}
LONGEST, NUM_LAYERS = 4096, 8


def global_batches(tokens: int, seed: int) -> Iterator[list[SampleLength]]:
    """Of lengths that differ by a factor of 250, about so many tokens each."""
    random, index = np.random.default_rng(seed), 0
    while True:
        found: list[SampleLength] = []
        while sum(s.encoder for s in found) < tokens:
            found.append(sample(index, int(np.clip(random.lognormal(5.6, 1.3), 16, LONGEST))))
            index += 1
        yield found


def steps(args: argparse.Namespace) -> dict[str, Any]:
    device, limit_bytes = torch.device("cuda", 0), args.memory_limit_gb * 1e9
    torch.cuda.set_device(device)
    config = TrainConfig.read(CONFIG).with_values(
        model={"num_layers": NUM_LAYERS}, plan={"memory_limit_gb": args.memory_limit_gb}
    )
    model, costs = architecture_of(config, config.data.vocab_size), settle_costs(config, config.data.vocab_size)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(device).total_memory)
    planner = Planner(ALONE, costs, limit_bytes, format=FORMAT, layout="packed")
    predicted, allocated, reserved, failed, shapes = [], [], [], [], set()
    with alone(device):
        job = Job(model, device)
        batches = global_batches(args.tokens, seed=0)
        for step in range(args.steps):
            plan = prove_step(planner, next(batches), step=step).plans[0][0]
            try:
                done = job.step(plan)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failed.append({"step": step, "error": str(error).splitlines()[0]})
                break
            shapes |= {m.padded_tokens for m in plan.micro_batches}
            predicted.append(plan.prediction.peak_bytes[0])
            allocated.append(done["peak_bytes"])
            reserved.append(torch.cuda.memory_reserved())
        stats = torch.cuda.memory_stats()
    return {
        "steps": len(reserved),
        "shapes": len(shapes),
        "retries": stats["num_alloc_retries"],
        "out_of_memory": failed,
        "most_reserved_over_limit": max(reserved) / limit_bytes,
        "most_allocated_over_limit": max(allocated) / limit_bytes,
        "reserved_over_allocated": statistics.median(r / max(allocated[: i + 1]) for i, r in enumerate(reserved)),
        "predicted_over_allocated": min_median_max(p / a for p, a in zip(predicted, allocated, strict=True)),
        "fill_of_limit": min_median_max(p / limit_bytes for p in predicted),
    }


def min_median_max(values: Iterator[float]) -> list[float]:
    found = list(values)
    return [min(found), statistics.median(found), max(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1 << 15, help="of a global batch")
    parser.add_argument("--memory-limit-gb", type=float, default=24.0)
    parser.add_argument("--machine", default="")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_memory.json")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # one kind of segments, in this process
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(steps(args)))
        return
    words = ["--alone", "--steps", str(args.steps), "--tokens", str(args.tokens)]
    words += ["--memory-limit-gb", str(args.memory_limit_gb)]
    command = [sys.executable, "-P", "-W", "ignore", __file__, *words]
    begun = time.perf_counter()
    started = {
        name: subprocess.Popen(
            command, env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}, stdout=subprocess.PIPE, text=True
        )
        for name, setting in SEGMENTS.items()
    }
    result: dict[str, Any] = {**provenance(args.machine), "device": torch.cuda.get_device_name()}
    result |= {"memory_limit_gb": args.memory_limit_gb, "tokens": args.tokens, "segments": {}}
    for name, process in started.items():
        said, _ = process.communicate()
        result["segments"][name] = json.loads(said.splitlines()[-1]) if said else {"failed": process.returncode}
        print(name, result["segments"][name], flush=True)
    print(f"{time.perf_counter() - begun:.0f} s")
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
