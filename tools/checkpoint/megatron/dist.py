"""Reads Megatron's `dist_checkpointing` format torch_dist: any chunks, layers stacked or apart, experts fused or apart.

What lies where is told by .metadata; chunks are read by their place in the .distcp files, so no model is built. The
optimizer's tensors are those of the mixed-precision, the fp32 and the fully reshardable distributed optimizer.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor, refuse_faults
from dynapipe_ext.tools.checkpoint.files.torch_file import ArchiveRecord, read_pickle
from dynapipe_ext.tools.checkpoint.formats import CheckpointReader, GroupTensors, StateKind
from dynapipe_ext.tools.checkpoint.megatron.dist_names import StoredKey, extra_state, keys_of
from dynapipe_ext.tools.checkpoint.megatron.dist_writer import MegatronDistWriter as MegatronDistWriter
from dynapipe_ext.tools.checkpoint.megatron.folder import carried, read_architecture
from dynapipe_ext.tools.checkpoint.megatron.names import EMBEDDING, MegatronTensor, from_megatron, megatron_tensors
from dynapipe_ext.tools.checkpoint.megatron.pickles import read_archive, read_tensor_record
from dynapipe_ext.tools.checkpoint.megatron.shards import Box, assemble, inner
from dynapipe_ext.tools.checkpoint.megatron.state import read_contents
from dynapipe_ext.tools.checkpoint.recognition import COMMON, DIST_CONFIG, METADATA, iteration_folder

_STATE_KEYS: dict[str, StateKind] = {
    "fp32_param": "master",
    "param": "master",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
}
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_BUFFERS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_KNOWN_OBJECTS = re.compile(r"(?:rng_state|rerun_state_machine_state|dataloader_state)\b")
_ADVICE = "Give the config.json that belongs to it, or the whole checkpoint"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a tensor: its first value's place, its shape, and its record."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    record: ArchiveRecord


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint by its own key."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    by_layer: Mapping[int, Sequence[Chunk]] = field(default_factory=dict)  # where each chunk is of one layer

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, chunks: Sequence[Chunk]) -> Stored:
        by_layer: dict[int, list[Chunk]] = {}
        if len(shape) > 1 and all(chunk.shape[0] == 1 for chunk in chunks):
            for chunk in chunks:
                by_layer.setdefault(chunk.begin[0], []).append(chunk)
        return cls(shape, dtype, tuple(chunks), by_layer)


def open_checkpoint(path: Path) -> MegatronDistReader:
    """Errors: DataError naming the file and what is wrong with it."""
    return MegatronDistReader(iteration_folder(path))


class MegatronDistReader(CheckpointReader):
    """Of one iteration's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _refuse_backend(folder)
        self._stored, objects = _read_metadata(folder)
        common = read_archive(ArchiveRecord(folder / COMMON)) if (folder / COMMON).is_file() else {}
        if not isinstance(common, Mapping):
            raise DataError(
                f"{folder / COMMON} holds {type(common).__name__} where a dictionary is needed: copy it again"
            )
        contents = read_contents(common)
        self.megatron = contents.megatron
        self.files = carried(folder)
        embedding = self._stored.get(EMBEDDING)
        self.architecture, notices = read_architecture(
            folder, self.files, contents.told, embedding.dtype if embedding else None
        )
        self._groups = tensor_groups(self.architecture)
        self._doubles: set[str] = set()
        self._optimizer, faults = self._optimizer_tensors()
        self._faults: list[str] = []
        self._places: dict[StateKind, dict[str, _Found]] = {}
        for kind in self._kinds_found():
            self._places[kind] = self._find(kind)
        self.kinds: tuple[StateKind, ...] = tuple(self._places)
        self.state = contents.state
        self.notices = (*notices, *contents.notices, *faults, *_object_notices(objects))

    def check(self) -> None:
        """Errors: DataError naming every missing, extra and misshapen tensor."""
        used = {key.name for places in self._places.values() for place in places.values() for key in place.keys}
        used |= {key.name for places in self._places.values() for place in places.values() for key in place.others}
        extra = [
            f"{name} {list(stored.shape)} is extra"
            for name, stored in self._stored.items()
            if name not in used | self._doubles and not _BUFFERS.match(name) and not self._is_other_optimizer(name)
        ]
        refuse_faults(self.folder, self._faults + extra, _ADVICE)

    def dtype(self, group: TensorGroup, kind: StateKind) -> torch.dtype:
        tensor = megatron_tensors(self.architecture, group)[0]
        place = self._places[kind].get(tensor.name) or self._places["weight"].get(tensor.name)
        if place is None:
            raise DataError(f"{self.folder} lacks {tensor.name}: copy it again")
        return self._stored[place.keys[0].name].dtype

    def read(self, group: TensorGroup, kind: StateKind) -> GroupTensors:
        expected = megatron_tensors(self.architecture, group)
        return from_megatron(self.architecture, group, {tensor.name: self._read(tensor, kind) for tensor in expected})

    def _read(self, tensor: MegatronTensor, kind: StateKind) -> torch.Tensor:
        place = self._places[kind].get(tensor.name)
        if place is None and kind == "master":  # a weight that is trained in fp32 has no copy
            place = self._places["weight"].get(tensor.name)
        if place is None and tensor.is_added and kind != "weight":
            return torch.zeros(tensor.shape)  # not trained: published models have none
        if place is None:
            raise DataError(f"{self.folder} lacks {tensor.name} ({kind}): copy it again")
        boxes = []
        for key in place.keys:
            stored = self._stored[key.name]
            if len(stored.shape) == len(key.index) + len(tensor.shape) + 1:
                return _unflatten(tensor, stored, key)
            boxes += _boxes(key, stored)
        return assemble(tensor.name, tensor.shape, boxes, clip_rows=tensor.vocabulary)

    def _optimizer_tensors(self) -> tuple[dict[StateKind, dict[str, str]], tuple[str, ...]]:
        """Keys of the optimizer's tensors by kind and the weight's key; and what of it is not carried."""
        by_kind: dict[StateKind, dict[str, str]] = {}
        others: set[str] = set()
        for name in self._stored:
            if match := _OPTIMIZER.fullmatch(name):
                kind = _STATE_KEYS.get(match[1])
                if kind is None:
                    others.add(match[1])
                elif match[2] in by_kind.setdefault(kind, {}):  # fp32_param and param, for the two optimizers with one
                    self._doubles.add(name)
                else:
                    by_kind[kind][match[2]] = name
        notices = []
        if others:
            notices.append(f"the optimizer's {', '.join(sorted(others))} are not Adam's and are not carried")
        if any(_BUFFERS.match(name) for name in self._stored):
            notices.append(
                "the optimizer's state lies in buffers of the distributed optimizer (dp_reshardable) and is not"
                " carried: save with --dist-ckpt-optim-fully-reshardable to have it converted"
            )
        return by_kind, tuple(notices)

    def _is_other_optimizer(self, name: str) -> bool:
        match = _OPTIMIZER.fullmatch(name)
        return match is not None and match[1] not in _STATE_KEYS

    def _kinds_found(self) -> tuple[StateKind, ...]:
        return ("weight", *(kind for kind in ("master", "exp_avg", "exp_avg_sq") if kind in self._optimizer))

    def _find(self, kind: StateKind) -> dict[str, _Found]:
        """Where each tensor of a kind lies; what is wrong goes to the faults."""
        names = {name: name for name in self._stored if not _OPTIMIZER.fullmatch(name)} if kind == "weight" else {}
        names = names or self._optimizer.get(kind, {})
        places = {}
        for group in self._groups:
            for tensor in megatron_tensors(self.architecture, group):
                options = keys_of(self.architecture, tensor)
                present = [keys for keys in options if all(key.name in names for key in keys)]
                if present:
                    one, *rest = [tuple(replace(key, name=names[key.name]) for key in keys) for keys in present]
                    places[tensor.name] = _Found(one, tuple(key for keys in rest for key in keys))
                    self._faults += self._misshapen(tensor, one)
                elif kind == "weight" or not (
                    tensor.is_added or tensor.is_buffer or (kind == "master" and self._is_fp32(tensor))
                ):
                    where = "" if kind == "weight" else f" ({kind})"
                    self._faults.append(f"{tensor.name} {list(tensor.shape)}{where} is missing")
        return places

    def _is_fp32(self, tensor: MegatronTensor) -> bool:
        weight = self._places["weight"].get(tensor.name)
        return weight is not None and self._stored[weight.keys[0].name].dtype == torch.float32

    def _misshapen(self, tensor: MegatronTensor, keys: Sequence[StoredKey]) -> list[str]:
        faults = []
        for key in keys:
            shape, expected = self._stored[key.name].shape, (*key.counts, *key.shape)
            if tensor.vocabulary and len(shape) == len(expected) and shape[0] >= expected[0]:
                expected = (shape[0], *expected[1:])
            flat = len(shape) == len(expected) + 1 and math.prod(shape) == math.prod(expected)
            if shape != expected and not flat:
                faults.append(f"{key.name} is {list(shape)}, not {list(expected)}")
        return faults


