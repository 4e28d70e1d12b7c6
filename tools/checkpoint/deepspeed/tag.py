"""What lies in one tag's folder of a DeepSpeed checkpoint: which layout it is, read into `DeepSpeedContents`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.tools.checkpoint.deepspeed.contents import (
    EXPERT_FILE,
    OPTIMIZER_FILE,
    DeepSpeedContents,
    count,
    mapping,
    named,
    numbered,
    ranks_of,
    shape,
    tensor,
    tensors,
    training_state,
)
from dynapipe_ext.tools.checkpoint.deepspeed.file import SplitTensor, joined_pieces, read_deepspeed_tree, same_bytes
from dynapipe_ext.tools.checkpoint.deepspeed.pipeline import read_pipeline
from dynapipe_ext.tools.checkpoint.deepspeed.universal import is_universal, read_universal
from dynapipe_ext.tools.checkpoint.deepspeed.whole import read_whole
from dynapipe_ext.tools.checkpoint.deepspeed.zero import ZeroState, read_zero
from dynapipe_ext.tools.checkpoint.formats import StateKind
from dynapipe_ext.tools.checkpoint.recognition import LAYER_FILE, MODEL_FILE, SHARD_FILE


def read_tag(tag: Path, architecture: Architecture) -> DeepSpeedContents:
    """Errors: DataError for expert and tensor parallelism and whatever is not whole."""
    if experts := [file.name for file in sorted(tag.iterdir()) if EXPERT_FILE.fullmatch(file.name)]:
        raise DataError(f"{tag} has {named(experts)}: experts that DeepSpeed spreads over ranks are not supported")
    if (tag / "offloaded_tensors").exists():
        raise DataError(
            f"{tag} has tensors that were offloaded to NVMe, apart from the rest: save it without that offload"
        )
    models, shards = numbered(tag, MODEL_FILE), numbered(tag, SHARD_FILE)
    layers, optimizers = numbered(tag, LAYER_FILE), numbered(tag, OPTIMIZER_FILE)
    if layers:
        return read_pipeline(tag, architecture, layers, models, optimizers)
    universal = is_universal(tag)
    sharded = not universal and (not models or _says_stage_3(optimizers))
    files = shards if sharded or not models else models
    if not files:
        raise DataError(f"{tag} has optimizer states of ZeRO-3 but no zero_pp_rank_*_model_states.pt: copy them too")
    split = sorted({key[-1] for key in (*files, *optimizers)} - {0})
    where = next(iter(files.values()))
    model = _tree(where)
    if split and not universal:
        num_stages = _num_stages(model)
        if num_stages < 2 or sharded:
            raise DataError(
                f"{tag} is split over tensor parallel ranks (mp_rank_{split[0]:02d}): make it a universal checkpoint"
                " with ds_to_universal.py, or save it from an engine without tensor parallelism"
            )
        return _of_stages(tag, ranks_of(models, num_stages, "model states", tag), optimizers)
    if model.get("module") is None:
        raise DataError(
            f"{tag} is of a pipeline but has no layer_*-model_states.pt: copy them in from where it was saved"
        )
    if universal:
        zero = read_universal(tag, model, where)
        if models and not split:
            return _contents(_module(model, where), {}, zero, model)
        frozen = _frozen(model, where, ranks_of(shards, len(shards), "model states", tag))
        return _from_masters(zero, frozen, model, where)
    if not sharded:
        return _unsharded(model, where, optimizers)
    if not optimizers:
        raise DataError(f"{tag} has no *_optim_states.pt, which hold the weights of ZeRO-3: copy them too")
    zero = read_zero(model, where, optimizers)
    frozen = _frozen(model, where, ranks_of(shards, zero.num_ranks, "model states", tag))
    return _from_masters(zero, frozen, model, where)


def _tree(where: Path) -> Mapping[Any, Any]:
    model = read_deepspeed_tree(where)
    if not isinstance(model, Mapping):
        raise DataError(f"{where} holds {short(model)} where a mapping must be: was DeepSpeed its writer?")
    return model


def _num_stages(model: Mapping[Any, Any]) -> int:
    """Of engines one a pipeline rank, where tensors are whole; 1 where these are cut, too, or nothing is said."""
    degrees = model.get("checkpoint_parallel_dimensions")
    if not isinstance(degrees, Mapping) or degrees.get("tp_degree") != 1:
        return 1
    return count(degrees.get("pp_degree"))


def _of_stages(tag: Path, models: Sequence[Path], optimizers: Mapping[tuple[int, ...], Path]) -> DeepSpeedContents:
    """Every pipeline rank's tensors, by names in the whole model. A tied weight that two have is that of the first.

    Errors: DataError where a stage lacks its optimizer, or copies of a weight differ.
    """
    stages = []
    for stage, where in enumerate(models):
        own = {key: path for key, path in optimizers.items() if key[1] == stage}
        if optimizers and not own:
            raise DataError(f"{tag}: pipeline rank {stage} has no optimizer states: copy the files of every node")
        stages.append(_unsharded(_tree(where), where, own))
    weights: dict[str, SplitTensor] = {}
    for stage, contents in enumerate(stages):
        for name, weight in contents.weights.items():
            if not same_bytes(weights.setdefault(name, weight), weight):
                raise DataError(f"{tag}: {name} of pipeline rank {stage} differs from the copy of an earlier one")
    states: dict[StateKind, dict[str, SplitTensor]] = {}
    for contents in stages:
        for kind, of_stage in contents.states.items():
            states[kind] = {**of_stage, **states.get(kind, {})}
    notices = dict.fromkeys(notice for contents in stages for notice in contents.notices)
    return replace(stages[0], weights=weights, states=states, notices=tuple(notices))


def _unsharded(model: Mapping[Any, Any], where: Path, optimizers: Mapping[tuple[int, ...], Path]) -> DeepSpeedContents:
    """Of an engine whose module is whole (ZeRO 0 to 2)."""
    if optimizers:
        zero = read_zero(model, where, optimizers)
    elif isinstance(model.get("optimizer"), Mapping):
        zero = read_whole(model["optimizer"], _module(model, where), where)
    else:
        zero = ZeroState(0, 1, {}, notices=["no optimizer files are there: the weights alone are carried"])
    return _contents(_module(model, where), {}, zero, model)


def _says_stage_3(optimizers: Mapping[tuple[int, ...], Path]) -> bool:
    for path in optimizers.values():
        tree = read_deepspeed_tree(path)
        return isinstance(tree, Mapping) and mapping(tree, "optimizer_state_dict", path).get("zero_stage") == 3
    return False


def _module(model: Mapping[Any, Any], where: Path) -> dict[str, SplitTensor]:
    return tensors(mapping(model, "module", where), where)


def _from_masters(
    zero: ZeroState, frozen: Mapping[str, SplitTensor], model: Mapping[Any, Any], where: Path
) -> DeepSpeedContents:
    """The module rebuilt from its masters. ZeRO-3 saves empty tensors in the place of weights: they tell the types."""
    masters, dtypes = zero.states.get("master", {}), {name: t.dtype for name, t in _module(model, where).items()}
    casts = {name: dtypes[name] for name in masters if name in dtypes}
    return _contents({**masters, **frozen}, casts, zero, model)


def _frozen(model: Mapping[Any, Any], where: Path, paths: list[Path]) -> dict[str, SplitTensor]:
    """Frozen parameters of ZeRO-3: every rank's model file has its part of each."""
    if not model.get("frozen_param_shapes"):
        return {}
    shapes = {str(n): shape(s, str(n), where) for n, s in mapping(model, "frozen_param_shapes", where).items()}
    trees = [mapping(read_deepspeed_tree(path), "frozen_param_fragments", path) for path in paths]
    frozen = {}
    for name, size in shapes.items():
        parts = [tensor(tree.get(name), f"the part of {name}", path) for tree, path in zip(trees, paths, strict=True)]
        whole = joined_pieces([part.part(0, (part.size,)) for part in parts], (sum(part.size for part in parts),))
        frozen[name] = whole.part(0, size)
    return frozen


def _contents(
    weights: dict[str, SplitTensor], casts: dict[str, torch.dtype], zero: ZeroState, model: Mapping[Any, Any]
) -> DeepSpeedContents:
    shared = model.get("shared_params")
    aliases = {str(a): str(b) for a, b in shared.items()} if isinstance(shared, Mapping) else {}
    return DeepSpeedContents(
        weights=weights,
        casts=casts,
        states={kind: by_name for kind, by_name in zero.states.items() if by_name and zero.has_optimizer},
        aliases={a: b for a, b in aliases.items() if a not in weights},
        training=training_state(model, zero.step, zero.groups),
        notices=tuple(zero.notices),
    )
