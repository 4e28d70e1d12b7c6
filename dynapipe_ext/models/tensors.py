"""Every tensor of a published model by its Hugging Face name and shape, in groups that formats keep together.

Checkpoint conversion translates between formats through these names and shapes. Their sizes give the exact parameter
count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dynapipe_ext.models.architecture import Architecture, LatentAttention, layer_kinds
from dynapipe_ext.models.families import published_form
from dynapipe_ext.models.forms import TensorNames

_NamedShapes = list[tuple[str, tuple[int, ...]]]
ModelSide = Literal["", "encoder", "decoder"]
GroupKind = Literal[
    "embedding", "position", "final_norm", "head", "relative_bias",
    "attention_norm", "attention_in", "attention_in_bias", "attention_out", "attention_out_bias", "q_norm", "k_norm",
    "attention_post_norm", "cross_norm", "cross_q", "cross_kv", "cross_out",
    "mlp_norm", "mlp_in", "mlp_in_bias", "mlp_out", "mlp_out_bias", "mlp_post_norm",
    "router", "router_bias", "router_offset", "shared_in", "shared_out", "shared_gate", "sinks",
    "experts_in", "experts_in_bias", "experts_out", "experts_out_bias",
    "q_proj", "q_down", "q_latent_norm", "q_up", "kv_down", "kv_latent_norm", "kv_up",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name on the Hub and shape of one tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that some format holds as one, in a fixed order: query, key, value; gate, up; weight, bias of a norm.

    `side` is empty for decoder-only models. `layer` counts from 0 on each side, -1 outside layers; `expert` -1 for
    none. Groups outside layers are "embedding", "position", "final_norm" (one a side) and "head".
    """

    kind: GroupKind
    tensors: tuple[TensorInfo, ...]
    side: ModelSide = ""
    layer: int = -1
    expert: int = -1

    @property
    def name(self) -> str:
        """Unique within a model, like "decoder.layers.3.experts.0.mlp_in"."""
        parts: list[str] = [self.side] if self.side else []
        parts += ["layers", str(self.layer)] if self.layer >= 0 else []
        parts += ["experts", str(self.expert)] if self.expert >= 0 else []
        return ".".join([*parts, self.kind])

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    @property
    def is_of_experts(self) -> bool:
        """Whether it holds what experts compute with, of one or of all."""
        return self.expert >= 0 or self.kind.startswith("experts_")

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer: it has no gradient and no moments, and is always float32."""
        return self.kind == "router_bias"


def tensor_groups(architecture: Architecture) -> tuple[TensorGroup, ...]:
    """All groups in the order of the forward pass. A tied head has no group: it is the embedding.

    Errors: ConfigError for a model in custom sizes, whose tensors have no names on the Hub.
    """
    published_form(architecture)
    return tuple(_t5(architecture) if architecture.num_decoder_layers else _decoder_only(architecture))


def num_parameters(architecture: Architecture) -> int:
    """Exactly the number of parameters of the model that transformers builds, tied weights counted once."""
    return sum(group.size for group in tensor_groups(architecture) if not group.is_buffer)


def _group(kind: GroupKind, *tensors: tuple[str, tuple[int, ...]], layer: int = -1, expert: int = -1) -> TensorGroup:
    return TensorGroup(kind, tuple(TensorInfo(*tensor) for tensor in tensors), layer=layer, expert=expert)


def _decoder_only(a: Architecture) -> Iterator[TensorGroup]:
    names, h = published_form(a).names, a.hidden_size
    yield _group("embedding", (f"{names.embedding}.weight", (a.vocab_size, h)))
    if names.position:
        yield _group("position", (f"{names.position}.weight", (a.max_seq_len, h)))
    kind_of = {i: kind for kind, layers in layer_kinds(a) for i in layers}
    for i in range(a.num_layers):
        yield from _layer(kind_of[i], names, i)
    yield _group("final_norm", *_norm(a, names.final_norm))
    if not a.tied_embeddings:
        yield _group("head", (f"{names.head}.weight", (a.vocab_size, h)))


def _norm(a: Architecture, module: str) -> _NamedShapes:
    parts = ("weight",) if a.norm == "rmsnorm" else ("weight", "bias")
    return [(f"{module}.{part}", (a.hidden_size,)) for part in parts]


def _layer(a: Architecture, names: TensorNames, i: int) -> Iterator[TensorGroup]:
    layer = names.layer.format(i=i)
    before, after = a.norm_placement != "post", a.norm_placement != "pre"
    if before:
        yield _group("attention_norm", *_norm(a, f"{layer}.{names.attention_norm}"), layer=i)
    yield from _latent_attention(a, a.latent, i) if a.latent else _attention(a, names, i)
    if after:
        yield _group("attention_post_norm", *_norm(a, f"{layer}.{names.attention_post_norm}"), layer=i)
    if before:
        yield _group("mlp_norm", *_norm(a, f"{layer}.{names.mlp_norm}"), layer=i)
    yield from _mixture(a, names, i) if a.num_experts else _mlp(a, names, i)
    if after:
        yield _group("mlp_post_norm", *_norm(a, f"{layer}.{names.mlp_post_norm}"), layer=i)


def _projection(
    a: Architecture, modules: Sequence[str], widths: Sequence[int], inputs: int
) -> tuple[_NamedShapes, _NamedShapes]:
    """Weights and biases of modules that read the same inputs; one module may hold all widths."""
    rows = widths if len(modules) == len(widths) else (sum(widths),)
    is_transposed = published_form(a).names.transposed
    weights: _NamedShapes = [
        (f"{m}.weight", (inputs, n) if is_transposed else (n, inputs)) for m, n in zip(modules, rows, strict=True)
    ]
    return weights, [(f"{m}.bias", (n,)) for m, n in zip(modules, rows, strict=True)]


def _attention(a: Architecture, names: TensorNames, i: int) -> Iterator[TensorGroup]:
    layer = names.layer.format(i=i)
    modules = [f"{layer}.{module}" for module in names.attention_in]
    weights, biases = _projection(a, modules, (a.query_size, a.kv_size, a.kv_size), a.hidden_size)
    yield _group("attention_in", *weights, layer=i)
    if a.qkv_bias:
        yield _group("attention_in_bias", *biases, layer=i)
    if a.qk_norm:
        of_q, of_k = a.qk_norm_sizes
        yield _group("q_norm", (f"{layer}.{names.q_norm}.weight", (of_q,)), layer=i)
        yield _group("k_norm", (f"{layer}.{names.k_norm}.weight", (of_k,)), layer=i)
    if a.attention_sinks:
        yield _group("sinks", (f"{layer}.{names.sinks}", (a.num_heads,)), layer=i)
    weights, biases = _projection(a, [f"{layer}.{names.attention_out}"], (a.hidden_size,), a.query_size)
    yield _group("attention_out", *weights, layer=i)
    if a.attention_output_bias:
        yield _group("attention_out_bias", *biases, layer=i)


def _latent_attention(a: Architecture, latent: LatentAttention, i: int) -> Iterator[TensorGroup]:
    h, attention = a.hidden_size, f"model.layers.{i}.self_attn"

    def weight(kind: GroupKind, name: str, *shape: int) -> TensorGroup:
        return _group(kind, (f"{attention}.{name}.weight", shape), layer=i)

    if latent.q_rank:
        yield weight("q_down", "q_a_proj", latent.q_rank, h)
        yield weight("q_latent_norm", "q_a_layernorm", latent.q_rank)
        yield weight("q_up", "q_b_proj", a.query_size, latent.q_rank)
    else:
        yield weight("q_proj", "q_proj", a.query_size, h)
    yield weight("kv_down", "kv_a_proj_with_mqa", latent.kv_rank + latent.rotary_dim, h)
    yield weight("kv_latent_norm", "kv_a_layernorm", latent.kv_rank)
    yield weight("kv_up", "kv_b_proj", a.num_heads * (latent.plain_dim + latent.value_dim), latent.kv_rank)
    yield weight("attention_out", "o_proj", h, a.attended_size)


def _mlp(a: Architecture, names: TensorNames, i: int) -> Iterator[TensorGroup]:
    layer, widths = names.layer.format(i=i), (a.ffn_hidden_size,) * (2 if a.gated_mlp else 1)
    weights, biases = _projection(a, [f"{layer}.{module}" for module in names.mlp_in], widths, a.hidden_size)
    yield _group("mlp_in", *weights, layer=i)
    if a.mlp_bias:
        yield _group("mlp_in_bias", *biases, layer=i)
    weights, biases = _projection(a, [f"{layer}.{names.mlp_out}"], (a.hidden_size,), a.ffn_hidden_size)
    yield _group("mlp_out", *weights, layer=i)
    if a.mlp_bias:
        yield _group("mlp_out_bias", *biases, layer=i)


def _mixture(a: Architecture, names: TensorNames, i: int) -> Iterator[TensorGroup]:
    h, f, s, layer = a.hidden_size, a.ffn_hidden_size, a.shared_ffn_hidden_size, names.layer.format(i=i)
    router, shared = f"{layer}.{names.router}", f"{layer}.{names.shared_expert}"
    yield _group("router", (f"{router}.weight", (a.num_experts, h)), layer=i)
    if a.router_bias:
        yield _group("router_bias", (f"{router}.e_score_correction_bias", (a.num_experts,)), layer=i)
    if a.mlp_bias:
        yield _group("router_offset", (f"{router}.bias", (a.num_experts,)), layer=i)
    if names.joined_experts:
        yield from _joined_experts(a, names, i)
    for e in range(a.num_experts if not names.joined_experts else 0):
        inputs = [(f"{layer}.{module.format(e=e)}.weight", (f, h)) for module in names.expert_in]
        yield _group("mlp_in", *inputs, layer=i, expert=e)
        yield _group("mlp_out", (f"{layer}.{names.expert_out.format(e=e)}.weight", (h, f)), layer=i, expert=e)
    if s:
        yield _group("shared_in", (f"{shared}.gate_proj.weight", (s, h)), (f"{shared}.up_proj.weight", (s, h)), layer=i)
        yield _group("shared_out", (f"{shared}.down_proj.weight", (h, s)), layer=i)
    if a.shared_expert_gate:
        yield _group("shared_gate", (f"{shared}_gate.weight", (1, h)), layer=i)


def _joined_experts(a: Architecture, names: TensorNames, i: int) -> Iterator[TensorGroup]:
    n, h, f, layer = a.num_experts, a.hidden_size, a.ffn_hidden_size, names.layer.format(i=i)
    (inputs,), output = names.expert_in, names.expert_out
    yield _group("experts_in", (f"{layer}.{inputs}", (n, h, a.fc1_size)), layer=i)
    if a.mlp_bias:
        yield _group("experts_in_bias", (f"{layer}.{inputs}_bias", (n, a.fc1_size)), layer=i)
    yield _group("experts_out", (f"{layer}.{output}", (n, f, h)), layer=i)
    if a.mlp_bias:
        yield _group("experts_out_bias", (f"{layer}.{output}_bias", (n, h)), layer=i)


def _t5(a: Architecture) -> Iterator[TensorGroup]:
    """T5: both sides share the embedding; each side's first layer holds the relative position biases of all."""
    h = a.hidden_size
    yield _group("embedding", ("shared.weight", (a.vocab_size, h)))
    sides: tuple[tuple[ModelSide, int], ...] = (("encoder", a.num_layers), ("decoder", a.num_decoder_layers))
    for side, num_layers in sides:
        for i in range(num_layers):
            for group in _t5_layer(a, side, i):
                yield TensorGroup(group.kind, group.tensors, side, i)
        norm = _group("final_norm", (f"{side}.final_layer_norm.weight", (h,)))
        yield TensorGroup(norm.kind, norm.tensors, side)
    if not a.tied_embeddings:
        yield _group("head", ("lm_head.weight", (a.vocab_size, h)))


