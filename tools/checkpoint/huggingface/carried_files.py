"""The files of a model besides its weights: which are carried along, and a config.json that fits the weights."""

from __future__ import annotations

import codecs
import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config, write_config
from dynapipe_ext.tools.files import parse_json, write_atomic

CONFIG = "config.json"
CARRIED_FOLDER = "huggingface"  # where they lie beside checkpoints of Megatron
_CARRIED = (
    CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "*.model", "*.tiktoken", "tekken.json", "chat_template*", "*.jinja", "*processor_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
_WEIGHTS = (
    "model.safetensors", "model-?????-of-?????.safetensors", "pytorch_model.bin", "pytorch_model-?????-of-?????.bin",
    "*.index.json", "consolidated.??.pth", "consolidated.safetensors", "params.json", "checklist.chk",
)  # fmt: skip


def carried_files(folder: Path) -> tuple[Path, ...]:
    """Tokenizer, configuration, generation settings and licence in `folder`, by name."""
    return tuple(file for file in _files(folder) if _matches(file, _CARRIED))


def left_behind(folder: Path) -> tuple[str, ...]:
    """Names of what lies beside the weights and is not carried."""
    others = [file.name for file in _files(folder) if not _matches(file, _CARRIED + _WEIGHTS)]
    folders = [f"{entry.name}/" for entry in _entries(folder) if entry.is_dir() and not entry.name.startswith(".")]
    return tuple(sorted([*others, *folders]))


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """Errors: DataError naming the file, where it cannot be read or holds no object."""
    try:
        raw = parse_json(path.read_text(encoding="utf-8-sig"), str(path), what)  # a byte order mark is no JSON
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): give {what}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): give {what}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{path} holds {type(raw).__name__} where an object is needed: give {what}")
    return raw


def settle_config(path: Path, architecture: Architecture, fields: Mapping[str, Any]) -> None:
    """Make the config.json at `path` say exactly `architecture`, keeping all else that it says.

    Where there is none, one is written, with `fields` besides.

    The weights decide: a head that is not the embedding, a type that training changed. Errors: DataError.
    """
    raw = read_json_object(path, "the model's configuration") if path.exists() else {}
    is_as_read = "quantization_config" not in raw and not (raw and path.read_bytes().startswith(codecs.BOM_UTF8))
    raw.pop("quantization_config", None)  # weights are written plain
    try:
        same = raw and read_config(raw, str(path)) == architecture and not raw.get("num_nextn_predict_layers")
        if same:
            if not is_as_read:
                write_atomic(path, json.dumps(raw, indent=2) + "\n")
            return
    except ConfigError:
        pass  # written anew below
    settled = {**(raw or fields), **write_config(architecture)}
    if "architectures" in raw:
        settled["architectures"] = raw["architectures"]
    if (as_read := read_config(settled, str(path))) != architecture:
        raise DataError(
            f"{path} cannot say what the weights are: it would read as {as_read}, but they are {architecture}"
        )
    write_atomic(path, json.dumps(settled, indent=2) + "\n")


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _files(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_file() and not entry.name.startswith(".")]


def _matches(file: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(file.name, pattern) for pattern in patterns)
