"""Steps as multipack packs them: runs of the order, each as long as longest-first finds room for on all ranks."""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from dynapipe_ext.batching.sampling.bins import Bins
from dynapipe_ext.batching.sampling.fill import Steps, place_rest
from dynapipe_ext.costs.model import IntArray

_SIDE_BY_SIDE = 32  # runs from which on they are dealt together
_BY_BOUND = 256  # samples of a run from which on a bound is worth its time
_ROUNDS = 48  # of exchanges within steps
_SLOTS = 16  # samples of a bin tried in each
_LIGHT = 0.01  # weight of tokens beside costs there: the cap bounds them anyway
_FRACTIONS = 24  # parts of the cap below which a length is rounded in `fewest_steps`


def fewest_steps(tokens: IntArray, *, num_ranks: int, cap: int) -> int:
    """Steps that any packing of these lengths needs at least.

    The largest of several bounds: tokens over the room, and the same with lengths rounded by the dual feasible
    functions u^(k) of Fekete and Schepers (2001), by which lengths above cap / (k + 1) count as cap / k at least.

    >>> fewest_steps(np.full(12, 5), num_ranks=2, cap=9)
    6
    """
    bins = -(-int(tokens.sum()) // cap)
    lengths, counts = np.unique(tokens, return_counts=True)
    for k in range(1, _FRACTIONS + 1):
        whole, part = np.divmod((k + 1) * lengths, cap)
        # u(x) = x where (k + 1) x is an integer, else floor((k + 1) x) / k; here times k * cap
        rounded = np.where(part == 0, k * lengths, whole * cap)
        bins = max(bins, -(-int((rounded * counts).sum()) // (k * cap)))
    return max(1, -(-bins // num_ranks))


def run_ends(tokens: IntArray, *, num_ranks: int, cap: int, most: int) -> list[int] | None:
    """Ends of multipack's steps in the order of places, or None where they are sure to be `most` or more.

    A bisection as in multipack_sampler finds how many samples longest processing time first (Graham 1969) fits into
    `num_ranks` bins. What is behind the last end, fewer samples than ranks, multipack drops.
    """
    sums = np.concatenate([[0], np.cumsum(tokens)])
    ends, start, capacity = list[int](), 0, num_ranks * cap
    while len(tokens) - start >= num_ranks:
        if len(ends) + -(-int(sums[-1] - sums[start]) // capacity) > most:
            return None
        low, high = 1, int(np.searchsorted(sums, sums[start] + capacity, side="right")) - start
        while high - low > 1:
            middle = (low + high) // 2
            fits = _fits(tokens[start : start + middle], int(sums[start + middle] - sums[start]), num_ranks, cap)
            low, high = (middle, high) if fits else (low, middle)
        start += low
        ends.append(start)
    return ends if len(ends) < most else None


def _fits(lengths: IntArray, total: int, num_ranks: int, cap: int) -> bool:
    """Whether longest first leaves no bin above the cap."""
    if total + (num_ranks - 1) * int(lengths.max()) <= num_ranks * cap:
        return True
    longest_first = -np.sort(-lengths)
    if len(lengths) >= _BY_BOUND:  # a sample goes where no more lies than the mean of what came before
        before = np.cumsum(longest_first) - longest_first
        if int((before + num_ranks * longest_first).max()) <= num_ranks * cap:
            return True
    loads = [0] * num_ranks
    return all(heapq.heapreplace(loads, loads[0] + length) + length <= cap for length in longest_first.tolist())


def packed_runs(tokens: IntArray, costs: IntArray, ends: list[int], *, num_ranks: int, cap: int) -> Steps:
    """Steps of the runs with these ends, costs evened out within each; what is behind the last is placed where it fits.

    What fits nowhere makes one step more, for which bins of several samples give some; it is left where they cannot.
    """
    places, counts = _longest_first(tokens, ends, num_ranks)
    work = Bins.gather(places, counts, tokens, costs, num_ranks, np.full(len(ends), _LIGHT))
    if num_ranks > 1:
        for number in range(_ROUNDS):
            if not work.exchange(number, _SLOTS, cap) and number >= 2 * num_ranks:
                break
    held, bin_counts, _ = work.contents()
    starts = np.concatenate([[0], np.cumsum(bin_counts)]).astype(np.int64)
    behind = np.arange(len(places), len(tokens), dtype=np.int64)
    steps = place_rest(Steps(held, starts, behind), tokens, cap=cap)
    return _one_more(steps, num_ranks) if len(steps.left) else steps


def _longest_first(tokens: IntArray, ends: list[int], num_ranks: int) -> tuple[IntArray, IntArray]:
    """Places bin by bin, and how many each has, shape (steps * num_ranks,): each run dealt longest first, a place to
    the emptiest bin, the first of several. All runs go side by side, a place of each at a time."""
    bounds = np.array([0, *ends], np.int64)
    sizes = np.diff(bounds)
    order = np.lexsort((-tokens[: bounds[-1]], np.repeat(np.arange(len(sizes)), sizes)))
    by_size = np.argsort(-sizes, kind="stable")  # runs that have a next place come first
    bin_of = np.empty(len(order), np.int64)
    if len(sizes) < _SIDE_BY_SIDE:
        for run, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
            heap = [(0, bin_) for bin_ in range(run * num_ranks, (run + 1) * num_ranks)]
            for place, length in enumerate(tokens[order[start:end]].tolist(), start):
                load, bin_of[place] = heap[0]
                heapq.heapreplace(heap, (load + length, int(bin_of[place])))
    else:
        loads = np.zeros((len(sizes), num_ranks), np.int64)
        num_left = np.searchsorted(-sizes[by_size], -np.arange(sizes.max()), side="left")
        for number, runs in enumerate(num_left.tolist()):
            places = bounds[by_size[:runs]] + number
            bins = loads[:runs].argmin(axis=1)
            loads[np.arange(runs), bins] += tokens[order[places]]
            bin_of[places] = by_size[:runs] * num_ranks + bins
    counts = np.bincount(bin_of, minlength=len(sizes) * num_ranks)
    return order[np.argsort(bin_of, kind="stable")], counts


def _one_more(steps: Steps, num_ranks: int) -> Steps:
    """A last step of the places that were left, and of one each from the last bins that have several."""
    counts = np.diff(steps.starts)
    givers = np.flatnonzero(counts > 1)[::-1][: num_ranks - len(steps.left)]
    if len(givers) < num_ranks - len(steps.left):
        return steps
    taken = steps.starts[givers + 1] - 1
    last = np.concatenate([steps.left, steps.places[taken]])
    counts[givers] -= 1
    starts = np.concatenate([[0], np.cumsum(np.concatenate([counts, np.ones(num_ranks, np.int64)]))]).astype(np.int64)
    none = np.zeros(0, np.int64)
    return Steps(np.concatenate([np.delete(steps.places, taken), last]), starts, none)
