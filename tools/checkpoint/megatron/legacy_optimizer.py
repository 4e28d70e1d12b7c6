"""Which tensor of torch's Adam, as a legacy file has it by number, belongs to which weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor
from dynapipe_ext.tools.checkpoint.formats import StateKind
from dynapipe_ext.tools.checkpoint.megatron.legacy_names import has_decay
from dynapipe_ext.tools.checkpoint.megatron.state import MOMENTS

_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
NumberedStates = dict[
    StateKind, dict[str, dict[int, StoredTensor]]
]  # kind -> name of the weight -> tensor parallel rank


@dataclass(frozen=True, slots=True)
class RankOptimizer:
    """What a rank's file says: its weights by name in the order of the model's parameters, and its optimizer."""

    path: Path
    tp_rank: int
    weights: Mapping[str, StoredTensor]
    optimizer: Any
    added: frozenset[str] = frozenset()  # weights that published models lack and that may not be trained


class _UnclearError(Exception):
    """Why an optimizer's state cannot be told apart."""


def optimizer_tensors(ranks: Sequence[RankOptimizer]) -> tuple[NumberedStates, tuple[str, ...]]:
    """All ranks' optimizer tensors, or why there are none to carry."""
    if all(not isinstance(rank.optimizer, Mapping | list) for rank in ranks):
        return {}, ()
    by_kind: NumberedStates = {}
    try:
        for rank in ranks:
            for kind, tensors in _of_rank(rank).items():
                for name, stored in tensors.items():
                    by_kind.setdefault(kind, {}).setdefault(name, {})[rank.tp_rank] = stored
    except _UnclearError as why:
        return {}, (f"optimizer state is not carried: {why}",)
    order: tuple[StateKind, ...] = ("master", *MOMENTS)
    return {kind: by_kind[kind] for kind in order if kind in by_kind}, ()


def _of_rank(rank: RankOptimizer) -> dict[StateKind, dict[str, StoredTensor]]:
    where = f"{rank.path.parent.name}/{rank.path.name}"
    if not isinstance(rank.optimizer, Mapping):
        raise _UnclearError(f"{where} holds several optimizers")
    inner = rank.optimizer.get("optimizer", rank.optimizer)
    states, groups = (inner.get("state"), inner.get("param_groups")) if isinstance(inner, Mapping) else (None, None)
    if not isinstance(states, Mapping):
        raise _UnclearError(
            f"{where} holds no tensors of it; those of the distributed optimizer lie in buffers beside it. Save with"
            " --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable to have them converted"
        )
    if not isinstance(groups, list) or len(groups) > 2:
        raise _UnclearError(f"{where} does not have two parameter groups, with and without weight decay")
    masters: list[Any] = next(
        (rank.optimizer[name] for name in _MASTERS if isinstance(rank.optimizer.get(name), list)), []
    )
    by_kind: dict[StateKind, dict[str, StoredTensor]] = {}
    seen: set[int] = set()
    for i, group in enumerate(groups):
        names = _names_of(rank, group, where)
        numbers: list[Any] = group["params"]
        if not all(type(number) is int for number in numbers) or len({*numbers, *seen}) < len(numbers) + len(seen):
            raise _UnclearError(f"{where} does not number its parameters, each once")
        seen.update(numbers)
        copies = list(masters[i]) if i < len(masters) and isinstance(masters[i], list) else []
        for name, number in zip(names, numbers, strict=True):
            state = states.get(number)
            tensors = {kind: state.get(kind) for kind in MOMENTS} if isinstance(state, Mapping) else {}
            if masters and rank.weights[name].dtype in _SIXTEEN_BITS:
                tensors["master"] = copies.pop(0) if copies else None
            for kind, stored in tensors.items():
                if not isinstance(stored, StoredTensor) or stored.shape != rank.weights[name].shape:
                    raise _UnclearError(
                        f"{where} has no {kind} of {name} in its shape {list(rank.weights[name].shape)}"
                    )
                by_kind.setdefault(kind, {})[name] = stored
            if not tensors:
                raise _UnclearError(f"{where} has no moments of {name}")
        if copies:
            raise _UnclearError(f"{where} has {len(copies)} fp32 copies more than 16-bit weights")
    if not len(rank.weights) - len(rank.added) <= len(seen) <= len(rank.weights):
        raise _UnclearError(f"{where} has {len(seen)} parameters in its groups, but {len(rank.weights)} weights")
    return by_kind


def _names_of(rank: RankOptimizer, group: Any, where: str) -> list[str]:
    """The weights of a group: those with weight decay, or those without."""
    decay = group.get("wd_mult", group.get("pre_wd_mult")) if isinstance(group, Mapping) else None
    if not isinstance(decay, int | float) or not isinstance(group.get("params"), list):
        raise _UnclearError(f"{where} does not say which of its parameters are decayed (wd_mult)")
    names = [name for name, stored in rank.weights.items() if has_decay(name, stored.shape) == (decay != 0)]
    if len(names) != len(group["params"]):
        names = [name for name in names if name not in rank.added]
    if len(names) != len(group["params"]):
        raise _UnclearError(
            f"{where} has {len(group['params'])} parameters {'with' if decay else 'without'} weight decay, but"
            f" {len(names)} such weights"
        )
    return names
