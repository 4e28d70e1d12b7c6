"""One description of a model: its sizes, the kinds of its layers, and what latent attention adds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, get_args

from dynapipe_ext.errors import ConfigError, short


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023): frequencies of less than `beta_slow` turns in the trained length are divided by
    `factor`, those of more than `beta_fast` stay, and in between the two are blended.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, sec. 2.1): keys and values of all heads come out of one latent vector,
    queries out of another, or out of the hidden state where `q_rank` is 0. Of a head's query and key `plain_dim` values
    are not turned and `rotary_dim` are; these, of keys, are the same for all heads.
    """

    q_rank: int
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def kept_values(self) -> int:
        """Of a token, on every tensor parallel rank: latent vectors, what their norms make of them, the turned key."""
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
    "deepseek_v2", "deepseek_v3", "gpt2", "t5",
]  # fmt: skip
# "gpt": Megatron's GPT in sizes of one's own, which no published name has; "transformers": what that package computes,
# of which the sizes alone are known.
Family = PublishedFamily | Literal["gpt", "transformers"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Position = Literal["rope", "learned", "relative"]
Norm = Literal["rmsnorm", "layernorm"]
RouterScore = Literal["softmax", "sigmoid"]  # what makes probabilities of a router's logits
NormPlacement = Literal["pre", "post", "both"]  # of a layer's norms: before attention and MLP, behind them, or both
FAMILIES: tuple[PublishedFamily, ...] = get_args(PublishedFamily)
VOCAB_MULTIPLE = 128  # Megatron's: rows of an embedding are a multiple of it
MOST = 1 << 31  # of any size: far above every model, and small enough for products of them
_MOST_LAYERS = 10_000
_DTYPES = ("float32", "bfloat16", "float16")
_CHOICES = {"activation": get_args(Activation), "position": get_args(Position), "norm": get_args(Norm)} | {
    "norm_placement": get_args(NormPlacement),
    "router_score": get_args(RouterScore),
}
# Left out of JSON at their defaults: costs that were written before these were known keep their fingerprints.
_LATER = (
    "norm_placement", "zero_centered_norm", "qk_norm_whole", "norm_topk_prob", "shared_ffn_hidden_size",
    "shared_expert_gate", "full_attention_every", "local_rope_theta", "query_pre_attn_scalar", "attention_softcap",
    "logit_softcap", "scaled_embedding", "latent", "num_dense_layers", "dense_ffn_hidden_size", "router_score",
    "router_bias", "router_num_groups", "router_group_topk", "router_scale",
)  # fmt: skip
_AT_LEAST_ONE = (
    "num_layers", "hidden_size", "num_heads", "num_query_groups", "head_dim", "ffn_hidden_size", "vocab_size",
    "max_seq_len",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length: "linear", or Llama 3.1's "llama3"."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The one description of a model, of a published family or in one's own sizes (`gpt`).

    Widths are in values, lengths in tokens; `vocab_size` is unpadded. `num_layers` of an encoder-decoder counts its
    encoder, `num_decoder_layers` its decoder (0: decoder only). With `num_experts` every MLP is a mixture of MLPs of
    `ffn_hidden_size`: a router sends each token to `top_k` of them, whose weights are made to sum to 1
    (`norm_topk_prob`) or are their probabilities among all, then multiplied by `router_scale`. The first
    `num_dense_layers` have a plain MLP of `dense_ffn_hidden_size` instead. A router takes experts from the
    `router_group_topk` best of `router_num_groups` groups, 0: of all; with `router_bias` a bias, which is no parameter,
    is added where it chooses and not where it weighs. A shared expert, of `shared_ffn_hidden_size`, sees every
    token, its output times a sigmoid with `shared_expert_gate`. `qk_norm`: queries and keys are normalised, each head
    alone or, if `qk_norm_whole`, all at once. `latent`: attention is such, and `head_dim` the width of a query.
    `zero_centered_norm`: weights of norms are kept as their distance from 1.
    `sliding_window` positions are seen, in all layers but every `full_attention_every`-th; layers with a window turn by
    `local_rope_theta` where that is not 0. Scores are divided by sqrt(`query_pre_attn_scalar`), 0 being `head_dim`, and
    scores and logits pass through cap x tanh(x / cap) where their cap is not 0. `scaled_embedding`: embeddings are
    multiplied by sqrt(hidden_size). `max_seq_len` counts position embeddings where they are learned.
    `scaled_output`: T5 1.0 divides what enters its head by sqrt(hidden_size). `dtype` is that of the weights as
    published (torch's name). Errors: ConfigError.
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
    rope_scaling: RopeScaling | Yarn | None = None
    sliding_window: int = 0
    full_attention_every: int = 0
    local_rope_theta: float = 0.0
    query_pre_attn_scalar: int = 0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    scaled_embedding: bool = False
    relative_buckets: int = 32
    relative_max_distance: int = 128
    scaled_output: bool = False
    latent: LatentAttention | None = None
    num_dense_layers: int = 0
    dense_ffn_hidden_size: int = 0
    router_score: RouterScore = "softmax"
    router_bias: bool = False
    router_num_groups: int = 0
    router_group_topk: int = 0
    router_scale: float = 1.0
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
        """Megatron's GPT in sizes of one's own: SiLU in gated MLPs, else GELU; `bias` in all projections or, with
        `qkv_bias`, in q, k and v alone. `head_dim` 0: the heads fill the hidden size. Errors: ConfigError.

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
        """T5 in sizes of one's own: 1.1's gated tanh GELU, else 1.0's ReLU; a tied head's inputs are scaled, as 1.0's.

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
        """What `to_json` made of one. Errors: ConfigError."""
        try:
            parts: dict[str, Any] = {}
            if (scaling := raw.get("rope_scaling")) is not None:
                parts["rope_scaling"] = (Yarn if scaling["kind"] == "yarn" else RopeScaling)(**scaling)
            if (latent := raw.get("latent")) is not None:
                parts["latent"] = LatentAttention(**latent)
            return cls(**{**raw, **parts})
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"a model's description cannot be read ({error}): it is of another version") from error

    def to_json(self) -> dict[str, Any]:
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if name not in _LATER or value != defaults[name]}

    def __post_init__(self) -> None:
        if self.family not in (*FAMILIES, "gpt", "transformers"):
            raise ConfigError(f"family {self.family!r} is not known: give one of {', '.join(FAMILIES)}")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
                raise ConfigError(f"{name} is {short(value)} but must be an integer of 1 to {MOST:,}")
        for name in ("num_layers", "num_decoder_layers", "num_experts"):
            if not 0 <= getattr(self, name) <= _MOST_LAYERS:
                raise ConfigError(f"{name} is {short(getattr(self, name))} but must be at most {_MOST_LAYERS:,}")
        if self.num_heads % self.num_query_groups:
            raise ConfigError(
                f"num_heads {self.num_heads} must be a multiple of num_query_groups {self.num_query_groups}"
            )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {short(getattr(self, name))}: give one of {', '.join(known)}")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not known: give one of {', '.join(_DTYPES)}")
        if (self.num_decoder_layers > 0) != (self.family == "t5"):
            raise ConfigError(
                f"num_decoder_layers {self.num_decoder_layers} of family {self.family}: t5 alone has both"
            )
        if not 0 <= self.shared_ffn_hidden_size <= MOST:
            raise ConfigError(
                f"shared_ffn_hidden_size is {short(self.shared_ffn_hidden_size)} but must be 0 to {MOST:,}"
            )
        check_experts(self)
        if self.latent and self.head_dim != (width := self.latent.plain_dim + self.latent.rotary_dim):
            raise ConfigError(f"head_dim is {self.head_dim} but latent attention has queries of {width}: give that")
        if self.qk_norm_whole and not self.qk_norm:
            raise ConfigError("qk_norm_whole is true but qk_norm false: it says over what queries and keys are normed")
        for name in ("sliding_window", "full_attention_every", "query_pre_attn_scalar", "dense_ffn_hidden_size"):
            if not 0 <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name} is {short(getattr(self, name))} but must be 0 to {MOST:,}")
        if (self.full_attention_every or self.local_rope_theta) and not self.sliding_window:
            raise ConfigError("full_attention_every and local_rope_theta are of windows: give sliding_window")
        if self.norm_eps <= 0 or not math.isfinite(self.norm_eps):
            raise ConfigError(f"norm_eps is {self.norm_eps} but must be above 0")

    @property
    def query_size(self) -> int:
        """Width of all heads together; differs from `hidden_size` where `head_dim` is given on its own."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values but for latent attention."""
        return self.num_query_groups * self.head_dim

    @property
    def value_size(self) -> int:
        """Width of the values."""
        return self.num_query_groups * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def attended_size(self) -> int:
        """Width of what heads make of the values, which the output projection takes."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def divided_sizes(self) -> dict[str, int]:
        """Sizes, by name, that tensor parallel ranks divide whatever else they do."""
        sizes = {name: getattr(self, name) for name in ("num_heads", "ffn_hidden_size", "shared_ffn_hidden_size")}
        if self.num_dense_layers:
            sizes["dense_ffn_hidden_size"] = self.dense_ffn_hidden_size
        if self.latent:
            sizes["q_lora_rank"] = self.latent.q_rank
            sizes["kv_lora_rank + qk_rope_head_dim"] = self.latent.kv_rank + self.latent.rotary_dim
        return sizes

    @property
    def fc1_size(self) -> int:
        """Rows of an MLP's first product: gate and value of a gated one."""
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
        """Whether attention of a layer, counted from 0, sees `sliding_window` positions only."""
        every = self.full_attention_every
        return bool(self.sliding_window) and not (every and (layer + 1) % every == 0)

    @property
    def pieces_fault(self) -> str:
        """Why long samples cannot be trained in pieces that attend to the earlier ones; nothing if they can."""
        if self.num_decoder_layers:
            return f"{self.family} is an encoder-decoder, whose inputs attend to what comes later: plan whole samples"
        if self.sliding_window:
            return (
                f"{self.family} has windows of attention (sliding_window {self.sliding_window}), which do not go on"
                " from piece to piece: plan whole samples"
            )
        if self.latent:
            return f"{self.family} has latent attention, whose pieces are not turned as one sample: plan whole samples"
        if self.family == "transformers":
            return (
                "the model is computed by transformers, of whose attention the description says nothing: plan whole"
                " samples"
            )
        return ""

    @property
    def num_window_layers(self) -> int:
        return sum(self.has_window(layer) for layer in range(self.num_layers))

    @property
    def shared_parameters(self) -> int:
        """Weights of both products of the shared expert, a gated MLP; its gate, of `hidden_size`, not among them."""
        return 3 * self.hidden_size * self.shared_ffn_hidden_size

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Weights of a layer's norms of queries and of keys, which tensor parallel ranks divide if `qk_norm_whole`; or
        of latent vectors."""
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
        """The same with the vocabulary as `padded_vocab_size` rounds it: what costs are counted of."""
        return replace(self, vocab_size=self.padded_vocab_size(tp=tp))


@lru_cache(maxsize=64)
def layer_kinds(architecture: Architecture) -> tuple[tuple[Architecture, range], ...]:
    """Runs of layers of one make, from the first on: the model as if all of its layers were such, and which they are.

    Of an encoder-decoder one, of its encoder. Windows of attention in some layers make no kind: they change no weights.
    """
    a = architecture
    if not a.num_dense_layers:
        return ((a, range(a.num_layers)),)
    experts = replace(a, num_dense_layers=0, dense_ffn_hidden_size=0)
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
    )
    return ((dense, range(a.num_dense_layers)), (experts, range(a.num_dense_layers, a.num_layers)))


def kinds_of_stages(
    architecture: Architecture, layers_per_stage: Sequence[int]
) -> list[tuple[Architecture, tuple[int, ...]]]:
    """Each kind of layer with how many of it every stage has."""
    ends = list(accumulate(layers_per_stage))
    stages = [range(end - count, end) for end, count in zip(ends, layers_per_stage, strict=True)]
    return [
        (kind, tuple(max(0, min(own.stop, run.stop) - max(own.start, run.start)) for own in stages))
        for kind, run in layer_kinds(architecture)
    ]


def check_experts(a: Architecture) -> None:
    """Errors: ConfigError for sizes of experts, routers and dense layers that do not belong together."""
    if a.top_k and not a.num_experts:
        raise ConfigError(f"top_k {a.top_k} is of experts but num_experts is 0: give num_experts, or neither")
    if a.num_experts and not 1 <= a.top_k <= a.num_experts:
        raise ConfigError(f"top_k is {a.top_k} but must be 1 to num_experts {a.num_experts}")
    if (a.shared_ffn_hidden_size and not a.num_experts) or (a.shared_expert_gate and not a.shared_ffn_hidden_size):
        raise ConfigError(
            f"shared_ffn_hidden_size is {a.shared_ffn_hidden_size} and shared_expert_gate"
            f" {a.shared_expert_gate} with num_experts {a.num_experts}: a gate is of a shared expert, which"
            " is of a mixture"
        )
    dense, width = a.num_dense_layers, a.dense_ffn_hidden_size
    if not 0 <= dense < a.num_layers or (dense > 0) != (width > 0) or (dense and not a.num_experts):
        raise ConfigError(
            f"num_dense_layers is {dense} of {a.num_layers} layers, dense_ffn_hidden_size {width}, num_experts"
            f" {a.num_experts}: dense layers come before those of experts, and have a width of their own"
        )
    groups, taken = a.router_num_groups, a.router_group_topk
    if (groups or taken) and not (
        0 < taken < groups and a.num_experts % groups == 0 and a.top_k <= taken * (a.num_experts // groups)
    ):
        raise ConfigError(
            f"router_group_topk is {taken} of router_num_groups {groups}: it must be below it, and these be equal parts"
            f" of num_experts {a.num_experts} that hold top_k {a.top_k}; 0 and 0 where all experts may be taken"
        )
