"""What a conversion takes: a large model made without memory, and the resident peak of a process that converts it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import write_config
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.files.safetensors_file import SafetensorsSpec, write_safetensors

# The child's resident peak is reset once torch is there: what is left above is the conversion's own.
_CHILD = """
import argparse, json, sys, time, torch
from dynapipe_ext.launch.commands import convert as convert_command

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

open("/proc/self/clear_refs", "w").write("5")
before = kilobytes("VmRSS:")
parser = argparse.ArgumentParser()
convert_command.add_arguments(parser)
started_s = time.perf_counter()
status = convert_command.run(parser.parse_args(sys.argv[1:]))
print(json.dumps({"status": status, "before": before, "peak": kilobytes("VmHWM:"),
                  "seconds": time.perf_counter() - started_s}), file=sys.stderr)
"""


@dataclass(frozen=True)
class Peak:
    """Resident bytes: with torch imported, and the most during the conversion."""

    before_bytes: int
    peak_bytes: int
    seconds: float

    @property
    def own_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes


def measured(*arguments: object, timeout_s: float = 120.0) -> Peak:
    """The peak of `dynapipe convert ARGUMENTS` in a process of its own."""
    command = [sys.executable, "-c", _CHILD, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr.splitlines()[-1])
    assert found["status"] == 0, done.stderr
    return Peak(1024 * found["before"], 1024 * found["peak"], found["seconds"])


def large_model(folder: Path, architecture: Architecture, *, layers_per_shard: int = 2) -> Path:
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
    return folder


def largest_group_bytes(architecture: Architecture) -> int:
    itemsize: int = getattr(torch, architecture.dtype).itemsize
    return itemsize * max(group.size for group in tensor_groups(architecture))


def total_bytes(architecture: Architecture) -> int:
    itemsize: int = getattr(torch, architecture.dtype).itemsize
    return itemsize * sum(group.size for group in tensor_groups(architecture))


def _values(specs: Sequence[SafetensorsSpec], base: torch.Tensor, first: int) -> Iterator[tuple[str, torch.Tensor]]:
    for place, spec in enumerate(specs, start=first):
        yield spec.name, base[place : place + math.prod(spec.shape)].view(spec.shape)
