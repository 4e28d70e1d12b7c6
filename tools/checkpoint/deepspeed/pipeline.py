"""Checkpoints of DeepSpeed's PipelineModule: a file for each of its layers, whose place in the model is deduced.

    layer_00-model_states.pt   embedding (before the blocks: vocabulary x hidden; positions x hidden)
    layer_01 ... layer_NN      blocks, in order: files with all tensors of a block, behind any one prefix
    then                       final norm (hidden), head (vocabulary x hidden; a copy where it is tied)

Files without tensors (functions, dropout) and numbers that are skipped (the later use of a tied layer) do not count. In
the optimizer's files parameters are named NUMBER.NAME, and tied_modules.KEY.NAME where layers share them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.families import published_form
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.deepspeed.contents import (
    DeepSpeedContents,
    named,
    ranks_of,
    tensors,
    training_state,
)
from dynapipe_ext.tools.checkpoint.deepspeed.file import SplitTensor, read_deepspeed_tree
from dynapipe_ext.tools.checkpoint.deepspeed.names import ModuleTensor, is_buffer, module_tensors, tied_names
from dynapipe_ext.tools.checkpoint.deepspeed.universal import is_universal, read_universal
from dynapipe_ext.tools.checkpoint.deepspeed.zero import ZeroState, read_zero
from dynapipe_ext.tools.checkpoint.formats import StateKind

Files = Mapping[tuple[int, ...], Path]
_BLOCK = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's file."""

    number: int
    path: Path
    tensors: Mapping[str, SplitTensor]


def read_pipeline(
    tag: Path, architecture: Architecture, layers: Files, models: Files, optimizers: Files
) -> DeepSpeedContents:
    """Errors: DataError where a layer's place cannot be told, a file is absent, or layers are tensor parallel."""
    if architecture.num_decoder_layers:
        raise DataError(f"{tag} is a pipeline of a t5 model: the order of its layers is not known here")
    if parallel := [path.name for key, path in layers.items() if key[1] > 0]:
        raise DataError(f"{tag} has {named(parallel)}: layers cut by tensor parallelism are not supported")
    with_tensors = []
    for (number, _), path in layers.items():
        tree = read_deepspeed_tree(path)
        if not isinstance(tree, Mapping):
            raise DataError(f"{path} holds {short(tree)} where a layer's state dict must be")
        if entries := tensors(tree, path):
            with_tensors.append(_Layer(number, path, entries))
    names = _names(tag, architecture, with_tensors)
    weights = {names[layer.number, local]: stored for layer in with_tensors for local, stored in layer.tensors.items()}
    trees = {key[0]: _model_tree(path) for key, path in models.items()}
    _check_stages(tag, models, trees)
    states, first, notices = _states(tag, models, trees, optimizers)
    renamed = _renamed(with_tensors, names, states)
    if renamed is None:
        notices.append("tied layers of one shape cannot be told apart: the optimizer's state stays behind")
        renamed = {}
    return DeepSpeedContents(
        weights=weights,
        states=renamed,
        training=training_state(trees[min(trees)], first.step, first.groups) if trees and first else None,
        notices=tuple(notices),
    )


def _model_tree(path: Path) -> Mapping[Any, Any]:
    tree = read_deepspeed_tree(path)
    if not isinstance(tree, Mapping):
        raise DataError(f"{path} holds {short(tree)} where a mapping must be: was DeepSpeed its writer?")
    return tree


def _check_stages(tag: Path, models: Files, trees: Mapping[int, Mapping[Any, Any]]) -> None:
    """Errors: DataError where the model file of a stage is absent: its optimizer's state would be, too."""
    counts = {tree.get("mp_world_size") for tree in trees.values()} - {None}
    for count in counts:
        if type(count) is int and count > 0:
            ranks_of(models, count, "model states", tag)


def _names(tag: Path, architecture: Architecture, layers: list[_Layer]) -> dict[tuple[int, str], str]:
    """The module's name of each tensor, by (layer's number, name in its file)."""
    blocks = [(layer, prefix) for layer in layers if (prefix := _prefix(architecture, layer)) is not None]
    if len(blocks) != architecture.num_layers:
        shown = named(layer.path.name for layer, _ in blocks) or "none"
        raise DataError(
            f"{tag}: {len(blocks)} layer files hold a block of {architecture.family} ({shown}) but config.json says"
            f" {architecture.num_layers}: give the files of every stage, and of modules with transformers' names"
        )
    names: dict[tuple[int, str], str] = {}
    for i, (layer, prefix) in enumerate(blocks):
        base = published_form(architecture).names.layer.format(i=i)
        for local in layer.tensors:
            own = local.removeprefix(prefix)
            is_known = local.startswith(prefix) or is_buffer(local)
            names[layer.number, local] = f"{base}.{own}" if is_known else f"{layer.path.name}:{local}"
    first, last = blocks[0][0].number, blocks[-1][0].number
    outside = [tensor for tensor in module_tensors(architecture) if tensor.parts[0][0].layer < 0]
    for layer in layers:
        if not first <= layer.number <= last:
            _name_outside(architecture, layer, layer.number < first, outside, names)
    between = [x for x in layers if first < x.number < last and (x.number, next(iter(x.tensors))) not in names]
    if between:
        raise DataError(f"{between[0].path} lies between blocks but is none: {_shown(between[0])}")
    return names


