"""A run's first weights out of a checkpoint: Hugging Face's, Megatron's at any layout, or any other that converts."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.tools.checkpoint.formats import CheckpointReader


def open_initial_weights(path: str, architecture: Architecture | None) -> CheckpointReader:
    """The checkpoint, once it is known to hold the weights of `architecture`, all of them and no others.

    Errors: DataError for what is no whole checkpoint, naming its tensors; ConfigError for that of another model.
    """
    from dynapipe_ext.tools.checkpoint.recognise import recognise

    if architecture is None:
        raise ConfigError(
            f"init_from is {path} but the model is in sizes of its own: name the checkpoint's model by [model]"
            " architecture (its config.json)"
        )
    kind, _ = recognise(Path(path))
    reader = kind.open(Path(path))
    held, wanted = (asdict(replace(a, dtype="float32")) for a in (reader.architecture, architecture))
    if other := [f"{name} {held[name]!r}, not {wanted[name]!r}" for name in held if held[name] != wanted[name]]:
        move = "name its own config.json"
        if architecture.family == "t5" and held["tied_embeddings"] != wanted["tied_embeddings"]:
            move += ", which must say of tie_word_embeddings what its files do (transformers 5 writes true of every T5)"
        raise ConfigError(
            f"init_from {path} is a checkpoint of another model than [model] architecture: it has {'; '.join(other)}:"
            f" {move}"
        )
    reader.check()
    return reader


def load_initial_weights(model: Any, path: str, architecture: Architecture) -> None:
    """Fill a stage's weights from a checkpoint, a group of tensors at a time. Errors as `open_initial_weights`."""
    from dynapipe_ext.executor.stages.megatron_weights import fill_weights, held_weights
    from dynapipe_ext.tools.checkpoint.megatron.names import megatron_weights

    reader = open_initial_weights(path, architecture if architecture.family != "gpt" else None)
    wanted = {name for name, _ in held_weights(model)}
    fill_weights(model, megatron_weights(reader, wanted))
