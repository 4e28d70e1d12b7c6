"""Parameters of the stages of a decoder-only model, and bytes of weights, gradients and optimizer states of one rank
under ZeRO: what its device holds before any micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from dynapipe_ext.batch.topology import OFFLOADS, ZERO_STAGES, Offload, Topology
from dynapipe_ext.costs.grid import IntArray
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture, kinds_of_ranges

StateRecipe = Literal["megatron", "mixed", "fp32", "deepspeed"]
RECIPES: tuple[StateRecipe, ...] = get_args(StateRecipe)
# Bytes of one parameter's weight, gradient and optimizer states (Adam's two moments, 8, and 4 for an fp32 master of
# 16-bit weights), undivided.
ADAM_MOMENTS, MOMENT_BYTES = 2, 4
BYTES_PER_PARAMETER: Mapping[StateRecipe, tuple[int, int, int]] = {
    "megatron": (2, 4, 12),  # gradients accumulate in fp32: 18 in all
    "mixed": (2, 2, 12),  # 16 in all (Rajbhandari et al. 2020, sec. 3.1)
    "fp32": (4, 4, 8),
    "deepspeed": (2, 2, 16),  # "mixed" and an fp32 copy of the gradients beside the master, as its estimators count
}
EXACT_SUM_BYTES = 8  # of a parameter's sum of gradients in fixed point, which every replica holds whole


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes on one rank of every stage, arrays of shape (S,). `optimizer`: master weights and moments."""

    weights: IntArray
    gradients: IntArray
    optimizer: IntArray

    @property
    def total(self) -> IntArray:
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )


