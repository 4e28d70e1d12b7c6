"""Exact parameters and states of every pipeline stage of a published model, counted tensor by tensor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from dynapipe_ext.batch.topology import Offload, Topology, refuse_half_layers
from dynapipe_ext.batch.vocabulary_parallel import refuse_spread
from dynapipe_ext.costs.layers import first_decoder_stage, stage_layers
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.costs.states import (
    BYTES_PER_PARAMETER,
    StateBytes,
    StateRecipe,
    refuse_undivided_vocabulary,
    state_bytes,
)
from dynapipe_ext.models.architecture import Architecture, kinds_of_stages, layer_kinds
from dynapipe_ext.models.tensors import GroupKind, tensor_groups

# Tensor parallel ranks divide these. Each has a copy of the rest: norms, routers, positions, biases of summed outputs.
_SHARDED: tuple[GroupKind, ...] = (
    "embedding", "head", "attention_in", "attention_in_bias", "attention_out", "cross_q", "cross_kv", "cross_out",
    "mlp_in", "mlp_in_bias", "mlp_out", "shared_in", "shared_out", "sinks", "experts_in", "experts_in_bias",
    "experts_out",
    "q_proj", "q_down", "q_up", "kv_down", "kv_up",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters on one tensor parallel rank of every stage, arrays of shape (S,): `common` on every replica,
    `experts`, and the largest unit (a layer, an embedding), which ZeRO gathers whole.
    """

    common: IntArray
    experts: IntArray
    largest_unit: IntArray

    @property
    def total(self) -> IntArray:
        return self.common + self.experts


@lru_cache(maxsize=64)
def _sizes(architecture: Architecture) -> dict[tuple[str, int, GroupKind, bool], int]:
    """Parameters by (side or "", kind of layer or -1 outside layers, kind of group, whether it is an expert's).

    Only the first layer of each kind counts, since layers of one kind and side are alike. T5's position biases count
    outside layers.
    """
    first_layers = [layers[0] for _, layers in layer_kinds(architecture)]
    totals: Counter[tuple[str, int, GroupKind, bool]] = Counter()
    for group in tensor_groups(architecture):
        if group.is_buffer or (group.layer >= 0 and group.layer not in first_layers):
            continue
        outside = group.layer < 0 or group.kind == "relative_bias"
        kind = -1 if outside else first_layers.index(group.layer)
        totals[group.side, kind, group.kind, group.is_of_experts] += group.size
    return dict(totals)


def _sizes_on_rank(
    architecture: Architecture, tp: int, ep: int
) -> tuple[Counter[tuple[str, int, bool]], Counter[tuple[str, str]]]:
    """Parameters on one tensor parallel rank: of a layer, by (side, kind of layer, whether they are experts'); and
    outside layers, by (side, kind of group)."""
    per_layer: Counter[tuple[str, int, bool]] = Counter()
    outside: Counter[tuple[str, str]] = Counter()
    sharded = (*_SHARDED, "q_norm", "k_norm") if architecture.qk_norm_whole else _SHARDED
    for (side, layer_kind, kind, of_expert), size in _sizes(architecture).items():
        size = size // tp if kind in sharded else size
        if layer_kind >= 0:
            per_layer[side, layer_kind, of_expert] += size // (ep if of_expert else 1)
        else:
            outside[side, kind] += size
    return per_layer, outside