@dataclass(frozen=True, slots=True)
class _Found:
    keys: tuple[StoredKey, ...]
    others: tuple[StoredKey, ...]  # the same tensor under further names


def _tensor(stored: Stored, chunk: Chunk) -> StoredTensor:
    tensor = read_tensor_record(chunk.record)
    if tensor.shape != chunk.shape or tensor.dtype != stored.dtype:
        raise DataError(
            f"{chunk.record.path} holds {tensor.dtype} {list(tensor.shape)} at byte {chunk.record.offset:,} where"
            f" .metadata says {stored.dtype} {list(chunk.shape)}: copy the checkpoint again"
        )
    return tensor


def _boxes(key: StoredKey, stored: Stored) -> list[Box]:
    """The chunks that hold values of one layer (and expert) of a stacked tensor."""
    axes = len(key.index)
    boxes = []
    chunks = stored.by_layer.get(key.index[0], ()) if key.index and stored.by_layer else stored.chunks
    for chunk in chunks:
        inside = [i - begin for i, begin in zip(key.index, chunk.begin, strict=False)]
        if all(0 <= i < length for i, length in zip(inside, chunk.shape, strict=False)):
            begin = chunk.begin[axes:]
            boxes.append(Box((begin[0] + key.first_row, *begin[1:]), inner(_tensor(stored, chunk), inside)))
    return boxes


