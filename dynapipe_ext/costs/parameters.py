"""Parameters of the layers and stages of a decoder-only model, counted."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.costs.states import Offload, StateBytes, StateRecipe, state_bytes
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture, kinds_of_stages


def checked_topology(a: Architecture, topology: Topology, ep: int = 1) -> Topology:
    """The topology with the model's layers on its stages. Errors: ConfigError for what does not divide."""
    if a.num_decoder_layers:
        raise ConfigError(f"a {a.family} model has a decoder side: count it by EncoderDecoderCosts")
    sizes = {"num_heads": a.num_heads, "num_query_groups": a.num_query_groups}
    sizes |= {**a.divided_sizes, "vocab_size": a.vocab_size}
    for name, size in sizes.items():
        if size % topology.tp:
            raise ConfigError(f"{name} {size} does not divide over tp {topology.tp}: lower tp or pad it")
    if ep < 1 or topology.dp % ep or a.num_experts % ep or (ep > 1 and not a.num_experts):
        raise ConfigError(
            f"ep is {ep} but experts lie on replicas: it must be at least 1 and divide dp {topology.dp} and num_experts"
            f" {a.num_experts}, which must be above 0 for an ep above 1"
        )
    return topology.with_layers(a.num_layers)


def layer_parameters(a: Architecture, tp: int, ep: int) -> tuple[int, int]:
    """Parameters on one rank of one layer of a model of equal ones: those of every replica, and those of experts."""
    h = a.hidden_size
    norms = a.norm_parameters
    norms += sum(a.qk_norm_sizes) // (tp if a.qk_norm_whole else 1)
    biases = int(a.qkv_bias) * (a.query_size + 2 * a.kv_size) // tp + int(a.attention_output_bias) * h
    attention = a.attention_parameters // tp + biases
    mlp = a.mlp_parameters // tp + int(a.mlp_bias) * (a.fc1_size // tp + h)
    if not a.num_experts:
        return norms + attention + mlp, 0
    shared = a.shared_parameters // tp + h * int(a.shared_expert_gate)
    return norms + attention + h * a.num_experts + shared, a.num_experts // ep * mlp


def largest_layers(a: Architecture, topology: Topology, ep: int) -> IntArray:
    """Shape (stages,): parameters of a stage's largest layer on one rank that are divided over replicas."""
    stages: IntArray = np.zeros(topology.num_stages, np.int64)
    for kind, counts in kinds_of_stages(a, topology.with_layers(a.num_layers).layers_per_stage):
        common, experts = layer_parameters(kind, topology.tp, ep)
        unit = common + (experts if topology.dp > ep else 0)
        stages = np.maximum(stages, np.where(np.array(counts) > 0, unit, 0))
    return stages


def replica_and_expert_parameters(a: Architecture, topology: Topology, ep: int) -> IntArray:
    """Shape (2, stages): parameters of one rank that every replica has, and those of experts."""
    topology = checked_topology(a, topology, ep)
    h, embedding = a.hidden_size, a.vocab_size * a.hidden_size // topology.tp
    stages: IntArray = np.zeros((2, topology.num_stages), np.int64)
    for kind, counts in kinds_of_stages(a, topology.layers_per_stage):
        stages += np.outer(layer_parameters(kind, topology.tp, ep), counts)
    stages[0, 0] += embedding + (a.max_seq_len * h if a.position == "learned" else 0)
    stages[0, -1] += h * (2 if a.norm == "layernorm" else 1)
    if not a.tied_embeddings or topology.num_stages > 1:
        stages[0, -1] += embedding
    return stages


def parameters_per_stage(architecture: Architecture, topology: Topology) -> tuple[int, ...]:
    """Parameters of one tensor-parallel rank of every stage, the vocabulary as it is (see `Architecture.padded`).

    Sharded over TP: matrices (experts' too), the biases of qkv and fc1, embedding and LM head. Copied: norms, routers,
    the biases of proj and fc2, position embeddings. The LM head of tied embeddings is a copy on the last stage, none if
    that is the first too. All experts are on each rank.

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
) -> StateBytes:
    """`state_bytes` of one rank of every stage: experts' states are divided over the replicas that hold the same."""
    common, experts = replica_and_expert_parameters(architecture, topology, ep)
    dp = topology.dp
    options: Any = {"zero_stage": zero_stage, "exact_sums": exact_sums, "offload": offload}
    return state_bytes(common, recipe, dp=dp, **options) + state_bytes(experts, recipe, dp=dp // ep, **options)
