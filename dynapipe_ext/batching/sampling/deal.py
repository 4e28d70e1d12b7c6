"""Samples of many blocks dealt to bins at once: equal cost and tokens within a block, no bin above its cap.

A block is what a few steps of all ranks hold. numpy works on all blocks side by side; every choice is by integers or by
element-wise floats, so that the result is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynapipe_ext.batching.sampling.bins import CLOSED, Bins, BoolArray, ascending
from dynapipe_ext.costs.model import IntArray

_CHUNK = 1 << 17  # samples that are dealt side by side: their arrays stay in the cache
_CHUNK_BLOCKS = 8  # and blocks at least: a round takes as long for one
_TRIALS = 8_000_000  # exchanges tried in all rounds of refinement together, unless `_FEWEST_ROUNDS` need more
_FEWEST_ROUNDS = 1
_MOST_ROUNDS = 96
_MOST_SLOTS = 24  # samples of a bin whose exchanges are tried in one round
_FEWER_SLOTS = 8  # the same where there are so many samples that the rounds must be few
_LEAST_SHARE = 8  # at least one bin in so many gets a sample in a round of the greedy start
_FEW = 4  # where no more than one bin in so many takes anything, it takes several at a time
_LIGHT = 0.01  # weight of tokens beside costs in a block of a heavy tail: one sample above half of a bin's mean cost
_TIGHT = 16.0  # the same in a block that is all but full: there tokens decide what finds room
_OVER_CAP = 64  # bins are first filled to one part in so many above the cap: exchanges then bring them below


@dataclass(frozen=True, slots=True)
class Dealt:
    """Places of samples bin by bin, block by block: bin `b` holds `places[starts[b] : starts[b + 1]]`.

    `left` are the places for which no bin had room, ascending.
    """

    places: IntArray
    starts: IntArray
    left: IntArray


def deal(
    tokens: IntArray,
    costs: IntArray,
    order: IntArray,
    bounds: IntArray,
    *,
    num_bins: int,
    cap: int,
) -> Dealt:
    """Samples of each block in `num_bins` bins of at most `cap` tokens, of nearly equal cost and tokens.

    tokens and costs are by place, shape (N,); block k is `order[bounds[k] : bounds[k + 1]]`, places. Longest processing
    time first by cost (Graham 1969) into bins that are below the block's mean of tokens, then exchanges of samples
    between bins while they lower the squared differences of both. No bin is empty where a block has as many samples.

    >>> dealt = deal(np.array([4, 3, 2, 1]), np.array([16, 9, 4, 1]), np.arange(4), np.array([0, 4]), num_bins=2, cap=6)
    >>> [dealt.places[a:b].tolist() for a, b in zip(dealt.starts, dealt.starts[1:])], dealt.left.tolist()
    ([[0], [1, 2, 3]], [])
    """
    num_blocks = len(bounds) - 1
    sizes = np.diff(bounds)
    rounds, slots = _effort(int(sizes.sum()), num_blocks * num_bins)
    places, counts, left = [], [], []
    start = 0
    while start < num_blocks:
        stop = int(np.searchsorted(bounds, bounds[start] + _CHUNK, side="right")) - 1
        stop = min(max(start + _CHUNK_BLOCKS, stop), num_blocks)
        one = _deal_chunk(tokens, costs, order, bounds[start : stop + 1], num_bins, cap, rounds, slots)
        places.append(one[0])
        counts.append(one[1])
        left.append(one[2])
        start = stop
    none = np.zeros(0, np.int64)
    starts = np.concatenate([[0], np.cumsum(np.concatenate([none, *counts]))]).astype(np.int64)
    return Dealt(np.concatenate([none, *places]), starts, np.sort(np.concatenate([none, *left])))


def _effort(num_samples: int, num_bins: int) -> tuple[int, int]:
    """Rounds of refinement and samples of a bin tried in each: fewer where there are millions."""
    pairs = max(1, num_bins // 2)
    slots = min(_MOST_SLOTS, num_samples // max(1, num_bins) + 3)
    rounds = _TRIALS // (pairs * slots * slots + 4 * num_samples)
    if rounds < 8:  # seldom matters: the greedy start is close where there is much to choose from
        slots = min(slots, _FEWER_SLOTS)
        rounds = _TRIALS // (pairs * slots * slots + 4 * num_samples)
    return max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, rounds)), slots


def _deal_chunk(
    tokens: IntArray,
    costs: IntArray,
    order: IntArray,
    bounds: IntArray,
    num_bins: int,
    cap: int,
    rounds: int,
    slots: int,
) -> tuple[IntArray, IntArray, IntArray]:
    sizes = np.diff(bounds)
    width = int(sizes.max())
    column = np.arange(width, dtype=np.int64)
    real = column < sizes[:, None]
    place = order[np.minimum(bounds[:-1, None] + column, bounds[-1] - 1)]
    length = np.where(real, tokens[place], 0)
    # Longest first; equal lengths keep their order, since the column breaks the tie.
    sorted_columns = ascending(np.where(real, int(length.max()) - length, int(length.max()) + 1))
    place = np.take_along_axis(place, sorted_columns, axis=1)
    length = np.take_along_axis(length, sorted_columns, axis=1)
    cost = np.where(real, costs[place], 0)

    chosen = _longest_first(length, cost, sizes, num_bins, cap)
    columns = ascending(chosen)
    bins = np.take_along_axis(chosen, columns, axis=1)
    blocks = np.arange(len(sizes), dtype=np.int64)[:, None]
    in_bin = bins.ravel() < num_bins
    flat = (columns + blocks * width).ravel()[in_bin]
    counts = np.bincount((bins + blocks * num_bins).ravel()[in_bin], minlength=len(sizes) * num_bins).astype(np.int64)
    weight = np.where(heavy(cost.max(axis=1), cost.sum(axis=1), num_bins), _LIGHT, 1.0)
    weight[length.sum(axis=1) > num_bins * (cap - cap // _OVER_CAP)] = _TIGHT
    members = Bins.gather(flat, counts, length.ravel(), cost.ravel(), num_bins, weight)
    if num_bins > 1:
        for number in range(rounds):
            if not members.exchange(number, slots, cap) and number >= 2 * num_bins:
                break
    members.eject(cap)
    held, counts, out = members.contents()
    flat = place.ravel()
    return flat[held], counts, flat[np.concatenate([out, np.flatnonzero((chosen == num_bins).ravel() & real.ravel())])]


def _longest_first(length: IntArray, cost: IntArray, sizes: IntArray, num_bins: int, cap: int) -> IntArray:
    """Return the bin of each sample, shape of `length` (blocks x samples, longest first); `num_bins` if none has room.

    A round gives each block's next samples to its bins in ascending order of load, as long as that is what one at a
    time would do: up to the bin whose load exceeds the smallest that the round has made (and in any case to one in
    `_LEAST_SHARE` of them, which saves rounds where a few bins have much to catch up).
    """
    num_blocks, width = length.shape
    dealt = _Greedy.of(num_blocks, width, num_bins)
    filled, load, next_up = dealt.filled, dealt.load, dealt.next_up
    level, limit = _levels(length, cost, num_bins, cap)
    rows, ranks = np.arange(num_blocks), np.arange(num_bins, dtype=np.int64)
    while len(rows):
        at = next_up[rows]
        now_filled, now_load = filled[rows], load[rows]
        closed, key = _open_bins(now_load, now_filled, length[rows, at], level[rows], limit[rows])
        level_out: BoolArray = np.logical_and.reduce(closed, axis=1)
        num_open = (key < CLOSED).sum(axis=1)
        few = np.flatnonzero((num_open * _FEW <= num_bins) & (num_open > 0) & ~level_out)
        width_now = num_bins if len(few) else int(num_open.max())
        by_load = ascending(np.minimum(key, int(np.where(key < CLOSED, key, 0).max()) + 1))[:, :width_now]
        key = np.take_along_axis(key, by_load, axis=1)
        columns = at[:, None] + ranks[:width_now]
        real = columns < sizes[rows, None]
        columns = np.minimum(columns, width - 1)
        lengths, costs = length[rows[:, None], columns], cost[rows[:, None], columns]
        take = real & (key < CLOSED)
        added = np.where(level_out[:, None], lengths, costs)
        in_turn = key[:, 1:] <= np.minimum.accumulate(key + added, axis=1)[:, :-1]
        in_turn |= ranks[1:width_now] * _LEAST_SHARE < num_open[:, None]
        take[:, 1:] &= in_turn
        if len(few):  # these take all that is left, several at a time
            shortest = np.where(closed[few], CLOSED, level[rows[few], None] - now_filled[few]).min(axis=1)
            each = np.clip(shortest // lengths[few, 0], 1, num_bins // num_open[few])
            take[few] = real[few] & (ranks < (each * num_open[few])[:, None])
            by_load[few] = np.take_along_axis(by_load[few], ranks % num_open[few, None], axis=1)
        row, rank = np.nonzero(take)
        column, to_bin = columns[row, rank], by_load[row, rank]
        dealt.chosen[rows[row], column] = to_bin
        np.add.at(load, (rows[row], to_bin), costs[row, rank])
        np.add.at(filled, (rows[row], to_bin), lengths[row, rank])
        next_up[rows] += take.sum(axis=1)
        for stuck in rows[~take.any(axis=1)].tolist():
            _pass_stuck(stuck, length, sizes, limit, dealt)
        rows = rows[next_up[rows] < sizes[rows]]
    return dealt.chosen


def _levels(length: IntArray, cost: IntArray, num_bins: int, cap: int) -> tuple[IntArray, IntArray]:
    """Tokens of each block's bins up to which they fill by cost, and at most."""
    level = np.minimum(-(-length.sum(axis=1) // num_bins), cap)
    # Beside a few dear samples only short ones should lie, and fewer of them: the other bins take more.
    level = np.where(heavy(cost.max(axis=1), cost.sum(axis=1), num_bins), (level + cap) // 2, level)
    # A block that is all but full may need a little more than the cap for now: `exchange` evens it out.
    return level, np.where(level > cap - cap // _OVER_CAP, cap + cap // _OVER_CAP, cap)


def _open_bins(
    load: IntArray, filled: IntArray, longest: IntArray, level: IntArray, limit: IntArray
) -> tuple[BoolArray, IntArray]:
    """Which bins the longest sample would bring above the level, and the order of bins: by cost, `CLOSED` for those.

    Where all are at the level it is by tokens, up to the limit.
    """
    after = filled + longest[:, None]
    closed: BoolArray = after > level[:, None]
    key: IntArray = np.where(closed, CLOSED, load)
    level_out = closed.all(axis=1)
    if level_out.any():
        key[level_out] = np.where(after[level_out] > limit[level_out, None], CLOSED, filled[level_out])
    return closed, key


@dataclass(frozen=True, slots=True)
class _Greedy:
    """Where the greedy start is, written in place: bins of samples, costs and tokens of bins, blocks' next samples."""

    chosen: IntArray
    load: IntArray
    filled: IntArray
    next_up: IntArray

    @classmethod
    def of(cls, num_blocks: int, width: int, num_bins: int) -> _Greedy:
        load, filled = (np.zeros((num_blocks, num_bins), np.int64) for _ in range(2))
        return cls(np.full((num_blocks, width), num_bins, np.int64), load, filled, np.zeros(num_blocks, np.int64))


def _pass_stuck(stuck: int, length: IntArray, sizes: IntArray, limit: IntArray, dealt: _Greedy) -> None:
    """Go on to the first sample of the block for which there is room."""
    at = int(dealt.next_up[stuck])
    width = length.shape[1]
    room = int(limit[stuck] - dealt.filled[stuck].min())
    usable = (length[stuck] <= room) | (np.arange(width) >= sizes[stuck])
    usable[: at + 1] = False
    dealt.next_up[stuck] = int(usable.argmax()) if usable.any() else width


def heavy(largest: IntArray, total: IntArray, num_bins: int | IntArray) -> BoolArray:
    """Blocks with a sample of more than half of a bin's mean cost: there costs are hard to even out."""
    is_heavy: BoolArray = 2 * largest * num_bins > total
    return is_heavy
