"""Real megatron-core ranks for the oracle tests: a small model, its samples, steps planned in uneven micro-batches.

Import this at the top of a test module: forked ranks then find megatron imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import (
    GlobalBatchPlan,
    Layout,
    LossNorm,
    MicroBatch,
    Recompute,
    ReplicaPlan,
    SampleLength,
)
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import collate
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.executor.stages import megatron_cpu
from dynapipe_ext.executor.stages.megatron.model import (
    build_chunks,
    build_model,
    global_name,
    initialize_parallel,
    tensor_slice,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron.optimizer import MegatronOptimizer
from dynapipe_ext.executor.stages.megatron.stage import wrap_ddp
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import compute_makespan_ns, compute_peak_bytes
from dynapipe_ext.schedules.published.by_name import make_published_schedule
from dynapipe_ext.schedules.published.full_backward import one_f_one_b
from dynapipe_ext.schedules.search.optimizer import optimize
from dynapipe_ext.schedules.step_plan import Prediction, StepPlan
from dynapipe_ext.settings.tables import OptimizerSettings
from tests.support.limits import LIMIT_S

megatron_cpu.install()
from megatron.core import parallel_state  # noqa: E402

for module in ("models.gpt.gpt_layer_specs", "models.gpt.gpt_model", "dist_checkpointing.strategies.torch"):
    import_module(f"megatron.core.{module}")  # here, once, instead of in every rank

NUM_SAMPLES, NUM_LAYERS = 14, 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    tied: bool = True
    position: str = "rope"
    modern: bool = True  # RMSNorm, gated MLP, grouped queries, no biases; else GPT-2's
    key_heads: int = 2  # of a modern one; with 1 queries and keys are normalised, too
    num_layers: int = NUM_LAYERS

    @property
    def shape(self) -> Architecture:
        if self.modern:
            return Architecture.gpt(
                num_layers=self.num_layers,
                hidden_size=32,
                num_heads=4,
                num_query_groups=self.key_heads,
                qk_norm=self.key_heads == 1,
                ffn_hidden_size=64,
                gated_mlp=True,
                vocab_size=256,
                max_seq_len=64,
                tied_embeddings=self.tied,
                position=self.position,
                norm="rmsnorm",
                bias=False,
            )
        return Architecture.gpt(
            num_layers=self.num_layers,
            hidden_size=32,
            num_heads=4,
            num_query_groups=4,
            ffn_hidden_size=64,
            gated_mlp=False,
            vocab_size=256,
            max_seq_len=64,
            tied_embeddings=self.tied,
            position=self.position,
            norm="layernorm",
            bias=True,
        )


@dataclass(frozen=True)
class Case:
    topology: Topology
    layout: Layout = "padded"
    model: Model = Model()
    sequence_parallel: bool = False
    loss_norm: LossNorm = "tokens"
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    distributed_optimizer: bool = False
    dropout: float = 0.0
    weights_lag: int | None = None  # split backwards: W of a micro-batch follows I of the one this many places later
    is_joined: bool = False  # the schedule's I and W run as B
    deal: tuple[tuple[int, ...], ...] = ()  # the micro-batches that each replica runs, in this order
    is_deterministic: bool = False
    dtype: str = "float32"
    ep: int = 1  # data parallel neighbours that share the experts of a layer; these weights are for the caller to fill

    def __str__(self) -> str:
        t, m = self.topology, self.model
        words = [f"tp{t.tp}pp{t.pp}dp{t.dp}", self.layout, self.schedule, "tied" if m.tied else "untied", m.position]
        words += ["one-key"] * (m.key_heads == 1) + ["sp"] * self.sequence_parallel + ["gpt2"] * (not m.modern)
        words += ["samples"] * (self.loss_norm != "tokens")
        words += [f"split{self.weights_lag}"] * (self.weights_lag is not None) + ["joined"] * self.is_joined
        words += [self.recompute] * (self.recompute != "none") + ["zero1"] * self.distributed_optimizer
        words += ["dropout"] * (self.dropout > 0)
        words += ["-".join(map(str, own)) for own in self.deal] + ["exact"] * self.is_deterministic
        words += [t.vocabulary] * (t.vocabulary != "whole")
        words += ["".join(map(str, t.placement))] * bool(t.placement) + [f"width{t.width}"] * (t.width > 1)
        return "-".join(words + [str(n) for n in t.layers_per_stage])


def samples_of(step: int) -> list[TokenSample]:
    """Samples whose lengths differ by a factor of ten; prompts of random length carry no loss."""
    rng = np.random.default_rng(100 + step)
    lengths = rng.integers(4, 41, NUM_SAMPLES)
    return [TokenSample(i, rng.integers(0, 256, n + 1), int(rng.integers(1, n + 1))) for i, n in enumerate(lengths)]


def length_of(sample: TokenSample) -> SampleLength:
    return SampleLength(sample.index, sample.positions, 0, sample.target)


def tensors_of(micro_batch: MicroBatch, samples: list[TokenSample], loss_norm: LossNorm) -> dict[str, torch.Tensor]:
    arrays = collate(micro_batch, [samples[s.index] for s in micro_batch.samples], loss_norm=loss_norm)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def build(case: Case, topology: Topology, rank: int):
    """The only chunk of a rank, its DDP, its optimizer."""
    (ddp,), optimizer = build_trained(case, topology, rank)
    return ddp.module, ddp, optimizer


def build_trained(
    case: Case, topology: Topology, rank: int, device: torch.device = CPU
) -> tuple[list[Any], MegatronOptimizer]:
    """The chunks of a rank as `build_ddps` makes them, and their optimizer."""
    ddps = build_ddps(case, topology, rank, device)
    settings = OptimizerSettings(
        lr=1e-3,
        min_lr=1e-4,
        warmup_steps=1,
        weight_decay=0.01,
        clip_grad=0.5,
        distributed=case.distributed_optimizer,
        deterministic=case.is_deterministic,
    )
    return ddps, MegatronOptimizer(ddps, ddps[0].config, settings, num_steps=10)


def build_ddps(case: Case, topology: Topology, rank: int, device: torch.device = CPU) -> list[Any]:
    """The chunks of a rank, one a stage, each in its DDP."""
    initialize_parallel(topology, 0)
    if case.ep > 1:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(topology.tp, topology.pp, expert_model_parallel_size=case.ep)
    config = transformer_config(
        case.model.shape,
        topology,
        dtype=case.dtype,
        sequence_parallel=case.sequence_parallel,
        dropout=case.dropout,
        deterministic=case.is_deterministic,
    )
    config.expert_model_parallel_size = case.ep
    shape, pp_rank = case.model.shape, topology.coordinates(rank).pp_rank
    chunks = build_chunks(
        shape,
        topology,
        pp_rank,
        lambda stage: build_model(shape, topology, stage, config, seed=7, device=device),
    )
    return [wrap_ddp(chunk, config, distributed_optimizer=case.distributed_optimizer) for chunk in chunks]


def join(env) -> None:
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=env.world_size, timeout=limit)


def step_plan_of(case: Case, step: int, samples_of_each: Sequence[int] = (5, 2, 1, 3, 3)) -> StepPlan:
    """Uneven micro-batches, of so many samples each; of two replicas the first has the fewer of them, where the case
    does not deal them otherwise."""
    lengths = iter([length_of(sample) for sample in samples_of(step)])
    cuts = [tuple(islice(lengths, count)) for count in samples_of_each]
    parts = [MicroBatch(cut, case.layout, case.recompute, pad_multiple=4) for cut in cuts]
    num_replicas = case.topology.num_replicas
    ends = [len(parts) * replica // num_replicas for replica in range(num_replicas + 1)]
    deal = case.deal or [range(*two) for two in pairwise(ends)]
    replicas = [[parts[number] for number in own] for own in deal]
    costs = costs_of(case.topology, replicas)
    schedules = [schedule_of(case.schedule, c, case.topology) for c in costs]
    if case.weights_lag is not None:
        schedules = [split_backwards(schedule, case.weights_lag) for schedule in schedules]
    if case.is_joined:
        schedules = [joined_backwards(schedule) for schedule in schedules]
    return planned(step, replicas, schedules, costs, case.loss_norm, case.topology.width)


def format_of(case: Case) -> ActivationFormat:
    """What the case's stages send one another."""
    topology = case.topology
    return ActivationFormat(
        case.model.shape.hidden_size,
        sequence_shards=topology.tp if case.sequence_parallel else 1,
        first_head_stage=None if topology.vocabulary == "whole" else topology.head_stages.start,
    )


