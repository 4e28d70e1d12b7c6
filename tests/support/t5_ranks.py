"""T5 on real Megatron ranks, and the same of transformers in one process, one pair at a time.

Import this at the top of a test module: forked ranks then find megatron and transformers imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dynapipe_ext.batch.micro_batches import Layout, LossNorm, MicroBatch, Recompute, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.layers import lay_out
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.pairs import PairSample, collate_pairs
from dynapipe_ext.executor.stages.megatron.model import (
    build_chunks,
    build_model,
    fill_weights,
    held_weights,
    initialize_parallel,
    tensor_slice,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron.optimizer import MegatronOptimizer
from dynapipe_ext.executor.stages.megatron.stage import wrap_ddp
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.settings.tables import OptimizerSettings
from dynapipe_ext.tools.checkpoint.megatron.names import to_megatron
from tests.support.megatron_ranks import CPU, planned, schedule_of, split_backwards

NUM_PAIRS = 9


@dataclass(frozen=True)
class PairCase:
    topology: Topology
    layout: Layout = "padded"
    variant: str = "t5"
    sequence_parallel: bool = False
    loss_norm: LossNorm = "tokens"
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    distributed_optimizer: bool = False
    dropout: float = 0.0
    weights_lag: int | None = None
    is_deterministic: bool = False

    def __str__(self) -> str:
        t = self.topology
        words = [self.variant, f"tp{t.tp}pp{t.pp}dp{t.dp}", self.layout, self.schedule]
        words += [f"width{t.width}"] * (t.width > 1)
        words += ["sp"] * self.sequence_parallel + [self.recompute] * (self.recompute != "none")
        words += [f"split{self.weights_lag}"] * (self.weights_lag is not None)
        words += ["exact"] * self.is_deterministic
        words += ["zero1"] * self.distributed_optimizer + ["samples"] * (self.loss_norm != "tokens")
        words += ["".join(map(str, t.placement))] * bool(t.placement)
        return "-".join(words + [str(n) for n in t.layers_per_stage])


def pairs() -> list[PairSample]:
    """Inputs and targets whose lengths differ by a factor of ten."""
    rng = np.random.default_rng(300)
    lengths = rng.integers(3, 31, (NUM_PAIRS, 2))
    ids = [(rng.integers(2, 131, e), rng.integers(2, 131, max(1, d // 2))) for e, d in lengths]
    return [PairSample(i, source, labels) for i, (source, labels) in enumerate(ids)]


def length_of_pair(sample: PairSample) -> SampleLength:
    return SampleLength(sample.index, len(sample.source), len(sample.labels), len(sample.labels))


def described(model: Any) -> Architecture:
    return read_config(model.config.to_dict() | {"tie_word_embeddings": model.config.tie_word_embeddings})


def in_megatrons_names(architecture: Architecture, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights or gradients of transformers' model as Megatron lays them out, the vocabulary unpadded."""
    found: dict[str, torch.Tensor] = {}
    for group in tensor_groups(architecture):
        found |= to_megatron(architecture, group, {info.name: tensors[info.name] for info in group.tensors})
    return found


def oracle_of(model: Any, loss_norm: LossNorm) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients by transformers' names) of a step, one pair at a time."""
    loss_sum = 0.0
    divisor = NUM_PAIRS if loss_norm == "samples" else sum(len(pair.labels) for pair in pairs())
    model.zero_grad()
    for pair in pairs():
        labels = torch.from_numpy(pair.labels)
        logits = model(input_ids=torch.from_numpy(pair.source)[None], labels=labels[None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / divisor
        if loss_norm == "samples":
            loss = loss / len(labels)
        loss.backward()
        loss_sum += float(loss.detach())
    return loss_sum, {name: p.grad.clone() for name, p in model.named_parameters()}


def build_pair_ddps(
    case: PairCase, architecture: Architecture, weights: Mapping[str, torch.Tensor], rank: int
) -> list[Any]:
    """The chunks of a rank, filled from whole weights by Megatron's names, each in its DDP."""
    topology = case.topology
    initialize_parallel(topology, 0, architecture=architecture)
    config = transformer_config(
        architecture,
        topology,
        dtype="float32",
        sequence_parallel=case.sequence_parallel,
        dropout=case.dropout,
        deterministic=case.is_deterministic,
    )
    chunks = build_chunks(
        architecture,
        topology,
        topology.coordinates(rank).pp_rank,
        lambda stage: build_model(architecture, topology, stage, config, seed=None, device=CPU),
    )
    for chunk in chunks:
        fill_weights(chunk, weights.items())
    return [wrap_ddp(chunk, config, distributed_optimizer=case.distributed_optimizer) for chunk in chunks]


def pair_optimizer(case: PairCase, ddps: Sequence[Any]) -> MegatronOptimizer:
    settings = OptimizerSettings(
        lr=1e-3,
        min_lr=1e-4,
        warmup_steps=1,
        weight_decay=0.01,
        clip_grad=0.5,
        distributed=case.distributed_optimizer,
        deterministic=case.is_deterministic,
    )
    return MegatronOptimizer(ddps, ddps[0].config, settings, num_steps=10)


def pair_step_plan(case: PairCase) -> StepPlan:
    """Uneven micro-batches (4, 2, 1 and 2 pairs); of two replicas one has one of them, the other three."""
    lengths = [length_of_pair(pair) for pair in pairs()]
    cuts = [lengths[:4], lengths[4:6], lengths[6:7], lengths[7:]]
    parts = [MicroBatch(tuple(cut), case.layout, case.recompute, pad_multiple=4) for cut in cuts]
    replicas = [parts] if case.topology.num_replicas == 1 else [parts[:1], parts[1:]]
    costs = [TokenCosts(case.topology.num_stages, transfer_ns_per_token=10).evaluate(replica) for replica in replicas]
    schedules = [schedule_of(case.schedule, c, case.topology) for c in costs]
    if case.weights_lag is not None:
        schedules = [split_backwards(schedule, case.weights_lag) for schedule in schedules]
    return planned(0, replicas, schedules, costs, case.loss_norm, case.topology.width)


def pair_format(case: PairCase, architecture: Architecture) -> ActivationFormat:
    shards = case.topology.tp if case.sequence_parallel else 1
    first = lay_out(architecture.num_layers, architecture.total_layers, case.topology).first_decoder_stage
    return ActivationFormat(architecture.hidden_size, sequence_shards=shards, first_decoder_stage=first)


def pair_tensors(micro_batch: MicroBatch, loss_norm: LossNorm) -> dict[str, Any]:
    arrays = collate_pairs(micro_batch, [pairs()[s.index] for s in micro_batch.samples], loss_norm=loss_norm)
    return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}


def worst_pair_error(topology: Topology, rank: int, chunks: Sequence[Any], expected: Mapping[str, Any]) -> float:
    """Largest difference of any gradient entry, relative to the largest entry of its parameter's gradient.

    Rows of padding in the vocabulary must have none.
    """
    worst, tp_rank = 0.0, topology.coordinates(rank).tp_rank
    for chunk in chunks:
        for name, parameter in held_weights(chunk):
            if not parameter.requires_grad:
                continue
            whole = expected[name]
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                missing = parameter.shape[0] * topology.tp - whole.shape[0]
                whole = torch.cat([whole, whole.new_zeros(missing, whole.shape[1])])
            wanted = tensor_slice(whole, parameter, tp_rank, topology.tp)
            error = float((parameter.main_grad - wanted).abs().max())
            worst = max(worst, error / max(float(whole.abs().max()), 1e-12))
    return worst
