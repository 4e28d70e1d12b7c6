"""Every tensor of a published model by its Hugging Face name and shape, in groups that formats keep together.

Checkpoint conversion translates between formats through these names and shapes. Their sizes give the exact parameter
count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture, LatentAttention, layer_kinds

ModelSide = Literal["", "encoder", "decoder"]
GroupKind = Literal[
    "embedding", "position", "final_norm", "head", "relative_bias",
    "attention_norm", "attention_in", "attention_in_bias", "attention_out", "attention_out_bias", "q_norm", "k_norm",
    "attention_post_norm", "cross_norm", "cross_q", "cross_kv", "cross_out",
    "mlp_norm", "mlp_in", "mlp_in_bias", "mlp_out", "mlp_out_bias", "mlp_post_norm",
    "router", "router_bias", "shared_in", "shared_out", "shared_gate",
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
    def is_buffer(self) -> bool:
        """Whether it is a buffer: it has no gradient and no moments, and is always float32."""
        return self.kind == "router_bias"


def tensor_groups(architecture: Architecture) -> tuple[TensorGroup, ...]:
    """All groups in the order of the forward pass. A tied head has no group: it is the embedding.

    Errors: ConfigError for a model in custom sizes, whose tensors have no names on the Hub.
    """
    if architecture.family in ("gpt", "transformers"):
        raise ConfigError(
            "a model in custom sizes has no published names of tensors: give a published model's config.json"
        )
    writer = {"gpt2": _gpt2, "t5": _t5}.get(architecture.family, _llama)
    return tuple(writer(architecture))


def num_parameters(architecture: Architecture) -> int:
    """Exactly the number of parameters of the model that transformers builds, tied weights counted once."""
    return sum(group.size for group in tensor_groups(architecture) if not group.is_buffer)


def _group(kind: GroupKind, *tensors: tuple[str, tuple[int, ...]], layer: int = -1, expert: int = -1) -> TensorGroup:
    return TensorGroup(kind, tuple(TensorInfo(*tensor) for tensor in tensors), layer=layer, expert=expert)


def _llama(a: Architecture) -> Iterator[TensorGroup]:
    """Llama and its relatives."""
    h = a.hidden_size
    yield _group("embedding", ("model.embed_tokens.weight", (a.vocab_size, h)))
    for kind, layers in layer_kinds(a):
        for i in layers:
            yield from _llama_layer(kind, i)
    yield _group("final_norm", ("model.norm.weight", (h,)))
    if not a.tied_embeddings:
        yield _group("head", ("lm_head.weight", (a.vocab_size, h)))


def _llama_layer(a: Architecture, i: int) -> Iterator[TensorGroup]:
    h, layer = a.hidden_size, f"model.layers.{i}"
    before, after = a.norm_placement != "post", a.norm_placement != "pre"
    if before:
        yield _group("attention_norm", (f"{layer}.input_layernorm.weight", (h,)), layer=i)
    yield from _latent_attention(a, a.latent, i) if a.latent else _attention(a, i)
    if after:
        yield _group("attention_post_norm", (f"{layer}.post_attention_layernorm.weight", (h,)), layer=i)
    if before:
        name = "pre_feedforward_layernorm" if after else "post_attention_layernorm"
        yield _group("mlp_norm", (f"{layer}.{name}.weight", (h,)), layer=i)
    yield from _mixture(a, i) if a.num_experts else _mlp(a, i)
    if after:
        yield _group("mlp_post_norm", (f"{layer}.post_feedforward_layernorm.weight", (h,)), layer=i)


def _attention(a: Architecture, i: int) -> Iterator[TensorGroup]:
    h, q, kv, attention = a.hidden_size, a.query_size, a.kv_size, f"model.layers.{i}.self_attn"
    if a.family == "phi3":
        yield _group("attention_in", (f"{attention}.qkv_proj.weight", (q + 2 * kv, h)), layer=i)
    else:
        projections = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
        weights = [(f"{attention}.{name}.weight", (width, h)) for name, width in projections]
        yield _group("attention_in", *weights, layer=i)
        if a.qkv_bias:
            biases = [(f"{attention}.{name}.bias", (width,)) for name, width in projections]
            yield _group("attention_in_bias", *biases, layer=i)
    if a.qk_norm:
        of_q, of_k = a.qk_norm_sizes
        yield _group("q_norm", (f"{attention}.q_norm.weight", (of_q,)), layer=i)
        yield _group("k_norm", (f"{attention}.k_norm.weight", (of_k,)), layer=i)
    yield _group("attention_out", (f"{attention}.o_proj.weight", (h, q)), layer=i)
    if a.attention_output_bias:
        yield _group("attention_out_bias", (f"{attention}.o_proj.bias", (h,)), layer=i)


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


def _mlp(a: Architecture, i: int) -> Iterator[TensorGroup]:
    h, f, mlp = a.hidden_size, a.ffn_hidden_size, f"model.layers.{i}.mlp"
    if a.family == "phi3":
        yield _group("mlp_in", (f"{mlp}.gate_up_proj.weight", (2 * f, h)), layer=i)
    else:
        yield _group("mlp_in", (f"{mlp}.gate_proj.weight", (f, h)), (f"{mlp}.up_proj.weight", (f, h)), layer=i)
    if a.mlp_bias:
        yield _group("mlp_in_bias", (f"{mlp}.gate_proj.bias", (f,)), (f"{mlp}.up_proj.bias", (f,)), layer=i)
    yield _group("mlp_out", (f"{mlp}.down_proj.weight", (h, f)), layer=i)
    if a.mlp_bias:
        yield _group("mlp_out_bias", (f"{mlp}.down_proj.bias", (h,)), layer=i)


def _mixture(a: Architecture, i: int) -> Iterator[TensorGroup]:
    h, f, s = a.hidden_size, a.ffn_hidden_size, a.shared_ffn_hidden_size
    of_mixtral = a.family == "mixtral"
    moe = f"model.layers.{i}.{'block_sparse_moe' if of_mixtral else 'mlp'}"
    gate, up, down = ("w1", "w3", "w2") if of_mixtral else ("gate_proj", "up_proj", "down_proj")
    yield _group("router", (f"{moe}.gate.weight", (a.num_experts, h)), layer=i)
    if a.router_bias:
        yield _group("router_bias", (f"{moe}.gate.e_score_correction_bias", (a.num_experts,)), layer=i)
    for e in range(a.num_experts):
        expert = f"{moe}.experts.{e}"
        gate_and_up = (f"{expert}.{gate}.weight", (f, h)), (f"{expert}.{up}.weight", (f, h))
        yield _group("mlp_in", *gate_and_up, layer=i, expert=e)
        yield _group("mlp_out", (f"{expert}.{down}.weight", (h, f)), layer=i, expert=e)
    if s:
        shared = f"{moe}.shared_expert{'s' * (a.latent is not None)}"
        yield _group("shared_in", (f"{shared}.gate_proj.weight", (s, h)), (f"{shared}.up_proj.weight", (s, h)), layer=i)
        yield _group("shared_out", (f"{shared}.down_proj.weight", (h, s)), layer=i)
    if a.shared_expert_gate:
        yield _group("shared_gate", (f"{moe}.shared_expert_gate.weight", (1, h)), layer=i)


def _gpt2(a: Architecture) -> Iterator[TensorGroup]:
    """GPT-2 keeps its weights as (inputs, outputs), and query, key and value as one."""
    h, f = a.hidden_size, a.ffn_hidden_size

    def norm(name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (f"{name}.weight", (h,)), (f"{name}.bias", (h,))

    yield _group("embedding", ("transformer.wte.weight", (a.vocab_size, h)))
    yield _group("position", ("transformer.wpe.weight", (a.max_seq_len, h)))
    for i in range(a.num_layers):
        layer = f"transformer.h.{i}"
        yield _group("attention_norm", *norm(f"{layer}.ln_1"), layer=i)
        yield _group("attention_in", (f"{layer}.attn.c_attn.weight", (h, 3 * h)), layer=i)
        yield _group("attention_in_bias", (f"{layer}.attn.c_attn.bias", (3 * h,)), layer=i)
        yield _group("attention_out", (f"{layer}.attn.c_proj.weight", (h, h)), layer=i)
        yield _group("attention_out_bias", (f"{layer}.attn.c_proj.bias", (h,)), layer=i)
        yield _group("mlp_norm", *norm(f"{layer}.ln_2"), layer=i)
        yield _group("mlp_in", (f"{layer}.mlp.c_fc.weight", (h, f)), layer=i)
        yield _group("mlp_in_bias", (f"{layer}.mlp.c_fc.bias", (f,)), layer=i)
        yield _group("mlp_out", (f"{layer}.mlp.c_proj.weight", (f, h)), layer=i)
        yield _group("mlp_out_bias", (f"{layer}.mlp.c_proj.bias", (h,)), layer=i)
    yield _group("final_norm", *norm("transformer.ln_f"))
    if not a.tied_embeddings:
        yield _group("head", ("lm_head.weight", (a.vocab_size, h)))


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
