"""Checkpoints of models that transformers computes: each a folder that `from_pretrained` reads (peft's where adapters
train: it holds these alone), and beside the model

optimizer-PP.safetensors     exp_avg.NAME, exp_avg_sq.NAME and, of 16-bit weights, master.NAME of a pipeline rank
dynapipe.json                where the run stands

Tensors go by their weights' names in the whole model, so that ranks of any topology find theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dynapipe_ext.config import CheckpointSettings
from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.checkpoints import folder as folders
from dynapipe_ext.executor.checkpoints.all_ranks import SavingRanks
from dynapipe_ext.executor.checkpoints.manifest import (
    OPTIMIZER_FILES,
    Manifest,
    RunState,
    read_manifest,
    refuse_other_model,
)
from dynapipe_ext.executor.stages.collectives import named_collectives
from dynapipe_ext.executor.stages.transformers_optimizer import TransformersOptimizer
from dynapipe_ext.executor.stages.transformers_parts import TransformersPart, parts_of_folder
from dynapipe_ext.executor.stages.transformers_saving import ADAPTER_FILE, join_stages, load_adapters, write_stages
from dynapipe_ext.executor.transport.parallel_context import ParallelContext

_PACKAGES = ("dynapipe-ext", "torch", "transformers")


class PartsSaver:
    """Saves a run below `root`, a folder that all ranks reach; of replicas, which hold the same, the first writes.

    Errors: ExecutionError on all ranks where one cannot write; what was saved before stays.
    """

    def __init__(
        self,
        root: Path,
        parts: Sequence[TransformersPart],
        optimizer: TransformersOptimizer,
        parallel: ParallelContext,
        settings: CheckpointSettings,
    ) -> None:
        self._root, self._parts, self._optimizer, self._settings = root, parts, optimizer, settings
        self._coordinates = parallel.coordinates
        device = next(parts[0].parameters()).device
        self._ranks = SavingRanks(root, device, faults=(OSError, RuntimeError, SafetensorError))
        self.most = self._ranks.most
        if dist.get_rank() == 0:
            folders.tidy(root)

    def save(self, run: RunState) -> None:
        part = folders.part_folder(self._root, run.step)
        with named_collectives(f"checkpoint of step {run.step}"):
            self._ranks.on_first(lambda: folders.begin(self._root, run.step))
            self._ranks.on_every(lambda: self._write(part))
            self._ranks.on_first(lambda: self._publish(part, run))

    def _write(self, part: Path) -> None:
        if self._coordinates.dp_rank == 0:
            write_stages(self._parts, part)
            file = OPTIMIZER_FILES.replace("*", str(self._coordinates.pp_rank))
            save_file(self._optimizer.tensors(), part / file)

    def _publish(self, part: Path, run: RunState) -> None:
        join_stages(part, self._parts[0].place.num_stages)
        manifest = Manifest(
            run=run,
            optimizer=self._optimizer.place,
            versions={name: version(name) for name in _PACKAGES},
            files={file.name: file.stat().st_size for file in sorted(part.iterdir())},
            tensors={},
        )
        folders.publish(part, manifest)
        folders.retain(self._root, last=self._settings.keep_last, best=self._settings.keep_best)

    def advance(self, *, wait: bool = False) -> None:
        """Nothing goes on in the background."""

    def close(self) -> None: ...


def load_parts(
    folder: Path,
    parts: Sequence[TransformersPart],
    optimizer: TransformersOptimizer,
    parallel: ParallelContext,
    *,
    model: Mapping[str, Any],
) -> RunState:
    """Put weights, moments and schedule of a run's checkpoint into this rank, whatever topology saved them; where the
    run stood. `model` is compared with the RunState's. Nothing is unpickled.

    Errors: DataError naming what the folder lacks, or in what its model differs.
    """
    manifest = read_manifest(folder)
    refuse_other_model(manifest.run.model, model, folder)
    pp_rank, dtype = parallel.coordinates.pp_rank, getattr(torch, model["dtype"])
    with _reading(folder) as stored:
        if (folder / ADAPTER_FILE).exists():
            load_adapters(folder, parts)
        else:
            saved = parts_of_folder(folder, parallel.topology, pp_rank, dtype=dtype, use_safetensors=True)
            for own, part in zip(parts, saved, strict=True):
                own.load_state_dict(part.state_dict())

        def read(key: str, like: torch.Tensor) -> torch.Tensor:
            if key not in stored:
                raise DataError(f"{folder} lacks {key}: it was saved without its optimizer, resume from another")
            tensor: torch.Tensor = stored[key].get_tensor(key)
            if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                raise DataError(
                    f"{folder} holds {key} as {tensor.dtype} {list(tensor.shape)}, but the model has {like.dtype}"
                    f" {list(like.shape)}: resume with the model it was saved with"
                )
            return tensor.to(like.device)

        optimizer.restore(manifest.optimizer, read)
    return manifest.run


@contextmanager
def _reading(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The open file that holds it, by every tensor's key. Errors: DataError for what is damaged."""
    try:
        with ExitStack() as stack:
            stored: dict[str, Any] = {}
            for path in folder.glob(OPTIMIZER_FILES):
                file = stack.enter_context(safe_open(path, framework="pt"))
                stored |= dict.fromkeys(file.keys(), file)
            yield stored
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder} cannot be read ({error}): resume from another checkpoint") from error
