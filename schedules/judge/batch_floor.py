"""What the samples of a global batch must cost at the least, however they are put together: the batch bound's input.

A micro-batch of r rows costs each of its rows T / r, T being its time on a rank. A floor c(sample) that no T / r of a
micro-batch with that sample in it falls below makes sum(c) / dp a bound of the busiest replica's work on that rank.

* **Padded rows, measured table.** The row is at least as long as the sample. T is multilinear in (rows, lengths) over
  the cells between the tables' points, so at fixed lengths T / r is monotone in r within a cell, and at fixed r
  linear in each length: the least T / r over all shapes that cover the sample is at measured numbers of rows, and at
  lengths that are measured or the sample's own. Shapes that lean on a missing point are no corners of anything. Under
  a memory limit no micro-batch has more rows of that length than fit by themselves on every stage. Bytes that
  are not measured as growing with rows and lengths count as the least of what is measured for more or longer rows.
* **Packed rows, measured table.** Such a row is priced as r rows of length l with r l at least its documents' tokens
  and r l^2 at least their squared lengths (see CostTable). For any a, b >= 0 with a l + b l^2 <= T / r at
  every point it costs at least the sum of a l + b l^2 over its documents; the largest such value over the batch is a
  linear programme of two unknowns, solved at its corners. Between points T is linear and a l + b l^2 convex in
  l, so points suffice. For an encoder-decoder one of e, d, e + d and (e + d)^2 takes the place of both.
  Padded rows keep to the same rule, so a mixture does.
* **Counted and token costs**, rows of either layout: T = overhead + a tokens + b squares with nothing negative,
  and a row holds at least its samples' tokens and squared lengths. So c = T / N for N = the batch's samples in one
  micro-batch of rows of this sample's length: the overhead is paid at least once. Experts with a capacity compute it
  rounded up to whole rows, by no more than one token costs alone, which is taken off.

Samples in pieces, measured table with prices of pairs: a piece of q positions behind p is a document of q and takes at
least w q p more on the rank. The squares of a sample's pieces and twice their q p add up to those of the sample. So
with b <= w / 2 as well, pieces cost at least what a l + b l^2 says of their sample.

Samples in pieces, counted and token costs: the pieces of a sample have its tokens and its squared lengths (end^2 -
start^2 each) and more overheads, so the same c holds. A piece may be as short as a position, which is what is left of
heads and tails. No chain of F and B holds, since stages work on several pieces at once; but all run on one replica, so
no step is shorter than the work of the longest sample on the rank that has most of it.

Times of cost models are whole nanoseconds, each rounded by up to a half: `_ROUNDING_NS` a micro-batch and stage is
taken off for that, with pieces as if each position were one. Transfers are left out; memory too, but for padded rows
on a measured table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from dynapipe_ext.costs.abilities import floor_of
from dynapipe_ext.costs.floor import GrowingTimes
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.table_points import NEVER_NS, PointTable, TablePoints

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_NEXT_TO_NOTHING_NS = 1e-12  # of a square, where attention took no time that was measured
_ROUNDING_NS = 3  # of F and B (or I and W) of one micro-batch on one stage, in the floor and in what it is held against


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFloor:
    """Least times. One entry a pipeline rank: `work_ns` of all samples, `head_ns` before it, `tail_ns` after it (0 for
    split backwards, since W may come last). `chain_ns`: the longest of the samples' least dependency chains; with
    pieces, the longest sample's work on its busiest rank."""

    work_ns: FloatArray
    head_ns: FloatArray
    tail_ns: FloatArray
    chain_ns: float

    def bound_ns(self, dp: int) -> int:
        whole_ns = float((np.maximum(0, self.work_ns) / dp + self.head_ns + self.tail_ns).max())
        return max(0, int(max(whole_ns, self.chain_ns)))


