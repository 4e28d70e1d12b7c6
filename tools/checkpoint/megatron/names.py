"""Megatron-core's weights of a model by name and shape, and the exact re-layout of Hugging Face's into them and back.

Names are those of megatron-core's GPTModel and T5Model in their local layer specs, layers counted over the whole model.
Four layouts differ from Hugging Face's:

    linear_qkv   rows by query group: the group's queries, its key, its value; next group (GPT-2's and Phi-3's one
                 tensor, too: there [q; k; v])
    linear_kv    rows by head: key, value; next head (cross-attention of T5)
    linear_fc1   [gate; up] of a gated MLP; tensor parallel ranks cut each of both (`tp_parts` 2)
    experts      each by itself, (outputs, inputs); GPT-OSS has (experts, inputs, outputs), gate and up in turns

GPT-2's projections are kept as (inputs, outputs) there and as (outputs, inputs) here. Rotary embeddings rotate halves
in both, so no rows are permuted for them. Experts are those of `SequentialMLP`; `transformer_engine_name` has those
of `TEGroupedMLP`. Megatron's older `GroupedMLP` holds all experts of a layer in two: `mlp.experts.weight1` of shape
(hidden, experts x fc1 rows) and `weight2` (experts x ffn, hidden), each expert's block being its weight transposed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.families import published_form
from dynapipe_ext.models.tensors import GroupKind, ModelSide, TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.formats import CheckpointReader, GroupTensors

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_T5_HEAD = "lm_head.output_layer"

# Kind -> module below "decoder.layers.3." and how tensor parallel ranks cut its weight (dimension, or None).
_IN_LAYER: Mapping[GroupKind, tuple[str, int | None]] = {
    "attention_norm": ("input_layernorm", None),
    "attention_in": ("self_attention.linear_qkv", 0),
    "attention_in_bias": ("self_attention.linear_qkv", 0),
    "attention_out": ("self_attention.linear_proj", 1),
    "attention_out_bias": ("self_attention.linear_proj", None),
    "q_norm": ("self_attention.q_layernorm", None),
    "k_norm": ("self_attention.k_layernorm", None),
    "cross_norm": ("pre_cross_attn_layernorm", None),
    "cross_q": ("cross_attention.linear_q", 0),
    "cross_kv": ("cross_attention.linear_kv", 0),
    "cross_out": ("cross_attention.linear_proj", 1),
    "mlp_norm": ("pre_mlp_layernorm", None),
    "attention_post_norm": ("self_attention.linear_proj.post_layernorm", None),
    "mlp_post_norm": ("mlp.linear_fc2.post_layernorm", None),
    "mlp_in": ("mlp.linear_fc1", 0),
    "mlp_in_bias": ("mlp.linear_fc1", 0),
    "mlp_out": ("mlp.linear_fc2", 1),
    "mlp_out_bias": ("mlp.linear_fc2", None),
    "router": ("mlp.router", None),
    "shared_in": ("mlp.shared_experts.linear_fc1", 0),
    "shared_out": ("mlp.shared_experts.linear_fc2", 1),
    "router_bias": ("mlp.router", None),
    "shared_gate": ("mlp.shared_experts", None),
    "router_offset": ("mlp.router", None),
    "sinks": ("self_attention.core_attention", 0),
    "experts_in": ("linear_fc1.weight", 0),
    "experts_in_bias": ("linear_fc1.bias", 0),
    "experts_out": ("linear_fc2.weight", 1),
    "experts_out_bias": ("linear_fc2.bias", None),
    "q_proj": ("self_attention.linear_q_proj", 0),
    "q_down": ("self_attention.linear_q_down_proj", 0),
    "q_latent_norm": ("self_attention.q_layernorm", None),
    "q_up": ("self_attention.linear_q_up_proj", 0),
    "kv_down": ("self_attention.linear_kv_down_proj", 0),
    "kv_latent_norm": ("self_attention.kv_layernorm", None),
    "kv_up": ("self_attention.linear_kv_up_proj", 0),
}
_PARTS: Mapping[GroupKind, str] = {
    "shared_gate": "gate_weight", "router_bias": "expert_bias", "router_offset": "bias", "sinks": "softmax_offset",
}  # fmt: skip
_NORMS = ("attention_norm", "attention_post_norm", "cross_norm", "mlp_norm", "mlp_post_norm", "final_norm")
_TRANSPOSED = ("attention_in", "attention_out", "mlp_in", "mlp_out")  # of GPT-2


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """One weight of the whole model: `shape` before tensor parallel ranks cut it and without rows of padding.

    Ranks cut along `tp_dim` (None: all hold it whole), after a split into `tp_parts` equal parts of which each rank has
    a slice. `vocabulary`: dimension 0 is padded to a multiple of the ranks. `layer` counts from 0 on its `side`, -1
    outside layers. `aliases` are further names of the same storage in Megatron's state_dict. `is_added`: Hugging Face
    has no such weight; it is zero on the way in and must be zero on the way back. `is_buffer`: no parameter.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    tp_parts: int = 1
    vocabulary: bool = False
    layer: int = -1
    side: ModelSide = ""
    aliases: tuple[str, ...] = ()
    is_added: bool = False
    is_buffer: bool = False

    @property
    def is_of_experts(self) -> bool:
        """Whether it is an expert's: expert parallel ranks hold others, and experts' own ranks cut it."""
        return ".mlp.experts." in self.name