def costs_of(topology: Topology, replicas: Sequence[Sequence[MicroBatch]]) -> list[MicroBatchCosts]:
    return [TokenCosts(topology.num_stages, transfer_ns_per_token=10).evaluate(replica) for replica in replicas]


def schedule_of(name: str, costs: MicroBatchCosts, topology: Topology) -> PipelineSchedule:
    """A published schedule, or the optimizer's: "adaptive", and "adaptive-split" in the memory that 1F1B takes."""
    pp, count = topology.pp, costs.num_micro_batches
    match name:
        case "adaptive":
            return optimize(
                costs, memory_limit_bytes=10**12, split=False, effort=0, stage_ranks=topology.placement or None
            )
        case "adaptive-split":
            limit = max(compute_peak_bytes(one_f_one_b(pp, count), costs))
            return optimize(costs, memory_limit_bytes=limit, split=True, effort=200)
        case _:
            return make_published_schedule(name, pp, count)


def planned(
    step: int,
    replicas: Sequence[Sequence[MicroBatch]],
    schedules: Sequence[PipelineSchedule],
    costs: Sequence[MicroBatchCosts],
    loss_norm: LossNorm,
    width: int = 1,
) -> StepPlan:
    """A step of given micro-batches and schedules; what it promises of bytes and bounds is left at 0."""
    predictions = tuple(
        Prediction(
            makespan_ns=compute_makespan_ns(s, c),
            lower_bound_ns=0,
            peak_bytes=(0,) * len(s.ranks),
            bubble_ratio=0.0,
        )
        for s, c in zip(schedules, costs, strict=True)
    )
    plans = tuple(ReplicaPlan(i, tuple(replica)) for i, replica in enumerate(replicas))
    batch = GlobalBatchPlan(step=step, replicas=plans, loss_norm=loss_norm, width=width)
    return StepPlan(batch, tuple(schedules), predictions, tuple(costs))


