"""On real megatron-core ranks: log probabilities of a planned call's forwards have the bits of the step's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dynapipe_ext import plan_micro_batches
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import prove
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage, unwrapped
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import make_pipeline_groups
from dynapipe_ext.schedules.step_plan import StepPlan
from tests.support.limits import LIMIT_S
from tests.support.megatron_ranks import Case, Model, build_ddps, join, length_of, samples_of, tensors_of
from tests.support.rank_jobs import in_turn

PP2 = Topology(pp=2)
CASE = Case(PP2, "packed", Model(tied=False))
LogProbabilities = dict[int, np.ndarray]  # of each sample's positions


def recorded(env: Any) -> list[LogProbabilities]:
    """Of a rank: from `forwards()`, from the step itself, and from forwards that are cut otherwise."""
    join(env)
    samples = samples_of(0)
    lengths = [length_of(sample) for sample in samples]
    costs = TokenCosts(2, overhead_ns=10**5)
    found: list[LogProbabilities] = []

    def call(chunk: Any, batch: Any, *inputs: torch.Tensor) -> torch.Tensor:
        model = unwrapped(chunk)
        model.set_input_tensor(inputs[0] if inputs else None)
        packed = {"packed_seq_params": batch["packed"]} if "packed" in batch else {}
        output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **packed)
        if not model.post_process:
            return output
        ends = np.cumsum([0, *(samples[i].positions for i in batch["row"])])
        for index, first, end in zip(batch["row"], ends[:-1], ends[1:], strict=True):
            found[-1][index] = -output.detach()[0, first:end].numpy().copy()
        return (output * batch["loss_weights"]).sum()

    groups = make_pipeline_groups(PP2, env.rank, timeout_s=LIMIT_S)
    transport = StrictTransport(PP2, env.rank, groups, timeout_s=LIMIT_S)
    executor = PipelineExecutor(MegatronStage(build_ddps(CASE, PP2, env.rank), call=call), transport)

    def run(plan: StepPlan) -> None:
        mine = prove(plan, ActivationFormat(CASE.model.shape.hidden_size), ReplicaCollectives()).plans[0][env.rank]
        found.append({})
        batches = [tensors_of(m, samples, "tokens") | {"row": [s.index for s in m.samples]} for m in mine.micro_batches]
        executor.execute(mine, batches)

    planned = plan_micro_batches(lengths, PP2, costs, max_tokens=96, recompute="full")
    shorter = plan_micro_batches(lengths, PP2, costs, max_tokens=41, layout="padded")
    for plan in (planned.forwards(), planned.plan, shorter.forwards()):
        run(plan)
    transport.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_the_first_ratio_of_new_to_old_log_probabilities_is_exactly_1_where_forwards_are_cut_like_the_step() -> None:
    (first, last) = in_turn({"ranks": (2, recorded)})["ranks"]
    assert first == [{}, {}, {}]
    old, new, otherwise = last
    assert old.keys() == new.keys() == otherwise.keys()
    assert len(old) > 10
    assert all((np.exp(new[i] - old[i]) == 1.0).all() for i in new)
    assert all(np.array_equal(new[i], old[i]) for i in new)
    assert not all(np.array_equal(new[i], otherwise[i]) for i in new)  # other rows have other bits
