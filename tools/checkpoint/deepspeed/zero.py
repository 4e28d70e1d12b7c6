"""ZeRO's partitioned optimizer files: every rank's flat fp32 slices, put together by name.

Stages 1 and 2 cut the parameters of a group, laid end to end, into one slice a rank; padding lies at the end of the
group (or, where `parameter_alignment` was set, behind each parameter). Stage 3 cuts every parameter on its own: rank r
holds values r * ceil(n / ranks) and on, padded to equal slices. (DeepSpeed 0.19: runtime/zero, utils/zero_to_fp32.py.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import DataError, short
from dynapipe_ext.tools.checkpoint.deepspeed.contents import (
    FP32_KINDS,
    MOMENTS,
    count,
    items,
    mapping,
    named,
    parameter_groups,
    ranks_of,
    shape,
    tensor,
)
from dynapipe_ext.tools.checkpoint.deepspeed.file import SplitTensor, joined_pieces, read_deepspeed_tree
from dynapipe_ext.tools.checkpoint.formats import StateKind

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class ZeroState:
    """What the optimizer files of one module hold, by the module's names."""

    stage: int
    num_ranks: int
    states: dict[StateKind, dict[str, SplitTensor]]
    step: int = 0
    groups: tuple[Mapping[str, Any], ...] = ()
    notices: list[str] = field(default_factory=list)
    has_optimizer: bool = True  # else the masters are the weights, written for stage 3 to load


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's optimizer file. `slices[kind][group]` is flat; a kind is absent where the optimizer had none."""

    path: Path
    slices: Mapping[StateKind, Sequence[SplitTensor]]
    entries: Sequence[Mapping[Any, Any]]


def read_zero(model: Mapping[Any, Any], where: Path, files: Mapping[tuple[int, ...], Path]) -> ZeroState:
    """From a model file's tree (`where`) and the optimizer files of its ranks, by (rank, ...).

    Errors: DataError for absent ranks, experts, sizes that do not add up and fields that DeepSpeed does not write.
    """
    first_path = next(iter(files.values()))
    first = mapping(read_deepspeed_tree(first_path), "optimizer_state_dict", first_path)
    stage = first.get("zero_stage", 1)  # the bf16 optimizer, which is stage 1, does not say
    if stage not in (1, 2, 3):
        raise DataError(f"{first_path}: ZeRO stage {short(stage)} is not known: stages 1, 2 and 3 are")
    counts = first.get("partition_count")
    counts = set(counts) if isinstance(counts, list) else {counts}
    if first.get("ds_zero_partition_groups") or len(counts) != 1 or not all(type(n) is int and n > 0 for n in counts):
        raise DataError(
            f"{first_path}: its groups are cut over {short(sorted(map(str, counts)))} ranks: expert parallelism is not"
            " supported; save the model without it"
        )
    num_ranks = counts.pop()
    paths = ranks_of(files, num_ranks, "optimizer states", where.parent)
    trees = [
        first if path == first_path else mapping(read_deepspeed_tree(path), "optimizer_state_dict", path)
        for path in paths
    ]
    shapes = _shapes(model, where)
    ranks = [_rank(path, tree, stage, len(shapes)) for path, tree in zip(paths, trees, strict=True)]
    kinds = [kind for kind in FP32_KINDS if all(kind in rank.slices for rank in ranks)]
    result = ZeroState(stage, num_ranks, {kind: {} for kind in kinds})
    cut = _by_parameter if stage == 3 else _by_group
    for kind in kinds:
        cut(kind, ranks, shapes, _paddings(first, shapes, first_path), result.states[kind])
    result.groups = parameter_groups(items(_optimizer(first, stage, first_path), "param_groups", first_path))
    result.step = _step(ranks[0], first)
    result.notices += _what_is_left(ranks[0], kinds)
    return result


def _shapes(model: Mapping[Any, Any], where: Path) -> list[Shapes]:
    groups = items(model, "param_shapes", where)
    shapes: list[Shapes] = []
    for group in groups:
        if not isinstance(group, Mapping):
            raise DataError(f"{where}: field 'param_shapes' has {short(group)} where a mapping must be")
        shapes.append({str(name): shape(value, str(name), where) for name, value in group.items()})
    return shapes


def _paddings(tree: Mapping[Any, Any], shapes: Sequence[Shapes], where: Path) -> list[list[int]]:
    """Values of padding behind each parameter of each group."""
    if tree.get("param_alignment_paddings") is None:
        return [[0] * len(group) for group in shapes]
    paddings = [list(group) for group in items(tree, "param_alignment_paddings", where)]
    if [len(group) for group in paddings] != [len(group) for group in shapes]:
        raise DataError(f"{where}: field 'param_alignment_paddings' does not have one number for each parameter")
    return paddings


