"""Samples of many blocks dealt to bins at once: equal cost and tokens within a block, no bin above its cap.

A block is what a few steps of all ranks hold. numpy works on all blocks side by side; every choice is by integers or by
element-wise floats, so that the result is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.costs.model import IntArray

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

_CLOSED = np.int64(1) << 61  # above every load
_CHUNK = 1 << 17  # samples that are dealt side by side: their arrays stay in the cache
_TRIALS = 8_000_000  # exchanges tried in all rounds of refinement together, unless `_FEWEST_ROUNDS` need more
_FEWEST_ROUNDS = 1
_MOST_ROUNDS = 96
_MOST_SLOTS = 24  # samples of a bin whose exchanges are tried in one round
_FEWER_SLOTS = 8  # the same where there are so many samples that the rounds must be few
_LEAST_SHARE = 8  # at least one bin in so many gets a sample in a round of the greedy start
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
    first: int = 0,
) -> Dealt:
    """Samples of each block in `num_bins` bins of at most `cap` tokens, of nearly equal cost and tokens.

    tokens and costs are by place, shape (N,); block k is `order[bounds[k] : bounds[k + 1]]`, places. Longest processing
    time first by cost (Graham 1969) into bins that are below the block's mean of tokens, then exchanges of samples
    between bins while they lower the squared differences of both. No bin is empty where a block has as many samples.
    Places below `first` are left out last.

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
        stop = max(start + 1, int(np.searchsorted(bounds, bounds[start] + _CHUNK, side="right")) - 1)
        one = _deal_chunk(tokens, costs, order, bounds[start : stop + 1], num_bins, cap, first, rounds, slots)
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
    first: int,
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
    sorted_columns = _ascending(np.where(real, int(length.max()) - length, int(length.max()) + 1))
    place = np.take_along_axis(place, sorted_columns, axis=1)
    length = np.take_along_axis(length, sorted_columns, axis=1)
    cost = np.where(real, costs[place], 0)

    kept = (place < first) & real
    chosen = _longest_first(length, cost, sizes, kept, num_bins, cap)
    members = _Members.gather(chosen, length, cost, num_bins, cap)
    if num_bins > 1:
        for number in range(rounds):
            if not members.exchange(number, slots, cap) and number >= 2 * num_bins:
                break
    members.eject(cap, np.append(kept.ravel(), False))
    held, counts, out = members.contents()
    flat = place.ravel()
    return flat[held], counts, flat[np.concatenate([out, np.flatnonzero((chosen == num_bins).ravel() & real.ravel())])]


def _ascending(keys: IntArray) -> IntArray:
    """Columns of each row in ascending order of non-negative keys, ties by column."""
    bits = max(1, int(keys.shape[1] - 1).bit_length())
    if int(keys.max(initial=0)) >> (62 - bits):
        return np.argsort(keys, axis=1, kind="stable")
    packed = np.sort((keys << bits) | np.arange(keys.shape[1], dtype=np.int64), axis=1)
    return packed & ((1 << bits) - 1)


