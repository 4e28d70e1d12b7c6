"""Reads Megatron's legacy layout: mp_rank_XX[_YYY]/model_optim_rng.pt, a file a tensor and pipeline parallel rank.

Layers of Transformer Engine and local ones, virtual stages, and the optimizer's tensors that lie inside these files
(mixed precision and fp32; the distributed optimizer's own distrib_optim.pt is not read, and said so).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor, refuse_faults
from dynapipe_ext.tools.checkpoint.files.torch_file import ArchiveRecord
from dynapipe_ext.tools.checkpoint.formats import CheckpointReader, GroupTensors, StateKind
from dynapipe_ext.tools.checkpoint.megatron.folder import carried, read_architecture
from dynapipe_ext.tools.checkpoint.megatron.legacy_names import whole_name
from dynapipe_ext.tools.checkpoint.megatron.legacy_optimizer import RankOptimizer, optimizer_tensors
from dynapipe_ext.tools.checkpoint.megatron.legacy_writer import MegatronLegacyWriter as MegatronLegacyWriter
from dynapipe_ext.tools.checkpoint.megatron.names import (
    EMBEDDING,
    MegatronTensor,
    from_megatron,
    megatron_tensors,
    tied_head_name,
)
from dynapipe_ext.tools.checkpoint.megatron.pickles import read_archive, scalar
from dynapipe_ext.tools.checkpoint.megatron.shards import Box, RankLayout, assemble, rows_of
from dynapipe_ext.tools.checkpoint.megatron.state import read_contents
from dynapipe_ext.tools.checkpoint.recognition import RANK_FILES, RANK_FOLDER, iteration_folder, rank_files

_ADVICE = "Give the config.json that belongs to it, or the files of all ranks"
_SIDES = ("encoder", "decoder")


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's file: its place, and what it holds."""

    path: Path
    tp_rank: int
    pp_rank: int
    content: Mapping[str, Any]

    @property
    def models(self) -> list[Mapping[str, Any]]:
        """One, or one for each virtual stage."""
        names = sorted((n for n in self.content if re.fullmatch(r"model\d+", str(n))), key=lambda n: int(n[5:]))
        models = [self.content[name] for name in (names or ["model"]) if name in self.content]
        if not models or not all(isinstance(model, Mapping) for model in models):
            raise DataError(f"{self.path} holds no model: give a checkpoint with weights")
        return models


def open_checkpoint(path: Path) -> MegatronLegacyReader:
    """Errors: DataError naming the file and what is wrong with it."""
    return MegatronLegacyReader(iteration_folder(path))


