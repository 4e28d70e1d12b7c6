"""A cost table's times and bytes at all measured points together, and their least over the shapes that hold a sample.

Nothing here depends on a batch but the last step, so it is made once for a table. Between points times are multilinear,
and at fixed lengths time over rows is monotone between them: minima over shapes are minima over points, with the
sample's own lengths among these (`batch_floor` has the argument).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import Recompute
from dynapipe_ext.costs.floor import chain_ns_of
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.layers import COLUMNS, LayerKind
from dynapipe_ext.costs.table import CostTable

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NEVER_NS = 1e300  # of a shape that cannot run: what leans on it in the least stays far above any time
# Numbers of rows that count as points besides the measured ones: how many fit is known to the row up to 16.
_MORE_ROWS = (*range(1, 16), 20, 24, 28, 40, 48, 56)
_ROUNDING_BYTES = 2


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """Where n samples lie between the points: on the encoder (e) and decoder (d) axis the points on both sides and the
    share of the upper one, and the first point that is longer. `outside`: longer than any point."""

    e_low: IntArray
    e_high: IntArray
    e_share: FloatArray
    e_longer: IntArray
    d_low: IntArray
    d_high: IntArray
    d_share: FloatArray
    d_longer: IntArray
    outside: BoolArray

    def between(self, values: FloatArray) -> FloatArray:
        """(Q, E, D) at the samples' own lengths: (Q, n)."""
        low = values[:, self.e_low, self.d_low] * (1 - self.e_share) + values[:, self.e_high, self.d_low] * self.e_share
        if values.shape[2] == 1:
            return low
        high = values[:, self.e_low, self.d_high] * (1 - self.e_share)
        high += values[:, self.e_high, self.d_high] * self.e_share
        return low * (1 - self.d_share) + high * self.d_share


