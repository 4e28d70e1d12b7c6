"""What describes a published family: fields of its config.json, names of its tensors, and what takes more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.config_fields import ACTIVATION_NAMES, ConfigFields

FieldKind = Literal["integer", "count", "number", "flag", "activation"]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigField:
    """`part` of an Architecture as the field `name` of config.json; both may stand in several fields, the later counts.

    `default` is what transformers takes for a missing field, a function of the parts before it, or None where the field
    must be there. A part without a name is always its default.
    """

    part: str
    name: str
    kind: FieldKind = "integer"
    default: Any = None

    def read(self, fields: ConfigFields, values: Values) -> Any:
        """Errors: ConfigError naming the field."""
        is_given = bool(self.name) and fields.raw.get(self.name) is not None
        default = self.default(values) if callable(self.default) and not is_given else self.default
        if not self.name:
            return default
        return getattr(fields, self.kind)(self.name, None if callable(default) else default)

    def write(self, architecture: Architecture) -> Any:
        value = getattr(architecture, self.part)
        return ACTIVATION_NAMES.get(value, value) if self.kind == "activation" else value


def same_as(part: str) -> Callable[[Values], Any]:
    """The default that is another part."""
    return lambda values: values[part]


def per_head(values: Values) -> int:
    """The default width of a head. Errors: ConfigError where heads do not fill the hidden size."""
    hidden, heads = values["hidden_size"], values["num_heads"]
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} must be a multiple of num_attention_heads {heads}")
    return int(hidden // heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names on the Hub of a decoder-only model's modules: those of a layer stand below `layer`, experts' have {e}.

    Query, key and value are three modules or one of [q; k; v]; with `grouped_qkv` that one has them by query group.
    Gate and up are two or one; an MLP without a gate has one. `transposed`: weights are (inputs, outputs).
    `joined_experts`: all experts of a layer are one tensor (experts, inputs, outputs), whose last axis has gate before
    up ("halves"), or in turns ("neighbours").
    """

    embedding: str = "model.embed_tokens"
    position: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{i}"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    attention_in: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_in: tuple[str, ...] = ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj")
    expert_out: str = "mlp.experts.{e}.down_proj"
    shared_expert: str = "mlp.shared_expert"
    sinks: str = "self_attn.sinks"
    joined_experts: Literal["", "halves", "neighbours"] = ""
    transposed: bool = False
    grouped_qkv: bool = False

    @property
    def has_joined_qkv(self) -> bool:
        return len(self.attention_in) == 1


# How a family says which positions a layer sees: it says nothing, all layers have the window of `sliding_window`, some
# have one by `layer_types`, or windows can be switched on, which is refused.
Windows = Literal["none", "all", "by_layer", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedForm:
    """How a family is published.

    `refused`: fields and the values of them that a layer here computes. `ropes`: the kinds of rotary frequencies, none
    for other positions; `rotary_share` is the part of a head that turns where the field is missing, None where whole
    heads turn always. `window_rope`: layers with windows have a base of their own, unscaled. `read` and `write` add
    what takes more than a field; `written` are fields that are always the same.
    """

    model_class: str
    fields: tuple[ConfigField, ...]
    traits: Values = field(default_factory=dict)
    names: TensorNames = field(default_factory=TensorNames)
    aliases: Mapping[str, str] = field(default_factory=dict)  # second names of fields; transformers accepts both
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    written: Values = field(default_factory=dict)
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic")
    rope_theta: float = 1e4
    trained_len: int = 0  # original_max_position_embeddings beside the frequencies, where it is missing
    rotary_share: float | None = None
    window_rope: ConfigField | None = None
    windows: Windows = "none"
    default_window: int | None = None
    full_attention_every: int = 0
    read: Callable[[ConfigFields, Values], Values] = lambda fields, values: {}
    write: Callable[[Architecture], Values] = lambda architecture: {}
    has_prediction_layers: bool = False  # files may hold layers behind the last, which predict further tokens
