"""What this project adds to a step: CPU time of instructions and of the store, and growth over many steps.

    python tests/bench/overhead.py [--steps 2000] [--output results/overhead.json]

instructions: PP4 in one process over the inline transport, with a stage that does nothing; microseconds of CPU each.
store: 8 ranks (TP2 x PP2 x DP2) take the plans of steps of 65,000 tokens: signing, putting, getting, checking, decoding
and the server's own CPU time, as a share of the ranks' time in a step of one second.
actions: 64 micro-batches of one shape through a linear layer a stage, by `TorchStage` and the executor and by
torch.distributed.pipelining's own schedules, with the same loss, a step of each in turn in the same gloo processes;
microseconds that the thread of a rank computes for each F or B (and its process, with gloo's threads), mean of ranks,
median of 15 steps.
growth: a tiny model trains on 8 ranks (TP2 x PP2 x DP2) with batches of many shapes; memory of ranks and planner, and
what the store uses, after 200 steps and on. What a rank has to itself also grows as it writes to pages that it shared
with the process it was forked from; what is resident does not grow by these.
heap: what malloc has given out and not had back, thousand after thousand of calls: of steps of the null stage over the
inline transport; of plain torch.distributed, two ranks over gloo, that add up tensors of one size or of many. The
first 2,000 collectives fill the ring of torch's flight recorder, 1 KB each (not with TORCH_FR_BUFFER_SIZE=0).
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import redis
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

sys.path.insert(0, str(Path(__file__).parents[2]))

from contenders import provenance

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology, place_stages
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import StepPosition
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.plans.channel import StorePlanSource
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.store.address import Keys
from dynapipe_ext.executor.store.redis import RedisStore
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from dynapipe_ext.executor.wire import encode
from dynapipe_ext.launch.processes.cluster import run_local
from dynapipe_ext.launch.processes.env import RankEnv
from dynapipe_ext.launch.store import RedisServer
from dynapipe_ext.schedules.planner import Planner
from tests.support.preloaded import Preloaded
from tests.support.tiny_sizes import TINY_SIZES

RESULTS = Path(__file__).parent / "results"
TOKENS, KEY = 65_000, bytes(32)
LOOKS = (200, 600, 1000, 1400)  # steps after which memory is looked at, and before the last
CALLS, ROUNDS = 1000, 5
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


MICRO_BATCHES, POSITIONS, WIDTH, TURNS, UNTIMED = 64, 8, 16, 15, 3


def loss_sum(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output.square().mean(-1) * batch["loss_weights"]).sum()


def one_shape(pp: int, rounds: int) -> tuple[Topology, Any]:
    """A step of equal micro-batches under (interleaved) 1F1B."""
    topology = Topology(pp=pp, placement=place_stages("interleaved", pp, rounds) if rounds > 1 else ())
    planner = Planner(
        topology,
        TokenCosts(topology.num_stages),
        1e12,
        schedule="1f1b" if rounds == 1 else "interleaved-1f1b",
        max_tokens=POSITIONS,
        recompute="none",
        format=ActivationFormat(WIDTH, order="bsh"),
        collectives=ReplicaCollectives(),
    )
    plans = prove_step(planner, [SampleLength(i, POSITIONS) for i in range(MICRO_BATCHES)], step=0).plans[0]
    assert len(plans[0].micro_batches) == MICRO_BATCHES
    return topology, plans


def turns(env: RankEnv, topology: Topology, plan: Any) -> dict[str, list[tuple[float, float]]]:
    """CPU seconds of this rank's thread and process in each timed step, ours and torch's."""
    dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=env.world_size)
    context = ParallelContext(topology)
    ours = [torch.nn.Linear(WIDTH, WIDTH) for _ in context.stages]
    theirs = copy.deepcopy(ours)
    executor = PipelineExecutor(TorchStage(ours, loss_sum, parallel=context), context.transport)
    rows = torch.rand(MICRO_BATCHES, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1))
    batches = [{"tokens": row[None], "loss_weights": torch.ones(1, POSITIONS)} for row in rows]
    stages = [
        PipelineStage(module, stage, topology.num_stages, context.device)
        for module, stage in zip(theirs, context.stages, strict=True)
    ]
    weights = torch.ones(MICRO_BATCHES, POSITIONS)

    def mean_loss(output: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return loss_sum(output, {"loss_weights": weights}) / (MICRO_BATCHES * POSITIONS)

    options: Any = {"loss_fn": mean_loss, "scale_grads": False}
    schedule: Any = (
        Schedule1F1B(stages[0], MICRO_BATCHES, **options)
        if len(stages) == 1
        else ScheduleInterleaved1F1B(stages, MICRO_BATCHES, **options)
    )
    has_last = topology.num_stages - 1 in context.stages

    def torch_step() -> None:
        for module in theirs:
            module.zero_grad()
        inputs = (rows,) if env.rank == 0 else ()
        schedule.step(*inputs, **({"target": weights, "losses": []} if has_last else {}), return_outputs=False)

    steps: dict[str, Callable[[], object]] = {"ours": lambda: executor.execute(plan, batches), "torch": torch_step}
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(UNTIMED + TURNS):
        for name in sorted(steps, reverse=turn % 2 == 0):
            dist.barrier()
            thread_s, process_s = time.thread_time(), time.process_time()
            steps[name]()
            timed[name].append((time.thread_time() - thread_s, time.process_time() - process_s))
    dist.barrier()
    dist.destroy_process_group()
    return {name: pairs[UNTIMED:] for name, pairs in timed.items()}


def actions() -> dict[str, float]:
    figures: dict[str, float] = {}
    for pp, rounds in (2, 1), (4, 1), (2, 2):
        topology, plans = one_shape(pp, rounds)
        with tempfile.TemporaryDirectory() as folder:

            def main(env: RankEnv, folder: str = folder, topology: Topology = topology, plans: Any = plans) -> int:
                Path(folder, str(env.rank)).write_text(json.dumps(turns(env, topology, plans[env.rank])))
                return 0

            run_local(main, pp)
            ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(pp)]
        for name in ("ours", "torch"):
            for place, what in enumerate(("thread", "process")):
                means = [statistics.mean(rank[name][turn][place] for rank in ranks) for turn in range(TURNS)]
                figures[f"pp{pp}_stages{rounds}_{name}_{what}_us"] = (
                    statistics.median(means) / (2 * MICRO_BATCHES * rounds) * 1e6
                )
    return figures


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
                if step in (*LOOKS, num_steps - 20):
                    found[step] = _memory(command.pid) | {"store_mb": client.info("memory")["used_memory"] / 1e6}
            command.communicate(60)
        assert command.returncode == 0
    return {"steps": num_steps, "mb_after": found}


def _memory(launcher: int) -> dict[str, float]:
    """Megabytes that the largest rank, all ranks and planners have to themselves, and that are resident in a rank."""
    ranks, planners = [], []
    for process in psutil.Process(launcher).children(recursive=True):
        held = process.memory_full_info()
        (planners if any("planner_process" in word for word in process.cmdline()) else ranks).append(held)
    own_mb = [held.uss / 1e6 for held in ranks]
    return {
        "largest_rank_mb": max(own_mb),
        "ranks_mb": sum(own_mb),
        "resident_of_a_rank_mb": statistics.mean(held.rss for held in ranks) / 1e6,
        "planners_mb": sum(held.uss for held in planners) / 1e6,
    }


class _HeapState(ctypes.Structure):
    """glibc's `struct mallinfo2`, over all arenas."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def in_use_bytes() -> int:
    """What malloc has given out in this process and not had back."""
    heap = ctypes.CDLL("libc.so.6")
    heap.mallinfo2.restype = _HeapState
    state = heap.mallinfo2()
    return int(state.uordblks + state.hblkhd)


