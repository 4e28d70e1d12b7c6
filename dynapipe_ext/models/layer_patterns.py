"""Which modules of a transformers model are its layers, and where the model can be cut."""

from __future__ import annotations

from dataclasses import dataclass

from dynapipe_ext.errors import ConfigError, short


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
