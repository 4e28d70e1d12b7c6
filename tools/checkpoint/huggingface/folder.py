"""Hugging Face's folder: config.json beside safetensors or pytorch_model.bin, whole or in shards with an index.

Names are as transformers writes them. What files of other times add is known by name: the `transformer.` that GPT-2's
first files lack, masks and rotary frequencies that are no weights, second copies of tied weights (which must be equal).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.families import published_form
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.files.safetensors_file import SafetensorsSpec, read_header, write_safetensors
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor, refuse_faults, shape_faults
from dynapipe_ext.tools.checkpoint.files.torch_file import read_torch_file
from dynapipe_ext.tools.checkpoint.formats import (
    CheckpointPiece,
    CheckpointReader,
    CheckpointWriter,
    GroupTensors,
    Source,
    StateKind,
    TrainingState,
    WriterOptions,
)
from dynapipe_ext.tools.checkpoint.huggingface.carried_files import CONFIG, carried_files, left_behind, read_json_object
from dynapipe_ext.tools.checkpoint.huggingface.quantized import ReadableTensor, dequantised
from dynapipe_ext.tools.checkpoint.recognition import (
    CONSOLIDATED,
    META_PARAMS,
    SAFETENSORS_INDEX,
    WEIGHT_FILES,
    WHOLE_WEIGHTS,
    numbered_shards,
    read_shard_index,
    some_names,
)
from dynapipe_ext.tools.files import write_atomic

SHARD_BYTES = 5_000_000_000
_NOT_WEIGHTS = re.compile(
    r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"  # GPT-2's causal mask
    r"|model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    # In T5's first files, of no use: cross attention has no positions.
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
_T5_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def open_checkpoint(path: Path) -> HuggingFaceReader:
    """Errors: DataError, ConfigError naming the file and the field."""
    return HuggingFaceReader(path)


class HuggingFaceReader(CheckpointReader):
    """Reads one tensor at a time by its place in the files."""

    kinds: tuple[StateKind, ...] = ("weight",)
    state: TrainingState | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json_object(path / CONFIG, "a Hugging Face model's folder")
        architecture = read_config(raw, str(path / CONFIG))
        self._index_faults, in_files, self.notices = stored_tensors(path)
        in_files = _with_single_experts(architecture, in_files)
        stored: dict[str, ReadableTensor] = dict(in_files)
        if quantisation := raw.get("quantization_config"):
            stored, faults, notices = dequantised(in_files, quantisation, path / CONFIG)
            self._index_faults += faults
            self.notices += notices
        prefixed = {_full_name(architecture, name): tensor for name, tensor in stored.items()}
        if len(prefixed) != len(stored):
            raise DataError(f"{path} has tensors both with and without `transformer.`: take one of each pair out")
        buffers = sorted(name for name in prefixed if _NOT_WEIGHTS.fullmatch(name))
        self._stored = {name: tensor for name, tensor in prefixed.items() if name not in buffers}
        self.architecture = self._with_own_head(architecture)
        self._unequal_copies = self._resolve_copies()
        self._prediction = [name for name in self._stored if _is_of_prediction(architecture, name)]
        self.files = carried_files(path)
        if own_code := raw.get("auto_map"):
            self.notices += (
                f"{path / CONFIG} names code of its own (auto_map {short(own_code)}): followed is what transformers"
                f" itself makes of a {architecture.family}",
            )
        if buffers:
            self.notices += (f"{len(buffers)} buffers are no weights and are left out: {some_names(buffers)}",)
        if unread := [name for name in WEIGHT_FILES if (path / name).is_file()][1:]:
            self.notices += (f"{path} has its weights more than once: {some_names(unread)} is not read",)
        if others := left_behind(path):
            self.notices += (f"not carried from {path}: {some_names(others)}",)
        # What the weights are stored as, whatever the configuration says of it.
        groups = tensor_groups(self.architecture)
        first = self._stored.get(groups[0].tensors[0].name)
        if first is not None and first.dtype in _FLOATS:
            self.architecture = replace(self.architecture, dtype=str(first.dtype).removeprefix("torch."))

    def drop_prediction_layers(self) -> bool:
        for name in self._prediction:
            del self._stored[name]
        dropped, self._prediction = self._prediction, []
        if dropped:
            self.notices += (f"{len(dropped)} tensors of multi-token prediction are left out: {some_names(dropped)}",)
        return bool(dropped)

    def check(self) -> None:
        """Errors: DataError with every missing, extra and misshapen tensor."""
        if self._prediction:
            raise DataError(
                f"{self.path} has {len(self._prediction)} tensors of multi-token prediction"
                f" ({some_names(self._prediction)}), which are neither converted nor trained: dynapipe convert"
                " --drop-mtp leaves them out"
            )
        groups = tensor_groups(self.architecture)
        expected = {info.name: info.shape for group in groups for info in group.tensors}
        faults = shape_faults(expected, {name: tensor.shape for name, tensor in self._stored.items()})
        advice = f"Correct {CONFIG}, or give the files that belong to the model"
        for group in groups:
            dtypes = {self._stored[info.name].dtype for info in group.tensors if info.name in self._stored}
            if len(dtypes) > 1 or not dtypes <= set(_FLOATS):
                names = ", ".join(info.name for info in group.tensors)
                stored = ", ".join(sorted(map(str, dtypes)))
                faults.append(f"{names} stored as {stored}, not as one of float32, bfloat16 and float16")
                advice = "Cast them to one of these types first"
        faults += [f"{copy} differs from {own}, which {CONFIG} ties to it" for copy, own in self._unequal_copies]
        refuse_faults(self.path, self._index_faults + faults, advice)

    def dtype(self, group: TensorGroup, kind: StateKind) -> torch.dtype:
        return self._find(group.tensors[0].name).dtype

    def read(self, group: TensorGroup, kind: StateKind) -> GroupTensors:
        return {info.name: self._find(info.name).read() for info in group.tensors}

    def _find(self, name: str) -> ReadableTensor:
        if name not in self._stored:
            raise DataError(f"{self.path} has no tensor {name}: give the files that belong to the model")
        return self._stored[name]

    def _with_own_head(self, architecture: Architecture) -> Architecture:
        """transformers 5 writes that T5 ties its head, even where it does not: the files tell."""
        if not architecture.num_decoder_layers or not architecture.tied_embeddings:
            return architecture
        head = self._stored.get("lm_head.weight")
        shared = next((self._stored[name] for name in ("shared.weight", *_T5_COPIES) if name in self._stored), None)
        tied = head is None or shared is None or _equal(head, shared)
        return replace(architecture, tied_embeddings=tied)

    def _resolve_copies(self) -> list[tuple[str, str]]:
        """Keep one of each set of tied tensors, under the name that counts; pairs that are not equal."""
        embedding = tensor_groups(self.architecture)[0].tensors[0].name
        copies = list(_T5_COPIES) if self.architecture.num_decoder_layers else []
        copies += (
            [f"{published_form(self.architecture).names.head}.weight"] if self.architecture.tied_embeddings else []
        )
        unequal = []
        for name in copies:
            copy = self._stored.pop(name, None)
            if copy is not None and not _equal(self._stored.setdefault(embedding, copy), copy):
                unequal.append((name, embedding))
        return unequal


class HuggingFaceWriter(CheckpointWriter):
    """Writes safetensors shards of at most `shard_bytes`, their index, the carried files and, last, config.json."""

    def __init__(
        self, directory: Path, reader: CheckpointReader, options: WriterOptions, shard_bytes: int = SHARD_BYTES
    ) -> None:
        if options != WriterOptions(vocab_divisible_by=options.vocab_divisible_by):
            raise ConfigError(
                "a Hugging Face folder has no ranks: leave out --tp, --pp, --ep, --vpp and --layers-per-stage"
            )
        if shard_bytes < 1:
            raise ConfigError(f"shards of {shard_bytes} bytes: give at least 1")
        self._directory, self._reader = directory, reader
        self._shards = _shards(reader, shard_bytes)

    def pieces(self) -> Sequence[CheckpointPiece]:
        return [
            CheckpointPiece(name, tuple((group, "weight") for group in groups))
            for name, groups in zip(shard_names(len(self._shards)), self._shards, strict=True)
        ]

    def write(self, piece: CheckpointPiece, source: Source) -> Mapping[str, Any]:
        specs = [
            SafetensorsSpec(info.name, self._reader.dtype(group, kind), info.shape)
            for group, kind in piece.groups
            for info in group.tensors
        ]
        return write_safetensors(self._directory / piece.name, specs, _one_by_one(piece, source))

    def finish(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        write_shard_index(self._directory, records)
        for file in sorted(self._reader.files, key=lambda file: file.name == CONFIG):  # without it nothing looks whole
            shutil.copyfile(file, self._directory / file.name)


def _one_by_one(piece: CheckpointPiece, source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    for group, kind in piece.groups:
        tensors = dict(source(group, kind))
        for info in group.tensors:
            yield info.name, tensors.pop(info.name)  # so that no two groups are in memory


def _shards(reader: CheckpointReader, shard_bytes: int) -> list[list[TensorGroup]]:
    shards: list[list[TensorGroup]] = []
    filled = 0
    for group in tensor_groups(reader.architecture):
        num_bytes = group.size * reader.dtype(group, "weight").itemsize
        if not shards or filled + num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(group)
        filled += num_bytes
    return shards


def write_shard_index(directory: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Beside several shards: the file of every tensor. `records` are those of `write_safetensors`, by file."""
    if len(records) < 2:
        return
    weights = {name: shard for shard, record in records.items() for name in record["tensors"]}
    total = sum(record["bytes"] for record in records.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    write_atomic(directory / SAFETENSORS_INDEX, json.dumps(index, indent=2) + "\n")


def shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{shard:05d}-of-{count:05d}.safetensors" for shard in range(1, count + 1)]


def _equal(one: ReadableTensor, two: ReadableTensor) -> bool:
    if isinstance(one, StoredTensor) and isinstance(two, StoredTensor):
        return one.equals(two)
    return (one.dtype, one.shape) == (two.dtype, two.shape) and torch.equal(one.read(), two.read())


def stored_tensors(path: Path) -> tuple[list[str], dict[str, StoredTensor], tuple[str, ...]]:
    """What is wrong between index and shards, all tensors by the names in the files, and what is to be said of it."""
    name = next((name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if name is None:
        return _without_index(path)
    if name in WHOLE_WEIGHTS:
        return [], _read_weights(path / name), ()
    shard_of = read_shard_index(path / name)
    stored: dict[str, StoredTensor] = {}
    faults = []
    for shard in sorted(set(shard_of.values())):
        tensors = _read_weights(path / shard)
        faults += [f"{tensor} is in {shard} and another shard" for tensor in tensors if tensor in stored]
        faults += [f"{tensor} is in {shard} but not in {name}" for tensor in tensors if shard_of.get(tensor) != shard]
        stored |= tensors
    faults += [f"{tensor} is in {name} but in no file" for tensor in shard_of if tensor not in stored]
    return faults, stored, ()


def _without_index(path: Path) -> tuple[list[str], dict[str, StoredTensor], tuple[str, ...]]:
    """As `stored_tensors`, of shards that no index names, or of the one file under another name."""
    shards = numbered_shards(path)
    if not shards:
        if not (path / CONSOLIDATED).is_file():
            raise DataError(f"{path} has no weights: one of {', '.join(WEIGHT_FILES)} is needed")
        stored = read_header(path / CONSOLIDATED)
        if "tok_embeddings.weight" in stored:
            raise DataError(f"{path / CONSOLIDATED} names its tensors as Meta and Mistral do: put {META_PARAMS} there")
        return [], stored, (f"the weights are read from {CONSOLIDATED}",)
    stored, faults = {}, []
    for shard in shards:
        tensors = _read_weights(path / shard)
        faults += [f"{tensor} is in {shard} and another shard" for tensor in tensors if tensor in stored]
        stored |= tensors
    return faults, stored, (f"{path} has no index of its {len(shards)} shards: all are read, {some_names(shards)}",)


def _read_weights(file: Path) -> dict[str, StoredTensor]:
    return read_header(file) if file.suffix == ".safetensors" else read_torch_file(file)


def _full_name(architecture: Architecture, name: str) -> str:
    is_below = published_form(architecture).names.embedding.startswith("transformer.")
    return f"transformer.{name}" if is_below and not name.startswith(("transformer.", "lm_head.")) else name


def _with_single_experts(a: Architecture, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return each expert by itself where transformers 5 has saved those of a layer in two tensors
    (`save_original_format=False`): gate above up, (experts, 2 x ffn, hidden), and down, (experts, hidden, ffn). A
    router next to them then goes by the name of transformers' module, too."""
    singles = dict(stored)
    if not a.num_experts or a.family == "gpt" or "{e}" not in (names := published_form(a).names).expert_out:
        return singles
    for name in stored:
        layer, found, kind = name.rpartition(".mlp.experts.")
        shape = stored[name].shape
        if not found or kind not in ("gate_up_proj", "down_proj") or len(shape) != 3 or shape[0] != a.num_experts:
            continue
        joined = singles.pop(name)
        if f"{layer}.mlp.gate.weight" in singles:
            singles[f"{layer}.{names.router}.weight"] = singles.pop(f"{layer}.mlp.gate.weight")
        for expert in range(a.num_experts):
            own = joined.row(expert)
            ends = names.expert_in if kind == "gate_up_proj" else (names.expert_out,)
            size = own.shape[0] // len(ends)
            for part, end in enumerate(ends):
                singles[f"{layer}.{end.format(e=expert)}.weight"] = own.rows(part * size, (part + 1) * size)
    return singles


def _is_of_prediction(a: Architecture, name: str) -> bool:
    """Whether a tensor is of layers behind the last, which predict further tokens."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return published_form(a).has_prediction_layers and layer is not None and int(layer[1]) >= a.num_layers