def growths(call: Callable[[], object]) -> list[float]:
    """Bytes a call that stay in use, of `CALLS` calls, `ROUNDS` times."""
    found = []
    for _ in range(ROUNDS):
        before = in_use_bytes()
        for _ in range(CALLS):
            call()
        gc.collect()
        found.append((in_use_bytes() - before) / CALLS)
    return found


def heap() -> dict[str, list[float]]:
    plan = proven(Topology()).plans[0][0]
    executor, batches = PipelineExecutor(NullStage(), InlineHub().transport(0)), [{}] * len(plan.micro_batches)
    found = {"null_stage_bytes_a_step": growths(lambda: executor.execute(plan, batches))}
    with tempfile.TemporaryDirectory() as folder:

        def main(env: RankEnv) -> int:
            dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=env.world_size)
            sizes = random.Random(0)
            same = growths(lambda: dist.all_reduce(torch.zeros(1000)))
            many = growths(lambda: dist.all_reduce(torch.zeros(sizes.randint(10, 5000))))
            Path(folder, str(env.rank)).write_text(json.dumps([same, many]))
            dist.barrier()
            dist.destroy_process_group()
            return 0

        run_local(main, 2)
        same, many = json.loads(Path(folder, "0").read_text())
    return found | {"gloo_one_size_bytes_a_call": same, "gloo_many_sizes_bytes_a_call": many}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="0: without the training run")
    parser.add_argument("--output", type=Path, default=RESULTS / "overhead.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    found: dict[str, Any] = {
        "heap": heap(),
        "instructions": instructions(),
        "actions": actions(),
        "store": store_path(),
    }
    if args.steps:
        found["growth"] = growth(args.steps)
    for name, figures in found.items():
        for figure, value in figures.items():
            print(f"{name:14}{figure:36}{value if isinstance(value, dict | list) else format(value, ',.4g')}")
    args.output.write_text(json.dumps({**provenance(args.machine), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
