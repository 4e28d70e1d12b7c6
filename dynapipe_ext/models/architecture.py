"""One description of a model: its sizes, the kinds of its layers, and what latent attention adds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from dynapipe_ext.errors import ConfigError, check_integer, settle_field_types, short
from dynapipe_ext.models.rope_scaling import LongRope, RopeScaling, Yarn


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, sec. 2.1). One latent vector gives the keys and values of all heads.
    Another one gives the queries; where `q_rank` is 0 the hidden state gives them. A head's query and key have
    `plain_dim` values without rotary embedding and `rotary_dim` values with it. All heads share the rotary values of
    keys.
    """

    q_rank: int
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def kept_values(self) -> int:
        """Values kept per token on every tensor parallel rank: latent vectors, their normed copies, the rotary key."""
        return 2 * self.q_rank + 2 * self.kv_rank + self.rotary_dim

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Weights of the projections."""
        queries = num_heads * (self.plain_dim + self.rotary_dim)
        to_queries = self.q_rank * (hidden_size + queries) if self.q_rank else hidden_size * queries
        to_latent = hidden_size * (self.kv_rank + self.rotary_dim)
        from_latent = self.kv_rank * num_heads * (self.plain_dim + self.value_dim)
        return to_queries + to_latent + from_latent + hidden_size * num_heads * self.value_dim


PublishedFamily = Literal[
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "olmo2", "gemma2", "gemma3_text",
    "deepseek_v2", "deepseek_v3", "gpt2", "t5", "mt5", "smollm3", "granite", "olmoe", "olmo3", "gemma", "starcoder2",
    "glm", "glm4", "glm4_moe", "nemotron", "internlm2", "kimi_k2", "gpt_oss", "llama4_text",
]  # fmt: skip
# "gpt": Megatron's GPT in custom sizes, which has no published name. "transformers": a model that this package
# computes; only its sizes are known here.
Family = PublishedFamily | Literal["gpt", "transformers"]
# relu2: the square of relu; quick_gelu: x sigmoid(1.702 x)
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu"]
Position = Literal["rope", "learned", "relative"]
Norm = Literal["rmsnorm", "layernorm"]
RouterScore = Literal["softmax", "sigmoid"]  # turns a router's logits into probabilities
NormPlacement = Literal["pre", "post", "both"]  # of a layer's norms: before attention and MLP, after them, or both
FAMILIES: tuple[PublishedFamily, ...] = get_args(PublishedFamily)
ENCODER_DECODER_FAMILIES = ("t5", "mt5")
VOCAB_MULTIPLE = 128  # Megatron's: rows of an embedding are a multiple of it
MOST = 1 << 31  # largest value of any size: far above every model, and products of sizes still fit
MOST_LAYERS = 10_000
_DTYPES = ("float32", "bfloat16", "float16")
# JSON leaves these out at their defaults, so that older cost files keep their fingerprints.
_LATER = (
    "norm_placement", "zero_centered_norm", "qk_norm_whole", "norm_topk_prob", "shared_ffn_hidden_size",
    "shared_expert_gate", "full_attention_every", "local_rope_theta", "query_pre_attn_scalar", "attention_softcap",
    "logit_softcap", "scaled_embedding", "latent", "num_dense_layers", "dense_ffn_hidden_size", "router_score",
    "router_bias", "router_num_groups", "router_group_topk", "router_scale", "rotary_dim", "rotary_interleaved",
    "no_rope_every", "dense_layers", "attention_sinks", "gate_clamp", "up_offset", "embedding_scale", "residual_scale",
    "score_scale", "logit_divisor", "router_on_inputs", "attention_chunk", "qk_unit_norm",
    "temperature_floor", "temperature_scale",
)  # fmt: skip
_AT_LEAST_ONE = (
    "num_layers", "hidden_size", "num_heads", "num_query_groups", "head_dim", "ffn_hidden_size", "vocab_size",
    "max_seq_len",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The one description of a model: of a published family, or in custom sizes (`gpt`).

    Sizes: widths are in values, lengths in tokens; `vocab_size` is unpadded. `num_layers` counts the encoder of an
    encoder-decoder, `num_decoder_layers` its decoder (0: decoder only). `max_seq_len` counts learned position
    embeddings. `dtype` is torch's name for the type of the published weights.

    Experts: with `num_experts` every MLP is a mixture of MLPs of `ffn_hidden_size`. A router sends each token to
    `top_k` of them. Their weights sum to 1 (`norm_topk_prob`) or are probabilities among all experts; `router_scale`
    multiplies them. With `router_num_groups` the router takes experts from the best `router_group_topk` groups.
    `router_bias` adds a bias, which is no parameter, where the router chooses, but not to the weights. A shared expert
    of `shared_ffn_hidden_size` sees every token; `shared_expert_gate` multiplies its output by a sigmoid. The first
    `num_dense_layers` have a plain MLP of `dense_ffn_hidden_size` instead, or those of the numbers `dense_layers`. With
    `router_on_inputs` a weight multiplies what enters its expert, not what comes out.

    Attention: `qk_norm` normalises queries and keys, each head alone or all together (`qk_norm_whole`). With `latent`
    attention is multi-head latent attention, and `head_dim` is the width of a query. A position sees
    `sliding_window` positions, except in every `full_attention_every`-th layer; layers with a window use
    `local_rope_theta` unless it is 0. Scores are divided by sqrt(`query_pre_attn_scalar`) (0: `head_dim`). Where a cap
    is not 0, scores or logits pass through cap x tanh(x / cap). With `attention_sinks` each head has a learned score
    that takes its share beside those of positions, and gives nothing. In layers that turn, a position sees those of its
    chunk of `attention_chunk` positions alone (0: all), and with `qk_unit_norm` each head's query and key have a mean
    square of 1. In layers that turn nothing, the query at position p is multiplied by
    1 + `temperature_scale` x log(1 + floor((p + 1) / `temperature_floor`)) (0: by nothing).

    MLPs: `activation` of the gate multiplies the up values and `up_offset`; where `gate_clamp` is not 0, the gate is at
    most that, and up values are between it and its negative. `mlp_bias` of experts is their routers', too.

    Rotation: the first `rotary_dim` values of a head turn (0: all), each with the one half of them further, or with its
    neighbour (`rotary_interleaved`). Every `no_rope_every`-th layer turns nothing (0: all layers turn).

    Scales: `score_scale` multiplies scores in the place of the root above (0: the root). `embedding_scale` multiplies
    embeddings, `residual_scale` what attention and MLP add, and logits are divided by `logit_divisor`.
    `zero_centered_norm` stores a norm's weights as their distance from 1. `scaled_embedding` multiplies
    embeddings by sqrt(hidden_size). `scaled_output` divides the head's input by sqrt(hidden_size), as T5 1.0 does.

    Errors: ConfigError.
    """

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_seq_len: int
    tied_embeddings: bool
    num_decoder_layers: int = 0
    gated_mlp: bool = True
    activation: Activation = "silu"
    position: Position = "rope"
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    norm_placement: NormPlacement = "pre"
    zero_centered_norm: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    num_experts: int = 0
    top_k: int = 0
    norm_topk_prob: bool = True
    shared_ffn_hidden_size: int = 0
    shared_expert_gate: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | Yarn | LongRope | None = None
    sliding_window: int = 0
    full_attention_every: int = 0
    local_rope_theta: float = 0.0
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    no_rope_every: int = 0
    attention_sinks: bool = False
    gate_clamp: float = 0.0
    up_offset: float = 0.0
    query_pre_attn_scalar: int = 0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    scaled_embedding: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    score_scale: float = 0.0
    logit_divisor: float = 1.0
    relative_buckets: int = 32
    relative_max_distance: int = 128
    scaled_output: bool = False
    latent: LatentAttention | None = None
    num_dense_layers: int = 0
    dense_ffn_hidden_size: int = 0
    dense_layers: tuple[int, ...] = ()
    router_score: RouterScore = "softmax"
    router_bias: bool = False
    router_num_groups: int = 0
    router_group_topk: int = 0
    router_scale: float = 1.0
    router_on_inputs: bool = False
    attention_chunk: int = 0
    qk_unit_norm: bool = False
    temperature_floor: int = 0
    temperature_scale: float = 0.0
    dtype: str = "float32"

    @classmethod
    def gpt(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        num_query_groups: int,
        ffn_hidden_size: int,
        gated_mlp: bool,
        vocab_size: int,
        max_seq_len: int,
        tied_embeddings: bool,
        position: Literal["learned", "rope"] = "learned",
        norm: Norm = "layernorm",
        bias: bool = True,
        num_experts: int = 0,
        top_k: int = 0,
        head_dim: int = 0,
        qkv_bias: bool = False,
        qk_norm: bool = False,
    ) -> Architecture:
        """Megatron's GPT in custom sizes. Gated MLPs use SiLU, others GELU. `bias` adds biases to all projections,
        `qkv_bias` only to q, k and v. With `head_dim` 0 the heads fill the hidden size. Errors: ConfigError.

        >>> Architecture.gpt(
        ...     num_layers=2, hidden_size=64, num_heads=4, num_query_groups=2, ffn_hidden_size=256, gated_mlp=False,
        ...     vocab_size=512, max_seq_len=128, tied_embeddings=True,
        ... ).kv_size
        32
        """
        if not head_dim and (num_heads < 1 or hidden_size % num_heads):
            raise ConfigError(
                f"hidden_size {hidden_size} must be a multiple of num_heads {num_heads}, or give head_dim"
            )
        return cls(
            family="gpt",
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_query_groups=num_query_groups,
            head_dim=head_dim or hidden_size // num_heads,
            ffn_hidden_size=ffn_hidden_size,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            tied_embeddings=tied_embeddings,
            gated_mlp=gated_mlp,
            activation="silu" if gated_mlp else "gelu",
            position=position,
            norm=norm,
            qkv_bias=bias or qkv_bias,
            attention_output_bias=bias,
            mlp_bias=bias,
            qk_norm=qk_norm,
            num_experts=num_experts,
            top_k=top_k,
        )

    @classmethod
    def t5(
        cls,
        *,
        num_layers: int,
        num_decoder_layers: int,
        hidden_size: int,
        num_heads: int,
        ffn_hidden_size: int,
        gated_mlp: bool,
        vocab_size: int,
        max_seq_len: int,
        tied_embeddings: bool,
    ) -> Architecture:
        """T5 in custom sizes: gated tanh GELU as in T5 1.1, else ReLU as in 1.0. Inputs of a tied head are scaled as in
        1.0.

        Errors: ConfigError.
        """
        return cls(
            family="t5",
            num_layers=num_layers,
            num_decoder_layers=num_decoder_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_query_groups=num_heads,
            head_dim=hidden_size // num_heads,
            ffn_hidden_size=ffn_hidden_size,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            tied_embeddings=tied_embeddings,
            gated_mlp=gated_mlp,
            activation="gelu_tanh" if gated_mlp else "relu",
            position="relative",
            norm_eps=1e-6,
            scaled_output=tied_embeddings,
        )

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Architecture:
        """The architecture that `to_json` wrote. Errors: ConfigError."""
        try:
            parts: dict[str, Any] = {name: tuple(value) for name, value in raw.items() if isinstance(value, list)}
            if (scaling := raw.get("rope_scaling")) is not None:
                kinds: dict[str, Any] = {"yarn": Yarn, "longrope": LongRope}
                lists = {name: tuple(value) for name, value in scaling.items() if isinstance(value, list)}
                parts["rope_scaling"] = kinds.get(scaling["kind"], RopeScaling)(**{**scaling, **lists})
            if (latent := raw.get("latent")) is not None:
                parts["latent"] = LatentAttention(**latent)
            return cls(**{**raw, **parts})
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"a model's description cannot be read ({error}): it is of another version") from error

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        if (values["rope_scaling"] or {}).get("truncate"):
            del values["rope_scaling"]["truncate"]
        return without_defaults(values)

    def __post_init__(self) -> None:
        settle_field_types(self)
        if self.family not in (*FAMILIES, "gpt", "transformers"):
            raise ConfigError(f"family {self.family!r} is not known: give one of {', '.join(FAMILIES)}")
        for name in _AT_LEAST_ONE:
            check_integer(name, getattr(self, name), least=1, most=MOST)
        for name in ("num_layers", "num_decoder_layers", "num_experts"):
            if not 0 <= getattr(self, name) <= MOST_LAYERS:
                raise ConfigError(f"{name} is {short(getattr(self, name))} but must be at most {MOST_LAYERS:,}")
        if self.num_heads % self.num_query_groups:
            raise ConfigError(
                f"num_heads {self.num_heads} must be a multiple of num_query_groups {self.num_query_groups}"
            )
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not known: give one of {', '.join(_DTYPES)}")
        if (self.num_decoder_layers > 0) != (self.family in ENCODER_DECODER_FAMILIES):
            both = " and ".join(ENCODER_DECODER_FAMILIES)
            raise ConfigError(
                f"num_decoder_layers {self.num_decoder_layers} of family {self.family}: {both} alone have both"
            )
        for name in ("shared_ffn_hidden_size", "sliding_window", "full_attention_every", "dense_ffn_hidden_size"):
            if not 0 <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name} is {short(getattr(self, name))} but must be 0 to {MOST:,}")
        check_experts(self)
        if self.latent and self.head_dim != (width := self.latent.plain_dim + self.latent.rotary_dim):
            raise ConfigError(f"head_dim is {self.head_dim} but latent attention has queries of {width}: give that")
        if self.qk_norm_whole and not self.qk_norm:
            raise ConfigError("qk_norm_whole is true but qk_norm is false: set qk_norm too, or leave qk_norm_whole out")
        if not 0 <= self.query_pre_attn_scalar <= MOST:
            raise ConfigError(f"query_pre_attn_scalar is {short(self.query_pre_attn_scalar)} but must be 0 to {MOST:,}")
        if (self.full_attention_every or self.local_rope_theta) and not self.sliding_window:
            raise ConfigError("full_attention_every and local_rope_theta need windows: give sliding_window")
        if not 0 <= self.rotary_dim < self.head_dim or self.rotary_dim % 2:
            raise ConfigError(
                f"rotary_dim is {short(self.rotary_dim)} but must be even and below head_dim {self.head_dim}, or 0 for"
                " whole heads"
            )
        for name in ("no_rope_every", "attention_chunk", "temperature_floor"):
            if not 0 <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name} is {short(getattr(self, name))} but must be 0 to {MOST:,}")
        for name, value in (("norm_eps", self.norm_eps), ("rope_theta", self.rope_theta)):
            if value <= 0 or not math.isfinite(value):
                raise ConfigError(f"{name} is {short(value)} but must be above 0, and finite")

    @property
    def query_size(self) -> int:
        """Width of all heads together. It differs from `hidden_size` where the model sets its own `head_dim`."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values except under latent attention."""
        return self.num_query_groups * self.head_dim

    def kv_size_on(self, tp: int) -> int:
        """Width of the keys that one of `tp` ranks computes with: a head's at least, which ranks beyond them share."""
        return -(-self.num_query_groups // tp) * self.head_dim

    def groups_fault(self, tp: int) -> str:
        """Why `tp` ranks can neither divide the key heads nor share them; empty where they can.

        Where tensor parallel ranks are more than key heads, each rank holds an equal part of the rows of queries, keys
        and values. It gathers their outputs and takes its query heads with the key head that belongs to them
        (megatron-core's SelfAttention).
        """
        groups = self.num_query_groups
        if groups % tp and tp % groups:
            return f"num_query_groups {groups} must divide tp {tp} or be a multiple of it"
        if self.qk_norm_whole and groups % tp:
            return (
                f"num_query_groups {groups} must be a multiple of tp {tp}: ranks that share a key head would count it"
                " more than once in the norm of all keys"
            )
        if groups % tp and (self.query_size + 2 * self.kv_size) % tp:
            return f"the {self.query_size + 2 * self.kv_size} rows of queries, keys and values must divide over tp {tp}"
        return ""

    @property
    def value_size(self) -> int:
        """Width of the values."""
        return self.num_query_groups * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def attended_size(self) -> int:
        """Width of the attention's output, which enters the output projection."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def divided_sizes(self) -> dict[str, int]:
        """Sizes, by name, that tensor parallel ranks always divide."""
        sizes = {name: getattr(self, name) for name in ("num_heads", "ffn_hidden_size", "shared_ffn_hidden_size")}
        if self.dense_ffn_hidden_size:
            sizes["dense_ffn_hidden_size"] = self.dense_ffn_hidden_size
        if self.latent:
            sizes["q_lora_rank"] = self.latent.q_rank
            sizes["kv_lora_rank + qk_rope_head_dim"] = self.latent.kv_rank + self.latent.rotary_dim
        return sizes

    @property
    def fc1_size(self) -> int:
        """Rows of an MLP's first product: gate and value together where it is gated."""
        return self.ffn_hidden_size * (2 if self.gated_mlp else 1)

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's q, k, v and output projections."""
        if self.latent:
            return self.latent.parameters(self.hidden_size, self.num_heads)
        return self.hidden_size * (2 * self.query_size + 2 * self.kv_size)

    @property
    def mlp_parameters(self) -> int:
        """Weights of both products of the MLP, or of one expert."""
        return self.hidden_size * (self.fc1_size + self.ffn_hidden_size)

    def has_window(self, layer: int) -> bool:
        """Whether a layer (from 0) attends to `sliding_window` positions only."""
        every = self.full_attention_every
        return bool(self.sliding_window) and not (every and (layer + 1) % every == 0)

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer (from 0) is a mixture."""
        is_dense = layer < self.num_dense_layers or layer in self.dense_layers
        return bool(self.num_experts) and not is_dense

    def turns(self, layer: int) -> bool:
        """Whether a layer (from 0) turns its queries and keys by their positions."""
        return self.position == "rope" and not (self.no_rope_every and (layer + 1) % self.no_rope_every == 0)

    @property
    def most_exact_tokens(self) -> int:
        """The longest sample whose frequencies do not depend on its length, which those here never do; 0: any."""
        scaling = self.rope_scaling
        return scaling.original_max_seq_len if scaling and scaling.kind in ("dynamic", "longrope") else 0

    @property
    def pieces_fault(self) -> str:
        """Why a long sample cannot be cut into pieces that attend to earlier pieces; empty where it can."""
        if self.num_decoder_layers:
            return f"{self.family} is an encoder-decoder, whose inputs attend to later positions: plan whole samples"
        if self.sliding_window:
            return (
                f"{self.family} has attention windows (sliding_window {self.sliding_window}), which do not go on"
                " from piece to piece: plan whole samples"
            )
        if self.attention_chunk or self.temperature_floor:
            return (
                f"{self.family} attends in chunks, or scales queries by their positions, which pieces would count anew:"
                " plan whole samples"
            )
        if self.attention_sinks:
            return f"{self.family} has attention sinks, which pieces would each count: plan whole samples"
        if self.latent:
            return (
                f"{self.family} has latent attention, whose pieces would get wrong rotary positions: plan whole samples"
            )
        if self.family == "transformers":
            return (
                "transformers computes the model, and its description says nothing about attention: plan whole samples"
            )
        return ""

    @property
    def num_window_layers(self) -> int:
        return sum(self.has_window(layer) for layer in range(self.num_layers))

    @property
    def shared_parameters(self) -> int:
        """Weights of the shared expert, a gated MLP, without its gate of `hidden_size` weights."""
        return 3 * self.hidden_size * self.shared_ffn_hidden_size

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Weights of a layer's norms of queries and of keys, or of its two latent vectors. Tensor parallel ranks divide
        them if `qk_norm_whole`."""
        if self.latent:
            return self.latent.q_rank, self.latent.kv_rank
        if not self.qk_norm:
            return 0, 0
        return (self.query_size, self.kv_size) if self.qk_norm_whole else (self.head_dim, self.head_dim)

    @property
    def norm_parameters(self) -> int:
        """Weights and biases of a layer's other norms."""
        count = 4 if self.norm_placement == "both" else 2
        return count * self.hidden_size * (2 if self.norm == "layernorm" else 1)

    @property
    def total_layers(self) -> int:
        return self.num_layers + self.num_decoder_layers

    def padded_vocab_size(self, divisible_by: int = VOCAB_MULTIPLE, tp: int = 1) -> int:
        """Rows of Megatron's embedding: the vocabulary rounded up to a multiple of `divisible_by` x `tp`."""
        multiple = divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def padded(self, tp: int = 1) -> Architecture:
        """The same model with its vocabulary rounded up by `padded_vocab_size`, as costs count it."""
        return replace(self, vocab_size=self.padded_vocab_size(tp=tp))


@lru_cache(maxsize=64)
def layer_kinds(architecture: Architecture) -> tuple[tuple[Architecture, Sequence[int]], ...]:
    """Each kind of layer: the model as if all its layers were of this kind, and the layers that are, in order.

    An encoder-decoder has one kind, for its encoder. Attention windows make no kind, since they change no weights.
    """
    a = architecture
    if not a.dense_ffn_hidden_size:
        return ((a, range(a.num_layers)),)
    experts = replace(a, num_dense_layers=0, dense_layers=(), dense_ffn_hidden_size=0)
    dense = replace(
        experts,
        ffn_hidden_size=a.dense_ffn_hidden_size,
        num_experts=0,
        top_k=0,
        shared_ffn_hidden_size=0,
        shared_expert_gate=False,
        router_bias=False,
        router_num_groups=0,
        router_group_topk=0,
        router_on_inputs=False,
    )
    layers = range(a.num_layers)
    kinds = [(dense, [i for i in layers if not a.has_experts(i)]), (experts, [i for i in layers if a.has_experts(i)])]
    return tuple((kind, tuple(own)) for kind, own in kinds)


def kinds_of_ranges(architecture: Architecture, stages: Sequence[range]) -> list[tuple[Architecture, tuple[int, ...]]]:
    """Each kind of layer, with the number of such layers among those of every stage."""
    return [
        (kind, tuple(bisect_left(layers, stage.stop) - bisect_left(layers, stage.start) for stage in stages))
        for kind, layers in layer_kinds(architecture)
    ]


def without_defaults(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description, of any version, without the defaults of what older versions did not know."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(Architecture)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in description.items()}
    return {name: value for name, value in values.items() if name not in _LATER or value != defaults[name]}


def check_experts(a: Architecture) -> None:
    """Errors: ConfigError for sizes of experts, routers and dense layers that contradict each other."""
    if a.top_k and not a.num_experts:
        raise ConfigError(f"top_k is {a.top_k} but num_experts is 0: give num_experts, or neither")
    if a.num_experts and not 1 <= a.top_k <= a.num_experts:
        raise ConfigError(f"top_k is {a.top_k} but must be 1 to num_experts {a.num_experts}")
    if (a.shared_ffn_hidden_size and not a.num_experts) or (a.shared_expert_gate and not a.shared_ffn_hidden_size):
        raise ConfigError(
            f"shared_ffn_hidden_size is {a.shared_ffn_hidden_size} and shared_expert_gate {a.shared_expert_gate} with"
            f" num_experts {a.num_experts}: a gate needs a shared expert, which needs a mixture"
        )
    dense, width = a.num_dense_layers or len(a.dense_layers), a.dense_ffn_hidden_size
    in_order = sorted({*a.dense_layers} & {*range(a.num_layers)})
    if a.dense_layers and (a.num_dense_layers or in_order != [*a.dense_layers]):
        raise ConfigError(
            f"dense_layers is {short(a.dense_layers)} of {a.num_layers} layers, with num_dense_layers"
            f" {a.num_dense_layers}: give ascending numbers of layers, or how many come first"
        )
    if not 0 <= dense < a.num_layers or (dense > 0) != (width > 0) or (width and not a.num_experts):
        raise ConfigError(
            f"num_dense_layers is {dense} of {a.num_layers} layers, dense_ffn_hidden_size {width}, num_experts"
            f" {a.num_experts}: dense layers stand beside layers with experts, and need a width of their own"
        )
    groups, best = a.router_num_groups, a.router_group_topk
    if (groups or best) and not (
        0 < best < groups and a.num_experts % groups == 0 and a.top_k <= best * (a.num_experts // groups)
    ):
        raise ConfigError(
            f"router_group_topk is {best} of router_num_groups {groups}: it must be below that number, the groups must"
            f" be equal parts of num_experts {a.num_experts}, and the best ones must hold top_k {a.top_k}; give 0 and 0"
            " for no groups"
        )
