"""DeepSpeed's universal checkpoints: a folder for each parameter with one file for its fp32 master and each moment.

TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt   TAG/zero/optimizer_state.pt   TAG/mp_rank_00_model_states.pt
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.checkpoint.deepspeed.contents import (
    FP32_KINDS,
    MOMENTS,
    count,
    items,
    named,
    parameter_groups,
    shape,
    tensor,
)
from dynapipe_ext.tools.checkpoint.deepspeed.file import SplitTensor, read_deepspeed_tree
from dynapipe_ext.tools.checkpoint.deepspeed.zero import ZeroState
from dynapipe_ext.tools.checkpoint.formats import StateKind

FOLDER = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"
FILES: Mapping[StateKind, str] = {"master": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
NUM_GROUPS = "num_param_groups"  # our own field: how many of the groups the optimizer had, where more were written
_KNOWN = {*FILES.values(), "step.pt"}


def is_universal(tag: Path) -> bool:
    """Whether a tag's folder holds a universal checkpoint."""
    return (tag / FOLDER / OPTIMIZER_STATE).is_file()


def read_universal(tag: Path, model: Mapping[Any, Any], where: Path) -> ZeroState:
    """Masters and moments by name. Those of ZeRO-3 are flat: the model file (`where`) has their shapes.

    A parameter with a master and no moments was frozen. Errors: DataError for a file that is absent or not DeepSpeed's.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for group in items(model, "param_shapes", where) if model.get("param_shapes") is not None else ():
        if isinstance(group, Mapping):
            shapes |= {str(name): shape(value, str(name), where) for name, value in group.items()}
    path = tag / FOLDER / OPTIMIZER_STATE
    tree = read_deepspeed_tree(path)
    if not isinstance(tree, Mapping):
        raise DataError(f"{path} is not DeepSpeed's: it holds no mapping")
    states: dict[StateKind, dict[str, SplitTensor]] = {kind: {} for kind in FP32_KINDS}
    step = 0
    other: set[str] = set()
    for folder in sorted(entry for entry in (tag / FOLDER).iterdir() if entry.is_dir()):
        present = {file.name for file in folder.iterdir()}
        if FILES["master"] not in present:
            raise DataError(f"{folder} has no {FILES['master']}: the checkpoint is not whole; convert it again")
        for kind in FP32_KINDS:
            if FILES[kind] in present:
                states[kind][folder.name] = _read(folder / FILES[kind], shapes.get(folder.name))
        if "step.pt" in present:
            step = max(step, count(read_deepspeed_tree(folder / "step.pt")))
        other |= present - _KNOWN
    result = ZeroState(0, 0, {kind: by_name for kind, by_name in states.items() if by_name})
    if not states["exp_avg"] or not states["exp_avg_sq"]:
        for kind in MOMENTS:
            result.states.pop(kind, None)
    groups = parameter_groups(items(tree, "param_groups", path))
    num_groups = tree.get(NUM_GROUPS)
    result.groups = groups[:num_groups] if type(num_groups) is int else groups
    result.has_optimizer = bool(result.groups or "exp_avg" in result.states)
    result.step = step or _step(tree)
    if other:
        result.notices.append(f"the optimizer's {named(sorted(other))} are not Adam's moments and stay behind")
    return result


def _read(path: Path, expected: tuple[int, ...] | None) -> SplitTensor:
    tree = read_deepspeed_tree(path)
    if isinstance(tree, Mapping):
        if tree.get("ep_is_expert_param"):
            raise DataError(f"{path} is sharded by experts: expert parallelism is not supported")
        tree = tree.get("param")
    stored = tensor(tree, "its tensor", path)
    if expected is not None and len(stored.shape) == 1 and stored.shape != expected:
        return stored.part(0, expected) if stored.size == SplitTensor(expected, stored.dtype, ()).size else stored
    return stored


def _step(tree: Mapping[Any, Any]) -> int:
    """As ZeRO-3 has it, in one place for all parameters."""
    inner = tree.get("optimizer_state_dict")
    state = inner.get("state") if isinstance(inner, Mapping) else None
    first = state.get(0) if isinstance(state, Mapping) else None
    return count(first.get("step")) if isinstance(first, Mapping) else 0
