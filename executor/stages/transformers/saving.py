"""Parts of a model, or their adapters, written as the folder that `from_pretrained` reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.protocols import Reductions
from dynapipe_ext.executor.stages.transformers.part import TransformersPart, copied_weights
from dynapipe_ext.executor.stages.transformers.quiet import quietly
from dynapipe_ext.models.module_tree import put_rates

ADAPTER_FILE = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_NAME = "default"  # in the names of peft's parameters, and not in its files,
_ADAPTED = "base_model.model."  # which have this before them
_INDEX = "model.safetensors.index.json"


def save_parts(
    parts: Sequence[TransformersPart], folder: str | Path, *, parallel: Reductions | None = None, writes: bool = True
) -> None:
    """The whole model of which ranks hold parts, in a folder that none of them ever has in memory.

    Every rank calls it; `writes` on the ranks of one replica (the others have the same weights). Each stage's weights
    are files of their own, joined by an index; of a model with peft's adapters, `add_adapter`, the adapters alone are
    saved, in one file. The folder, which all ranks must reach, appears at the end, whole. Errors: ConfigError, on all
    ranks, for one that is there.
    """
    folder = Path(folder)
    scratch = folder.with_name(f".{folder.name}.part")
    writes_first = writes and parts[0].place.is_first
    if _sum(int(writes_first and folder.exists()), parts, parallel):
        raise ConfigError(f"{folder} exists: name a new folder for the model")
    if writes_first:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    _sum(0, parts, parallel)
    if writes:
        write_stages(parts, scratch)
    _sum(0, parts, parallel)
    if writes_first:
        join_stages(scratch, parts[0].place.num_stages)
        os.replace(scratch, folder)
    _sum(0, parts, parallel)


def write_stages(parts: Sequence[TransformersPart], folder: Path) -> None:
    """This rank's parts, each in a folder of its stage; of the ranks of one replica, once all have, one joins them."""
    with quietly():
        for part in parts:
            _save_part(part, folder / f"stage-{part.place.stage}")


def _save_part(part: TransformersPart, folder: Path) -> None:
    model = part.model
    saved = copied_weights([part])  # by the first stage that holds them; by one of several names they go here
    state = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if weight not in saved:
            saved.add(weight)
            state[name] = weight
    # In a job of several ranks transformers writes on the first alone, for there all would have the whole model.
    model.should_save_on_this_rank = lambda *_, **__: True
    in_training = [(config, name, getattr(config, name)) for config, name, _ in part.loaded_dropout]
    put_rates(part.loaded_dropout)
    try:
        model.save_pretrained(folder, state_dict={name: weight.detach() for name, weight in state.items()})
    finally:
        put_rates(in_training)
        del model.should_save_on_this_rank


def join_stages(folder: Path, num_stages: int) -> None:
    """The folders of all stages become one: shards with an index, or one file of adapters."""
    stages = [folder / f"stage-{stage}" for stage in range(num_stages)]
    if (stages[0] / ADAPTER_FILE).exists():
        save_file(
            {name: tensor for stage in stages for name, tensor in load_file(stage / ADAPTER_FILE).items()},
            folder / ADAPTER_FILE,
            metadata={"format": "pt"},
        )
        (stages[0] / ADAPTER_FILE).unlink()
        _join_target_modules(stages)
    files = [file for stage in stages for file in sorted(stage.glob("model*.safetensors"))]
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, file in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        with safe_open(file, framework="pt") as tensors:
            weight_map |= dict.fromkeys(tensors.keys(), name)
        total_bytes += file.stat().st_size
        os.replace(file, folder / name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for file in stages[0].iterdir():
        if not file.name.startswith("model") or file.suffix not in (".safetensors", ".json"):
            os.replace(file, folder / file.name)
    for stage in stages:
        shutil.rmtree(stage)


def _join_target_modules(stages: Sequence[Path]) -> None:
    """The first stage's adapter_config.json then names the adapted modules of all stages.

    peft writes the modules it found in one stage ("all-linear" becomes their names), and loads no others.
    """
    configs = [json.loads((stage / _ADAPTER_CONFIG).read_text(encoding="utf-8")) for stage in stages]
    targets = [config["target_modules"] for config in configs]
    if all(isinstance(names, list) for names in targets):  # a pattern is the same on all stages
        whole = configs[0] | {"target_modules": sorted({name for names in targets for name in names})}
        (stages[0] / _ADAPTER_CONFIG).write_text(json.dumps(whole, indent=2, sort_keys=True), encoding="utf-8")


def load_adapters(folder: Path, parts: Sequence[TransformersPart]) -> None:
    """Fill the parts' adapters from a folder that was saved of any topology. Errors: DataError for what it lacks."""
    with safe_open(folder / ADAPTER_FILE, framework="pt") as saved, torch.no_grad():
        names = set(saved.keys())
        for part in parts:
            for name, weight in trained_weights(part):
                key, shape = _ADAPTED + name.replace(f".{ADAPTER_NAME}.", "."), list(weight.shape)
                if key not in names or saved.get_slice(key).get_shape() != shape:
                    raise DataError(
                        f"{folder / ADAPTER_FILE} has no {key} of shape {shape}: give adapters of this rank and model"
                    )
                weight.copy_(saved.get_tensor(key))


def trained_weights(part: TransformersPart) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """By their names in the whole model."""
    for name, weight in part.model.named_parameters():
        if weight.requires_grad:
            yield name, weight


def _sum(number: int, parts: Sequence[TransformersPart], parallel: Reductions | None) -> int:
    """Of all ranks' numbers; none goes on before all have come."""
    total = torch.tensor(number, device=next(parts[0].parameters()).device)
    if parallel is not None:
        parallel.sum_over_job(total)
    return int(total)
