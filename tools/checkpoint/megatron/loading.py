"""Hugging Face's tensors into a running Megatron model, one by one: the reverse of `export.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.stages.megatron.gather import device_of, ranks_that_cut
from dynapipe_ext.executor.stages.megatron.head import block_of_rows
from dynapipe_ext.executor.stages.megatron.stage import Chunks
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.families import published_form
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.megatron.live import LiveModel
from dynapipe_ext.tools.checkpoint.megatron.names import (
    EMBEDDING,
    MegatronTensor,
    megatron_tensors,
    tied_head_name,
    to_megatron,
)
from dynapipe_ext.tools.checkpoint.megatron.shards import RankLayout


def load_hf_weights(chunks: Chunks, architecture: Architecture, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill the weights of a running model, all of them, from whole tensors by their names on the Hub.

    Every rank is given the same tensors, in any order, and takes its part of each. Nothing is kept of a tensor that is
    used or that lies on other ranks. One that Megatron joins with others (queries, keys, values) waits for these as a
    copy, so that whoever gives it may use its memory again. Rows that pad the vocabulary become zero.

    An optimizer with weights of its own in float32 does not know of it: tell it by `optimizer.reload_model_params()`.

    Errors, the same on every rank: those of `export_hf_weights` before a weight changes; DataError naming a tensor that
    the model has not, that comes twice, in another shape or in a precision that the model's would round, and at the end
    all that did not come: the model is then loaded in part.
    """
    live = LiveModel.of(chunks, architecture)
    groups = {info.name: group for group in tensor_groups(architecture) for info in group.tensors}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    arrived: set[str] = set()
    for name, tensor in weights:
        _check(architecture, live, groups, name, tensor)
        if name in arrived:
            raise DataError(f"{name} comes twice: give every weight once")
        arrived.add(name)
        group = groups[name]
        if not any(_held_names(architecture, live, group)):
            continue
        of_group = waiting.setdefault(group.name, {})
        is_last = all(info.name in arrived for info in group.tensors)
        to = _dtype(architecture, live, group)
        of_group[name] = tensor.detach().to(device_of(live.held), to, copy=not is_last)
        if is_last:
            _fill(architecture, live, group, waiting.pop(group.name))
    if missing := [name for name in groups if name not in arrived]:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise DataError(f"no {shown} came, so that the model is loaded in part: give every weight")


def _check(a: Architecture, live: LiveModel, groups: dict[str, TensorGroup], name: str, tensor: torch.Tensor) -> None:
    if name not in groups:
        is_tied_head = a.tied_embeddings and name == f"{published_form(a).names.head}.weight"
        move = "leave it out, as it is the embedding" if is_tied_head else "give the weights of this architecture"
        raise DataError(f"{name} is no weight of this {a.family} model: {move}")
    shape = next(info.shape for info in groups[name].tensors if info.name == name)
    if tuple(tensor.shape) != shape:
        raise DataError(f"{name} has shape {tuple(tensor.shape)}, not {shape}: give the weights of this architecture")
    held = _dtype(a, live, groups[name])
    if not tensor.is_floating_point() or torch.promote_types(tensor.dtype, held) != held:
        raise DataError(f"{name} is {tensor.dtype}, which the model's {held} would round: give it as {held}")


def _dtype(architecture: Architecture, live: LiveModel, group: TensorGroup) -> torch.dtype:
    first = megatron_tensors(architecture, group)[0]
    dtype: torch.dtype = getattr(torch, live.places[live.names[first.name]].dtype)
    return dtype


def _held_names(
    architecture: Architecture, live: LiveModel, group: TensorGroup
) -> Iterator[tuple[MegatronTensor, str]]:
    """What this rank holds of a group, each under every name that the model has for it."""
    for tensor in megatron_tensors(architecture, group):
        is_tied = tensor.name == EMBEDDING and architecture.tied_embeddings
        for name in (tensor.name, *tensor.aliases, *([tied_head_name(architecture)] if is_tied else [])):
            if name in live.held:
                yield tensor, name


@torch.no_grad()
def _fill(architecture: Architecture, live: LiveModel, group: TensorGroup, tensors: dict[str, torch.Tensor]) -> None:
    whole = to_megatron(architecture, group, tensors)
    for tensor, name in _held_names(architecture, live, group):
        cut_by = ranks_that_cut(of_experts=tensor.is_of_experts)
        number, blocks = block_of_rows(live.held[name], cut_by.rank(), cut_by.size())
        rows = live.held[name].shape[0] * blocks
        layout = RankLayout(architecture, blocks, (architecture.total_layers,), padded_vocab_size=rows)
        dim, start = tensor.tp_dim or 0, 0
        for begin, end in layout.spans(tensor, number):
            place = live.held[name].narrow(dim, start, end - begin)
            count = max(0, min(end, tensor.shape[dim]) - begin)  # behind are rows of padding
            place.narrow(dim, count, end - begin - count).zero_()
            if count:
                place.narrow(dim, 0, count).copy_(whole[tensor.name].narrow(dim, begin, count))
            start += end - begin
