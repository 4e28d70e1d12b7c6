"""A run's checkpoints as a DeepSpeed folder: ROOT/latest names a tag, ROOT/iter_0000010, which `load_checkpoint` and
conversion read; beside DeepSpeed's files in it lies where the run stands, `dynapipe.json`, and in those that a run's
output may be made of the model itself, in MODEL_FOLDER."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynapipe_ext.durable_files import replace_file
from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.checkpoints.folder import MODEL_FOLDER, RunState
from dynapipe_ext.executor.checkpoints.saving import SavingTogether, open_checkpoint
from dynapipe_ext.executor.stages.deepspeed.engine import DeepSpeedOptimizer, gathered, refuse_foreign_pickles
from dynapipe_ext.executor.stages.transformers.part import TransformersPart
from dynapipe_ext.executor.stages.transformers.saving import join_stages, write_stages
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from dynapipe_ext.settings.tables import CheckpointSettings

_LATEST = "latest"


def engine_saver(
    root: Path,
    engine: Any,
    parts: Sequence[TransformersPart],
    optimizer: DeepSpeedOptimizer,
    settings: CheckpointSettings,
    parallel: ParallelContext,
    *,
    num_steps: int,
    adapts: bool = False,
    num_bytes: int = 0,
) -> SavingTogether:
    """In a checkpoint that is the last of `num_steps`, or may be the best, lies the model, too, where an output is made
    of it. Of one that `adapts`, frozen weights are left out."""

    def write(folder: Path, _run: RunState) -> None:
        engine.save_checkpoint(str(root), folder.name, save_latest=False, exclude_frozen_parameters=adapts)

    def write_model(folder: Path, run: RunState) -> None:
        if settings.output and (settings.keep_best or run.step >= num_steps):
            with gathered(engine, trained_alone=adapts):
                if parallel.coordinates.dp_rank == 0:
                    write_stages(parts, folder / MODEL_FOLDER)

    def join(folder: Path) -> None:
        if (folder / MODEL_FOLDER).is_dir():
            join_stages(folder / MODEL_FOLDER, parts[0].place.num_stages)

    def point(folder: Path) -> None:
        replace_file(root / _LATEST, folder.name.encode())

    return SavingTogether(
        root,
        settings,
        engine.device,
        [write, write_model],
        join=join,
        published=point,
        place=lambda: optimizer.place,
        framework="deepspeed",
        num_bytes=num_bytes,
    )


def load_engine(
    folder: Path, engine: Any, optimizer: DeepSpeedOptimizer, *, model: Mapping[str, Any], adapts: bool = False
) -> RunState:
    """Put weights, moments and schedule of a run's checkpoint back; where the run stood.

    DeepSpeed unpickles its files, so they are searched first for names that its own checkpoints do not have. The
    topology must be that which has saved it, but for replicas over which nothing is divided. Errors: DataError for such
    a name, another model, or what the engine cannot take on.
    """
    manifest = open_checkpoint(folder, model, engine.device)
    saved, own = manifest.run.settings["topology"], {"pp": engine.mp_world_size, "dp": engine.dp_world_size}
    if not engine.zero_optimization_stage():
        own.pop("dp")
    if differing := [name for name, size in own.items() if saved[name] != size]:
        flags = " ".join(f"--{name} {saved[name]}" for name in differing)
        raise DataError(
            f"{folder} divides weights or optimizer states over {_sizes(saved, differing)} but this run has"
            f" {_sizes(own, differing)}: resume with {flags}, or convert it to deepspeed (a universal checkpoint) for"
            " DeepSpeed itself"
        )
    refuse_foreign_pickles(folder)
    configured = [_hyperparameters(group) for group in engine.optimizer.param_groups]
    path, _ = engine.load_checkpoint(
        str(folder.parent),
        tag=folder.name,
        load_module_strict=not adapts,
        load_lr_scheduler_states=not manifest.optimizer.schedule,
    )
    if path is None:
        raise DataError(f"{folder} holds no checkpoint that DeepSpeed finds: resume from another one")
    for group, of_now in zip(engine.optimizer.param_groups, configured, strict=True):
        group.update(of_now)  # DeepSpeed puts the saved ones in their place
    optimizer.restore_place(manifest.optimizer)
    return manifest.run


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group of parameters that settings decide, such as betas; learning rates follow their schedule."""
    return {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr", "step")}


def _sizes(degrees: Mapping[str, int], names: Sequence[str]) -> str:
    return " x ".join(f"{name} {degrees[name]}" for name in names)
