"""Writes Megatron's legacy layout: a file a rank, mp_rank_XX[_YYY]/model_optim_rng.pt, streamed stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.formats import (
    CheckpointPiece,
    CheckpointReader,
    CheckpointWriter,
    Source,
    StateKind,
    WriterOptions,
    states_of,
)
from dynapipe_ext.tools.checkpoint.megatron.archive import ArchiveWriter, Planned
from dynapipe_ext.tools.checkpoint.megatron.folder import finish_folder, iteration_name
from dynapipe_ext.tools.checkpoint.megatron.launch_options import launch_options, usage
from dynapipe_ext.tools.checkpoint.megatron.legacy_names import (
    IMPLEMENTATIONS,
    Implementation,
    extra_states,
    has_decay,
    in_order,
    local_name,
)
from dynapipe_ext.tools.checkpoint.megatron.names import (
    EMBEDDING,
    HEAD,
    MegatronTensor,
    megatron_tensors,
    tied_head_name,
)
from dynapipe_ext.tools.checkpoint.megatron.shards import RankLayout, blocks, parts_of
from dynapipe_ext.tools.checkpoint.megatron.state import (
    MOMENTS,
    arguments_of,
    decays,
    grad_scaler,
    param_groups,
    writer_notices,
    written_kinds,
)

_FILE = "model_optim_rng.pt"
_Archive = tuple[ArchiveWriter, Mapping[tuple[str, StateKind], Planned]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a stage: its name in the stage's whole, and how it lies on ranks."""

    name: str  # of the local specs, layers counted over the model; of the copy of a tied embedding its own
    tensor: MegatronTensor
    dtype: torch.dtype

    @property
    def is_fp32(self) -> bool:
        return self.dtype == torch.float32


