"""What `dynapipe train --deterministic` costs, and whether it keeps its promise for many steps.

    python tests/bench/deterministic.py [--steps N] [--bits-steps 50] [--output results/deterministic.json]

Cost: CPU seconds a step of the first rank, without it and with it, of the quickstart's model and data. Both runs of a
topology have one cost file and one seed, so the same plans; the first step, which warms up, is left out, and the least
of the others is taken: whatever else the machine does only adds. Bits: a tiny model with tied embeddings, dropout and
clipping trains under several schedules, placements and topologies, and resumed under another; digests of all losses,
weights and moments must be one. Either part is left out with 0 steps, and keeps the result that it had.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from contenders import provenance

from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.executor.checkpoints.folder import SavedTensor, latest, read_manifest
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import RunReport
from tests.support.preloaded import Preloaded
from tests.support.tiny_sizes import TINY_SIZES

RESULTS = Path(__file__).parent / "results"
TOPOLOGIES = {"one rank": (1, 1, 1), "pp2": (1, 2, 1), "pp2 dp2": (1, 2, 2)}
TINY = f"""
[model]
num_layers = 4
{TINY_SIZES}max_seq_len = 128
dropout = 0.1
tied_embeddings = true
[data]
num_samples = 400
tokenizer = "bytes"
truncate = true
tokens_per_batch = 1024
num_workers = 0
[plan]
split_policy = "batch-max"
max_tokens = 512
layout = "padded"
[optimizer]
clip_grad = 0.5
lr_schedule = "constant"  # so that a run of half the steps is the first half of one of all
deterministic = true
"""
ARRANGEMENTS = {
    "one rank": ["--pp", "1"],
    "pp2, 1f1b": ["--pp", "2", "--schedule", "1f1b"],
    "pp2, zb-h1": ["--pp", "2", "--schedule", "zb-h1"],
    "pp2, v": ["--pp", "2", "--placement", "v"],
    "pp4": ["--pp", "4"],
    "dp2": ["--dp", "2"],
    "pp2 dp2": ["--pp", "2", "--dp", "2"],
}


def digest(run_dir: Path) -> str:
    """Of all losses of a run and all that its last checkpoint holds, whatever topology wrote it."""
    folder = latest(run_dir / "checkpoints")
    found = hashlib.sha256(json.dumps(list(RunReport.read(run_dir / "report.json").result.losses)).encode())
    for name, stored in sorted(read_manifest(folder).tensors.items()):
        found.update(name.encode() + _whole(folder, stored).numpy().tobytes())
    return found.hexdigest()


def _whole(folder: Path, stored: SavedTensor) -> torch.Tensor:
    whole = torch.zeros(stored.shape, dtype=getattr(torch, stored.dtype))
    for chunk in stored.chunks:
        with (folder / chunk.file).open("rb") as file:
            file.seek(chunk.offset)
            block = torch.load(io.BytesIO(file.read(chunk.num_bytes)), weights_only=True)
        whole[tuple(slice(b, b + n) for b, n in zip(chunk.begin, chunk.shape, strict=True))] = block
    return whole


def bits(num_steps: int) -> dict[str, Any]:
    """The digest of each arrangement after so many steps."""
    found = {}
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch, Preloaded() as preloaded:
        folder = Path(scratch)
        (folder / "tiny.toml").write_text(TINY)
        config = TrainConfig.read(folder / "tiny.toml")
        costs = analytic_costs(config, architecture_of(config, 258), flops_per_s=50e9, overhead_ns=1_000_000)
        (folder / "costs.json").write_text(json.dumps(cost_model_to_json(costs)))
        common = ["--config", "tiny.toml", "--costs", "costs.json"]
        for name, words in ARRANGEMENTS.items():
            run_dir = name.replace(" ", "-").replace(",", "")
            preloaded.train(*common, *words, "--steps", str(num_steps), "--run-dir", run_dir, cwd=folder, timeout=500)
            found[name] = digest(folder / run_dir)
            print(f"{name}: {found[name]}", flush=True)
        half = ["--steps", str(num_steps // 2), "--run-dir", "resumed"]
        preloaded.train(*common, "--pp", "2", *half, cwd=folder, timeout=500)
        preloaded.train("--resume", "resumed", "--pp", "4", "--steps", str(num_steps), cwd=folder, timeout=500)
        found["pp2, resumed as pp4"] = digest(folder / "resumed")
    return {"steps": num_steps, "are_one": len(set(found.values())) == 1, "digests": found}


def cpu_s(run_dir: Path, arguments: list[str]) -> float:
    command = [sys.executable, "-m", "dynapipe_ext.launch.cli", "train", "--run-dir", str(run_dir), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return min(line["cpu_s"] for line in lines[1:] if "cpu_s" in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of each run that is timed")
    parser.add_argument("--bits-steps", type=int, default=50, help="of each run that is compared")
    parser.add_argument("--output", type=Path, default=RESULTS / "deterministic.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {}
    if args.steps:
        result |= {**provenance(args.machine), "steps": args.steps, "runs": timed_runs(args.steps)}
    if args.bits_steps:
        result["bits"] = {**provenance(args.machine), **bits(args.bits_steps)}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


def timed_runs(num_steps: int) -> dict[str, dict[str, float]]:
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (tp, pp, dp) in TOPOLOGIES.items():
            folder = Path(scratch) / name.replace(" ", "-")
            common = ["--tp", str(tp), "--pp", str(pp), "--dp", str(dp), "--steps", str(num_steps)]
            plain = cpu_s(folder / "plain", common)
            exact = cpu_s(
                folder / "exact", [*common, "--costs", str(folder / "plain" / "costs.json"), "--deterministic"]
            )
            found[name] = {
                "plain_cpu_s": plain,
                "deterministic_cpu_s": exact,
                "plain_over_deterministic": plain / exact,
            }
            print(f"{name}: {plain:.3f} s plain, {exact:.3f} s deterministic, {plain / exact:.3f}")
    return found


if __name__ == "__main__":
    main()
