"""Whether a job fits into the memory that is here, known before anything of it is built, and which flags make it fit.

What is counted exists whatever is measured later: weights, gradients and optimizer states to the byte, and one
micro-batch of the longest sample, recomputed as far as plans may. The suggestions are settings that went through the
same refusals and the same count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dynapipe_ext.batch.micro_batches import LengthArray, MicroBatch, SampleLength, sample_lengths
from dynapipe_ext.costs.adjustments import adjust
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.errors import ConfigError, LowMemoryError, PlanError, format_bytes
from dynapipe_ext.executor.free_memory import Room, usable_bytes
from dynapipe_ext.launch.job.configured import (
    analytic_costs,
    architecture_of,
    planned_kinds,
    topology_of,
    trained_costs,
    variants,
)
from dynapipe_ext.launch.job.model_folder import refuse_unsupported
from dynapipe_ext.launch.job.run_costs import kept_on_host
from dynapipe_ext.settings.deepspeed_settings import extract_settings
from dynapipe_ext.settings.tables import DeepSpeedSettings
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.console import counted

_SHORTEST = SampleLength(0, 1, 0, 1)
_MOST_ACTIVATIONS = 2  # Suggestions leave room for layers that keep twice the counted bytes.
_ENGINES: tuple[dict[str, Any], ...] = (
    {"stage": 1},
    {"stage": 3},
    {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This machine, and how many ranks of the job it runs; None: all of them, however many."""

    room: Room
    num_ranks: int | None = None

    def limit_bytes(self, config: TrainConfig, num_ranks: int) -> int:
        """What plans of so many ranks may hold on each: no more than the settings allow, or than their part of memory
        that they share."""
        limit, num_here = config.plan.memory_limit_bytes, self.num_ranks_of(num_ranks)
        return limit if self.room.device_bytes else min(limit, usable_bytes(self.room.of_a_rank(num_here)))

    def num_ranks_of(self, world_size: int) -> int:
        """How many ranks of a job of so many are here."""
        return world_size if self.num_ranks is None else min(self.num_ranks, world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """Bytes of one rank of each pipeline rank, shape (pp,): `states` (weights, gradients and optimizer states on the
    device), `on_host` (what an engine moves to the host), and those of one `micro_batch`."""

    states: IntArray
    on_host: IntArray
    micro_batch: IntArray


@dataclass(frozen=True, slots=True)
class _Load:
    """What a model is counted with: a micro-batch of this sample, trained or evaluated, and the ids of the data."""

    sample: SampleLength
    vocab_size: int
    forwards_alone: bool


@dataclass(frozen=True, slots=True)
class _Want:
    """What ranks here take of the fullest device or of the host, and how much there is."""

    what: str
    needed_bytes: int
    held_bytes: int
    where: str
    is_of_host: bool = True

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.held_bytes


def refuse_no_room(
    config: TrainConfig,
    place: Place,
    lengths: LengthArray | None = None,
    *,
    vocab_size: int = 1,
    forwards_alone: bool = False,
) -> None:
    """Errors: PlanError where the job cannot fit, LowMemoryError where it would fit on an otherwise idle machine.
    States are counted and, with the `lengths` of the data, the longest sample. Samples of an evaluation run
    `forwards_alone`. A model in sizes of its own has the `vocab_size` of the data."""
    if place.room.has_unknown_devices:
        return  # what they hold is known once ranks have them
    sample = _SHORTEST
    if lengths is not None and (forwards_alone or config.plan.pieces == "off"):
        (sample,) = sample_lengths(lengths, [int(np.argmax(lengths[:, 0] + lengths[:, 1]))])
    load = _Load(sample, vocab_size, forwards_alone)
    for want in _wants(config, place, load, factor=1):
        if want.fits:
            continue
        ways = list(_ways(config, place, load))
        model_name = config.model.architecture or "CONFIG.json"
        elsewhere = f"`dynapipe estimate --model {model_name}` says what other machines need"
        advice = f"here fits {'; or '.join(ways)}; {elsewhere}" if ways else f"nothing would fit here: {elsewhere}"
        passes = want.is_of_host and want.needed_bytes <= place.room.most_bytes
        raise (LowMemoryError if passes else PlanError)(
            f"{want.what} take {format_bytes(want.needed_bytes)}, but {format_bytes(want.held_bytes)} {want.where}:"
            f" {advice}"
        )


def _wants(config: TrainConfig, place: Place, load: _Load, *, factor: int) -> Iterator[_Want]:
    """What must fit, each with what there is. Activations count `factor` times."""
    topology, devices = topology_of(config), place.room.device_bytes
    need = _need(config, load, has_devices=bool(devices))
    micro_batch = factor * need.micro_batch
    num_ranks = place.num_ranks_of(topology.world_size)
    of_rank = [topology.coordinates(rank) for rank in range(num_ranks)]
    held = sum(int(need.states[one.pp_rank]) for one in of_rank)
    first = sum(int(micro_batch[one.pp_rank]) for one in of_rank if one.dp_rank == 0)
    states, beside = "weights, gradients and optimizer states", ""
    if load.sample is not _SHORTEST:
        beside = f" and a micro-batch of the longest sample ({counted(load.sample.tokens, 'token')})"
    ranks = f"{counted(num_ranks, 'rank')} here"
    if not devices:
        yield _Want(f"{states} of {ranks}{beside}", held + first, place.room.free_bytes, "are free here")
        return
    totals = need.states + micro_batch
    fullest = int(totals.max()) if config.placement != "auto" else int(totals.sum()) // topology.pp
    yield _Want(f"{states} of a rank{beside}", fullest, min(devices), "are what a device here has", is_of_host=False)
    if "nvme" in json.dumps(config.deepspeed.described):
        return  # offloaded states lie on disks
    offloaded = sum(int(need.on_host[one.pp_rank]) for one in of_rank)
    yield _Want(f"offloaded states of {ranks}", offloaded, place.room.free_bytes, "are free on this host")


def _need(config: TrainConfig, load: _Load, *, has_devices: bool) -> _Need:
    """Errors: ConfigError for settings of another model or topology, PlanError for what cannot be priced."""
    topology, architecture, sample = topology_of(config), architecture_of(config, load.vocab_size), load.sample
    counted_costs = analytic_costs(config, architecture, flops_per_s=1e12, overhead_ns=0)
    on_host = trained_costs(config, kept_on_host(counted_costs), topology)
    costs = trained_costs(config, counted_costs, topology) if has_devices else on_host
    if load.forwards_alone:
        on_host, costs = adjust(on_host, forward_only=True), adjust(costs, forward_only=True)
    if architecture.num_decoder_layers:
        sample = replace(sample, decoder=max(1, sample.decoder))
    of_ranks = [list(topology.stages_of(rank)) for rank in range(topology.pp)]
    micro_batches = []
    for kind in planned_kinds(config, costs):
        alone = [MicroBatch((sample,), config.plan.layout, kind, pad_multiple=config.plan.pad_multiple)]
        priced, everything = costs.evaluate(alone), on_host.evaluate(alone)
        states = np.array([priced.static_bytes[stages].sum() for stages in of_ranks])
        moved = np.array([everything.static_bytes[stages].sum() for stages in of_ranks]) - states
        beside = [priced.stored_bytes[stages, 0].sum() + priced.working_bytes[stages, 0].max() for stages in of_ranks]
        micro_batches.append(np.array(beside))
    least = min(micro_batches, key=lambda beside: int((states + beside).max()))
    return _Need(states=states, on_host=moved, micro_batch=least)


def _ways(config: TrainConfig, place: Place, load: _Load) -> Iterator[str]:
    """Flags under which the job fits here, with what the fullest device or the host then holds: the first way that
    trains all weights, and the first with adapters."""
    for adapts in (True,) if config.lora.enabled else (False, True):
        for flags, changed in _changes(config, place, adapts=adapts):
            try:
                candidate = changed()
                _refuse_what_cannot_be(candidate)
                wants = list(_wants(candidate, place, load, factor=_MOST_ACTIVATIONS))
            except (ConfigError, PlanError):  # settings that do not go together, or sizes that do not divide
                continue
            if all(want.fits for want in wants) and _within_limit(candidate, place, load):
                yield f"{flags} ({format_bytes(wants[0].needed_bytes)})"
                break


def _refuse_what_cannot_be(config: TrainConfig) -> None:
    refuse_unsupported(config)
    variants(config, compare=False)


def _within_limit(config: TrainConfig, place: Place, load: _Load) -> bool:
    """Whether plans have room."""
    need = _need(config, load, has_devices=bool(place.room.device_bytes))
    most = int((need.states + _MOST_ACTIVATIONS * need.micro_batch).max())
    return most <= place.limit_bytes(config, topology_of(config).world_size)


def _changes(config: TrainConfig, place: Place, *, adapts: bool) -> Iterator[tuple[str, Callable[[], TrainConfig]]]:
    """(flags, the settings with them), the least change first."""
    lora = [] if config.lora.enabled or not adapts else ["--lora"]
    dtypes = ("float32", "bfloat16") if config.model.dtype == "float32" else ("bfloat16",)
    for section in (None, *_ENGINES) if place.room.device_bytes else (None,):
        for dtype in dtypes:
            engine: dict[str, Any] = {} if section is None else {"zero_optimization": section}
            if engine and dtype == "bfloat16":
                engine["bf16"] = {"enabled": True}
            for degrees in _degrees(config, place, meets_inside=bool(section and section["stage"] > 1)):
                flags = [*lora, *(["--dtype bf16"] if dtype != config.model.dtype else [])]
                flags += [f"--{name} {degree}" for name, degree in degrees.items()]
                flags += [f"--deepspeed FILE with {json.dumps(engine)}"] if engine else []
                if flags:
                    yield " ".join(flags), partial(_changed, config, degrees, dtype, engine, adapts=adapts)


def _changed(
    config: TrainConfig, degrees: dict[str, int], dtype: str, engine: dict[str, Any], *, adapts: bool
) -> TrainConfig:
    tables: dict[str, dict[str, Any]] = extract_settings(engine) if engine else {}
    tables["model"] = tables.get("model", {}) | {"dtype": dtype}
    if adapts:
        tables["lora"] = {"enabled": True}
    if degrees:
        tables["topology"] = {**degrees, "layers_per_stage": ()}
    changed = config.with_values(**tables)
    return replace(changed, deepspeed=DeepSpeedSettings(config="FILE", described=engine)) if engine else changed


def _degrees(config: TrainConfig, place: Place, *, meets_inside: bool) -> Iterator[dict[str, int]]:
    """The configured degrees (as nothing), then others that the devices here suffice for, the fewest ranks first."""
    yield {}
    most = len(place.room.device_bytes) or topology_of(config).world_size
    for num_ranks in (n for n in range(1, most + 1) if n & (n - 1) == 0):
        for tp in (1, 2, 4, 8):
            if num_ranks % tp == 0:
                rest = num_ranks // tp
                yield {"tp": tp, "pp": 1, "dp": rest} if meets_inside else {"tp": tp, "pp": rest, "dp": 1}
