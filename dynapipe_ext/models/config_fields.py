"""Fields of a configuration, read with their bounds, and patterns of windows over layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import MOST, Activation

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class ConfigFields:
    """A raw config with checked reading; `where` names it in errors. Errors of all: ConfigError."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing: give it as an integer of at least 1")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise ConfigError(f"{self.where}: {name} is {short(value)} but must be an integer of 1 to {MOST:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing: give it as a number above 0")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{self.where}: {name} is {short(value)} but must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} is {short(value)} but must be true or false")
        return value

    def activation(self, name: str, default: str) -> Activation:
        value = self.raw.get(name) or default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ConfigError(f"{self.where}: {name} is {short(value)}: known are {', '.join(sorted(ACTIVATIONS))}")
        return ACTIVATIONS[value]

    def refuse(self, name: str, *fine: Any) -> None:
        """Errors: ConfigError where the field is there and none of `fine`."""
        value = self.raw.get(name)
        if value is not None and value not in fine:
            raise ConfigError(
                f"{self.where}: {name} is {short(value)}: only {fine[0] if fine else None!r} is supported"
            )


def rope_fields(fields: ConfigFields) -> ConfigFields:
    """What is said of rotary frequencies: in `rope_parameters` (transformers 5) or `rope_scaling`, before it."""
    said = {name: fields.raw[name] for name in ("rope_parameters", "rope_scaling") if fields.raw.get(name)}
    for name, rope in said.items():
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{fields.where}: {name} is {short(rope)} but must be an object")
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ConfigError(f"{fields.where}: {name} is {short(rope)}, but all layers of such a model turn alike")
    if len(said) == 2 and len({_scaling(fields, rope) for rope in said.values()}) == 2:
        shown = " and ".join(f"{name} {short(rope)}" for name, rope in said.items())
        raise ConfigError(f"{fields.where}: {shown} say different things of one: leave one out")
    return ConfigFields(next(iter(said.values()), {}), f"{fields.where}: rope")


def _scaling(fields: ConfigFields, rope: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Comparable: the base may stand beside it, a type under either name."""
    said = {"rope_type": rope.get("type", "default"), "rope_theta": fields.raw.get("rope_theta"), **rope}
    said.pop("type", None)
    return tuple(sorted((name, repr(value)) for name, value in said.items() if value is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPattern:
    """The modules of a family of causal models, by their names within the model.

    `layers` is the list of decoder layers, each a function of hidden states (rows, length, hidden) that returns them,
    or a tuple that begins with them (`returns_tuple`). `first` is what the first stage alone needs, `last` what the
    last does. What stands in neither, as rotary embeddings do, every stage has a copy of, without weights. `packs`
    says that documents packed into a row do not see one another: `check_packing` proves it of a model.

    >>> LayerPattern(layers="model.layers", first=("model.embed_tokens",), last=("model.norm", "lm_head")).body
    'model'
    """

    layers: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    returns_tuple: bool = False
    packs: bool = False

    @property
    def body(self) -> str:
        """The module whose forward runs the layers: it has no head."""
        return self.layers.rpartition(".")[0]


_LLAMA = LayerPattern(layers="model.layers", first=("model.embed_tokens",), last=("model.norm", "lm_head"), packs=True)
_GPT2 = LayerPattern(
    layers="transformer.h",
    first=("transformer.wte", "transformer.wpe", "transformer.drop"),
    last=("transformer.ln_f", "lm_head"),
    packs=True,
)
_PHI = LayerPattern(
    layers="model.layers",
    first=("model.embed_tokens", "model.embed_dropout"),
    last=("model.final_layernorm", "lm_head"),
    packs=True,
)
LAYER_PATTERNS: dict[str, LayerPattern] = {  # by transformers' model_type
    "gemma": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "phi": _PHI,
    "phi3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}
ENCODER_DECODERS = ("t5",)  # of which other code knows where they are cut


def refuse_other_pairs(kind: object) -> None:
    """Errors: ConfigError for an encoder-decoder, by transformers' model_type, that nobody knows to cut."""
    if kind not in ENCODER_DECODERS:
        raise ConfigError(
            f"{short(kind)} has an encoder and a decoder: of such models {', '.join(ENCODER_DECODERS)} alone is known,"
            " so give one, or a model that is a decoder only"
        )


def pattern_of(kind: object) -> LayerPattern:
    """The pattern of a family, by transformers' model_type. Errors: ConfigError for one that is not known."""
    if not isinstance(kind, str) or kind not in LAYER_PATTERNS:
        raise ConfigError(
            f"no layer pattern is known for model_type {short(kind)} (known: {', '.join(sorted(LAYER_PATTERNS))}): name"
            " its modules with pattern=LayerPattern(layers=…, first=…, last=…)"
        )
    return LAYER_PATTERNS[kind]
