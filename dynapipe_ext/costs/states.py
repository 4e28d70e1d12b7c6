"""Parameters of every stage, and the bytes of weights, gradients and optimizer states of one rank under ZeRO: what a
rank holds before any micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from dynapipe_ext.batch.topology import OFFLOADS, ZERO_STAGES, Offload, Topology
from dynapipe_ext.batch.vocabulary_parallel import require_whole_vocabulary
from dynapipe_ext.costs.grid import IntArray
from dynapipe_ext.costs.layers import lay_out, list_layers
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture

StateRecipe = Literal["megatron", "mixed", "fp32", "deepspeed"]
RECIPES: tuple[StateRecipe, ...] = get_args(StateRecipe)
# Bytes of one parameter's weight, gradient and optimizer states (Adam's two moments, 8, and 4 for an fp32 master of
# 16-bit weights), undivided.
ADAM_MOMENTS, MOMENT_BYTES = 2, 4
BYTES_PER_PARAMETER: Mapping[StateRecipe, tuple[int, int, int]] = {
    "megatron": (2, 4, 12),  # gradients accumulate in fp32: 18 in all
    "mixed": (2, 2, 12),  # 16 in all (Rajbhandari et al. 2020, sec. 3.1)
    "fp32": (4, 4, 8),
    "deepspeed": (2, 2, 16),  # "mixed" with an fp32 copy of the gradients too, as its estimators count
}
EXACT_SUM_BYTES = 8  # of a parameter's sum of gradients in fixed point, which every replica holds whole


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes on one rank of every stage, arrays of shape (S,). `optimizer`: master weights, if any, and moments."""

    weights: IntArray
    gradients: IntArray
    optimizer: IntArray

    @property
    def total(self) -> IntArray:
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


def check_states(recipe: str, zero_stage: int, offload: str = "none") -> None:
    """Raise ConfigError for an unknown recipe, ZeRO stage or offload, and for an offload that needs another stage."""
    if recipe not in RECIPES:
        raise ConfigError(f"states recipe {recipe!r} is not known: give one of {', '.join(RECIPES)}")
    if zero_stage not in ZERO_STAGES:
        raise ConfigError(f"ZeRO stage {zero_stage!r} is not known: give 0 (nothing divided), 1, 2 or 3")
    if offload not in OFFLOADS:
        raise ConfigError(f"offload is {offload!r}: give one of {', '.join(OFFLOADS)}")
    if offload in ("weights", "all") and zero_stage != 3:
        raise ConfigError(
            f"offload {offload!r} moves weights, which zero_stage {zero_stage} does not divide: give stage 3"
        )


