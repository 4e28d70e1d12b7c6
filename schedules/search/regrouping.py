"""Exchanges of encoder-decoder samples between the micro-batches of a first cut, by a curve fitted to prices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, round_up
from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, find_bottleneck
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.padded import Cut, RangeCosts
from dynapipe_ext.reproducible import non_negative_least_squares

ShapeLaw = tuple[float, float, float, float, float, float]  # see `fit_shape_law`

_NEAR = (0.6, 1.5)  # times the usual micro-batch's time: shapes that the curve is fitted to, as only these will occur
_FEWEST_SHAPES = 32
_MOVES = 256  # per sample
_SEED = 0


def exchange_samples(priced: RangeCosts, cuts: Sequence[Cut]) -> list[MicroBatch]:
    """Return as many micro-batches as cuts, each in its cut's recomputation mode, with samples exchanged between them.

    A move gives a sample to another micro-batch or exchanges two, mostly one that is its micro-batch's longest on a
    side. None becomes much longer, or exceeds the limit of tokens. Times are estimates: the caller prices the result.
    By record-to-record travel (Dueck 1993); a function of its arguments. Raises PlanError if too few shapes are priced.
    """
    times = find_bottleneck(priced.kind_costs[0], stage_ranks=priced.stage_ranks)[0]
    usual_ns = sorted(priced.compute_times(cuts))[len(cuts) // 2]
    law = fit_shape_law(priced.sizes, times, usual_ns)
    if law is None:
        raise PlanError("too few shapes are priced to estimate the time of other ones")
    order, multiple = priced.order, priced.caps.pad_multiple
    sides = [[round_up(s.encoder, multiple) for s in order], [round_up(s.decoder, multiple) for s in order]]
    groups = [list(range(cut.first, cut.end)) for cut in cuts]
    max_tokens = priced.caps.max_tokens or INFEASIBLE
    if len(groups) > 1:
        groups = native.regrouped(groups, *sides, law, max_tokens, _MOVES * len(order), _SEED)
    return [
        MicroBatch(tuple(order[i] for i in sorted(group)), recompute=priced.kinds[cut.kind], pad_multiple=multiple)
        for group, cut in zip(groups, cuts, strict=True)
    ]


def fit_shape_law(sizes: IntArray, times_ns: IntArray, usual_ns: int) -> ShapeLaw | None:
    """Return (c0, .., c5), coefficients of an approximate time in ns. `rows` samples padded to e encoder and d decoder
    positions take c0 + rows (c1 e + c2 d + c3 e e + c4 d d + c5 e d).

    `sizes` (3, num_shapes): rows, e and d of shapes with these `times_ns`. Those count that take about `usual_ns`, the
    time of a usual micro-batch. None if they are too few.
    """
    near = (times_ns > _NEAR[0] * usual_ns) & (times_ns < min(_NEAR[1] * usual_ns, INFEASIBLE))
    if int(near.sum()) < _FEWEST_SHAPES:
        return None
    rows, e, d = sizes[:, near].astype(np.float64)
    features = np.stack([np.ones_like(rows), rows * e, rows * d, rows * e * e, rows * d * d, rows * e * d], axis=1)
    c0, c1, c2, c3, c4, c5 = non_negative_least_squares(features, times_ns[near].astype(np.float64)).tolist()
    return c0, c1, c2, c3, c4, c5
