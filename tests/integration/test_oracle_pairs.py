"""An encoder-decoder on every topology has the loss and the gradients of transformers, one pair at a time.

Real megatron-core ranks over gloo, with the strict transport (NCCL's ordering rules).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.lowering import lower
from dynapipe_ext.executor.proof.replica import verify
from dynapipe_ext.executor.stages.megatron_t5 import t5_stage
from dynapipe_ext.executor.transport.groups import make_pipeline_groups
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.topology import Topology
from tests.support.checkpoints import tiny_variant
from tests.support.megatron_ranks import join
from tests.support.t5_ranks import (
    PairCase,
    build_pair_ddps,
    described,
    in_megatrons_names,
    oracle_of,
    pair_format,
    pair_step_plan,
    pair_tensors,
    pairs_of,
    worst_pair_error,
)

V11, ALL = "t5-v1.1", Topology(tp=2, pp=2, dp=2)
CASES = [
    PairCase(Topology(), "packed"),
    PairCase(Topology(), variant=V11, loss_norm="samples"),
    PairCase(Topology(pp=2), schedule="adaptive"),
    PairCase(Topology(pp=3, layers_per_stage=(3, 2, 3)), "packed", V11),
    PairCase(Topology(pp=4), weights_lag=1),
    PairCase(Topology(pp=4, layers_per_stage=(1, 4, 2, 1)), variant=V11, recompute="full"),
    PairCase(Topology(tp=2, pp=2), recompute="selective"),
    PairCase(Topology(tp=2, pp=2), variant=V11, sequence_parallel=True, weights_lag=0),
    PairCase(Topology(tp=2), "packed", sequence_parallel=True, recompute="full"),
    PairCase(Topology(dp=2), variant=V11, loss_norm="samples"),
    PairCase(ALL, "packed", recompute="selective", weights_lag=2),
    PairCase(ALL, recompute="full", schedule="adaptive"),
    PairCase(Topology(pp=2, placement=(0, 1, 1, 0)), schedule="zb-v"),
    PairCase(Topology(tp=2, pp=2, placement=(0, 1, 0, 1)), "packed", V11, schedule="interleaved-1f1b"),
]


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return {name: tiny_variant(name) for name in ("t5", "t5-v1.1")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_and_losses_equal_transformers_one_pair_at_a_time(case, run_ranks, published):
    model = published[case.variant]
    architecture = described(model)
    weights = in_megatrons_names(architecture, model.state_dict())
    loss, grads = oracle_of(model, case.loss_norm, 0)
    expected = in_megatrons_names(architecture, grads)

    def main(env):
        join(env)
        ddps = build_pair_ddps(case, architecture, weights, env.rank)
        topology, me = case.topology, case.topology.coordinates(env.rank)
        transport = StrictTransport(
            topology, env.rank, make_pipeline_groups(topology, env.rank, timeout_s=60), timeout_s=30
        )
        plans = lower(pair_step_plan(case, 0), pair_format(case, architecture))
        for replica in plans:
            verify([p.instructions for p in replica], replica[0].stage_ranks, len(replica[0].micro_batches))
        plan = plans[me.dp_rank][me.pp_rank]
        batches = [pair_tensors(m, pairs_of(0), case.loss_norm) for m in plan.micro_batches]
        executor = PipelineExecutor(t5_stage(ddps), transport)
        found = []
        for _ in range(2):
            found.append(
                (
                    executor.execute(plan, batches),
                    worst_pair_error(topology, me.tp_rank, [d.module for d in ddps], expected),
                )
            )
        transport.close()
        dist.barrier()
        dist.destroy_process_group()
        return found

    for rank, found in enumerate(run_ranks(case.topology.world_size, main)):
        for got, error in found:
            assert got == pytest.approx(loss, rel=1e-5), f"rank {rank}"
            assert error <= 1e-5, f"rank {rank}"
