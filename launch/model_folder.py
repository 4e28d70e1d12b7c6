"""`--model DIR`: what a published model's folder says of a run that trains it, and what people expect of such a run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.transformers_sizes import config_file, dropout_rates, raw_config

Tables = dict[str, dict[str, Any]]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
_USABLE = 0.9  # of a device's or machine's free memory
# Of a run that goes on with published weights; one from the first step on has the defaults of the settings.
_FINE_TUNING: Tables = {"optimizer": {"lr": 2e-5, "min_lr": 2e-6, "warmup_fraction": 0.03}}
_ADAPTING: Tables = {"optimizer": {"lr": 2e-4, "min_lr": 2e-5, "warmup_fraction": 0.03}}  # adapters start at zero


def settings_of_model(path: str, *, tokenizer: str | None) -> Tables:
    """`[model]` and `[data]` of a run on the model in a folder, or described by a config.json: its sizes, its weights
    where it has some, its tokenizer unless another one is named.

    Errors: ConfigError for what is no such folder, or lacks a tokenizer where none is named.
    """
    place = Path(path)
    folder = place if place.is_dir() else place.parent
    if not (folder / "config.json" if place.is_dir() else place).is_file():
        raise ConfigError(f"--model {path} has no config.json: give a model's folder as save_pretrained writes it")
    has_weights = place.is_dir() and any(next(place.glob(pattern), None) for pattern in _WEIGHTS)
    tables: Tables = {"model": {"architecture": path, "init_from": path if has_weights else ""}}
    if tokenizer is None:
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ConfigError(f"--model {path} has no tokenizer: name the one it was trained with by --tokenizer")
        tables["data"] = {"tokenizer": str(folder)}
    return tables


def usual_settings(tables: Tables, *, num_ranks: int, adapts: bool = False) -> Tables:
    """What people expect of `--model` where no file of settings says else: one pass over the data, one rank, the
    memory that this machine has, and where weights are given, learning rates of fine-tuning, higher for adapters."""
    usual: Tables = {
        "run": {"epochs": 1.0},
        "topology": {"tp": 1, "pp": 1, "dp": 1},
        "plan": {"memory_limit_gb": memory_of_a_rank_gb(num_ranks)},
    }
    return usual | ((_ADAPTING if adapts else _FINE_TUNING) if tables["model"]["init_from"] else {})


def dropout_line(config: TrainConfig) -> str:
    """What a run says of the dropout in a config.json where megatron-core trains the model without; else nothing."""
    model = config.model
    if model.dropout or model.uses_transformers or not (rates := dropout_rates(model.architecture)):
        return ""
    file, found = config_file(model.architecture), ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return f"dropout: none, though {file} has {found}: [model] dropout of a --config sets one rate for all"


def prediction_line(architecture: str) -> str:
    """What is said of a config.json's layers of multi-token prediction, which no model here has; else nothing."""
    raw = raw_config(architecture)
    if not (found := [f"{name} {raw[name]}" for name in _PREDICTION_LAYERS if raw.get(name)]):
        return ""
    return f"multi-token prediction: left out, though {config_file(architecture)} has {', '.join(found)}"


def memory_of_a_rank_gb(num_ranks: int) -> float:
    """Of the smallest device here, or without one the free memory of this machine by its ranks, less a margin."""
    num_bytes = _device_bytes() or _free_bytes() // num_ranks
    return max(0.1, round(_USABLE * num_bytes / 1e9, 1))


def _device_bytes() -> int:
    """By the driver's own tool: asking CUDA would keep this process from forking ranks. 0 without a device."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    mebibytes = [int(line) for line in done.stdout.split() if line.isdigit()]
    return min(mebibytes, default=0) << 20


def _free_bytes() -> int:
    """Memory of this machine, or of the container that this process is in, that nothing else holds."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kibibytes,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    free = kibibytes << 10
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):
        return free
    return min(free, limit - used)
