"""The points of measured grids together, and the bytes at them, made to grow: what bounds over all plans lean on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from dynapipe_ext.batch.micro_batches import Recompute, recompute_of_layers
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.floor import NEVER_NS, PointTable, TablePoints, least_from_on
from dynapipe_ext.costs.grid import BoolArray, FloatArray, Grid
from dynapipe_ext.costs.layers import COLUMNS, HALVES, LayerKind
from dynapipe_ext.costs.model import PricesShapes
from dynapipe_ext.costs.pieces import PieceSurcharges

# Numbers of rows that count as points besides the measured ones: how many fit is known to the row up to 16.
_MORE_ROWS = (*range(1, 16), 20, 24, 28, 40, 48, 56)


def merged_axes(
    grids: Mapping[tuple[Recompute, LayerKind], Grid], *, has_decoder: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Rows, encoder and decoder coordinates of all grids together; 0 for the decoder side of a decoder-only table."""
    axes: tuple[list[FloatArray], ...] = ([], [], [])
    for (_, kind), grid in grids.items():
        places = (0, 2) if kind == "postprocess" and has_decoder else (0, 1, 2)
        for place, axis in zip(places, grid.axes, strict=False):
            axes[place].append(axis)
    rows, encoder, decoder = (np.unique(np.concatenate(parts)) if parts else np.zeros(1) for parts in axes)
    more = np.array([n for n in _MORE_ROWS if n < rows[-1]], np.float64)
    return np.union1d(rows, more), encoder, decoder


def running_bytes(
    grids: Mapping[tuple[Recompute, LayerKind], Grid],
    recompute: Recompute,
    shapes: tuple[FloatArray, FloatArray, FloatArray],
    stages_held: Sequence[tuple[tuple[int, int], tuple[int, int]]],
) -> list[list[FloatArray]]:
    """Per stage of (layers, halves), what it holds while the last encoder layer runs, and the last decoder layer."""
    layer: dict[LayerKind, list[FloatArray]] = {}
    sides: dict[LayerKind, Sequence[FloatArray]] = {"encoder": shapes[:2], "decoder": shapes}
    sides |= dict.fromkeys(HALVES, shapes[:2])
    for kind, side in sides.items():
        if grid := grids.get((recompute_of_layers(recompute), kind)):
            values = 1e6 * grid.at(list(side))[0]
            layer[kind] = [values[grid.columns.index(name)] for name in COLUMNS[2:]]
    stages = []
    for (num_encoder, num_decoder), halves in stages_held:
        alone = [kind for kind, count in zip(HALVES, halves, strict=True) if count]
        held = sum((layer[kind][0] for kind in alone), 0 * shapes[0])
        parts = [num_encoder * layer["encoder"][0] + held - layer[kind][0] + layer[kind][1] for kind in alone]
        if num_encoder:
            parts.append((num_encoder - 1) * layer["encoder"][0] + layer["encoder"][1] + held)
        if num_decoder:
            before = num_encoder * layer["encoder"][0] + (num_decoder - 1) * layer["decoder"][0]
            parts.append(before + layer["decoder"][1])
        stages.append(parts)
    return stages


def that_grow(values: FloatArray) -> FloatArray:
    """The largest table that is nowhere above this one and grows with rows and lengths."""
    for axis in range(3):
        values = least_from_on(values, axis)
    return values


def hardest(tables: Sequence[FloatArray], static: Sequence[int]) -> tuple[tuple[FloatArray, int], ...]:
    """Equal tables once, with the most static bytes beside them."""
    most_of: list[tuple[FloatArray, int]] = []
    for table, beside in zip(tables, static, strict=True):
        for i, (other, most) in enumerate(most_of):
            if np.array_equal(table, other):
                most_of[i] = (other, max(most, beside))
                break
        else:
            most_of.append((table, beside))
    return tuple(most_of)


class LaidOutTable(PricesShapes, Protocol):
    """What is looked at of measured costs over the stages of a topology."""

    @property
    def grids(self) -> Mapping[tuple[Recompute, LayerKind], Grid]: ...

    @property
    def topology(self) -> Topology: ...

    @property
    def pieces(self) -> PieceSurcharges | None: ...

    @property
    def has_decoder(self) -> bool: ...

    @property
    def kinds(self) -> tuple[Recompute, ...]: ...

    def stage_layers(self) -> list[tuple[int, int]]: ...

    def stage_halves(self) -> list[tuple[int, int]]: ...

    def stage_attentions(self) -> list[int]: ...


