"""Samples of an epoch filled into steps of all ranks: runs of the shuffled order, evened out by `deal`."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.sampling.bins import FloatArray
from dynapipe_ext.sampling.deal import deal
from dynapipe_ext.sampling.even_steps import even_steps

_BLOCK_BINS = 128  # bins dealt together: the more, the evener; a sample stays within so many of its place
_WINDOW = 16  # samples on either side of a boundary between blocks that may change sides
_CHUNK = 1 << 12  # boundaries looked at side by side
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Steps:
    """Bins of steps: bin `step * num_ranks + rank` holds places `places[starts[bin] : starts[bin + 1]]`.

    `left` are places that found no room, ascending.
    """

    places: IntArray
    starts: IntArray
    left: IntArray


def fill_steps(
    tokens: IntArray, costs: IntArray, *, num_steps: int, num_ranks: int, cap: int, target: int, first: int = 0
) -> Steps:
    """The first `num_steps * target` tokens, in order of place, in steps of `num_ranks` bins of at most `cap` tokens.

    tokens and costs are by place, shape (N,). Blocks of a few steps are runs of the order whose ends are moved by
    exchanges of neighbours until their tokens are right; `deal` evens out the bins of a block, and bins of like cost
    make a step. What lies behind the last block, or found no room, is left;
    places below `first` come first.
    """
    if not num_steps:
        return Steps(_NONE, np.zeros(1, np.int64), np.arange(len(tokens), dtype=np.int64))
    num_blocks = -(-num_steps // max(1, -(-_BLOCK_BINS // num_ranks)))
    steps_each, more = divmod(num_steps, num_blocks)
    sizes = np.full(num_blocks, steps_each, np.int64)
    sizes[:more] += 1
    order, bounds = runs(tokens, np.cumsum(sizes), num_ranks=num_ranks, target=target)
    places, counts, left = [], [], [order[bounds[-1] :]]
    for begin, end, steps in ((0, more, steps_each + 1), (more, num_blocks, steps_each)):
        if begin == end:
            continue
        dealt = deal(tokens, costs, order, bounds[begin : end + 1], num_bins=steps * num_ranks, cap=cap, first=first)
        num_bins = steps * num_ranks
        found, starts = by_step(dealt.places, dealt.starts, costs, num_ranks=num_ranks, num_bins=num_bins)
        found, starts = even_steps(found, starts, tokens, costs, num_ranks=num_ranks, num_bins=num_bins, cap=cap)
        places.append(found)
        counts.append(np.diff(starts))
        left.append(dealt.left)
    starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    return Steps(np.concatenate(places), starts, np.sort(np.concatenate(left)))


def runs(tokens: IntArray, steps: IntArray, *, num_ranks: int, target: int) -> tuple[IntArray, IntArray]:
    """Places in order, and the bounds of blocks in them, so that the first k blocks hold about `steps[k] * target`.

    A few places on either side of each bound are exchanged where that brings the sum nearer. Every block has at least
    a sample for each of its bins, if there are so many.

    >>> runs(np.array([5, 5, 2, 4, 4, 4]), np.array([1, 2]), num_ranks=1, target=12)
    (array([0, 1, 2, 3, 4, 5]), array([0, 3, 6]))
    """
    order = np.arange(len(tokens), dtype=np.int64)
    sums = np.concatenate([[0], np.cumsum(tokens)])
    wanted = np.minimum(steps * target, sums[-1])
    ends = np.searchsorted(sums, wanted, side="left")
    ends -= (ends > 0) & (2 * (sums[ends] - wanted) > sums[ends] - sums[np.maximum(ends - 1, 0)])
    bins = steps * num_ranks
    ends = np.maximum.accumulate(ends - bins) + bins
    ends = np.maximum(ends, bins)
    latest = len(tokens) - (bins[-1] - bins)
    ends = np.minimum(ends, latest)
    bounds = np.concatenate([[0], ends]).astype(np.int64)
    inner = np.flatnonzero(ends < len(tokens))
    for start in range(0, len(inner), _CHUNK):
        _even_ends(order, tokens, bounds, inner[start : start + _CHUNK] + 1, wanted, sums)
    return order, bounds


def _even_ends(
    order: IntArray, tokens: IntArray, bounds: IntArray, chosen: IntArray, wanted: IntArray, sums: IntArray
) -> None:
    """Exchange two places over each chosen bound where that brings the sum before it nearer to what is wanted."""
    at = bounds[chosen]
    after = np.append(bounds, len(order))[chosen + 1]
    room = np.minimum((at - bounds[chosen - 1]) // 2, (after - at) // 2)  # no place is in two windows
    reach = np.arange(1, _WINDOW + 1, dtype=np.int64)
    usable = reach <= room[:, None]
    before = order[np.maximum(at[:, None] - reach, 0)]
    behind = order[np.minimum(at[:, None] + reach - 1, len(order) - 1)]
    missing = wanted[chosen - 1] - sums[at]
    off = np.abs((tokens[behind] - missing[:, None])[:, None, :] - tokens[before][:, :, None])
    off[~(usable[:, :, None] & usable[:, None, :])] = np.iinfo(np.int64).max
    off = off.reshape(len(at), -1)
    best = off.argmin(axis=1)
    rows = np.flatnonzero(off[np.arange(len(at)), best] < np.abs(missing))
    i, j = np.divmod(best[rows], _WINDOW)
    order[at[rows] - 1 - i], order[at[rows] + j] = behind[rows, j], before[rows, i]


def by_step(
    places: IntArray, starts: IntArray, costs: IntArray, *, num_ranks: int, num_bins: int
) -> tuple[IntArray, IntArray]:
    """Bins of each block of `num_bins` in another order: `num_ranks` of like cost after each other, steps shuffled.

    Ranks take turns in having the dearest bin.
    """
    if num_ranks == num_bins or not len(starts) - 1:
        rotated = np.arange(len(starts) - 1, dtype=np.int64).reshape(-1, num_ranks)
    else:
        ordered = costs[places]
        load = np.add.reduceat(ordered, starts[:-1]).reshape(-1, num_bins)
        largest = np.maximum.reduceat(ordered, starts[:-1]).reshape(-1, num_bins)
        ranked = _like_costs(load, largest, num_ranks)
        # The place of a bin's first sample is as good as random: steps of a block come in that order.
        firsts = places[starts[:-1]].reshape(-1, num_bins)
        groups = np.take_along_axis(firsts, ranked, axis=1).reshape(len(load), -1, num_ranks)[:, :, 0]
        turn = np.argsort(groups, axis=1, kind="stable")
        grouped = ranked.reshape(len(load), -1, num_ranks)
        rotated = np.take_along_axis(grouped, turn[:, :, None], axis=1)
        rotated = (rotated + np.arange(len(load), dtype=np.int64)[:, None, None] * num_bins).reshape(-1, num_ranks)
    shift = (np.arange(num_ranks, dtype=np.int64) + np.arange(len(rotated), dtype=np.int64)[:, None]) % num_ranks
    bins = np.take_along_axis(rotated, shift, axis=1).ravel()
    return rearranged(places, starts, bins)


def _like_costs(load: IntArray, largest: IntArray, num_ranks: int) -> IntArray:
    """Bins of each block so that runs of `num_ranks` are of like cost: in ascending order, perhaps from a later one.

    A later start puts the cheapest bins beside the dearest. It pays where a bin is dear for one sample that no other
    order of things could make cheaper: its step is slow anyway, and the others come out even.
    """
    ranked = np.argsort(load, axis=1, kind="stable")
    worst = _excess(load, largest, ranked, num_ranks)
    best = ranked
    for shift in range(1, num_ranks):
        if float(worst.max(initial=1.0)) < 1.002:
            break
        other = np.roll(ranked, -shift, axis=1)
        found = _excess(load, largest, other, num_ranks)
        best = np.where((found < worst)[:, None], other, best)
        worst = np.minimum(worst, found)
    return best


def _excess(load: IntArray, largest: IntArray, bins: IntArray, num_ranks: int) -> FloatArray:
    """Of each block, the largest load of a step over what its mean, and its largest sample, make inevitable."""
    shape = (len(load), -1, num_ranks)
    loads = np.take_along_axis(load, bins, axis=1).reshape(shape)
    samples = np.take_along_axis(largest, bins, axis=1).reshape(shape).max(axis=2)
    found: FloatArray = (loads.max(axis=2) / np.maximum(np.maximum(loads.mean(axis=2), samples), 1)).max(axis=1)
    return found


def rearranged(places: IntArray, starts: IntArray, bins: IntArray) -> tuple[IntArray, IntArray]:
    """The same bins in the order given, as (places, starts).

    >>> rearranged(np.array([7, 8, 9]), np.array([0, 2, 3]), np.array([1, 0]))
    (array([9, 7, 8]), array([0, 1, 3]))
    """
    counts = np.diff(starts)[bins]
    new_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    take = np.arange(new_starts[-1], dtype=np.int64) + np.repeat(starts[bins] - new_starts[:-1], counts)
    return places[take], new_starts


def place_rest(steps: Steps, tokens: IntArray, *, cap: int) -> Steps:
    """Places that were left, longest first, each into the emptiest bin of any step; those without room stay left."""
    if not len(steps.left) or len(steps.starts) < 2:
        return steps
    filled = np.add.reduceat(tokens[steps.places], steps.starts[:-1])
    heap = [(int(used), number) for number, used in enumerate(filled)]
    heapq.heapify(heap)
    placed, bins, left = [], [], []
    for place in steps.left[np.argsort(-tokens[steps.left], kind="stable")].tolist():
        used, number = heap[0]
        if used + int(tokens[place]) > cap:
            left.append(place)
            continue
        heapq.heapreplace(heap, (used + int(tokens[place]), number))
        placed.append(place)
        bins.append(number)
    owner = np.repeat(np.arange(len(filled), dtype=np.int64), np.diff(steps.starts))
    owner = np.concatenate([owner, np.array(bins, np.int64)])
    places = np.concatenate([steps.places, np.array(placed, np.int64)])
    by_bin = np.argsort(owner, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(filled)))]).astype(np.int64)
    return Steps(places[by_bin], starts, np.sort(np.array(left, np.int64)))


def joined(parts: list[Steps], left: IntArray) -> Steps:
    """Steps of several parts after each other."""
    counts = np.concatenate([_NONE, *(np.diff(part.starts) for part in parts)])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Steps(np.concatenate([_NONE, *(part.places for part in parts)]), starts, left)
