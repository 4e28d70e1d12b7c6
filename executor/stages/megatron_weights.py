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
_HEADS = (_HEAD, f"lm_head.{_HEAD}")  # of GPTModel and of T5Model
_VOCABULARY = (_EMBEDDING, *_HEADS, "lm_head.output_layer.bias")  # rows of them are ids
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)")


def global_name(name: str, first_layer: int, first_encoder_layer: int = 0) -> str:
    """
    >>> global_name("decoder.layers.1.mlp.linear_fc1.weight", 4)
    'decoder.layers.5.mlp.linear_fc1.weight'
    """
    before = {"decoder": first_layer, "encoder": first_encoder_layer}
    return _LAYER.sub(lambda match: f"{match[1]}.layers.{int(match[2]) + before[match[1]]}", name)


def global_names(model: Any, named: Iterable[tuple[str, Any]] | None = None) -> Iterator[tuple[str, Any]]:
    """A part's parameters, or what else is `named`, by their names in the whole model: layers number themselves."""
    sides = (getattr(getattr(model, side, None), "layers", ()) for side in ("decoder", "encoder"))
    first = [layers[0].layer_number - 1 if layers else 0 for layers in sides]
    own = model.named_parameters() if named is None else named
    return ((global_name(name, *first), parameter) for name, parameter in own)


def held_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, with the last stage's copy of a tied embedding by the embedding's name; and biases of routers, which
    checkpoints hold and nothing trains."""
    for name, parameter in global_names(model):
        yield _EMBEDDING if name in _HEADS and model.share_embeddings_and_output_weights else name, parameter
    yield from (named for named in global_names(model, model.named_buffers()) if named[0].endswith(".expert_bias"))


def initialize_weights(model: Any, config: Any, *, seed: int) -> None:
    """Fill every weight from a generator keyed by (seed, its name in the whole model), then take this rank's slice.

    The same seed gives the same model on every topology. Normal with deviation 0.02, divided by sqrt(2 x layers) for
    the two projections that write into the residual stream (Radford et al. 2019, sec. 2.3); norms one, biases zero.
    """
    from megatron.core import parallel_state

    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in held_weights(model):
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


def fill_weights(model: Any, whole: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill a part's weights, every one, from whole tensors by name; rows of a padded vocabulary are zero.

    Of a tensor that is not the same in the weights' precision what was given stays beside the weight, until
    `take_unrounded` has it. Errors: DataError for a tensor that is missing or misshapen.
    """
    from megatron.core import parallel_state

    tp_rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    held = dict(held_weights(model))
    for name, tensor in whole:
        if (parameter := held.pop(name, None)) is None:
            continue
        shape = full_shape(parameter, tp)
        if name in _VOCABULARY and tensor.shape[0] < shape[0]:
            tensor = torch.cat([tensor, tensor.new_zeros(shape[0] - tensor.shape[0], *tensor.shape[1:])])
        if list(tensor.shape) != shape:
            raise DataError(f"{name} is {list(tensor.shape)} but the model's is {shape}: give the model's own weights")
        mine = tensor_slice(tensor, parameter, tp_rank, tp)
        if mine.dtype != parameter.dtype and not torch.equal(mine.to(parameter.dtype).to(mine.dtype), mine):
            parameter.unrounded = mine.float().clone()  # type: ignore[attr-defined]
        with torch.no_grad():
            parameter.copy_(mine)
    if held:
        raise DataError(f"the checkpoint has no {', '.join(sorted(held))}: give the model's own weights")


def take_unrounded(parameter: torch.Tensor) -> torch.Tensor | None:
    """What `fill_weights` was given of a weight, in float32, where the weight is rounded; once."""
    unrounded: torch.Tensor | None = parameter.__dict__.pop("unrounded", None)
    return unrounded


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
