"""What `dynapipe train --deterministic` costs: CPU seconds a step of the first rank, without it and with it.

    python tests/bench/deterministic.py [--steps N] [--output results/deterministic.json]

The quickstart's model and data. Both runs of a topology have one cost file and one seed, so the same plans; the first
step, which warms up, is left out, and the least of the others is taken: whatever else the machine does only adds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from contenders import provenance

RESULTS = Path(__file__).parent / "results"
TOPOLOGIES = {"one rank": (1, 1, 1), "pp2": (1, 2, 1), "pp2 dp2": (1, 2, 2)}


def cpu_s(run_dir: Path, arguments: list[str]) -> float:
    command = [sys.executable, "-m", "dynapipe_ext.launch.cli", "train", "--run-dir", str(run_dir), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return min(line["cpu_s"] for line in lines[1:] if "cpu_s" in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path, default=RESULTS / "deterministic.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (tp, pp, dp) in TOPOLOGIES.items():
            folder = Path(scratch) / name.replace(" ", "-")
            common = ["--tp", str(tp), "--pp", str(pp), "--dp", str(dp), "--steps", str(args.steps)]
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
    args.output.write_text(
        json.dumps({**provenance(args.machine), "steps": args.steps, "runs": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
