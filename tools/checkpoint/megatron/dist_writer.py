"""Writes Megatron's torch_dist format: chunks streamed into .distcp files, then the metadata that says where they lie.

The format belongs to no topology: any ranks read any chunks. Chunks are cut where tensor parallel ranks of the expected
layout are, so that each of them reads what it needs and no more.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.formats import (
    CheckpointPiece,
    CheckpointReader,
    CheckpointWriter,
    Source,
    StateKind,
    TrainingState,
    WriterOptions,
    states_of,
)
from dynapipe_ext.tools.checkpoint.megatron.dist_names import extra_state_keys, written_keys
from dynapipe_ext.tools.checkpoint.megatron.folder import finish_folder, iteration_name
from dynapipe_ext.tools.checkpoint.megatron.launch_options import launch_options, usage
from dynapipe_ext.tools.checkpoint.megatron.names import MegatronTensor, megatron_tensors
from dynapipe_ext.tools.checkpoint.megatron.shards import RankLayout, TensorPart, blocks, parts_of
from dynapipe_ext.tools.checkpoint.megatron.state import (
    arguments_of,
    chained_param_groups,
    grad_scaler,
    param_groups,
    writer_notices,
    written_kinds,
)
from dynapipe_ext.tools.files import write_atomic

_CHUNK_BYTES = 1 << 24  # of one chunk at most: every rank looks through the list of all chunks
_PREFIXES: Mapping[StateKind, tuple[str, ...]] = {
    "weight": ("",),
    "master": ("optimizer.state.fp32_param.", "optimizer.state.param."),  # of the two optimizers that keep one
    "exp_avg": ("optimizer.state.exp_avg.",),
    "exp_avg_sq": ("optimizer.state.exp_avg_sq.",),
}
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class MegatronDistWriter(CheckpointWriter):
    """Errors: ConfigError for a layout that the model cannot have."""

    def __init__(self, directory: Path, reader: CheckpointReader, options: WriterOptions) -> None:
        self.directory = directory
        self._reader, self._options = reader, options
        self._layout = RankLayout.of(reader.architecture, options)
        self._kinds = written_kinds(reader)
        _refuse_mixed(reader)
        self._state = reader.state if len(self._kinds) > 1 else None
        self._folder = directory / iteration_name(self._state)
        self._pieces = tuple(self._planned())
        self._launch_options = launch_options(self._layout, options, self._state, ("--ckpt-format", "torch_dist"))
        self.usage = usage(self._launch_options)
        self.notices = writer_notices(reader, self._layout, self._state)

    def pieces(self) -> Sequence[CheckpointPiece]:
        return self._pieces

    def _planned(self) -> Iterator[CheckpointPiece]:
        """A piece a layer, and one for what comes before, between and after them."""
        pending: list[TensorGroup] = []
        place: tuple[str, int] = ("", -1)
        number = 0
        for group in tensor_groups(self._reader.architecture):
            here = (group.side, group.layer)
            if pending and here != place:
                yield self._piece(number, pending)
                pending, number = [], number + 1
            place = here
            pending.append(group)
        yield self._piece(number, pending)

    def _piece(self, number: int, groups: Sequence[TensorGroup]) -> CheckpointPiece:
        return CheckpointPiece(f"{number:05d}", states_of(groups, self._kinds))

    def write(self, piece: CheckpointPiece, source: Source) -> Mapping[str, Any]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"__{int(piece.name)}_0.distcp"
        part = path.with_name(f".{path.name}.part")
        chunks: list[list[Any]] = []
        with part.open("wb") as file:
            for group, kind in piece.groups:
                chunks += self._write_group(file, group, kind, source)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        return {"file": path.name, "chunks": chunks}

    def _write_group(self, file: BinaryIO, group: TensorGroup, kind: StateKind, source: Source) -> Iterator[list[Any]]:
        """In a frame of its own, so that nothing of a group lives on while the next one is read."""
        parts = parts_of(self._layout.architecture, group, source(group, kind))
        for tensor in megatron_tensors(self._layout.architecture, group):
            own = [part for part in parts if part.tensor.name == tensor.name]
            yield from self._write_tensor(file, tensor, own, kind)

    def _write_tensor(
        self, file: BinaryIO, tensor: MegatronTensor, parts: Sequence[TensorPart], kind: StateKind
    ) -> Iterator[list[Any]]:
        """Per chunk: the tensor's name, kind, dtype, the chunk's begin and shape, its place and length in the file."""
        dtype = str(parts[0].values.dtype).removeprefix("torch.")
        axes = written_keys(self._layout.architecture, tensor)[0].index
        for (row, column), block in blocks(tensor, parts, self._layout.all_spans(tensor), _CHUNK_BYTES):
            begin = (row, column, *(0,) * block.dim())[: block.dim()]
            offset = file.tell()
            torch.save(block.view(*(1,) * len(axes), *block.shape), file)
            yield [tensor.name, kind, dtype, begin, tuple(block.shape), offset, file.tell() - offset]

    def finish(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        states = self._folder / f"__{len(self._pieces)}_0.distcp"
        with states.open("wb") as file:
            torch.save([None], file)
        metadata = self._metadata(records, _StorageInfo(states.name, 0, states.stat().st_size))
        with (self._folder / "common.pt").open("wb") as file:  # torch.save to a path would not say why it failed
            torch.save(self._common(), file)
        _write_pickle(self._folder / ".metadata", metadata)
        backends = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1,'
        write_atomic(
            self._folder / "metadata.json", f'{backends} "common_backend": "torch", "common_backend_version": 1}}'
        )
        finish_folder(self.directory, self._reader.files, self._state, self._launch_options, self._layout.num_ranks)

    def _metadata(self, records: Mapping[str, Mapping[str, Any]], states: _StorageInfo) -> Metadata:
        architecture = self._layout.architecture
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        tensors = {t.name: t for group in tensor_groups(architecture) for t in megatron_tensors(architecture, group)}
        for tensor in tensors.values():
            for name in extra_state_keys(architecture, tensor):
                entries[name] = BytesStorageMetadata()
                places[MetadataIndex(name)] = states
        for record in records.values():
            for name, kind, dtype, begin, shape, offset, num_bytes in record["chunks"]:
                info = _StorageInfo(record["file"], offset, num_bytes)
                for key, axes, stacked in self._keys(tensors[name], kind, dtype):
                    entry = entries.get(key)
                    if not isinstance(entry, TensorStorageMetadata):
                        properties = TensorProperties(dtype=getattr(torch, dtype))
                        size = torch.Size((*stacked, *self._layout.whole_shape(tensors[name])))
                        entry = entries[key] = TensorStorageMetadata(properties, size, [])
                    offsets = torch.Size((*axes, *begin))
                    sizes = torch.Size((*(1,) * len(axes), *shape))
                    entry.chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
                    places[MetadataIndex(key, offsets)] = info
        return Metadata(state_dict_metadata=entries, storage_data=places, storage_meta=StorageMeta())

    def _keys(
        self, tensor: MegatronTensor, kind: StateKind, dtype: str
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Keys of a chunk with the tensor's place along stacked axes and their lengths. One chunk serves all of them.

        The distributed optimizer asks for a master of fp32 weights, too, which is the weight.
        """
        prefixes = _PREFIXES[kind]
        if kind == "weight" and self._state is not None and dtype == "float32" and "master" not in self._kinds:
            prefixes = (*prefixes, *_PREFIXES["master"])
        for key in written_keys(self._layout.architecture, tensor):
            for prefix in prefixes:
                yield prefix + key.name, key.index, key.counts

    def _common(self) -> dict[str, Any]:
        training = self._state is not None
        common: dict[str, Any] = {
            "args": arguments_of(self._reader, self._layout, self._options, is_training=training),
            "checkpoint_version": 3.0,
            "iteration": self._state.iteration if self._state else 0,
            "content_metadata": dict(_CONTENT),
            **self._reader.megatron.progress,
        }
        if self._state is not None:
            common["opt_param_scheduler"] = dict(self._state.scheduler)
            common["optimizer"] = self._optimizer()
        return common

    def _optimizer(self) -> dict[Any, Any]:
        """Return one dictionary, or one per chained optimizer if experts are on ranks of their own."""
        assert self._state is not None
        if self._layout.ep == 1:
            return self._chained_optimizer(self._state, param_groups(self._state))
        chained = chained_param_groups(self._state, self._layout.architecture)
        return {number: self._chained_optimizer(self._state, groups) for number, groups in enumerate(chained)}

    def _chained_optimizer(self, state: TrainingState, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what the mixed-precision, the fp32 and the distributed optimizer each look for, side by side."""
        step = float(state.optimizer_step)
        inner = {
            "state": {"common_step": torch.tensor(step)},
            "param_groups": [{**group, "step": step} for group in groups],
        }
        optimizer: dict[str, Any] = {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
        if self._layout.architecture.dtype == "float32":
            optimizer |= {"state": inner["state"], "param_groups": inner["param_groups"]}
        if scaler := self._reader.megatron.grad_scaler:
            optimizer["grad_scaler"] = grad_scaler(scaler)
        return optimizer


def _refuse_mixed(reader: CheckpointReader) -> None:
    """Errors: DataError where layers that the format stacks into one tensor have weights of several types."""
    first: dict[str, tuple[str, torch.dtype]] = {}
    for group in tensor_groups(reader.architecture):
        dtype = reader.dtype(group, "weight")
        for tensor in megatron_tensors(reader.architecture, group):
            for key in written_keys(reader.architecture, tensor):
                other, expected = first.setdefault(key.name, (group.name, dtype))
                if dtype != expected:
                    raise DataError(
                        f"{group.name} is {dtype} but {other} is {expected}: this format stacks the layers' {key.name}"
                        " into one tensor of one type; use --to megatron-legacy, or convert the source to one type"
                    )


def _write_pickle(path: Path, value: Any) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        pickle.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
