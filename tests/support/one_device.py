"""Ranks that share one device, each a process, and the same steps in one process on the CPU.

A process that sees no device keeps in a folder what the models of JOBS learn one sample at a time, in float32. Then a
process for every rank keeps what this rank learns by its plans. `steps_on_one_device` starts them all, and
`peaks_on_one_device` those that measure memory. Without CUDA the device is the CPU: there JOBS run, too.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import ReplicaCollectives, Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.data.batches import collate
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.measuring.rate import MegatronLayers, measure_rate
from dynapipe_ext.executor.proven_step import ProvenStep, prove, prove_step
from dynapipe_ext.executor.stages.joined_ranks import join_ranks
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.executor.transport.torch_p2p import TorchP2PTransport, make_pipeline_groups
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from tests.support import staged_group
from tests.support.megatron_ranks import (
    CPU,
    Case,
    Model,
    build,
    build_trained,
    format_of,
    length_of,
    main_grads,
    samples_of,
    step_plan_of,
    tensors_of,
    worst_error,
)
from tests.support.pieces import hand_made, pieced_replicas, random_legal_schedule
from tests.support.rank_jobs import forget_models
from tests.support.rank_results import read, write

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
NUM_RANKS, NUM_STEPS = 4, 2
LIMIT_S = 150.0  # of one start of processes
WAIT_S = 100.0  # of one rank for another
ROOT = Path(__file__).parents[2]
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Job:
    """Steps of a case: of its uneven micro-batches, or of samples in pieces and in a random order."""

    case: Case
    pieces: bool = False

    def step_plan(self, step: int) -> StepPlan:
        case = self.case
        if not self.pieces:
            return step_plan_of(case, step)
        random, topology = Random(step), case.topology
        replicas = pieced_replicas(samples_of(step), topology.num_replicas, case.recompute, random)
        split = case.weights_lag is not None
        schedules = [random_legal_schedule(topology, own, random, split=split) for own in replicas]
        return hand_made(topology, replicas, schedules)

    def proven(self, step: int) -> ProvenStep:
        form = replace(format_of(self.case), dtype=self.case.dtype)
        return prove(self.step_plan(step), form, ReplicaCollectives.of_zero(int(self.case.distributed_optimizer)))


V = Topology(pp=2, placement=(0, 1, 1, 0))
TIED, UNTIED, GPT2 = Model(), Model(tied=False), Model(tied=False, position="learned", modern=False)
JOBS = {
    "tp2 pp2, sequence parallel": Job(Case(Topology(tp=2, pp=2), "packed", TIED, sequence_parallel=True)),
    "two chunks as a V": Job(Case(V, model=GPT2, schedule="adaptive")),
    "split backwards": Job(Case(Topology(pp=2), "packed", UNTIED, weights_lag=2)),
    "pieces": Job(Case(Topology(pp=2), model=TIED, recompute="selective", weights_lag=0), pieces=True),
    "width 2": Job(Case(Topology(dp=2, width=2), "packed", TIED)),
    "width 2, pieces on a V": Job(Case(replace(V, dp=2, width=2), model=TIED), pieces=True),
    "distributed optimizer": Job(Case(Topology(dp=2), "packed", UNTIED, distributed_optimizer=True)),
}


@dataclass(frozen=True)
class AloneStep:
    """`moves`: by how much the update has changed each weight."""

    loss: float
    norm: float
    gradients: dict[str, np.ndarray]
    moves: dict[str, np.ndarray]


@dataclass(frozen=True)
class RankStep:
    """`error`: of the worst gradient, relative to the largest entry of its parameter's. Under a distributed optimizer a
    rank has a shard of the gradients: there it is that of all weights' moves, relative to these."""

    loss: float
    norm: float
    error: float


@dataclass(frozen=True)
class Peak:
    predicted_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class Found:
    alone: dict[Model, list[AloneStep]]
    of_ranks: list[dict[tuple[str, str], list[RankStep]]]  # of each rank, by the jobs that it is in and their dtypes


def steps_on_one_device(folder: Path) -> Found:
    """Errors: AssertionError with what processes wrote that failed or were late."""
    run_all({"alone": "keep_alone()"}, folder, {"CUDA_VISIBLE_DEVICES": ""})
    run_all({f"rank{rank}": f"keep_steps({rank})" for rank in range(NUM_RANKS)}, folder, {})
    return Found(read(folder / "alone"), [read(folder / f"rank{rank}") for rank in range(NUM_RANKS)])


def peaks_on_one_device(folder: Path) -> list[Peak]:
    """Of each rank of LARGE. Errors: as of `steps_on_one_device`."""
    run_all({f"peak{rank}": f"keep_peak({rank})" for rank in range(NUM_RANKS)}, folder, {})
    return [read(folder / f"peak{rank}") for rank in range(NUM_RANKS)]