class MegatronLegacyReader(CheckpointReader):
    """Of one iteration's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ranks = _read_ranks(folder)
        self._tp = 1 + max(rank.tp_rank for rank in ranks)
        contents = read_contents(ranks[0].content)
        self.megatron = contents.megatron
        _refuse_other_versions(folder, ranks[0].content)
        self.state = contents.state
        self.files = carried(folder)
        self._faults: list[str] = []
        stages = _stages(ranks)
        embedding = next((m[EMBEDDING] for _, m in stages if isinstance(m.get(EMBEDDING), StoredTensor)), None)
        self.architecture, notices = read_architecture(
            folder, self.files, contents.told, embedding.dtype if embedding else None
        )
        self._layout = self._found_layout(embedding)
        self._tensors = {
            t.name: t for g in tensor_groups(self.architecture) for t in megatron_tensors(self.architecture, g)
        }
        self._copies: list[StoredTensor] = []
        self._places: dict[StateKind, dict[str, dict[int, StoredTensor]]] = {"weight": {}}
        optimizers = []
        for rank, named in self._named(ranks, stages):
            self._take(rank, named)
            added = frozenset(name for name in named if name in self._tensors and self._tensors[name].is_added)
            trained = {n: t for n, t in named.items() if n not in self._tensors or not self._tensors[n].is_buffer}
            optimizers.append(RankOptimizer(rank.path, rank.tp_rank, trained, rank.content.get("optimizer"), added))
        tensors_by_kind, why = optimizer_tensors(optimizers)
        self._places |= {kind: self._without_copies(tensors) for kind, tensors in tensors_by_kind.items()}
        self.kinds: tuple[StateKind, ...] = tuple(self._places)
        self.notices = (*notices, *contents.notices, *why)

    def check(self) -> None:
        """Errors: DataError naming every missing, extra and misshapen tensor; and copies of one that differ."""
        faults = list(self._faults)
        for kind, places in self._places.items():
            for tensor in self._tensors.values():
                by_rank = places.get(tensor.name, {})
                has_none = tensor.is_added or tensor.is_buffer or (kind == "master" and self._is_fp32(tensor))
                if not by_rank and kind != "weight" and has_none:
                    continue
                where = "" if kind == "weight" else f" ({kind})"
                shape = list(self._layout.local_shape(tensor))
                faults += [
                    f"{tensor.name} {shape}{where} of tensor parallel rank {rank} is missing"
                    for rank in range(self._tp)
                    if rank not in by_rank
                ]
                faults += self._misshapen(tensor, by_rank)
        refuse_faults(self.folder, faults, _ADVICE)
        embedding = self._places["weight"][EMBEDDING]
        self._say_differing_copies()
        for rank, copy in enumerate(self._copies):
            if not copy.equals(embedding[rank]):
                raise DataError(
                    f"{copy.path} holds a copy of the tied embedding that differs from {embedding[rank].path}: the"
                    " model is not tied, or one of the files is of another checkpoint"
                )

    def _say_differing_copies(self) -> None:
        """Weights that no rank cuts are the same on all; where training let them drift apart, that is said."""
        names = []
        for tensor in self._tensors.values():
            first, *others = self._places["weight"][tensor.name].values()
            if tensor.tp_dim is None and not all(other.equals(first) for other in others):
                names.append(tensor.name)
        if names:
            self.notices += (
                f"{len(names)} weights that every tensor parallel rank holds differ between them, like {names[0]}:"
                " those of rank 0 are taken",
            )

    def dtype(self, group: TensorGroup, kind: StateKind) -> torch.dtype:
        name = megatron_tensors(self.architecture, group)[0].name
        by_rank = self._places[kind].get(name) or self._places["weight"].get(name)
        if not by_rank:
            raise DataError(f"{self.folder} lacks {name}: copy it again")
        return next(iter(by_rank.values())).dtype

    def read(self, group: TensorGroup, kind: StateKind) -> GroupTensors:
        expected = megatron_tensors(self.architecture, group)
        return from_megatron(self.architecture, group, {tensor.name: self._read(tensor, kind) for tensor in expected})

    def _read(self, tensor: MegatronTensor, kind: StateKind) -> torch.Tensor:
        by_rank = self._places[kind].get(tensor.name)
        if by_rank is None and kind == "master":  # a weight that is trained in fp32 has no copy
            by_rank = self._places["weight"].get(tensor.name)
        if not by_rank and tensor.is_added and kind != "weight":
            return torch.zeros(tensor.shape)  # not trained: published models have none
        if not by_rank or (tensor.tp_dim is not None and len(by_rank) < self._tp):
            raise DataError(f"{self.folder} lacks {tensor.name} ({kind}): give the files of all ranks")
        boxes: list[Box] = []
        for rank in sorted(by_rank) if tensor.tp_dim is not None else sorted(by_rank)[:1]:
            boxes += self._boxes(tensor, rank, by_rank[rank])
        return assemble(tensor.name, tensor.shape, boxes, clip_rows=tensor.vocabulary)

    def _boxes(self, tensor: MegatronTensor, rank: int, stored: StoredTensor) -> Iterator[Box]:
        row = 0
        for begin, end in self._layout.spans(tensor, rank):
            if tensor.tp_dim == 1:
                yield Box((0, begin), stored)
            else:
                yield Box((begin, *(0,) * (len(tensor.shape) - 1)), rows_of(stored, row, row + end - begin))
                row += end - begin

    def _found_layout(self, embedding: StoredTensor | None) -> RankLayout:
        """The files' layout: the vocabulary's padding is what the embedding has."""
        rows = embedding.shape[0] * self._tp if embedding is not None and embedding.shape else 0
        return RankLayout(
            self.architecture, self._tp, (self.architecture.total_layers,), max(rows, self.architecture.vocab_size)
        )

    def _named(
        self, ranks: Sequence[_Rank], stages: Sequence[tuple[_Rank, Mapping[str, Any]]]
    ) -> Iterator[tuple[_Rank, dict[str, StoredTensor]]]:
        """Each rank's parameters in the order of its file, by their names in the whole model."""
        named: dict[int, dict[str, StoredTensor]] = {id(rank): {} for rank in ranks}
        aliases = {
            alias: tensor.name
            for group in tensor_groups(self.architecture)
            for tensor in megatron_tensors(self.architecture, group)
            for alias in tensor.aliases
        }
        for tp_rank in range(self._tp):
            first = dict.fromkeys(_SIDES, 0)
            for rank, model in stages:
                if rank.tp_rank != tp_rank:
                    continue
                counts = dict.fromkeys(_SIDES, 0)
                for name, value in model.items():
                    if str(name).endswith("_extra_state"):
                        continue
                    if match := re.match(r"(encoder|decoder)\.layers\.(\d+)\.", str(name)):
                        counts[match[1]] = max(counts[match[1]], int(match[2]) + 1)
                    whole = whole_name(str(name), first)
                    whole = aliases.get(whole, whole)
                    if isinstance(value, StoredTensor):
                        named[id(rank)].setdefault(whole, value)
                    else:
                        self._faults.append(f"{name} of {rank.path} is no tensor")
                first = {side: first[side] + counts[side] for side in _SIDES}
        for rank in ranks:
            yield rank, named[id(rank)]

    def _take(self, rank: _Rank, named: Mapping[str, StoredTensor]) -> None:
        for name, stored in named.items():
            if name not in self._tensors:
                if self._is_tied_copy(name):
                    self._copies.append(stored)
                else:
                    self._faults.append(f"{name} {list(stored.shape)} of {rank.path.parent.name} is extra")
                continue
            places = self._places["weight"].setdefault(name, {})
            if rank.tp_rank in places:
                self._faults.append(
                    f"{name} of {rank.path.parent.name} is in {places[rank.tp_rank].path.parent.name}, too"
                )
            places[rank.tp_rank] = stored

    def _is_tied_copy(self, name: str) -> bool:
        return self.architecture.tied_embeddings and name == tied_head_name(self.architecture)

    def _without_copies(self, tensors: Mapping[str, dict[int, StoredTensor]]) -> dict[str, dict[int, StoredTensor]]:
        return {name: by_rank for name, by_rank in tensors.items() if not self._is_tied_copy(name)}

    def _is_fp32(self, tensor: MegatronTensor) -> bool:
        by_rank = self._places["weight"].get(tensor.name, {})
        return bool(by_rank) and all(stored.dtype == torch.float32 for stored in by_rank.values())

    def _misshapen(self, tensor: MegatronTensor, by_rank: Mapping[int, StoredTensor]) -> list[str]:
        expected = self._layout.local_shape(tensor)
        return [
            f"{tensor.name} of {stored.path.parent.name} is {list(stored.shape)}, not {list(expected)}"
            for stored in by_rank.values()
            if stored.shape != expected
        ]


