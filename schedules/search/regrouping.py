"""Samples of two sides exchanged between the micro-batches of a first cut, by a law fitted to what was priced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, round_up
from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, bottleneck
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.padded import Cut, RangeCosts
from dynapipe_ext.reproducible import non_negative_least_squares

ShapeLaw = tuple[float, float, float, float, float, float]  # see `fitted_law`

_NEAR = (0.6, 1.5)  # times the usual micro-batch's time: shapes that a law is fitted to, as only these will come about
_FEWEST_SHAPES = 32
_MOVES = 256  # for every sample
_SEED = 0


def exchanged(priced: RangeCosts, cuts: Sequence[Cut]) -> list[MicroBatch]:
    """As many micro-batches as cuts, each under its cut's kind of recomputation, with samples exchanged between them.

    They keep the cap on tokens; the caller prices them. Raises PlanError where too little is priced for a law.
    """
    times, usual = (
        bottleneck(priced.kind_costs[0], stage_ranks=priced.stage_ranks)[0],
        sorted(priced.compute_times(cuts)),
    )
    law = fitted_law(priced.sizes, times, usual[len(usual) // 2])
    if law is None:
        raise PlanError("too few shapes are priced to say what others take")
    order, multiple = priced.order, priced.caps.pad_multiple
    encoder = [round_up(s.encoder, multiple) for s in order]
    decoder = [round_up(s.decoder, multiple) for s in order]
    groups = [range(cut.first, cut.end) for cut in cuts]
    most = priced.caps.max_tokens or INFEASIBLE
    new_groups = regrouped(groups, encoder, decoder, law, moves=_MOVES * len(order), most_tokens=most)
    return [
        MicroBatch(tuple(order[i] for i in sorted(group)), recompute=priced.kinds[cut.kind], pad_multiple=multiple)
        for group, cut in zip(new_groups, cuts, strict=True)
    ]


def fitted_law(sizes: IntArray, times_ns: IntArray, usual_ns: int) -> ShapeLaw | None:
    """c of c0 + rows (c1 e + c2 d + c3 e e + c4 d d + c5 e d), about the time of `rows` samples padded to (e, d).

    `sizes` (3, shapes): rows, e and d of shapes that take about so long as a micro-batch does (`usual_ns`), with their
    `times_ns`. None where there are too few of these to tell.
    """
    near = (times_ns > _NEAR[0] * usual_ns) & (times_ns < min(_NEAR[1] * usual_ns, INFEASIBLE))
    if int(near.sum()) < _FEWEST_SHAPES:
        return None
    rows, e, d = sizes[:, near].astype(np.float64)
    law = np.stack([np.ones_like(rows), rows * e, rows * d, rows * e * e, rows * d * d, rows * e * d], axis=1)
    c0, c1, c2, c3, c4, c5 = non_negative_least_squares(law, times_ns[near].astype(np.float64)).tolist()
    return c0, c1, c2, c3, c4, c5


def regrouped(
    groups: Sequence[Sequence[int]],
    encoder: Sequence[int],
    decoder: Sequence[int],
    law: ShapeLaw,
    *,
    moves: int,
    most_tokens: int = INFEASIBLE,
) -> list[list[int]]:
    """The same items in as many groups, whose costs by `law` sum to as little as so many moves can reach.

    A move gives an item to another group or exchanges two, mostly one that is its group's longest on a side. No group
    becomes much longer, or comes to have more positions, padding included, than `most_tokens`. Record-to-record travel
    (Dueck 1993), as in the search. A function of its arguments.
    """
    if len(groups) < 2:
        return list(map(list, groups))
    new_groups: list[list[int]] = native.regrouped(
        list(map(list, groups)), list(encoder), list(decoder), law, most_tokens, moves, _SEED
    )
    return new_groups