def run_all(calls: Mapping[str, str], folder: Path, variables: Mapping[str, str]) -> None:
    """A process for each of these calls of this module, in the folder. A fork could not use a device that the process
    before it has used: these are fresh."""
    paths = os.pathsep.join([*(path or os.getcwd() for path in sys.path), str(ROOT)])  # modules are those of here
    own = {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment = {**os.environ, **own, **variables}
    end_s, processes = time.monotonic() + LIMIT_S, {}
    try:
        for name, call in calls.items():
            command = [sys.executable, "-P", "-c", f"from tests.support import one_device; one_device.{call}"]
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        while time.monotonic() < end_s and (running := [p for p in processes.values() if p.poll() is None]):
            if any(process.returncode for process in processes.values()):
                break
            with suppress(subprocess.TimeoutExpired):
                running[0].wait(0.2)
    finally:
        codes = {name: process.poll() for name, process in processes.items()}
        for process in processes.values():
            process.kill()
            process.wait()
    logs = {
        name: (folder / f"{name}.log").read_text(errors="replace")[-4000:] for name, code in codes.items() if code != 0
    }
    assert not logs, "\n".join(f"{name} ended with {codes[name]}:\n{log}" for name, log in logs.items())


def begin() -> None:
    """What every process begins with: before the limit, it shows where it is and ends."""
    faulthandler.dump_traceback_later(LIMIT_S - 30, exit=True)
    torch.set_num_threads(1)


def begin_rank() -> None:
    begin()
    staged_group.register()
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)


def keep_alone() -> None:
    begin()
    assert not torch.cuda.is_available()
    models = dict.fromkeys(job.case.model for job in JOBS.values())
    write({model: alone(number, model) for number, model in enumerate(models)}, Path("alone"))


def keep_steps(rank: int) -> None:
    begin_rank()
    expected, found = read(Path("alone")), {}
    for name, dtype in product(JOBS, DTYPES):
        job = replace(JOBS[name], case=replace(JOBS[name].case, dtype=dtype))
        size = job.case.topology.world_size
        if rank < size:
            try:
                with in_world(rank, size, f"{name} {dtype}"):
                    found[name, dtype] = steps_of(job, expected[job.case.model], rank)
            except Exception as error:
                error.add_note(f"in the job {name}, {dtype}")
                raise
    write(found, Path(f"rank{rank}"))


def keep_peak(rank: int) -> None:
    begin_rank()
    write(peak_of(rank), Path(f"peak{rank}"))


