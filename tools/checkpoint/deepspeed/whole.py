"""Optimizer state that is not partitioned (ZeRO stage 0): a state for each parameter, by its place in the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynapipe_ext.tools.checkpoint.deepspeed.contents import MOMENTS, count, items, mapping, parameter_groups, tensor
from dynapipe_ext.tools.checkpoint.deepspeed.file import SplitTensor
from dynapipe_ext.tools.checkpoint.deepspeed.zero import ZeroState
from dynapipe_ext.tools.checkpoint.formats import StateKind

_UNNAMED = (
    "the optimizer of stage 0 does not name its parameters and they are not the model's in its order in one group: its"
    " state stays behind; save with ZeRO stage 1 to carry it"
)


def read_whole(optimizer: Mapping[Any, Any], weights: Mapping[str, SplitTensor], where: Path) -> ZeroState:
    """Masters and moments by name. A group of all parameters is in the order of the module; more groups are in an
    order that no file tells, so that `notices` say that they stay behind.

    `weights` are the module's in its order, without buffers. Errors: DataError for what DeepSpeed does not write.
    """
    result = ZeroState(0, 1, {})
    inner = optimizer.get("optimizer_state_dict", optimizer)
    state = mapping(inner if isinstance(inner, Mapping) else {}, "state", where)
    groups = items(inner, "param_groups", where)
    result.groups = parameter_groups(groups)
    names = _own_names(weights)
    shapes = {name: weights[name].shape for name in names}
    masters = optimizer.get("fp32_groups", optimizer.get("fp32_groups_flat"))
    if not state or len(groups) != 1:
        result.notices += [_UNNAMED] if state else []
        return result
    entries = [state.get(i) for i in range(len(state))]
    if not all(isinstance(entry, Mapping) for entry in entries):
        result.notices.append(_UNNAMED)
        return result
    by_kind: dict[StateKind, list[SplitTensor] | None] = {
        kind: _by_parameter([entry.get(kind) for entry in entries], shapes, where)  # type: ignore[union-attr]
        for kind in MOMENTS
    }
    if masters is None:
        by_kind["master"] = [weights[name] for name in names]
    else:
        first = masters[0] if isinstance(masters, list) and masters else None
        by_kind["master"] = _by_parameter(first if isinstance(first, list) else [first], shapes, where)
    if any(kind is None for kind in by_kind.values()):
        result.notices.append(_UNNAMED)
        return result
    for kind, values in by_kind.items():
        result.states[kind] = dict(zip(names, values or (), strict=True))
    result.step = count(entries[0].get("step"))  # type: ignore[union-attr]
    return result


def _own_names(weights: Mapping[str, SplitTensor]) -> list[str]:
    """Names of parameters, tied ones once under their first name, as `module.parameters()` has them."""
    seen, names = set(), []
    for name, weight in weights.items():
        if weight.runs not in seen:
            names.append(name)
        if weight.runs:
            seen.add(weight.runs)
    return names


def _by_parameter(
    values: Sequence[Any], shapes: Mapping[str, tuple[int, ...]], where: Path
) -> list[SplitTensor] | None:
    """One tensor a parameter, whether the optimizer kept them so or all in one; None where they do not fit."""
    if any(value is None for value in values):
        return None
    stored = [tensor(value, "an optimizer's state", where) for value in values]
    expected = list(shapes.values())
    if [part.shape for part in stored] == expected:
        return stored
    sizes = [math.prod(shape) for shape in expected]
    if len(stored) != 1 or stored[0].size != sum(sizes):
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [stored[0].part(start, shape) for start, shape in zip(starts, expected, strict=True)]
