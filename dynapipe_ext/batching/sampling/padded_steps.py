"""Samples of like length in padded batches: as many groups as ranks x steps, none above rows x longest."""

from __future__ import annotations

import heapq

import numpy as np

from dynapipe_ext.batching.sampling.deal import Dealt
from dynapipe_ext.batching.sampling.fill import Steps, joined
from dynapipe_ext.batching.sampling.grouping import Blocks, in_turns, like_bins, rearranged
from dynapipe_ext.costs.model import IntArray

_WINDOW_BINS = 512  # groups whose samples are sorted together: the more, the less padding and the less random
_WINDOW_STEPS = 16  # and steps at least
_BISECTIONS = 12


def fill_padded(tokens: IntArray, *, num_ranks: int, cap: int, all_of_them: bool) -> Steps:
    """Groups of at most `cap` padded tokens (rows x longest), sorted by length within windows of the order.

    tokens by place, shape (N,). Every rank has a group in every step. Where `all_of_them`, the last window is cut finer
    until its groups divide over the ranks; else what they leave over, and in any case what cannot be divided (fewer
    samples than ranks), is left.
    """
    window = max(_WINDOW_BINS, _WINDOW_STEPS * num_ranks) * cap
    parts: list[Steps] = []
    rest, start = np.zeros(0, np.int64), 0
    sums = np.cumsum(tokens)
    while start < len(tokens) or len(rest):
        before = int(sums[start - 1]) if start else 0
        stop = int(np.searchsorted(sums, before + window, side="right"))
        # A last window of a few steps would pad more: it joins the one before.
        last = stop >= len(tokens) or int(sums[-1] - sums[stop - 1]) * 4 < window
        stop = len(tokens) if last else stop
        places = np.concatenate([rest, np.arange(start, stop, dtype=np.int64)])
        step, rest = _window(places, tokens, num_ranks, cap, up=last and all_of_them)
        parts.append(step)
        start = stop
        if last:
            break
    return joined(parts, np.sort(rest))


def padded_costs(tokens: IntArray, starts: IntArray) -> IntArray:
    """Rows x longest of bins, from the tokens of their samples in order."""
    longest: IntArray = np.maximum.reduceat(tokens, starts[:-1])
    return longest * np.diff(starts)


def _window(places: IntArray, tokens: IntArray, num_ranks: int, cap: int, *, up: bool) -> tuple[Steps, IntArray]:
    places = places[np.argsort(-tokens[places], kind="stable")]
    lengths: list[int] = tokens[places].tolist()
    starts = _cut(lengths, cap)
    full = len(starts) // num_ranks * num_ranks
    wanted = full + num_ranks if up and len(starts) > full else full
    if wanted > len(lengths):
        wanted = full
    if wanted > full:
        starts = _cut_into(lengths, wanted, cap)
    bounds = np.array([*starts, len(lengths)], np.int64)
    load = padded_costs(tokens[places], bounds) if starts else np.zeros(0, np.int64)
    order = np.argsort(load, kind="stable")[::-1]
    held, dropped = np.sort(order[:wanted]), np.sort(order[wanted:])
    kept_places, kept_starts = rearranged(places, bounds, held)
    left, _ = rearranged(places, bounds, dropped)
    if wanted:
        # Spread over the samples of a group, so that sums of costs by group order as groups do.
        cost = np.zeros(len(tokens), np.int64)
        cost[kept_places] = np.repeat(np.maximum.reduceat(tokens[kept_places], kept_starts[:-1]), np.diff(kept_starts))
        blocks = Blocks.of(Dealt(kept_places, kept_starts, left), tokens, cost, num_bins=wanted)
        kept_places, kept_starts = in_turns(blocks, like_bins(blocks, num_ranks, weight=0))
    return Steps(kept_places, kept_starts, left), left


def _cut(lengths: list[int], cap: int) -> list[int]:
    """Starts of groups of descending lengths, each as long as rows x longest stays within the cap.

    >>> _cut([6, 5, 4, 4, 1, 1], 12)
    [0, 2, 5]
    """
    starts, at = [], 0
    while at < len(lengths):
        starts.append(at)
        at += max(1, cap // lengths[at])
    return starts


def _cut_into(lengths: list[int], wanted: int, cap: int) -> list[int]:
    """Starts of exactly `wanted` groups: by the smallest cap that gives no more, then the dearest are halved."""
    low, high = max(lengths), cap
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        if low >= high:
            break
        if len(_cut(lengths, middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    starts = _cut(lengths, high)
    ends = [*starts[1:], len(lengths)]
    dearest = [(-(end - at) * lengths[at], at, end) for at, end in zip(starts, ends, strict=True) if end - at > 1]
    heapq.heapify(dearest)
    while len(starts) < wanted:
        _, at, end = heapq.heappop(dearest)
        middle = (at + end) // 2
        starts.append(middle)
        for first, last in ((at, middle), (middle, end)):
            if last - first > 1:
                heapq.heappush(dearest, (-(last - first) * lengths[first], first, last))
    return sorted(starts)
