"""Adapters of peft's LoRA merged into the model that they stand beside: a folder of Hugging Face like the base.

    ADAPTER: A, B of some layers, whole modules ──┐
    BASE: every tensor, one at a time ────────────┴──► W + scale x B A, rounded once to W's type ──► DST

Any base that transformers reads will do: tensors go by the names in its files. What a configuration asks for that is
not known here is refused by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.huggingface import quantisation_of
from dynapipe_ext.tools.checkpoint.files.safetensors_file import SafetensorsSpec, write_safetensors
from dynapipe_ext.tools.checkpoint.huggingface.adapter_files import Adapters, BesideWeight, read_adapters
from dynapipe_ext.tools.checkpoint.huggingface.carried_files import CONFIG, carried_files, read_json_object
from dynapipe_ext.tools.checkpoint.huggingface.folder import SHARD_BYTES, shard_names, stored_tensors, write_shard_index
from dynapipe_ext.tools.checkpoint.huggingface.quantized import ReadableTensor, dequantised
from dynapipe_ext.tools.checkpoint.journal import (
    ConversionJournal,
    absolute,
    files_below,
    partial_folder,
    refuse_places,
)
from dynapipe_ext.tools.files import write_atomic, writing_in

__all__ = ["MergeOutcome", "merge_adapters"]

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_OF_BASE = (CONFIG, "generation_config.json")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class MergeOutcome:
    """What was merged: adapters of so many layers, modules that were saved whole, and all tensors of the model."""

    num_adapters: int
    num_replaced: int
    num_tensors: int
    num_bytes: int
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Merged:
    """A tensor to write: that of the base, or another in its place, with what stands beside it."""

    tensor: ReadableTensor
    dtype: torch.dtype
    beside: BesideWeight | None = None

    def read(self) -> torch.Tensor:
        whole = self.tensor.read().to(self.dtype)
        if self.beside is not None:
            self.beside.add_to(whole)
        return whole


def merge_adapters(
    adapter: Path,
    base: Path,
    destination: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    carry: Sequence[Path] | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> MergeOutcome:
    """Write `destination`, which appears whole or not at all; `advance` hears of bytes written. `carry`: the files that
    go along, instead of the base's with the adapter's tokenizer.

    Memory of the largest tensor, its adapters and a few megabytes. Errors: ConfigError, DataError; every adapter
    without its module is named.
    """
    adapter, base, destination = map(absolute, (adapter, base, destination))
    refuse_places(destination, adapter, base)
    adapters = read_adapters(adapter)
    raw = read_json_object(base / CONFIG, "the folder of the model that the adapters stand beside")
    stored, notices = _tensors_of(base, raw)
    unties = _unties(adapters, stored, raw)
    planned = _planned(adapters, stored, base, raw, unties=unties)
    if unties:
        notices += ("the head is written beside the embedding, to which the base ties it: adapters change one of them",)
    if adapters.base and Path(adapters.base).name != base.resolve().name:
        notices += (f"{adapter} names {adapters.base} as its base: it is merged into {base}",)
    partial = partial_folder(destination)
    with writing_in(partial), ConversionJournal(partial, {"to": "merged"}) as journal:
        for left in files_below(partial):  # by a merge that was killed
            (partial / left).unlink()
        _write_weights(partial, planned, shard_bytes, advance)
        files = carried_files(base) if carry is None else carry
        own = () if carry is not None else [file for file in carried_files(adapter) if file.name not in _OF_BASE]
        for file in {file.name: file for file in (*files, *own)}.values():
            shutil.copyfile(file, partial / file.name)
        _write_config(partial / CONFIG, base / CONFIG, raw, unties=unties)
        journal.rename(destination)
    num_bytes = sum(_num_bytes(one) for one in planned.values())
    return MergeOutcome(len(adapters.beside), len(adapters.replacing), len(planned), num_bytes, notices)


def _tensors_of(base: Path, raw: Mapping[str, Any]) -> tuple[dict[str, ReadableTensor], tuple[str, ...]]:
    """All tensors of the base, plain, and what is to be said of them. Errors: DataError, ConfigError."""
    quantisation = quantisation_of(raw, str(base / CONFIG))
    faults, in_files, notices = stored_tensors(base)
    stored: dict[str, ReadableTensor] = dict(in_files)
    if quantisation is not None:
        stored, more, more_notices = dequantised(in_files, quantisation, base / CONFIG)
        faults, notices = faults + more, notices + more_notices
    if faults:
        raise DataError(f"{base} does not hold its model: {'; '.join(faults[:8])}: copy it again")
    return stored, notices


def _planned(
    adapters: Adapters, stored: Mapping[str, ReadableTensor], base: Path, raw: Mapping[str, Any], *, unties: bool
) -> dict[str, _Merged]:
    """What to write, by name. Errors: DataError naming every adapter that has no place."""
    sources = dict(stored)
    if unties:
        sources.setdefault(_HEADS[0], stored[_embedding(stored)])
    planned = {name: _Merged(tensor, tensor.dtype) for name, tensor in sources.items()}
    faults = []
    for tensor_name, tensor in adapters.replacing.items():
        name = _name_in(sources, tensor_name)
        if name is None:
            faults.append(f"{tensor_name} is no tensor of it")
        elif tensor.shape != sources[name].shape:
            faults.append(f"{tensor_name} is {list(tensor.shape)}, where the base has {list(sources[name].shape)}")
        else:
            planned[name] = _Merged(tensor, sources[name].dtype)
    for tensor_name, beside in adapters.beside.items():
        name = _name_in(sources, tensor_name)
        if name is None:
            faults.append(f"{tensor_name} is no tensor of it")
            continue
        placed = beside.placed(tensor_name, sources[name].shape, str(raw.get("model_type")))
        if sources[name].dtype not in _FLOATS:
            faults.append(f"{tensor_name} is stored as {sources[name].dtype}, which nothing can be added to")
        elif isinstance(placed, str):
            faults.append(placed)
        else:
            planned[name] = _Merged(planned[name].tensor, sources[name].dtype, placed)
    if faults:
        shown = "; ".join(faults[:8]) + (f" and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise DataError(
            f"{adapters.folder} does not stand beside {base}: {shown}: give the base that it was trained on"
        )
    return planned


def _name_in(stored: Mapping[str, ReadableTensor], tensor_name: str) -> str | None:
    """The name of a tensor in the base's files; some of these lack the first part ("transformer.") of all names."""
    return next((name for name in (tensor_name, tensor_name.partition(".")[2]) if name in stored), None)


