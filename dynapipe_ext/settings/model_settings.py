"""What the settings name: the sizes of a published model, and the layers beside which adapters (LoRA) train.

No torch: settings are checked, and what adapters take is counted, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynapipe_ext.errors import ConfigError, did_you_mean
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.named_models import model_type, read_trainable
from dynapipe_ext.settings.tables import LinearLayer, LoraSettings, ModelSettings

ALL_LINEAR = "all-linear"


def with_described(
    model: ModelSettings, changes: Mapping[str, Any], where: str, *, adapts: bool = False
) -> ModelSettings:
    """The settings with the sizes of the model that `architecture` names. With adapters "auto" is transformers.

    Errors: ConfigError for a size in `changes`, the settings of a file or of flags, that contradicts the model.
    """
    if not model.architecture:
        sizes: dict[str, Any] = {}
        if model.num_decoder_layers:
            sizes = {"position": "relative", "norm": "rmsnorm", "bias": False, "num_query_groups": model.num_heads}
        _refuse_contradiction(model, sizes, changes, f"{where}: [model] num_decoder_layers makes a T5, which")
        return replace(model, described=None, **sizes)
    a = read_trainable(model.architecture, "transformers" if adapts and model.backend == "auto" else model.backend)
    place = f"{where}: [model] architecture {model.architecture}"
    sizes = {
        "num_layers": a.num_layers,
        "num_decoder_layers": a.num_decoder_layers,
        "hidden_size": a.hidden_size,
        "num_heads": a.num_heads,
        "num_query_groups": a.num_query_groups,
        "ffn_hidden_size": a.ffn_hidden_size,
        "gated_mlp": a.gated_mlp,
        "max_seq_len": a.max_seq_len,
        "tied_embeddings": a.tied_embeddings,
        "position": a.position,
        "norm": a.norm,
        "bias": a.mlp_bias,
    }
    is_read = model.described is not None and "architecture" not in changes  # then it may be shorter already
    if (is_read or "max_seq_len" in changes) and (model.max_seq_len <= a.max_seq_len or a.position == "relative"):
        sizes["max_seq_len"] = model.max_seq_len
    _refuse_contradiction(model, sizes, changes, place)
    return replace(model, described=a, **sizes)


def _refuse_contradiction(
    model: ModelSettings, sizes: Mapping[str, Any], changes: Mapping[str, Any], place: str
) -> None:
    for name in changes:
        if name in sizes and getattr(model, name) != sizes[name]:
            raise ConfigError(f"{place} has {name} {sizes[name]}, but {name} is {getattr(model, name)}: leave it out")


def with_adapted(settings: LoraSettings, model: ModelSettings, where: str) -> LoraSettings:
    """The settings with the layers that they adapt; the model is one that transformers computes.

    Errors: ConfigError for layers that the model does not have, and for settings of adapters without `enabled`.
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
    layers, usual = _linear_layers(kind, model.described), _USUAL_TARGETS.get(kind, ())
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
