"""What a conversion takes: a large model made without memory, and the resident peak of a process that converts it."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from dynapipe_ext.launch.commands import convert as convert_command
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import write_config
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.files.safetensors_file import SafetensorsSpec, write_safetensors
from tests.support.stopped_child import in_child


class Folders(NamedTuple):
    """Where models of two sizes go through the same conversions."""

    small: Path
    large: Path


@dataclass(frozen=True)
class Peak:
    """Resident bytes: before the conversion, with all of its libraries in use, and the most during it."""

    before_bytes: int
    peak_bytes: int
    seconds: float

    @property
    def own_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes


def measured(folders: Folders, origin: str, target: str, *flags: str, timeout_s: int = 120) -> Peak:
    """The peak of `dynapipe convert ORIGIN TARGET FLAGS` on the large model, in a fork of this process that did the
    same to the small one before: so the pages of libraries, which a fork maps anew, do not count."""
    commands = [[str(folder / origin), str(folder / target), *flags] for folder in folders]
    with tempfile.NamedTemporaryFile(mode="r") as output:
        status = in_child(partial(_converted, *commands), Path(output.name), timeout_s)
        text = output.read()
    assert status == 0, text
    return Peak(**json.loads(text.splitlines()[-1]))


def _converted(first: list[str], second: list[str]) -> int:
    """Converts twice, then prints the `Peak` of the second. Before it free memory goes back, and the resident peak is
    reset: what is left above is the conversion's own."""
    parser = argparse.ArgumentParser()
    convert_command.add_arguments(parser)
    status = convert_command.run(parser.parse_args(first))
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS:")
    started_s = time.perf_counter()
    status |= convert_command.run(parser.parse_args(second))
    print(json.dumps(asdict(Peak(before, _status_bytes("VmHWM:"), time.perf_counter() - started_s))))
    return status


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def make_models(folder: Path, name: str, architecture: Architecture, *, layers_per_shard: int = 2) -> Folders:
    """Folders `small` and `large`, each with a Hugging Face folder `name`: a model of `architecture`, and one of the
    same layers and groups whose tensors are small."""
    folders = Folders(folder / "small", folder / "large")
    head_dim, per_group = 8, 64 * architecture.num_query_groups
    small = replace(
        architecture, hidden_size=head_dim * architecture.num_heads, head_dim=head_dim, ffn_hidden_size=per_group,
        vocab_size=per_group,
    )  # fmt: skip
    for made, size in zip(folders, (small, architecture), strict=True):
        made.mkdir()
        _make_model(made / name, size, layers_per_shard)
    return folders


def _make_model(folder: Path, architecture: Architecture, layers_per_shard: int) -> None:
    """A Hugging Face folder of `architecture`. Its tensors are pieces of one random row, each from another place."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_config(architecture)))
    shards: dict[int, list[TensorGroup]] = {}
    for group in tensor_groups(architecture):
        shards.setdefault(group.layer // layers_per_shard if group.layer >= 0 else -1, []).append(group)
    dtype = getattr(torch, architecture.dtype)
    longest = max(info.size for group in tensor_groups(architecture) for info in group.tensors)
    base = torch.randn(longest + 10_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    index: dict[str, str] = {}
    for number, groups in enumerate(shards.values(), start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        specs = [SafetensorsSpec(info.name, dtype, info.shape) for group in groups for info in group.tensors]
        write_safetensors(folder / name, specs, _values(specs, base, len(index)))
        index |= {spec.name: name for spec in specs}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def largest_group_bytes(architecture: Architecture) -> int:
    itemsize: int = getattr(torch, architecture.dtype).itemsize
    return itemsize * max(group.size for group in tensor_groups(architecture))


def total_bytes(architecture: Architecture) -> int:
    itemsize: int = getattr(torch, architecture.dtype).itemsize
    return itemsize * sum(group.size for group in tensor_groups(architecture))


def _values(specs: Sequence[SafetensorsSpec], base: torch.Tensor, first: int) -> Iterator[tuple[str, torch.Tensor]]:
    for place, spec in enumerate(specs, start=first):
        yield spec.name, base[place : place + math.prod(spec.shape)].view(spec.shape)
