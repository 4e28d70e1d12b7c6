"""What the files of a DeepSpeed checkpoint hold, by the names of the engine's module: the common end of all layouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.tools.checkpoint.deepspeed.file import SplitTensor
from dynapipe_ext.tools.checkpoint.formats import StateKind, TrainingState

OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
EXPERT_FILE = re.compile(r"(?:expp_rank_\d+|layer_\d+_expert_\d+)_.*\.pt")

MOMENTS: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")
FP32_KINDS: tuple[StateKind, ...] = ("master", *MOMENTS)
_MOST_NAMED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedContents:
    """Tensors by the module's names.

    `weights` are what the module computes with, once cast to the dtype in `casts` where there is one (ZeRO-3 keeps them
    as fp32 masters alone). `states` has the kinds of the optimizer; a name of `weights` that is not in them was frozen.
    `aliases` are second names of a weight. `notices` say what the files hold that cannot be carried.
    """

    weights: Mapping[str, SplitTensor]
    casts: Mapping[str, torch.dtype] = field(default_factory=dict)
    states: Mapping[StateKind, Mapping[str, SplitTensor]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    training: TrainingState | None = None
    notices: tuple[str, ...] = ()


def numbered(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    """The files of a folder that match, by the numbers in their names, in order."""
    files = {}
    for path in folder.iterdir():
        if match := pattern.fullmatch(path.name):
            files[tuple(int(group or 0) for group in match.groups())] = path
    return dict(sorted(files.items()))


def ranks_of(files: Mapping[tuple[int, ...], Path], num_ranks: int, what: str, folder: Path) -> list[Path]:
    """Files of ranks 0 to `num_ranks` - 1. Errors: DataError naming ranks whose file is absent or too many."""
    have = {key[0]: path for key, path in files.items()}
    absent = [str(rank) for rank in range(num_ranks) if rank not in have]
    extra = [path.name for rank, path in have.items() if rank >= num_ranks]
    if absent:
        raise DataError(
            f"{folder}: {what} of {num_ranks} ranks are needed but rank {named(absent)} has none: copy the files of"
            " every node into one folder"
        )
    if extra:
        raise DataError(
            f"{folder}: {what} were written by {num_ranks} ranks but there are also {named(extra)}:"
            " an older checkpoint was overwritten; move its files away"
        )
    return [have[rank] for rank in range(num_ranks)]


def mapping(tree: Any, key: str, where: Path) -> Mapping[Any, Any]:
    """A field that must be a mapping. Errors: DataError naming file and field."""
    value = tree.get(key) if isinstance(tree, Mapping) else None
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: field {key!r} is {short(value)} but must be a mapping: was DeepSpeed its writer?")
    return value


def items(tree: Any, key: str, where: Path) -> Sequence[Any]:
    """A field that must be a list. Errors: DataError naming file and field."""
    value = tree.get(key) if isinstance(tree, Mapping) else None
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: field {key!r} is {short(value)} but must be a list: was DeepSpeed its writer?")
    return value


def tensor(value: Any, what: str, where: Path) -> SplitTensor:
    """Errors: DataError where `value` is no tensor."""
    if not isinstance(value, SplitTensor):
        raise DataError(f"{where}: {what} is {short(value)} but must be a tensor: was DeepSpeed its writer?")
    return value


def shape(value: Any, name: str, where: Path) -> tuple[int, ...]:
    """Errors: DataError where `value` is no shape."""
    if not isinstance(value, list | tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise DataError(f"{where}: the shape of {name} is {short(value)} but must be a tuple of sizes")
    return tuple(value)


def tensors(tree: Mapping[Any, Any], where: Path) -> dict[str, SplitTensor]:
    """The tensors of a state dict. Errors: DataError for a name that is no text or a value that is neither."""
    by_name = {}
    for name, value in tree.items():
        if name == "_metadata" or (isinstance(name, str) and name.endswith("_extra_state")):
            continue
        by_name[str(name)] = tensor(value, f"module entry {short(name)}", where)
    return by_name


def plain_number(value: Any) -> Any:
    """`value` with tensors of one number as that number, tuples and mappings as themselves; others as None.

    What holds itself, or nests deeper than anything that is saved in earnest, is None too.
    """
    try:
        return _plain(value, {})
    except RecursionError:
        return None


def _plain(value: Any, plain_by_id: dict[int, Any]) -> Any:
    if isinstance(value, SplitTensor):
        return value.read().item() if value.size == 1 else None
    if not isinstance(value, Mapping | tuple | list):
        return value if isinstance(value, str | int | float | bool | None) else None
    if id(value) not in plain_by_id:
        plain_by_id[id(value)] = None  # until it is known; and each is walked once, however often it occurs
        if isinstance(value, Mapping):
            plain_by_id[id(value)] = {
                key: _plain(entry, plain_by_id) for key, entry in value.items() if isinstance(key, str | int)
            }
        else:
            entries = [_plain(entry, plain_by_id) for entry in value]
            plain_by_id[id(value)] = tuple(entries) if isinstance(value, tuple) else entries
    return plain_by_id[id(value)]


def count(value: Any) -> int:
    """A number of steps or samples, saved as a number or a tensor of one; 0 for anything else."""
    number = plain_number(value)
    return int(number) if isinstance(number, int | float) and 0 <= number < 1 << 62 else 0


def parameter_groups(groups: Iterable[Any]) -> tuple[Mapping[str, Any], ...]:
    """Hyper-parameters by group, without the parameters themselves."""
    return tuple(
        {str(key): plain_number(value) for key, value in group.items() if key != "params"}
        for group in groups
        if isinstance(group, Mapping)
    )


def training_state(tree: Mapping[Any, Any], step: int, groups: tuple[Mapping[str, Any], ...]) -> TrainingState:
    """From a model file's tree: where the engine stood."""

    scheduler = plain_number(tree.get("lr_scheduler"))
    iteration = count(tree.get("global_steps"))
    return TrainingState(
        iteration=iteration,
        optimizer_step=step or max(iteration - count(tree.get("skipped_steps")), 0),
        consumed_samples=count(tree.get("global_samples")),
        param_groups=groups,
        scheduler=scheduler if isinstance(scheduler, dict) else {},
    )


def named(names: Iterable[str]) -> str:
    """Some names for a message, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
