"""Samples of an epoch filled into steps of all ranks: runs of the shuffled order, evened out by `deal`."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.batching.sampling.bins import CLOSED, FloatArray
from dynapipe_ext.batching.sampling.composition import alike_in_length
from dynapipe_ext.batching.sampling.deal import deal, heavy
from dynapipe_ext.batching.sampling.even_steps import even_steps
from dynapipe_ext.costs.model import IntArray

_BLOCK_BINS = 128  # bins dealt together: the more, the evener; a sample stays within so many of its place
_WINDOW = 16  # samples on either side of a boundary between blocks that may change sides
_CHUNK = 1 << 12  # boundaries looked at side by side
_BLOCK_STEPS = 6  # and steps at least, among which bins of like cost find each other
_GROUPED = 3  # steps of a block at least, for bins of like cost to make a step
_MOST_MOVES = 1 << 22  # samples left times samples placed, up to which one is moved for each that lacks room
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
    make a step, as far as the steps' mean lengths stay alike. What lies behind the last block, or found no room, is
    left; places below `first` come first.
    """
    if not num_steps:
        return Steps(_NONE, np.zeros(1, np.int64), np.arange(len(tokens), dtype=np.int64))
    num_blocks = -(-num_steps // max(_BLOCK_STEPS, -(-_BLOCK_BINS // num_ranks)))
    steps_each, more = divmod(num_steps, num_blocks)
    sizes = np.full(num_blocks, steps_each, np.int64)
    sizes[:more] += 1
    order, bounds = runs(tokens, np.cumsum(sizes), num_ranks=num_ranks, target=target)
    dealt_by = _dealt_by(tokens, costs, order, bounds, sizes * num_ranks) if steps_each >= _GROUPED else costs
    places, counts, left = [], [], [order[bounds[-1] :]]
    for begin, end, steps in ((0, more, steps_each + 1), (more, num_blocks, steps_each)):
        if begin == end:
            continue
        num_bins = steps * num_ranks
        dealt = deal(tokens, dealt_by, order, bounds[begin : end + 1], num_bins=num_bins, cap=cap, first=first)
        found, starts = by_step(
            dealt.places, dealt.starts, costs, num_ranks=num_ranks, num_bins=num_bins, tokens=tokens
        )
        found, starts = even_steps(found, starts, tokens, costs, num_ranks=num_ranks, num_bins=num_bins, cap=cap)
        places.append(found)
        counts.append(np.diff(starts))
        left.append(dealt.left)
    starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    return Steps(np.concatenate(places), starts, np.sort(np.concatenate(left)))


def _dealt_by(tokens: IntArray, costs: IntArray, order: IntArray, bounds: IntArray, num_bins: IntArray) -> IntArray:
    """What `deal` is to even out, by place: costs; in blocks of a heavy tail tokens, since `by_step` evens costs there.

    Around a sample dearer than bins are in the mean, equal costs would need the shortest samples of the whole block.
    """
    ordered = costs[order[: bounds[-1]]]
    dearest, total = np.maximum.reduceat(ordered, bounds[:-1]), np.add.reduceat(ordered, bounds[:-1])
    by_tokens = np.zeros(len(tokens), np.bool_)
    by_tokens[order[: bounds[-1]]] = np.repeat(heavy(dearest, total, num_bins), np.diff(bounds))
    return np.where(by_tokens, tokens, costs)


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
    places: IntArray,
    starts: IntArray,
    costs: IntArray,
    *,
    num_ranks: int,
    num_bins: int,
    tokens: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Bins of each block of `num_bins` in another order: `num_ranks` of like cost after each other, steps shuffled.

    With `tokens`, by place, the mean length of a step is near its block's (`alike_in_length`). Ranks take turns in
    having the dearest bin.
    """
    bins = np.arange(len(starts) - 1, dtype=np.int64).reshape(-1, num_ranks)
    if num_ranks < num_bins and len(bins):
        shape = (-1, num_bins)
        load, largest = (f.reduceat(costs[places], starts[:-1]).reshape(shape) for f in (np.add, np.maximum))
        grouped = _like_costs(load, largest, num_ranks).reshape(len(load), -1, num_ranks)
        if tokens is not None and num_ranks > 1:
            filled = np.add.reduceat(tokens[places], starts[:-1]).reshape(shape)
            alike_in_length(grouped, load, filled, np.diff(starts).reshape(shape))
        # The place of a bin's first sample is as good as random: steps of a block come in that order.
        firsts = np.take_along_axis(places[starts[:-1]].reshape(shape), grouped[:, :, 0], axis=1)
        grouped = np.take_along_axis(grouped, np.argsort(firsts, axis=1, kind="stable")[:, :, None], axis=1)
        bins = (grouped + np.arange(len(load), dtype=np.int64)[:, None, None] * num_bins).reshape(-1, num_ranks)
    shift = (np.arange(num_ranks, dtype=np.int64) + np.arange(len(bins), dtype=np.int64)[:, None]) % num_ranks
    return rearranged(places, starts, np.take_along_axis(bins, shift, axis=1).ravel())


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
        excess = _excess(load, largest, other, num_ranks)
        best = np.where((excess < worst)[:, None], other, best)
        worst = np.minimum(worst, excess)
    return best


def _excess(load: IntArray, largest: IntArray, bins: IntArray, num_ranks: int) -> FloatArray:
    """Of each block, the largest load of a step over what its mean, and its largest sample, make inevitable."""
    shape = (len(load), -1, num_ranks)
    loads = np.take_along_axis(load, bins, axis=1).reshape(shape)
    samples = np.take_along_axis(largest, bins, axis=1).reshape(shape).max(axis=2)
    excess: FloatArray = (loads.max(axis=2) / np.maximum(np.maximum(loads.mean(axis=2), samples), 1)).max(axis=1)
    return excess


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
    """Places that were left, longest first, each into the emptiest bin of any step, or for one that can go elsewhere.

    Those that find no room even so stay left.
    """
    if not len(steps.left) or len(steps.starts) < 2:
        return steps
    filled = np.add.reduceat(tokens[steps.places], steps.starts[:-1])
    owner = np.repeat(np.arange(len(filled), dtype=np.int64), np.diff(steps.starts))
    heap = [(int(used), number) for number, used in enumerate(filled)]
    heapq.heapify(heap)
    placed, bins, lacking = [], [], []
    for place in steps.left[np.argsort(-tokens[steps.left], kind="stable")].tolist():
        used, number = heap[0]
        if used + int(tokens[place]) > cap:
            lacking.append(place)
            continue
        heapq.heapreplace(heap, (used + int(tokens[place]), number))
        placed.append(place)
        bins.append(number)
    left = lacking
    if lacking and len(lacking) * len(steps.places) <= _MOST_MOVES:
        room = cap - filled - np.bincount(bins, tokens[placed], len(filled)).astype(np.int64)
        lengths, left = tokens[steps.places], []
        for place in lacking:
            to_bin = _moved_for(int(tokens[place]), lengths, owner, room)
            (left if to_bin is None else placed).append(place)
            bins += [] if to_bin is None else [to_bin]
    owner = np.concatenate([owner, np.array(bins, np.int64)])
    places = np.concatenate([steps.places, np.array(placed, np.int64)])
    by_bin = np.argsort(owner, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(filled)))]).astype(np.int64)
    return Steps(places[by_bin], starts, np.sort(np.array(left, np.int64)))


def _moved_for(length: int, lengths: IntArray, owner: IntArray, room: IntArray) -> int | None:
    """The bin that has room for `length` once one of its samples has gone to another, whose going leaves least room."""
    emptiest = int(room.argmax())
    elsewhere = np.full(len(room), room[emptiest])
    elsewhere[emptiest] = np.delete(room, emptiest).max(initial=-1)
    after = lengths + room[owner]
    fits = (after >= length) & (lengths <= elsewhere[owner])
    if not fits.any():
        return None
    sample = int(np.where(fits, after, CLOSED).argmin())
    giver = int(owner[sample])
    others = np.where(room >= lengths[sample], room, CLOSED)
    others[giver] = CLOSED
    taker = int(others.argmin())
    owner[sample] = taker
    room[taker] -= lengths[sample]
    room[giver] += lengths[sample] - length
    return giver


def joined(parts: list[Steps], left: IntArray) -> Steps:
    """Steps of several parts after each other."""
    counts = np.concatenate([_NONE, *(np.diff(part.starts) for part in parts)])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Steps(np.concatenate([_NONE, *(part.places for part in parts)]), starts, left)
