"""The files of a model besides its weights: which are carried along, and a config.json that fits the weights."""

from __future__ import annotations

import codecs
import fnmatch
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config, write_config
from dynapipe_ext.tools.files import parse_json, write_atomic

CONFIG = "config.json"
_PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
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
    """Make the config.json at `path` say exactly `architecture`, keeping all else that it says in its own words.

    Where there is none, one is written, with `fields` besides.

    The weights decide: a head that is not the embedding, a type that training changed. Errors: DataError.
    """
    raw = read_json_object(path, "the model's configuration") if path.exists() else {}
    is_as_read = "quantization_config" not in raw and not (raw and path.read_bytes().startswith(codecs.BOM_UTF8))
    raw.pop("quantization_config", None)  # weights are written plain
    without = {name: 0 for name in _PREDICTION_LAYERS if raw.get(name)}  # nor are those of further tokens
    settled = _with_changed_parts(raw | without, architecture) or _with_all_parts(raw or fields, architecture)
    if is_as_read and settled == raw:
        return
    if (as_read := read_config(settled, str(path))) != architecture:
        raise DataError(
            f"{path} cannot say what the weights are: it would read as {as_read}, but they are {architecture}"
        )
    write_atomic(path, json.dumps(settled, indent=2) + "\n")


def _with_changed_parts(raw: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return `raw` with as few other fields as make it say `architecture`; nothing if no single ones do."""
    settled, lacking = dict(raw), _different_parts(raw, architecture)
    for name, value in write_config(architecture).items() if lacking else ():
        changed = settled | {name: value} | ({"torch_dtype": value} if name == "dtype" else {})
        left = _different_parts(changed, architecture)
        if left is not None and lacking is not None and left < lacking:
            settled, lacking = changed, left
        if not lacking:
            break
    return settled if lacking == set() else {}


def _different_parts(raw: Mapping[str, Any], architecture: Architecture) -> set[str] | None:
    """Return the parts that `raw` says otherwise; None if it cannot be read."""
    try:
        read, wanted = asdict(read_config(raw)), asdict(architecture)
    except ConfigError:
        return None
    return {part for part, value in wanted.items() if read[part] != value}


def _with_all_parts(raw: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return `raw` with every field that a part of the architecture is; its ids of special tokens are its own."""
    own = {name for name in raw if name == "architectures" or name.endswith("_token_id")}
    return {**raw, **{name: value for name, value in write_config(architecture).items() if name not in own}}


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _files(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_file() and not entry.name.startswith(".")]


def _matches(file: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(file.name, pattern) for pattern in patterns)
