"""A folder of Megatron checkpoints: what model it is, and how a written one is laid out.

ROOT/latest_checkpointed_iteration.txt     "10", or "release" for weights without a place in training
ROOT/iter_0000010/                         the checkpoint
ROOT/huggingface/                          config.json, tokenizer, generation config: carried along
ROOT/megatron_args.sh                      options for Megatron-LM that load it
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.executor.checkpoints.folder import MANIFEST, read_manifest
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.megatron_arguments import read_arguments, refuse_another_model
from dynapipe_ext.models.written_arguments import unsayable
from dynapipe_ext.tools.checkpoint.formats import TrainingState
from dynapipe_ext.tools.checkpoint.huggingface.carried_files import CARRIED_FOLDER, CONFIG, carried_files
from dynapipe_ext.tools.checkpoint.megatron.launch_options import write_script
from dynapipe_ext.tools.checkpoint.recognition import RELEASE, TRACKER
from dynapipe_ext.tools.files import write_atomic

_INVISIBLE = (  # in the shapes of tensors
    "num_heads", "num_query_groups", "activation", "norm_eps", "top_k", "norm_topk_prob", "rope_theta", "rope_scaling",
    "sliding_window", "router_score", "router_num_groups", "router_group_topk", "router_scale",
    "router_on_inputs", "attention_chunk", "qk_unit_norm", "temperature_floor", "temperature_scale",
)  # fmt: skip
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def carried(folder: Path) -> tuple[Path, ...]:
    """The model's files besides its weights, beside an iteration's folder or inside."""
    for place in (folder / CARRIED_FOLDER, folder.parent / CARRIED_FOLDER):
        if place.is_dir():
            return carried_files(place)
    for place in (folder, folder.parent):
        if (place / CONFIG).is_file():
            return carried_files(place)
    return ()


def read_architecture(
    folder: Path, files: Sequence[Path], arguments: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[Architecture, tuple[str, ...]]:
    """The model of a checkpoint, and what is to be said of it; `dtype` is that of its weights.

    Errors: DataError where neither a config.json nor arguments tell.
    """
    notices: list[str] = []
    config = next((file for file in files if file.name == CONFIG), None)
    try:
        refuse_another_model(arguments, f"{folder}: arguments")
        if config is not None:
            try:
                raw = json.loads(config.read_text(encoding="utf-8-sig"))
            except (OSError, ValueError) as error:
                raise DataError(f"{config} cannot be read ({error}): put the model's configuration there") from error
            architecture = read_config(raw, str(config))
            if arguments.get("multi_latent_attention") and not architecture.latent:
                raise DataError(
                    f"{folder}: multi_latent_attention is on but {config} is of a model without latent attention: put"
                    " the checkpoint's own there"
                )
            notices += _contradictions(architecture, arguments, config)
        elif "lost" in arguments and (folder / MANIFEST).is_file():  # a run's own, which says what arguments cannot
            architecture = Architecture.from_json(read_manifest(folder).run.model)
        elif arguments:
            architecture = read_arguments(arguments, f"{folder}: arguments")
            if not isinstance(arguments.get("vocab_size"), int):
                notices.append(
                    f"the vocabulary is taken as {architecture.vocab_size:,}, padding included: the checkpoint does not"
                    f" say the size before padding; put the model's {CONFIG} into {folder.parent / CARRIED_FOLDER} to"
                    " have it removed"
                )
        else:
            raise DataError(
                f"{folder} does not say which model it is: put its {CONFIG} into {folder.parent / CARRIED_FOLDER}"
            )
    except ConfigError as error:
        raise DataError(str(error)) from error
    if dtype in _DTYPES:
        architecture = replace(architecture, dtype=_DTYPES[dtype])
    return architecture, tuple(notices)


def _contradictions(architecture: Architecture, arguments: Mapping[str, Any], config: Path) -> Iterator[str]:
    """Where a config.json and Megatron's arguments tell of different models. What shapes tell is checked by them."""
    if not arguments or architecture.num_decoder_layers:
        return
    try:
        by_arguments = read_arguments({"vocab_size": architecture.vocab_size, **arguments}, "Megatron's arguments")
    except ConfigError as error:
        if not unsayable(architecture):
            yield f"{config} is followed, not what the checkpoint says besides ({error})"
        return
    differing = [
        f"{name} ({short(getattr(architecture, name))}, not {short(getattr(by_arguments, name))})"
        for name in _INVISIBLE
        if getattr(architecture, name) != getattr(by_arguments, name)
    ]
    if differing:
        yield f"{config} is followed where Megatron's arguments say otherwise: {', '.join(differing)}"


def iteration_name(state: TrainingState | None) -> str:
    """Of the folder to write: weights alone are a release, which Megatron starts from at iteration 0."""
    return RELEASE if state is None else f"iter_{state.iteration:07d}"


def finish_folder(
    directory: Path, files: Sequence[Path], state: TrainingState | None, options: Sequence[str], num_ranks: int
) -> None:
    """Carried files, Megatron-LM's options where there are any, then the tracker: `directory` is a checkpoint."""
    if files:
        (directory / CARRIED_FOLDER).mkdir(exist_ok=True)
        for file in files:
            shutil.copyfile(file, directory / CARRIED_FOLDER / file.name)
    if options:
        has_tokenizer = any(file.name.startswith("tokenizer") for file in files)
        write_script(directory, options, CARRIED_FOLDER if has_tokenizer else "", num_ranks)
    write_atomic(directory / TRACKER, RELEASE if state is None else str(state.iteration))
