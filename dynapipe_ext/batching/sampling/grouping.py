"""Dealt bins grouped into steps: bins of like cost together, as far as steps stay alike in mean length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.batching.sampling.bins import BoolArray, FloatArray
from dynapipe_ext.batching.sampling.composition import FURTHEST, alike_in_length
from dynapipe_ext.batching.sampling.deal import Dealt
from dynapipe_ext.costs.model import IntArray

_LEAST, _MOST = 10.0, 1e4  # weights of a step's squared distance from its block's length, beside its dearest rank
_MANY_BLOCKS = 8  # among which some may have another weight
_CLOSE = (1.15, 2.2)  # ratio of weights at which the search ends: with few blocks, with many
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of `num_bins` bins; (blocks, bins): cost, dearest sample, tokens and number of samples of each bin."""

    places: IntArray
    starts: IntArray
    num_bins: int
    load: IntArray
    largest: IntArray
    filled: IntArray
    counts: IntArray

    @classmethod
    def of(cls, dealt: Dealt, tokens: IntArray, costs: IntArray, *, num_bins: int) -> Blocks:
        """tokens and costs by place."""
        load, largest, filled = (
            f.reduceat(x[dealt.places], dealt.starts[:-1]).reshape(-1, num_bins)
            for f, x in ((np.add, costs), (np.maximum, costs), (np.add, tokens))
        )
        counts = np.diff(dealt.starts).reshape(-1, num_bins)
        return cls(dealt.places, dealt.starts, num_bins, load, largest, filled, counts)


@dataclass(frozen=True, slots=True)
class _Grouping:
    """Steps of all blocks, as bins (blocks, steps, ranks), and (blocks, steps) their dearest ranks and mean lengths."""

    bins: IntArray
    dearest: IntArray
    mean_length: FloatArray

    @classmethod
    def by_weight(cls, blocks: Blocks, num_ranks: int, weight: float) -> _Grouping:
        bins = like_bins(blocks, num_ranks, weight=weight)
        load, filled, counts = (
            np.take_along_axis(x, bins.reshape(len(bins), -1), axis=1).reshape(bins.shape)
            for x in (blocks.load, blocks.filled, blocks.counts)
        )
        return cls(bins, load.max(axis=2), filled.sum(axis=2) / counts.sum(axis=2))

    def where(self, chosen: BoolArray, other: _Grouping) -> _Grouping:
        """Of the chosen blocks this one's steps, else the other's."""
        return _Grouping(
            np.where(chosen[:, None, None], self.bins, other.bins),
            np.where(chosen[:, None], self.dearest, other.dearest),
            np.where(chosen[:, None], self.mean_length, other.mean_length),
        )


def grouped_alike(parts: list[Blocks], num_ranks: int) -> list[tuple[IntArray, IntArray]]:
    """(places, starts) of each part, its bins in steps of `num_ranks`.

    The grouping by about the least weight with which mean lengths vary by no more than `FURTHEST`, some blocks by one
    that is less; by a great one where none does.
    """

    groupings = [_Grouping.by_weight(part, num_ranks, _LEAST) for part in parts]
    if _variation(groupings) > FURTHEST:
        groupings = _less_varied(parts, num_ranks, groupings)
    return [in_turns(part, grouping.bins) for part, grouping in zip(parts, groupings, strict=True)]


def _less_varied(parts: list[Blocks], num_ranks: int, cheaper: list[_Grouping]) -> list[_Grouping]:
    """A bisection of weights; `cheaper` is by the least."""
    close = _CLOSE[sum(len(part.load) for part in parts) > _MANY_BLOCKS]
    low, high = _LEAST, _MOST
    alike = [_Grouping.by_weight(part, num_ranks, high) for part in parts]
    if _variation(alike) > FURTHEST:
        return alike
    while high > close * low:
        middle = math.sqrt(low * high)
        groupings = [_Grouping.by_weight(part, num_ranks, middle) for part in parts]
        if _variation(groupings) <= FURTHEST:
            high, alike = middle, groupings
        else:
            low, cheaper = middle, groupings
    return _mixed(cheaper, alike)


def _mixed(cheaper: list[_Grouping], alike: list[_Grouping]) -> list[_Grouping]:
    """`alike` with as many blocks of `cheaper` as mean lengths may vary, those first that save most for it."""
    pairs = list(zip(cheaper, alike, strict=True))
    mean = np.concatenate([a.mean_length.ravel() for a in alike]).mean()
    saved = np.concatenate([(a.dearest - c.dearest).sum(axis=1) for c, a in pairs])
    squares = [((c.mean_length - mean) ** 2 - (a.mean_length - mean) ** 2).sum(axis=1) for c, a in pairs]
    order = np.argsort(-saved / np.maximum(np.concatenate(squares), 1e-9 * mean**2), kind="stable")
    order = order[saved[order] > 0]

    def with_first(count: int) -> list[_Grouping]:
        chosen = np.zeros(len(saved), np.bool_)
        chosen[order[:count]] = True
        ends = np.cumsum([len(c.bins) for c in cheaper])
        return [c.where(mask, a) for mask, (c, a) in zip(np.split(chosen, ends[:-1]), pairs, strict=True)]

    low, high = 0, len(order) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _variation(with_first(middle)) <= FURTHEST else (low, middle)
    return with_first(low)


def _variation(parts: list[_Grouping]) -> float:
    mean_lengths = np.concatenate([part.mean_length.ravel() for part in parts])
    return float(mean_lengths.std() / mean_lengths.mean())


def like_bins(blocks: Blocks, num_ranks: int, *, weight: float) -> IntArray:
    """Bins of each block, (blocks, steps, ranks): `num_ranks` of like cost are a step.

    With a `weight` above 0, mean lengths of steps are near their block's (`alike_in_length`).
    """
    if num_ranks == blocks.num_bins:
        return np.broadcast_to(np.arange(num_ranks, dtype=np.int64), (len(blocks.load), 1, num_ranks))
    grouped = _like_costs(blocks.load, blocks.largest, num_ranks).reshape(len(blocks.load), -1, num_ranks)
    if weight and num_ranks > 1:
        alike_in_length(grouped, blocks.load, blocks.filled, blocks.counts, weight=weight)
    return grouped


def in_turns(blocks: Blocks, grouped: IntArray) -> tuple[IntArray, IntArray]:
    """(places, starts) of grouped bins, a block's steps shuffled. Ranks take turns in having the dearest bin."""
    num_blocks, _, num_ranks = grouped.shape
    # The place of a bin's first sample is as good as random: steps of a block come in that order.
    bins = grouped + np.arange(num_blocks, dtype=np.int64)[:, None, None] * blocks.num_bins
    firsts = blocks.places[blocks.starts[bins[:, :, 0]]]
    bins = np.take_along_axis(bins, np.argsort(firsts, axis=1, kind="stable")[:, :, None], axis=1)
    bins = bins.reshape(-1, num_ranks)
    shift = (np.arange(num_ranks, dtype=np.int64) + np.arange(len(bins), dtype=np.int64)[:, None]) % num_ranks
    return rearranged(blocks.places, blocks.starts, np.take_along_axis(bins, shift, axis=1).ravel())


def chained(parts: list[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    """(places, starts) of parts after each other."""
    counts = np.concatenate([_NONE, *(np.diff(starts) for _, starts in parts)])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return np.concatenate([_NONE, *(places for places, _ in parts)]), starts


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
