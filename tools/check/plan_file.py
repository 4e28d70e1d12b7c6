"""A dynapipe-plan/1 file as it stands, types checked and nothing else: what `check_plan` sets out to prove."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dynapipe_ext.batch.topology import Topology, Vocabulary, list_cp_degrees
from dynapipe_ext.errors import ConfigError, DataError, short
from dynapipe_ext.settings.declared import list_settings
from dynapipe_ext.settings.tables import TopologySettings
from dynapipe_ext.tools.files import Fields, read_json

FORMAT = "dynapipe-plan/1"
BOUNDS = ("stage", "chain", "heads_tails", "byte_time")  # of a replica, in the order in which they are shown

_FIELDS = (
    "format", "topology", "replicas", "forward_only", "batch_bound_s", "free_batch_bound_s", "reproducible",
    "time_limit_s",
)  # fmt: skip
_MOST_POSITIONS = 1 << 31  # of a row; and rows
_MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeFile:
    """A micro-batch as the file has it. `piece`: the positions (start, end) of its first sample if that is a piece of a
    longer one; `documents`: the lengths of both documents of each pair, if samples are pairs."""

    samples: tuple[int, ...]
    layout: str
    rows: int
    encoder_len: int
    decoder_len: int
    recompute: str
    piece: tuple[int, int] | None = None
    documents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFile:
    """A replica as the file has it; `ranks` are each pipeline rank's actions as text. The rest is what it claims;
    `in_flight_bytes` are empty where it claims none."""

    micro_batches: tuple[ShapeFile, ...]
    ranks: tuple[tuple[str, ...], ...]
    placement: tuple[int, ...]
    name: str
    makespan_s: float
    lower_bound_s: float
    peak_bytes: tuple[int, ...]
    in_flight_bytes: tuple[int, ...]
    bounds_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A dynapipe-plan/1 file; entry d of `replicas` is data-parallel rank d. Nothing in it has been proven.

    `forward_only`: it means to have no backwards.
    """

    path: str
    topology: Topology
    replicas: tuple[ReplicaFile, ...]
    batch_bound_s: float | None
    free_batch_bound_s: float | None = None
    forward_only: bool = False


