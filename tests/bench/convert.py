"""Memory and speed of `dynapipe convert` in every direction, each in a process of its own.

    python tests/bench/convert.py [--folder DIR] [--machine NAME] [--output results/convert.json]

Two Llamas of bfloat16 made of random numbers: one of many layers, several times larger than what may be resident, and
one of four layers, whose groups are so large that a second copy of one would show. "allowed" is 1.3 x the largest group
of tensors (gate and up projections, or query, key and value) + 300 MB above a Python that did the same to a small
model; the peak is VmHWM after a reset of it. The time leaves imports out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for tests.support

import torch  # noqa: E402
from contenders import provenance  # noqa: E402

from dynapipe_ext.models.architecture import Architecture  # noqa: E402
from tests.support.conversion_peak import largest_group_bytes, make_models, measured, total_bytes  # noqa: E402

MB = 1_000_000
# Each takes the folder that the row named before it made.
CASES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("hf", "hf resharded", ("--to", "hf")),
    ("hf", "hf, verified", ("--to", "hf", "--verify")),
    ("hf", "megatron tp2 pp4", ("--to", "megatron", "--tp", "2", "--pp", "4")),
    ("megatron tp2 pp4", "hf from megatron", ("--to", "hf", "--verify")),
    ("megatron tp2 pp4", "megatron tp4 pp2", ("--to", "megatron", "--tp", "4", "--pp", "2")),
    ("hf", "legacy tp2 pp4", ("--to", "megatron-legacy", "--tp", "2", "--pp", "4")),
    ("legacy tp2 pp4", "hf from legacy", ("--to", "hf", "--verify")),
    ("hf", "deepspeed", ("--to", "deepspeed")),
    ("deepspeed", "hf from deepspeed", ("--to", "hf")),
)


MODELS = {
    "deep": Architecture(
        family="llama", num_layers=24, hidden_size=2048, num_heads=16, num_query_groups=4, head_dim=128,
        ffn_hidden_size=8192, vocab_size=16_000, max_seq_len=4096, tied_embeddings=False, dtype="bfloat16",
    ),
    "wide": Architecture(
        family="llama", num_layers=4, hidden_size=2048, num_heads=16, num_query_groups=16, head_dim=128,
        ffn_hidden_size=49_152, vocab_size=100_001, max_seq_len=4096, tied_embeddings=False, dtype="bfloat16",
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--folder", type=Path, help="where there is room for six copies of the model (20 GB)")
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a fork waits for ever for the threads that computed in its parent
    results = {}
    for name in args.models:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            results[name] = bench(name, MODELS[name], Path(folder))
    if args.output:
        args.output.write_text(json.dumps({**provenance(args.machine), "models": results}, indent=1) + "\n")
    return 0 if all(row["within"] for result in results.values() for row in result["rows"]) else 1


def bench(name: str, architecture: Architecture, folder: Path) -> dict[str, Any]:
    """Peak and seconds of every direction for one model."""
    group_bytes, model_bytes = largest_group_bytes(architecture), total_bytes(architecture)
    allowed_bytes = 1.3 * group_bytes + 300 * MB
    print(
        f"{name}: {model_bytes / MB:,.0f} MB, largest group {group_bytes / MB:,.0f} MB,"
        f" allowed {allowed_bytes / MB:,.0f} MB"
    )
    print(f"{'from':18} {'to':18} {'peak MB':>8} {'seconds':>8} {'MB/s':>6}")
    folders = make_models(folder, "hf", architecture)
    uses = [source for source, _, _ in CASES]
    rows: list[dict[str, Any]] = []
    for done, (source, target, flags) in enumerate(CASES, start=1):
        peak = measured(folders, source, "made", *flags, timeout_s=3600)
        for made in folders:
            if target in uses[done:]:
                (made / "made").rename(made / target)
            else:
                shutil.rmtree(made / "made")
            if source not in uses[done:]:
                shutil.rmtree(made / source)
        mb_s = model_bytes / MB / peak.seconds
        print(f"{source:18} {target:18} {peak.own_bytes / MB:8.0f} {peak.seconds:8.1f} {mb_s:6.0f}", flush=True)
        rows.append(
            {
                "from": source,
                "to": target,
                "peak_bytes": peak.own_bytes,
                "seconds": round(peak.seconds, 2),
                "within": peak.own_bytes <= allowed_bytes,
            }
        )
    return {
        "model_bytes": model_bytes,
        "largest_group_bytes": group_bytes,
        "allowed_bytes": round(allowed_bytes),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