def check_states(recipe: str, zero_stage: int, offload: str = "none") -> None:
    """Refuse a recipe, a ZeRO stage or an offload that is not known, and an offload that its stage does not have."""
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
    gathered_parameters: int | IntArray = 0,
    frozen_parameters: int | IntArray = 0,
    exact_sums: bool = False,
    offload: Offload = "none",
    num_moments: int = ADAM_MOMENTS,
) -> StateBytes:
    """States on the device of one rank with `parameters` in all (of every stage, if an array) and `dp` replicas.

    ZeRO stage 1 divides the optimizer over replicas, 2 gradients too, 3 weights too (Rajbhandari et al. 2020, fig. 1);
    Megatron's distributed optimizer is stage 1. Shares are rounded up. DeepSpeed's stage 2 frees no gradient memory at
    its peak, so its estimator counts 4 + 16 / dp; its stage 3 keeps 16-bit gradients of the gathered layer only, 18 /
    dp. At stage 3 the weights and gradients of `gathered_parameters`, those whole while one layer runs, come on top;
    `frozen_parameters` beside the others are weights alone; `exact_sums` of gradients come on top of these, whole.
    `num_moments` an optimizer keeps of each parameter.

    What is offloaded lies on the host (Ren et al. 2021, sec. 4). "optimizer" moves optimizer states and, from stage 2
    on, gradients as they are reduced; "weights" (ZeRO-Infinity, stage 3) moves weights; "all" moves both. What is
    gathered is on the device all the same. Errors: ConfigError.

    >>> [int(state_bytes(24, recipe="mixed", zero_stage=stage, dp=24).total[0]) for stage in ZERO_STAGES]
    [384, 108, 62, 16]
    """
    check_states(recipe, zero_stage, offload)
    count = np.atleast_1d(np.asarray(parameters, np.int64))
    gathered, frozen = (np.asarray(number, np.int64) for number in (gathered_parameters, frozen_parameters))
    _check_counts(dp, count, gathered)
    per_weight, per_gradient, per_optimizer = BYTES_PER_PARAMETER[recipe]
    per_optimizer += MOMENT_BYTES * (num_moments - ADAM_MOMENTS)

    def share(num_bytes: IntArray, *, divided: bool) -> IntArray:
        result: IntArray = -(-num_bytes // dp) if divided else num_bytes
        return result

    whole_at_once = gathered if zero_stage == 3 else 0 * gathered
    moves_optimizer, moves_weights = offload in ("optimizer", "all"), offload in ("weights", "all")
    weights = share((count + frozen) * per_weight, divided=zero_stage == 3)
    gradients = share(count * per_gradient, divided=zero_stage >= (3 if recipe == "deepspeed" else 2))
    if (recipe == "deepspeed" and zero_stage == 3) or (moves_optimizer and zero_stage >= 2):
        gradients = 0 * count
    return StateBytes(
        weights=weights * (not moves_weights) + whole_at_once * per_weight,
        gradients=gradients + whole_at_once * per_gradient + EXACT_SUM_BYTES * exact_sums * count,
        optimizer=share(count * per_optimizer, divided=zero_stage >= 1) * (not moves_optimizer),
    )


def _check_counts(dp: int, parameters: IntArray, gathered: IntArray) -> None:
    if dp < 1:
        raise ConfigError(f"states are divided over dp {dp}: give at least 1")
    if (parameters < 0).any() or (gathered < 0).any():
        raise ConfigError(f"parameters {parameters.min()} or gathered parameters {gathered.min()} cannot be negative")


def checked_topology(a: Architecture, topology: Topology, ep: int = 1) -> Topology:
    """The topology with the model's layers on its stages. Errors: ConfigError for what does not divide."""
    if a.num_decoder_layers:
        raise ConfigError(f"a {a.family} model has a decoder side: count it by EncoderDecoderCosts")
    sizes = {**a.divided_sizes, "vocab_size": a.vocab_size}
    for name, size in sizes.items():
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
    return topology.with_layers(a.num_layers)


def refuse_undivided_vocabulary(a: Architecture, topology: Topology) -> None:
    """Errors: ConfigError for a vocabulary whose parts on ranks are not alike, and for one end of a tied one."""
    if topology.vocabulary == "whole":
        return
    if a.tied_embeddings and topology.vocabulary == "head":
        raise refused_tie()
    if a.vocab_size % (topology.tp * topology.pp):
        raise ConfigError(
            f"vocab_size {a.vocab_size} does not divide over tp {topology.tp} x pp {topology.pp}: leave the vocabulary"
            " whole, or give degrees that divide it"
        )


def refused_tie() -> ConfigError:
    return ConfigError(
        "vocabulary 'head' leaves the embedding whole, but this model ties its head to it: give 'both', which divides"
        " the two alike, or 'whole'"
    )


def attention_parameters(a: Architecture, tp: int) -> int:
    """Parameters on one rank of a layer's attention, with its half of the norms."""
    qk_norms = sum(a.qk_norm_sizes) // (tp if a.qk_norm_whole else 1)
    biases = int(a.qkv_bias) * (a.query_size + 2 * a.kv_size) // tp + int(a.attention_output_bias) * a.hidden_size
    sinks = int(a.attention_sinks) * a.num_heads // tp
    return a.norm_parameters // 2 + qk_norms + a.attention_parameters // tp + biases + sinks


def mlp_parameters(a: Architecture, tp: int, ep: int) -> tuple[int, int]:
    """Parameters on one rank of a layer's MLP, with its half of the norms: those of every replica, and experts'."""
    h, norms = a.hidden_size, a.norm_parameters // 2
    mlp = a.mlp_parameters // tp + int(a.mlp_bias) * (a.fc1_size // tp + h)
    if not a.num_experts:
        return norms + mlp, 0
    shared = a.shared_parameters // tp + h * int(a.shared_expert_gate)
    router = a.num_experts * (h + int(a.mlp_bias))
    return norms + router + shared, a.num_experts // ep * mlp


def layer_parameters(a: Architecture, tp: int, ep: int) -> tuple[int, int]:
    """Parameters on one rank of one layer of a model of equal ones: those of every replica, and those of experts."""
    common, experts = mlp_parameters(a, tp, ep)
    return attention_parameters(a, tp) + common, experts


def largest_layers(a: Architecture, topology: Topology, ep: int) -> IntArray:
    """Shape (stages,): parameters of a stage's largest layer on one rank that are divided over replicas. Half a layer
    counts as a layer."""
    stages: IntArray = np.zeros(topology.num_stages, np.int64)
    held = [stage.held for stage in topology.with_layers(a.num_layers).stage_layers]
    for kind, counts in kinds_of_ranges(a, held):
        common, experts = layer_parameters(kind, topology.tp, ep)
        unit = common + (experts if topology.dp > ep else 0)
        stages = np.maximum(stages, np.where(np.array(counts) > 0, unit, 0))
    return stages


def replica_and_expert_parameters(a: Architecture, topology: Topology, ep: int) -> IntArray:
    """Shape (2, stages): parameters of one rank that every replica has, and those of experts."""
    topology = checked_topology(a, topology, ep)
    h, embeddings, heads = a.hidden_size, topology.embedding_stages, topology.head_stages
    stages: IntArray = np.zeros((2, topology.num_stages), np.int64)
    for kind, counts in kinds_of_ranges(a, [stage.attention for stage in topology.stage_layers]):
        stages[0] += attention_parameters(kind, topology.tp) * np.array(counts)
    for kind, counts in kinds_of_ranges(a, [stage.mlp for stage in topology.stage_layers]):
        stages += np.outer(mlp_parameters(kind, topology.tp, ep), counts)
    stages[0, embeddings] += rows_on_rank(a, topology.tp, embeddings)
    stages[0, embeddings[-1]] += a.max_seq_len * h if a.position == "learned" else 0
    stages[0, heads[0]] += h * (2 if a.norm == "layernorm" else 1)
    if not a.tied_embeddings or (topology.num_stages > 1 and topology.vocabulary == "whole"):
        stages[0, heads] += rows_on_rank(a, topology.tp, heads)
    return stages


def rows_on_rank(a: Architecture, tp: int, stages: range) -> int:
    """Parameters on one rank of an embedding or a head that is divided over these stages."""
    return a.vocab_size * a.hidden_size // tp // len(stages)


def parameters_per_stage(architecture: Architecture, topology: Topology) -> tuple[int, ...]:
    """Parameters of one tensor-parallel rank of every stage, the vocabulary as it is (see `Architecture.padded`).

    Sharded over TP: matrices (experts' too), the biases of qkv and fc1, embedding and LM head. Copied: norms, routers,
    the biases of proj and fc2, position embeddings. The LM head of tied embeddings is a copy on the last stage, none if
    that is the first too, or if both are spread over pipeline ranks. All experts are on each rank.

    >>> gpt2 = Architecture.gpt(
    ...     num_layers=12, hidden_size=768, num_heads=12, num_query_groups=12, ffn_hidden_size=3072, gated_mlp=False,
    ...     vocab_size=50257, max_seq_len=1024, tied_embeddings=True,
    ... )
    >>> parameters_per_stage(gpt2, Topology())
    (124439808,)
    """
    return tuple(int(n) for n in replica_and_expert_parameters(architecture, topology, 1).sum(axis=0))


@lru_cache(maxsize=64)  # every price of a micro-batch asks for it
def states_of_stages(
    architecture: Architecture,
    topology: Topology,
    ep: int,
    recipe: StateRecipe,
    zero_stage: int,
    exact_sums: bool,
    offload: Offload,
    num_moments: int,
) -> StateBytes:
    """`state_bytes` of one rank of every stage: experts' states are divided over the replicas that hold the same."""
    common, experts = replica_and_expert_parameters(architecture, topology, ep)
    dp = topology.dp
    options: Any = {"zero_stage": zero_stage, "exact_sums": exact_sums, "offload": offload, "num_moments": num_moments}
    return state_bytes(common, recipe, dp=dp, **options) + state_bytes(experts, recipe, dp=dp // ep, **options)
