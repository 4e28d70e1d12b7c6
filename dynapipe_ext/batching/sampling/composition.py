"""Steps of like mean length: bins of a block change steps where one holds far longer samples than another."""

from __future__ import annotations

import numpy as np

from dynapipe_ext.batching.sampling.bins import FloatArray
from dynapipe_ext.costs.model import IntArray

FURTHEST = 0.15  # steps' mean lengths vary (standard deviation over mean) by no more than this where it can be had
_ALIKE = 0.05  # a step with no more samples above its block's, or fewer, is left as it is
_TRIALS = 1 << 24  # exchanges tried in all rounds together, unless `_FEWEST_ROUNDS` need more
_FEWEST_ROUNDS = 4


def alike_in_length(grouped: IntArray, load: IntArray, filled: IntArray, counts: IntArray, *, weight: float) -> None:
    """Exchange bins between steps of `grouped` (blocks, steps, ranks), in place, until their mean lengths are alike.

    load, filled, counts: cost, tokens and samples of each bin, (blocks, bins). What counts is the sum over steps of the
    dearest rank's cost over its block's mean, and of `weight` times the squared `apart_in_length`. Each round, one step
    of a block exchanges the bin that helps most: the step that is furthest off, or the next where that one finds none.

    >>> grouped = np.array([[[0, 1], [2, 3]]])
    >>> filled, counts = np.full((1, 4), 60), np.array([[10, 10, 20, 20]])
    >>> alike_in_length(grouped, np.array([[9, 9, 8, 8]]), filled, counts, weight=32)
    >>> grouped.tolist()
    [[[2, 1], [0, 3]]]
    """
    num_blocks, num_steps, num_ranks = grouped.shape
    off = apart_in_length(filled.reshape(grouped.shape), counts.reshape(grouped.shape)).reshape(num_blocks, -1)
    cost = load / np.maximum(load.mean(axis=1, keepdims=True), 1e-9)
    rows = np.arange(num_blocks, dtype=np.int64)
    in_vain = np.zeros(num_blocks, np.int64)  # steps of each block that found no exchange since the last one
    rounds = max(_FEWEST_ROUNDS, _TRIALS // (num_blocks * num_steps * num_ranks**2))
    for _ in range(min(4 * num_steps * num_ranks, rounds)):
        held = grouped[rows]
        off_of, cost_of = (
            np.take_along_axis(x[rows], held.reshape(len(rows), -1), 1).reshape(held.shape) for x in (off, cost)
        )
        apart = off_of.sum(axis=2)
        at = np.arange(len(rows), dtype=np.int64)
        step = np.argsort(-np.abs(apart), axis=1, kind="stable")[at, np.minimum(in_vain[rows], num_steps - 1)]
        uneven = (np.abs(apart[at, step]) > _ALIKE) & (in_vain[rows] < num_steps)
        if not uneven.any():
            return
        rows, held, off_of, cost_of, apart, step = (x[uneven] for x in (rows, held, off_of, cost_of, apart, step))
        gain = _gains(off_of, cost_of, apart, step, weight).reshape(len(rows), -1)
        at = np.arange(len(rows), dtype=np.int64)
        best = gain.argmin(axis=1)
        helps = gain[at, best] < -1e-9
        in_vain[rows] = np.where(helps, 0, in_vain[rows] + 1)
        at, block, step, best = at[helps], rows[helps], step[helps], best[helps]
        mine, other, theirs = np.unravel_index(best, (num_ranks, num_steps, num_ranks))
        grouped[block, step, mine], grouped[block, other, theirs] = held[at, other, theirs], held[at, step, mine]


def _gains(off: FloatArray, cost: FloatArray, apart: FloatArray, step: IntArray, weight: float) -> FloatArray:
    """What each exchange of a bin of `step` changes, (blocks, bins of the step, steps, their bins): less is better."""
    at = np.arange(len(step), dtype=np.int64)
    without = _dearest_other(cost)
    mine_off, mine_cost, mine_without = off[at, step], cost[at, step], without[at, step]
    moved = mine_off[:, :, None, None] - off[:, None, :, :]
    price = np.maximum(mine_without[:, :, None, None], cost[:, None, :, :])
    price += np.maximum(without[:, None, :, :], mine_cost[:, :, None, None])
    price += weight * ((apart[at, step][:, None, None, None] - moved) ** 2 + (apart[:, None, :, None] + moved) ** 2)
    now = cost.max(axis=2) + weight * apart**2
    gain: FloatArray = price - (now[at, step][:, None] + now)[:, None, :, None]
    gain[at, :, step] = np.inf
    return gain


def length_variation(places: IntArray, starts: IntArray, tokens: IntArray, *, num_ranks: int) -> float:
    """Standard deviation over mean of the mean sample length of steps; tokens by place, bins as in `Steps`.

    >>> length_variation(np.arange(4), np.array([0, 2, 4]), np.array([1, 1, 3, 3]), num_ranks=1)
    0.5
    """
    if len(starts) <= num_ranks:
        return 0.0
    firsts = starts[::num_ranks]
    means = np.add.reduceat(tokens[places], firsts[:-1]) / np.diff(firsts)
    return float(means.std() / means.mean())


def apart_in_length(filled: IntArray, counts: IntArray) -> FloatArray:
    """Samples of each bin above those its block has for as many tokens, as a share of a step's; sums to 0 in a block.

    filled, counts: (blocks, steps, ranks).
    """
    num_samples, num_tokens = (x.sum(axis=(1, 2), keepdims=True) for x in (counts, filled))
    surplus: FloatArray = (counts - filled * (num_samples / num_tokens)) * (counts.shape[1] / num_samples)
    return surplus


def _dearest_other(cost: FloatArray) -> FloatArray:
    """Of each rank of (blocks, steps, ranks), the dearest of the others of its step."""
    two = np.partition(cost, -2, axis=2)[:, :, -2:]
    other_cost: FloatArray = np.where(cost >= two[:, :, 1:], two[:, :, :1], two[:, :, 1:])
    return other_cost
