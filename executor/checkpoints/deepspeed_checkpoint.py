"""A run's checkpoints as a DeepSpeed folder: ROOT/latest names a tag, ROOT/iter_0000010, which `load_checkpoint` and
conversion read; beside DeepSpeed's files in it lies where the run stands, `dynapipe.json`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dynapipe_ext.config import CheckpointSettings
from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.checkpoints import folder as folders
from dynapipe_ext.executor.checkpoints.all_ranks import SavingRanks
from dynapipe_ext.executor.checkpoints.manifest import Manifest, RunState, read_manifest, refuse_other_model
from dynapipe_ext.executor.stages.collectives import named_collectives
from dynapipe_ext.executor.stages.deepspeed_engine import DeepSpeedOptimizer

_LATEST = "latest"
_PACKAGES = ("dynapipe-ext", "torch", "deepspeed")


class EngineSaver:
    """Saves an engine's checkpoints below `root`, all ranks together; each appears there whole or not at all.

    After that of step `num_steps`, `save_last` is called on all ranks. Errors: ExecutionError on all ranks where one
    cannot write; what was saved before stays.
    """

    def __init__(
        self,
        root: Path,
        engine: Any,
        optimizer: DeepSpeedOptimizer,
        settings: CheckpointSettings,
        *,
        num_steps: int,
        save_last: Callable[[], None] | None = None,
    ) -> None:
        self._root, self._engine, self._optimizer, self._settings = root, engine, optimizer, settings
        self._num_steps, self._save_last = num_steps, save_last
        self._ranks = SavingRanks(root, engine.device)
        self.most = self._ranks.most
        if dist.get_rank() == 0:
            folders.tidy(root)

    def save(self, run: RunState) -> None:
        part = folders.part_folder(self._root, run.step)
        with named_collectives(f"checkpoint of step {run.step}"):
            self._ranks.on_first(lambda: folders.begin(self._root, run.step))
            self._ranks.on_every(partial(self._engine.save_checkpoint, str(self._root), part.name, save_latest=False))
            self._ranks.on_first(lambda: self._publish(part, run))
            if self._save_last is not None and run.step >= self._num_steps:
                self._save_last()

    def _publish(self, part: Path, run: RunState) -> None:
        manifest = Manifest(
            run=run,
            optimizer=self._optimizer.place,
            versions={name: version(name) for name in _PACKAGES},
            files={file.name: file.stat().st_size for file in sorted(part.iterdir()) if file.is_file()},
            tensors={},
        )
        folder = folders.publish(part, manifest)
        latest = self._root / f".{_LATEST}.part"
        latest.write_text(folder.name)
        os.replace(latest, self._root / _LATEST)
        folders.retain(self._root, last=self._settings.keep_last, best=self._settings.keep_best)

    def advance(self, *, wait: bool = False) -> None:
        """Nothing goes on in the background."""

    def close(self) -> None: ...


def load_engine(folder: Path, engine: Any, optimizer: DeepSpeedOptimizer, *, model: Mapping[str, Any]) -> RunState:
    """Put weights, moments and schedule of a run's checkpoint back; where the run stood.

    DeepSpeed unpickles its files: load only what you trust. Replicas must be as many as have saved it where optimizer
    states are divided over them. Errors: DataError for another model, or what the engine cannot take on.
    """
    manifest = read_manifest(folder)
    refuse_other_model(manifest.run.model, model, folder)
    num_replicas, saved = engine.dp_world_size, manifest.run.settings["topology"]["dp"]
    if engine.zero_optimization_stage() and num_replicas != saved:
        raise DataError(
            f"{folder} divides optimizer states over {saved} replicas but this run has {num_replicas}: resume with --dp"
            f" {saved}, or convert it to deepspeed (a universal checkpoint) for DeepSpeed itself"
        )
    path, _ = engine.load_checkpoint(
        str(folder.parent), tag=folder.name, load_lr_scheduler_states=not manifest.optimizer.schedule
    )
    if path is None:
        raise DataError(f"{folder} holds no checkpoint that DeepSpeed finds: resume from another one")
    optimizer.restore(manifest.optimizer)
    return manifest.run
