"""What this project adds to a step: CPU time of instructions and of the store, and growth over many steps.

    python tests/bench/overhead.py [--steps 2000] [--output results/overhead.json]

instructions: PP4 in one process over the inline transport, with a stage that does nothing; microseconds of CPU each.
store: 8 ranks (TP2 x PP2 x DP2) take the plans of steps of 65,000 tokens: signing, putting, getting, checking, decoding
and the server's own CPU time, as a share of the ranks' time in a step of one second.
growth: a tiny model trains on 8 ranks (TP2 x PP2 x DP2) with batches of many shapes; resident memory of ranks and
planner, and the memory that the store uses, after 200 steps and after all.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import redis

sys.path.insert(0, str(Path(__file__).parents[2]))

from contenders import provenance

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.collectives import ReplicaCollectives
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.plans.source import StorePlanSource
from dynapipe_ext.executor.plans.step_positions import StepPosition
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.store.keys import Keys
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.executor.wire import encode
from dynapipe_ext.launch.redis_server import RedisServer
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.topology import Topology
from tests.support.preloaded import Preloaded
from tests.support.tiny_sizes import TINY_SIZES

RESULTS = Path(__file__).parent / "results"
TOKENS, KEY = 65_000, bytes(32)
EARLY = 200  # steps, after which nothing should grow
JOB = """
[run]
steps = {steps}
log_every = 20
[topology]
tp = 2
pp = 2
dp = 2
[model]
num_layers = 2
{sizes}max_seq_len = 256
[data]
num_samples = 4000
tokenizer = "bytes"
truncate = true
tokens_per_batch = 1024
num_workers = 1
"""


class NullStage:
    """Does nothing, at once."""

    def start_step(self, plan: Any) -> None: ...

    def load(self, micro_batch: int, batch: Any) -> None: ...

    def forward(self, stage: int, micro_batch: int, inputs: Any) -> Any:
        return ()

    def backward(self, stage: int, micro_batch: int, output_grads: Any) -> Any:
        return ()

    def backward_input(self, stage: int, micro_batch: int, output_grads: Any) -> Any:
        return ()

    def backward_weight(self, stage: int, micro_batch: int) -> None: ...

    def finish_step(self) -> float:
        return 0.0

    def held_bytes(self) -> int:
        return 0


def proven(topology: Topology, *, step: int = 0) -> Any:
    """The step of about `TOKENS` tokens in samples of very different lengths."""
    lengths = np.clip(np.random.default_rng(step).lognormal(4.6, 1.1, 2000).astype(int), 8, 4096)
    chosen = lengths[: int(np.searchsorted(np.cumsum(lengths), TOKENS))]
    samples = [SampleLength(i, int(length)) for i, length in enumerate(chosen)]
    planner = Planner(
        topology, TokenCosts(topology.num_stages), 1e12, format=ActivationFormat(4096), collectives=ReplicaCollectives()
    )
    return prove_step(planner, samples, step=step)


def instructions(num_steps: int = 40) -> dict[str, float]:
    plans = proven(Topology(pp=4)).plans[0]
    hub, count = InlineHub(), sum(len(plan.instructions) for plan in plans)
    costs_us = []

    def run(plan: Any) -> None:
        executor = PipelineExecutor(NullStage(), hub.transport(plan.pp_rank))
        for _ in range(num_steps):
            executor.execute(plan, [{}] * len(plan.micro_batches))

    for _ in range(3):
        threads = [threading.Thread(target=run, args=(plan,)) for plan in plans]
        begun_s = time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        costs_us.append((time.process_time() - begun_s) / count / num_steps * 1e6)
    return {"instructions_a_step": count, "cpu_us_an_instruction": min(costs_us)}


def store_path(num_steps: int = 40) -> dict[str, float]:
    topology, keys = Topology(tp=2, pp=2, dp=2), Keys("bench/1")
    steps = [proven(topology, step=step) for step in range(4)]
    with RedisServer() as server, RedisStore(server.address, namespace="bench") as store:
        sources = [
            StorePlanSource(
                store, keys, KEY, dp_rank=me.dp_rank, pp_rank=me.pp_rank, num_planners=1, timeout_s=60.0,
                marks_taken=rank == 0,
            )
            for rank in range(topology.world_size)
            for me in [topology.coordinates(rank)]
        ]  # fmt: skip
        process, num_bytes, costs_s = psutil.Process(server.pid), 0, []
        for number in range(num_steps):
            step = steps[number % len(steps)]
            server_s, begun_s = sum(process.cpu_times()[:2]), time.process_time()
            for plan in (plan for replica in step.plans for plan in replica):
                key = keys.plan(epoch=0, step=plan.step, dp_rank=plan.dp_rank, pp_rank=plan.pp_rank)
                data = encode(plan, KEY, context=key.encode())
                num_bytes += len(data)
                store.put(key, data)
            for source in sources:
                source.plan(StepPosition(0, number % len(steps), number % len(steps)))
            costs_s.append(time.process_time() - begun_s + sum(process.cpu_times()[:2]) - server_s)
    mean_s = statistics.mean(costs_s)
    return {
        "plan_bytes_a_step": num_bytes / num_steps,
        "cpu_ms_a_step_of_all_processes": 1e3 * mean_s,
        "share_of_8_ranks_in_a_step_of_1_s": mean_s / topology.world_size,
    }


def growth(num_steps: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="overhead-", dir="/tmp"))
    (folder / "job.toml").write_text(JOB.format(steps=num_steps, sizes=TINY_SIZES))
    found: dict[int, dict[str, float]] = {}
    with RedisServer() as server, Preloaded() as preloaded:
        password = server.address.password
        client = redis.Redis.from_url(server.address.url, password=password)
        words = ["train", "--config", "job.toml", "--run-dir", "run", "--store", server.address.url]
        variables = {"DYNAPIPE_STORE_PASSWORD": password, "GLOO_SOCKET_IFNAME": "lo"}
        with preloaded.started(words, cwd=folder, environment=variables) as command:
            for line in command.stderr:
                step = int((re.match(r"step (\d+) ", line) or ["", "0"])[1])
                if step in (EARLY, num_steps - 20):
                    found[step] = _memory(command.pid) | {"store_mb": client.info("memory")["used_memory"] / 1e6}
            command.communicate(60)
        assert command.returncode == 0
    return {"steps": num_steps, "mb_after": found}


def _memory(launcher: int) -> dict[str, float]:
    """Resident megabytes of their own (pages that processes share left out): the largest rank, all ranks, planners."""
    ranks, planners = [], []
    for process in psutil.Process(launcher).children(recursive=True):
        own_mb = process.memory_full_info().uss / 1e6
        (planners if any("planner_process" in word for word in process.cmdline()) else ranks).append(own_mb)
    return {"largest_rank_mb": max(ranks), "ranks_mb": sum(ranks), "planners_mb": sum(planners)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="0: without the training run")
    parser.add_argument("--output", type=Path, default=RESULTS / "overhead.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    found: dict[str, Any] = {"instructions": instructions(), "store": store_path()}
    if args.steps:
        found["growth"] = growth(args.steps)
    for name, figures in found.items():
        for figure, value in figures.items():
            print(f"{name:14}{figure:36}{value if isinstance(value, dict) else format(value, ',.4g')}")
    args.output.write_text(json.dumps({**provenance(args.machine), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