def _unflatten(tensor: MegatronTensor, stored: Stored, key: StoredKey) -> torch.Tensor:
    """A tensor that an older distributed optimizer wrote as a grid of shards, each of them flat: the shards, put back.

    Its shape is the grid's, then the number of values of a shard.
    """
    axes = len(key.index)
    grid, size = stored.shape[axes:-1], math.prod(stored.shape[axes:])
    padded = (size // math.prod(tensor.shape[1:]), *tensor.shape[1:])
    shard = tuple(length // count for length, count in zip(padded, grid, strict=True))
    if math.prod(shard) != stored.shape[-1] or padded[0] < tensor.shape[0]:
        raise DataError(f"{key.name} is {list(stored.shape)}, which is no grid of shards of {list(tensor.shape)}")
    whole = torch.empty(padded, dtype=stored.dtype)
    for place in itertools.product(*map(range, grid)):
        flat = _boxes(replace(key, index=(*key.index, *place), first_row=0), stored)
        values = assemble(key.name, (stored.shape[-1],), flat, clip_rows=False).view(shard)
        whole[tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, shard, strict=True))] = values
    return whole[: tensor.shape[0]]


def _refuse_backend(folder: Path) -> None:
    path = folder / DIST_CONFIG
    if not path.is_file():
        return
    try:
        backend = json.loads(path.read_text(encoding="utf-8")).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({error}): copy the checkpoint again") from error
    if backend != "torch_dist":
        raise DataError(f"{path}: sharded_backend is {backend!r}; only torch_dist is read: save it again with it")


def _read_metadata(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """The tensors by key, and the keys of other objects. Errors: DataError."""
    path = folder / METADATA
    metadata = read_pickle(path)
    tensors: dict[str, Stored] = {}
    objects: list[str] = []
    try:
        places = {}
        for index, info in metadata["storage_data"].items():
            offset = index.state.get("offset")
            places[index["fqn"], tuple(offset) if offset is not None else None] = _record(folder, info)
        for name, entry in metadata["state_dict_metadata"].items():
            if not entry.qualified.endswith(".TensorStorageMetadata"):
                objects.append(name)
                continue
            chunks = tuple(
                Chunk(tuple(chunk["offsets"]), tuple(chunk["sizes"]), places[name, tuple(chunk["offsets"])])
                for chunk in entry["chunks"]
            )
            tensors[name] = Stored.of(tuple(entry["size"]), entry["properties"].state[0], chunks)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} does not describe a checkpoint ({type(error).__name__}: {error}): copy it again"
        ) from error
    return tensors, objects


def _record(folder: Path, info: Any) -> ArchiveRecord:
    relative = Path(info["relative_path"])
    if relative.is_absolute() or ".." in relative.parts:
        raise DataError(f"{folder / METADATA} names {relative}, outside the checkpoint: copy it again")
    if info.state.get("transform_descriptors"):
        raise DataError(f"{folder / relative} is compressed or encrypted: save the checkpoint without extensions")
    return ArchiveRecord(folder / relative, int(info["offset"]), int(info["length"]))


def _object_notices(objects: Sequence[str]) -> tuple[str, ...]:
    others = sorted({
        name.partition("/")[0]
        for name in objects
        if not extra_state(name) and not _KNOWN_OBJECTS.match(name) and not _BUFFERS.match(name)
    })  # fmt: skip
    return (f"the checkpoint also holds objects that are not carried: {', '.join(others)}",) if others else ()
