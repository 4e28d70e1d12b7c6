"""A rank's part of a model that megatron-core computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.executor.checkpoints.folder import RunState
from dynapipe_ext.executor.checkpoints.megatron_checkpoint import CheckpointSaver, load_checkpoint
from dynapipe_ext.executor.checkpoints.saving import Saver
from dynapipe_ext.executor.device import most_of_ranks
from dynapipe_ext.executor.free_memory import free_bytes
from dynapipe_ext.executor.stages.joined_ranks import ALONE, Joined
from dynapipe_ext.executor.stages.megatron.exact import ExactMegatronGradients
from dynapipe_ext.executor.stages.megatron.model import build_chunks, build_model, transformer_config
from dynapipe_ext.executor.stages.megatron.optimizer import MegatronOptimizer
from dynapipe_ext.executor.stages.megatron.stage import MegatronStage, gpt_call, own_parameters, wrap_ddp
from dynapipe_ext.executor.stages.position_losses import PositionLoss, weighted_sum
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.launch.job.model_folder import load_initial_weights
from dynapipe_ext.launch.rank.built_model import BuiltModel
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.written_arguments import run_arguments
from dynapipe_ext.settings.train_config import TrainConfig

_COPY_MARGIN = 3  # times the bytes of a checkpoint, as its copy grows in memory


def build_megatron(
    config: TrainConfig,
    architecture: Architecture,
    rank: int,
    device: torch.device,
    *,
    of_positions: PositionLoss = weighted_sum,
    joined: Joined = ALONE,
) -> BuiltModel:
    """Every rank calls it at the same point, once Megatron's parallel state is there. Weights are those of `[model]
    init_from`, else drawn by the seed. `joined`: the ranks that plans may join with this one, by width."""
    settings = transformer_config(
        architecture,
        topology_of(config),
        dtype=config.model.dtype,
        sequence_parallel=config.topology.sequence_parallel,
        dropout=config.model.dropout,
        deterministic=config.optimizer.deterministic,
    )
    chunks = _chunks(config, architecture, settings, rank, device)
    optimizer = MegatronOptimizer(chunks, settings, config.optimizer, num_steps=config.run.steps)
    stage = _stage(config, architecture, chunks, of_positions, joined, measure_bytes=device.type == "cpu")
    num_sum_bytes = 8 * config.optimizer.deterministic * sum(p.numel() for c in chunks for p in c.parameters())
    description = architecture.to_json() | {"dtype": config.model.dtype}

    def saver(root: Path, num_bytes: int) -> Saver:
        return CheckpointSaver(
            root,
            chunks,
            optimizer,
            run_arguments(architecture, config.model.dtype),
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            background=_has_memory_for_copy(num_bytes, device),
            num_bytes=num_bytes,
        )

    def restore(folder: Path) -> RunState:
        return load_checkpoint(folder, chunks, optimizer, model=description).run

    return BuiltModel(
        stage=stage,
        optimizer=optimizer,
        modules=chunks,
        description=description,
        saver=saver,
        restore=restore,
        num_trained=sum(weight.numel() for weight in own_parameters(chunks)),
        held_bytes=lambda: optimizer.state_bytes() + stage.weight_bytes() + num_sum_bytes,
    )


def _has_memory_for_copy(num_bytes: int, device: torch.device) -> bool:
    """Return, on all ranks alike, whether the host's memory holds a copy of what accelerators save."""
    return device.type != "cpu" and not most_of_ranks(int(_COPY_MARGIN * num_bytes > free_bytes()), device)


def _chunks(
    config: TrainConfig, architecture: Architecture, settings: Any, rank: int, device: torch.device
) -> list[Any]:
    """A rank's chunks with their first weights, one a stage, each in its DDP."""
    topology, seed = topology_of(config), None if config.model.init_from else config.run.seed

    def build(stage: int) -> torch.nn.Module:
        return build_model(architecture, topology, stage, settings, seed=seed, device=device)

    models = build_chunks(architecture, topology, topology.coordinates(rank).pp_rank, build)
    if config.model.init_from:
        for model in models:
            load_initial_weights(model, config.model.init_from, architecture)
    return [wrap_ddp(model, settings, distributed_optimizer=config.optimizer.distributed) for model in models]


def _stage(
    config: TrainConfig,
    architecture: Architecture,
    chunks: list[Any],
    of_positions: PositionLoss,
    joined: Joined,
    *,
    measure_bytes: bool,
) -> MegatronStage:
    """A rank's chunks as the executor runs them, whose loss is made of those of positions."""
    deterministic = config.optimizer.deterministic
    options: dict[str, Any] = {"dropout": config.model.dropout > 0, "measure_bytes": measure_bytes, "joined": joined}
    if architecture.num_decoder_layers:
        from dynapipe_ext.executor.stages.megatron.t5 import t5_stage

        return t5_stage(chunks, deterministic=deterministic, **options)
    exact = ExactMegatronGradients(chunks) if deterministic else None
    return MegatronStage(chunks, call=partial(gpt_call, of_positions=of_positions), gradients=exact, **options)
