"""A rank's part of a model that transformers itself computes: families without a twin in megatron-core."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.checkpoints.manifest import RunState
from dynapipe_ext.executor.stages.accumulator import ExactAccumulator, Float32Accumulator, PlainAccumulator
from dynapipe_ext.executor.stages.torch_stage import MakeAccumulator
from dynapipe_ext.executor.stages.transformers_optimizer import TransformersOptimizer
from dynapipe_ext.executor.stages.transformers_parts import TransformersPart, parts_of_config, parts_of_folder
from dynapipe_ext.executor.stages.transformers_saving import save_parts
from dynapipe_ext.executor.stages.transformers_stage import TransformersStage
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from dynapipe_ext.launch.built_model import BuiltModel
from dynapipe_ext.launch.job import topology_of
from dynapipe_ext.launch.trained_model import MODEL_FOLDER
from dynapipe_ext.models.architecture import Architecture


def build_transformers(config: TrainConfig, architecture: Architecture, device: torch.device) -> BuiltModel:
    """Every rank calls it at the same point. Weights are those of `[model] init_from`, else drawn by the seed."""
    parallel = ParallelContext(topology_of(config), device=device, timeout_s=config.job.timeout_s)
    parts = rank_parts(config, parallel, device)
    is_float32 = config.model.dtype == "float32"
    accumulator: MakeAccumulator = PlainAccumulator if is_float32 else Float32Accumulator
    if config.optimizer.deterministic:
        accumulator = partial(ExactAccumulator, in_float32=not is_float32)
    stage = TransformersStage(parts, accumulator=accumulator, parallel=parallel)
    optimizer = TransformersOptimizer(parts, config.optimizer, num_steps=config.run.steps, parallel=parallel)
    weights = {p for part in parts for p in part.parameters()}
    num_grad_bytes = 12 if config.optimizer.deterministic else 4  # with the exact sum
    num_weight_bytes = sum(p.numel() * (p.element_size() + num_grad_bytes * p.requires_grad) for p in weights)
    return BuiltModel(
        stage=stage,
        optimizer=optimizer,
        modules=parts,
        description=asdict(architecture) | {"dtype": config.model.dtype},
        saver=lambda root: PartsSaver(parts, parallel, root / MODEL_FOLDER, num_steps=config.run.steps),
        restore=_cannot_restore,
        held_bytes=lambda: num_weight_bytes + optimizer.state_bytes(),
    )


def rank_parts(config: TrainConfig, parallel: ParallelContext, device: torch.device) -> list[TransformersPart]:
    """This rank's parts of the run's model."""
    model, pp_rank, dtype = config.model, parallel.coordinates.pp_rank, getattr(torch, config.model.dtype)
    if model.init_from:
        parts = parts_of_folder(model.init_from, parallel.topology, pp_rank, dtype=dtype)
    else:
        parts = parts_of_config(model.architecture, parallel.topology, pp_rank, seed=config.run.seed, dtype=dtype)
    return [part.to(device) for part in parts]


class PartsSaver:
    """Saves the model alone, as the folder that `from_pretrained` reads: at the run's last step, and when it is asked
    to end. All ranks call it alike."""

    def __init__(
        self, parts: list[TransformersPart], parallel: ParallelContext, folder: Path, *, num_steps: int
    ) -> None:
        self._parts, self._parallel, self._folder, self._num_steps = parts, parallel, folder, num_steps

    def save(self, run: RunState) -> None:
        folder = self._folder
        if run.step < self._num_steps:
            folder = folder.with_name(f"{folder.name}-step-{run.step}")
        save_parts(self._parts, folder, parallel=self._parallel, writes=self._parallel.coordinates.dp_rank == 0)

    def advance(self, *, wait: bool = False) -> None:
        """Nothing goes on in the background."""

    def most(self, number: int) -> int:
        device = next(self._parts[0].parameters()).device
        numbers = torch.zeros(self._parallel.topology.world_size, dtype=torch.int64, device=device)
        numbers[torch.distributed.get_rank()] = number
        self._parallel.sum_over_job(numbers)
        return int(numbers.max())

    def close(self) -> None: ...


def _cannot_restore(folder: Path) -> RunState:
    raise ConfigError(f"{folder} cannot be gone on with: runs of transformers' own models save no optimizer states yet")
