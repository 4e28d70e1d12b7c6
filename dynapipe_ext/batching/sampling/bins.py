"""Bins of samples side by side in arrays, and the exchanges between them that even out their costs and tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.costs.model import IntArray

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

CLOSED = np.int64(1) << 61  # above every load
_CACHED = 1 << 15  # exchanges whose scores are found at a time: what a core's own cache holds of them


def ascending(keys: IntArray) -> IntArray:
    """Columns of each row in ascending order of non-negative keys, ties by column."""
    bits = max(1, int(keys.shape[1] - 1).bit_length())
    if int(keys.max(initial=0)) >> (62 - bits):
        return np.argsort(keys, axis=1, kind="stable")
    packed = np.sort((keys << bits) | np.arange(keys.shape[1], dtype=np.int64), axis=1)
    return packed & ((1 << bits) - 1)


@dataclass(slots=True)
class Bins:
    """What bins hold, as arrays that exchanges write: `num_bins` rows a block, samples by number.

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
    def gather(
        cls, bins: IntArray, counts: IntArray, length: IntArray, cost: IntArray, num_bins: int, weight: FloatArray
    ) -> Bins:
        """Bins of the samples in `bins`, which lie bin by bin, `counts` of them in each."""
        none = len(length)
        starts = np.cumsum(counts) - counts
        slots = np.full((len(counts), int(counts.max(initial=0)) + 1), none, np.int64)
        row = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        slots[row, np.arange(len(bins), dtype=np.int64) - starts[row]] = bins
        filled, load = (np.diff(np.append(0, np.cumsum(x[bins]))[np.append(starts, len(bins))]) for x in (length, cost))
        return cls(num_bins, slots, counts, np.append(length, 0), np.append(cost, 0), filled, load, weight, [])

    @property
    def none(self) -> int:
        return len(self.length) - 1

    def exchange(self, number: int, slots: int, cap: int) -> bool:
        """One round: every bin and a partner of its block exchange the two samples, or move the one, that help most.

        What counts is the squared difference of the two bins' costs and tokens, each over its block's mean, tokens by
        `weight`. Returns whether any pair did.
        """
        a, b = self.pairs(number)
        if not len(a):
            return False
        block = a // self.num_bins
        by_block = (-1, self.num_bins)
        scale_c = 1.0 / np.maximum(self.load.reshape(by_block).mean(axis=1), 1e-9)[block]
        scale_t = 1.0 / np.maximum(self.filled.reshape(by_block).mean(axis=1), 1e-9)[block]
        slot_a, slot_b = self.some_slots(a, number, slots), self.some_slots(b, number + 1, slots)
        best, gain = np.empty(len(a), np.int64), np.empty(len(a), np.bool_)
        chunk = max(1, _CACHED // (slot_a.shape[1] * slot_b.shape[1]))
        for start in range(0, len(a), chunk):
            some = slice(start, start + chunk)
            own = a[some], b[some], slot_a[some], slot_b[some]
            best[some], gain[some] = self._best_of(*own, scale_c[some], scale_t[some], self.weight[block[some]], cap)
        helps = np.flatnonzero(gain)
        if not len(helps):
            return False
        i, j = np.divmod(best[helps], slot_b.shape[1])
        self.swap(a[helps], slot_a[helps, i], b[helps], slot_b[helps, j])
        return True

    def _best_of(
        self,
        a: IntArray,
        b: IntArray,
        slot_a: IntArray,
        slot_b: IntArray,
        scale_c: FloatArray,
        scale_t: FloatArray,
        weight: FloatArray,
        cap: int,
    ) -> tuple[IntArray, BoolArray]:
        """Of each pair of bins the best exchange, by its number among those of the given slots, and whether it helps.

        scale_c and scale_t, by pair: one over the means of costs and tokens.
        """
        gap_c = (self.load[a] - self.load[b]) * scale_c
        gap_t = (self.filled[a] - self.filled[b]) * scale_t
        item_a, item_b = np.take_along_axis(self.slots[a], slot_a, 1), np.take_along_axis(self.slots[b], slot_b, 1)

        def differences(values: IntArray, scale: FloatArray, gap: FloatArray) -> FloatArray:
            of_a = values[item_a] * (2.0 * scale)[:, None] - gap[:, None]
            of_b = values[item_b] * (2.0 * scale)[:, None]
            pairs: FloatArray = of_a[:, :, None] - of_b[:, None, :]
            return pairs

        off_t = differences(self.length, scale_t, gap_t)
        # The fuller of the two is to stay within the cap, or within what it has if that is more.
        both = self.filled[a] + self.filled[b]
        most = (2 * np.maximum(np.maximum(self.filled[a], self.filled[b]), cap) - both + 0.5) * scale_t
        score = differences(self.cost, scale_c, gap_c)
        np.multiply(score, score, out=score)
        above = np.abs(off_t) > most[:, None, None]
        np.multiply(off_t, off_t, out=off_t)
        off_t *= weight[:, None, None]
        score += off_t
        np.copyto(score, np.inf, where=above)
        self.keep_last(score, a, b, item_a, item_b)
        score = score.reshape(len(a), -1)
        best = score.argmin(axis=1)
        least = score[np.arange(len(a)), best]
        return best, least < (gap_c**2 + weight * gap_t**2) * (1 - 1e-9) - 1e-18

    def keep_last(self, score: FloatArray, a: IntArray, b: IntArray, item_a: IntArray, item_b: IntArray) -> None:
        """Rule out exchanges, (pairs, tried of a, tried of b), that would take a bin's only sample for none."""
        rows = np.flatnonzero(self.counts[a] < 2)
        score[rows] = np.where((item_b[rows] == self.none)[:, None, :], np.inf, score[rows])
        rows = np.flatnonzero(self.counts[b] < 2)
        score[rows] = np.where((item_a[rows] == self.none)[:, :, None], np.inf, score[rows])

    def pairs(self, number: int) -> tuple[IntArray, IntArray]:
        """Bins of more and of less: by cost and by tokens in turn, shifted from round to round."""
        half = self.num_bins // 2
        values = (self.load if number % 2 == 0 else self.filled).reshape(-1, self.num_bins)
        ranked = ascending(values) + np.arange(len(values), dtype=np.int64)[:, None] * self.num_bins
        low = ranked[:, :half]
        high = ranked[:, ::-1][:, :half]
        if number // 2 % 2:
            low = np.roll(low, number // 4 % half + 1, axis=1) if half else low
        a, b = high.ravel(), low.ravel()
        return a, b

    def some_slots(self, bins: IntArray, number: int, slots: int) -> IntArray:
        """Slots to try, shape (bins, at most `slots`): spread over the samples, others each round, then the empty."""
        counts = self.counts[bins]
        tried = min(slots - 1, int(counts.max()))
        shift = number * 40503 % 65536  # steps of the golden ratio cover the samples evenly
        spread = (np.arange(tried, dtype=np.int64) * 65536 + shift) % (tried * 65536)
        slots_tried = np.where(
            counts[:, None] <= tried,
            np.minimum(np.arange(tried, dtype=np.int64), counts[:, None]),
            spread * counts[:, None] // (tried * 65536),
        )
        return np.concatenate([slots_tried, counts[:, None]], axis=1)

    def swap(self, a: IntArray, slot_a: IntArray, b: IntArray, slot_b: IntArray) -> None:
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

    def trade(self, a: int, slots_a: IntArray, b: int, slots_b: IntArray) -> None:
        """Bins `a` and `b` exchange the samples in these slots, none or several on either side."""
        gone_a, gone_b = self.slots[a, slots_a], self.slots[b, slots_b]
        held_a = np.concatenate([np.delete(self.slots[a, : self.counts[a]], slots_a), gone_b])
        held_b = np.concatenate([np.delete(self.slots[b, : self.counts[b]], slots_b), gone_a])
        more = max(len(held_a), len(held_b)) + 1 - self.slots.shape[1]
        if more > 0:
            more = max(more, self.slots.shape[1] // 4)  # a copy of all is slow: seldom
            self.slots = np.concatenate([self.slots, np.full((len(self.slots), more), self.none)], axis=1)
        for number, held in ((a, held_a), (b, held_b)):
            self.slots[number] = self.none
            self.slots[number, : len(held)] = held
            self.counts[number] = len(held)
            self.filled[number], self.load[number] = self.length[held].sum(), self.cost[held].sum()

    def eject(self, cap: int) -> None:
        """Take from each bin above the cap the shortest sample whose going is enough, or shorter ones."""
        while len(bins := np.flatnonzero(self.filled > cap)):
            held = self.slots[bins]
            lengths, over = self.length[held], (self.filled[bins] - cap)[:, None]
            free = np.arange(held.shape[1]) < self.counts[bins, None]
            longest = np.where(free, lengths, 0).max(axis=1, keepdims=True)
            rating = np.where(free, np.where(lengths >= over, lengths, longest), CLOSED)
            # One that is much too long stays: the longest of the others goes, and maybe one more after it.
            shorter = (rating.min(axis=1) > 2 * over[:, 0]) & (free & (lengths < over)).any(axis=1)
            rating = np.where(shorter[:, None] & free, np.where(lengths < over, over - lengths, over), rating)
            slot = rating.argmin(axis=1)
            gone = self.slots[bins, slot]
            self.ejected.extend(gone.tolist())
            self.filled[bins] -= self.length[gone]
            self.load[bins] -= self.cost[gone]
            last = self.counts[bins] - 1
            self.slots[bins, slot] = self.slots[bins, last]
            self.slots[bins, last] = self.none
            self.counts[bins] = last

    def contents(self) -> tuple[IntArray, IntArray, IntArray]:
        """Samples bin by bin, the count of each bin, and the samples that were taken out; all by flat column."""
        held = self.slots[np.arange(self.slots.shape[1]) < self.counts[:, None]]
        return held, self.counts, np.array(self.ejected, np.int64)
