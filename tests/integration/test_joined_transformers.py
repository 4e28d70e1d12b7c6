"""Joined ranks train a model of transformers to the loss and gradients of the whole model, and refuse what they cannot.

Two heads on four joined ranks: heads are fewer than ranks. Windows, chunks of documents, pieces and padded rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer_param_scheduler  # noqa: F401  (here, once, instead of in every rank)

from dynapipe_ext.batch.document_attention import register_document_attention
from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import ProvenStep, prove
from dynapipe_ext.executor.stages.joined_ranks import join_ranks
from dynapipe_ext.executor.stages.torch_stage import TorchStage
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from tests.support.limits import LIMIT_S
from tests.support.megatron_ranks import length_of
from tests.support.pieces import hand_made, pieced_replicas, random_legal_schedule
from tests.support.rank_jobs import in_turn
from tests.support.tiny_models import CONFIGS, one_by_one, tiny_model
from tests.support.tiny_steps import SAMPLES, batches_of

PLANE = Topology(dp=4)
CPU = torch.device("cpu")
FAMILIES = {"llama": ("padded", "pieces"), "qwen2": ("padded", "packed"), "gpt2": ("packed", "pieces")}


def model_of(family: str) -> Any:
    """Of two layers, which are alike but in the one that has windows in every other."""
    config = CONFIGS[family]()
    config.num_hidden_layers = 4 if family == "qwen2" else 2
    return tiny_model(config).double()


def proven_step(layout: str, topology: Topology, seed: str) -> ProvenStep:
    random, multiple = Random(seed), topology.width
    replicas = pieced_replicas(SAMPLES, topology.num_replicas, "none", random, cut_from=9, pad_multiple=multiple)
    if layout != "pieces":
        of_each = [SAMPLES[number :: topology.num_replicas] for number in range(topology.num_replicas)]
        replicas = [[MicroBatch(tuple(map(length_of, own)), layout, pad_multiple=multiple)] for own in of_each]
    schedules = [random_legal_schedule(topology, own, random) for own in replicas]
    form = ActivationFormat(16, "float64", order="bsh")
    return prove(hand_made(topology, replicas, schedules), form, ReplicaCollectives())


def steps(
    family: str, plans: Mapping[tuple[int, str], ProvenStep], env
) -> list[tuple[int, str, float, dict[str, torch.Tensor]]]:
    """Of every width and layout, the loss and all gradients, which every rank has."""
    dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=env.world_size)
    parallel = ParallelContext(PLANE, timeout_s=LIMIT_S)
    model = model_of(family).train()
    model.set_attn_implementation(register_document_attention())
    parts = parts_of_model(model)
    joined = join_ranks(PLANE, env.rank, (2, 4), CPU, timeout_s=LIMIT_S)
    executor = PipelineExecutor(TransformersStage(parts, parallel=parallel, joined=joined), parallel.transport)
    found = []
    for (width, layout), proven in plans.items():
        plan = proven.plan_of(env.rank, 0)
        loss = executor.execute(plan, batches_of(plan))
        gradients = {name: p.grad.clone() for name, p in parts[0].model.named_parameters()}
        found.append((width, layout, loss, gradients))
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_joined_ranks_learn_what_the_whole_model_learns():
    jobs = {}
    for family, layouts in FAMILIES.items():
        plans = {
            (width, layout): proven_step(layout, PLANE.at_width(width), f"{family} {layout}")
            for layout in layouts
            for width in (1, 2, 4)
        }
        jobs[family] = PLANE.dp, partial(steps, family, plans)
    for family, ranks in in_turn(jobs).items():
        loss, gradients = one_by_one(model_of(family), SAMPLES)
        for of_rank in ranks:
            assert len(of_rank) == 6
            for width, layout, found_loss, found in of_rank:
                assert found_loss == pytest.approx(loss, rel=1e-6), (family, width, layout)
                assert set(found) == set(gradients)
                errors = {name: float((found[name] - g).abs().max() / g.abs().max()) for name, g in gradients.items()}
                assert max(errors.values()) <= 1e-6, (family, width, layout, max(errors, key=errors.get))


def refused(stage: Any, width: int = 2) -> None:
    plan = proven_step("padded", Topology(dp=2, width=width), "refused").plan_of(0, 0)
    PipelineExecutor(stage, InlineHub().transport(0)).execute(plan, batches_of(plan))


class _TwoRanks:
    """The sums of a rank that is asked for none."""

    topology = Topology(dp=2)

    def sum_over_replicas(self, tensor: Any) -> None: ...

    def sum_over_job(self, tensor: Any) -> None: ...


def test_what_cannot_share_rows_is_refused_by_name_with_the_next_move():
    parallel: Any = _TwoRanks()
    linear = TorchStage(torch.nn.Linear(1, 1), lambda output, _: output.sum(), parallel=parallel)
    with pytest.raises(ConfigError, match=r"joins 2 data parallel ranks \(width\) but this stage was made for width 1"):
        refused(linear)
    joined: Any = {2: object()}
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM attends by sdpa, which does not exchange .* width 1"):
        refused(TransformersStage(parts_of_model(tiny_model("llama")), parallel=parallel, joined=joined))
    (part,) = parts_of_model(tiny_model("llama"))
    part.model.set_attn_implementation(register_document_attention())
    part.check_slices()
    convolved = torch.nn.Conv1d(16, 16, 2, padding=1)
    layer = part.model.model.layers[2].mlp
    forward = layer.forward
    layer.forward = lambda x: forward(x) + convolved(x.transpose(1, 2))[..., :-1].transpose(1, 2)
    with pytest.raises(ConfigError, match=r"sees other positions by more than attention.*plan with width 1"):
        part.check_slices()
