"""A rank's part of a model that transformers itself computes: families without a twin in megatron-core."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dynapipe_ext.executor.checkpoints.transformers_checkpoint import load_parts, parts_saver
from dynapipe_ext.executor.stages.accumulator import ExactAccumulator, Float32Accumulator
from dynapipe_ext.executor.stages.chunk_runner import PlainAccumulator
from dynapipe_ext.executor.stages.joined_ranks import ALONE, Joined
from dynapipe_ext.executor.stages.position_losses import PositionLoss, weighted_sum
from dynapipe_ext.executor.stages.torch_stage import MakeAccumulator
from dynapipe_ext.executor.stages.transformers.optimizer import TransformersOptimizer
from dynapipe_ext.executor.stages.transformers.part import TransformersPart
from dynapipe_ext.executor.stages.transformers.parts import parts_of_config, parts_of_folder
from dynapipe_ext.executor.stages.transformers.stage import LossOfLogits, TransformersStage
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.launch.job.model_folder import part_options
from dynapipe_ext.launch.rank.built_model import BuiltModel
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.settings.train_config import TrainConfig


def build_transformers(
    config: TrainConfig,
    architecture: Architecture,
    device: torch.device,
    *,
    of_positions: PositionLoss = weighted_sum,
    joined: Joined = ALONE,
) -> BuiltModel:
    """Every rank calls it at the same point. Weights are those of `[model] init_from`, else drawn by the seed.
    `joined`: the ranks that plans may join with this one, by width."""
    parallel = ParallelContext(topology_of(config), device=device, timeout_s=config.job.timeout_s)
    parts = rank_parts(config, parallel, device, shares_rows=bool(joined))
    is_float32 = config.model.dtype == "float32"
    accumulator: MakeAccumulator = PlainAccumulator if is_float32 else Float32Accumulator
    if config.optimizer.deterministic:
        accumulator = partial(ExactAccumulator, in_float32=not is_float32)
    loss = LossOfLogits(of_positions)
    stage = TransformersStage(
        parts,
        loss=loss,
        accumulator=accumulator,
        parallel=parallel,
        measure_bytes=device.type == "cpu",
        joined=joined,
    )
    optimizer = TransformersOptimizer(parts, config.optimizer, num_steps=config.run.steps, parallel=parallel)
    weights = {p for part in parts for p in part.parameters()}
    num_grad_bytes = 12 if config.optimizer.deterministic else 4  # with the exact sum
    num_weight_bytes = sum(p.numel() * (p.element_size() + num_grad_bytes * p.requires_grad) for p in weights)
    description = model_description(config, architecture)
    return BuiltModel(
        stage=stage,
        optimizer=optimizer,
        modules=parts,
        description=description,
        saver=lambda root, num_bytes: parts_saver(root, parts, optimizer, parallel, config.checkpoint, num_bytes),
        restore=lambda folder: load_parts(folder, parts, optimizer, parallel, model=description),
        num_trained=sum(p.numel() for p in weights if p.requires_grad),
        held_bytes=lambda: num_weight_bytes + optimizer.state_bytes(),
    )


def model_description(config: TrainConfig, architecture: Architecture) -> dict[str, Any]:
    """What a checkpoint's model is told by."""
    description = architecture.to_json() | {"dtype": config.model.dtype}
    if config.lora.enabled:
        description["lora"] = config.to_json()["lora"] | {"target_modules": list(config.lora.target_modules)}
    return description


def rank_parts(
    config: TrainConfig, parallel: ParallelContext, device: torch.device, *, shares_rows: bool = False
) -> list[TransformersPart]:
    """This rank's parts of the run's model, with adapters where these are to train. `shares_rows`: plans may join
    ranks, whose attention is then ours in padded rows, too."""
    model, topology, pp_rank = config.model, parallel.topology, parallel.coordinates.pp_rank
    dtype = getattr(torch, model.dtype)
    options = {"dtype": dtype, "dropout": model.dropout, **part_options(config, shares_rows=shares_rows)}
    if model.init_from:
        parts = parts_of_folder(model.init_from, topology, pp_rank, **options)
    else:
        parts = parts_of_config(model.architecture, topology, pp_rank, seed=config.run.seed, **options)
    if config.lora.enabled:
        from dynapipe_ext.executor.stages.transformers.adapters import add_adapters  # peft need not be there otherwise

        add_adapters(parts, config.lora, seed=config.run.seed)
    return [part.to(device) for part in parts]
