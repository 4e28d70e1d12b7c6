"""The weights of a running Megatron model by the names of `names.py`, each rank's parts and where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.stages.megatron.gather import HeldWeight, exchange_places, first_expert, whole_shape
from dynapipe_ext.executor.stages.megatron.stage import Chunks, first_layers, unwrapped
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint.megatron.legacy_names import whole_name
from dynapipe_ext.tools.checkpoint.megatron.names import MegatronTensor, megatron_tensors, tied_head_name


@dataclass(frozen=True, slots=True)
class LiveModel:
    """`held`: this rank's parameters and buffers by their names in the whole model; `places`: where all lie.

    `names`: under which of its names the model has each weight of the architecture.
    """

    held: Mapping[str, torch.Tensor]
    places: Mapping[str, HeldWeight]
    names: Mapping[str, str]

    @classmethod
    def of(cls, chunks: Chunks, architecture: Architecture) -> LiveModel:
        """A collective of every rank. Errors, on all of them: ConfigError for a model of no published family; DataError
        naming every weight that `architecture` has and the model has not, or the other way."""
        if isinstance(chunks, torch.nn.Module) or not chunks:
            raise ConfigError(f"chunks is {type(chunks).__name__}: give the list of this rank's model chunks")
        groups = tensor_groups(architecture)
        held = _held(chunks, architecture)
        places = exchange_places(held)
        wanted = (tensor for group in groups for tensor in megatron_tensors(architecture, group))
        return cls(held, places, _names(architecture, places, wanted))


def _held(chunks: Chunks, architecture: Architecture) -> dict[str, torch.Tensor]:
    """This rank's weights by their names in the whole model, under the local layer specs."""
    weights: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        model: Any = unwrapped(chunk)
        first = first_layers(model)
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
                weights[whole_name(name, first, first_expert(architecture.num_experts))] = value
    return weights


def _names(
    architecture: Architecture, places: Mapping[str, HeldWeight], wanted: Iterable[MegatronTensor]
) -> Mapping[str, str]:
    names, faults = {}, []
    expected = {tied_head_name(architecture)} if architecture.tied_embeddings else set()
    for tensor in wanted:
        expected |= {tensor.name, *tensor.aliases}
        name = next((name for name in (tensor.name, *tensor.aliases) if name in places), None)
        if name is None:
            faults.append(f"no {tensor.name}")
            continue
        names[tensor.name] = name
        shape = whole_shape(places[name], tensor.tp_dim, of_experts=tensor.is_of_experts)
        rows_fit = shape[0] >= tensor.shape[0] if tensor.vocabulary else shape[:1] == tensor.shape[:1]
        if not rows_fit or shape[1:] != tensor.shape[1:]:
            faults.append(f"{name} of shape {shape}, not {tensor.shape}")
    faults += [f"{name}, which {architecture.family} has not" for name in places if name not in expected]
    if faults:
        shown = "; ".join(faults[:8]) + (f" and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise DataError(f"the model has {shown}: give the architecture that it was built from")
    return names
