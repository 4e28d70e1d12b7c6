"""Joined ranks train to the loss and gradients of one process: real megatron-core ranks, each on a slice of every row.

Rows are padded and packed, with pieces of cut samples; heads are more than the joined ranks, and fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute
from dynapipe_ext.batch.topology import ReplicaCollectives, Topology
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import ProvenStep, prove
from dynapipe_ext.executor.stages.joined_ranks import join_ranks
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import make_pipeline_groups
from dynapipe_ext.models.architecture import Architecture, LatentAttention
from dynapipe_ext.models.rope_scaling import Yarn
from tests.support.limits import LIMIT_S
from tests.support.megatron_ranks import (
    CPU,
    Case,
    Model,
    build_ddps,
    format_of,
    join,
    length_of,
    main_grads,
    samples_of,
    tensors_of,
    whole_name,
    worst_error,
)
from tests.support.pieces import hand_made, pieced_replicas, random_legal_schedule
from tests.support.rank_jobs import in_turn

# Of each replica one that is cut, and one that is not.
SAMPLES = [replace(samples_of(0)[number], index=index) for index, number in enumerate((1, 3, 2, 4))]
ONE = Topology()
DOUBLE = "float64"


class Windowed(Model):
    """Gemma 3's: windows whose layers turn by angles of their own, and an expert or two for each token."""

    @property
    def shape(self) -> Architecture:
        sizes = {"sliding_window": 6, "full_attention_every": 2, "local_rope_theta": 100.0}
        return replace(super().shape, num_experts=4, top_k=2, ffn_hidden_size=16, **sizes)


class Mixtral(Model):
    """Two of four experts for each token."""

    @property
    def shape(self) -> Architecture:
        return replace(super().shape, num_experts=4, top_k=2, ffn_hidden_size=16)


class Latent(Model):
    """DeepSeek's attention: keys and values of a latent vector, values narrower than keys, stretched positions."""

    @property
    def shape(self) -> Architecture:
        latent = LatentAttention(q_rank=12, kv_rank=8, plain_dim=8, rotary_dim=4, value_dim=6)
        yarn = Yarn(factor=4.0, original_max_seq_len=16, mscale=1.0, mscale_all_dim=1.0)
        return replace(super().shape, num_query_groups=4, head_dim=12, latent=latent, rope_scaling=yarn)


class TwoHeads(Model):
    """Fewer than joined ranks, which share them."""

    @property
    def shape(self) -> Architecture:
        return replace(super().shape, num_heads=2, num_query_groups=1, head_dim=16)


# Two layers where one stage has all: every layer exchanges with the joined ranks alike.
MODELS = {
    "gqa": Model(),
    "two layers": Model(num_layers=2),
    "learned": Model(tied=False, position="learned", modern=False),
    "one key": Model(key_heads=1, num_layers=2),
    "two heads": TwoHeads(num_layers=2),
    "latent": Latent(tied=False, num_layers=2),
    "windows and experts": Windowed(tied=False),
    "experts": Mixtral(tied=False, num_layers=2),
    "untied": Model(tied=False),
}
WORST = {"float32": 1e-5, DOUBLE: 1e-6}


Whole = tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]  # loss and gradients of whole samples, and weights


@dataclass(frozen=True)
class Kind:
    """A step: of whole samples in rows of a layout, or in pieces."""

    layout: str = "pieces"
    recompute: Recompute = "none"
    split: bool = False

    def __str__(self) -> str:
        return f"{self.layout} {self.recompute}{' split' * self.split}"


PIECES = (Kind(), Kind(recompute="selective", split=True), Kind(recompute="stage"))
ROWS = (Kind("padded", split=True), Kind("packed", recompute="full"))


@dataclass(frozen=True)
class Job:
    """Steps of every kind at every width, of one model on the ranks of one topology."""

    topology: Topology
    model: str = "gqa"
    dtype: str = "float32"
    sequence_parallel: bool = False
    kinds: tuple[Kind, ...] = PIECES + ROWS
    widths: tuple[int, ...] = (2, 4)
    ep: int = 1  # data parallel ranks that share experts

    @property
    def case(self) -> Case:
        options: dict[str, Any] = {"sequence_parallel": self.sequence_parallel, "dtype": self.dtype, "ep": self.ep}
        return Case(self.topology, model=MODELS[self.model], **options)


