"""Whether planner processes and their store keep ahead of the readers of 4,096 ranks: they alone, without training.

    python tests/bench/pool.py [--shared DIR] [--machine TEXT] [--workers N] [--step-s S] [--seconds S] [--dp N]
                               [--first-alone]

An embedded server, its planner processes and one process that stands for all readers: at each step's time it reads the
plan of every one of 4,096 ranks from the store, a read each, and marks the step as rank 0 does. Llama 3 70B on counted
costs, TP8 PP8, batches of 375 samples a replica as tests/bench/scale.py has them.

Scaled to two cores: planners plan `dp` of the 64 replicas and their share of the batch, by default 16, which is what
one core is for at 1,000 ranks a core; each of their plans is read by 64 / dp times as many ranks, so the store serves
all 4,096. Times count from the first plan on. A step is kept where its plans were read before the next one begins.
The CPU seconds of planners, store and readers a step say what cores an idle machine needs, whatever else runs here.

first_plans: all replicas, at PP8 and at PP16. How long after its start a planner process has the whole first step in
the store, and its CPU seconds until then: the wait on a machine with a core for each planner. --first-alone renews
these and nothing else.

Lengths are of DIR (default ../shared beside the repository): multitask_lengths.npy cut at 2,048. Writes
results/pool.json; exit status 1 where a step was not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import scale
from contenders import provenance

from dynapipe_ext.batch.micro_batches import LengthArray, as_length_array
from dynapipe_ext.data.batches import GlobalBatchRule, StepPosition, step_positions
from dynapipe_ext.executor.plans.channel import PlannerProcesses
from dynapipe_ext.executor.plans.planner_process import PlannerJob, describe_planner
from dynapipe_ext.executor.store.address import Keys
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.launch.store import RedisServer

RESULT = Path(__file__).parent / "results" / "pool.json"
FORMAT = "dynapipe-pool/1"
RANKS, TP, PP = 4096, 8, 8
FIRST_PPS = (8, 16)
AHEAD = 8
_WAIT_S = 300.0
_KEYS, _KEY = Keys("pool/1"), bytes(32)


@dataclass(frozen=True, slots=True)
class Step:
    """A step's reads: how late they began after its time, and how long until the last of 4,096 was done."""

    late_s: float
    reading_s: float


def job_of(store: RedisStore, pp: int, dp: int, workers: int) -> PlannerJob:
    samples_a_replica = scale.MANY_SAMPLES // (RANKS // TP // pp)
    return PlannerJob(
        store=store.address,
        store_patience_s=60.0,
        namespace=store.namespace,
        prefix=_KEYS.prefix,
        plan_key=_KEY.hex(),
        rule=GlobalBatchRule(batch_size=dp * samples_a_replica, drop_last=True),
        planner=describe_planner(scale._counted(pp, dp)),
        start=StepPosition(),
        ahead=AHEAD,
        num_workers=workers,
    )


def lengths_of(shared: Path) -> LengthArray:
    lengths = np.load(shared / "data" / "multitask_lengths.npy").astype(np.int64).sum(axis=1)
    return as_length_array(np.minimum(lengths, scale.MOST_LENGTH))


