"""A job on two hosts whose link is cut and restored: whether it goes on, starts again or ends, and with what reason.

    python tests/bench/link_cut.py [--cuts 3 40] [--output results/link_cut.json]

TP2 x PP2 on two network namespaces, the pipeline across the cable, started by `dynapipe launch` with two restarts. The
cable is taken down after step 6, for so many seconds. Losses must be those of a job whose cable is not. Needs root, ip.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from contenders import provenance

from dynapipe_ext.tools.account.report import RunReport
from tests.support.hosts import host_files, ip, joined_hosts, store_of
from tests.support.preloaded import Preloaded
from tests.support.tiny_sizes import TINY_SIZES

RESULTS = Path(__file__).parent / "results"
TIMEOUT_S, LIMIT_S = 20.0, 300.0
JOB = f"""
[run]
steps = 12
[topology]
tp = 2
pp = 2
dp = 1
[model]
num_layers = 2
{TINY_SIZES}[data]
num_samples = 300
tokenizer = "bytes"
truncate = true
tokens_per_batch = 2048
[checkpoint]
save_every = 4
[job]
timeout_s = {TIMEOUT_S}
"""


def cut_for(seconds: float, preloaded: Preloaded, folder: Path) -> dict[str, Any]:
    """A job whose cable is cut, then one with its costs whose cable is not: as many cores, so the same plans."""
    (folder / "job.toml").write_text(JOB)
    with joined_hosts() as hosts, store_of(hosts[0], folder) as flags:
        name, _, device = hosts[1]
        words = ["launch", *host_files(hosts, folder, slots=2), "--max-restarts", "2", "--config", "job.toml", *flags]

        def cut_and_restore() -> None:
            ip("-n", name, "link", "set", device, "down")
            time.sleep(seconds)
            ip("-n", name, "link", "set", device, "up")

        begun_s = time.monotonic()
        exit_status, said = launched(preloaded, [*words, "--run-dir", "cut"], folder, after_step_6=cut_and_restore)
        wall_s = time.monotonic() - begun_s
        launched(preloaded, [*words, "--run-dir", "clean", "--costs", "cut/costs.json"], folder)
    found, clean = (RunReport.read(folder / run / "report.json").result.losses for run in ("cut", "clean"))
    return {
        "cut_s": seconds,
        "exit_status": exit_status,
        "wall_s": round(wall_s, 1),
        "steps": len(found),
        "same_losses": found == clean,
        "said": [line.strip() for line in said if line.startswith(("dynapipe", "going on"))],
    }


def launched(
    preloaded: Preloaded, words: list[str], folder: Path, after_step_6: Callable[[], None] | None = None
) -> tuple[int | None, list[str]]:
    """The exit status of a job, killed at the limit, and the lines that it said."""
    said: list[str] = []
    with preloaded.started(words, cwd=folder) as launcher:
        limit = threading.Timer(LIMIT_S, launcher.send_signal, [9])
        limit.start()
        for line in launcher.stderr:
            said.append(line)
            if line.startswith("step 6 ") and after_step_6:
                threading.Thread(target=after_step_6).start()
                after_step_6 = None
        launcher.communicate(10)
        limit.cancel()
    return launcher.returncode, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=float, nargs="+", default=[3.0, 40.0], metavar="SECONDS")
    parser.add_argument("--output", type=Path, default=RESULTS / "link_cut.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    found = []
    with Preloaded() as preloaded:
        for seconds in args.cuts:
            with tempfile.TemporaryDirectory(dir="/tmp") as folder:
                found.append(cut_for(seconds, preloaded, Path(folder)))
            print(json.dumps(found[-1], indent=1), flush=True)
    result = {**provenance(args.machine), "timeout_s": TIMEOUT_S, "cuts": found}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
