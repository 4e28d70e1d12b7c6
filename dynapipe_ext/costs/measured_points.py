"""Measured points of all grids of a table, with bounds of times and bytes there: the base of bounds over all plans."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dynapipe_ext.batch.micro_batches import Recompute, recompute_of_layers
from dynapipe_ext.costs.floor import NEVER_NS, PointTable, TablePoints, accumulate_minimum
from dynapipe_ext.costs.grid import FloatArray
from dynapipe_ext.costs.layers import COLUMNS, HALVES, LayerKind
from dynapipe_ext.costs.model import CostModel

if TYPE_CHECKING:
    from dynapipe_ext.costs.table import CostTable

# Numbers of rows that count as points in addition to the measured ones, so that up to 16 it is exact how many fit.
_MORE_ROWS = (*range(1, 16), 20, 24, 28, 40, 48, 56)


@lru_cache(maxsize=8)
def make_points(table: CostTable, stage_ranks: tuple[int, ...], split: bool, least: CostModel | None) -> TablePoints:
    """Return the measured points of a table, with times by `least` if given. They depend on no batch and are cached."""
    axes = _merge_axes(table)
    shape = tuple(map(len, axes))
    rows, enc, dec = points = tuple(x.ravel() for x in np.meshgrid(*axes, indexing="ij"))
    ranks = [[s for s, r in enumerate(stage_ranks) if r == rank] for rank in sorted(set(stage_ranks))]
    times, held = list[FloatArray](), list[FloatArray]()
    for recompute in table.kinds:
        priced = (least or table).evaluate_shapes(rows, enc, dec, recompute)
        forward, backward = (x.astype(np.float64) for x in (priced.forward_ns, priced.backward_ns))
        work = [(forward[own] + backward[own]).sum(axis=0) / rows for own in ranks]
        head = [forward[: own[0]].sum(axis=0) for own in ranks]
        tail = [backward[: 0 if split else own[0]].sum(axis=0) for own in ranks]
        chain = priced.sum_chain_ns(split=split)
        running = _list_running_bytes(table, recompute, points)
        parts = [*priced.stored_bytes.astype(np.float64), *(part for stage in running for part in stage)]
        for tables, columns in ((times, [*work, *head, *tail, chain, chain / rows]), (held, parts)):
            tables.append(np.where(priced.infeasible, NEVER_NS, np.stack(columns)).reshape(-1, *shape))
    needed: dict[bytes, tuple[FloatArray, int]] = {}  # equal tables once, with the most static bytes of their ranks
    stages = [*range(len(stage_ranks)), *(stage for stage, parts in enumerate(running) for _ in parts)]
    for num_bytes, stage in zip(_make_growing(held), stages, strict=True):
        static = sum(int(priced.static_bytes[s]) for s, rank in enumerate(stage_ranks) if rank == stage_ranks[stage])
        key = num_bytes.tobytes()
        needed[key] = num_bytes, max(static, needed[key][1] if key in needed else 0)
    values = np.concatenate(times, axis=1)
    works = [table_of_rank.tobytes() for table_of_rank in values[: len(ranks)]]
    distinct = list(dict.fromkeys(works))  # ranks with equal work share a table
    work = [PointTable.from_values(values[works.index(one)], shape[0]) for one in distinct]
    ends = [PointTable.from_values(of_end, shape[0]) for of_end in values[len(ranks) :]]
    layers = table.layout.attentions[:, 0]
    return TablePoints(
        rows=axes[0],
        axes=(axes[1], axes[2]),
        work=tuple(work),
        work_of=tuple(distinct.index(one) for one in works),
        head=tuple(ends[: len(ranks)]),
        tail=tuple(ends[len(ranks) : -2]),
        chain=ends[-2],
        chain_of_row=ends[-1],
        attended_ns=table.pieces.find_attended_ns(layers, stage_ranks, table.topology.width) if table.pieces else None,
        needed=tuple(needed.values()),
        has_decoder=table.has_decoder,
    )


def _merge_axes(table: CostTable) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Merge the rows, encoder and decoder lengths of all grids; 0 for the decoder side of a decoder-only table."""
    axes: tuple[list[FloatArray], ...] = ([], [], [])
    for (_, kind), grid in table.grids.items():
        sides = (0, 2) if kind == "postprocess" and table.has_decoder else (0, 1, 2)
        for side, axis in zip(sides, grid.axes, strict=False):
            axes[side].append(axis)
    rows, encoder, decoder = (np.unique(np.concatenate(parts)) if parts else np.zeros(1) for parts in axes)
    return np.union1d(rows, [n for n in _MORE_ROWS if n < rows[-1]]), encoder, decoder


def _list_running_bytes(
    table: CostTable, recompute: Recompute, points: tuple[FloatArray, ...]
) -> list[list[FloatArray]]:
    """List for each stage what its layers hold on one rank while the last layer of each kind runs."""
    stored, peak = dict[LayerKind, FloatArray](), dict[LayerKind, FloatArray]()
    kinds: tuple[LayerKind, ...] = ("encoder", *HALVES, "decoder")
    for kind in kinds:
        if grid := table.grids.get((recompute_of_layers(recompute), kind)):
            values = 1e6 / table.topology.width * grid.interpolate(list(points[: len(grid.axes)]))[0]
            stored[kind], peak[kind] = (values[grid.columns.index(name)] for name in COLUMNS[2:])
    stages = []
    for counts in zip(*(table.layout.counts[kind][:, 0].tolist() for kind in kinds), strict=True):
        held: FloatArray = 0 * points[0]
        counted = {kind: count for kind, count in zip(kinds, counts, strict=True) if count}
        num_decoder = counted.pop("decoder", 0)
        for kind, count in counted.items():
            held = held + count * stored[kind]
        parts = [held - stored[kind] + peak[kind] for kind in counted]
        if num_decoder:
            parts.append(held + (num_decoder - 1) * stored["decoder"] + peak["decoder"])
        stages.append(parts)
    return stages


def _make_growing(tables: list[FloatArray]) -> FloatArray:
    """Return the largest tables that are nowhere above these (T, R, E, D) and grow with rows and lengths, joined."""
    for axis in (1, 2, 3):
        tables = [accumulate_minimum(values, axis) for values in tables]
    return np.concatenate(tables, axis=1)
