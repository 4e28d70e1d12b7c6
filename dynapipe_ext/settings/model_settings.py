"""The sizes of the published model that settings name, and the layers to which adapters (LoRA) are attached.

Only adapters need torch here: their layers are read off the model, without memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dynapipe_ext.errors import ConfigError, did_you_mean
from dynapipe_ext.models.module_tree import linear_layers
from dynapipe_ext.models.named_models import config_file, model_type, read_trainable
from dynapipe_ext.settings.tables import LinearLayer, LoraSettings, ModelSettings

ALL_LINEAR = "all-linear"
_SIZES = (
    "num_layers", "num_decoder_layers", "hidden_size", "num_heads", "num_query_groups", "ffn_hidden_size", "gated_mlp",
    "max_seq_len", "tied_embeddings", "position", "norm",
)  # fmt: skip


def with_described(
    model: ModelSettings, changes: Mapping[str, Any], where: str, *, adapts: bool = False
) -> ModelSettings:
    """Return the settings with the sizes of the model that `architecture` names. With adapters "auto" is transformers.

    Raises ConfigError for a size in `changes`, the settings of a file or of flags, that contradicts the model.
    """
    if not model.architecture:
        sizes: dict[str, Any] = {}
        if model.num_decoder_layers:
            sizes = {"position": "relative", "norm": "rmsnorm", "bias": False, "num_query_groups": model.num_heads}
        _refuse_contradiction(model, sizes, changes, f"{where}: [model] num_decoder_layers makes a T5, which")
        return replace(model, described=None, **sizes)
    a = read_trainable(model.architecture, "transformers" if adapts and model.backend == "auto" else model.backend)
    sizes = {name: getattr(a, name) for name in _SIZES} | {"bias": a.mlp_bias}
    is_read = model.described is not None and "architecture" not in changes  # then it may be shorter already
    if (is_read or "max_seq_len" in changes) and (model.max_seq_len <= a.max_seq_len or a.position == "relative"):
        sizes["max_seq_len"] = model.max_seq_len
    _refuse_contradiction(model, sizes, changes, f"{where}: [model] architecture {model.architecture}")
    return replace(model, described=a, **sizes)


def _refuse_contradiction(
    model: ModelSettings, sizes: Mapping[str, Any], changes: Mapping[str, Any], place: str
) -> None:
    for name in changes:
        if name in sizes and getattr(model, name) != sizes[name]:
            raise ConfigError(f"{place} has {name} {sizes[name]}, but {name} is {getattr(model, name)}: leave it out")


def with_adapted(settings: LoraSettings, model: ModelSettings, where: str) -> LoraSettings:
    """Return the settings with the layers that they adapt; transformers computes the model.

    Raises ConfigError for layers that the model does not have, and for settings of adapters without `enabled`.
    """
    at = f"{where}: [lora]"
    if not settings.enabled:
        if replace(settings, described=None) != LoraSettings():
            raise ConfigError(f"{at} describes adapters but enabled is false: add --lora, or leave the others out")
        return settings
    if model.described is not None and model.described.num_decoder_layers:
        raise ConfigError(
            f"{at} adapts models that are decoders only, but {model.architecture} has an encoder too: train all of"
            " its weights, without --lora"
        )
    if not model.uses_transformers or model.described is None:
        return replace(settings, described=None)  # refused, unless another setting names a model yet
    kind = model_type(model.architecture)
    layers = _list_linear_layers(model.architecture, config_file(model.architecture).read_text(encoding="utf-8"))
    usual = _list_usual_targets(kind, layers)
    targets = settings.target_modules or usual
    names = sorted({layer.name.rpartition(".")[2] for layer in layers})
    if not targets:
        raise ConfigError(f"{at} peft has no usual target_modules of {kind}: choose from {', '.join(names)}")
    if targets == (ALL_LINEAR,):
        return replace(settings, described=layers)
    for target in targets:
        if not any(layer.answers_to(target) for layer in layers):
            raise ConfigError(
                f"{at} target_modules names {target!r}, which no block of {model.architecture} ({kind}) has: choose"
                f" from {', '.join(names)}, or only {ALL_LINEAR}{did_you_mean(target, names)}"
            )
    adapted = tuple(layer for layer in layers if any(layer.answers_to(target) for target in targets))
    return replace(settings, described=adapted)


# What peft adapts by default (its TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING), by model_type.
_USUAL_TARGETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("bloom", "falcon", "gpt_neox"), ("query_key_value",)),
    "codegen": ("qkv_proj",),
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
}
_USUAL = ("q_proj", "v_proj")  # of nearly all others


@lru_cache(maxsize=8)  # settings are checked several times
def _list_linear_layers(model: str, _config_text: str) -> tuple[LinearLayer, ...]:
    """List the linear layers of the model's blocks, as its modules have them. Raises ConfigError."""
    return tuple(LinearLayer(*layer) for layer in linear_layers(model))


def _list_usual_targets(kind: str, layers: Sequence[LinearLayer]) -> tuple[str, ...]:
    """List what peft adapts in the family; in an unknown family queries and values, as in most. Empty if the layers
    have no such names."""
    usual = _USUAL_TARGETS.get(kind, _USUAL)
    return usual if all(any(layer.answers_to(target) for layer in layers) for target in usual) else ()
