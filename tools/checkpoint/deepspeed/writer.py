"""Checkpoints that DeepSpeed engines on Hugging Face models load, whatever their ZeRO stage and number of ranks.

    DST/latest, latest_universal      the name of the tag
    DST/TAG/mp_rank_00_model_states.pt   the module, which stage 0 loads alone
    DST/TAG/zero/NAME/*.pt            masters and moments of stages 1 to 3; the weight itself where there is no master
    DST/huggingface/                  configuration and tokenizer

`_USAGE` says how; DeepSpeed 0.19: runtime/engine.py, runtime/base_optimizer.py, runtime/zero/stage3.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.deepspeed.names import ModuleTensor, module_tensors, tied_names
from dynapipe_ext.tools.checkpoint.deepspeed.output import Promised, TorchFileWriter
from dynapipe_ext.tools.checkpoint.deepspeed.universal import FILES, FOLDER, NUM_GROUPS, OPTIMIZER_STATE
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

_MODEL = "model"
_VERSION = "0.19.8"  # of DeepSpeed, whose layout this is
_NUM_GROUPS = 64  # DeepSpeed passes over parameter groups of the engine that the file has no entry for
_USAGE = """DeepSpeed loads it with
  ZeRO 0: engine.load_checkpoint(DST, load_module_only=True), without "load_universal": weights alone
  ZeRO 1, 2, 3: "checkpoint": {"load_universal": true} in the configuration, and engine.load_checkpoint(DST%s)"""
# Hyper-parameters that Adam of torch, DeepSpeed or Apex takes from its groups.
_KNOWN = {
    "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
    "decoupled_weight_decay", "initial_lr", "bias_correction", "step",
}  # fmt: skip
_TORCH_ADAM = {"foreach", "capturable", "maximize"}


class DeepSpeedWriter(CheckpointWriter):
    """One piece with the module, and one for each group of masters and moments."""

    def __init__(self, directory: Path, reader: CheckpointReader, options: WriterOptions) -> None:
        if options != WriterOptions(vocab_divisible_by=options.vocab_divisible_by):
            raise ConfigError(
                "a universal checkpoint of DeepSpeed is cut when it is loaded: leave out --tp, --pp and"
                " --layers-per-stage"
            )
        self._directory, self._reader = directory, reader
        self._state = reader.state or TrainingState()
        self._tag = directory / f"global_step{self._state.iteration}"
        self._tensors = module_tensors(reader.architecture)
        self._kinds = self._carried_kinds()
        self.usage = (_USAGE % ("" if "exp_avg" in self._kinds else ", load_module_only=True"),)
        self._by_groups: dict[tuple[TensorGroup, ...], list[ModuleTensor]] = {}
        for tensor in (one for one in self._tensors if not one.groups[0].is_buffer):
            self._by_groups.setdefault(tensor.groups, []).append(tensor)

    def pieces(self) -> Sequence[CheckpointPiece]:
        whole = CheckpointPiece(_MODEL, tuple((group, "weight") for group in tensor_groups(self._reader.architecture)))
        parts = [
            CheckpointPiece(_name(groups), tuple((group, kind) for kind in self._kinds.values() for group in groups))
            for groups in self._by_groups
        ]
        return [whole, *parts]

    def write(self, piece: CheckpointPiece, source: Source) -> Mapping[str, Any]:
        if piece.name == _MODEL:
            self._write_module(source)
        else:
            self._write_states(next(groups for groups in self._by_groups if _name(groups) == piece.name), source)
        return {}

    def finish(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        groups, num_groups, agreed = _hyper_parameters(self._state)
        tree: dict[str, Any] = {"param_groups": groups, NUM_GROUPS: num_groups, "ds_version": _VERSION}
        values: list[torch.Tensor] = []
        if "exp_avg" in self._kinds:
            step, values = self._step()
            tree["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": [agreed]}  # for stage 3
        _write(self._tag / FOLDER / OPTIMIZER_STATE, tree, values)
        dtype = self._reader.dtype(tensor_groups(self._reader.architecture)[0], "weight")
        stand_in = Promised(0, (1,), dtype)  # of a shape that no engine takes, where it would pass over an empty one
        tree = self._model_tree({tensor.name: stand_in for tensor in self._tensors})
        _write(self._tag / "zero_pp_rank_0_mp_rank_00_model_states.pt", tree, [torch.zeros(1, dtype=dtype)])
        if self._reader.files:
            (self._directory / "huggingface").mkdir(exist_ok=True)
        for file in self._reader.files:
            shutil.copyfile(file, self._directory / "huggingface" / file.name)
        for name in ("latest", "latest_universal"):
            (self._directory / name).write_text(self._tag.name, encoding="utf-8")

    def _carried_kinds(self) -> dict[StateKind, StateKind]:
        """What each file of a parameter is filled with; the weight where there is no master."""
        kinds = self._reader.kinds
        filled_with: dict[StateKind, StateKind] = {"master": "master" if "master" in kinds else "weight"}
        if {"exp_avg", "exp_avg_sq"} <= set(kinds):
            filled_with |= {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
        return filled_with

    def _write_module(self, source: Source) -> None:
        promised = {}
        for i, tensor in enumerate(self._tensors):
            promised[tensor.name] = Promised(i, tensor.shape, self._reader.dtype(tensor.groups[0], "weight"))
        self._tag.mkdir(parents=True, exist_ok=True)
        with TorchFileWriter(self._tag / "mp_rank_00_model_states.pt", self._model_tree(promised)) as file:
            held: TensorGroup | None = None
            tensors: GroupTensors = {}
            for group, name in (part for tensor in self._tensors for part in tensor.parts):
                if group != held:
                    tensors = {}  # before the next group is read
                    tensors, held = source(group, "weight"), group
                file.write(tensors[name])

    def _write_states(self, groups: tuple[TensorGroup, ...], source: Source) -> None:
        bundle = self._by_groups[groups]
        for tensor in bundle:
            (self._tag / FOLDER / tensor.name).mkdir(parents=True, exist_ok=True)
            if "exp_avg" in self._kinds:
                _write(self._tag / FOLDER / tensor.name / "step.pt", *self._step())
        for file_kind, kind in self._kinds.items():
            with ExitStack() as stack:
                files = {}
                for tensor in bundle:
                    tree = {"param": Promised(0, tensor.shape, self._reader.dtype(groups[0], kind))}
                    path = self._tag / FOLDER / tensor.name / FILES[file_kind]
                    files[tensor.name] = stack.enter_context(TorchFileWriter(path, tree))
                for group in groups:
                    tensors = source(group, kind)
                    for tensor in bundle:
                        for part in tensor.parts:
                            if part[0] == group:
                                files[tensor.name].write(tensors[part[1]])
                    del tensors

    def _step(self) -> tuple[Any, list[torch.Tensor]]:
        """Adam's step as its optimizer keeps it: torch's as a tensor, DeepSpeed's own as a number."""
        step = self._state.optimizer_step
        if any(self._state.param_groups) and not any(_TORCH_ADAM & set(group) for group in self._state.param_groups):
            return step, []
        return Promised(0, (), torch.float32), [torch.tensor(float(step))]

    def _model_tree(self, module: Mapping[str, Promised]) -> dict[str, Any]:
        """What a model file holds besides and around the module."""
        embedding = self._tensors[0].name
        tied = dict.fromkeys(tied_names(self._reader.architecture), embedding)
        return {
            "module": {**module, **dict.fromkeys(tied, module[embedding])},
            "buffer_names": [tensor.name for tensor in self._tensors if tensor.groups[0].is_buffer],
            "optimizer": None,
            "param_shapes": None,
            "frozen_param_shapes": None,
            "shared_params": tied,
            "frozen_param_fragments": None,
            "lr_scheduler": _scheduler(self._state),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": self._state.iteration,
            "global_samples": self._state.consumed_samples,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": _VERSION,
        }