class MegatronLegacyWriter(CheckpointWriter):
    """`transformer_impl` says whose layers will load the files; their names differ.

    Errors: ConfigError for a layout that the model cannot have.
    """

    def __init__(
        self,
        directory: Path,
        reader: CheckpointReader,
        options: WriterOptions,
        *,
        transformer_impl: Implementation = "local",
    ) -> None:
        if transformer_impl not in IMPLEMENTATIONS:
            raise ConfigError(f"transformer_impl {transformer_impl!r} is not known: {' or '.join(IMPLEMENTATIONS)}")
        if options.ep > 1 or options.vpp > 1:
            raise ConfigError(
                f"--ep {options.ep} and --vpp {options.vpp}: files of ranks are not written for these: use --to"
                " megatron, which ranks of any number read"
            )
        if reader.architecture.num_decoder_layers and options.pp > 1:
            raise ConfigError(f"--pp {options.pp}: megatron-core's T5 has no pipeline stages: give --pp 1")
        if reader.architecture.latent and transformer_impl == "transformer_engine":
            raise ConfigError(
                "--transformer-impl transformer_engine: its layers hold projections to latent vectors whole on every"
                " tensor parallel rank, and this layout is not written so: use --to megatron, which both kinds read"
            )
        self.directory = directory
        self._reader, self._options, self._implementation = reader, options, transformer_impl
        self._layout = RankLayout.of(reader.architecture, options)
        self._groups = tensor_groups(reader.architecture)
        self._kinds = written_kinds(reader)
        self._state = reader.state if len(self._kinds) > 1 else None
        self._refuse_narrow_states()
        groups = param_groups(self._state) if self._state is not None else []
        if self._state is not None and sorted(map(decays, groups)) != [False, True]:
            raise ConfigError(
                f"the source's optimizer has {len(groups)} groups of parameters; this layout is written for two, with"
                " weight decay and without: use --to megatron"
            )
        self._folder = directory / iteration_name(self._state)
        self._launch_options = launch_options(
            self._layout, options, self._state, ("--ckpt-format", "torch", "--transformer-impl", transformer_impl)
        )
        self.usage = usage(self._launch_options)
        self.notices = writer_notices(reader, self._layout, self._state)

    def _refuse_narrow_states(self) -> None:
        """Refuse moments that are not float32, as the layout has them. Raises ConfigError."""
        for kind in self._kinds[1:]:
            for group in self._groups:
                dtype = self._reader.dtype(group, kind)
                if not group.is_buffer and dtype != torch.float32 and (kind != "master" or dtype != self._dtype(group)):
                    raise ConfigError(
                        f"the {kind} of {group.name} is {dtype}, but this layout holds float32: use --to megatron"
                    )

    def pieces(self) -> Sequence[CheckpointPiece]:
        return [
            CheckpointPiece(f"stage-{stage:03d}", states_of(self._of_stage(stage), self._kinds))
            for stage in range(self._layout.pp)
        ]

    def write(self, piece: CheckpointPiece, source: Source) -> Mapping[str, Any]:
        stage = int(piece.name.removeprefix("stage-"))
        entries = self._entries(stage)
        names: list[str] = []
        with ExitStack() as stack:
            archives: list[_Archive] = []
            for rank in range(self._layout.tp):
                planned, value = self._planned(stage, entries)
                path = self._folder / self._rank_name(rank, stage) / _FILE
                path.parent.mkdir(parents=True, exist_ok=True)
                names.append(str(path.relative_to(self.directory)))
                archives.append((stack.enter_context(ArchiveWriter(path, value)), planned))
            for group, kind in piece.groups:
                self._write_group(stage, group, kind, source, archives)
        return {"files": names}

    def _write_group(
        self, stage: int, group: TensorGroup, kind: StateKind, source: Source, archives: Sequence[_Archive]
    ) -> None:
        """In a frame of its own, so that nothing of a group lives on while the next one is read."""
        parts = parts_of(self._layout.architecture, group, source(group, kind))
        for entry in self._entries_of(stage, group):
            own = [part for part in parts if part.tensor.name == entry.tensor.name]
            for rank, (archive, planned) in enumerate(archives):
                if (entry.name, kind) in planned:
                    spans = self._layout.spans(entry.tensor, rank)
                    values = (block for _, block in blocks(entry.tensor, own, spans))
                    archive.write(planned[entry.name, kind], values)

    def finish(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        finish_folder(
            self.directory, self._reader.files, self._state, self._launch_options, self._layout.tp * self._layout.pp
        )

    def _rank_name(self, tp_rank: int, stage: int) -> str:
        return f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if self._layout.pp > 1 else "")

    def _dtype(self, group: TensorGroup) -> torch.dtype:
        return self._reader.dtype(group, "weight")

    def _of_stage(self, stage: int) -> list[TensorGroup]:
        return [group for group in self._groups if any(True for _ in self._entries_of(stage, group))]

    def _entries(self, stage: int) -> list[_Entry]:
        return [entry for group in self._groups for entry in self._entries_of(stage, group)]

    def _entries_of(self, stage: int, group: TensorGroup) -> Iterator[_Entry]:
        """What of a group a stage holds: its layers; the embeddings first, the head last, and there a tied copy."""
        a, last = self._layout.architecture, self._layout.pp - 1
        for tensor in megatron_tensors(a, group):
            if tensor.layer >= 0 and not a.num_decoder_layers:
                own = self._layout.stage_of_layer(tensor.layer)[0]
            else:
                own = 0 if tensor.name.startswith("embedding.") or a.num_decoder_layers else last
            if stage == own:
                yield _Entry(tensor.name, tensor, self._dtype(group))
            if tensor.name == EMBEDDING and a.tied_embeddings and 0 < last == stage:
                yield _Entry(tied_head_name(a), tensor, self._dtype(group))

    def _planned(
        self, stage: int, entries: Sequence[_Entry]
    ) -> tuple[dict[tuple[str, StateKind], Planned], dict[str, Any]]:
        """What a rank's file will hold: its tensors by name and kind, and the value around them."""
        by_name = {entry.name: entry for entry in entries}
        ordered = [by_name[name] for name in in_order(by_name, self._implementation)]
        planned: dict[tuple[str, StateKind], Planned] = {}
        for entry in ordered:
            for kind in self._kinds:
                if (kind == "master" and entry.is_fp32) or (kind != "weight" and entry.tensor.is_buffer):
                    continue
                dtype = entry.dtype if kind == "weight" else torch.float32
                planned[entry.name, kind] = Planned(dtype, self._layout.local_shape(entry.tensor))
        value: dict[str, Any] = {
            "args": arguments_of(self._reader, self._layout, self._options, is_training=self._state is not None),
            "checkpoint_version": 3.0,
            "iteration": self._state.iteration if self._state else 0,
            **self._reader.megatron.progress,
            "model": self._model(stage, ordered, planned),
        }
        value["args"].transformer_impl = self._implementation
        if self._state is not None:
            value["optimizer"] = self._optimizer(ordered, planned)
            value["opt_param_scheduler"] = dict(self._state.scheduler)
        return planned, value

    def _model(
        self, stage: int, ordered: Sequence[_Entry], planned: Mapping[tuple[str, StateKind], Planned]
    ) -> dict[str, Planned | None]:
        a = self._layout.architecture
        first = 0 if a.num_decoder_layers else sum(self._layout.layers_per_stage[:stage])
        model: dict[str, Planned | None] = {}
        for entry in ordered:
            for name in (entry.name, *entry.tensor.aliases):
                model[local_name(a, name, first, self._implementation)] = planned[entry.name, "weight"]
        states = extra_states(model)
        if stage == self._layout.pp - 1 and not a.num_decoder_layers:
            states.append(f"{HEAD.rpartition('.')[0]}._extra_state")
        if self._implementation == "transformer_engine":
            attention = [name for name in states if name.endswith("linear_proj._extra_state")]
            states += [name.replace("linear_proj", "core_attention") for name in attention]
        return model | dict.fromkeys(states)

    def _optimizer(self, ordered: Sequence[_Entry], planned: Mapping[tuple[str, StateKind], Planned]) -> dict[str, Any]:
        """torch's Adam counts the decayed parameters first, then the others; copies of 16-bit ones lie beside."""
        assert self._state is not None
        groups = []
        states: dict[int, dict[str, Any]] = {}
        masters = []
        for settings in param_groups(self._state):
            trained = [entry for entry in ordered if not entry.tensor.is_buffer]
            own = [entry for entry in trained if has_decay(entry.name, entry.tensor.shape) == decays(settings)]
            first = len(states)
            for i, entry in enumerate(own):
                step = torch.tensor(float(self._state.optimizer_step))
                states[first + i] = {"step": step, **{str(kind): planned[entry.name, kind] for kind in MOMENTS}}
            groups.append({**settings, "params": list(range(first, len(states)))})
            masters.append(
                [planned[entry.name, "master"] for entry in own if not entry.is_fp32 and "master" in self._kinds]
            )
        inner = {"state": states, "param_groups": groups}
        if "master" not in self._kinds:
            return inner
        outer: dict[str, Any] = {"optimizer": inner, "fp32_from_fp16_params": masters}
        if scaler := self._reader.megatron.grad_scaler:
            outer["grad_scaler"] = grad_scaler(scaler)
        return outer
