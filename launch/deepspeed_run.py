"""A rank's model that transformers computes and a DeepSpeed engine trains."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.costs.states import StateRecipe, state_bytes
from dynapipe_ext.deepspeed_config import engine_config
from dynapipe_ext.executor.checkpoints.deepspeed_checkpoint import EngineSaver, load_engine
from dynapipe_ext.executor.stages.deepspeed_engine import DeepSpeedOptimizer, gathered, make_engine
from dynapipe_ext.executor.stages.deepspeed_stage import engine_stage
from dynapipe_ext.executor.stages.transformers_saving import save_parts
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from dynapipe_ext.launch.built_model import BuiltModel
from dynapipe_ext.launch.job import topology_of
from dynapipe_ext.launch.trained_model import MODEL_FOLDER
from dynapipe_ext.launch.transformers_run import rank_parts
from dynapipe_ext.models.architecture import Architecture


def build_deepspeed(config: TrainConfig, architecture: Architecture, device: torch.device) -> BuiltModel:
    """Every rank calls it at the same point. Weights are those of `[model] init_from`, else drawn by the seed."""
    settings, topology, num_steps = config.deepspeed, topology_of(config), config.run.steps
    assert settings.described is not None
    parallel = ParallelContext(topology, device=device, timeout_s=config.job.timeout_s)
    made = engine_config(
        settings.described,
        config.optimizer,
        dtype=config.model.dtype,
        hidden_size=architecture.hidden_size,
        num_steps=num_steps,
        num_replicas=topology.dp,
        compiles=device.type == "cuda",
    )
    if torch.distributed.get_rank() == 0:
        for line in made.overridden:
            print(f"{settings.config}: {line}", file=sys.stderr)
    (part,) = rank_parts(config, parallel, device)
    num_parameters = sum(parameter.numel() for parameter in part.parameters())
    recipe: StateRecipe = "fp32" if config.model.dtype == "float32" else "deepspeed"
    engine = make_engine(part.model, made.config, device)
    stage = engine_stage(engine, part, parallel=parallel)
    optimizer = DeepSpeedOptimizer(engine, config.optimizer, num_steps=num_steps, parallel=parallel, device=device)
    states = state_bytes(num_parameters, recipe, zero_stage=settings.zero_stage, dp=topology.dp)
    description = asdict(architecture) | {"dtype": config.model.dtype, "zero_stage": settings.zero_stage}

    def save_model(folder: Path) -> None:
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of the end that this run was resumed to go beyond
        with gathered(engine):
            save_parts([part], folder, parallel=parallel, writes=parallel.coordinates.dp_rank == 0)

    def saver(root: Path) -> EngineSaver:
        last = partial(save_model, root / MODEL_FOLDER) if config.checkpoint.output else None
        return EngineSaver(root, engine, optimizer, config.checkpoint, num_steps=num_steps, save_last=last)

    return BuiltModel(
        stage=stage,
        optimizer=optimizer,
        modules=[part],
        description=description,
        saver=saver,
        restore=lambda folder: load_engine(folder, engine, optimizer, model=description),
        held_bytes=lambda: int(states.total[0]),
    )