V = Topology(pp=2, dp=4, placement=(0, 1, 1, 0))
JOBS = {
    "v, fp64": Job(replace(V, dp=2), dtype=DOUBLE, kinds=PIECES[1:] + ROWS, widths=(2,)),
    "v of four, learned positions": Job(V, "learned", kinds=(PIECES[2], ROWS[0]), widths=(4,)),
    "tp": Job(Topology(tp=2, dp=4), "two layers", sequence_parallel=True, kinds=PIECES[:1], widths=(4,)),  # of 2 heads
    "two heads": Job(Topology(dp=4), "two heads", kinds=(PIECES[2], ROWS[0]), widths=(4,)),
    "tp, fp64": Job(Topology(tp=2, dp=2), "two layers", dtype=DOUBLE, kinds=(PIECES[1], ROWS[0]), widths=(2,)),
    "tp and v": Job(
        Topology(tp=2, pp=2, dp=2, placement=(0, 1, 1, 0)),
        sequence_parallel=True,
        kinds=(PIECES[1], ROWS[1]),
        widths=(2,),
    ),
    "windows and experts": Job(Topology(pp=2, dp=2), "windows and experts", dtype=DOUBLE, kinds=ROWS, widths=(2,)),
    "experts of two ranks": Job(Topology(dp=4), "experts", dtype=DOUBLE, kinds=PIECES[1:2], ep=2),
    "latent": Job(Topology(tp=2, dp=2), "latent", dtype=DOUBLE, sequence_parallel=True, kinds=ROWS, widths=(2,)),
    "latent without slices": Job(Topology(tp=2), "latent", dtype=DOUBLE, kinds=ROWS[:1], widths=(1,)),
    "one key": Job(Topology(dp=4), "one key", kinds=(PIECES[0], ROWS[1]), widths=(4,)),
    "head spread": Job(
        split_vocabulary(Topology(tp=2, pp=2, dp=2), "head"),
        "untied",
        dtype=DOUBLE,
        sequence_parallel=True,
        kinds=(PIECES[1], ROWS[1]),
        widths=(1, 2),
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What each rank of every job finds: of its steps the width, the kind, and errors of the loss and of gradients."""
    ways = {(job.model, job.dtype) for job in JOBS.values()}
    alone = in_turn({way: (1, partial(one_process, way)) for way in ways})
    whole = {way: of_rank for way, (of_rank,) in alone.items()}
    jobs = {}
    for name, job in JOBS.items():
        plans = {(kind, width): plans_of(job, kind, width) for kind, width in product(job.kinds, job.widths)}
        jobs[name] = job.topology.world_size, partial(steps, job, plans, whole[job.model, job.dtype])
    return in_turn(jobs)


def one_process(way: tuple[str, str], env) -> Whole:
    """One sample at a time."""
    join(env)
    model, dtype = way
    (ddp,) = build_ddps(Case(ONE, model=MODELS[model], dtype=dtype), ONE, env.rank)
    ddp.zero_grad_buffer()
    total = 0.0
    for sample in SAMPLES:
        batch = tensors_of(MicroBatch((length_of(sample),)), SAMPLES, "tokens")
        losses = ddp(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        loss = (losses * batch["loss_weights"]).sum() / sum(s.target for s in SAMPLES)
        loss.backward()
        total += float(loss.detach())
    gradients = {name: gradient.numpy().copy() for name, gradient in main_grads(ddp).items()}
    weights = {name: weight.detach().numpy().copy() for name, weight in ddp.module.named_parameters()}
    dist.destroy_process_group()
    return total, gradients, weights


def steps(
    job: Job, plans: Mapping[tuple[Kind, int], ProvenStep], whole: Whole, env
) -> list[tuple[int, str, float, float, int]]:
    join(env)
    topology, case = job.topology, job.case
    ddps = build_ddps(case, topology, env.rank)
    if job.ep > 1:
        fill_experts(case.model.shape, ddps, whole[2])
    groups = make_pipeline_groups(topology, env.rank, timeout_s=LIMIT_S)
    transport = StrictTransport(topology, env.rank, groups, timeout_s=LIMIT_S)
    joined = join_ranks(topology, env.rank, job.widths, CPU, timeout_s=LIMIT_S)
    strict = {width: ranks.taking_turns(transport.in_turn) for width, ranks in joined.items()}
    stage = MegatronStage(ddps, joined=strict)
    errors = []
    me = topology.coordinates(env.rank)
    for (kind, width), proven in plans.items():
        plan = proven.plan_of(me.dp_rank, me.pp_rank)
        batches = [tensors_of(m, SAMPLES, "tokens") for m in plan.micro_batches]
        loss = PipelineExecutor(stage, transport).execute(plan, batches)
        worst = worst_error(case.model.shape, topology, env.rank, [ddp.module for ddp in ddps], whole[1])
        errors.append((width, str(kind), abs(loss - whole[0]) / whole[0], worst, stage.held_bytes()))
    transport.close()
    dist.destroy_process_group()
    return errors


def fill_experts(shape: Architecture, ddps: Sequence[Any], weights: Mapping[str, np.ndarray]) -> None:
    """Those of the only stage, which drew them by their numbers on this rank."""
    for name, parameter in ddps[0].module.named_parameters():
        if "local_experts" in name:
            parameter.data.copy_(torch.from_numpy(weights[whole_name(shape, name, 0)]))


def plans_of(job: Job, kind: Kind, width: int) -> ProvenStep:
    """All ranks' proven plans of a random step."""
    topology, random = job.topology.at_width(width), Random(f"{job}{kind}")
    shards = topology.tp if job.sequence_parallel else 1
    replicas = replicas_of(kind, topology.num_replicas, random, pad_multiple=shards * width)
    schedules = [random_legal_schedule(topology, own, random, split=kind.split) for own in replicas]
    form = replace(format_of(job.case), dtype=job.dtype)
    return prove(hand_made(topology, replicas, schedules), form, ReplicaCollectives.of_zero(0, ep=job.ep))


def replicas_of(kind: Kind, num_replicas: int, random: Random, *, pad_multiple: int) -> list[list[MicroBatch]]:
    if kind.layout == "pieces":
        return pieced_replicas(SAMPLES, num_replicas, kind.recompute, random, pad_multiple=pad_multiple)
    replicas = []
    for number in range(num_replicas):
        own = [length_of(sample) for sample in SAMPLES[number::num_replicas]]
        cut = random.randrange(1, len(own))
        parts = [tuple(own[:cut]), tuple(own[cut:])]
        replicas.append([MicroBatch(p, kind.layout, kind.recompute, pad_multiple=pad_multiple) for p in parts])
    return replicas


@pytest.mark.parametrize("name", JOBS)
def test_joined_ranks_have_loss_and_gradients_of_one_process(name: str, found) -> None:
    job = JOBS[name]
    for of_rank in found[name]:
        assert len(of_rank) == len(job.kinds) * len(job.widths)
        for width, kind, loss_error, gradient_error, held_bytes in of_rank:
            assert loss_error <= WORST[job.dtype], (width, kind)
            assert gradient_error <= WORST[job.dtype], (width, kind)
            assert held_bytes == 0, (width, kind)
