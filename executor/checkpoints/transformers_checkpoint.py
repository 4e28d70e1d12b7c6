"""Checkpoints of models that transformers computes: each a folder that `from_pretrained` reads (peft's where adapters
train: it holds these alone), and beside the model

optimizer-PP.safetensors     exp_avg.NAME, exp_avg_sq.NAME and, of 16-bit weights, master.NAME of a pipeline rank
dynapipe.json                where the run stands

Tensors go by their weights' names in the whole model, so that ranks of any topology find theirs.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.checkpoints.folder import OPTIMIZER_FILES, RunState
from dynapipe_ext.executor.checkpoints.saving import SavingTogether, open_checkpoint
from dynapipe_ext.executor.stages.transformers.optimizer import TransformersOptimizer
from dynapipe_ext.executor.stages.transformers.part import TransformersPart
from dynapipe_ext.executor.stages.transformers.parts import parts_of_folder
from dynapipe_ext.executor.stages.transformers.saving import (
    ADAPTER_FILE,
    join_stages,
    load_adapters,
    write_stages,
)
from dynapipe_ext.executor.transport.parallel_context import ParallelContext
from dynapipe_ext.settings.tables import CheckpointSettings


def parts_saver(
    root: Path,
    parts: Sequence[TransformersPart],
    optimizer: TransformersOptimizer,
    parallel: ParallelContext,
    settings: CheckpointSettings,
    num_bytes: int = 0,
) -> SavingTogether:
    """Of replicas, which hold the same, the first writes."""
    coordinates = parallel.coordinates

    def write(folder: Path, _run: RunState) -> None:
        if coordinates.dp_rank == 0:
            write_stages(parts, folder)
            save_file(optimizer.tensors(), folder / OPTIMIZER_FILES.replace("*", str(coordinates.pp_rank)))

    return SavingTogether(
        root,
        settings,
        next(parts[0].parameters()).device,
        [write],
        join=lambda folder: join_stages(folder, parts[0].place.num_stages),
        place=lambda: optimizer.place,
        framework="transformers",
        num_bytes=num_bytes,
    )


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
    manifest = open_checkpoint(folder, model, next(parts[0].parameters()).device)
    pp_rank, dtype = parallel.coordinates.pp_rank, getattr(torch, model["dtype"])
    with _reading(folder, manifest.files) as stored:
        if (folder / ADAPTER_FILE).exists():
            load_adapters(folder, parts)
        else:
            saved = parts_of_folder(
                folder, parallel.topology, pp_rank, pattern=parts[0].pattern, dtype=dtype, use_safetensors=True
            )
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
def _reading(folder: Path, names: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """The open file that holds it, by every tensor's key, of the optimizer's files among `names`. Errors: DataError for
    what is damaged."""
    try:
        with ExitStack() as stack:
            stored: dict[str, Any] = {}
            for name in fnmatch.filter(names, OPTIMIZER_FILES):
                file = stack.enter_context(safe_open(folder / name, framework="pt"))
                stored |= dict.fromkeys(file.keys(), file)
            yield stored
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder} cannot be read ({error}): resume from another checkpoint") from error