def stage_parameters(
    architecture: Architecture, topology: Topology, vocab_size: int = 0, ep: int = 1
) -> StageParameters:
    """Parameters of every stage, as Megatron lays them out.

    The last stage has a copy of a tied head whose embedding is on another rank; the first stage of T5's decoder has
    another. Parts of a vocabulary over pipeline ranks are alike, and a tied one has no copy. `vocab_size` 0 means the
    unpadded vocabulary. `ep` replicas share the experts. On one stage, with tp 1 and
    the unpadded vocabulary, the sum is the published number of parameters.
    """
    a, tp = architecture, topology.tp
    refuse_half_layers(topology.layers_per_stage, "a count of every tensor")
    if a.num_decoder_layers:
        refuse_spread(topology, "a model with a decoder side")
    refuse_undivided_vocabulary(replace(a, vocab_size=vocab_size or a.vocab_size), topology)
    layers = stage_layers(a, topology)
    heads, embeddings, first_decoder = topology.head_stages, topology.embedding_stages, first_decoder_stage(layers) or 0
    sides = ("encoder", "decoder") if a.num_decoder_layers else ("", "")
    common, experts = np.zeros(len(layers), np.int64), np.zeros(len(layers), np.int64)
    unit = np.zeros(len(layers), np.int64)
    embedding = (vocab_size or a.vocab_size) * a.hidden_size // tp
    first_side = kinds_of_stages(a, [count for count, _ in layers])
    per_layer, outside = _sizes_on_rank(a, tp, ep)
    for stage, (_, num_decoder) in enumerate(layers):
        runs = [(sides[0], number, counts[stage]) for number, (_, counts) in enumerate(first_side)]
        for side, number, count in [*runs, (sides[1], 0, num_decoder)] if a.num_decoder_layers else runs:
            common[stage] += count * per_layer[side, number, False] + (outside[side, "relative_bias"] if count else 0)
            experts[stage] += count * per_layer[side, number, True]
            whole = per_layer[side, number, False] + per_layer[side, number, True]
            unit[stage] = max(unit[stage], whole if count else 0)
    with_embedding, ranks = {*embeddings, first_decoder}, topology.stage_ranks
    with_own_rows = {*heads}
    if a.tied_embeddings:  # a rank that has the embedding, or both ends' same part, needs no copy
        is_beside = topology.vocabulary != "whole" or ranks[-1] == ranks[0]
        with_own_rows = set() if is_beside else {*heads} - with_embedding
    for stage in with_embedding:
        common[stage] += embedding // len(embeddings)
        unit[stage] = max(unit[stage], embedding // len(embeddings))
    for stage in heads:
        common[stage] += (stage in with_own_rows) * (embedding // len(heads))
        unit[stage] = max(unit[stage], embedding // len(heads))
    common[embeddings[-1]] += outside["", "position"]
    common[heads[0]] += outside["decoder" if a.num_decoder_layers else "", "final_norm"]
    if a.num_decoder_layers:
        common[max(s for s, (n, _) in enumerate(layers) if n)] += outside["encoder", "final_norm"]
    return StageParameters(common, experts, unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one rank of every stage before any micro-batch, arrays of shape (S,). `buffers`: whole units that ZeRO
    gathers and reduces during use. `host`: bytes on the host. `moved`: bytes over the host's link in a step.
    """

    device: StateBytes
    buffers: IntArray
    host: IntArray
    moved: IntArray
    parameters: StageParameters


def states(
    architecture: Architecture,
    topology: Topology,
    *,
    vocab_size: int,
    recipe: StateRecipe,
    zero_stage: int,
    offload: Offload = "none",
    ep: int = 1,
    exact_sums: bool = False,
) -> States:
    """States under ZeRO and offload, by `state_bytes`; `exact_sums` adds the exact sums of gradients.

    Once a step offloaded gradients move to the host and updated weights move back. Offloaded weights also move to the
    device for every forward and backward; here they count once for each.
    Errors: ConfigError for an offload that the ZeRO stage does not have.
    """
    count = stage_parameters(architecture, topology, vocab_size, ep)
    dp = topology.dp

    def on_device(offload: Offload) -> StateBytes:
        options: Any = {"zero_stage": zero_stage, "offload": offload, "exact_sums": exact_sums}
        common = state_bytes(count.common, recipe, dp=dp, **options)
        return common + state_bytes(count.experts, recipe, dp=dp // ep, **options)

    device = on_device(offload)
    per_weight, per_gradient, _ = BYTES_PER_PARAMETER[recipe]
    none = np.zeros_like(count.common)
    in_use = none
    if zero_stage >= 2 and (dp > 1 or offload != "none"):
        in_use = count.largest_unit * (per_gradient + (per_weight if zero_stage == 3 else 0))
    moved, whole = none, on_device("none")
    if offload in ("optimizer", "all"):
        shares = -(-count.common // dp) + -(-count.experts // (dp // ep)) if zero_stage else count.total
        moved = shares * (per_weight + per_gradient)
    if offload in ("weights", "all"):
        moved = moved + 2 * whole.weights
    return States(
        device=device,
        buffers=in_use,
        host=whole.total - device.total,
        moved=moved,
        parameters=count,
    )
