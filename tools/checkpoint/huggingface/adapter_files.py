"""A folder of peft's LoRA: what stands beside which weight of a base, and which modules it holds whole."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.tools.checkpoint.files.safetensors_file import read_header
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor
from dynapipe_ext.tools.checkpoint.files.torch_file import read_torch_file
from dynapipe_ext.tools.checkpoint.huggingface.carried_files import read_json_object

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<side>[AB])\.(?P<what>weight|bias)"
    r"|lora_embedding_(?P<embedded>[AB])(?:\.weight)?|(?P<magnitude>lora_magnitude_vector)(?:\.weight)?)"
)
_KNOWN_FIELDS = {
    "r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "bias", "lora_bias",
    "init_lora_weights",
    # Of training, or of where adapters are: the names of tensors say that.
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "lora_dropout",
    "eva_config", "loftq_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core",
    "runtime_config", "qalora_group_size",
}  # fmt: skip
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # that leave the base as it is
# transformers' layers that keep their weights as (inputs, outputs), by model_type.
_TRANSPOSED = {
    "gpt2": ("c_attn", "c_proj", "c_fc", "q_attn"),
    "openai-gpt": ("c_attn", "c_proj", "c_fc"),
}
_CHUNK_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class BesideWeight:
    """LoRA beside one weight: `a` (rank, inputs), `b` (outputs, rank). Of a bias, `b` (outputs,) alone.

    With a `magnitude` (outputs,) it is DoRA (Liu et al. 2024): every output's row has that length. `transposed`: the
    weight is kept as (inputs, outputs), which an embedding always is, its inputs being the vocabulary.
    """

    a: StoredTensor | None
    b: StoredTensor
    scale: float
    magnitude: StoredTensor | None = None
    is_embedding: bool = False
    transposed: bool = False

    def placed(self, name: str, shape: tuple[int, ...], model_type: str) -> BesideWeight | str:
        """As it stands beside a weight of that shape, or why it cannot."""
        if self.a is None:
            return self if shape == self.b.shape else f"{name} is {list(shape)} beside a bias of {list(self.b.shape)}"
        expected = (self.b.shape[0], self.a.shape[1])
        module = name.removesuffix(".weight").rpartition(".")[2]
        transposed = self.is_embedding or module in _TRANSPOSED.get(model_type, ())
        if shape != (expected[::-1] if transposed else expected):
            return f"{name} is {list(shape)} beside adapters of {expected[1]} inputs and {expected[0]} outputs"
        return replace(self, transposed=transposed)

    def add_to(self, weight: torch.Tensor) -> None:
        """Merge into `weight`, some rows at a time, in float32 as peft does: the bits of LoRA are those of peft."""
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        b = self.b.read().to(wide)
        if self.a is None:
            weight.copy_(weight.to(wide) + self.scale * b)
            return
        a = self.a.read().to(wide)
        step = max(1, _CHUNK_VALUES // max(1, weight.shape[1]))
        places = [slice(row, min(weight.shape[0], row + step)) for row in range(0, weight.shape[0], step)]
        factors = self._factors(weight, a, b, places)
        for rows in places:
            merged = self._sum(weight, a, b, rows)
            if factors is not None:
                merged *= factors if self.transposed else factors[rows, None]
            weight[rows] = merged.to(weight.dtype)

    def _sum(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rows: slice) -> torch.Tensor:
        change = a[:, rows].t() @ b.t() if self.transposed else b[rows] @ a
        return weight[rows].to(a.dtype) + self.scale * change

    def _factors(
        self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, places: list[slice]
    ) -> torch.Tensor | None:
        """DoRA's: what each output is multiplied by."""
        if self.magnitude is None:
            return None
        squares = torch.zeros(b.shape[0], dtype=b.dtype)
        for rows in places:
            merged = self._sum(weight, a, b, rows)
            if self.transposed:
                squares += merged.square().sum(0)
            else:
                squares[rows] = torch.linalg.norm(merged, dim=1).square()
        return self.magnitude.read().to(b.dtype).view(-1) / squares.sqrt()


@dataclass(frozen=True, slots=True)
class Adapters:
    """What lies in a folder of peft, by the names of the base's tensors."""

    folder: Path
    base: str  # as its configuration names it
    beside: Mapping[str, BesideWeight]
    replacing: Mapping[str, StoredTensor]  # modules and biases that were trained whole


