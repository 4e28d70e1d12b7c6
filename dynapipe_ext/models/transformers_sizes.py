"""The sizes in a config.json of any causal model of transformers, for counting what it costs: not how it computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.layer_patterns import LAYER_PATTERNS, pattern_of, refuse_other_pairs
from dynapipe_ext.models.presets import read_model

Backend = Literal["auto", "megatron", "transformers"]

# Names of the same size in the configurations of different families; the first that is there counts.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "dropout_rate", "embd_pdrop", "resid_pdrop")
_DROPOUTS_UNSAID = {  # as transformers takes a config.json without a word
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "t5": {"dropout_rate": 0.1},
}
_GATED = ("silu", "gelu_pytorch_tanh")


def read_trainable(model: str, backend: Backend) -> Architecture:
    """A model to train: as megatron-core computes it, or of the family "transformers", by its sizes.

    "auto" takes transformers for a config.json that has no twin in megatron-core, if its family can be cut. A T5 is of
    the family "t5", whatever computes it. Errors: ConfigError, DataError.
    """
    path = config_file(model)
    if backend != "transformers":
        try:
            return read_model(model)[0]
        except ConfigError:
            if backend == "megatron" or not path.is_file() or model_type(model) not in LAYER_PATTERNS:
                raise
    if not path.is_file():
        raise ConfigError(f"{model} has no config.json, of which transformers could build a model: give its folder")
    if raw_config(model).get("is_encoder_decoder"):
        refuse_other_pairs(model_type(model))
        return read_model(model)[0]
    pattern_of(model_type(model))
    return read_sizes(raw_config(model), str(path))


def model_type(model: str) -> str:
    """Transformers' name of the family, in a model's config.json; empty where it says none."""
    return str(raw_config(model).get("model_type") or "")


def dropout_rates(model: str) -> dict[str, float]:
    """The rates above 0 that a model's config.json has, or has without a word; none where there is no such file."""
    raw = raw_config(model)
    rates = _DROPOUTS_UNSAID.get(str(raw.get("model_type")), {}) | {n: raw[n] for n in _DROPOUTS if n in raw}
    return {name: rate for name, rate in rates.items() if isinstance(rate, float) and rate}


def raw_config(model: str) -> Mapping[str, Any]:
    """What a model's config.json says; nothing where there is no such file. Errors: ConfigError for a damaged one."""
    if not (path := config_file(model)).is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a model's configuration ({error})") from error
    return raw if isinstance(raw, dict) else {}


def document_attention_fault(model: str) -> str:
    """Why attention document by document does not compute what a config.json says; nothing if it does."""
    raw = raw_config(model)
    if cap := raw.get("attn_logit_softcapping"):
        return f"{raw.get('model_type')} caps its scores (attn_logit_softcapping {cap})"
    return ""


def carried_fault(model: str) -> str:
    """Why a model of transformers cannot attend from piece to piece of a cut sample; nothing if it can."""
    raw = raw_config(model)
    kind, window = raw.get("model_type"), raw.get("sliding_window")
    fault = document_attention_fault(model)
    if raw.get("is_encoder_decoder"):
        fault = "inputs of an encoder-decoder attend to what comes later"
    if window and raw.get("use_sliding_window", True):
        fault = f"{kind} has windows of attention (sliding_window {window}), which do not go on from piece to piece"
    return f"{fault}: plan whole samples" if fault else ""


def config_file(model: str) -> Path:
    """Of a model's folder, or the file itself."""
    return Path(model) / "config.json" if Path(model).is_dir() else Path(model)


def read_sizes(raw: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """A GPT of the sizes that are named; what a family does besides (norms, windows, experts) is not told.

    Errors: ConfigError naming the size that is missing, and a model with an encoder.
    """
    kind = short(raw.get("model_type"))
    if raw.get("is_encoder_decoder"):
        raise ConfigError(f"{where}: {kind} has an encoder and a decoder: give a model that is a decoder only")
    if raw.get("quantization_config") is not None:
        raise ConfigError(f"{where}: {kind} is quantized, and cannot be trained so: give the model in full precision")

    def size(names: tuple[str, ...], default: int | None = None) -> int:
        found = next((raw[name] for name in names if raw.get(name) is not None), default)
        if type(found) is not int or found < 1:
            raise ConfigError(f"{where}: {' or '.join(names)} is {short(found)} but must be an integer above 0")
        return found

    hidden, heads = size(_HIDDEN), size(_HEADS)
    gpt = Architecture.gpt(
        num_layers=size(_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        num_query_groups=size(("num_key_value_heads",), heads),
        head_dim=size(("head_dim",), max(1, hidden // heads)),
        ffn_hidden_size=size(_FFN, 4 * hidden),
        gated_mlp=(raw.get("hidden_activation") or raw.get("hidden_act")) in _GATED,
        vocab_size=size(("vocab_size",)),
        max_seq_len=size(_POSITIONS),
        tied_embeddings=bool(raw.get("tie_word_embeddings", True)),
        position="rope",
        norm="rmsnorm",
        bias=False,
    )
    return replace(gpt, family="transformers")
