"""Samples of an epoch filled into steps of all ranks: runs of the shuffled order, evened out by `deal`."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.batching.sampling.bins import CLOSED
from dynapipe_ext.batching.sampling.composition import FURTHEST, length_variation
from dynapipe_ext.batching.sampling.deal import Dealt, deal, heavy
from dynapipe_ext.batching.sampling.even_steps import even_steps, step_excess
from dynapipe_ext.batching.sampling.grouping import Blocks, chained, grouped_alike
from dynapipe_ext.costs.model import IntArray

_BLOCK_BINS = 128  # bins dealt together: the more, the evener; a sample stays within so many of its place
_WINDOW = 16  # samples on either side of a boundary between blocks that may change sides
_CHUNK = 1 << 12  # boundaries looked at side by side
_BLOCK_STEPS = 6  # and steps at least, among which bins of like cost find each other
_UNEVEN = 1.01  # steps whose dearest ranks cost this much more than the mean are dealt another way, too
_AS_CHEAP = 1.01  # within this of the cheapest way, the one whose ranks are evenest is taken
_MANY = 320_000  # samples, above which one way must do
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
    tokens: IntArray,
    costs: IntArray,
    *,
    num_steps: int,
    num_ranks: int,
    cap: int,
    target: int,
    draft: bool = False,
) -> Steps:
    """The first `num_steps * target` tokens, in order of place, in steps of `num_ranks` bins of at most `cap` tokens.

    tokens and costs are by place, shape (N,). Blocks of a few steps are runs of the order whose ends are moved by
    exchanges of neighbours until their tokens are right; `deal` evens out the bins of a block, and bins of like cost
    make a step, as far as the steps' mean lengths stay alike. What lies behind the last block, or found no room, is
    left. A `draft` says what finds room, in bins that are not yet evened out.
    """
    if not num_steps:
        return Steps(_NONE, np.zeros(1, np.int64), np.arange(len(tokens), dtype=np.int64))
    num_blocks = -(-num_steps // max(_BLOCK_STEPS, -(-_BLOCK_BINS // num_ranks)))
    steps_each, more = divmod(num_steps, num_blocks)
    sizes = np.full(num_blocks, steps_each, np.int64)
    sizes[:more] += 1
    order, bounds = runs(tokens, np.cumsum(sizes), num_ranks=num_ranks, target=target)
    dealt_by = _dealt_by(tokens, costs, order, bounds, sizes * num_ranks)
    if draft:
        parts = _dealt(tokens, dealt_by, order, bounds, sizes * num_ranks, cap)
        return _steps_of([(dealt.places, dealt.starts) for dealt, _ in parts], len(tokens))
    proposals: list[_Proposal] = []
    for keys in (dealt_by, tokens if np.array_equal(dealt_by, costs) else costs):
        dealt = _dealt(tokens, keys, order, bounds, sizes * num_ranks, cap)
        steps = _filled(tokens, costs, dealt, num_ranks=num_ranks, cap=cap)
        proposals.append(_Proposal.of(steps, tokens, costs, num_ranks))
        if proposals[-1].dearest * num_ranks <= _UNEVEN * int(costs[steps.places].sum()) or len(tokens) > _MANY:
            break
    return _best(proposals).steps


@dataclass(frozen=True, slots=True)
class _Proposal:
    """Steps; whether their mean lengths vary too much; the sum of dearest ranks' costs; `step_excess`, its mean."""

    steps: Steps
    is_varied: bool
    dearest: int
    excess: float

    @classmethod
    def of(cls, steps: Steps, tokens: IntArray, costs: IntArray, num_ranks: int) -> _Proposal:
        varied = length_variation(steps.places, steps.starts, tokens, num_ranks=num_ranks)
        load, largest = (f.reduceat(costs[steps.places], steps.starts[:-1]) for f in (np.add, np.maximum))
        dearest = int(load.reshape(-1, num_ranks).max(axis=1).sum())
        return cls(steps, varied > FURTHEST, dearest, float(step_excess(load, largest, num_ranks).mean()))


def _best(proposals: list[_Proposal]) -> _Proposal:
    """Of those that leave least and are alike in length, the evenest that costs about what the cheapest costs."""
    least = min((len(one.steps.left), one.is_varied) for one in proposals)
    alike = [one for one in proposals if (len(one.steps.left), one.is_varied) == least]
    cheapest = min(one.dearest for one in alike)
    return min((one for one in alike if one.dearest <= _AS_CHEAP * cheapest), key=lambda one: (one.excess, one.dearest))


def _filled(tokens: IntArray, costs: IntArray, dealt: list[tuple[Dealt, int]], *, num_ranks: int, cap: int) -> Steps:
    """Dealt blocks in steps of bins of like cost and like length."""
    parts = [Blocks.of(bins, tokens, costs, num_bins=num_bins) for bins, num_bins in dealt]
    grouped = grouped_alike(parts, num_ranks)
    evened = [
        even_steps(places, starts, tokens, costs, num_ranks=num_ranks, num_bins=part.num_bins, cap=cap)
        for part, (places, starts) in zip(parts, grouped, strict=True)
    ]
    varied, varied_before = (length_variation(*chained(x), tokens, num_ranks=num_ranks) for x in (evened, grouped))
    return _steps_of(evened if varied <= max(FURTHEST, varied_before) else grouped, len(tokens))


def _dealt(
    tokens: IntArray, dealt_by: IntArray, order: IntArray, bounds: IntArray, num_bins: IntArray, cap: int
) -> list[tuple[Dealt, int]]:
    """Blocks of equally many bins dealt together, and how many these are; `num_bins` of each block, descending."""
    parts = []
    for number in sorted(set(num_bins.tolist()), reverse=True):
        begin, last = np.flatnonzero(num_bins == number)[[0, -1]].tolist()
        dealt = deal(tokens, dealt_by, order, bounds[begin : last + 2], num_bins=number, cap=cap)
        parts.append((dealt, number))
    return parts


def _steps_of(parts: list[tuple[IntArray, IntArray]], num_places: int) -> Steps:
    """Steps of (places, starts) after each other; the other places are left."""
    places, starts = chained(parts)
    left = np.ones(num_places, np.bool_)
    left[places] = False
    return Steps(places, starts, np.flatnonzero(left))


def _dealt_by(tokens: IntArray, costs: IntArray, order: IntArray, bounds: IntArray, num_bins: IntArray) -> IntArray:
    """What `deal` is to even out, by place: costs; in blocks of a heavy tail tokens, since `grouped_alike` evens costs.

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
    places, starts = chained([(part.places, part.starts) for part in parts])
    return Steps(places, starts, left)