def _t5_layer(a: Architecture, side: str, i: int) -> Iterator[TensorGroup]:
    h, q, f = a.hidden_size, a.query_size, a.ffn_hidden_size
    block = f"{side}.block.{i}.layer"
    attention = f"{block}.0.SelfAttention"
    yield _group("attention_norm", (f"{block}.0.layer_norm.weight", (h,)))
    yield _group("attention_in", *[(f"{attention}.{name}.weight", (q, h)) for name in "qkv"])
    yield _group("attention_out", (f"{attention}.o.weight", (h, q)))
    if i == 0:
        yield _group(
            "relative_bias", (f"{attention}.relative_attention_bias.weight", (a.relative_buckets, a.num_heads))
        )
    if side == "decoder":
        cross = f"{block}.1.EncDecAttention"
        yield _group("cross_norm", (f"{block}.1.layer_norm.weight", (h,)))
        yield _group("cross_q", (f"{cross}.q.weight", (q, h)))
        yield _group("cross_kv", *[(f"{cross}.{name}.weight", (q, h)) for name in "kv"])
        yield _group("cross_out", (f"{cross}.o.weight", (h, q)))
    place = 2 if side == "decoder" else 1
    mlp = f"{block}.{place}.DenseReluDense"
    yield _group("mlp_norm", (f"{block}.{place}.layer_norm.weight", (h,)))
    inputs = ("wi_0", "wi_1") if a.gated_mlp else ("wi",)
    yield _group("mlp_in", *[(f"{mlp}.{name}.weight", (f, h)) for name in inputs])
    yield _group("mlp_out", (f"{mlp}.wo.weight", (h, f)))
