"""Converted checkpoints in the unchanged Megatron-LM at TP2 x PP2, of several families and both formats.

    python tests/bench/megatron_lm.py [--output results/megatron_lm.json]

Needs `../shared` and `pip install six regex sentencepiece`. Losses of one sample: validated by Megatron-LM before it
trains, and after a step; beside what transformers computes with the source, and with the saved checkpoint converted
back from Megatron's arguments alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contenders import provenance

RESULTS = Path(__file__).parent / "results"
CASES = (("llama", "megatron"), ("qwen3", "megatron"), ("gpt2", "megatron"), ("llama", "megatron-legacy"))


def measure(family: str, target: str, megatron_lm: Path) -> dict[str, Any]:
    from tests.support.megatron_lm import train_converted

    with tempfile.TemporaryDirectory() as folder:
        started_s = time.monotonic()
        losses = train_converted(family, Path(folder), megatron_lm, target)
    return {
        "family": family,
        "format": target,
        "converted": {"megatron_lm": losses.converted[0], "transformers": losses.converted[1]},
        "trained": {"megatron_lm": losses.trained[0], "transformers": losses.trained[1]},
        "largest_error": max(losses.errors),
        "seconds": round(time.monotonic() - started_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "megatron_lm.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support.megatron_lm import checkout

    with tempfile.TemporaryDirectory() as folder:
        megatron_lm = checkout(Path(folder))
        found = [measure(family, target, megatron_lm) for family, target in CASES]
    args.output.write_text(json.dumps({**provenance(args.machine), "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