def megatron_tensors(architecture: Architecture, group: TensorGroup) -> tuple[MegatronTensor, ...]:
    """What Megatron holds for a group of `tensor_groups(architecture)`. Over all groups: every weight of its model.

    A tied head is the embedding; Megatron's last pipeline stage has a copy of it as `tied_head_name`.
    """
    return tuple(replace(t, layer=group.layer, side=group.side) for t in _tensors(architecture, group))


def tied_head_name(architecture: Architecture) -> str:
    """Where the last of several pipeline stages keeps its copy of a tied embedding."""
    return f"{_T5_HEAD}.weight" if architecture.num_decoder_layers else HEAD


def _tensors(a: Architecture, group: TensorGroup) -> Iterator[MegatronTensor]:
    stem = f"{group.side or 'decoder'}"
    match group.kind:
        case "embedding":
            yield MegatronTensor(EMBEDDING, (a.vocab_size, a.hidden_size), 0, vocabulary=True)
        case "position":
            yield MegatronTensor("embedding.position_embeddings.weight", (a.max_seq_len, a.hidden_size))
        case "relative_bias":
            name = f"{stem}_relative_pos_emb.relative_attention_bias.weight"
            yield MegatronTensor(name, (a.relative_buckets, a.num_heads))
        case "head":
            aliases = (HEAD,) if a.num_decoder_layers else ()
            shape = (a.vocab_size, a.hidden_size)
            yield MegatronTensor(tied_head_name(a), shape, 0, vocabulary=True, aliases=aliases)
        case "final_norm":
            for kind in _norm_parts(a):
                yield MegatronTensor(f"{stem}.final_layernorm.{kind}", (a.hidden_size,))
            if a.num_decoder_layers and a.tied_embeddings and group.side == "decoder":
                # Megatron's tied T5 head has a bias; published models have none.
                aliases, bias = ("output_layer.bias",), f"{_T5_HEAD}.bias"
                yield MegatronTensor(bias, (a.vocab_size,), 0, vocabulary=True, aliases=aliases, is_added=True)
        case _:
            yield from _layer_tensors(a, group, f"{stem}.layers.{group.layer}")


def _layer_tensors(a: Architecture, group: TensorGroup, layer: str) -> Iterator[MegatronTensor]:
    module, tp_dim = _IN_LAYER[group.kind]
    if _is_joined(group):
        shape, halves = group.tensors[0].shape[:0:-1], 2 if a.gated_mlp and group.kind.startswith("experts_in") else 1
        for expert in range(a.num_experts):
            yield MegatronTensor(f"{layer}.mlp.experts.local_experts.{expert}.{module}", shape, tp_dim, halves)
        return
    if group.expert >= 0:
        module = module.replace("mlp.", f"mlp.experts.local_experts.{group.expert}.")
    if _is_norm(group):
        for part in _norm_parts(a):
            yield MegatronTensor(f"{layer}.{module}.{part}", (a.hidden_size,))
        return
    first = group.tensors[0].shape
    rows = sum(_oriented(a, group, tensor.shape)[0] for tensor in group.tensors)
    part = _PARTS.get(group.kind) or ("bias" if group.kind.endswith("_bias") else "weight")
    parts = 2 if a.gated_mlp and group.kind in ("mlp_in", "mlp_in_bias", "shared_in") else 1
    if a.qk_norm_whole and group.kind in ("q_norm", "k_norm"):
        tp_dim = 0
    shape = (rows, *_oriented(a, group, first)[1:])
    yield MegatronTensor(f"{layer}.{module}.{part}", shape, tp_dim, parts, is_buffer=group.is_buffer)


