"""Random faults against real jobs, with a matrix of what has been covered.

    python tests/bench/chaos.py --runs N [--seed S] [--jobs J] [--minutes M] [--kills-late] [--resume] [--output FILE]
    python tests/bench/chaos.py --runs N --again OUTCOME

A job is a tiny model on 4 ranks (PP2 x DP2), started by `dynapipe train` (and --resume, as its user would) or by
`dynapipe launch` (which starts again by itself), with a planner and an embedded store. Each meets a few faults, one
after the other: every wait of a rank x rank, planner, store, launcher x kill, stop; every file operation of a save x
kill; every kind of entry in the store x drop, delay, duplicate, corrupt; torchrun; store, disk and files that are full.
Cells that were hit least often come first. With `--kills-late` there are kills only, after a start's first step.
Afterwards weights, losses and files must be those of a job that nobody disturbed, no step lost that was saved, and no
process, lock or temporary file left (`tests/support/chaos.py`).
Of a run that went wrong a folder is left (`tests/support/chaos.py`, `_keep`): its standard error, its losses beside
the expected, states of processes, manifests. `--again` does the faults of its outcome.json to N jobs more: the very
ones, since what a seed draws depends on the runs before it. `--resume` adds runs to those in FILE.
Needs root (a small disk is mounted). Exit status 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from contenders import provenance

from tests.support.chaos import Cell, ChaosJobs, Command, Outcome, read_faults
from tests.support.faults import Fault
from tests.support.preloaded import Preloaded

RESULTS = Path(__file__).parent / "results"
FAULTS = 3  # of a run
LAUNCH_EVERY = 4  # runs


class Runs:
    """What has been run, in a file that is whole after every run."""

    def __init__(self, path: Path, seed: int, machine: str, *, resume: bool) -> None:
        self._path, self._seed, self._lock = path, seed, threading.Lock()
        self._head = provenance(machine)
        self.runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if resume else []

    def add(self, number: int, outcome: Outcome, cells: Sequence[Cell]) -> None:
        hit = [[cell.site, cell.deed, cell.actor] for cell, done in zip(cells, outcome.done, strict=True) if done]
        with self._lock:
            self.runs.append({"seed": self._seed, "number": number, "hit": hit, **outcome.to_json()})
            num_wrong = sum(bool(run["wrong"]) for run in self.runs)
            result = {**self._head, "num_runs": len(self.runs), "num_wrong": num_wrong, "runs": self.runs}
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(result, indent=0) + "\n")
            part.replace(self._path)

    def covered(self) -> Counter[Cell]:
        with self._lock:
            return Counter(Cell(*cell) for run in self.runs for cell in run["hit"])


def drawn(
    jobs: ChaosJobs, seed: int, number: int, planned: Counter[Cell]
) -> tuple[Command, tuple[Fault, ...], tuple[Cell, ...]]:
    """The command of a run, its faults in the order in which a job comes to them, and their cells, which are those that
    were planned least often."""
    chance = random.Random(f"{seed} {number}")
    command: Command = "launch" if number % LAUNCH_EVERY == LAUNCH_EVERY - 1 else "train"
    cells = sorted(jobs.cells(command), key=lambda cell: (planned[cell], chance.random()))[:FAULTS]
    planned.update(cells)
    pairs = [(jobs.fault(cell, chance), cell) for cell in cells]
    pairs.sort(key=lambda pair: jobs.place(pair[0]))
    return command, tuple(fault for fault, _ in pairs), tuple(cell for _, cell in pairs)


def show_matrix(cells: Sequence[Cell], covered: Counter[Cell]) -> None:
    """A line a site: how often each deed was done there; `-` where there is no such actor."""
    columns = sorted({(cell.deed, cell.actor) for cell in cells if cell.site != "anywhere"})
    sites = sorted({cell.site for cell in cells if cell.site != "anywhere"})
    width = max(map(len, sites)) + 2
    print(" " * width + "  ".join(f"{deed} {actor}" for deed, actor in columns))
    for site in sites:
        counts = []
        for deed, actor in columns:
            cell = Cell(site, deed, actor)
            counts.append(f"{covered[cell] if cell in cells else '-':>{len(deed) + len(actor) + 1}}")
        print(site.ljust(width) + "  ".join(counts))
    for cell in cells:
        if cell.site == "anywhere":
            print(f"{cell.deed} {cell.actor}".ljust(width) + str(covered[cell]))
    hit = sum(covered[cell] > 0 for cell in cells)
    print(f"{hit} of {len(cells)} cells, {sum(covered.values())} faults")


def run_all(args: argparse.Namespace, folder: Path, runs: Runs) -> None:
    """Run what is left of `args.runs` and print how each went; with `args.again` with the faults of that outcome."""
    end_s = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    planned, lock = runs.covered(), threading.Lock()
    with (
        Preloaded() as preloaded,
        ThreadPoolExecutor(args.jobs) as pool,
        closing(ChaosJobs(preloaded, folder / "jobs", kills_late=args.kills_late)) as jobs,
    ):

        def one(number: int) -> None:
            if time.monotonic() > end_s:
                return
            with lock:
                if args.again:
                    command, faults = read_faults(args.again)
                    cells = tuple(Cell(fault.site, fault.deed, fault.actor) for fault in faults)
                else:
                    command, faults, cells = drawn(jobs, args.seed, number, planned)
            outcome = jobs.run(f"{number}", command, faults)
            runs.add(number, outcome, cells)
            hit = [cell for cell, done in zip(cells, outcome.done, strict=True) if done]
            deeds = ", ".join(f"{cell.deed} {cell.actor} at {cell.site}" for cell in hit)
            walls = " + ".join(f"{start.wall_s:.0f}" for start in outcome.starts)
            print(f"run {number} ({command}, {walls} s): {deeds}", *outcome.wrong, sep="\n  WRONG: ", flush=True)
            if outcome.evidence is None:
                shutil.rmtree(folder / "jobs" / f"{number}", ignore_errors=True)
            else:
                print(f"  kept in {outcome.evidence}; the same faults again:")
                print(f"  python tests/bench/chaos.py --runs 10 --again {outcome.evidence}/outcome.json", flush=True)

        for _ in pool.map(one, range(len(runs.runs), args.runs)):
            pass
        if not args.again:
            show_matrix(jobs.cells("launch"), runs.covered())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="default: another each time")
    parser.add_argument("--jobs", type=int, default=1, help="at the same time")
    parser.add_argument("--kills-late", action="store_true", help="kills only, after the first step of a start")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after them; 0: no limit")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--again", type=Path, metavar="OUTCOME", help="outcome.json of a run that went wrong")
    parser.add_argument("--output", type=Path, help="default: results/chaos.json; with --again none is kept")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    print("again: " + str(args.again) if args.again else f"seed {args.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # short: a socket's path must fit
    output = args.output or (folder / "again.json" if args.again else RESULTS / "chaos.json")
    runs = Runs(output, args.seed, args.machine, resume=args.resume and output.exists())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run_all(args, folder, runs)
    finally:
        if not [*folder.glob("jobs/*.wrong")]:
            shutil.rmtree(folder, ignore_errors=True)
    repeated = sum(run["repeated_steps"] for run in runs.runs)
    wrong = sum(bool(run["wrong"]) for run in runs.runs)
    print(f"{len(runs.runs)} runs, {repeated} steps repeated, {wrong} runs went wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
