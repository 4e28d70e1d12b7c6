"""What every checkpoint format offers, so that any one converts to any other.

A reader gives tensors by group under their Hugging Face names and shapes, whatever its files hold. A writer says which
pieces it consists of and writes each from a source of groups, so one group is in memory at a time.

    reader.read(group, kind) ──► {name: tensor} ──► writer.write(piece, source) ──► record ──► writer.finish(records)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.tensors import TensorGroup

if TYPE_CHECKING:
    import torch  # types alone: options are refused before it is loaded

StateKind = Literal["weight", "master", "exp_avg", "exp_avg_sq"]  # Adam's fp32 copy of the weight and its moments
STATE_KINDS: tuple[StateKind, ...] = get_args(StateKind)
GroupTensors: TypeAlias = "Mapping[str, torch.Tensor]"
Source: TypeAlias = "Callable[[TensorGroup, StateKind], GroupTensors]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Where training stood: what the optimizer and the schedules hold besides tensors. Plain values only."""

    iteration: int = 0
    optimizer_step: int = 0
    consumed_samples: int = 0
    param_groups: tuple[Mapping[str, Any], ...] = ()
    scheduler: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronValues:
    """What checkpoints of Megatron's alone hold besides: plain values, which one takes from another as they are.

    `dropped_arguments` have other values, like members of enumerations.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    dropped_arguments: tuple[str, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)
    grad_scaler: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How a checkpoint is laid out over ranks; formats without ranks refuse what they cannot heed. `ep` ranks share a
    layer's experts; every pipeline rank has `vpp` stages (interleaved)."""

    tp: int = 1
    pp: int = 1
    layers_per_stage: tuple[int, ...] = ()
    vocab_divisible_by: int = 128
    ep: int = 1
    vpp: int = 1


@dataclass(frozen=True, slots=True)
class CheckpointPiece:
    """Files that are written together and are whole or absent. `groups` are those that writing it will ask for."""

    name: str
    groups: tuple[tuple[TensorGroup, StateKind], ...]


def states_of(groups: Iterable[TensorGroup], kinds: Iterable[StateKind]) -> tuple[tuple[TensorGroup, StateKind], ...]:
    """What of groups there is, kind by kind: of buffers the weight alone."""
    return tuple((group, kind) for kind in kinds for group in groups if kind == "weight" or not group.is_buffer)


class CheckpointReader(Protocol):
    """A checkpoint on disk. Opening it reads no tensors; errors are DataErrors that name the file and the tensor.

    Members with a value here are defaults. A reader that knows more takes this class as its base and replaces them.
    """

    architecture: Architecture
    kinds: tuple[StateKind, ...]
    state: TrainingState | None
    files: tuple[Path, ...]  # tokenizer, generation config, config.json: carried along
    notices: tuple[str, ...] = ()  # what is there and is not carried
    config_fields: Mapping[str, Any] = MappingProxyType({})  # for a config.json, where none is carried
    megatron: MegatronValues = MegatronValues()

    def drop_prediction_layers(self) -> bool:
        """Leave out the layers of multi-token prediction, which `check` refuses; whether there are any."""
        return False

    def check(self) -> None:
        """Refuse missing, extra and misshapen tensors, all of them named, before anything is written."""

    def dtype(self, group: TensorGroup, kind: StateKind) -> torch.dtype: ...

    def read(self, group: TensorGroup, kind: StateKind) -> GroupTensors:
        """The group's tensors, contiguous, on the CPU, by name; memory of about one group."""


class CheckpointWriter(Protocol):
    """Writes into a directory that does not count as a checkpoint until the converter has renamed it."""

    notices: tuple[str, ...] = ()  # what the checkpoint lacks, or cannot say
    usage: tuple[str, ...] = ()  # how it is loaded

    def pieces(self) -> Sequence[CheckpointPiece]: ...

    def write(self, piece: CheckpointPiece, source: Source) -> Mapping[str, Any]:
        """Write the piece's files, each through a temporary name; what `finish` must know of it, as JSON values."""

    def finish(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Write what makes the directory whole: index, configuration, markers; `records` by name of piece."""
