"""The sizes in a config.json of any causal model of transformers, for counting what it costs: not how it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import Architecture

# Names of the same size in the configurations of different families; the first that is there counts.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")


def read_sizes(raw: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """A GPT of the sizes that are named; what a family does besides (norms, windows, experts) is not told.

    Errors: ConfigError naming the size that is missing, and a model with an encoder.
    """
    if raw.get("is_encoder_decoder"):
        raise ConfigError(f"{where}: {short(raw.get('model_type'))} has an encoder: give a model that is a decoder only")

    def size(names: tuple[str, ...], default: int | None = None) -> int:
        found = next((raw[name] for name in names if raw.get(name) is not None), default)
        if type(found) is not int or found < 1:
            raise ConfigError(f"{where}: {' or '.join(names)} is {short(found)} but must be an integer above 0")
        return found

    hidden, heads = size(_HIDDEN), size(_HEADS)
    return Architecture.gpt(
        num_layers=size(_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        num_query_groups=size(("num_key_value_heads",), heads),
        head_dim=size(("head_dim",), max(1, hidden // heads)),
        ffn_hidden_size=size(_FFN, 4 * hidden),
        gated_mlp="gelu_new" not in raw.values() and raw.get("model_type") != "phi",
        vocab_size=size(("vocab_size",)),
        max_seq_len=size(_POSITIONS),
        tied_embeddings=bool(raw.get("tie_word_embeddings", True)),
        position="rope",
        norm="rmsnorm",
        bias=False,
    )
