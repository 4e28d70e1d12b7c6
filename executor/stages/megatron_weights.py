"""The weights of one rank's part of a Megatron model: drawn by name, or filled from whole tensors."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dynapipe_ext.errors import DataError

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


def global_name(name: str, first_layer: int) -> str:
    """
    >>> global_name("decoder.layers.1.mlp.linear_fc1.weight", 4)
    'decoder.layers.5.mlp.linear_fc1.weight'
    """
    return _LAYER.sub(lambda match: str(int(match[0]) + first_layer), name)


def held_weights(model: Any, first_layer: int) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A part's parameters by their names in the whole model; the last stage's copy of a tied embedding by the
    embedding's."""
    for local_name, parameter in model.named_parameters():
        name = global_name(local_name, first_layer)
        if name == _HEAD and model.share_embeddings_and_output_weights:
            name = _EMBEDDING
        yield name, parameter


def initialize_weights(model: Any, config: Any, *, first_layer: int, seed: int) -> None:
    """Fill every weight from a generator keyed by (seed, its name in the whole model), then take this rank's slice.

    The same seed gives the same model on every topology. Normal with deviation 0.02, divided by sqrt(2 x layers) for
    the two projections that write into the residual stream (Radford et al. 2019, sec. 2.3); norms one, biases zero.
    """
    from megatron.core import parallel_state

    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in held_weights(model, first_layer):
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
            elif "layernorm" in name:
                parameter.fill_(0.0 if config.layernorm_zero_centered_gamma else 1.0)
            else:
                deviation = 0.02
                if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                    deviation /= math.sqrt(2 * config.num_layers)
                shape = full_shape(parameter, tp)
                key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
                whole = torch.empty(shape).normal_(0.0, deviation, generator=generator)
                parameter.copy_(tensor_slice(whole, parameter, tp_rank, tp))


def fill_weights(model: Any, first_layer: int, whole: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill a part's weights, every one, from whole tensors by name; rows of a padded vocabulary are zero.

    Errors: DataError for a tensor that is missing, misshapen, or not the same in the weights' precision.
    """
    from megatron.core import parallel_state

    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    held = dict(held_weights(model, first_layer))
    for name, tensor in whole:
        if (parameter := held.pop(name, None)) is None:
            continue
        shape = full_shape(parameter, tp)
        if name in (_EMBEDDING, _HEAD) and tensor.shape[0] < shape[0]:
            tensor = torch.cat([tensor, tensor.new_zeros(shape[0] - tensor.shape[0], *tensor.shape[1:])])
        if list(tensor.shape) != shape:
            raise DataError(f"{name} is {list(tensor.shape)} but the model's is {shape}: give the model's own weights")
        mine = tensor_slice(tensor, parameter, tp_rank, tp)
        if mine.dtype != parameter.dtype and not torch.equal(mine.to(parameter.dtype).to(mine.dtype), mine):
            raise DataError(
                f"{name} is stored as {mine.dtype} and would be rounded to {parameter.dtype}: train in float32, or"
                " round the checkpoint first"
            )
        with torch.no_grad():
            parameter.copy_(mine)
    if held:
        raise DataError(f"the checkpoint has no {', '.join(sorted(held))}: give the model's own weights")


def full_shape(parameter: torch.Tensor, tp: int) -> list[int]:
    """The shape of a tensor-parallel parameter before it was cut."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= tp  # type: ignore[attr-defined]
    return shape


def tensor_slice(whole: torch.Tensor, parameter: torch.Tensor, tp_rank: int, tp: int) -> torch.Tensor:
    """This rank's part of a whole weight; a partition stride of 2 is a gated MLP's [gate; up], cut one by one."""
    if not getattr(parameter, "tensor_model_parallel", False) or tp == 1:
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
    return torch.cat([part.chunk(tp, dim)[tp_rank] for part in whole.chunk(stride, dim)], dim)