def batch_floor(
    costs: CostModel,
    lengths: Sequence[tuple[int, int]],
    stage_ranks: Sequence[int],
    *,
    split: bool,
    packed: bool,
    pieces: bool = False,
    memory_limit_bytes: int | None = None,
) -> BatchFloor | None:
    """The floor of whole samples of these (encoder, decoder) lengths; None for a cost model without a `floor`, for no
    samples, and where a sample has no shape that can be priced (or fits the limit).

    With `packed` it holds for packed and padded micro-batches alike, else for padded ones alone (and is higher on
    measured tables). `split` allows I and W in place of B. With `pieces` it holds for plans that cut long samples, too;
    None where a measured table has no prices of them.
    """
    if not len(lengths):
        return None
    encoder, decoder = np.array(lengths, np.int64).reshape(-1, 2).T
    width = int(decoder.max()) + 1
    pairs, counts = np.unique(encoder * width + decoder, return_counts=True)
    needs = np.stack(np.divmod(pairs, width), axis=1)
    ranks = [[s for s, r in enumerate(stage_ranks) if r == rank] for rank in sorted(set(stage_ranks))]
    match floor_of(costs, stage_ranks, split=split):
        case None:
            return None
        case GrowingTimes() as growing:
            times = _growing(growing, needs, counts, ranks, split, pieces)
        case points if pieces and points.attended_ns is None:
            return None
        case points if packed or pieces:
            times = _packed(points, needs.astype(np.float64), counts, points.attended_ns if pieces else None)
        case points:
            times = _padded(points, needs.astype(np.float64), counts, memory_limit_bytes)
    work_ns, head_ns, tail_ns, chain_ns = times
    if max(work_ns.max(), head_ns.max(), tail_ns.max(), chain_ns) >= INFEASIBLE:
        return None
    num_stages, before = len(stage_ranks), np.array([own[0] for own in ranks])
    num_parts = int((counts * needs[:, 0]).sum() if pieces else counts.sum())
    longest = int(needs[:, 0].max()) if pieces else 2
    return BatchFloor(
        work_ns=work_ns - _ROUNDING_NS * num_parts * np.array([len(own) for own in ranks]),
        head_ns=head_ns - _ROUNDING_NS * before,
        tail_ns=tail_ns - (0 if split else _ROUNDING_NS) * before,
        chain_ns=chain_ns - longest * _ROUNDING_NS * num_stages,
    )


_Times = tuple[FloatArray, FloatArray, FloatArray, float]  # as in BatchFloor, before rounding


def _padded(points: TablePoints, needs: FloatArray, counts: IntArray, memory_limit_bytes: int | None) -> _Times:
    def least(tables: Sequence[PointTable], some: FloatArray) -> list[FloatArray]:
        place = points.place(some)
        fits = None if memory_limit_bytes is None else points.fits(place, memory_limit_bytes)
        return [table.least(place, fits) for table in tables]

    first, last = _extreme(needs, least=True), _extreme(needs, least=False)
    work = [math.fsum(counts * values) for values in least(points.work, needs)]
    return (
        np.array([work[j] for j in points.work_of]),
        np.array([values.min() for values in least(points.head, first)]),
        np.array([values.min() for values in least(points.tail, first)]),
        float(least([points.chain], last)[0].max()),
    )


def _extreme(needs: FloatArray, *, least: bool) -> FloatArray:
    """The pairs of lengths that no other pair is at most (at least) in both: the others' floors lie within theirs.

    >>> _extreme(np.array([[1.0, 3.0], [2.0, 1.0], [2.0, 4.0]]), least=True).tolist()
    [[2.0, 1.0], [1.0, 3.0]]
    """
    sign = 1 if least else -1
    kept, best = [], np.inf
    for pair in needs[np.lexsort((sign * needs[:, 0], sign * needs[:, 1]))]:
        if sign * pair[0] < best:
            kept.append(pair)
            best = sign * pair[0]
    return np.array(kept)


def _packed(points: TablePoints, needs: FloatArray, counts: IntArray, attended_ns: Sequence[float] | None) -> _Times:
    """Of whole samples; with `attended_ns` of ranks, of samples in pieces as well."""
    lengths = np.stack(np.meshgrid(*points.axes, indexing="ij"), axis=-1).reshape(-1, 2)
    totals = (counts[:, None] * _features(needs)).sum(axis=0)  # whole numbers: exact in any order

    def largest(table: PointTable, held: FloatArray, most_square_ns: float = math.inf) -> float:
        return _largest_price(lengths, table.values.min(axis=0).ravel(), held, points.has_decoder, most_square_ns)

    longest = [_features(need[None])[0] for need in _extreme(needs, least=False)]
    if attended_ns is None:
        works = [largest(table, totals) for table in points.work]
        work = [works[j] for j in points.work_of]
        chain = max(largest(points.chain_of_row, held) for held in longest)
    else:
        ranks = [(points.work[j], attended / 2) for j, attended in zip(points.work_of, attended_ns, strict=True)]
        work = [largest(table, totals, most) for table, most in ranks]
        chain = max(largest(table, held, most) for (table, most), held in product(ranks, longest))
    heads, tails = ([table.values.min() for table in tables] for tables in (points.head, points.tail))
    return np.array(work), np.array(heads), np.array(tails), chain


