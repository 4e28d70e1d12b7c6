"""Deterministic mode: the same micro-batches train the same bits, however they are ordered, dealt and laid out.

Real megatron-core ranks over gloo. Each run trains the same five uneven micro-batches a step, with a tied embedding,
dropout and a norm that is clipped; all are compared with one rank (with one replica of one stage where TP is 2).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import ReplicaCollectives, Topology
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.checkpoints.folder import RunState, latest
from dynapipe_ext.executor.checkpoints.megatron_checkpoint import CheckpointSaver, load_checkpoint
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import lower
from dynapipe_ext.executor.proof import verify_step, with_collectives
from dynapipe_ext.executor.stages import chunk_runner
from dynapipe_ext.executor.stages.joined_ranks import join_ranks
from dynapipe_ext.executor.stages.megatron.exact import ExactMegatronGradients
from dynapipe_ext.executor.stages.megatron.head import part_of
from dynapipe_ext.executor.stages.megatron.model import held_weights
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import make_pipeline_groups
from dynapipe_ext.launch.processes.env import RankEnv
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.given_costs import write_costs
from tests.support.limits import LIMIT_S
from tests.support.megatron_ranks import (
    CPU,
    Case,
    Model,
    build_trained,
    format_of,
    join,
    samples_of,
    step_plan_of,
    tensors_of,
)
from tests.support.preloaded import Preloaded
from tests.support.rank_jobs import in_turn
from tests.support.tiny_sizes import TINY_SIZES

NUM_STEPS, SAVED = 2, 1
FEW = (2, 1, 1, 2, 1)  # samples of each micro-batch
GPT2, MODERN = Model(modern=False, position="learned"), Model()
V, INTERLEAVED = Topology(pp=2, placement=(0, 1, 1, 0)), Topology(pp=2, placement=(0, 1, 0, 1))
REVERSED, SHUFFLED = ((4, 3, 2, 1, 0),), ((2, 0, 4, 1, 3),)


@dataclass(frozen=True)
class Run:
    case: Case
    saves: bool = False  # a checkpoint after step SAVED
    resumes: bool = False  # from that of another run

    def __str__(self) -> str:
        return f"{self.case}{'-resumed' * self.resumes}"


def exact(topology: Topology, schedule: str = "1f1b", **options) -> Case:
    settings = {"model": GPT2, "dropout": 0.1, "is_deterministic": True} | options
    return Case(topology, schedule=schedule, **settings)


def exact_tp(topology: Topology, **options) -> Case:
    return exact(topology, model=MODERN, sequence_parallel=True, layout="packed", **options)


WHOLE, WHOLE_TP = Run(exact(Topology())), Run(exact_tp(Topology(tp=2)))
JOINED = Run(exact(Topology(dp=2, width=2)))  # whose products are over slices of rows: bits hold for one width
UNTIED = replace(GPT2, tied=False)
SPREAD = Run(exact(split_vocabulary(Topology(pp=2), "head"), "adaptive", model=UNTIED))  # part 1, and then part 0
RUNS = [
    WHOLE,
    Run(exact(Topology(), deal=REVERSED, recompute="selective")),
    Run(exact(Topology(), deal=SHUFFLED, weights_lag=2)),
    WHOLE_TP,
    Run(exact(Topology(pp=2), "adaptive", deal=SHUFFLED), saves=True),
    Run(exact(V, "zb-v")),
    Run(exact(Topology(dp=2), deal=((3, 0), (4, 1, 2)), distributed_optimizer=True)),
    Run(exact(Topology(pp=4), "zb-h1", deal=REVERSED, recompute="full")),
    Run(exact(replace(INTERLEAVED, dp=2), "adaptive", deal=((0, 2), (4, 3, 1))), resumes=True),
    Run(exact_tp(Topology(tp=2, pp=2), deal=REVERSED, recompute="head+full")),
    Run(exact(Topology(pp=2), deal=SHUFFLED, weights_lag=1, recompute="head")),
    JOINED,
    Run(exact(replace(V, dp=2, width=2), "zb-v", deal=SHUFFLED)),
    SPREAD,
    Run(replace(SPREAD.case, deal=SHUFFLED, weights_lag=1, recompute="head+full")),
    Run(
        exact(
            split_vocabulary(replace(INTERLEAVED, dp=2), "head"),
            "adaptive",
            model=UNTIED,
            deal=((3, 0), (4, 1, 2)),
            distributed_optimizer=True,
        )
    ),
    Run(exact(Topology(dp=4, width=2), deal=((3, 0), (4, 1, 2)), distributed_optimizer=True, recompute="full")),
]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]  # this rank's


def train(run: Run, root: Path, env: RankEnv) -> Trained:
    chunk_runner.HEAD_SLICE = 7  # exact sums have it in slices whatever a plan says
    join(env)
    case, topology, rank = run.case, run.case.topology, env.rank
    me = topology.coordinates(rank)
    chunks, optimizer = build_trained(case, topology, rank)
    groups = make_pipeline_groups(topology, rank, timeout_s=LIMIT_S)
    transport = StrictTransport(topology, rank, groups, timeout_s=LIMIT_S)
    joined = join_ranks(topology, rank, [topology.width], CPU, timeout_s=LIMIT_S)
    exact_sums = ExactMegatronGradients(chunks)
    stage = MegatronStage(chunks, gradients=exact_sums, dropout=case.dropout > 0, joined=joined)
    executor = PipelineExecutor(stage, transport)
    form = format_of(case)
    losses, norms = [], []
    with CheckpointSaver(root, chunks, optimizer, {}) as saver:
        if run.resumes:
            losses += load_checkpoint(latest(root), chunks, optimizer, model={}).run.recent_losses
        for step in range(len(losses), NUM_STEPS):
            plans = lower(step_plan_of(case, step, FEW), form)
            programs = [[plan.instructions for plan in replica] for replica in plans]
            first, width = plans[0][0], topology.width
            events = with_collectives(programs, ReplicaCollectives(), width=width)
            verify_step(events, first.stage_ranks, first.num_micro_batches, width=width)
            plan, samples = plans[me.dp_rank // topology.width][me.pp_rank], samples_of(step)
            batches = [tensors_of(m, samples, case.loss_norm) for m in plan.micro_batches]
            losses.append(executor.execute(plan, batches))
            norms.append(optimizer.step(ExecutedStep(plan, losses[-1], stage.losses())))
            if run.saves and step + 1 == SAVED:
                saver.save(state_of(step + 1, losses))
    transport.close()
    weights = {
        f"{name} of tp {me.tp_rank}, part {part_of(weight)}": weight.detach().clone()
        for chunk in chunks
        for name, weight in held_weights(chunk.module)
    }
    dist.barrier()
    dist.destroy_process_group()
    return Trained(losses, norms, weights)


def state_of(step: int, losses: list[float]) -> RunState:
    costs = TokenCosts(num_stages=2)
    return RunState(
        step=step,
        num_samples=0,
        loader={"global_step": step},
        model={},
        settings={},
        costs=cost_model_to_json(costs),
        costs_fingerprint=costs.fingerprint(),
        recent_losses=tuple(losses),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[Run, list[Trained]]:
    """Every run's ranks."""
    root = tmp_path_factory.mktemp("checkpoints")
    return in_turn({run: (run.case.topology.world_size, partial(train, run, root)) for run in RUNS})


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_losses_norms_and_weights_have_the_bits_of_one_replica_of_one_stage(trained, run):
    """Of one pipeline whose head is in parts where that of the run is: they hold for one order of the parts."""
    topology = run.case.topology
    of_stages = SPREAD if topology.vocabulary != "whole" else JOINED if topology.width > 1 else WHOLE
    whole = trained[WHOLE_TP if topology.tp > 1 else of_stages]
    expected = {name: weight for rank in whole for name, weight in rank.weights.items()}
    seen = set()
    for number, rank in enumerate(trained[run]):
        assert rank.losses == whole[0].losses, f"rank {number}"
        assert rank.norms == whole[0].norms[-len(rank.norms) :], f"rank {number}"
        for name, weight in rank.weights.items():
            assert torch.equal(weight, expected[name]), f"rank {number}: {name}"
        seen |= rank.weights.keys()
    assert seen == expected.keys()