def _prefix(architecture: Architecture, layer: _Layer) -> str | None:
    """What stands before the names of a block's tensors in a layer's file; None where it has not all of one block."""
    for names in (_in_module(architecture), _on_hub(architecture)):
        anchor = names[0]
        for local in layer.tensors:
            prefix = local.removesuffix(anchor)
            is_prefix = local.endswith(anchor) and (not prefix or prefix.endswith("."))
            if is_prefix and all(prefix + name in layer.tensors for name in names):
                return prefix
    return None


def _in_module(architecture: Architecture) -> list[str]:
    return _first_block(tensor.name for tensor in module_tensors(architecture))


def _on_hub(architecture: Architecture) -> list[str]:
    return _first_block(info.name for group in tensor_groups(architecture) for info in group.tensors)


def _first_block(names: Iterator[str]) -> list[str]:
    return [match[2] for name in names if (match := _BLOCK.fullmatch(name)) and match[1] == "0"]


def _name_outside(
    architecture: Architecture,
    layer: _Layer,
    is_before: bool,
    outside: list[ModuleTensor],
    names: dict[tuple[int, str], str],
) -> None:
    """Name the tensors of a file outside the blocks, by what they are called or by their shape. Errors: DataError."""
    kinds = ("embedding", "position") if is_before else ("final_norm", "head")
    candidates = [tensor for tensor in outside if tensor.parts[0][0].kind in kinds]
    embedding = next(tensor for tensor in outside if tensor.parts[0][0].kind == "embedding")
    if not is_before and architecture.tied_embeddings:
        tied = tied_names(architecture)[0]
        candidates.append(ModuleTensor(tied, embedding.shape, ((_group(embedding), tied),)))
    for local, stored in layer.tensors.items():
        if is_buffer(local):
            names[layer.number, local] = local
            continue
        by_name = [t for t in candidates if _tail(t.name, 2) == _tail(local, 2) and t.shape == stored.shape]
        by_shape = [t for t in candidates if t.shape == stored.shape and _tail(t.name, 1) == _tail(local, 1)]
        matches = by_name or by_shape
        taken = set(names.values())
        free = [t for t in matches if t.name not in taken]
        if len(free) != 1:
            candidate_names = "; ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in candidates)
            side = "before" if is_before else "after"
            raise DataError(
                f"{layer.path}: what {local} {list(stored.shape)} is cannot be told: {side} its blocks"
                f" {architecture.family} has {candidate_names}"
            )
        names[layer.number, local] = free[0].name


def _group(tensor: ModuleTensor) -> TensorGroup:
    return tensor.parts[0][0]


def _tail(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])


def _shown(layer: _Layer) -> str:
    return named(f"{local} {list(stored.shape)}" for local, stored in layer.tensors.items())


def _states(
    tag: Path, models: Files, trees: Mapping[int, Mapping[Any, Any]], optimizers: Files
) -> tuple[dict[StateKind, dict[str, SplitTensor]], ZeroState | None, list[str]]:
    """Masters and moments by the pipeline's names, over all its stages; the first stage's; what stays behind."""
    if is_universal(tag):
        where = next(iter(models.values()), tag)
        zero = read_universal(tag, trees.get(0, {}), where)
        return (zero.states if zero.has_optimizer else {}), zero, zero.notices
    first: ZeroState | None = None
    states: dict[StateKind, dict[str, SplitTensor]] = {}
    for key, where in models.items():
        files = {ranks: path for ranks, path in optimizers.items() if ranks[1] == key[0]}
        if not files:
            notice = "not every stage has optimizer files of ZeRO: the weights alone are carried"
            return {}, ZeroState(0, 1, {}), [notice]
        zero = read_zero(trees[key[0]], where, files)
        if first is not None and set(zero.states) != set(first.states):
            raise DataError(
                f"{where}: its optimizer has {named(zero.states)} but the first stage's {named(first.states)}: save all"
                " stages together"
            )
        first = first or zero
        for kind, by_name in zero.states.items():
            for name, stored in by_name.items():
                states.setdefault(kind, {}).setdefault(name, stored)  # a tied one is on several stages
    return states, first, list(first.notices) if first else []


def _renamed(
    layers: list[_Layer], names: Mapping[tuple[int, str], str], states: Mapping[StateKind, Mapping[str, SplitTensor]]
) -> dict[StateKind, dict[str, SplitTensor]] | None:
    """States by the module's names; None where a tied layer could be any of several."""
    own = {f"{number}.{local}": name for (number, local), name in names.items()}
    listed = {name for by_name in states.values() for name in by_name}
    shared = [layer for layer in layers if not any(f"{layer.number}.{local}" in listed for local in layer.tensors)]
    for name in listed - set(own):
        _, _, local = name.removeprefix("tied_modules.").partition(".")
        shape = next(by_name[name].shape for by_name in states.values() if name in by_name)
        fits = [x for x in shared if local in x.tensors and x.tensors[local].shape == shape]
        if not name.startswith("tied_modules.") or not fits:
            return None
        own[name] = names[fits[0].number, local]
    renamed: dict[StateKind, dict[str, SplitTensor]] = {}
    for kind, by_name in states.items():
        renamed[kind] = {own[name]: stored for name, stored in by_name.items()}
        if len(renamed[kind]) != len(by_name):
            return None
    return renamed