def _name(groups: tuple[TensorGroup, ...]) -> str:
    return groups[0].name if len(groups) == 1 else f"{groups[0].name}-{len(groups)}"


def _write(path: Path, tree: Any, values: Sequence[torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TorchFileWriter(path, tree) as file:
        for value in values:
            file.write(value)


def _hyper_parameters(state: TrainingState) -> tuple[list[dict[str, Any]], int, dict[str, Any]]:
    """Settings of each parameter group for stages 1 and 2, how many groups there were, and settings for stage 3.

    Stage 3 gives one group's settings to all. Groups of another framework hold other parameters than the engine's. In
    both cases only what all groups agree on is given, to all; what is not given stays as the engine has it.
    """
    groups = [dict(group) for group in state.param_groups]
    agreed = {
        key: value
        for key, value in (groups[0] if groups else {}).items()
        if key in _KNOWN and all(key in group and group[key] == value for group in groups)
    }
    if any(set(group) - _KNOWN for group in groups):
        return [agreed] * _NUM_GROUPS, 1, agreed
    return groups + [{} for _ in range(_NUM_GROUPS - len(groups))], len(groups), agreed


def _scheduler(state: TrainingState) -> dict[str, Any]:
    """As it was saved by a scheduler that engines take; else where any of these would stand after as many steps."""
    if {"last_epoch", "last_batch_iteration"} & set(state.scheduler):
        return dict(state.scheduler)
    steps = state.iteration
    return {"last_epoch": steps, "_step_count": steps + 1, "lr_lambdas": [], "last_batch_iteration": steps}
