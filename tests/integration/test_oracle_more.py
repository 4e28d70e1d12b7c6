"""The oracle's question for rarer steps: an idle replica, cut samples, bfloat16 weights, a sharded optimizer.

Real megatron-core ranks over gloo with the strict transport, as in test_oracle.py. The oracle is one float32 process
that runs one row at a time, built here from the samples' tokens, without the planner's or the collator's help.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import LossNorm, MicroBatch, SampleLength, check_cover
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import lower
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.executor.stages.megatron.model import build_model, initialize_parallel, transformer_config
from dynapipe_ext.executor.stages.megatron.optimizer import MegatronOptimizer
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage, wrap_ddp
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import make_pipeline_groups
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.partitioning.rules import cut_fixed_rows
from dynapipe_ext.schedules.published.by_name import make_schedule_of_costs
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.settings.tables import OptimizerSettings
from tests.support.limits import LIMIT_S
from tests.support.megatron_ranks import CPU, costs_of, join, main_grads, planned, tensors_of, worst_error
from tests.support.rank_jobs import in_turn

NUM_LAYERS, NUM_SAMPLES, ROW_LEN = 2, 10, 48
TIED = Architecture.gpt(
    num_layers=NUM_LAYERS,
    hidden_size=32,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=64,
    gated_mlp=True,
    vocab_size=256,
    max_seq_len=64,
    tied_embeddings=True,
    position="rope",
    norm="rmsnorm",
    bias=False,
)
UNTIED = Architecture.gpt(
    num_layers=NUM_LAYERS,
    hidden_size=32,
    num_heads=4,
    num_query_groups=4,
    ffn_hidden_size=64,
    gated_mlp=False,
    vocab_size=256,
    max_seq_len=64,
    tied_embeddings=False,
    position="learned",
    norm="layernorm",
    bias=True,
)
DP2, PP2DP2, ALL = Topology(dp=2), Topology(pp=2, dp=2), Topology(tp=2, pp=2, dp=2)


@dataclass(frozen=True)
class Case:
    topology: Topology
    rule: str  # "idle": all on replica 0; "cut": fixed rows; "shared": packed documents on both replicas
    shape: Architecture = TIED
    loss_norm: LossNorm = "tokens"
    dtype: str = "float32"
    distributed: bool = False

    def __str__(self) -> str:
        t = self.topology
        words = [f"tp{t.tp}pp{t.pp}dp{t.dp}", self.rule, self.loss_norm, self.dtype, self.shape.position]
        return "-".join(words + ["zero1"] * self.distributed)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    gradient_error: float  # of step 0: the worst entry's, relative to the largest of its parameter's gradient
    gradient_dtypes: set[torch.dtype]
    start: dict[str, np.ndarray]  # parameters before the steps
    parameters: dict[str, np.ndarray]  # and after them


def samples_of(step: int) -> list[TokenSample]:
    rng = np.random.default_rng(300 + step)
    lengths = rng.integers(4, 41, NUM_SAMPLES)
    return [TokenSample(i, rng.integers(0, 256, n + 1), int(rng.integers(1, n + 1))) for i, n in enumerate(lengths)]


def oracle_rows(case: Case, samples: list[TokenSample]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens, labels, weights) of each row: every sample by itself, or for "cut" their stream in rows of ROW_LEN."""
    parts = []
    for sample in samples:
        targets = np.arange(1, len(sample.tokens)) >= sample.first_target
        weights = targets / (targets.sum() if case.loss_norm == "samples" else 1)
        parts.append([sample.tokens[:-1], sample.tokens[1:], weights])
    if case.rule == "cut":
        stream = [np.concatenate(part) for part in zip(*parts, strict=True)]
        places = range(0, len(stream[0]), ROW_LEN)
        parts = [[part[at : at + ROW_LEN] for part in stream] for at in places]
    return [tuple(torch.from_numpy(part)[None] for part in row) for row in parts]


def build(case: Case, topology: Topology, rank: int):
    initialize_parallel(topology, 0)
    config = transformer_config(case.shape, topology, dtype=case.dtype, sequence_parallel=False)
    model = build_model(case.shape, topology, topology.coordinates(rank).pp_rank, config, seed=7, device=CPU)
    ddp = wrap_ddp(model, config, distributed_optimizer=case.distributed)
    settings = OptimizerSettings(
        lr=1e-3, min_lr=1e-4, warmup_steps=1, weight_decay=0.01, clip_grad=0.5, distributed=case.distributed
    )
    return model, ddp, MegatronOptimizer([ddp], config, settings, num_steps=10)


def oracle(case: Case):
    """Returns (loss, {name: gradient}) of step 0 in one float32 process."""

    def main(env):
        join(env)
        _, ddp, _ = build(Case(Topology(), case.rule, case.shape), Topology(), 0)
        ddp.zero_grad_buffer()
        samples, loss_sum = samples_of(0), 0.0
        targets = sum(len(s.tokens) - s.first_target for s in samples)
        for tokens, labels, weights in oracle_rows(case, samples):
            positions = torch.arange(tokens.shape[1])[None]
            losses = ddp(tokens, positions, None, labels=labels)
            loss = (losses * weights).sum() / (targets if case.loss_norm == "tokens" else NUM_SAMPLES)
            loss.backward()
            loss_sum += float(loss.detach())
        gradients = {name: gradient.numpy().copy() for name, gradient in main_grads(ddp).items()}
        dist.destroy_process_group()
        return loss_sum, gradients

    return main