def _features(lengths: FloatArray) -> FloatArray:
    """Of (encoder, decoder) lengths (n, 2): encoder, decoder, both, both squared; shape (n, 4)."""
    both = lengths.sum(axis=1)
    return np.stack([lengths[:, 0], lengths[:, 1], both, both**2], axis=1)


def _largest_price(
    points: FloatArray, cost: FloatArray, totals: FloatArray, has_decoder: bool, most_square_ns: float
) -> float:
    """The most that prices of features can add up to in `totals` while no point's price exceeds its cost, nor that of a
    square `most_square_ns`."""
    run = cost < INFEASIBLE
    features, cost = _features(points[run]), cost[run]
    if not has_decoder:
        use = features[:, 2:] / cost[:, None]
        if most_square_ns < math.inf:
            use = np.vstack([use, [0.0, 1 / max(most_square_ns, _NEXT_TO_NOTHING_NS)]])
        return _two_prices(use, totals[2:])
    with np.errstate(divide="ignore"):
        return float((totals * (cost[:, None] / features).min(axis=0)).max())


def _two_prices(use: FloatArray, totals: FloatArray) -> float:
    """max p . totals over p >= 0 with use p <= 1, which bounds both: at a corner of two constraints, or on an axis.

    >>> _two_prices(np.array([[0.25, 0.5], [0.5, 0.25]]), np.array([3.0, 3.0]))
    8.0
    """
    i, j = np.triu_indices(len(use), 1)
    determinant = use[i, 0] * use[j, 1] - use[j, 0] * use[i, 1]
    crossing = np.abs(determinant) > 1e-12 * use[i, 0] * use[j, 1]
    i, j, determinant = i[crossing], j[crossing], determinant[crossing]
    corners = np.stack([use[j, 1] - use[i, 1], use[i, 0] - use[j, 0]], axis=1) / determinant[:, None]
    prices = np.concatenate([corners[(corners >= 0).all(axis=1)], np.eye(2)])
    # Each is scaled onto its tightest constraint: what breaks none keeps its value. No matrix products: their last bits
    # differ between machines.
    used = prices[:, :1] * use[:, 0] + prices[:, 1:] * use[:, 1]
    return float(((prices[:, 0] * totals[0] + prices[:, 1] * totals[1]) / used.max(axis=1)).max())


def _growing(
    growing: GrowingTimes,
    needs: IntArray,
    counts: IntArray,
    ranks: Sequence[Sequence[int]],
    split: bool,
    pieces: bool,
) -> _Times:
    num_samples = int(counts.sum())
    together, alone = (growing.padded(rows, needs) for rows in (num_samples, 1))
    if max(together.forward.max(), alone.forward.max()) >= INFEASIBLE:
        never = np.full(len(ranks), NEVER_NS)
        return never, never, never, NEVER_NS
    whole = together.forward + together.backward
    work = np.array([math.fsum(whole[list(own)].sum(axis=0) * counts) / num_samples for own in ranks])
    work = work - [float(growing.rounding_ns[list(own)].sum()) for own in ranks]
    least = growing.padded(1, np.array([[1, 0]])) if pieces else alone
    upstream = [np.cumsum(np.vstack([0 * x[:1], x]), axis=0).min(axis=1) for x in (least.forward, least.backward)]
    firsts = [own[0] for own in ranks]
    tail = np.zeros(len(ranks)) if split else upstream[1][firsts]
    chain = alone.chain
    if pieces:
        chain = np.max([(alone.forward + alone.backward)[list(own)].sum(axis=0) for own in ranks], axis=0)
    return work, upstream[0][firsts], tail, float(chain.max())