def test_every_step_was_taken_and_its_gradients_clipped(trained):
    for run in (WHOLE, WHOLE_TP):
        assert all(isinstance(norm, float) and norm > 0.5 for norm in trained[run][0].norms)


SETTINGS = f"""
[run]
steps = 2
[topology]
tp = 1
pp = 1
dp = 1
[model]
num_layers = 4
{TINY_SIZES}max_seq_len = 128
dropout = 0.1
[data]
num_samples = 60
tokenizer = "bytes"
truncate = true
tokens_per_batch = 1024
num_workers = 0
[plan]
layout = "padded"
split_policy = "batch-max"
max_tokens = 512
[job]
timeout_s = 480
"""


def test_a_run_of_one_rank_and_one_of_four_write_the_same_losses_and_norms(preloaded: Preloaded, tmp_path: Path):
    """`dynapipe train --deterministic`, by a rule that cuts the same micro-batches whatever the topology.

    Weights have 16 bits; what has 32 is above."""
    (tmp_path / "settings.toml").write_text(SETTINGS)
    write_costs(TrainConfig.read(tmp_path / "settings.toml"), 258, tmp_path / "costs.json")
    spread = "--pp 2 --dp 2 --placement v --split-backward"
    found = []
    for name, flags in (("one", []), ("four", spread.split())):
        common = ["--config", "settings.toml", "--run-dir", name, "--deterministic", "--dtype", "bfloat16"]
        common += ["--costs", "costs.json"]
        preloaded.train(*common, *flags, cwd=tmp_path)
        steps = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        found.append([(step["loss"], step["grad_norm"]) for step in steps if "grad_norm" in step])
    assert found[0] == found[1]
    assert len(found[0]) == 2


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            {"model": {"architecture": "mixtral-8x7b"}, "topology": {"tp": 1}},
            "deterministic is True but it does not cover experts",
        ),
        (
            {"model": {"num_decoder_layers": 2}, "topology": {"tp": 1, "pp": 2}},
            r"recompute is 'auto'.* set recompute to 'none' or 'selective', or pp to 1",
        ),
        (
            {"topology": {"pp": 2, "vocabulary_parallel": "auto"}},
            "vocabulary_parallel is 'auto' but bits hold for one choice, .*: name it",
        ),
    ],
)
def test_what_the_plan_would_show_in_is_refused(tables, says):
    with pytest.raises(ConfigError, match=says):
        TrainConfig().with_values(**tables, optimizer={"deterministic": True})