def _read_ranks(folder: Path) -> list[_Rank]:
    """Every rank's file, in the order of stages, then of tensor parallel ranks."""
    ranks = []
    for path in rank_files(folder):
        match = RANK_FOLDER.fullmatch(path.parent.name)
        if match is None:
            raise DataError(f"{path.parent} is of expert parallel ranks, which are not read: save it with torch_dist")
        content = read_archive(ArchiveRecord(path))
        if not isinstance(content, Mapping):
            raise DataError(f"{path} holds {type(content).__name__} where a dictionary is needed: copy it again")
        ranks.append(_Rank(path, int(match[1]), int(match[2] or 0), content))
    if not ranks:
        raise DataError(f"{folder} holds no mp_rank_XX/{RANK_FILES[0]}: give the folder of an iteration")
    ranks.sort(key=lambda rank: (rank.pp_rank, rank.tp_rank))
    tp, pp = 1 + max(rank.tp_rank for rank in ranks), 1 + max(rank.pp_rank for rank in ranks)
    have = {(rank.tp_rank, rank.pp_rank) for rank in ranks}
    lacking = [f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp > 1) for p in range(pp) for t in range(tp) if (t, p) not in have]
    arguments = ranks[0].content.get("args")
    saved_sizes = [getattr(arguments, f"{kind}_model_parallel_size", None) for kind in ("tensor", "pipeline")]
    if lacking or any(
        isinstance(size, int) and size != num_ranks for size, num_ranks in zip(saved_sizes, (tp, pp), strict=True)
    ):
        what = (
            f"lacks {', '.join(lacking)}"
            if lacking
            else f"was written by tp {saved_sizes[0]} x pp {saved_sizes[1]} ranks, not {tp} x {pp}"
        )
        raise DataError(f"{folder} {what}: give the files of all ranks")
    return ranks


def _stages(ranks: Sequence[_Rank]) -> list[tuple[_Rank, Mapping[str, Any]]]:
    """Models in the order of the forward pass: virtual stages go round the pipeline. For each, all tensor ranks."""
    rounds = max(len(rank.models) for rank in ranks)
    if any(len(rank.models) != rounds for rank in ranks):
        raise DataError(f"{ranks[0].path.parent.parent}: ranks hold different numbers of virtual stages: copy it again")
    stages = [(rank, rank.models[i]) for i in range(rounds) for rank in ranks]
    for rank, model in stages:
        if "language_model" in model or any(str(name).startswith("language_model.") for name in model):
            raise DataError(f"{rank.path} is older than megatron-core (language_model): save it with mcore models")
        if any(re.search(r"\.mlp\.experts\.weight[12]$", str(name)) for name in model):
            raise DataError(
                f"{rank.path} holds the experts of a layer in one tensor (GroupedMLP), which is not read: save it with"
                " --ckpt-format torch_dist"
            )
    return stages


def _refuse_other_versions(folder: Path, content: Mapping[str, Any]) -> None:
    arguments = content.get("args")
    size = getattr(arguments, "expert_model_parallel_size", 1) if isinstance(arguments, argparse.Namespace) else 1
    if isinstance(size, int) and size > 1:
        raise DataError(f"{folder} is of {size} expert parallel ranks, which are not read: save it with torch_dist")
    version = scalar(content.get("checkpoint_version"), 3.0)
    if version < 2:
        raise DataError(
            f"{folder}: checkpoint_version is {version}, whose queries, keys and values lie in another order: load it"
            " in Megatron and save it again"
        )
