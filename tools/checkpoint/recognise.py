"""Which format a checkpoint has, and the modules that read and write each format."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.tools.checkpoint.formats import CheckpointReader, CheckpointWriter, WriterOptions


@dataclass(frozen=True, slots=True)
class Format:
    """A format by the name that `--to` and `--from` take. Its modules are imported when they are used."""

    name: str
    module: str  # of `recognises` and `open_checkpoint`
    writer: str  # module and class; empty where the format is only read
    needs: str  # what a folder of the format holds, for the message where none is recognised

    def recognises(self, path: Path) -> bool:
        return bool(_member(self.module, "recognises")(path))

    def open(self, path: Path) -> CheckpointReader:
        """Errors: DataError, ConfigError naming the file and what is wrong."""
        reader: CheckpointReader = _member(self.module, "open_checkpoint")(path)
        return reader

    def new_writer(
        self, directory: Path, reader: CheckpointReader, options: WriterOptions, **own: Any
    ) -> CheckpointWriter:
        """Errors: ConfigError where the format cannot heed the options, or is only read."""
        if not self.writer:
            raise ConfigError(f"--to {self.name}: this format is only read; give one of {', '.join(TARGETS)}")
        writer: CheckpointWriter = _member(*self.writer.rsplit(".", 1))(directory, reader, options, **own)
        return writer


FORMATS = (
    Format(
        "hf",
        "huggingface.folder",
        "huggingface.folder.HuggingFaceWriter",
        "config.json with model*.safetensors or pytorch_model*.bin",
    ),
    Format("meta", "meta.folder", "", "params.json with consolidated.00.pth"),
    Format(
        "megatron",
        "megatron.dist",
        "megatron.dist_writer.MegatronDistWriter",
        "iter_XXXXXXX with .metadata and *.distcp",
    ),
    Format(
        "megatron-legacy",
        "megatron.legacy",
        "megatron.legacy_writer.MegatronLegacyWriter",
        "iter_XXXXXXX with mp_rank_XX[_YYY]",
    ),
    Format("deepspeed", "deepspeed.reader", "deepspeed.writer.DeepSpeedWriter", "a tag folder with *model_states.pt"),
)
TARGETS = tuple(known.name for known in FORMATS if known.writer)


def format_of(name: str) -> Format:
    """Errors: ConfigError where no format has that name."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise ConfigError(f"format {name!r} is not known: give one of {', '.join(known.name for known in FORMATS)}")


def recognise(path: Path) -> tuple[Format, tuple[str, ...]]:
    """The format of a checkpoint's folder, and the names of others that it could be as well. Errors: DataError."""
    if not path.exists():
        raise DataError(f"{path} does not exist: give the folder of a checkpoint")
    if not path.is_dir():
        raise DataError(f"{path} is a file: give the folder that it lies in")
    found = [known for known in FORMATS if known.recognises(path)]
    if not found:
        inside = (entry for entry in sorted(path.iterdir()) if entry.is_dir())
        if holder := next((entry for entry in inside if any(known.recognises(entry) for known in FORMATS)), None):
            raise DataError(f"{path} is no checkpoint but holds {holder.name}, which is: give {holder}")
        wanted = "; ".join(f"{known.name}: {known.needs}" for known in FORMATS)
        raise DataError(f"{path} holds no checkpoint that is known ({wanted}): give the folder that holds one of these")
    return found[0], tuple(known.name for known in found[1:])


def _member(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f"dynapipe_ext.tools.checkpoint.{module}"), name)
    return found