def read_steps(store: RedisStore, places: Sequence[StepPosition], dp: int, step_s: float) -> list[Step]:
    """Every rank's read of each step, at the step's time or as soon as the reads before are done."""
    steps = []
    begin_s = 0.0
    for number, place in enumerate(places):
        if number:
            time.sleep(max(0.0, begin_s + number * step_s - time.monotonic()))
        start_s = time.monotonic()
        store.put(_KEYS.taken(epoch=place.epoch, step=place.step), b"1")
        for dp_rank in range(dp):
            for pp_rank in range(PP):
                key = _KEYS.plan(epoch=place.epoch, step=place.step, dp_rank=dp_rank, pp_rank=pp_rank)
                for _ in range(RANKS // (dp * PP)):
                    store.get(key, _WAIT_S)
        end_s = time.monotonic()
        begin_s = begin_s or end_s
        steps.append(Step(start_s - begin_s - number * step_s, end_s - start_s))
    return steps


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_plan(shared: Path, pp: int) -> dict[str, Any]:
    """Of one planner process and all replicas, from its start to the last of its first step's plans in the store."""
    lengths, dp = lengths_of(shared), RANKS // TP // pp
    with RedisServer() as server, RedisStore(server.address, namespace="pool", reconnect_timeout_s=60.0) as store:
        start_s = time.monotonic()
        with PlannerProcesses(job_of(store, pp, dp, 1), store, lengths) as pool:
            store.get(_KEYS.plan(epoch=0, step=0, dp_rank=dp - 1, pp_rank=pp - 1), _WAIT_S)
            return {"pp": pp, "dp": dp, "s": time.monotonic() - start_s, "cpu_s": cpu_s(pool.processes[0].pid)}


def measured(shared: Path, *, dp: int, workers: int, step_s: float, seconds: float) -> dict[str, Any]:
    lengths, count = lengths_of(shared), 1 + round(seconds / step_s)
    load = os.getloadavg()[0]
    with RedisServer() as server, RedisStore(server.address, namespace="pool", reconnect_timeout_s=60.0) as store:
        job = job_of(store, PP, dp, workers)
        every = islice(step_positions(job.rule, lengths, job.start), count + 2 * AHEAD)
        places = [place for place, _ in every]
        start_s = time.monotonic()
        with PlannerProcesses(job, store, lengths) as pool:
            last = [_KEYS.plan(epoch=one.epoch, step=one.step, dp_rank=dp - 1, pp_rank=PP - 1) for one in places]
            store.get(last[0], _WAIT_S)
            first_s, own_s = time.monotonic() - start_s, time.process_time()
            pids = [process.pid for process in pool.processes]
            before = [cpu_s(pid) for pid in (*pids, server.pid)]
            steps = read_steps(store, places[:count], dp, step_s)
            *planners, served = [cpu_s(pid) - s for pid, s in zip((*pids, server.pid), before, strict=True)]
            own_s = time.process_time() - own_s
            planned = count - 1 + sum(store.try_get(key) is not None for key in last[count:])
    reading_s = [one.reading_s for one in steps[1:]]
    kept = [one.late_s + one.reading_s <= step_s for one in steps[1:]]
    return {
        "ranks_planned": TP * PP * dp, "readers": RANKS, "samples": job.rule.batch_size, "workers": workers,
        "step_s": step_s, "steps": len(kept), "steps_kept": sum(kept), "first_plan_s": first_s,
        "reading_s": {"median": median(reading_s), "most": max(reading_s)},
        "most_late_s": max(one.late_s for one in steps[1:]),
        "cpu_s_a_step": {"planners": sum(planners) / planned, "store": served / count, "readers": own_s / count},
        "load": [load, os.getloadavg()[0]],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=scale.SHARED)
    parser.add_argument("--machine", default="")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--dp", type=int, default=16, help="replicas that are planned, of 64")
    parser.add_argument("--first-alone", action="store_true", help="measure first plans, and keep the other figures")
    args = parser.parse_args()
    first = {"first_plans": [first_plan(args.shared, pp) for pp in FIRST_PPS]}
    if args.first_alone:
        RESULT.write_text(json.dumps(json.loads(RESULT.read_text()) | first, indent=1) + "\n")
        print(json.dumps(first, indent=1))
        return 0
    row = first | measured(args.shared, dp=args.dp, workers=args.workers, step_s=args.step_s, seconds=args.seconds)
    RESULT.write_text(json.dumps({"format": FORMAT, **provenance(args.machine), **row}, indent=1) + "\n")
    print(json.dumps(row, indent=1))
    return 0 if row["steps_kept"] == row["steps"] else 1


if __name__ == "__main__":
    sys.exit(main())
