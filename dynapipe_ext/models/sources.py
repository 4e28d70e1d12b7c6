"""A model as people name it: a configuration's file, a folder that holds one, or a preset."""

from __future__ import annotations

import json
from pathlib import Path

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.megatron_arguments import read_arguments


def read_model(source: str) -> Architecture:
    """From Hugging Face's config.json, its folder, or Megatron's arguments as JSON. Errors: DataError, ConfigError."""
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as a model's configuration: {error}") from error
    if isinstance(raw, dict) and "model_type" not in raw and "num_attention_heads" in raw:
        return read_arguments(raw, str(path))
    return read_config(raw, str(path))
