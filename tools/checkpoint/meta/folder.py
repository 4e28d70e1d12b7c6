"""Meta's Llama folder, read only: params.json and consolidated.NN.pth, one file a rank of its tensor parallelism.
Mistral's folder is the same, with all in consolidated.safetensors.

A matrix is cut along its rows or its columns. Embeddings are cut along the columns by Llama 1 and 2, along the rows by
Llama 3: the shapes tell. Meta rotates neighbouring pairs of a head's values, Hugging Face its two halves, so the rows
of queries and keys are put in another order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.rope_scaling import RopeScaling
from dynapipe_ext.models.tensors import TensorGroup, TensorInfo, tensor_groups
from dynapipe_ext.tools.checkpoint.files.safetensors_file import read_header
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor, refuse_faults
from dynapipe_ext.tools.checkpoint.files.torch_file import read_torch_file
from dynapipe_ext.tools.checkpoint.formats import CheckpointReader, GroupTensors, StateKind, TrainingState
from dynapipe_ext.tools.checkpoint.huggingface.carried_files import CONFIG, carried_files, left_behind, read_json_object
from dynapipe_ext.tools.checkpoint.recognition import CONSOLIDATED, META_PARAMS

ShardCut = Literal["rows", "columns", "none"]
_SHARD = re.compile(r"consolidated\.(\d\d)\.pth")
_NOT_WEIGHTS = ("rope.freqs",)
_OF_MISTRAL = ("head_dim", "hidden_dim", "sliding_window")
_KNOWN_PARAMS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "rope_theta", "use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor", "max_seq_len", "max_batch_size",
    *_OF_MISTRAL,
}  # fmt: skip
# Hugging Face's name within a layer: Meta's, and how ranks cut it.
_LAYER: Mapping[str, tuple[str, ShardCut]] = {
    "self_attn.q_proj": ("attention.wq", "rows"),
    "self_attn.k_proj": ("attention.wk", "rows"),
    "self_attn.v_proj": ("attention.wv", "rows"),
    "self_attn.o_proj": ("attention.wo", "columns"),
    "mlp.gate_proj": ("feed_forward.w1", "rows"),
    "mlp.up_proj": ("feed_forward.w3", "rows"),
    "mlp.down_proj": ("feed_forward.w2", "columns"),
    "input_layernorm": ("attention_norm", "none"),
    "post_attention_layernorm": ("ffn_norm", "none"),
}
_OUTSIDE: Mapping[str, tuple[str, ShardCut]] = {
    "model.embed_tokens.weight": ("tok_embeddings.weight", "rows"),  # or columns
    "model.norm.weight": ("norm.weight", "none"),
    "lm_head.weight": ("output.weight", "rows"),
}
_LLAMA3_VOCAB = 128_256
_BLOCK_BYTES = 1 << 25


def open_checkpoint(path: Path) -> MetaReader:
    """Errors: DataError, ConfigError naming the file and the field."""
    return MetaReader(path)


class MetaReader(CheckpointReader):
    """Puts the ranks' parts together as they are asked for; reads a head's rows at a time where their order changes."""

    kinds: tuple[StateKind, ...] = ("weight",)
    state: TrainingState | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _shard_files(path)
        self._shards = [
            {name: tensor for name, tensor in _read_file(file).items() if name not in _NOT_WEIGHTS}
            for file in self._files
        ]
        params = read_json_object(path / META_PARAMS, "the params.json that belongs to the weights")
        params = params["model"] if isinstance(params.get("model"), dict) else params
        if unknown := sorted(params.keys() - _KNOWN_PARAMS):
            raise ConfigError(
                f"{path / META_PARAMS} has {', '.join(map(short, unknown))}: only Llama 1, 2 and 3 without images,"
                " LoRA or quantization are known, and Mistral's dense models"
            )
        self._embedding_cut = self._cut_of_embedding(params)
        self.architecture = self._deduce(params)
        # The numbers of the first and last token of a text, which params.json does not have.
        new = self.architecture.vocab_size == _LLAMA3_VOCAB
        self.config_fields = {"bos_token_id": 128_000 if new else 1, "eos_token_id": 128_001 if new else 2}
        here = carried_files(path)
        above = path.parent / "tokenizer.model"  # Llama 1 and 2 keep it beside the models' folders
        has_tokenizer = any(file.name.startswith("tokenizer") for file in here)
        self.files = tuple(file for file in here if file.name != CONFIG)
        if not has_tokenizer and above.is_file():
            self.files += (above,)
            self.notices += (f"the tokenizer is {above}",)
        elif not has_tokenizer:
            self.notices += (f"{path} has no tokenizer.model: none is carried",)
        if others := left_behind(path):
            self.notices += (f"not carried from {path}: {', '.join(others)}",)

    def check(self) -> None:
        """Errors: DataError with every missing, extra and misshapen tensor of every rank."""
        faults = []
        expected: dict[str, tuple[tuple[int, ...], ShardCut]] = {}
        for group in tensor_groups(self.architecture):
            for info in group.tensors:
                name, cut = self._meta_name(info.name)
                expected[name] = (self._part_shape(info, cut), cut)
        if self.architecture.tied_embeddings and "output.weight" in self._shards[0]:
            expected["output.weight"] = expected["tok_embeddings.weight"]
        for rank, shard in enumerate(self._shards):
            where = self._files[rank].name
            for name, (shape, cut) in expected.items():
                if name not in shard:
                    faults.append(f"{where}: {name} {list(shape)} is missing")
                elif shard[name].shape != shape:
                    faults.append(f"{where}: {name} is {list(shard[name].shape)}, not {list(shape)}")
                elif not self._agrees(name, cut, rank):
                    faults.append(f"{where}: {name} is not that of the other ranks that share it")
                elif shard[name].dtype != self._shards[0]["norm.weight"].dtype:
                    faults.append(
                        f"{where}: {name} is {shard[name].dtype}, others {self._shards[0]['norm.weight'].dtype}"
                    )
            faults += [f"{where}: {name} {list(shard[name].shape)} is extra" for name in shard if name not in expected]
        refuse_faults(self.path, faults, f"Give the files that belong to {META_PARAMS}")

    def dtype(self, group: TensorGroup, kind: StateKind) -> torch.dtype:
        return self._find("norm.weight", 0).dtype

    def read(self, group: TensorGroup, kind: StateKind) -> GroupTensors:
        return {info.name: self._read(info) for info in group.tensors}

    def _read(self, info: TensorInfo) -> torch.Tensor:
        name, cut = self._meta_name(info.name)
        ranks = range(0, len(self._shards), self._copies(name))
        parts = [self._find(name, rank) for rank in ranks]
        if cut == "none" or (len(parts) == 1 and not name.endswith(("wq.weight", "wk.weight"))):
            return parts[0].read()
        out = torch.empty(info.shape, dtype=parts[0].dtype)
        position = 0
        for part in parts:
            if cut == "columns":
                _copy(part, out[:, position : position + part.shape[1]])
                position += part.shape[1]
            elif name.endswith(("wq.weight", "wk.weight")):
                for start in range(0, part.shape[0], self.architecture.head_dim):
                    self._head(part, start, out[position : position + self.architecture.head_dim])
                    position += self.architecture.head_dim
            else:
                _copy(part, out[position : position + part.shape[0]])
                position += part.shape[0]
        return out

    def _head(self, part: StoredTensor, start: int, out: torch.Tensor) -> None:
        """One head's rows: Meta's pairs are (0, 1), (2, 3), ..., Hugging Face's (0, n/2), (1, n/2 + 1), ...."""
        rows = part.read_rows(start, start + self.architecture.head_dim)
        half = self.architecture.head_dim // 2
        out[:half], out[half:] = rows[0::2], rows[1::2]

    def _meta_name(self, name: str) -> tuple[str, ShardCut]:
        if name in _OUTSIDE:
            meta, cut = _OUTSIDE[name]
            return meta, self._embedding_cut if meta == "tok_embeddings.weight" else cut
        _, _, layer, rest = name.split(".", 3)
        meta, cut = _LAYER[rest.removesuffix(".weight")]
        return f"layers.{layer}.{meta}.weight", cut

    def _copies(self, name: str) -> int:
        """How many ranks in a row hold the same part: more than one where there are more ranks than keys' heads."""
        if not name.endswith(("wk.weight", "wv.weight")):
            return 1
        return max(1, len(self._shards) // self.architecture.num_query_groups)

    def _agrees(self, name: str, cut: ShardCut, rank: int) -> bool:
        copies = len(self._shards) if cut == "none" else self._copies(name)
        first = self._shards[rank - rank % copies].get(name)
        return first is None or first.equals(self._shards[rank][name])

    def _part_shape(self, info: TensorInfo, cut: ShardCut) -> tuple[int, ...]:
        if cut == "none":
            return info.shape
        num_parts = len(self._shards) // self._copies(self._meta_name(info.name)[0])
        rows, columns = info.shape
        if (rows if cut == "rows" else columns) % num_parts:
            raise DataError(f"{self.path}: {info.name} {list(info.shape)} cannot be cut into {num_parts} parts")
        return (rows // num_parts, columns) if cut == "rows" else (rows, columns // num_parts)

    def _find(self, name: str, rank: int) -> StoredTensor:
        if name not in self._shards[rank]:
            raise DataError(f"{self._files[rank]} has no tensor {name}: copy it again")
        tensor = self._shards[rank][name]
        if not tensor.shape or math.prod(tensor.shape) == 0:
            raise DataError(f"{tensor.path}: {name} is empty: copy it again")
        return tensor

    def _cut_of_embedding(self, params: Mapping[str, Any]) -> ShardCut:
        columns = self._find("tok_embeddings.weight", 0).shape[-1]
        return "rows" if columns == params.get("dim") else "columns"

    def _tied(self) -> bool:
        """Llama 3.2's small models store their one matrix twice."""
        if "output.weight" not in self._shards[0]:
            return True
        if self._embedding_cut == "columns":
            return False
        pairs = [(self._find("output.weight", rank), self._find("tok_embeddings.weight", rank)) for rank in self._ranks]
        return all(head.equals(embedding) for head, embedding in pairs)

    @property
    def _ranks(self) -> range:
        return range(len(self._shards))

    def _deduce(self, params: Mapping[str, Any]) -> Architecture:
        where = self.path / META_PARAMS
        dim, heads = _integer(params, "dim", where), _integer(params, "n_heads", where)
        groups = _integer(params, "n_kv_heads", where) if params.get("n_kv_heads") is not None else heads
        head_dim = _integer(params, "head_dim", where) if params.get("head_dim") is not None else dim // heads
        if head_dim % 2 or (dim % heads and params.get("head_dim") is None):
            raise ConfigError(f"{where}: dim {dim} over n_heads {heads} gives no even width of a head: correct it")
        num_shards = len(self._shards)
        if max(num_shards, groups) % min(num_shards, groups):
            raise ConfigError(
                f"{self.path} has {num_shards} files, but n_kv_heads is {groups}: one must divide the other"
            )
        tied = self._tied()
        theta = float(params.get("rope_theta", 10_000.0))
        rows = self._find("tok_embeddings.weight", 0).shape[0]
        dtype = self._find("norm.weight", 0).dtype
        of_mistral = params.get("hidden_dim") is not None  # Meta's folders give the multiple that it is rounded to
        return Architecture(
            family="mistral" if of_mistral else "llama",
            num_layers=_integer(params, "n_layers", where),
            hidden_size=dim,
            num_heads=heads,
            num_query_groups=groups,
            head_dim=head_dim,
            ffn_hidden_size=self._find("layers.0.feed_forward.w1.weight", 0).shape[0] * num_shards,
            vocab_size=rows if self._embedding_cut == "columns" else rows * num_shards,
            max_seq_len=_max_seq_len(params, theta),
            tied_embeddings=tied,
            norm_eps=float(params.get("norm_eps", 1e-5)),
            rope_theta=theta,
            rope_scaling=_rope_scaling(params, tied),
            sliding_window=_integer(params, "sliding_window", where) if params.get("sliding_window") else 0,
            dtype=str(dtype).removeprefix("torch."),
        )


def _copy(part: StoredTensor, place: torch.Tensor) -> None:
    """Read a matrix into `place` some rows at a time."""
    step = max(1, _BLOCK_BYTES // (part.shape[1] * part.dtype.itemsize))
    for row in range(0, part.shape[0], step):
        place[row : row + step] = part.read_rows(row, min(row + step, part.shape[0]))


def _read_file(file: Path) -> dict[str, StoredTensor]:
    return read_header(file) if file.suffix == ".safetensors" else read_torch_file(file)


def _shard_files(path: Path) -> list[Path]:
    numbers = sorted(int(match[1]) for file in path.iterdir() if (match := _SHARD.fullmatch(file.name)))
    if not numbers:
        return [path / CONSOLIDATED]
    if numbers != list(range(len(numbers))):
        missing = sorted(set(range(numbers[-1])) - set(numbers))
        raise DataError(
            f"{path} lacks {', '.join(f'consolidated.{number:02d}.pth' for number in missing)}: copy all files"
        )
    return [path / f"consolidated.{number:02d}.pth" for number in numbers]


def _integer(params: Mapping[str, Any], name: str, where: Path) -> int:
    value = params.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {name} is {short(value)} but must be an integer of at least 1")
    return value


def _max_seq_len(params: Mapping[str, Any], theta: float) -> int:
    """Trained length in tokens. params.json seldom says it: each generation has its own base of the rotation."""
    if isinstance(params.get("max_seq_len"), int):
        return int(params["max_seq_len"])
    if params.get("hidden_dim") is not None:
        return 32_768  # Mistral's
    if params.get("use_scaled_rope"):
        return 131_072  # Llama 3.1 and later
    if theta == 500_000.0:
        return 8192  # Llama 3
    if theta > 10_000.0:
        return 16_384  # Code Llama
    return 2048 if params.get("norm_eps") == 1e-6 else 4096  # Llama 1, Llama 2


def _rope_scaling(params: Mapping[str, Any], tied: bool) -> RopeScaling | None:
    """Llama 3.1's stretching, by 8; by 32 in the small models of 3.2, which are those with tied embeddings."""
    if not params.get("use_scaled_rope"):
        return None
    factor = float(params.get("rope_scaling_factor") or (32.0 if tied else 8.0))
    return RopeScaling("llama3", factor, 1.0, float(params.get("rope_high_freq_factor") or 4.0), 8192)
