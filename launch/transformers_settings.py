"""Which settings a run of a model has that transformers itself computes. No torch."""

from __future__ import annotations

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.errors import ConfigError


def refuse_unsupported(config: TrainConfig, *, resumes: bool) -> None:
    """Errors: ConfigError for settings that only models of megatron-core have."""
    if not config.model.uses_transformers:
        return
    model, checkpoint = config.model, config.checkpoint
    asked = {
        "tp": config.topology.tp > 1,
        "dropout": model.dropout > 0,
        "the distributed optimizer": config.optimizer.distributed,
        "save_every": checkpoint.save_every > 0,
        "save_minutes": checkpoint.save_minutes > 0,
        "keep_best": checkpoint.keep_best,
        "--resume": resumes,
        f"save_format {checkpoint.save_format}": checkpoint.save_format != "hf",
    }
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise ConfigError(
            f"{model.architecture} is computed by transformers, whose runs have no {', '.join(found)}: leave it out"
            " (dropout is that of its config.json, the model is saved at the end), or train a model with a twin in"
            " megatron-core"
        )
