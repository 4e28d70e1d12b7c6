"""A rank's part of a model that transformers computes and a DeepSpeed engine trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynapipe_ext.costs.states import StateBytes, state_bytes
from dynapipe_ext.executor.checkpoints.deepspeed_checkpoint import engine_saver, load_engine
from dynapipe_ext.executor.checkpoints.saving import SavingTogether
from dynapipe_ext.executor.stages.deepspeed.engine import DeepSpeedOptimizer, make_engine
from dynapipe_ext.executor.stages.deepspeed.stage import engine_model, engine_stage
from dynapipe_ext.executor.stages.position_losses import PositionLoss, weighted_sum
from dynapipe_ext.executor.stages.transformers.part import TransformersPart
from dynapipe_ext.executor.stages.transformers.stage import LossOfLogits, TransformersStage
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from dynapipe_ext.launch.job.configured import topology_of, trained_recipe
from dynapipe_ext.launch.processes.cluster import say_at_once
from dynapipe_ext.launch.rank.built_model import BuiltModel
from dynapipe_ext.launch.rank.transformers_run import model_description, rank_parts
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.settings.deepspeed_settings import make_engine_config
from dynapipe_ext.settings.train_config import TrainConfig


def build_deepspeed(
    config: TrainConfig, architecture: Architecture, device: torch.device, *, of_positions: PositionLoss = weighted_sum
) -> BuiltModel:
    """Every rank calls it at the same point. Weights are those of `[model] init_from`, else drawn by the seed."""
    settings, topology, num_steps = config.deepspeed, topology_of(config), config.run.steps
    assert settings.described is not None
    parallel = ParallelContext(topology, device=device, timeout_s=config.job.timeout_s)
    made = make_engine_config(
        settings.described,
        config.optimizer,
        dtype=config.model.dtype,
        hidden_size=architecture.hidden_size,
        num_steps=num_steps,
        num_replicas=topology.dp,
        compiles=device.type == "cuda",
    )
    for line in made.overridden if torch.distributed.get_rank() == 0 else ():
        print(f"{settings.config}: {line}", file=sys.stderr)
    parts, adapts = rank_parts(config, parallel, device), config.lora.enabled
    weights = {weight: weight.numel() for part in parts for weight in part.parameters()}  # before any is divided
    trained = sum(size for weight, size in weights.items() if weight.requires_grad)
    states = _states(config, trained, frozen=sum(weights.values()) - trained)
    engine = make_engine(engine_model(parts), made.config, parallel)
    stage = _stage(config, engine, parts, parallel, LossOfLogits(of_positions))
    optimizer = DeepSpeedOptimizer(engine, config.optimizer, num_steps=num_steps, parallel=parallel, device=device)
    description = model_description(config, architecture) | {"zero_stage": settings.zero_stage}

    def saver(root: Path, num_bytes: int) -> SavingTogether:
        return engine_saver(
            root,
            engine,
            parts,
            optimizer,
            config.checkpoint,
            parallel,
            num_steps=num_steps,
            adapts=adapts,
            num_bytes=num_bytes,
        )

    return BuiltModel(
        stage=stage,
        optimizer=optimizer,
        modules=parts,
        description=description,
        saver=saver,
        num_trained=trained,
        restore=lambda folder: load_engine(folder, engine, optimizer, model=description, adapts=adapts),
        held_bytes=lambda: int(states.total[0]),
    )


def _stage(
    config: TrainConfig, engine: Any, parts: list[TransformersPart], parallel: ParallelContext, loss: LossOfLogits
) -> TransformersStage:
    is_cpu, gathers_weights = parallel.device.type == "cpu", config.deepspeed.zero_stage == 3
    if is_cpu and gathers_weights and dist.get_rank() == 0:
        say_at_once("memory: measured figures are of weights and states alone, since ZeRO 3 on CPUs hides activations")
    measures = is_cpu and not gathers_weights
    return engine_stage(engine, parts, parallel=parallel, loss=loss, measure_bytes=measures)


def _states(config: TrainConfig, trained: int, *, frozen: int) -> StateBytes:
    """What a rank holds of so many weights beside activations."""
    return state_bytes(
        trained,
        trained_recipe(config),
        zero_stage=config.deepspeed.zero_stage,
        dp=config.topology.dp,
        frozen_parameters=frozen,
        num_moments=config.deepspeed.num_moments,
    )
