"""How well a table of few measured shapes tells shapes that it has not seen, on this machine.

    python tests/bench/profiled.py [--shapes 24] [--held-out 12] [--output results/profiled.json]

Models of the training settings and of a family; padded shapes with every kind of recomputation, and packed rows. Times
are CPU seconds on a CPU: run it on a quiet machine all the same, for caches are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from contenders import provenance

from dynapipe_ext.launch.cli import main as dynapipe

RESULTS = Path(__file__).parent / "results"
_MODELS = {
    "GPT, hidden 128, LayerNorm, biases": """
[topology]
tp = 1
""",
    "Llama-like, hidden 256, RMSNorm, gated, grouped queries": """
[topology]
tp = 1
[model]
hidden_size = 256
num_heads = 8
num_query_groups = 2
ffn_hidden_size = 704
gated_mlp = true
norm = "rmsnorm"
bias = false
""",
}


def measured(settings: str, *, shapes: int, held_out: int) -> dict[str, Any]:
    """The command's own summary: errors by quantity for padded and packed micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "model.toml"
        config.write_text(settings)
        read, write = os.pipe()
        kept = os.dup(1)
        os.dup2(write, 1)  # ranks are forked: they write to the file descriptor
        try:
            words = ["--max-tokens", "2048", "--max-shapes", str(shapes), "--held-out", str(held_out), "--json"]
            status = dynapipe(["profile", "--config", str(config), "--out", str(Path(folder) / "costs.json"), *words])
        finally:
            os.dup2(kept, 1)
            os.close(write)
            os.close(kept)
        with open(read) as file:
            text = file.read()
    if status:
        raise SystemExit(status)
    found: dict[str, Any] = json.loads(text)
    return {name: found[name] for name in ("shapes", "seconds", "device", "held_out_error")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=24, help="most shapes to measure")
    parser.add_argument("--held-out", type=int, default=12, help="shapes that tell the error, padded and packed each")
    parser.add_argument("--machine", default="", help="what to call this machine")
    parser.add_argument("--output", type=Path, default=RESULTS / "profiled.json")
    args = parser.parse_args()
    found = {}
    for name, settings in _MODELS.items():
        found[name] = measured(settings, shapes=args.shapes, held_out=args.held_out)
        for group, errors in found[name]["held_out_error"].items():
            means = ", ".join(f"{quantity} {100 * error:.1f} %" for quantity, error in errors["mean"].items())
            print(f"{name}, {group}: {means}", flush=True)
    args.output.write_text(json.dumps({**provenance(args.machine), "models": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
