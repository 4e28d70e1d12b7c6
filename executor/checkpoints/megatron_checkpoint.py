"""Megatron's torch_dist: a rank's tensors, and all ranks' checkpoint together."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
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

from dynapipe_ext.durable_files import checksum
from dynapipe_ext.errors import DataError, named_collectives
from dynapipe_ext.executor.checkpoints import folder as folders
from dynapipe_ext.executor.checkpoints.folder import Manifest, RunState, SavedTensor, StoredChunk
from dynapipe_ext.executor.checkpoints.saving import (
    NO_FAULT,
    SavingRanks,
    WriteFault,
    new_manifest,
    open_checkpoint,
)
from dynapipe_ext.executor.device import gather_json
from dynapipe_ext.executor.protocols import OptimizerPlace
from dynapipe_ext.executor.stages.megatron.optimizer import SHARDING, MegatronOptimizer
from dynapipe_ext.executor.stages.megatron.stage import Chunks
from dynapipe_ext.settings.tables import CheckpointSettings

METADATA = ".metadata"
_Rows = list[list[Any]]  # key, dtype ("" for an object), whole shape, chunk's begin, chunk's shape, offset, bytes


class TensorWriter(AsyncSaveShardedStrategy):  # type: ignore[misc]
    """megatron-core's save strategy of one checkpoint: this rank's shards, one after the other, in one file.

    `async_save` gives the writing as a request; with `copy_first` it copies the shards to memory at once, so that
    weights may change meanwhile. After it `finish`, on all ranks, says whether all of them could.
    """

    def __init__(self, *, copy_first: bool = False) -> None:
        super().__init__("torch_dist", 1)
        self._copy_first = copy_first
        self._file = f"__{dist.get_rank()}_0.distcp"
        self._rows: _Rows = []
        self._fault: BaseException | None = None
        self._metadata = b""
        self._checksum = ""
        self.checksums: Mapping[str, str] = {}  # of all ranks' files, after `finish`

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        copied = io.BytesIO()
        if self._copy_first:
            self._rows.extend(_write_shards(copied, sharded_state_dict))

        def fill(file: BinaryIO) -> None:
            if self._copy_first:
                file.write(copied.getbuffer())
            else:
                self._rows.extend(_write_shards(file, sharded_state_dict))

        return AsyncRequest(self._write, (Path(checkpoint_dir), fill), [])

    def _write(self, folder: Path, fill: Callable[[BinaryIO], object]) -> None:
        """Keeps an error, whatever it is, until `finish`: all ranks learn of it there, and none waits for another."""
        try:
            with (folder / self._file).open("wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            self._checksum = checksum(folder / self._file)
        except BaseException as error:  # noqa: BLE001  # of a thread, which would end without a word
            self._fault = error

    def finish(self, ranks: SavingRanks, device: torch.device) -> Mapping[str, SavedTensor]:
        """On all ranks: what lies where. Errors: NoRoomError and ExecutionError on all ranks."""
        fault = ranks.fault_of(self._fault) if self._fault else NO_FAULT
        everyone = gather_json([self._file, fault.to_json(), self._rows, self._checksum], device)
        if any(text for _, (text, _), _, _ in everyone):
            ranks.raise_first([WriteFault(*fault_json) for _, fault_json, _, _ in everyone], self._fault)
        self.checksums = {file: own for file, _, _, own in everyone}
        objects = [
            (key, StoredChunk((), (), file, offset, num_bytes))
            for file, _, rows, _ in everyone
            for key, dtype, _, _, _, offset, num_bytes in rows
            if not dtype
        ]
        tensors: dict[str, tuple[str, tuple[int, ...], list[StoredChunk]]] = {}
        for file, _, rows, _ in everyone:
            for key, dtype, whole, begin, shape, offset, num_bytes in rows:
                if dtype:
                    tensor = tensors.setdefault(key, (dtype, tuple(whole), []))
                    tensor[2].append(StoredChunk(tuple(begin), tuple(shape), file, offset, num_bytes))
        index = {key: SavedTensor(dtype, whole, tuple(chunks)) for key, (dtype, whole, chunks) in tensors.items()}
        if dist.get_rank() == 0:
            self._metadata = pickle.dumps(_metadata(index, objects))
        return index

    def write_metadata(self, folder: Path) -> None:
        """On rank 0, after `finish`: for Megatron, what lies where, and by which strategy it was written."""
        (folder / METADATA).write_bytes(self._metadata)
        save_config(CheckpointingConfig(self.backend, self.version), str(folder))


def _write_shards(file: BinaryIO, state: Any) -> Iterator[list[Any]]:
    """Rows of what this rank writes: of several ranks that hold the same, Megatron names one."""
    for shard in nested_values(state):
        if not is_main_replica(shard.replica_id):
            continue
        offset = file.tell()
        if isinstance(shard, ShardedObject):
            torch.save([shard.data], file)
            yield [shard.unique_key, "", [], [], [], offset, file.tell() - offset]
        else:
            block = shard.data.detach()[(None,) * shard.prepend_axis_num].to("cpu", copy=True).contiguous()
            torch.save(block, file)
            dtype = str(shard.dtype).removeprefix("torch.")
            yield [
                shard.key, dtype, [*shard.global_shape], [*shard.global_offset], [*block.shape], offset,
                file.tell() - offset,
            ]  # fmt: skip


def _metadata(index: Mapping[str, SavedTensor], objects: list[tuple[str, StoredChunk]]) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, stored in objects:
        entries[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(stored.file, stored.offset, stored.num_bytes)
    for key, tensor in index.items():
        chunks = [ChunkStorageMetadata(torch.Size(chunk.begin), torch.Size(chunk.shape)) for chunk in tensor.chunks]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        entries[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for chunk in tensor.chunks:
            place = _StorageInfo(chunk.file, chunk.offset, chunk.num_bytes)
            places[MetadataIndex(key, torch.Size(chunk.begin))] = place
    return Metadata(state_dict_metadata=entries, storage_data=places, storage_meta=StorageMeta())


def read_tensors(folder: Path, index: Mapping[str, SavedTensor], state: Any) -> None:
    """Fill the tensors that a sharded state dict is made of, in place; its objects, empty here, stay as they are.

    A tensor whose key ends a master weight's may be stored under another of its names: see `_stored`.
    Errors: DataError naming the key that the checkpoint lacks or holds in another shape or dtype.
    """
    sharded, _, _ = load_preprocess(state)
    with torch.no_grad():
        for shard in nested_values(sharded):
            if isinstance(shard, ShardedTensor):
                _fill(folder, _stored(folder, index, shard), shard)


_MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")


def _stored(folder: Path, index: Mapping[str, SavedTensor], shard: ShardedTensor) -> SavedTensor:
    """By its own key; a master weight also by the names that Megatron's other optimizers give it. Where weights are
    float32 they are their own masters."""
    names = [shard.key]
    for prefix in _MASTERS:
        if shard.key.startswith(prefix):
            weight = shard.key.removeprefix(prefix)
            names += [*(other + weight for other in _MASTERS), weight]
    dtype = str(shard.dtype).removeprefix("torch.")
    stored = [index[name] for name in names if name in index]
    if not stored:
        raise DataError(f"{folder} lacks {shard.key}: it is of another model, or was saved without its optimizer")
    if stored[0].shape != tuple(shard.global_shape) or stored[0].dtype != dtype:
        raise DataError(
            f"{folder} holds {shard.key} as {stored[0].dtype} {list(stored[0].shape)}, but the model has {dtype}"
            f" {list(shard.global_shape)}: resume with the model it was saved with"
        )
    return stored[0]


def _fill(folder: Path, stored: SavedTensor, shard: ShardedTensor) -> None:
    target = shard.data[(None,) * shard.prepend_axis_num]
    missing = target.numel()
    for chunk in stored.chunks:
        begins = [max(a, b) for a, b in zip(chunk.begin, shard.global_offset, strict=True)]
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(chunk.begin, chunk.shape, shard.global_offset, target.shape, strict=True)
        ]
        if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
            continue
        block = _read(folder, shard.key, chunk)
        here = target[tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, shard.global_offset, strict=True))]
        here.copy_(block[tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, chunk.begin, strict=True))])
        missing -= here.numel()
    if missing:
        raise DataError(f"{folder} lacks {missing:,} of the values of {shard.key}: resume from another checkpoint")


def _read(folder: Path, key: str, chunk: StoredChunk) -> torch.Tensor:
    path = folder / Path(chunk.file).name
    try:
        with path.open("rb") as file:
            file.seek(chunk.offset)
            block = torch.load(io.BytesIO(file.read(chunk.num_bytes)), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"{path} holds no tensor at byte {chunk.offset:,} ({error}): resume from another") from error
    if not isinstance(block, torch.Tensor) or tuple(block.shape) != chunk.shape:
        raise DataError(f"{path} holds no {list(chunk.shape)} of {key} at byte {chunk.offset:,}: resume from another")
    return block


class CheckpointSaver:
    """Checkpoints of one run below `root`, a folder that all ranks reach; a context manager, entered by every rank.

    `arguments` describe the model by Megatron's names, for Megatron and for conversion. `keep_last` checkpoints stay
    (0: all), and with `keep_best` the one of the best `RunState.score`. `background`: `save` copies this rank's
    tensors to memory and returns; a thread writes them while training goes on. A checkpoint takes `num_bytes` (0:
    nobody knows). Errors: NoRoomError and ExecutionError on all ranks where one cannot write; what was saved stays.
    """

    def __init__(
        self,
        root: Path,
        chunks: Chunks,
        optimizer: MegatronOptimizer,
        arguments: Mapping[str, Any],
        *,
        keep_last: int = 0,
        keep_best: bool = False,
        background: bool = False,
        num_bytes: int = 0,
    ) -> None:
        self._root, self._chunks, self._optimizer, self._arguments = root, chunks, optimizer, dict(arguments)
        self._background = background
        self._device = next(chunks[0].parameters()).device
        self._pending: _Pending | None = None
        kept = CheckpointSettings(keep_last=keep_last, keep_best=keep_best)
        self._ranks = SavingRanks(root, self._device, kept, num_bytes=num_bytes)
        self.most = self._ranks.most

    def save(self, run: RunState) -> None:
        """Every rank calls it between two steps; one that is under way in the background is ended first."""
        self.advance(wait=True)
        with named_collectives(f"checkpoint of step {run.step}"):
            self._pending = self._started(run)
        self.advance(wait=not self._background)

    def advance(self, *, wait: bool = False) -> bool:
        """End a save in the background once all ranks have written; `wait` until then. Every rank calls it. Whether
        none is under way any more."""
        pending = self._pending
        if pending is None:
            return True
        with named_collectives(f"checkpoint of step {pending.run.step}"):
            if wait:
                pending.thread.join()
            elif self.most(pending.thread.is_alive(), pending.run.step):
                return False
            self._pending = None
            tensors = pending.writer.finish(self._ranks, self._device)
            self._ranks.publish(
                pending.part,
                new_manifest(pending.run, pending.place, "megatron-core", tensors),
                join=pending.writer.write_metadata,
                checksums=pending.writer.checksums,
            )
        return True

    def _started(self, run: RunState) -> _Pending:
        from megatron.core import dist_checkpointing

        self._ranks.begin(run.step)
        part, writer = folders.part_folder(self._root, run.step), TensorWriter(copy_first=self._background)
        place = self._optimizer.place

        def describe() -> dict[str, Any]:
            model = _model_state(self._chunks)
            progress = {"iteration": run.step, "consumed_train_samples": run.num_samples, "no_save_rng": True}
            return {
                **model,
                "optimizer": self._optimizer.sharded_state(model),
                "args": argparse.Namespace(**self._arguments, **progress),
                "checkpoint_version": 3.0,
                "iteration": run.step,
                "opt_param_scheduler": dict(place.schedule),
            }

        state = self._ranks.on_every(describe)  # before any rank meets others in what follows
        request = self._ranks.on_every(
            lambda: dist_checkpointing.save(
                state, str(part), writer, async_sharded_save=True, content_metadata=dict(SHARDING)
            )
        )
        thread = threading.Thread(target=request.async_fn, args=request.async_fn_args, name="dynapipe-checkpoint")
        thread.start()
        return _Pending(run, place, part, writer, thread)

    def close(self) -> None:
        """Wait for this rank's writing and no other's: some may be gone. The next start tidies up what it wrote."""
        if self._pending is not None:
            self._pending.thread.join()

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.advance(wait=True)
        self.close()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A save whose tensors are being written."""

    run: RunState
    place: OptimizerPlace
    part: Path
    writer: TensorWriter
    thread: threading.Thread


def _model_state(chunks: Chunks) -> dict[str, Any]:
    """Megatron's description of a rank's weights. Tensors are told apart by their keys, which are names in the whole
    model: any placement takes what another saved. All chunks are in one dictionary, as Megatron compares what ranks
    have beside tensors, and some may have more chunks than others.
    """
    states = [chunk.module.sharded_state_dict(metadata={**SHARDING}) for chunk in chunks]
    return {"model": {f"{i}.{name}": one for i, state in enumerate(states) for name, one in state.items()}}


def load_checkpoint(
    folder: Path, chunks: Chunks, optimizer: MegatronOptimizer, *, model: Mapping[str, Any]
) -> Manifest:
    """Put weights, moments and schedule of a checkpoint into this rank, whatever topology saved them; what it says.

    `model` is compared with the RunState's. Nothing is unpickled but tensors.
    Errors: DataError naming what the folder lacks, or in what its model differs.
    """

    manifest = open_checkpoint(folder, model, next(chunks[0].parameters()).device)
    optimizer.restore(
        _model_state(chunks), manifest.optimizer, lambda whole: read_tensors(folder, manifest.tensors, whole)
    )
    return manifest