def _optimizer(tree: Mapping[Any, Any], stage: int, where: Path) -> Mapping[Any, Any]:
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    value = tree.get(key)
    if isinstance(value, list):  # "elastic": a state for each group and nothing else
        return {"state": dict(enumerate(value)), "param_groups": []}
    return mapping(tree, key, where)


def _rank(path: Path, tree: Mapping[Any, Any], stage: int, num_shapes: int) -> _Rank:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    masters = [_flat(value, f"{key}[{i}]", path) for i, value in enumerate(items(tree, key, path))]
    if stage < 3 and len(masters) != num_shapes:
        raise DataError(f"{path}: {len(masters)} groups of masters but the model file has {num_shapes}")
    state = mapping(_optimizer(tree, stage, path), "state", path)
    raw = [state.get(i) for i in range(len(masters))]
    entries: list[Mapping[Any, Any]] = [entry if isinstance(entry, Mapping) else {} for entry in raw]
    slices: dict[StateKind, list[SplitTensor]] = {"master": masters}
    for kind in MOMENTS:
        if entries and all(kind in entry for entry in entries):
            flat = [_flat(entry[kind], f"{kind} of group {i}", path) for i, entry in enumerate(entries)]
            # Masters were saved without the padding at the end of the group, moments with it.
            slices[kind] = [one.part(0, (master.size,)) for one, master in zip(flat, masters, strict=True)]
    return _Rank(path, slices, entries)


def _flat(value: Any, what: str, where: Path) -> SplitTensor:
    stored = tensor(value, what, where)
    return stored.part(0, (stored.size,))


def _by_group(
    kind: StateKind,
    ranks: Sequence[_Rank],
    shapes: Sequence[Shapes],
    paddings: Sequence[Sequence[int]],
    tensors: dict[str, SplitTensor],
) -> None:
    for i, (group, gaps) in enumerate(zip(shapes, paddings, strict=True)):
        slices = [rank.slices[kind][i] for rank in ranks]
        whole = joined_pieces(slices, (sum(part.size for part in slices),))
        needed = sum(math.prod(size) for size in group.values()) + sum(gaps)
        alignment = 2 * len(ranks)  # as zero_to_fp32: groups end on a multiple, with or without their padding
        if not math.ceil(needed / alignment) == math.ceil(whole.size / alignment):
            raise DataError(
                f"{ranks[0].path.parent}: group {i} has {whole.size} values of {kind} over {len(ranks)} ranks but its"
                f" parameters need {needed}: files of two checkpoints are mixed; copy the folder again"
            )
        start = 0
        for (name, size), gap in zip(group.items(), gaps, strict=True):
            tensors[name] = whole.part(start, size)
            start += math.prod(size) + gap


def _by_parameter(
    kind: StateKind,
    ranks: Sequence[_Rank],
    shapes: Sequence[Shapes],
    _paddings: Sequence[Sequence[int]],
    tensors: dict[str, SplitTensor],
) -> None:
    everything = {name: size for group in shapes for name, size in group.items()}
    slices = {name: -(-math.prod(size) // len(ranks)) for name, size in everything.items()}
    needed = sum(slices.values())
    wholes = []
    for rank in ranks:
        parts = rank.slices[kind]
        if sum(part.size for part in parts) != needed:
            raise DataError(
                f"{rank.path} has {sum(part.size for part in parts)} values of {kind} but the parameters need {needed}"
                f" on each of {len(ranks)} ranks: files of two checkpoints are mixed; copy the folder again"
            )
        wholes.append(joined_pieces(parts, (needed,)))
    start = 0
    for name, size in everything.items():
        length = slices[name]
        padded = joined_pieces([whole.part(start, (length,)) for whole in wholes], (length * len(ranks),))
        tensors[name] = padded.part(0, size)
        start += length


def _step(rank: _Rank, tree: Mapping[Any, Any]) -> int:
    """Adam's step, by which it corrects its bias."""
    candidates = [entry.get("step") for entry in rank.entries] + [tree.get("base_optimizer_state_step")]
    return next((count(value) for value in candidates if value is not None), 0)


def _what_is_left(rank: _Rank, kinds: Sequence[StateKind]) -> list[str]:
    carried = {"step", *MOMENTS}
    other = sorted({str(key) for entry in rank.entries for key in entry} - carried)
    notices = []
    if other:
        notices.append(f"the optimizer's {named(other)} are not Adam's moments and stay behind")
    if not set(MOMENTS) <= set(kinds):
        notices.append("the optimizer has no moments of Adam: its fp32 masters alone are carried")
    return notices
