"""Cut samples train to the loss and gradients of whole ones: real megatron-core ranks against one process.

Rows mix a piece and whole documents; orders are random among those that pieces allow. float32, so what is compared is
the sums' order alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.lowering import lower
from dynapipe_ext.executor.proof.replica import verify
from dynapipe_ext.executor.stages.megatron import MegatronStage, main_grads
from dynapipe_ext.executor.stages.megatron_model import destroy_parallel
from dynapipe_ext.executor.transport.groups import make_pipeline_groups
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.plan import MicroBatch
from dynapipe_ext.topology import Topology
from tests.support.megatron_ranks import (
    Case,
    Model,
    build_ddps,
    costs_of,
    join,
    length_of,
    planned,
    samples_of,
    tensors_of,
    worst_error,
)
from tests.support.pieces import pieced_replicas, random_legal_schedule

V = Topology(pp=2, placement=(0, 1, 1, 0))
TP2 = Topology(tp=2)
LEARNED = Model(tied=False, position="learned", modern=False)
# (recomputation, whether backwards are split)
KINDS = [("none", False), ("none", True), ("selective", True), ("full", False)]
JOBS = {
    "tp2pp2dp2": [Case(Topology(tp=2, pp=2, dp=2)), Case(Topology(tp=2, pp=2, dp=2), sequence_parallel=True)],
    "pp4": [Case(Topology(pp=4)), Case(Topology(pp=4), model=LEARNED)],
    "v": [Case(V)],
    "tp2": [Case(TP2), Case(TP2, model=LEARNED, sequence_parallel=True)],
    "one": [Case(Topology())],
}


def whole(model: Model):
    """One process, one sample at a time: (loss, {name: gradient})."""

    def main(env):
        join(env)
        (ddp,) = build_ddps(Case(Topology(), model=model), Topology(), 0)
        ddp.zero_grad_buffer()
        samples, total = samples_of(0), 0.0
        for sample in samples:
            batch = tensors_of(MicroBatch((length_of(sample),)), samples, "tokens")
            losses = ddp(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            loss = (losses * batch["loss_weights"]).sum() / sum(s.target for s in samples)
            loss.backward()
            total += float(loss.detach())
        gradients = {name: gradient.numpy().copy() for name, gradient in main_grads(ddp).items()}
        dist.destroy_process_group()
        return total, gradients

    return main


@pytest.mark.parametrize("job", JOBS)
def test_pieces_have_loss_and_gradients_of_whole_samples(job, run_ranks):
    cases = JOBS[job]
    expected = {case.model: run_ranks(1, whole(case.model))[0] for case in cases}
    samples = samples_of(0)

    def main(env):
        join(env)
        found = []
        for case in cases:
            topology, me = case.topology, case.topology.coordinates(env.rank)
            ddps = build_ddps(case, topology, env.rank)
            stage = MegatronStage(ddps)
            groups = make_pipeline_groups(topology, env.rank, timeout_s=60)
            transport = StrictTransport(topology, env.rank, groups, timeout_s=30)
            form = ActivationFormat(32, sequence_shards=topology.tp if case.sequence_parallel else 1)
            for seed, (recompute, split) in enumerate(KINDS):
                random = Random(f"{job}{seed}")
                replicas = pieced_replicas(samples, topology.dp, recompute, random)
                schedules = [random_legal_schedule(topology, own, random, split=split) for own in replicas]
                plans = lower(planned(0, replicas, schedules, costs_of(topology, replicas), "tokens"), form)
                for replica in plans:
                    verify([p.instructions for p in replica], replica[0].stage_ranks, len(replica[0].micro_batches))
                plan = plans[me.dp_rank][me.pp_rank]
                batches = [tensors_of(m, samples, "tokens") for m in plan.micro_batches]
                loss = PipelineExecutor(stage, transport).execute(plan, batches)
                wanted, gradients = expected[case.model]
                error = worst_error(case.model.shape, topology, env.rank, [d.module for d in ddps], gradients)
                found.append((str(case), recompute, split, abs(loss - wanted) / wanted, error, stage.held_bytes()))
            transport.close()
            dist.barrier()
            destroy_parallel()
        dist.destroy_process_group()
        return found

    for found in run_ranks(cases[0].topology.world_size, main):
        print(*found, sep="\n")
        for *what, loss_error, error, held in found:
            assert loss_error <= 1e-6, what
            assert error <= 2e-6, what
            assert held == 0, what
