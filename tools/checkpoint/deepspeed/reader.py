"""Checkpoints that DeepSpeed engines write: ZeRO stages 0 to 3, one engine or one a pipeline rank, universal ones, and
the layer files of pipelines.

The folder is that which `latest` lies in, or one tag of it. The model's config.json must lie in either, as Hugging
Face's Trainer leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.deepspeed.contents import named
from dynapipe_ext.tools.checkpoint.deepspeed.file import SplitTensor, same_bytes
from dynapipe_ext.tools.checkpoint.deepspeed.names import ModulePlaces, canonical, tied_names
from dynapipe_ext.tools.checkpoint.deepspeed.tag import read_tag
from dynapipe_ext.tools.checkpoint.deepspeed.writer import DeepSpeedWriter
from dynapipe_ext.tools.checkpoint.files.stored_tensor import refuse_faults
from dynapipe_ext.tools.checkpoint.formats import STATE_KINDS, CheckpointReader, GroupTensors, StateKind
from dynapipe_ext.tools.checkpoint.huggingface.carried_files import CONFIG, carried_files, read_json_object
from dynapipe_ext.tools.checkpoint.recognition import TAG_FILES, is_tag, told_tag

__all__ = ["DeepSpeedReader", "DeepSpeedWriter", "open_checkpoint"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def open_checkpoint(path: Path) -> DeepSpeedReader:
    """Errors: DataError naming the file and what it lacks."""
    return DeepSpeedReader(path)


class DeepSpeedReader(CheckpointReader):
    """Gives tensors by their names on the Hub.

    "weight" is the module's, in its dtype: what stages 0 to 2 and pipelines save, under stage 3 the fp32 master rounded
    to that dtype, as the engine itself does after each step. "master" and the moments are the optimizer's; of a frozen
    parameter the master is the weight and the moments are 0.
    """

    def __init__(self, path: Path) -> None:
        tag = _tag(path)
        folder = _config_folder(path, tag)
        self.path = tag
        self.files = carried_files(folder)
        raw = read_json_object(folder / CONFIG, "the model's configuration")
        architecture = read_config(raw, str(folder / CONFIG))
        self._contents = canonical(read_tag(tag, architecture))
        self.architecture = _with_own_head(architecture, self._contents.weights)
        self._places = ModulePlaces(self.architecture, self._contents)
        self._states = self._contents.states
        self._tied = (tensor_groups(self.architecture)[0].tensors[0].name, *tied_names(self.architecture))
        self.kinds: tuple[StateKind, ...] = tuple(
            kind for kind in STATE_KINDS if kind == "weight" or kind in self._states
        )
        self.state = self._contents.training
        self.notices = self._contents.notices
        if frozen := self._without_state():
            self.notices += (
                f"{len(frozen)} tensors have no optimizer state and were frozen: their masters are the weights, their"
                f" moments 0: {named(frozen)}",
            )
        if buffers := self._places.buffers():
            self.notices += (f"{len(buffers)} buffers are no weights and are left out: {named(buffers)}",)
        dtypes = {self._dtype(name) for name in self._contents.weights} & set(_FLOATS)
        if len(dtypes) == 1:
            self.architecture = replace(self.architecture, dtype=str(dtypes.pop()).removeprefix("torch."))

    def check(self) -> None:
        """Errors: DataError with every missing, extra and misshapen tensor."""
        self._places.check(self.path)
        faults = []
        for group in tensor_groups(self.architecture):
            dtypes = {self._dtype(self._places[info.name].name) for info in group.tensors}
            if len(dtypes) > 1 or not dtypes <= set(_FLOATS):
                names = ", ".join(info.name for info in group.tensors)
                faults.append(
                    f"{names} stored as {', '.join(sorted(map(str, dtypes)))}, not as one of float32, 16, bf16"
                )
            for kind in self._states:
                for info in group.tensors:
                    place = self._places[info.name]
                    weight, stored = self._contents.weights, self._state(kind, place.name)
                    expected = self._weight(weight, place.name).shape
                    if stored is not None and stored.shape != expected:
                        faults.append(f"{kind} of {place.name} is {list(stored.shape)}, not {list(expected)}")
        refuse_faults(self.path, faults, "Save the checkpoint again, or give files of one checkpoint")

    def dtype(self, group: TensorGroup, kind: StateKind) -> torch.dtype:
        name = self._places[group.tensors[0].name].name
        if kind == "weight":
            return self._dtype(name)
        stored = self._state(kind, name)
        return stored.dtype if stored is not None else torch.float32

    def read(self, group: TensorGroup, kind: StateKind) -> GroupTensors:
        return {info.name: self._read(info.name, kind) for info in group.tensors}

    def _without_state(self) -> list[str]:
        if not self._states:
            return []
        return [name for name, place in self._places.items() if self._state(self.kinds[-1], place.name) is None]

    def _read(self, name: str, kind: StateKind) -> torch.Tensor:
        place = self._places[name]
        stored = self._weight(self._contents.weights, place.name)
        state = None
        if kind != "weight":
            state = self._state(kind, place.name)
            if state is None and kind != "master":
                return torch.zeros(place.shape, dtype=torch.float32)
            stored = stored if state is None else state
        part = stored if stored.shape == place.shape else stored.part(place.start, place.shape)
        if kind == "weight":
            return part.read_as(self._dtype(place.name))
        return part.read_as(torch.float32 if state is None else part.dtype)

    def _weight(self, weights: Mapping[str, SplitTensor], name: str) -> SplitTensor:
        return weights[name] if name in weights else weights[self._contents.aliases[name]]

    def _dtype(self, name: str) -> torch.dtype:
        own = name if name in self._contents.weights else self._contents.aliases[name]
        return self._contents.casts.get(own) or self._contents.weights[own].dtype

    def _state(self, kind: StateKind, name: str) -> SplitTensor | None:
        """A tied weight's state is under whichever of its names the engine met first."""
        by_name = self._states[kind]
        names: tuple[str, ...] = (name, self._contents.aliases.get(name, name))
        names += self._tied if name in self._tied else ()
        return next((by_name[other] for other in names if other in by_name), None)


def _with_own_head(architecture: Architecture, weights: Mapping[str, SplitTensor]) -> Architecture:
    """transformers 5 writes that T5 ties its head, even where it does not: the files tell."""
    head, shared = weights.get("lm_head.weight"), weights.get("shared.weight")
    if not architecture.num_decoder_layers or not architecture.tied_embeddings or head is None or shared is None:
        return architecture
    return replace(architecture, tied_embeddings=same_bytes(head, shared))


def _tag(path: Path) -> Path:
    if is_tag(path):
        return path
    for name in TAG_FILES:
        if tag := told_tag(path, name):
            return tag
        if (path / name).exists():
            raise DataError(f"{path / name} names no folder with *_model_states.pt: copy the folder that it names")
    raise DataError(f"{path} has no `latest` and no *_model_states.pt: give what an engine saved, or one tag of it")


def _config_folder(path: Path, tag: Path) -> Path:
    for folder in (path, tag, tag.parent, tag.parent / "huggingface"):
        if (folder / CONFIG).is_file():
            return folder
    raise DataError(f"{path} has no {CONFIG}, without which its model is not known: copy the model's into {tag.parent}")