def read_plan_file(path: str | Path) -> PlanFile:
    """The file's content.

    Errors: DataError naming the field that is absent, unknown, out of bounds or of another type; ConfigError for
    degrees that cannot be.
    """
    data = read_json(path, FORMAT, "a plan")
    root = Fields(data, str(path))
    root.only(_FIELDS)
    shape = root.sub("topology")
    shape.only(("tp", "pp", "dp", "width", "layers_per_stage", "vocabulary"))
    replicas = [(raw, f"{path}: replicas[{i}]") for i, raw in enumerate(root.many("replicas", dict))]
    numbers = [Fields(*replica).one("dp_rank", int) for replica in replicas]
    tp, pp, dp = (shape.one(name, int) for name in ("tp", "pp", "dp"))
    width = shape.one("width", int, 1)
    if width != 1 and width not in list_cp_degrees(dp):
        fitting = short(list_cp_degrees(dp))
        raise ConfigError(f"{path}: width {width} does not divide dp {dp} in powers of two: give one of {fitting}")
    if dp != width * len(numbers) or sorted(numbers) != list(range(dp // width)) or not numbers:
        shown, needs = short(numbers), f"dp {dp} needs each of 0..dp-1 once"
        if width > 1:
            needs = f"dp {dp} in blocks of width {width} needs each of 0..{dp // width - 1} once"
        raise ConfigError(f"{path}: the replicas have dp_rank {shown} but {needs}")
    list_settings(TopologySettings)["tp"].check_value(tp, f"{path}: ")
    read = [_read_replica(*replicas[numbers.index(dp_rank)]) for dp_rank in range(dp // width)]
    for dp_rank, replica in enumerate(read):
        if len(replica.ranks) != pp and pp > 0:
            raise ConfigError(
                f"{path}: topology pp is {pp} but replica {dp_rank} has lists of {len(replica.ranks)} pipeline ranks:"
                " give one list a rank"
            )
    placements = sorted({replica.placement for replica in read})
    if len(placements) > 1:
        raise ConfigError(f"{path}: the replicas place stages differently, {short(placements)}: plan them as one step")
    layers = shape.many("layers_per_stage", float, [])
    placement = () if placements[0] == tuple(range(pp)) else placements[0]
    vocabulary = shape.one("vocabulary", str, "whole")
    return PlanFile(
        path=str(path),
        topology=Topology(tp, pp, dp, layers, placement, width, cast(Vocabulary, vocabulary)),
        replicas=tuple(read),
        batch_bound_s=_seconds(root, "batch_bound_s") if "batch_bound_s" in data else None,
        free_batch_bound_s=_seconds(root, "free_batch_bound_s") if "free_batch_bound_s" in data else None,
        forward_only=root.one("forward_only", bool, False),
    )


def _seconds(fields: Fields, name: str) -> float:
    """Not a number passes, for the check to refuse with what it found instead."""
    value = fields.one(name, float)
    return fields.within(name, value, -_MOST_SECONDS, _MOST_SECONDS)


def _count(fields: Fields, name: str, most: int = _MOST_POSITIONS) -> int:
    """Negative ones pass, for the check to refuse."""
    return fields.within(name, fields.one(name, int), -most, most)


def _read_piece(fields: Fields) -> tuple[int, int]:
    """Errors: DataError for what is no pair of positions; which ones make sense is for the check to say."""
    positions = fields.many("carried", int)
    if len(positions) != 2:
        raise DataError(f"carried has {len(positions)} numbers but must be [start, end] of a piece: correct it")
    start, end = (fields.within("carried", position, 0, _MOST_POSITIONS) for position in positions)
    return start, end


def _read_replica(raw: Mapping[str, Any], where: str) -> ReplicaFile:
    replica = Fields(raw, where)
    replica.only(("dp_rank", "micro_batches", "schedule", "predicted"))
    schedule, predicted = replica.sub("schedule"), replica.sub("predicted")
    schedule.only(("name", "stages", "placement"))
    predicted.only(("makespan_s", "lower_bound_s", "peak_bytes", "in_flight_bytes", "bounds"))
    ranks = tuple(schedule.many("stages", list))
    for i, rank in enumerate(ranks):
        for action in rank:
            schedule.check(f"stages[{i}]", action, str)
    micro_batches = []
    for i, shape in enumerate(replica.many("micro_batches", dict)):
        one = Fields(shape, f"{where}: micro_batches[{i}]")
        one.only(("samples", "layout", "rows", "encoder_len", "decoder_len", "recompute", "carried", "documents"))
        rows, encoder_len, decoder_len = (_count(one, name) for name in ("rows", "encoder_len", "decoder_len"))
        micro_batches.append(
            ShapeFile(
                samples=one.many("samples", int),
                layout=one.one("layout", str),
                rows=rows,
                encoder_len=encoder_len,
                decoder_len=decoder_len,
                recompute=one.one("recompute", str),
                piece=_read_piece(one) if "carried" in shape else None,
                documents=one.many("documents", int, []),
            )
        )
    bounds = Fields(predicted.one("bounds", dict, {}), f"{where}: predicted: bounds")
    bounds.only(f"{name}_s" for name in BOUNDS)
    return ReplicaFile(
        micro_batches=tuple(micro_batches),
        ranks=tuple(tuple(rank) for rank in ranks),
        placement=schedule.many("placement", int, [*range(len(ranks))]),
        name=schedule.one("name", str, ""),
        makespan_s=_seconds(predicted, "makespan_s"),
        lower_bound_s=_seconds(predicted, "lower_bound_s"),
        peak_bytes=predicted.many("peak_bytes", int),
        in_flight_bytes=predicted.many("in_flight_bytes", int, []),
        bounds_s={name: _seconds(bounds, f"{name}_s") for name in BOUNDS if bounds.has(f"{name}_s")},
    )
