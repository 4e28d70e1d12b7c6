"""Steps of like mean length: bins of a block change steps where one holds far longer samples than another."""

from __future__ import annotations

import numpy as np

from dynapipe_ext.batching.sampling.bins import FloatArray
from dynapipe_ext.costs.model import IntArray

FURTHEST = 0.15  # a step has no more samples, or fewer, than this share above what its block has for as many tokens
_WEIGHT = 64  # of what lies above that, beside the cost of a step's dearest rank over the mean

_TRIALS = 1 << 25  # exchanges tried in all rounds together, unless `_FEWEST_ROUNDS` need more
_FEWEST_ROUNDS = 4


def alike_in_length(grouped: IntArray, load: IntArray, filled: IntArray, counts: IntArray) -> None:
    """Exchange bins between steps of `grouped` (blocks, steps, ranks), in place, until their mean lengths are alike.

    load, filled, counts: cost, tokens and samples of each bin, (blocks, bins). Each round, the step of a block that is
    furthest off exchanges the bin that helps most for what the steps' dearest ranks then cost more.

    >>> grouped = np.array([[[0, 1], [2, 3]]])
    >>> alike_in_length(grouped, np.array([[9, 9, 8, 8]]), np.full((1, 4), 60), np.array([[10, 10, 20, 20]]))
    >>> grouped.tolist()
    [[[2, 1], [0, 3]]]
    """
    num_blocks, num_steps, num_ranks = grouped.shape
    off = apart_in_length(filled.reshape(grouped.shape), counts.reshape(grouped.shape)).reshape(num_blocks, -1)
    cost = load / np.maximum(load.mean(axis=1, keepdims=True), 1e-9)
    rows = np.arange(num_blocks, dtype=np.int64)
    rounds = max(_FEWEST_ROUNDS, _TRIALS // (num_blocks * num_steps * num_ranks**2))
    for _ in range(min(num_steps * num_ranks, rounds)):
        held = grouped[rows]
        off_of, cost_of = (
            np.take_along_axis(x[rows], held.reshape(len(rows), -1), 1).reshape(held.shape) for x in (off, cost)
        )
        apart = off_of.sum(axis=2)
        worst = np.abs(apart).argmax(axis=1)
        at = np.arange(len(rows), dtype=np.int64)
        uneven = np.abs(apart[at, worst]) > FURTHEST
        if not uneven.any():
            return
        rows, held, off_of, cost_of, apart, worst = (x[uneven] for x in (rows, held, off_of, cost_of, apart, worst))
        at = np.arange(len(rows), dtype=np.int64)
        without = _dearest_other(cost_of)
        mine_off, mine_cost, mine_without = off_of[at, worst], cost_of[at, worst], without[at, worst]
        # (blocks, bins of the worst step, steps, their bins)
        moved = mine_off[:, :, None, None] - off_of[:, None, :, :]
        price = np.maximum(mine_without[:, :, None, None], cost_of[:, None, :, :])
        price += np.maximum(without[:, None, :, :], mine_cost[:, :, None, None])
        price += _WEIGHT * (
            _over(apart[at, worst][:, None, None, None] - moved) + _over(apart[:, None, :, None] + moved)
        )
        now = cost_of.max(axis=2) + _WEIGHT * _over(apart)
        gain = price - (now[at, worst][:, None] + now)[:, None, :, None]
        gain[at, :, worst] = np.inf
        gain = gain.reshape(len(rows), -1)
        best = gain.argmin(axis=1)
        helps = gain[at, best] < -1e-9
        rows, held, worst, best = rows[helps], held[helps], worst[helps], best[helps]
        if not len(rows):
            return
        mine, step, theirs = np.unravel_index(best, (num_ranks, num_steps, num_ranks))
        at = np.arange(len(rows))
        grouped[rows, worst, mine], grouped[rows, step, theirs] = held[at, step, theirs], held[at, worst, mine]


def apart_in_length(filled: IntArray, counts: IntArray) -> FloatArray:
    """Samples of each bin above those its block has for as many tokens, as a share of a step's; sums to 0 in a block.

    filled, counts: (blocks, steps, ranks).
    """
    num_samples, num_tokens = (x.sum(axis=(1, 2), keepdims=True) for x in (counts, filled))
    surplus: FloatArray = (counts - filled * (num_samples / num_tokens)) * (counts.shape[1] / num_samples)
    return surplus


def _over(apart: FloatArray) -> FloatArray:
    excess: FloatArray = np.maximum(np.abs(apart) - FURTHEST, 0)
    return excess


def _dearest_other(cost: FloatArray) -> FloatArray:
    """Of each rank of (blocks, steps, ranks), the dearest of the others of its step."""
    two = np.partition(cost, -2, axis=2)[:, :, -2:]
    other_cost: FloatArray = np.where(cost >= two[:, :, 1:], two[:, :, :1], two[:, :, 1:])
    return other_cost