def state_bytes(
    parameters: int | IntArray,
    recipe: StateRecipe = "megatron",
    *,
    zero_stage: int = 0,
    dp: int = 1,
    frozen_parameters: int | IntArray = 0,
    exact_sums: bool = False,
    offload: Offload = "none",
    num_moments: int = ADAM_MOMENTS,
) -> StateBytes:
    """Return bytes on the device of one of `dp` replicas' ranks for `parameters` (of each stage, if an array).

    ZeRO stage 1 divides the optimizer over replicas, 2 gradients too, 3 weights too (Rajbhandari et al. 2020, fig. 1);
    Megatron's distributed optimizer is stage 1. Shares are rounded up. DeepSpeed's stage 2 frees no gradient memory at
    its peak, so its estimator counts 4 + 16 / dp; its stage 3 keeps only the gathered layer's 16-bit gradients, 18 /
    dp. `frozen_parameters` have only weights. `exact_sums` of gradients come on top, undivided. `num_moments`: of each
    parameter in the optimizer.

    Offloaded bytes are on the host (Ren et al. 2021, sec. 4). "optimizer" moves optimizer states and, from stage 2 on,
    gradients as they are reduced; "weights" (ZeRO-Infinity, stage 3) moves weights; "all" moves both. Raises
    ConfigError.

    >>> [int(state_bytes(24, recipe="mixed", zero_stage=stage, dp=24).total[0]) for stage in ZERO_STAGES]
    [384, 108, 62, 16]
    """
    check_states(recipe, zero_stage, offload)
    count, frozen = np.atleast_1d(np.asarray(parameters, np.int64)), np.asarray(frozen_parameters, np.int64)
    if dp < 1:
        raise ConfigError(f"states are divided over dp {dp}: give at least 1")
    if (count < 0).any():
        raise ConfigError(f"parameters {count.min()} cannot be negative")
    per_weight, per_gradient, per_optimizer = BYTES_PER_PARAMETER[recipe]
    per_optimizer += MOMENT_BYTES * (num_moments - ADAM_MOMENTS)

    def share(num_bytes: IntArray, *, divided: bool) -> IntArray:
        result: IntArray = -(-num_bytes // dp) if divided else num_bytes
        return result

    moves_optimizer, moves_weights = offload in ("optimizer", "all"), offload in ("weights", "all")
    weights = share((count + frozen) * per_weight, divided=zero_stage == 3)
    gradients = share(count * per_gradient, divided=zero_stage >= (3 if recipe == "deepspeed" else 2))
    if (recipe == "deepspeed" and zero_stage == 3) or (moves_optimizer and zero_stage >= 2):
        gradients = 0 * count
    return StateBytes(
        weights=weights * (not moves_weights),
        gradients=gradients + EXACT_SUM_BYTES * exact_sums * count,
        optimizer=share(count * per_optimizer, divided=zero_stage >= 1) * (not moves_optimizer),
    )


def check_topology(a: Architecture, topology: Topology, ep: int = 1) -> None:
    """Raise ConfigError if ranks do not divide a size of the model, or its layers do not fill the stages."""
    if has_decoder := a.num_decoder_layers > 0:
        require_whole_vocabulary(topology, "a model with a decoder side")
    _ = lay_out(a.num_layers, a.total_layers, topology)
    for name, size in (a.divided_sizes | ({} if has_decoder else {"vocab_size": a.vocab_size})).items():
        if size % topology.tp:
            raise ConfigError(f"{name} {size} does not divide over tp {topology.tp}: lower tp or pad it")
    if fault := a.groups_fault(topology.tp):
        raise ConfigError(fault)
    refuse_undivided_vocabulary(a, topology)
    if ep < 1 or topology.dp % ep or a.num_experts % ep or (ep > 1 and not a.num_experts):
        raise ConfigError(
            f"ep is {ep} but experts lie on replicas: it must be at least 1 and divide dp {topology.dp} and num_experts"
            f" {a.num_experts}, which must be above 0 for an ep above 1"
        )


def refuse_undivided_vocabulary(a: Architecture, topology: Topology) -> None:
    """Raise ConfigError if ranks do not divide the vocabulary, or divide a tied head but not its embedding."""
    if topology.vocabulary == "whole":
        return
    if a.tied_embeddings and topology.vocabulary == "head":
        raise make_tie_error()
    if a.vocab_size % (topology.tp * topology.pp):
        raise ConfigError(
            f"vocab_size {a.vocab_size} does not divide over tp {topology.tp} x pp {topology.pp}: leave the vocabulary"
            " whole, or give degrees that divide it"
        )


def make_tie_error() -> ConfigError:
    return ConfigError(
        "vocabulary 'head' leaves the embedding whole, but this model ties its head to it: give 'both', which divides"
        " the two alike, or 'whole'"
    )


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters on one tensor parallel rank of every stage, arrays of shape (S,). `common`: on every replica;
    `experts`: only on replicas that hold the same experts. `largest_unit`: the largest layer, half layer or embedding,
    which ZeRO gathers in full."""

    common: IntArray
    experts: IntArray
    largest_unit: IntArray

    @property
    def total(self) -> IntArray:
        return self.common + self.experts


@lru_cache(maxsize=64)
def count_parameters(a: Architecture, topology: Topology, ep: int = 1) -> StageParameters:
    """Count the parameters of every stage, as Megatron lays them out, with the vocabulary as it is (`padded`).

    Tensor parallel ranks divide matrices (experts' too), the biases of qkv and fc1, embedding and LM head. Each has a
    copy of norms, routers, the biases of proj and fc2, and positions. `ep` replicas share the experts. The last stage
    has a copy of a tied head, unless its rank has the embedding or the same part of it. In T5 the first stage of the
    decoder has a copy of the embedding, and each side's position biases are on every stage with layers of that side.
    Raises ConfigError for sizes that tensor or expert parallelism does not divide.

    >>> gpt2 = Architecture.gpt(
    ...     num_layers=12, hidden_size=768, num_heads=12, num_query_groups=12, ffn_hidden_size=3072, gated_mlp=False,
    ...     vocab_size=50257, max_seq_len=1024, tied_embeddings=True,
    ... )
    >>> count_parameters(gpt2, Topology()).total.tolist()
    [124439808]
    """
    check_topology(a, topology, ep)
    layout, h = lay_out(a.num_layers, a.total_layers, topology), a.hidden_size
    common, experts, largest_unit = np.zeros((3, topology.num_stages), np.int64)
    for layers in list_layers(a, topology):
        counts = layers.counts[:, 0]
        attention = _count_attention_parameters(layers.model, topology.tp)
        if layers.kind == "decoder":  # cross-attention and its norm
            attention += h * (1 + 4 * a.query_size // topology.tp)
        mlp, routed = _count_mlp_parameters(layers.model, topology.tp, ep)
        common += counts * ((layers.kind != "mlp") * attention + (layers.kind != "attention") * mlp)
        experts += counts * (layers.kind != "attention") * routed
        unit = attention + mlp + (routed if topology.dp > ep else 0)
        largest_unit = np.maximum(largest_unit, unit * (counts > 0))
        if a.num_decoder_layers:
            common += a.relative_buckets * a.num_heads * (counts > 0)
    embeddings, heads = topology.embedding_stages, topology.head_stages
    (with_embedding, with_head), (_, with_copy) = layout.find_holders(), layout.find_holders(tied=a.tied_embeddings)
    for readers, holders, parts in ((with_embedding, with_embedding, embeddings), (with_head, with_copy, heads)):
        part = a.vocab_size * h // topology.tp // len(parts)
        common[[*holders]] += part
        largest_unit[[*readers]] = np.maximum(largest_unit[[*readers]], part)
    common[embeddings[-1]] += a.max_seq_len * h if a.position == "learned" else 0
    common[heads[0]] += h * (2 if a.norm == "layernorm" else 1)
    common[layout.encoder_end] += h if a.num_decoder_layers else 0  # a final norm of its own
    return StageParameters(common, experts, largest_unit)


def _count_attention_parameters(a: Architecture, tp: int) -> int:
    """Count the parameters on one rank of a layer's attention, with its half of the norms."""
    qk_norms = sum(a.qk_norm_sizes) // (tp if a.qk_norm_whole else 1)
    biases = int(a.qkv_bias) * (a.query_size + 2 * a.kv_size) // tp + int(a.attention_output_bias) * a.hidden_size
    sinks = int(a.attention_sinks) * a.num_heads // tp
    return a.norm_parameters // 2 + qk_norms + a.attention_parameters // tp + biases + sinks


def _count_mlp_parameters(a: Architecture, tp: int, ep: int) -> tuple[int, int]:
    """Count the parameters on one rank of a layer's MLP, with its half of the norms: common ones, and experts'."""
    h, norms = a.hidden_size, a.norm_parameters // 2
    mlp = a.mlp_parameters // tp + int(a.mlp_bias) * (a.fc1_size // tp + h)
    if not a.num_experts:
        return norms + mlp, 0
    shared = a.shared_parameters // tp + h * int(a.shared_expert_gate)
    router = a.num_experts * (h + int(a.mlp_bias))
    return norms + router + shared, a.num_experts // ep * mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one rank of every stage before any micro-batch, arrays of shape (S,). `device`: on the device without
    buffers. `buffers`: full units that ZeRO gathers and reduces during use. `host`: on the host. `moved`: bytes between
    host and device per step."""

    device: StateBytes
    buffers: IntArray
    host: IntArray
    moved: IntArray
    parameters: StageParameters


@lru_cache(maxsize=64)  # every price of a micro-batch asks for it
def count_states(
    a: Architecture,
    topology: Topology,
    recipe: StateRecipe,
    *,
    zero_stage: int = 0,
    offload: Offload = "none",
    ep: int = 1,
    exact_sums: bool = False,
    num_moments: int = ADAM_MOMENTS,
) -> States:
    """Return bytes of weights, gradients and optimizer states on one rank of each stage.

    Keywords are as in `state_bytes`; experts are divided over dp / ep. `moved`: bytes between host and device per step.
    Offloaded weights count twice there: for all forwards, and for all backwards. Raises ConfigError for an offload that
    the ZeRO stage lacks.
    """
    count, dp = count_parameters(a, topology, ep), topology.dp

    def on_device(offload: Offload) -> StateBytes:
        options: Any = {"zero_stage": zero_stage, "offload": offload}
        options |= {"exact_sums": exact_sums, "num_moments": num_moments}
        common = state_bytes(count.common, recipe, dp=dp, **options)
        return common + state_bytes(count.experts, recipe, dp=dp // ep, **options)

    device, undivided = on_device(offload), on_device("none")
    per_weight, per_gradient, _ = BYTES_PER_PARAMETER[recipe]
    buffers = moved = np.zeros_like(count.common)
    if zero_stage >= 2 and (dp > 1 or offload != "none"):
        buffers = count.largest_unit * (per_gradient + (per_weight if zero_stage == 3 else 0))
    if offload in ("optimizer", "all"):
        shares = -(-count.common // dp) + -(-count.experts // (dp // ep)) if zero_stage else count.total
        moved = shares * (per_weight + per_gradient)
    if offload in ("weights", "all"):
        moved = moved + 2 * undivided.weights
    return States(device=device, buffers=buffers, host=undivided.total - device.total, moved=moved, parameters=count)
