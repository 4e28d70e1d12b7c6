"""Adapters of peft in a rank's parts of a transformers model, made of a seed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.chunk_runner import seed_of
from dynapipe_ext.executor.stages.transformers.part import TransformersPart
from dynapipe_ext.executor.stages.transformers.saving import ADAPTER_NAME, trained_weights
from dynapipe_ext.settings.model_settings import ALL_LINEAR
from dynapipe_ext.settings.tables import LoraSettings


def add_adapters(parts: Sequence[TransformersPart], settings: LoraSettings, *, seed: int) -> None:
    """Put adapters into every part; they alone train from then on.

    They begin as peft's do, without effect, and keyed by seed and name, so that every topology begins with the same.
    They have the dtype of the weights beside them. Errors: ConfigError where peft adapts none of the layers.
    """
    usual = {layer.name.rpartition(".")[2] for layer in settings.described or ()}
    targets: Any = list(settings.target_modules) or sorted(usual) or None
    alpha: Any = settings.lora_alpha
    for part in parts:
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.r,
            lora_alpha=int(alpha) if alpha.is_integer() else alpha,
            lora_dropout=settings.lora_dropout,
            target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
            exclude_modules=_idle(part),
            fan_in_fan_out=part.model.config.model_type == "gpt2",  # whose layers keep their weights transposed
        )
        mode, model = part.model.training, part.model
        try:
            model.add_adapter(config, ADAPTER_NAME)
        except ValueError as error:
            raise ConfigError(f"peft cannot adapt {type(model).__name__}: {error}") from error
        config.base_model_name_or_path = str(Path(model.name_or_path).absolute())
        config.inference_mode = True  # as what is saved is read, like peft's own
        model.train(mode)
        with torch.no_grad():
            for name, weight in trained_weights(part):
                _draw(name, weight, seed)


def _idle(part: TransformersPart) -> str | None:
    """The modules that no text runs through, as a pattern of whole names; None where there are none."""
    idle = part.pattern.idle if part.pattern else ()
    return "|".join(f"{re.escape(name)}(\\..*)?" for name in idle) or None


def _draw(name: str, weight: torch.Tensor, seed: int) -> None:
    """As LoRA begins (Hu et al. 2021, sec. 4.1; peft's bounds): A small, B zero."""
    if ".lora_B." in name:
        weight.zero_()
        return
    bound = 1 / math.sqrt(weight.shape[1])
    generator = torch.Generator().manual_seed(seed_of(str(seed), name))
    drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float32)
    weight.copy_((2 * drawn - 1) * bound)
