"""A model by its modules: their parameters, bytes and work, in training and in inference, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dynapipe_ext.batch.micro_batches import LengthArray
from dynapipe_ext.costs.states import BYTES_PER_PARAMETER, StateRecipe
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.flops import Positions
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups

ModuleName = Literal["embedding", "attention", "MLP", "head"]
MODULES: tuple[ModuleName, ...] = ("embedding", "attention", "MLP", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEstimate:
    """One kind of module, in all layers together. A norm belongs to the module that it feeds.

    `inference_bytes` counts weights; `training_bytes` counts weights, gradients and optimizer on one rank with the
    whole model. `forward_flops` are those of a mean sample; training takes three times as many without recomputation. A
    tied head has work but no parameters, which are the embedding's.
    """

    name: ModuleName
    parameters: int
    inference_bytes: int
    training_bytes: int
    forward_flops: float

    @property
    def training_flops(self) -> float:
        return 3 * self.forward_flops


def modules_of(
    architecture: Architecture, recipe: StateRecipe, positions: Positions, num_samples: int
) -> tuple[ModuleEstimate, ...]:
    """The four modules in the order of a forward; `positions` are those of `num_samples` samples.

    Errors: ConfigError for no samples, and as `tensor_groups`.
    """
    if num_samples < 1:
        raise ConfigError(f"num_samples is {num_samples} but must be at least 1: give the samples of the positions")
    a, groups_of = architecture, dict[ModuleName, list[TensorGroup]]((name, []) for name in MODULES)
    for group in tensor_groups(architecture):
        groups_of[_module(group)].append(group)
    bytes_each = BYTES_PER_PARAMETER[recipe]
    squares = a.num_layers * positions.encoder_squares + a.num_decoder_layers * (
        positions.decoder_squares + positions.cross
    )
    modules = []
    for name, groups in groups_of.items():
        parameters = sum(group.size for group in groups if not group.is_buffer)
        flops = sum(_forward_flops(a, group, positions) for group in groups)
        if name == "attention":
            flops += 2 * (a.query_size + a.attended_size) * squares
        if name == "head" and a.tied_embeddings:
            flops += 2 * a.hidden_size * a.vocab_size * _head_positions(a, positions)
        modules.append(
            ModuleEstimate(
                name=name,
                parameters=parameters,
                inference_bytes=parameters * bytes_each[0],
                training_bytes=parameters * sum(bytes_each),
                forward_flops=flops / num_samples,
            )
        )
    return tuple(modules)


def positions_of(lengths: LengthArray) -> Positions:
    """Positions of samples by their lengths; each sample attends to itself."""
    e, d = lengths[:, 0].astype(np.int64), lengths[:, 1].astype(np.int64)
    return Positions(*(int(column.sum()) for column in (e, d, e * e, d * d, e * d)))


def _module(group: TensorGroup) -> ModuleName:
    match group.kind:
        case "embedding" | "position":
            return "embedding"
        case "head" | "final_norm":
            return "head"
        case "mlp_norm" | "mlp_in" | "mlp_in_bias" | "mlp_out" | "mlp_out_bias" | "mlp_post_norm":
            return "MLP"
        case "router" | "router_bias" | "router_offset" | "shared_in" | "shared_out" | "shared_gate":
            return "MLP"
        case "experts_in" | "experts_in_bias" | "experts_out" | "experts_out_bias":
            return "MLP"
        case _:
            return "attention"


def _forward_flops(a: Architecture, group: TensorGroup, positions: Positions) -> int:
    """FLOPs of the group's matrix products. Lookups and additions count nothing (see `models.flops`)."""
    if group.kind in ("embedding", "position") or group.kind.endswith("_bias"):
        return 0
    products = 2 * sum(tensor.size for tensor in group.tensors if len(tensor.shape) > 1)
    if group.kind == "head":
        return products * _head_positions(a, positions)
    sees_encoder = group.side != "decoder" or group.kind == "cross_kv"
    products *= positions.encoder if sees_encoder else positions.decoder
    return products if not group.is_of_experts else products * a.top_k // a.num_experts


def _head_positions(a: Architecture, positions: Positions) -> int:
    return positions.decoder if a.num_decoder_layers else positions.encoder