def _embedding(stored: Mapping[str, ReadableTensor]) -> str:
    """Errors: DataError where no name is that of an embedding, or several are."""
    names = [name for name in stored if name.endswith(_EMBEDDINGS)]
    if len(names) != 1:
        raise DataError(
            f"the base has {len(names)} embeddings by name ({', '.join(names)}), where its head is tied to one"
        )
    return names[0]


def _unties(adapters: Adapters, stored: Mapping[str, ReadableTensor], raw: Mapping[str, Any]) -> bool:
    """Whether adapters change one of a head and an embedding that are one in the base, and so make them two."""
    names = (*adapters.beside, *adapters.replacing)
    if not any(name.endswith((*_EMBEDDINGS, *_HEADS)) for name in names):
        return False
    head = next((stored[name] for name in _HEADS if name in stored), None)
    if head is None:
        return True
    if raw.get("tie_word_embeddings") is False:
        return False
    embedding = stored[_embedding(stored)]
    return embedding.shape == head.shape and torch.equal(embedding.read(), head.read())


def _write_weights(
    folder: Path, planned: Mapping[str, _Merged], shard_bytes: int, advance: Callable[[int], None]
) -> None:
    shards: list[list[str]] = []
    filled = 0
    for name, one in planned.items():
        if not shards or filled + _num_bytes(one) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += _num_bytes(one)
    records = {}
    for file, names in zip(shard_names(len(shards)), shards, strict=True):
        specs = [SafetensorsSpec(name, planned[name].dtype, planned[name].tensor.shape) for name in names]
        records[file] = write_safetensors(folder / file, specs, _read_one_by_one(planned, names, advance))
    write_shard_index(folder, records)


def _read_one_by_one(
    planned: Mapping[str, _Merged], names: Sequence[str], advance: Callable[[int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        yield name, planned[name].read()
        advance(_num_bytes(planned[name]))


def _num_bytes(one: _Merged) -> int:
    return SafetensorsSpec("", one.dtype, one.tensor.shape).num_bytes


def _write_config(place: Path, source: Path, raw: Mapping[str, Any], *, unties: bool) -> None:
    """The base's, byte for byte where it says what the weights are."""
    written = {name: value for name, value in raw.items() if name != "quantization_config"}
    if unties:
        written["tie_word_embeddings"] = False
    try:
        is_same = written == json.loads(source.read_bytes())
    except ValueError:  # a byte order mark
        is_same = False
    if is_same:
        shutil.copyfile(source, place)
    else:
        write_atomic(place, json.dumps(written, indent=2) + "\n")