def _attended_ns(table: LaidOutTable, stage_ranks: tuple[int, ...]) -> tuple[float, ...] | None:
    """What pieces take for each pair of positions; None where no pieces were measured."""
    if table.pieces is None:
        return None
    return table.pieces.attended_ns(table.stage_attentions(), stage_ranks, table.topology.width)


def _running_bytes(
    table: LaidOutTable, recompute: Recompute, points: tuple[FloatArray, FloatArray, FloatArray]
) -> list[list[FloatArray]]:
    """What layers of each stage hold while they run, by stage, on one rank."""
    stages_held = list(zip(table.stage_layers(), table.stage_halves(), strict=True))
    running = running_bytes(table.grids, recompute, points, stages_held)
    return [[part / table.topology.width for part in stage] for stage in running]


@lru_cache(maxsize=8)
def table_points(
    table: LaidOutTable, stage_ranks: tuple[int, ...], split: bool, least: PricesShapes | None
) -> TablePoints:
    """The points of a table, where `least` may price their times; kept for those in use, as they depend on no batch."""
    rows_axis, encoder, decoder = merged_axes(table.grids, has_decoder=table.has_decoder)
    shape = (len(rows_axis), len(encoder), len(decoder))
    rows, enc, dec = (x.ravel() for x in np.meshgrid(rows_axis, encoder, decoder, indexing="ij"))
    firsts = [stage_ranks.index(rank) for rank in sorted(set(stage_ranks))]
    names = ("work", "head", "tail")
    times: dict[str, list[list[FloatArray]]] = {name: [[] for _ in firsts] for name in names}
    chains: list[FloatArray] = []
    held: list[list[FloatArray]] = []

    def at_points(values: FloatArray, bad: BoolArray) -> FloatArray:
        return np.where(bad, NEVER_NS, values).reshape(shape)

    for recompute in table.kinds:
        priced = (least or table).evaluate_shapes(rows, enc, dec, recompute)
        bad = priced.infeasible
        forward, backward = (x.astype(np.float64) for x in (priced.forward_ns, priced.backward_ns))
        for i, first in enumerate(firsts):
            own = [s for s, rank in enumerate(stage_ranks) if rank == stage_ranks[first]]
            times["work"][i].append(at_points((forward[own] + backward[own]).sum(axis=0) / rows, bad))
            times["head"][i].append(at_points(forward[:first].sum(axis=0), bad))
            times["tail"][i].append(at_points(backward[: 0 if split else first].sum(axis=0), bad))
        chains.append(at_points(priced.chain_ns(split=split), bad))
        running = _running_bytes(table, recompute, (rows, enc, dec))
        parts = [*priced.stored_bytes.astype(np.float64), *(part for stage in running for part in stage)]
        held.append([that_grow(at_points(part, bad)) for part in parts])
    static = [sum(int(priced.static_bytes[s]) for s, r in enumerate(stage_ranks) if r == rank) for rank in stage_ranks]
    beside = static + [static[stage] for stage, parts in enumerate(running) for _ in parts]
    work, head, tail = ([np.concatenate(parts) for parts in times[name]] for name in names)
    work_of = [next(j for j, other in enumerate(work) if np.array_equal(one, other)) for one in work]
    used = sorted(set(work_of))
    chain = np.concatenate(chains)
    of_row = chain / np.tile(rows_axis, len(chains))[:, None, None]
    return TablePoints(
        rows=rows_axis,
        axes=(encoder, decoder),
        work=tuple(PointTable.of(work[j], len(rows_axis)) for j in used),
        work_of=tuple(used.index(j) for j in work_of),
        head=tuple(PointTable.of(values, len(rows_axis)) for values in head),
        tail=tuple(PointTable.of(values, len(rows_axis)) for values in tail),
        chain=PointTable.of(chain, len(rows_axis)),
        chain_of_row=PointTable.of(of_row, len(rows_axis)),
        attended_ns=_attended_ns(table, stage_ranks),
        needed=hardest([np.concatenate(parts) for parts in zip(*held, strict=True)], beside),
        has_decoder=table.has_decoder,
    )