def _norm_parts(a: Architecture) -> tuple[str, ...]:
    return ("weight",) if a.norm == "rmsnorm" else ("weight", "bias")


def _oriented(a: Architecture, group: TensorGroup, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` as (outputs, inputs)."""
    return shape[::-1] if _is_transposed(a, group) else shape


def _is_transposed(a: Architecture, group: TensorGroup) -> bool:
    return published_form(a).names.transposed and group.kind in _TRANSPOSED


def _rows(a: Architecture, group: TensorGroup) -> tuple[int, tuple[int, ...]]:
    """How rows of several projections are laid into one: the number of repeats, and the rows of each in a repeat."""
    repeats = {"attention_in": a.num_query_groups, "attention_in_bias": a.num_query_groups, "cross_kv": a.num_heads}
    count = repeats.get(group.kind, 1)
    names = published_form(a).names
    if names.grouped_qkv and group.kind in repeats:
        return 1, (a.query_size + 2 * a.kv_size,)
    if names.has_joined_qkv and group.kind in repeats:
        return count, (a.query_size // count, a.kv_size // count, a.kv_size // count)
    return count, tuple(_oriented(a, group, tensor.shape)[0] // count for tensor in group.tensors)


def to_megatron(architecture: Architecture, group: TensorGroup, tensors: GroupTensors) -> dict[str, torch.Tensor]:
    """Megatron's tensors, whole and contiguous, of a group by its Hugging Face names; no value is computed.

    A `tensors` that reads on access keeps memory at the result and one of its parts: each is taken once, in order.
    What needs no re-layout is returned as it came. Errors: DataError naming what is missing, extra or misshapen.
    """
    _check("Hugging Face", group, {t.name: t.shape for t in group.tensors}, tensors.keys())
    expected = megatron_tensors(architecture, group)
    if _is_norm(group):
        parts = [_taken(tensors, tensor.name, tensor.shape) for tensor in group.tensors]
        return dict(zip((t.name for t in expected), _with_added(expected, parts), strict=True))
    if _is_joined(group):
        joined = _taken(tensors, group.tensors[0].name, group.tensors[0].shape)
        cut = _is_in_turns(architecture, group)
        by_expert = (_in_turns(values.t(), 2) if cut else values.t() for values in joined)
        return {own.name: values.contiguous() for own, values in zip(expected, by_expert, strict=True)}
    (tensor,) = expected
    repeats, rows = _rows(architecture, group)
    if len(group.tensors) == 1 and repeats == 1:
        only = _taken(tensors, group.tensors[0].name, group.tensors[0].shape)
        return {tensor.name: only.t().contiguous() if _is_transposed(architecture, group) else only.contiguous()}
    whole: torch.Tensor | None = None
    start = 0
    for info in group.tensors:
        part = _taken(tensors, info.name, info.shape)
        part = part.t() if _is_transposed(architecture, group) else part
        if whole is None:
            whole = torch.empty((repeats, sum(rows), *tensor.shape[1:]), dtype=part.dtype, device=part.device)
        elif whole.dtype != part.dtype:
            raise DataError(
                f"{info.name} is {part.dtype} beside {whole.dtype} of {group.tensors[0].name}: give one dtype"
            )
        for piece in torch.split(part, [repeats * n for n in rows]) if len(group.tensors) == 1 else (part,):
            count = piece.shape[0] // repeats
            whole[:, start : start + count] = piece.reshape(repeats, count, *tensor.shape[1:])
            start += count
        del part, piece
    assert whole is not None
    return {tensor.name: whole.reshape(tensor.shape)}


def megatron_weights(reader: CheckpointReader, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of these names, whole, out of a checkpoint of any format; groups that have none are not read."""
    a = reader.architecture
    for group in tensor_groups(a):
        if any(tensor.name in names for tensor in megatron_tensors(a, group)):
            tensors = to_megatron(a, group, reader.read(group, "weight"))
            yield from ((name, tensor) for name, tensor in tensors.items() if name in names)


def from_megatron(architecture: Architecture, group: TensorGroup, tensors: GroupTensors) -> dict[str, torch.Tensor]:
    """The inverse of `to_megatron`: the group's tensors by their Hugging Face names. Halves of [gate; up] are views.

    Errors: DataError naming what is missing, extra or misshapen, and an added tensor that is not zero.
    """
    expected = megatron_tensors(architecture, group)
    _check("Megatron", group, {t.name: t.shape for t in expected}, tensors.keys())
    values = [_taken(tensors, tensor.name, tensor.shape) for tensor in expected]
    if _is_norm(group):
        for tensor, value in zip(expected, values, strict=True):
            if tensor.is_added and bool(value.any()):
                raise DataError(
                    f"{tensor.name} is not zero: a published {architecture.family} model has no such weight, so this"
                    " one cannot be written as one without changing what it computes"
                )
        return {info.name: value for info, value in zip(group.tensors, values, strict=False)}
    if _is_joined(group):
        if _is_in_turns(architecture, group):
            values = [_in_turns(value, value.shape[0] // 2) for value in values]
        return {group.tensors[0].name: torch.stack([value.t() for value in values])}
    repeats, rows = _rows(architecture, group)
    whole = values[0].reshape(repeats, sum(rows), *expected[0].shape[1:])
    pieces = [piece.reshape(-1, *expected[0].shape[1:]) for piece in torch.split(whole, list(rows), dim=1)]
    if len(group.tensors) == 1 and len(pieces) > 1:
        pieces = [torch.cat(pieces)]
    if _is_transposed(architecture, group):
        pieces = [piece.t() for piece in pieces]
    return {info.name: piece.contiguous() for info, piece in zip(group.tensors, pieces, strict=True)}


def transformer_engine_name(architecture: Architecture, name: str) -> str:
    """Megatron's name of a tensor in layers of Transformer Engine, whose linear layers hold the norm before them.

    A mixture's norm stays, and its experts are `TEGroupedMLP`'s. torch_dist checkpoints keep these names of norms under
    the local specs, too, even before a mixture ("mlp.linear_fc1.layer_norm_weight").
    """
    name = re.sub(r"\.input_layernorm\.(\w+)$", r".self_attention.linear_qkv.layer_norm_\1", name)
    if architecture.num_experts:
        return re.sub(r"\.local_experts\.(\d+)\.(\w+)\.(\w+)$", r".\2.\3\1", name)
    return re.sub(r"\.pre_mlp_layernorm\.(\w+)$", r".mlp.linear_fc1.layer_norm_\1", name)


def _is_norm(group: TensorGroup) -> bool:
    """Weight, and bias, of a norm: each stays a tensor of its own."""
    return group.kind in _NORMS


def _is_joined(group: TensorGroup) -> bool:
    """Whether it is one tensor of all experts, (experts, inputs, outputs); Megatron has one of each."""
    return group.kind.startswith("experts_")


def _is_in_turns(a: Architecture, group: TensorGroup) -> bool:
    """Whether gate and up take turns among the outputs of joined experts."""
    return published_form(a).names.joined_experts == "neighbours" and group.kind.startswith("experts_in")


def _in_turns(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Every `count`-th row, from the first one on, then from the second; halves become turns by half of the rows."""
    return rows.reshape(-1, count, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _with_added(expected: tuple[MegatronTensor, ...], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    added = [parts[0].new_zeros(tensor.shape) for tensor in expected if tensor.is_added]
    return [part.contiguous() for part in parts] + added


def _taken(tensors: GroupTensors, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise DataError(
            f"{name} has shape {tuple(tensor.shape)} ({math.prod(tensor.shape)} values) but the model's configuration"
            f" says {shape}: give the configuration that belongs to these weights"
        )
    return tensor


def _check(whose: str, group: TensorGroup, expected: Mapping[str, tuple[int, ...]], given_names: Iterable[str]) -> None:
    names = set(given_names)
    missing, extra = sorted(expected.keys() - names), sorted(names - expected.keys())
    if missing or extra:
        faults = [f"missing {name}" for name in missing] + [f"unknown {name}" for name in extra]
        raise DataError(f"{group.name}: {whose}'s tensors do not fit: {', '.join(faults)}")