def step_plan_of(case: Case, step: int) -> StepPlan:
    lengths = [SampleLength(s.index, s.positions, 0, s.target) for s in samples_of(step)]
    if case.rule == "cut":
        replicas = cut_fixed_rows(lengths, row_len=ROW_LEN, dp=case.topology.dp)
    else:
        cuts = [lengths[:4], lengths[4:6], lengths[6:7], lengths[7:]]
        parts = [MicroBatch(tuple(cut), "packed", pad_multiple=4) for cut in cuts]
        replicas = [parts, []] if case.rule == "idle" else [parts[:1], parts[1:]]
    costs = costs_of(case.topology, replicas)
    schedules = [make_schedule_of_costs("1f1b", range(case.topology.pp), 1 << 40, c) for c in costs]
    step_plan = planned(step, replicas, schedules, costs, case.loss_norm)
    check_cover(step_plan.batch, lengths)
    return step_plan


def rank_main(case: Case, expected: dict[str, np.ndarray]):
    """Returns this rank's Outcome of two steps."""

    def main(env):
        join(env)
        topology, me = case.topology, case.topology.coordinates(env.rank)
        model, ddp, optimizer = build(case, topology, env.rank)
        groups = make_pipeline_groups(topology, env.rank, timeout_s=LIMIT_S)
        transport = StrictTransport(topology, env.rank, groups, timeout_s=LIMIT_S)
        executor = PipelineExecutor(MegatronStage([ddp]), transport)
        form = ActivationFormat(case.shape.hidden_size, dtype=case.dtype)
        losses, error, start = [], 0.0, values_of(model)
        for step in range(2):
            plans = lower(step_plan_of(case, step), form)
            for replica in plans:
                verify([p.instructions for p in replica], replica[0].stage_ranks, len(replica[0].micro_batches))
            plan, samples = plans[me.dp_rank][me.pp_rank], samples_of(step)
            batches = [tensors_of(m, samples, case.loss_norm) for m in plan.micro_batches]
            losses.append(executor.execute(plan, batches))
            if step == 0 and not case.distributed:  # whose gradients are in shards
                error = worst_error(case.shape, topology, env.rank, [model], expected)
            optimizer.step(ExecutedStep(plan, losses[-1]))
        dtypes = {gradient.dtype for gradient in main_grads(ddp).values()}
        transport.close()
        dist.barrier()
        dist.destroy_process_group()
        return Outcome(losses, error, dtypes, start, values_of(model))

    return main


def values_of(model) -> dict[str, np.ndarray]:
    return {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}


EXACT = [
    Case(DP2, "idle"),
    Case(ALL, "idle", UNTIED, "samples"),
    Case(DP2, "cut", UNTIED),
    Case(PP2DP2, "cut", loss_norm="samples"),
]
PLAIN, BFLOAT16 = Case(ALL, "shared"), Case(ALL, "shared", dtype="bfloat16")
SHARDED = replace(PLAIN, distributed=True)


@pytest.fixture(scope="module")
def alone():
    """The oracle's loss and gradients, by model, rows and norm."""
    jobs = {asked(case): (1, oracle(case)) for case in (*EXACT, PLAIN)}
    return {key: found for key, (found,) in in_turn(jobs).items()}


def asked(case: Case):
    return case.shape, case.rule == "cut", case.loss_norm


@pytest.fixture(scope="module")
def ran(alone) -> dict[Case, list[Outcome]]:
    """Of every rank, by case."""
    cases = (*EXACT, PLAIN, BFLOAT16, SHARDED)
    return in_turn({case: (case.topology.world_size, rank_main(case, alone[asked(case)][1])) for case in cases})


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_an_idle_replica_and_cut_samples_change_no_gradient(case, ran, alone):
    loss, _ = alone[asked(case)]
    if case.rule == "cut":
        pieces = [
            s for replica in step_plan_of(case, 0).batch.replicas for m in replica.micro_batches for s in m.samples
        ]
        assert any(piece.start for piece in pieces)
    outcomes = ran[case]
    for rank, outcome in enumerate(outcomes):
        assert outcome.losses[0] == pytest.approx(loss, rel=1e-5), f"rank {rank}"
        assert outcome.gradient_error <= 1e-5, f"rank {rank}"
        # The replicas went on as one, the idle one too.
        place = case.topology.coordinates(rank)
        twin = outcomes[case.topology.rank(tp_rank=place.tp_rank, pp_rank=place.pp_rank, dp_rank=0)]
        assert outcome.losses == twin.losses
        assert all(np.array_equal(outcome.parameters[name], wanted) for name, wanted in twin.parameters.items())


def test_bfloat16_weights_gather_float32_gradients_near_those_of_float32(ran, alone):
    loss, _ = alone[asked(BFLOAT16)]
    for rank, outcome in enumerate(ran[BFLOAT16]):
        assert outcome.gradient_dtypes == {torch.float32}
        assert outcome.losses[0] == pytest.approx(loss, rel=2e-3), f"rank {rank}"
        assert 1e-5 < outcome.gradient_error <= 2e-2, f"rank {rank}"


def test_the_distributed_optimizer_leaves_the_weights_of_the_plain_one(ran):
    for rank, (one, other) in enumerate(zip(ran[PLAIN], ran[SHARDED], strict=True)):
        assert other.losses == pytest.approx(one.losses, rel=1e-6)
        assert one.parameters.keys() == other.parameters.keys()
        for name, wanted in one.parameters.items():
            assert np.abs(other.parameters[name] - wanted).max() <= 1e-6, f"rank {rank}: {name}"
            assert np.abs(wanted - one.start[name]).max() > 1e-4, f"rank {rank}: {name} did not move"
