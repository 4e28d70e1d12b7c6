"""Adapters of low rank (LoRA) in the terms of peft, and of what they adapt: the linear layers of a published model.

No torch: settings are checked, and what adapters take is counted, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dynapipe_ext.errors import ConfigError, did_you_mean
from dynapipe_ext.models.transformers_sizes import model_type

if TYPE_CHECKING:
    from dynapipe_ext.models.architecture import Architecture
    from dynapipe_ext.settings.train_config import ModelSettings

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer of every block, by its name within the block, and how many values it takes and gives."""

    name: str
    num_inputs: int
    num_outputs: int

    def answers_to(self, target: str) -> bool:
        """As peft matches names: the whole name or its end."""
        return self.name == target or self.name.endswith(f".{target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Where `enabled`, adapters train in place of the model's weights, as peft's LoraConfig has them: of rank `r`,
    scaled by `lora_alpha` / `r`, with `lora_dropout` before them, beside the linear layers `target_modules` of every
    block ("all-linear": all; empty: those that peft takes for the family). `described` is read, not given: the adapted
    layers."""

    enabled: bool = False
    r: int = 8
    lora_alpha: float = 8.0
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    described: tuple[LinearLayer, ...] | None = None

    @property
    def num_weights_a_block(self) -> int:
        """Of the adapters beside one block's layers."""
        return sum(self.r * (layer.num_inputs + layer.num_outputs) for layer in self.described or ())


def with_adapted(settings: LoraSettings, model: ModelSettings, where: str) -> LoraSettings:
    """The settings with the layers that they adapt, of a model that transformers computes.

    Errors: ConfigError for layers that it does not have, and for settings of adapters without any.
    """
    said = f"{where}: [lora]"
    if not settings.enabled:
        if replace(settings, described=None) != LoraSettings():
            raise ConfigError(f"{said} describes adapters but enabled is false: add --lora, or leave the others out")
        return settings
    if settings.r < 1 or not settings.lora_alpha > 0 or not 0 <= settings.lora_dropout < 1:
        raise ConfigError(
            f"{said} r is {settings.r}, lora_alpha {settings.lora_alpha:g} and lora_dropout {settings.lora_dropout:g}:"
            " r must be at least 1, lora_alpha above 0 and lora_dropout in 0..1"
        )
    if model.described is not None and model.described.num_decoder_layers:
        raise ConfigError(
            f"{said} adapts models that are decoders only, but {model.architecture} has an encoder too: train all of"
            " its weights, without --lora"
        )
    if not model.uses_transformers or model.described is None:
        return replace(settings, described=None)  # refused, unless another setting names a model yet
    kind = model_type(model.architecture)
    layers, usual = _linear_layers(kind, model.described), _USUAL_TARGETS.get(kind, ())
    targets = settings.target_modules or usual
    names = sorted({layer.name.rpartition(".")[2] for layer in layers})
    if not targets:
        raise ConfigError(f"{said} peft has no usual target_modules of {kind}: choose from {', '.join(names)}")
    if targets == (ALL_LINEAR,):
        return replace(settings, described=layers)
    for target in targets:
        if not any(layer.answers_to(target) for layer in layers):
            raise ConfigError(
                f"{said} target_modules names {target!r}, which no block of {model.architecture} ({kind}) has: choose"
                f" from {', '.join(names)}, or {ALL_LINEAR} alone{did_you_mean(target, names)}"
            )
    adapted = tuple(layer for layer in layers if any(layer.answers_to(target) for target in targets))
    return replace(settings, described=adapted)


# What peft adapts where nobody says what (its TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING), by model_type.
_USUAL_TARGETS: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("c_attn",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"),
        ("q_proj", "v_proj"),
    ),
}


def _linear_layers(kind: str, a: Architecture) -> tuple[LinearLayer, ...]:
    """Those of a block of the family, as its module has them."""
    hidden, query, kv, ffn = a.hidden_size, a.query_size, a.kv_size, a.ffn_hidden_size
    match kind:
        case "gpt2":
            sizes = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
            sizes |= {"mlp.c_fc": (hidden, ffn), "mlp.c_proj": (ffn, hidden)}
        case "phi3":
            sizes = {"self_attn.qkv_proj": (hidden, query + 2 * kv), "self_attn.o_proj": (query, hidden)}
            sizes |= {"mlp.gate_up_proj": (hidden, 2 * ffn), "mlp.down_proj": (ffn, hidden)}
        case _:
            sizes = {"self_attn.q_proj": (hidden, query), "self_attn.k_proj": (hidden, kv)}
            sizes |= {"self_attn.v_proj": (hidden, kv)}
            if kind == "phi":
                sizes |= {"self_attn.dense": (query, hidden), "mlp.fc1": (hidden, ffn), "mlp.fc2": (ffn, hidden)}
            else:
                sizes |= {"self_attn.o_proj": (query, hidden), "mlp.gate_proj": (hidden, ffn)}
                sizes |= {"mlp.up_proj": (hidden, ffn), "mlp.down_proj": (ffn, hidden)}
    return tuple(LinearLayer(name, *size) for name, size in sizes.items())