def alone(number: int, model: Model) -> list[AloneStep]:
    """Steps of one process, one sample at a time."""
    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/meeting alone {number}", rank=0, world_size=1)
    _, ddp, optimizer = build(Case(Topology(), model=model), Topology(), 0)
    steps = []
    for step in range(NUM_STEPS):
        ddp.zero_grad_buffer()
        for parameter in ddp.parameters():
            parameter.grad = None
        samples, total = samples_of(step), 0.0
        for sample in samples:
            batch = tensors_of(MicroBatch((length_of(sample),)), samples, "tokens")
            losses = ddp(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            loss = (losses * batch["loss_weights"]).sum() / sum(s.target for s in samples)
            loss.backward()
            total += float(loss.detach())
        gradients = {name: gradient.numpy().copy() for name, gradient in main_grads(ddp).items()}
        before = weights_of(ddp)
        norm = optimizer.update()
        steps.append(AloneStep(total, norm, gradients, moves_of(ddp, before)))
    forget_models()
    dist.destroy_process_group()
    return steps


def weights_of(ddp: Any) -> dict[str, np.ndarray]:
    return {name: weight.detach().float().cpu().numpy().copy() for name, weight in ddp.module.named_parameters()}


def moves_of(ddp: Any, before: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: weight - before[name] for name, weight in weights_of(ddp).items()}


def moves_error(moves: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    assert moves.keys() == expected.keys()
    differences = sum(float(np.abs(move - expected[name]).sum()) for name, move in moves.items())
    return differences / sum(float(np.abs(move).sum()) for move in expected.values())


@contextmanager
def in_world(rank: int, size: int, name: str) -> Iterator[None]:
    """In a job of so many ranks that share the device; its models and groups are forgotten afterwards."""
    dist.init_process_group(
        staged_group.STAGED,
        init_method=f"file://{Path.cwd()}/meeting {name}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=WAIT_S),
    )
    yield
    forget_models()
    dist.destroy_process_group()


def batches_of(proven: ProvenStep, topology: Topology, rank: int, samples: Sequence[TokenSample]) -> list[Any]:
    """This rank's batches, as a loader gives them: pinned where they go to a device."""
    me, batches = topology.coordinates(rank), []
    for micro_batch in proven.plan_of(me.dp_rank, me.pp_rank).micro_batches:
        arrays = collate(micro_batch, [samples[s.index] for s in micro_batch.samples])
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        batches.append({name: x.pin_memory() for name, x in tensors.items()} if DEVICE.type == "cuda" else tensors)
    return batches


def executor_of(topology: Topology, rank: int, ddps: Sequence[Any]) -> PipelineExecutor:
    groups = make_pipeline_groups(topology, rank, timeout_s=WAIT_S)
    joined = join_ranks(topology, rank, (topology.width,), DEVICE, timeout_s=WAIT_S)
    transport = TorchP2PTransport(topology, rank, groups, device=DEVICE, timeout_s=WAIT_S)
    return PipelineExecutor(MegatronStage(ddps, measure_bytes=False, joined=joined), transport)


def steps_of(job: Job, expected: Sequence[AloneStep], rank: int) -> list[RankStep]:
    """Whole training steps of a rank by its plans."""
    case, topology = job.case, job.case.topology
    me = topology.coordinates(rank)
    ddps, optimizer = build_trained(case, topology, rank, DEVICE)
    assert all(parameter.device == DEVICE for ddp in ddps for parameter in ddp.parameters())
    executor = executor_of(topology, rank, ddps)
    steps = []
    for step, wanted in enumerate(expected):
        proven = job.proven(step)
        plan = proven.plan_of(me.dp_rank, me.pp_rank)
        loss = executor.execute(plan, batches_of(proven, topology, rank, samples_of(step)))
        gradient_error = None
        if not case.distributed_optimizer:
            models = [ddp.module for ddp in ddps]
            gradient_error = worst_error(case.model.shape, topology, rank, models, wanted.gradients)
        before = weights_of(ddps[0])
        norm = optimizer.step(ExecutedStep(plan, loss))
        assert isinstance(norm, float), norm
        if gradient_error is None:  # then this rank has all stages, and weights whole
            steps.append(RankStep(loss, norm, moves_error(moves_of(ddps[0], before), wanted.moves)))
        else:
            steps.append(RankStep(loss, norm, gradient_error))
    return steps


class Large(Model):
    """So large that what libraries take for themselves is little beside it."""

    @property
    def shape(self) -> Architecture:
        return Architecture.gpt(
            num_layers=4,
            hidden_size=1024,
            num_heads=8,
            num_query_groups=8,
            ffn_hidden_size=2816,
            gated_mlp=True,
            vocab_size=32000,
            max_seq_len=8192,
            tied_embeddings=False,
            position="rope",
            norm="rmsnorm",
            bias=False,
        )


LARGE = Case(Topology(tp=2, pp=2), "packed", Large(), sequence_parallel=True, dtype="bfloat16")
NUM_SAMPLES, LIMIT_BYTES = 6, 10e9  # samples of half a row to a whole one


def measured_costs(case: Case) -> AnalyticCosts:
    """As a run without a file of costs begins: counted, by what this device does with a few layers."""
    shape = case.model.shape
    rate = measure_rate(MegatronLayers(shape, case.dtype, DEVICE), dtype=case.dtype, layout=case.layout)
    return AnalyticCosts(
        shape.padded(),
        case.topology,
        flops_per_s=rate.flops_per_s,
        overhead_ns=0,
        layer_overhead_ns=rate.layer_overhead_ns,
        layer_bytes_factor=rate.layer_bytes_factor,
        head_bytes_factor=rate.head_bytes_factor,
        flash=rate.flash,
        sequence_parallel=case.sequence_parallel,
    )


def peak_of(rank: int) -> Peak:
    """The most bytes that were allocated within a planned step, the second one, beside what its plan says."""
    topology, shape, costs_file = LARGE.topology, LARGE.model.shape, Path("costs")
    if rank == 0:  # before it meets the others, which thereby wait for it
        costs_file.write_bytes(pickle.dumps(measured_costs(LARGE)))
        gc.collect()
    with in_world(rank, topology.world_size, "peak"):
        costs = pickle.loads(costs_file.read_bytes())
        form = replace(format_of(LARGE), dtype=LARGE.dtype)
        planner = Planner(topology, costs, LIMIT_BYTES, format=form, layout=LARGE.layout, max_tokens=shape.max_seq_len)
        random = np.random.default_rng(0)
        lengths = random.integers(shape.max_seq_len // 2, shape.max_seq_len, NUM_SAMPLES)
        samples = [TokenSample(i, random.integers(1, shape.vocab_size, n + 1), 1) for i, n in enumerate(lengths)]
        proven = prove_step(planner, [length_of(sample) for sample in samples], step=0)
        me = topology.coordinates(rank)
        plan, batches = proven.plan_of(me.dp_rank, me.pp_rank), batches_of(proven, topology, rank, samples)
        ddps, optimizer = build_trained(LARGE, topology, rank, DEVICE)
        executor = executor_of(topology, rank, ddps)
        optimizer.step(ExecutedStep(plan, executor.execute(plan, batches)))
        torch.cuda.reset_peak_memory_stats(DEVICE)
        executor.execute(plan, batches)
        peak = Peak(plan.prediction.peak_bytes[me.pp_rank], torch.cuda.max_memory_allocated(DEVICE))
        del executor, ddps, optimizer
    return peak