def split_backwards(schedule: PipelineSchedule, lag: int) -> PipelineSchedule:
    """Every B as I, and its W after the I of the micro-batch `lag` places later (the last ones at the end)."""
    ranks = []
    for rank in schedule.ranks:
        actions: list[Action] = []
        waiting: list[Action] = []
        for action in rank:
            if action.kind is Kind.BACKWARD:
                actions.append(replace(action, kind=Kind.BACKWARD_INPUT))
                waiting.append(replace(action, kind=Kind.BACKWARD_WEIGHT))
                if len(waiting) > lag:
                    actions.append(waiting.pop(0))
            else:
                actions.append(action)
        ranks.append((*actions, *waiting))
    return replace(schedule, ranks=tuple(ranks))


def joined_backwards(schedule: PipelineSchedule) -> PipelineSchedule:
    """Every I with its W as one B, where the I was."""
    ranks = tuple(
        tuple(
            replace(action, kind=Kind.BACKWARD) if action.kind is Kind.BACKWARD_INPUT else action
            for action in rank
            if action.kind is not Kind.BACKWARD_WEIGHT
        )
        for rank in schedule.ranks
    )
    return replace(schedule, ranks=ranks)


def whole_name(shape: Architecture, local_name: str, first_layer: int) -> str:
    """A parameter's name in the whole model, of this rank's experts, too."""
    num_ranks = parallel_state.get_expert_model_parallel_world_size()
    first_expert = parallel_state.get_expert_model_parallel_rank() * shape.num_experts // num_ranks
    numbered = re.sub(r"(?<=local_experts\.)\d+", lambda number: str(first_expert + int(number[0])), local_name)
    return global_name(numbered, first_layer)


def worst_error(
    shape: Architecture, topology: Topology, rank: int, chunks: Sequence[torch.nn.Module], expected: Mapping[str, Any]
) -> float:
    """Largest difference of any gradient entry, relative to the largest entry of its parameter's gradient.

    `expected` has the whole gradients, tensors or arrays, by their names in the whole model.
    """
    me, layers = topology.coordinates(rank), topology.with_layers(shape.num_layers).stage_layers
    worst = 0.0
    for stage, chunk in zip(topology.stages_of(me.pp_rank), chunks, strict=True):
        for local_name, parameter in chunk.named_parameters():
            name = whole_name(shape, local_name, layers[stage].held.start)
            if name == "output_layer.weight" and shape.tied_embeddings:
                name = "embedding.word_embeddings.weight"
            whole = torch.as_tensor(expected[name])
            wanted = tensor_slice(whole, parameter, me.tp_rank, topology.tp)
            error = float((parameter.main_grad.cpu() - wanted).abs().max())
            worst = max(worst, error / max(float(whole.abs().max()), 1e-12))
    return worst


class Spans(list):
    def record(self, span) -> None:
        self.append(span)


def main_grads(ddp: Any) -> dict[str, torch.Tensor]:
    """Name -> float32 gradient sums of this rank, after `finish_step`."""
    return {name: parameter.main_grad for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}
