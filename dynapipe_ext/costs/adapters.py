"""Costs of training low-rank adapters with the model's own weights frozen, as an adjustment of any costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dynapipe_ext.batch.topology import Topology, ZeroStage, require_whole_layers
from dynapipe_ext.batch.vocabulary_parallel import require_whole_vocabulary
from dynapipe_ext.costs.adjustments import AdjustedCosts, FrozenWeights, adjust
from dynapipe_ext.costs.model import CostModel, IntArray
from dynapipe_ext.costs.states import ADAM_MOMENTS, BYTES_PER_PARAMETER, StateRecipe, count_parameters, state_bytes
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.settings.tables import LoraSettings


def find_adapter_share(lora: LoraSettings, architecture: Architecture) -> float:
    """Return adapters' share of the weight-gradient FLOPs of full training."""
    (share,) = _find_trained_shares(lora, architecture, Topology(layers_per_stage=(architecture.num_layers,)))
    return share


def price_adapters(
    base: CostModel,
    lora: LoraSettings,
    architecture: Architecture,
    topology: Topology,
    *,
    recipe: StateRecipe,
    zero_stage: ZeroStage = 0,
    exact_sums: bool = False,
    num_moments: int = ADAM_MOMENTS,
) -> CostModel:
    """Return `base`, costs of training all weights over `topology`, adjusted to training only the adapters of `lora`.

    Bytes of states follow from `recipe`, `zero_stage`, `num_moments`, `exact_sums` (of deterministic mode) and the
    offload of `base`. Each adapter stores r values per token, and with dropout also its input after that and the
    dropout's factors. These values are as wide as weights; they are not added if `base` was measured with these
    adapters. The adapters' own forward, r (inputs + outputs) products per token, is not counted: about a hundredth."""
    require_whole_vocabulary(topology, "a model with adapters")
    layers, described = _count_layers(architecture, topology), lora.described or ()
    static = state_bytes(
        layers * lora.num_weights_a_block,
        recipe,
        zero_stage=zero_stage,
        dp=topology.dp,
        frozen_parameters=count_parameters(architecture, topology).total,
        exact_sums=exact_sums,
        offload=base.facts.offload,
        num_moments=num_moments,
    ).total
    kept = lora.r * len(described) + (2 * sum(layer.num_inputs for layer in described) if lora.lora_dropout else 0)
    token_bytes = layers * BYTES_PER_PARAMETER[recipe][0] * (0 if base.facts.measured_adapters else kept)
    frozen = FrozenWeights(
        _find_trained_shares(lora, architecture, topology),
        static_bytes=tuple(static.tolist()),
        token_bytes=tuple(token_bytes.tolist()) if token_bytes.any() else (),
    )
    return adjust(base, frozen=frozen)


def with_idle_weights(costs: CostModel, idle_bytes: tuple[int, ...]) -> CostModel:
    """Return the costs with unused weights of `idle_bytes[s]` added on stage s; what trains stays as it is."""
    frozen = costs.frozen if isinstance(costs, AdjustedCosts) else None
    frozen = frozen or FrozenWeights((1.0,) * costs.num_stages)
    return adjust(costs, frozen=replace(frozen, idle_bytes=idle_bytes))


def _find_trained_shares(lora: LoraSettings, architecture: Architecture, topology: Topology) -> tuple[float, ...]:
    """Return the trained share of each stage; on the last one the head is frozen, too."""
    layers = _count_layers(architecture, topology)
    work = layers * (architecture.attention_parameters + architecture.mlp_parameters)
    work[-1] += architecture.vocab_size * architecture.hidden_size
    trained = layers * lora.num_weights_a_block
    return tuple((trained / np.maximum(work, trained).clip(1)).tolist())


def _count_layers(architecture: Architecture, topology: Topology) -> IntArray:
    counts = topology.with_layers(architecture.num_layers).layers_per_stage
    return np.array(require_whole_layers(counts, "a model with adapters"), np.int64)