def read_adapters(folder: Path) -> Adapters:
    """Errors: DataError, ConfigError for what is no LoRA, is damaged, or asks for what is not known."""
    raw = read_json_object(folder / ADAPTER_CONFIG, "a folder that peft has saved adapters in")
    _refuse_unknown(raw, folder / ADAPTER_CONFIG)
    file = next((folder / name for name in ADAPTER_FILES if (folder / name).is_file()), None)
    if file is None:
        raise DataError(f"{folder} has no {' or '.join(ADAPTER_FILES)}: copy it too")
    tensors = read_header(file) if file.suffix == ".safetensors" else read_torch_file(file)
    parts: dict[str, dict[str, StoredTensor]] = {}
    replacing: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
        match = _PART.fullmatch(name)
        if match is None:
            if "lora_" in name:
                raise ConfigError(f"{file}: {key} is a part of LoRA that is not known: merge it by peft")
            replacing[name] = tensor
            continue
        part = match["magnitude"] or (f"E{match['embedded']}" if match["embedded"] else match["side"])
        part += "bias" if match["what"] == "bias" else ""
        parts.setdefault(match["module"], {})[part] = tensor
    beside: dict[str, BesideWeight] = {}
    for module, own in parts.items():
        beside |= _beside(module, own, raw, file)
    if not beside and not replacing:
        raise DataError(f"{file} holds no tensors: copy it again")
    return Adapters(folder, str(raw.get("base_model_name_or_path") or ""), beside, replacing)


def _beside(
    module: str, own: Mapping[str, StoredTensor], raw: Mapping[str, Any], file: Path
) -> dict[str, BesideWeight]:
    """Of one module: beside its weight, and its bias. Errors: DataError, ConfigError."""
    is_embedding = "EA" in own or "EB" in own
    a, b = (own.get(f"E{side}" if is_embedding else side) for side in "AB")
    if a is None or b is None:
        raise DataError(f"{file}: {module} has {', '.join(sorted(own))} where both A and B are needed: copy it again")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise ConfigError(
            f"{file}: {module} has A {list(a.shape)} and B {list(b.shape)}, not (rank, inputs) and (outputs, rank)"
        )
    magnitude = own.get("lora_magnitude_vector")
    if bool(raw.get("use_dora")) != (magnitude is not None) or (is_embedding and magnitude is not None):
        what = (
            "of an embedding" if is_embedding and magnitude is not None else f"where use_dora is {raw.get('use_dora')}"
        )
        raise ConfigError(f"{file}: {module} has {'a' if magnitude else 'no'} magnitude {what}: merge it by peft")
    if magnitude is not None and magnitude.size != b.shape[0]:
        raise DataError(f"{file}: {module} has {magnitude.size} magnitudes of {b.shape[0]} outputs: copy it again")
    scale = _scale(module, a.shape[0], raw, file)
    made = {f"{module}.weight": BesideWeight(a, b, scale, magnitude, is_embedding)}
    if (bias := own.get("Bbias")) is not None:
        made[f"{module}.bias"] = BesideWeight(None, bias, scale)
    return made


def _scale(module: str, rank: int, raw: Mapping[str, Any], file: Path) -> float:
    """alpha over the rank, or over its root (rsLoRA, Kalajdzievski 2023). Errors: ConfigError."""
    named_rank = _of_module(module, "r", "rank_pattern", raw)
    if named_rank != rank:
        raise ConfigError(
            f"{file.parent / ADAPTER_CONFIG} says that {module} has rank {short(named_rank)}, but its A has {rank}"
            " rows: give the adapter_config.json that was saved with these weights"
        )
    alpha = _of_module(module, "lora_alpha", "alpha_pattern", raw)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(f"{file.parent / ADAPTER_CONFIG}: lora_alpha of {module} is {short(alpha)}: give a number")
    return alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def _of_module(module: str, name: str, patterns: str, raw: Mapping[str, Any]) -> Any:
    """The value of a module: that of the first pattern that ends its name, else that of all."""
    values = raw.get(patterns) or {}
    key = next((key for key in values if re.match(rf"(.*\.)?({key})$", module)), None)
    return raw.get(name) if key is None else values[key]


def _refuse_unknown(raw: Mapping[str, Any], where: Path) -> None:
    """Errors: ConfigError naming what would merge otherwise than plain LoRA, rsLoRA and DoRA do."""
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f"{where}: peft_type is {short(raw.get('peft_type'))}: only LORA is merged here, give such")
    if (start := raw.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise ConfigError(
            f"{where}: init_lora_weights is {short(start)}, which changes the base: let peft save plain LoRA first"
            " (path_initial_model_for_weight_conversion)"
        )
    if unknown := sorted(name for name, value in raw.items() if value and name not in _KNOWN_FIELDS):
        shown = ", ".join(f"{name} ({short(raw[name])})" for name in unknown)
        raise ConfigError(f"{where} asks for {shown}, which is not known here: merge it by peft's merge_and_unload")
