"""Zero-bubble schedules and the optimizer's train the main job's model to the bits of the same steps unsplit.

Real megatron-core ranks over gloo with the strict transport; test_oracle.py holds the same schedules against one
process that runs one sample at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch.distributed as dist

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.collectives import ReplicaCollectives
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.lowering import lower
from dynapipe_ext.executor.proof.step import verify_step, with_collectives
from dynapipe_ext.executor.stages.megatron import MegatronStage, main_grads
from dynapipe_ext.executor.transport.groups import make_pipeline_groups
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.update import ExecutedStep
from dynapipe_ext.topology import Topology
from tests.support.megatron_ranks import Case, Model, Spans, build, join, samples_of, step_plan_of, tensors_of

MAIN_JOB = Model(modern=False)  # as `dynapipe train` builds it where nothing else is said
NUM_STEPS = 2


@dataclass(frozen=True)
class Outcome:
    labels: list[str]  # the actions of the first step, in the order in which they ran
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, np.ndarray]]  # of each step
    weights: dict[str, np.ndarray]  # after the last


def trained(case: Case):
    """Returns this rank's Outcome."""

    def main(env) -> Outcome:
        join(env)
        topology, me = case.topology, case.topology.coordinates(env.rank)
        model, ddp, optimizer = build(case, topology, env.rank)
        transport = StrictTransport(
            topology, env.rank, make_pipeline_groups(topology, env.rank, timeout_s=60), timeout_s=30
        )
        spans = Spans()
        executor = PipelineExecutor(MegatronStage([ddp]), transport, recorder=spans)
        shards = topology.tp if case.sequence_parallel else 1
        form = ActivationFormat(case.model.shape.hidden_size, sequence_shards=shards)
        losses, norms, gradients = [], [], []
        for step in range(NUM_STEPS):
            plans = lower(step_plan_of(case, step), form)
            programs = [[plan.instructions for plan in replica] for replica in plans]
            verify_step(
                with_collectives(programs, ReplicaCollectives()), plans[0][0].stage_ranks, plans[0][0].num_micro_batches
            )
            plan, samples = plans[me.dp_rank][me.pp_rank], samples_of(step)
            losses.append(executor.execute(plan, [tensors_of(m, samples, case.loss_norm) for m in plan.micro_batches]))
            gradients.append({name: gradient.numpy().copy() for name, gradient in main_grads(ddp).items()})
            norms.append(optimizer.step(ExecutedStep(plan, losses[-1])))
        weights = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
        labels = [span.label for span in spans[: len(spans) // NUM_STEPS]]
        transport.close()
        dist.barrier()
        dist.destroy_process_group()
        return Outcome(labels, losses, norms, gradients, weights)

    return main


CASES = [
    Case(Topology(pp=4), "packed", MAIN_JOB, schedule="zb-h1"),
    Case(Topology(tp=2, pp=2, dp=2), model=MAIN_JOB, schedule="zb-h2"),
    Case(Topology(pp=4), model=MAIN_JOB, schedule="adaptive-split"),
    Case(Topology(tp=2, pp=2), "packed", MAIN_JOB, sequence_parallel=True, schedule="adaptive-split"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_schedule_with_split_backwards_trains_to_the_bits_of_the_same_steps_unsplit(case, run_ranks):
    split = run_ranks(case.topology.world_size, trained(case))
    whole = run_ranks(case.topology.world_size, trained(replace(case, is_joined=True)))
    first = split[0].labels
    assert any("W" in label for label in first)
    assert not any("W" in label or "I" in label for outcome in whole for label in outcome.labels)
    for rank, (one, other) in enumerate(zip(split, whole, strict=True)):
        assert one.losses == other.losses, f"rank {rank}"
        assert one.norms == other.norms, f"rank {rank}"
        for mine, theirs in ((one.weights, other.weights), *zip(one.gradients, other.gradients, strict=True)):
            assert mine.keys() == theirs.keys()
            for name, values in mine.items():
                assert np.array_equal(values, theirs[name]), f"rank {rank}: {name}"


def test_zb_h1_puts_weight_gradients_off_and_leaves_the_bits_of_1f1b(run_ranks):
    """Rank r runs its first W behind its I number r, on real ranks as in the table."""
    case = Case(Topology(pp=4), model=MAIN_JOB, schedule="zb-h1")
    zero_bubble, plain = (run_ranks(4, trained(replace(case, schedule=name))) for name in (case.schedule, "1f1b"))
    for rank, outcome in enumerate(zero_bubble):
        before = outcome.labels[: outcome.labels.index(f"{rank}W0")]
        assert sum("I" in label for label in before) == rank + 1
        assert outcome.losses == plain[rank].losses
        assert all(np.array_equal(values, plain[rank].weights[name]) for name, values in outcome.weights.items())