@dataclass(frozen=True, slots=True)
class PointTable:
    """Values (Q, E, D) at points; `rows_of` tells which number of rows and which recomputation each q is of.

    `longer_e`, `longer_d`, `longer`: the least from a point on, over longer encoder sides, decoder sides, both; with
    one more place for "longer than any".
    """

    values: FloatArray
    rows_of: IntArray
    longer_e: FloatArray
    longer_d: FloatArray
    longer: FloatArray

    @classmethod
    def of(cls, values: FloatArray, num_rows: int) -> PointTable:
        """Of (K x R, E, D), without what fewer rows of the same recomputation are nowhere above: it is never needed."""
        kept: list[int] = []
        for q, one in enumerate(values):
            same = [k for k in kept if k // num_rows == q // num_rows]
            if not any((values[k] <= one).all() for k in same):
                kept.append(q)
        some = values[kept]
        return cls(
            some,
            np.array(kept),
            _from_on(np.pad(some, ((0, 0), (0, 1), (0, 0)), constant_values=NEVER_NS), 1),
            _from_on(np.pad(some, ((0, 0), (0, 0), (0, 1)), constant_values=NEVER_NS), 2),
            _from_on(_from_on(np.pad(some, ((0, 0), (0, 1), (0, 1)), constant_values=NEVER_NS), 1), 2),
        )

    def least(self, place: SamplePlace, fits: BoolArray | None) -> FloatArray:
        """Over all shapes that hold each sample, and of as many rows as `fits` (K x R, n) allows: (n,).

        On one side longer, it is bounded by the least on each of the other side's two points.
        """
        at = place
        best = np.minimum(at.between(self.values), self.longer[:, at.e_longer, at.d_longer])
        d_low, d_high = self.longer_e[:, at.e_longer, at.d_low], self.longer_e[:, at.e_longer, at.d_high]
        best = np.minimum(best, d_low * (1 - at.d_share) + d_high * at.d_share)
        if self.values.shape[2] > 1:
            e_low, e_high = self.longer_d[:, at.e_low, at.d_longer], self.longer_d[:, at.e_high, at.d_longer]
            best = np.minimum(best, e_low * (1 - at.e_share) + e_high * at.e_share)
        if fits is not None:
            best = np.where(fits[self.rows_of], best, NEVER_NS)
        return np.where(at.outside, NEVER_NS, best.min(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePoints:
    """Times at every point, NEVER_NS where it cannot run. Ranks share equal tables of work: `work_of` says which.

    `needed`: (bytes (K x R, E, D), static bytes beside them) of activations that a micro-batch holds at some time on
    some stage by itself, made to grow with rows and lengths by taking the least of all that is above.
    """

    rows: FloatArray
    axes: tuple[FloatArray, FloatArray]
    work: tuple[PointTable, ...]  # F + B of one row on a rank
    work_of: tuple[int, ...]
    head: tuple[PointTable, ...]  # F upstream of a rank
    tail: tuple[PointTable, ...]  # B upstream of a rank; 0 where backwards are split
    chain: PointTable  # of a whole micro-batch
    chain_of_row: PointTable
    attended_ns: tuple[float, ...] | None  # of F + B on a rank, a position of a piece with each before it
    needed: tuple[tuple[FloatArray, int], ...]
    has_decoder: bool

    def place(self, needs: FloatArray) -> SamplePlace:
        """Of samples with (encoder, decoder) lengths (n, 2)."""
        found = []
        for side, axis in enumerate(self.axes):
            x = np.clip(needs[:, side], axis[0], axis[-1])
            low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, max(0, len(axis) - 2))
            high = np.minimum(low + 1, len(axis) - 1)
            width = axis[high] - axis[low]
            share = (x - axis[low]) / np.where(width > 0, width, 1.0)
            found.append((low, high, share, np.searchsorted(axis, needs[:, side], side="right")))
        outside = (needs[:, 0] > self.axes[0][-1]) | (needs[:, 1] > self.axes[1][-1])
        return SamplePlace(*found[0], *found[1], outside)

    def fits(self, place: SamplePlace, limit_bytes: int) -> BoolArray:
        """Whether so many rows of the samples' own lengths could be in one micro-batch: (K x R, n).

        Between two points the next one above counts as well, unless no whole number lies between.
        """
        num_rows = len(self.rows)
        steps = np.diff(self.rows, append=np.inf) == 1
        allowed: BoolArray | None = None
        for num_bytes, static in self.needed:
            held = place.between(num_bytes).reshape(-1, num_rows, len(place.outside))
            below = (held <= limit_bytes - static + _ROUNDING_BYTES).sum(axis=1)  # rows only make it grow
            reach = np.where((below == 0) | steps[np.maximum(0, below - 1)], below, below + 1)
            here = np.arange(num_rows)[:, None] < reach[:, None]
            allowed = here if allowed is None else allowed & here
        assert allowed is not None
        return allowed.reshape(-1, len(place.outside))


@lru_cache(maxsize=8)
def table_points(table: CostTable, stage_ranks: tuple[int, ...], split: bool) -> TablePoints:
    """The points of a table, kept for those in use (tables are frozen and told apart by identity)."""
    rows_axis, encoder, decoder = _merged_axes(table)
    shape = (len(rows_axis), len(encoder), len(decoder))
    rows, enc, dec = (x.ravel() for x in np.meshgrid(rows_axis, encoder, decoder, indexing="ij"))
    firsts = [stage_ranks.index(rank) for rank in sorted(set(stage_ranks))]
    names = ("work", "head", "tail")
    found: dict[str, list[list[FloatArray]]] = {name: [[] for _ in firsts] for name in names}
    chains: list[FloatArray] = []
    held: list[list[FloatArray]] = []

    def at_points(values: FloatArray, bad: BoolArray) -> FloatArray:
        return np.where(bad, NEVER_NS, values).reshape(shape)

    for recompute in table.recomputes:
        priced = table.evaluate_shapes(rows, enc, dec, recompute)
        bad = np.asarray((priced.forward_ns >= INFEASIBLE).any(axis=0))
        forward, backward = (x.astype(np.float64) for x in (priced.forward_ns, priced.backward_ns))
        for i, first in enumerate(firsts):
            own = [s for s, rank in enumerate(stage_ranks) if rank == stage_ranks[first]]
            found["work"][i].append(at_points((forward[own] + backward[own]).sum(axis=0) / rows, bad))
            found["head"][i].append(at_points(forward[:first].sum(axis=0), bad))
            found["tail"][i].append(at_points(backward[: 0 if split else first].sum(axis=0), bad))
        chains.append(at_points(chain_ns_of(priced, split), bad))
        running = _running_bytes(table, recompute, (rows, enc, dec))
        parts = [*priced.stored_bytes.astype(np.float64), *(part for stage in running for part in stage)]
        held.append([_growing(at_points(part, bad)) for part in parts])
    static = [sum(int(priced.static_bytes[s]) for s, r in enumerate(stage_ranks) if r == rank) for rank in stage_ranks]
    beside = static + [static[stage] for stage, parts in enumerate(running) for _ in parts]
    work, head, tail = ([np.concatenate(parts) for parts in found[name]] for name in names)
    work_of = [next(j for j, other in enumerate(work) if np.array_equal(one, other)) for one in work]
    used = sorted(set(work_of))
    chain = np.concatenate(chains)
    of_row = chain / np.tile(rows_axis, len(chains))[:, None, None]
    num_rows = len(rows_axis)
    return TablePoints(
        rows=rows_axis,
        axes=(encoder, decoder),
        work=tuple(PointTable.of(work[j], num_rows) for j in used),
        work_of=tuple(used.index(j) for j in work_of),
        head=tuple(PointTable.of(values, num_rows) for values in head),
        tail=tuple(PointTable.of(values, num_rows) for values in tail),
        chain=PointTable.of(chain, num_rows),
        chain_of_row=PointTable.of(of_row, num_rows),
        attended_ns=_attended_ns(table, stage_ranks),
        needed=_hardest([np.concatenate(parts) for parts in zip(*held, strict=True)], beside),
        has_decoder=table.has_decoder,
    )


def _attended_ns(table: CostTable, stage_ranks: tuple[int, ...]) -> tuple[float, ...] | None:
    if table.pieces is None:
        return None
    layers = [num_layers for num_layers, _ in table.stage_layers()]
    own = [sum(n for n, r in zip(layers, stage_ranks, strict=True) if r == rank) for rank in sorted(set(stage_ranks))]
    return tuple(count * table.pieces.least_attended_ns for count in own)


def _merged_axes(table: CostTable) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Rows, encoder and decoder coordinates of all grids together; 0 for the decoder side of a decoder-only table."""
    axes: tuple[list[FloatArray], ...] = ([], [], [])
    for (_, kind), grid in table.grids.items():
        places = (0, 2) if kind == "postprocess" and table.has_decoder else (0, 1, 2)
        for place, axis in zip(places, grid.axes, strict=False):
            axes[place].append(axis)
    rows, encoder, decoder = (np.unique(np.concatenate(parts)) if parts else np.zeros(1) for parts in axes)
    more = np.array([n for n in _MORE_ROWS if n < rows[-1]], np.float64)
    return np.union1d(rows, more), encoder, decoder


def _running_bytes(
    table: CostTable, recompute: Recompute, shapes: tuple[FloatArray, FloatArray, FloatArray]
) -> list[list[FloatArray]]:
    """Per stage, what it holds while the last of its encoder layers runs, and the last of its decoder layers."""
    layer: dict[LayerKind, list[FloatArray]] = {}
    sides: dict[LayerKind, Sequence[FloatArray]] = {"encoder": shapes[:2], "decoder": shapes}
    for kind, side in sides.items():
        if grid := table.grids.get((recompute, kind)):
            values = 1e6 * grid.at(list(side))[0]
            layer[kind] = [values[grid.columns.index(name)] for name in COLUMNS[2:]]
    stages = []
    for num_encoder, num_decoder in table.stage_layers():
        parts = []
        if num_encoder:
            parts.append((num_encoder - 1) * layer["encoder"][0] + layer["encoder"][1])
        if num_decoder:
            before = num_encoder * layer["encoder"][0] + (num_decoder - 1) * layer["decoder"][0]
            parts.append(before + layer["decoder"][1])
        stages.append(parts)
    return stages


def _growing(values: FloatArray) -> FloatArray:
    """The largest table that is nowhere above this one and grows with rows and lengths."""
    for axis in range(3):
        values = _from_on(values, axis)
    return values


def _from_on(values: FloatArray, axis: int) -> FloatArray:
    """The least from each place on along an axis."""
    return np.flip(np.minimum.accumulate(np.flip(values, axis), axis=axis), axis)


def _hardest(tables: Sequence[FloatArray], static: Sequence[int]) -> tuple[tuple[FloatArray, int], ...]:
    """Equal tables once, with the most static bytes beside them."""
    kept: list[tuple[FloatArray, int]] = []
    for table, beside in zip(tables, static, strict=True):
        for i, (other, most) in enumerate(kept):
            if np.array_equal(table, other):
                kept[i] = (other, max(most, beside))
                break
        else:
            kept.append((table, beside))
    return tuple(kept)
