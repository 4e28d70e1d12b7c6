"""An encoder-decoder on every topology has the loss and the gradients of transformers, one pair at a time.

Real megatron-core ranks over gloo, with the strict transport (NCCL's ordering rules).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import LossNorm
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.instructions import ExecutionPlan, lower
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages import chunk_runner
from dynapipe_ext.executor.stages.joined_ranks import join_ranks
from dynapipe_ext.executor.stages.megatron.model import build_model, initialize_parallel, transformer_config
from dynapipe_ext.executor.stages.megatron.t5 import sum_copies, t5_stage
from dynapipe_ext.executor.training_loop import ExecutedStep
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import make_pipeline_groups
from dynapipe_ext.models.architecture import Architecture
from tests.support.checkpoints import tiny_variant
from tests.support.limits import LIMIT_S
from tests.support.lowered import forwards_of
from tests.support.megatron_ranks import CPU, join
from tests.support.rank_jobs import in_turn
from tests.support.t5_ranks import (
    PairCase,
    build_pair_ddps,
    described,
    in_megatrons_names,
    oracle_of,
    pair_format,
    pair_optimizer,
    pair_step_plan,
    pair_tensors,
    worst_pair_error,
)

V11 = "t5-v1.1"
CASES = [
    PairCase(Topology(), "packed", weights_lag=1),
    PairCase(Topology(pp=2), variant=V11, loss_norm="samples", schedule="adaptive"),
    PairCase(Topology(pp=3, layers_per_stage=(3, 2, 3)), "packed", V11),
    PairCase(Topology(pp=4, layers_per_stage=(1, 4, 2, 1)), variant=V11, recompute="full"),
    PairCase(Topology(tp=2, pp=2), variant=V11, sequence_parallel=True, weights_lag=0),
    PairCase(Topology(tp=2), "packed", sequence_parallel=True, recompute="full"),
    PairCase(Topology(dp=2), recompute="selective"),
    PairCase(Topology(pp=2, dp=2), "packed", recompute="selective", weights_lag=2),
    PairCase(Topology(tp=2, pp=2), "packed", V11, sequence_parallel=True, recompute="head+full"),
    PairCase(Topology(pp=2, placement=(0, 1, 1, 0)), schedule="zb-v", recompute="head"),
    PairCase(Topology(tp=2, pp=2, placement=(0, 1, 0, 1)), variant=V11, schedule="interleaved-1f1b"),
    PairCase(Topology(dp=4, width=2), "packed", recompute="selective"),
    PairCase(Topology(pp=2, dp=2, width=2, placement=(0, 1, 1, 0)), variant=V11, schedule="zb-v"),
    PairCase(Topology(tp=2, dp=2, width=2), sequence_parallel=True, recompute="full", weights_lag=1),
]


@dataclass(frozen=True)
class Published:
    """A model of transformers as Megatron names and lays out its weights, and what a step of it is."""

    architecture: Architecture
    weights: dict[str, torch.Tensor]
    loss: float
    grads: dict[str, torch.Tensor]


@cache
def published(variant: str, loss_norm: LossNorm) -> Published:
    model = tiny_variant(variant)
    architecture = described(model)
    weights = in_megatrons_names(architecture, model.state_dict())
    loss, grads = oracle_of(model, loss_norm)
    return Published(architecture, weights, loss, in_megatrons_names(architecture, grads))


@contextmanager
def in_job(case: PairCase, env: Any) -> Iterator[tuple[list[Any], PipelineExecutor, ExecutionPlan, list[Batch]]]:
    """This rank's chunks, its executor over the strict transport, its plan and batches; leaves the job afterwards."""
    chunk_runner.HEAD_SLICE = 5  # of rows that are longer, and that it does not divide
    join(env)
    one = published(case.variant, case.loss_norm)
    ddps = build_pair_ddps(case, one.architecture, one.weights, env.rank)
    topology, me = case.topology, case.topology.coordinates(env.rank)
    groups = make_pipeline_groups(topology, env.rank, timeout_s=LIMIT_S)
    transport = StrictTransport(topology, env.rank, groups, timeout_s=LIMIT_S)
    plans = lower(pair_step_plan(case), pair_format(case, one.architecture))
    for replica in plans:
        verify([p.instructions for p in replica], replica[0].stage_ranks, len(replica[0].micro_batches))
    plan = plans[me.dp_rank // topology.width][me.pp_rank]
    batches = [pair_tensors(m, case.loss_norm) for m in plan.micro_batches]
    joined = join_ranks(topology, env.rank, [topology.width], CPU, timeout_s=LIMIT_S)
    joined = {width: ranks.taking_turns(transport.in_turn) for width, ranks in joined.items()}
    stage = t5_stage(ddps, deterministic=case.is_deterministic, dropout=case.dropout > 0, joined=joined)
    yield ddps, PipelineExecutor(stage, transport), plan, batches
    transport.close()
    dist.barrier()
    dist.destroy_process_group()


def exact(case: PairCase, env: Any) -> tuple[float, float]:
    """The loss of a step, and the worst gradient's error."""
    with in_job(case, env) as (ddps, executor, plan, batches):
        loss = executor.execute(plan, batches)
        wanted = published(case.variant, case.loss_norm).grads
        return loss, worst_pair_error(case.topology, env.rank, [ddp.module for ddp in ddps], wanted)


def stepped(case: PairCase, env: Any) -> list[float]:
    """Loss and norm of steps, and the loss of forwards alone after them."""
    with in_job(case, env) as (ddps, executor, plan, batches):
        optimizer, found = pair_optimizer(case, ddps), []
        for _ in range(3 if case.is_deterministic else 2):
            found.append(executor.execute(plan, batches))
            norm = optimizer.step(ExecutedStep(plan, found[-1]))
            assert isinstance(norm, float)
            found.append(norm)
        return [*found, executor.execute(forwards_of(plan), batches)]


def dropping(case: PairCase, env: Any) -> float:
    with in_job(case, env) as (_, executor, plan, batches):
        return executor.execute(plan, batches)


def refused(env: Any) -> str:
    """What is said of groups that were made without the model."""
    one, topology = published("t5", "tokens"), Topology(pp=3)
    join(env)
    initialize_parallel(topology, 0)
    config = transformer_config(one.architecture, topology, dtype="float32")
    part = build_model(one.architecture, topology, env.rank, config, seed=0, device=CPU)
    with pytest.raises(ConfigError) as caught:
        sum_copies([part])
    dist.destroy_process_group()
    return str(caught.value)


ALONE, EXACT = PairCase(Topology()), PairCase(Topology(), is_deterministic=True)
SPREAD = PairCase(Topology(pp=3, dp=2, layers_per_stage=(3, 3, 2)), distributed_optimizer=True)
FOLDED = replace(EXACT, topology=Topology(pp=2, placement=(0, 1, 1, 0)), schedule="zb-v")
UNEVEN = replace(EXACT, topology=Topology(pp=3, layers_per_stage=(3, 3, 2)), recompute="selective")
DROPPING = PairCase(Topology(), dropout=0.2)
DROPPING_TOO = PairCase(
    Topology(pp=2, placement=(0, 1, 0, 1)), dropout=0.2, recompute="full", schedule="interleaved-1f1b"
)


@pytest.fixture(scope="module")
def ran() -> dict[Any, list[Any]]:
    """What every rank found, by what it did and its case."""
    done = {exact: CASES, stepped: (ALONE, SPREAD, EXACT, FOLDED, UNEVEN), dropping: (DROPPING, DROPPING_TOO)}
    for case in CASES:
        published(case.variant, case.loss_norm)  # here, once, instead of in every rank
    jobs: dict[Any, Any] = {
        (main, case): (case.topology.world_size, partial(main, case)) for main, cases in done.items() for case in cases
    }
    return in_turn(jobs | {refused: (3, refused)})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_and_losses_equal_transformers_one_pair_at_a_time(case: PairCase, ran: dict[Any, list[Any]]) -> None:
    for rank, (loss, error) in enumerate(ran[exact, case]):
        assert loss == pytest.approx(published(case.variant, case.loss_norm).loss, rel=1e-5), f"rank {rank}"
        assert error <= 1e-5, f"rank {rank}"


def test_steps_leave_nothing_over_and_keep_copies_alike(ran: dict[Any, list[Any]]) -> None:
    """Under the distributed optimizer, whose replicas must cut what stages share alike: losses, norms and the loss of
    forwards alone after two updates are those of one process."""
    (alone,) = ran[stepped, ALONE]
    for rank, found in enumerate(ran[stepped, SPREAD]):
        assert found == pytest.approx(alone, rel=1e-4), f"rank {rank}"


def test_deterministic_steps_have_the_same_bits_on_one_stage_and_on_many(ran: dict[Any, list[Any]]) -> None:
    """The embedding is read by both sides and the head, biases by every layer, the encoder's output by four layers."""
    for case in (FOLDED, UNEVEN):
        assert ran[stepped, case] == ran[stepped, EXACT] * case.topology.world_size


def test_groups_that_were_made_without_the_model_are_refused(ran: dict[Any, list[Any]]) -> None:
    """Megatron sums an embedding over the first and the last rank; of these three the second holds it, too."""
    for said, size in zip(ran[refused], (2, 1, 2), strict=True):
        assert said.startswith(f"Megatron's embedding group has {size} ranks but this encoder-decoder's embedding lies")


def test_dropout_masks_depend_neither_on_the_pipeline_nor_on_recomputation(ran: dict[Any, list[Any]]) -> None:
    losses = [ran[dropping, case][0] for case in (DROPPING, DROPPING_TOO)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert abs(losses[0] - published("t5", "tokens").loss) > 1e-4  # it does drop