def _longest_first(
    length: IntArray, cost: IntArray, sizes: IntArray, kept: BoolArray, num_bins: int, cap: int
) -> IntArray:
    """The bin of each sample, shape of `length` (blocks x samples, longest first); `num_bins` where none has room.
    One of those to be `kept` goes into the emptiest bin all the same, for `eject` to make room.

    A round gives each block's next samples to its bins in ascending order of load, as long as that is what one at a
    time would do: up to the bin whose load exceeds the smallest that the round has made (and in any case to one in
    `_LEAST_SHARE` of them, which saves rounds where a few bins have much to catch up).
    """
    num_blocks, width = length.shape
    chosen = np.full((num_blocks, width), num_bins, np.int64)
    load = np.zeros((num_blocks, num_bins), np.int64)
    filled = np.zeros((num_blocks, num_bins), np.int64)
    level = np.minimum(-(-length.sum(axis=1) // num_bins), cap)
    # Beside a few dear samples only short ones should lie, and fewer of them: the other bins take more.
    level = np.where(_heavy(cost.max(axis=1), cost.sum(axis=1), num_bins), (level + cap) // 2, level)
    # A block that is all but full may need a little more than the cap for now: `exchange` evens it out.
    limit = np.where(level > cap - cap // _OVER_CAP, cap + cap // _OVER_CAP, cap)
    next_up = np.zeros(num_blocks, np.int64)
    rows, ranks = np.arange(num_blocks), np.arange(num_bins, dtype=np.int64)
    while len(rows):
        at = next_up[rows]
        columns = at[:, None] + ranks
        real = columns < sizes[rows, None]
        columns = np.minimum(columns, width - 1)
        lengths, costs = length[rows[:, None], columns], cost[rows[:, None], columns]
        now_filled, now_load = filled[rows], load[rows]
        after = now_filled + lengths[:, :1]
        closed = after > level[rows, None]
        key = np.where(closed, _CLOSED, now_load)
        level_out = closed.all(axis=1)  # every bin is at the level: by tokens from here on
        if level_out.any():
            key[level_out] = np.where(after[level_out] > limit[rows[level_out], None], _CLOSED, now_filled[level_out])
        by_load = _ascending(np.minimum(key, int(np.where(key < _CLOSED, key, 0).max()) + 1))
        key = np.take_along_axis(key, by_load, axis=1)
        take = real & (key < _CLOSED)
        added = np.where(level_out[:, None], lengths, costs)
        num_open = (key < _CLOSED).sum(axis=1)
        in_turn = key[:, 1:] <= np.minimum.accumulate(key + added, axis=1)[:, :-1]
        in_turn |= ranks[1:] * _LEAST_SHARE < num_open[:, None]
        take[:, 1:] &= in_turn
        few = np.flatnonzero((num_open * _LEAST_SHARE <= num_bins) & (num_open > 0) & ~level_out)
        if len(few):  # these take all that is left, several at a time
            shortest = np.where(closed[few], _CLOSED, level[rows[few], None] - now_filled[few]).min(axis=1)
            each = np.clip(shortest // lengths[few, 0], 1, num_bins // num_open[few])
            take[few] = real[few] & (ranks < (each * num_open[few])[:, None])
            by_load[few] = np.take_along_axis(by_load[few], ranks % num_open[few, None], axis=1)
        row, rank = np.nonzero(take)
        column, found = columns[row, rank], by_load[row, rank]
        chosen[rows[row], column] = found
        np.add.at(load, (rows[row], found), costs[row, rank])
        np.add.at(filled, (rows[row], found), lengths[row, rank])
        next_up[rows] += take.sum(axis=1)
        for stuck in rows[~take.any(axis=1)].tolist():  # on to the first sample for which there is room
            if kept[stuck, next_up[stuck]]:
                emptiest = int(filled[stuck].argmin())
                chosen[stuck, next_up[stuck]] = emptiest
                load[stuck, emptiest] += cost[stuck, next_up[stuck]]
                filled[stuck, emptiest] += length[stuck, next_up[stuck]]
                next_up[stuck] += 1
                continue
            room = int(limit[stuck] - filled[stuck].min())
            usable = (length[stuck] <= room) | kept[stuck] | (np.arange(width) >= sizes[stuck])
            usable[: next_up[stuck] + 1] = False
            next_up[stuck] = int(usable.argmax()) if usable.any() else width
        rows = rows[next_up[rows] < sizes[rows]]
    return chosen


def _heavy(largest: IntArray, total: IntArray, num_bins: int) -> BoolArray:
    """Blocks with a sample of more than half of a bin's mean cost: there costs are hard to even out."""
    found: BoolArray = largest * (2 * num_bins) > total
    return found


@dataclass(slots=True)
class _Members:
    """What the bins of a chunk hold, as arrays that exchanges write: one row a bin, samples by flat column.

    `slots` (bins x most samples + 1) names samples, `none` where there is none; `length` and `cost` end with a zero for
    `none`.
    """

    num_bins: int
    slots: IntArray
    counts: IntArray
    length: IntArray
    cost: IntArray
    filled: IntArray  # tokens of each bin
    load: IntArray  # cost of each bin
    weight: FloatArray  # of tokens beside costs, a block
    ejected: list[int]

    @classmethod
    def gather(cls, chosen: IntArray, length: IntArray, cost: IntArray, num_bins: int, cap: int) -> _Members:
        num_blocks, width = chosen.shape
        columns = _ascending(chosen)
        bins = np.take_along_axis(chosen, columns, axis=1)
        flat = (columns + np.arange(num_blocks, dtype=np.int64)[:, None] * width).ravel()
        key = (bins + np.arange(num_blocks, dtype=np.int64)[:, None] * num_bins).ravel()
        held = bins.ravel() < num_bins
        flat, key = flat[held], key[held]
        counts = np.bincount(key, minlength=num_blocks * num_bins).astype(np.int64)
        starts = np.cumsum(counts) - counts
        none = num_blocks * width
        slots = np.full((num_blocks * num_bins, int(counts.max(initial=0)) + 1), none, np.int64)
        slots[key, np.arange(len(key)) - starts[key]] = flat
        weight = np.where(_heavy(cost.max(axis=1), cost.sum(axis=1), num_bins), _LIGHT, 1.0)
        weight[length.sum(axis=1) > num_bins * (cap - cap // _OVER_CAP)] = _TIGHT
        lengths, costs = np.append(length.ravel(), 0), np.append(cost.ravel(), 0)
        filled, load = lengths[slots].sum(axis=1), costs[slots].sum(axis=1)
        return cls(num_bins, slots, counts, lengths, costs, filled, load, weight, [])

    @property
    def none(self) -> int:
        return len(self.length) - 1

    def exchange(self, number: int, slots: int, cap: int) -> bool:
        """One round: every bin and a partner of its block exchange the two samples, or move the one, that help most.

        What counts is the squared difference of the two bins' costs and tokens, each over its block's mean, tokens by
        `weight`. Returns whether any pair did.
        """
        a, b = self._pairs(number)
        if not len(a):
            return False
        block = a // self.num_bins
        by_block = (-1, self.num_bins)
        scale_c = 1.0 / np.maximum(self.load.reshape(by_block).mean(axis=1), 1e-9)[block]
        scale_t = 1.0 / np.maximum(self.filled.reshape(by_block).mean(axis=1), 1e-9)[block]
        gap_c = (self.load[a] - self.load[b]) * scale_c
        gap_t = (self.filled[a] - self.filled[b]) * scale_t
        slot_a, slot_b = self._some_slots(a, number, slots), self._some_slots(b, number + 1, slots)
        item_a, item_b = np.take_along_axis(self.slots[a], slot_a, 1), np.take_along_axis(self.slots[b], slot_b, 1)

        def differences(values: IntArray, scale: FloatArray, gap: FloatArray) -> FloatArray:
            of_a = values[item_a] * (2.0 * scale)[:, None] - gap[:, None]
            of_b = values[item_b] * (2.0 * scale)[:, None]
            found: FloatArray = of_a[:, :, None] - of_b[:, None, :]
            return found

        off_t = differences(self.length, scale_t, gap_t)
        # The fuller of the two is to stay within the cap, or within what it has if that is more.
        both = self.filled[a] + self.filled[b]
        most = (2 * np.maximum(np.maximum(self.filled[a], self.filled[b]), cap) - both + 0.5) * scale_t
        score = differences(self.cost, scale_c, gap_c)
        np.multiply(score, score, out=score)
        allowed = np.abs(off_t) <= most[:, None, None]
        np.multiply(off_t, off_t, out=off_t)
        weight = self.weight[block]
        off_t *= weight[:, None, None]
        score += off_t
        score[~allowed] = np.inf
        # The last slot tried is the empty one: a bin of one sample gives it away only for another.
        score[self.counts[a] < 2, :, -1] = np.inf
        score[self.counts[b] < 2, -1, :] = np.inf
        score = score.reshape(len(a), -1)
        best = score.argmin(axis=1)
        pair = np.arange(len(a))
        helps = pair[score[pair, best] < (gap_c**2 + weight * gap_t**2) * (1 - 1e-9) - 1e-18]
        if not len(helps):
            return False
        i, j = np.divmod(best[helps], slot_b.shape[1])
        self._swap(a[helps], slot_a[helps, i], b[helps], slot_b[helps, j])
        return True

    def _pairs(self, number: int) -> tuple[IntArray, IntArray]:
        """Bins of more and of less: by cost and by tokens in turn, shifted from round to round."""
        half = self.num_bins // 2
        values = (self.load if number % 2 == 0 else self.filled).reshape(-1, self.num_bins)
        ranked = _ascending(values) + np.arange(len(values), dtype=np.int64)[:, None] * self.num_bins
        low = ranked[:, :half]
        high = ranked[:, ::-1][:, :half]
        if number // 2 % 2:
            low = np.roll(low, number // 4 % half + 1, axis=1) if half else low
        a, b = high.ravel(), low.ravel()
        return a, b

    def _some_slots(self, bins: IntArray, number: int, slots: int) -> IntArray:
        """Slots to try, shape (bins, at most `slots`): spread over the samples, others each round, then the empty."""
        counts = self.counts[bins]
        tried = min(slots - 1, int(counts.max()))
        shift = number * 40503 % 65536  # steps of the golden ratio cover the samples evenly
        spread = (np.arange(tried, dtype=np.int64) * 65536 + shift) % (tried * 65536)
        found = np.where(
            counts[:, None] <= tried,
            np.minimum(np.arange(tried, dtype=np.int64), counts[:, None]),
            spread * counts[:, None] // (tried * 65536),
        )
        return np.concatenate([found, counts[:, None]], axis=1)

    def _swap(self, a: IntArray, slot_a: IntArray, b: IntArray, slot_b: IntArray) -> None:
        width = self.slots.shape[1]
        if int(max(slot_a.max(), slot_b.max())) >= width - 1:  # one more column: the last one stays empty
            self.slots = np.concatenate([self.slots, np.full((len(self.slots), 1), self.none)], axis=1)
        item_a, item_b = self.slots[a, slot_a], self.slots[b, slot_b]
        for bins, slot, gone, come in ((a, slot_a, item_a, item_b), (b, slot_b, item_b, item_a)):
            self.slots[bins, slot] = come
            self.filled[bins] += self.length[come] - self.length[gone]
            self.load[bins] += self.cost[come] - self.cost[gone]
            self.counts[bins] += (come != self.none).astype(np.int64) - (gone != self.none)
            hole = np.flatnonzero((come == self.none) & (gone != self.none))
            last = self.counts[bins[hole]]  # the last sample fills the hole
            self.slots[bins[hole], slot[hole]] = self.slots[bins[hole], last]
            self.slots[bins[hole], last] = self.none

    def eject(self, cap: int, kept: BoolArray) -> None:
        """Take from each bin above the cap the shortest sample whose going is enough, or shorter ones.

        Those to be `kept` go only where no other is left.
        """
        for number in np.flatnonzero(self.filled > cap).tolist():
            while self.filled[number] > cap:
                held = self.slots[number, : self.counts[number]]
                free = np.flatnonzero(~kept[held])
                free = free if len(free) else np.arange(len(held))
                lengths, over = self.length[held[free]], int(self.filled[number]) - cap
                enough = np.where(lengths >= over, lengths, lengths.max())
                # One that is much too long stays: the longest of the others goes, and maybe one more after it.
                if int(enough.min()) > 2 * over and int(lengths.min()) < over:
                    enough = np.where(lengths < over, over - lengths, over)
                slot = int(free[enough.argmin()])
                gone = int(self.slots[number, slot])
                self.ejected.append(gone)
                self.filled[number] -= self.length[gone]
                self.load[number] -= self.cost[gone]
                last = int(self.counts[number]) - 1
                self.slots[number, slot] = self.slots[number, last]
                self.slots[number, last] = self.none
                self.counts[number] = last

    def contents(self) -> tuple[IntArray, IntArray, IntArray]:
        """Samples bin by bin, the count of each bin, and the samples that were taken out; all by flat column."""
        held = self.slots[np.arange(self.slots.shape[1]) < self.counts[:, None]]
        return held, self.counts, np.array(self.ejected, np.int64)
