"""Saves a rank's model and optimizer with where the run stands, all ranks together, and puts them back.

saver = CheckpointSaver(root, chunks, optimizer, arguments, keep_last=2, keep_best=True)
saver.save(run_state)        # every rank, between two steps
saver.advance()              # every rank, once a step: ends a save in the background, or raises its error

manifest = load_checkpoint(latest(root), chunks, optimizer, model=sizes)
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dynapipe_ext.executor.checkpoints import folder as folders
from dynapipe_ext.executor.checkpoints.all_ranks import SavingRanks
from dynapipe_ext.executor.checkpoints.manifest import (
    Manifest,
    OptimizerPlace,
    RunState,
    SavedTensor,
    read_manifest,
    refuse_other_model,
)
from dynapipe_ext.executor.stages.collectives import named_collectives
from dynapipe_ext.executor.stages.megatron import Chunks
from dynapipe_ext.executor.stages.megatron_optimizer import SHARDING, MegatronOptimizer

if TYPE_CHECKING:  # it needs megatron, which is imported once its CUDA calls are settled
    from dynapipe_ext.executor.checkpoints.megatron_tensors import TensorWriter

_PACKAGES = ("dynapipe-ext", "torch", "megatron-core")


class CheckpointSaver:
    """Checkpoints of one run below `root`, a folder that all ranks reach; a context manager, entered by every rank.

    `arguments` describe the model by Megatron's names, for Megatron and for conversion. `keep_last` checkpoints stay
    (0: all), and with `keep_best` the one of the best `RunState.score`. `background`: `save` copies this rank's
    tensors to memory and returns; a thread writes them while training goes on.
    Errors: ExecutionError on all ranks where one cannot write; what was saved before stays.
    """

    def __init__(
        self,
        root: Path,
        chunks: Chunks,
        optimizer: MegatronOptimizer,
        arguments: Mapping[str, Any],
        *,
        keep_last: int = 0,
        keep_best: bool = False,
        background: bool = False,
    ) -> None:
        self._root, self._chunks, self._optimizer, self._arguments = root, chunks, optimizer, dict(arguments)
        self._keep_last, self._keep_best, self._background = keep_last, keep_best, background
        self._device = next(chunks[0].parameters()).device
        self._pending: _Pending | None = None
        from megatron.core.dist_checkpointing.core import CheckpointingException

        self._ranks = SavingRanks(root, self._device, faults=(OSError, RuntimeError, CheckpointingException))
        self.most = self._ranks.most
        if dist.get_rank() == 0:
            folders.tidy(root)

    def save(self, run: RunState) -> None:
        """Every rank calls it between two steps; one that is under way in the background is ended first."""
        self.advance(wait=True)
        with named_collectives(f"checkpoint of step {run.step}"):
            self._pending = self._started(run)
        self.advance(wait=not self._background)

    def advance(self, *, wait: bool = False) -> None:
        """End a save in the background once all ranks have written; `wait` until then. Every rank calls it."""
        pending = self._pending
        if pending is None:
            return
        with named_collectives(f"checkpoint of step {pending.run.step}"):
            if wait:
                pending.thread.join()
            elif self.most(pending.thread.is_alive(), pending.run.step):
                return
            self._pending = None
            tensors = pending.writer.finish(self._device)
            self._ranks.on_first(lambda: self._publish(pending, tensors))

    def _started(self, run: RunState) -> _Pending:
        from megatron.core import dist_checkpointing

        from dynapipe_ext.executor.checkpoints.megatron_tensors import TensorWriter

        model, place = _model_state(self._chunks), self._optimizer.place
        progress = {"iteration": run.step, "consumed_train_samples": run.num_samples, "no_save_rng": True}
        state = {
            **model,
            "optimizer": self._optimizer.sharded_state(model),
            "args": argparse.Namespace(**self._arguments, **progress),
            "checkpoint_version": 3.0,
            "iteration": run.step,
            "opt_param_scheduler": dict(place.schedule),
        }
        self._ranks.on_first(lambda: folders.begin(self._root, run.step))
        part, writer = folders.part_folder(self._root, run.step), TensorWriter(copy_first=self._background)
        request = self._ranks.on_every(
            lambda: dist_checkpointing.save(
                state, str(part), writer, async_sharded_save=True, content_metadata=dict(SHARDING)
            )
        )
        thread = threading.Thread(target=request.async_fn, args=request.async_fn_args, name="dynapipe-checkpoint")
        thread.start()
        return _Pending(run, place, part, writer, thread)

    def _publish(self, pending: _Pending, tensors: Mapping[str, SavedTensor]) -> None:
        pending.writer.write_metadata(pending.part)
        manifest = Manifest(
            run=pending.run,
            optimizer=pending.place,
            versions={name: version(name) for name in _PACKAGES},
            files={file.name: file.stat().st_size for file in sorted(pending.part.iterdir())},
            tensors=tensors,
        )
        folders.publish(pending.part, manifest)
        folders.retain(self._root, last=self._keep_last, best=self._keep_best)

    def close(self) -> None:
        """Wait for this rank's writing and no other's: some may be gone. The next start tidies up what it wrote."""
        if self._pending is not None:
            self._pending.thread.join()

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.advance(wait=True)
        self.close()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A save whose tensors are being written."""

    run: RunState
    place: OptimizerPlace
    part: Path
    writer: TensorWriter
    thread: threading.Thread


def _model_state(chunks: Chunks) -> dict[str, Any]:
    """Megatron's description of a rank's weights by its own words: "model", or "model0", … for several chunks.

    Tensors are told apart by their keys, which are names in the whole model: any placement takes what another saved.
    """
    states = [chunk.module.sharded_state_dict(metadata=SHARDING) for chunk in chunks]
    return {"model": states[0]} if len(states) == 1 else {f"model{i}": state for i, state in enumerate(states)}


def load_checkpoint(
    folder: Path, chunks: Chunks, optimizer: MegatronOptimizer, *, model: Mapping[str, Any]
) -> Manifest:
    """Put weights, moments and schedule of a checkpoint into this rank, whatever topology saved them; what it says.

    `model` is compared with the RunState's. Nothing is unpickled but tensors.
    Errors: DataError naming what the folder lacks, or in what its model differs.
    """
    from dynapipe_ext.executor.checkpoints.megatron_tensors import read_tensors

    manifest = read_manifest(folder)
    refuse_other_model(manifest.run.model, model, folder)
    optimizer.restore(
        _model_state(chunks), manifest.optimizer, lambda whole: read_tensors(folder, manifest.tensors, whole)
    )
    return manifest
