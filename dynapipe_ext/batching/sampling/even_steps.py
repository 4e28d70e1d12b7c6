"""The few steps of dealt blocks that came out uneven, evened by exchanges that only they need."""

from __future__ import annotations

import numpy as np

from dynapipe_ext.batching.sampling.bins import Bins, BoolArray, FloatArray
from dynapipe_ext.batching.sampling.composition import FURTHEST, apart_in_length
from dynapipe_ext.costs.model import IntArray

_UNEVEN = 1.01  # a step whose dearest rank costs this much more than is inevitable is looked at
_EVEN = 1.004  # and brought to this, as far as it goes
_ROUNDS = 96
_TRADES = 16  # rounds between trades
_IDLE = 6  # rounds without an exchange, after which it ends
_SLOTS = 16  # samples of a bin tried in a round
_MOST_PAIRS = 1 << 14  # pairs of bins tried in all rounds together
_MOST_TRADES = 1536  # pairs of bins tried for trades of several samples, in all
_OTHERS = 8  # bins of other steps they trade with
_MANY = 320_000  # samples, above which a part of that must do, for blocks of half as many
_NEARLY = 64  # a block is full where no more than one part in so many of its bins is free
_UNDER = 0.25  # weight of a rank that costs too little beside one that costs too much


def even_steps(
    places: IntArray, starts: IntArray, tokens: IntArray, costs: IntArray, *, num_ranks: int, num_bins: int, cap: int
) -> tuple[IntArray, IntArray]:
    """(places, starts) of the same bins: `num_ranks` after each other are a step, `num_bins` of them a block.

    Bins of steps whose dearest rank costs far more than is inevitable (in full blocks: `least_cost`) exchange samples
    with others of their block, towards what their own steps cost. A block in which that does not help stays as it was.
    tokens and costs are by place; no bin gets fuller than `cap` tokens.
    """
    if num_ranks < 2 or len(starts) < 2:
        return places, starts
    ordered = costs[places]
    load, largest = np.add.reduceat(ordered, starts[:-1]), np.maximum.reduceat(ordered, starts[:-1])
    many = len(places) > _MANY
    blocks = _uneven_blocks(
        places, starts, tokens, costs, load, largest, num_ranks=num_ranks, num_bins=num_bins, cap=cap
    )
    if not len(blocks):
        return places, starts
    bins = (blocks[:, None] * num_bins + np.arange(num_bins, dtype=np.int64)).ravel()
    counts = np.diff(starts)[bins]
    first = np.cumsum(counts) - counts
    held = places[np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts[bins] - first, counts)]
    numbers = np.arange(len(held), dtype=np.int64)
    work = Bins.gather(numbers, counts, tokens[held], costs[held], num_bins, np.ones(len(blocks)))
    largest_now = _traded_and_exchanged(work, largest[bins], num_ranks, cap, many=many)
    after = step_excess(work.load, largest_now, num_ranks).reshape(-1, num_bins // num_ranks).max(axis=1)
    before = step_excess(load[bins], largest[bins], num_ranks).reshape(-1, num_bins // num_ranks).max(axis=1)
    shape = (len(blocks), -1, num_ranks)
    longer = _furthest(work.filled.reshape(shape), work.counts.reshape(shape))
    longer_before = _furthest(np.add.reduceat(tokens[places], starts[:-1])[bins].reshape(shape), counts.reshape(shape))
    better = (after < before) & (longer <= np.maximum(longer_before, 2 * FURTHEST))
    if not better.any():
        return places, starts
    return _replaced(places, starts, bins, held, work, np.repeat(better, num_bins))


def _uneven_blocks(
    places: IntArray,
    starts: IntArray,
    tokens: IntArray,
    costs: IntArray,
    load: IntArray,
    largest: IntArray,
    *,
    num_ranks: int,
    num_bins: int,
    cap: int,
) -> IntArray:
    """Numbers of the blocks with a step that costs far more than is inevitable; of many samples the worst blocks."""
    excess = step_excess(load, largest, num_ranks)
    for step in np.flatnonzero(excess > _UNEVEN).tolist():
        block = slice(*starts[[step * num_ranks // num_bins * num_bins, (step * num_ranks // num_bins + 1) * num_bins]])
        if int(tokens[places[block]].sum()) > num_bins * (cap - cap // _NEARLY):
            of_step = places[starts[step * num_ranks] : starts[(step + 1) * num_ranks]]
            dearest = int(load[step * num_ranks : (step + 1) * num_ranks].max())
            excess[step] = dearest / least_cost(tokens[of_step], costs[of_step], num_ranks=num_ranks, cap=cap)
    worst = excess.reshape(-1, num_bins // num_ranks).max(axis=1)
    blocks = np.flatnonzero(worst > _UNEVEN)
    if len(blocks) and len(places) > _MANY:  # the worst ones, as many as there is time for
        blocks = blocks[np.argsort(-worst[blocks], kind="stable")]
        sizes = np.cumsum(starts[(blocks + 1) * num_bins] - starts[blocks * num_bins])
        blocks = np.sort(blocks[: max(1, int(np.searchsorted(sizes, _MANY // 2)))])
    return blocks


def _traded_and_exchanged(work: Bins, largest: IntArray, num_ranks: int, cap: int, *, many: bool) -> IntArray:
    """Even out the steps of `work`, in place; afterwards the dearest sample of each bin."""
    tried, idle = 0, 0
    trades = _MOST_TRADES // 4 if many else _MOST_TRADES
    for number in range(_ROUNDS):
        if number % _TRADES == 0:
            trades -= _trade(work, largest, num_ranks, cap, trades // 2 if number else trades)
            largest = work.cost[work.slots].max(axis=1)
        pairs, helped = _exchange(work, largest, number, num_ranks, cap)
        tried += pairs
        idle = 0 if helped else idle + 1
        if not pairs or idle > _IDLE or tried > (_MOST_PAIRS // 8 if many else _MOST_PAIRS):
            break
    return largest


def step_excess(load: IntArray, largest: IntArray, num_ranks: int) -> FloatArray:
    """Of each step, its dearest rank's cost over its mean, or its dearest sample's where that is more."""
    by_step = load.reshape(-1, num_ranks)
    excess: FloatArray = by_step.max(axis=1) / _inevitable(by_step, largest)
    return excess


def least_cost(tokens: IntArray, costs: IntArray, *, num_ranks: int, cap: int) -> float:
    """What the dearest rank of a step of these samples costs at least, whichever rank gets which.

    The mean; the dearest sample; and that sample with the tokens for which the other ranks have no room, priced as the
    cheapest by the token among the other samples, cut where needed.

    >>> least_cost(np.array([6, 5, 5, 4]), np.array([36, 25, 25, 16]), num_ranks=2, cap=10)
    52.0
    """
    dearest = int(costs.argmax())
    least = max(float(costs.sum()) / num_ranks, float(costs[dearest]))
    missing = min(int(tokens.sum()) - (num_ranks - 1) * cap, int(tokens.sum())) - int(tokens[dearest])
    if missing <= 0:
        return least
    others = np.delete(np.arange(len(tokens)), dearest)
    others = others[np.argsort(costs[others] / tokens[others], kind="stable")]
    sums = np.append(0, np.cumsum(tokens[others]))
    whole = int(np.searchsorted(sums, missing, side="right")) - 1
    filled = float(costs[dearest] + costs[others[:whole]].sum())
    if whole < len(others):
        filled += (missing - int(sums[whole])) / int(tokens[others[whole]]) * int(costs[others[whole]])
    return max(least, filled)


def _furthest(filled: IntArray, counts: IntArray) -> FloatArray:
    furthest: FloatArray = np.abs(apart_in_length(filled, counts).sum(axis=2)).max(axis=1)
    return furthest


def _inevitable(load: IntArray, largest: IntArray) -> FloatArray:
    inevitable: FloatArray = np.maximum(np.maximum(load.mean(axis=1), largest.reshape(load.shape).max(axis=1)), 1)
    return inevitable


def _trade(work: Bins, largest: IntArray, num_ranks: int, cap: int, most_tried: int) -> int:
    """Bins that are too dear trade their longer short samples, many at once, for shorter ones or for none at all.

    With bins of their own step first, where the mean stays, then with others of the block. Returns how many pairs were
    tried.
    """
    tried = 0
    most = np.repeat(_inevitable(work.load.reshape(-1, num_ranks), largest) * _EVEN, num_ranks)
    dear = np.flatnonzero(work.load > most)
    for giver in dear[np.argsort(-work.load[dear] / most[dear], kind="stable")].tolist():
        first = giver // work.num_bins * work.num_bins
        others = np.arange(first, first + work.num_bins, dtype=np.int64)
        elsewhere = others // num_ranks != giver // num_ranks
        room = np.maximum(most[others] - work.load[others], 0)
        giver_sums = _sums(work, giver, sort_by_weight=True)
        for taker in others[np.lexsort((-room, elsewhere))][: min(num_ranks, 2 * _OTHERS) + _OTHERS].tolist():
            over = work.load[giver] - most[giver]
            if over <= 0 or work.counts[giver] < 2:
                break
            if tried >= most_tried:
                return tried
            if taker != giver and most[taker] > work.load[taker]:
                tried += 1
                if _trade_with(work, giver, giver_sums, taker, over=over, most=most[taker] - work.load[taker], cap=cap):
                    giver_sums = _sums(work, giver, sort_by_weight=True)
    return tried


def _trade_with(
    work: Bins,
    giver: int,
    giver_sums: tuple[IntArray, IntArray, IntArray],
    taker: int,
    *,
    over: float,
    most: float,
    cap: int,
) -> bool:
    """The first i of the giver's dearest but one for the first j of the taker's cheapest: `over` less, if it can be.
    `giver_sums`: the giver's `_sums`. Whether anything was traded."""
    slots_a, length_a, cost_a = giver_sums
    slots_b, length_b, cost_b = _sums(work, taker, sort_by_weight=False)
    j = np.searchsorted(length_b, length_a - (cap - work.filled[taker]), side="left")
    j = np.minimum(j, len(length_b) - 1)
    saved = cost_a - cost_b[j]
    moved = length_a - length_b[j]
    fits = (moved <= cap - work.filled[taker]) & (-moved <= cap - work.filled[giver]) & (saved > 0) & (saved <= most)
    if not fits.any():
        return False
    i = int(np.where(fits, np.minimum(saved, over), -1.0).argmax())
    work.trade(giver, slots_a[:i], taker, slots_b[: int(j[i])])
    return True


def _sums(work: Bins, number: int, *, sort_by_weight: bool) -> tuple[IntArray, IntArray, IntArray]:
    """Slots of a bin in order of cost, the dearest left out, and tokens and costs of the first 0, 1, 2... of them."""
    held = work.slots[number, : work.counts[number]]
    order = np.argsort(-work.cost[held], kind="stable")[1:]
    order = order if sort_by_weight else order[::-1]
    zero = np.zeros(1, np.int64)
    lengths = np.concatenate([zero, np.cumsum(work.length[held[order]])])
    return order, lengths, np.concatenate([zero, np.cumsum(work.cost[held[order]])])


def _exchange(work: Bins, largest: IntArray, number: int, num_ranks: int, cap: int) -> tuple[int, int]:
    """One round; how many pairs were tried, and how many helped. `largest`, bins' dearest samples, is kept true."""
    load = work.load.reshape(-1, num_ranks)
    base = _inevitable(load, largest)
    uneven = load.max(axis=1) > _EVEN * base
    # A rank is to cost no more than `most`, and no less than `least` where that would lift the mean.
    most = np.repeat(base * _EVEN, num_ranks)
    by_mean = load.mean(axis=1) >= largest.reshape(load.shape).max(axis=1)
    least = np.repeat(np.where(uneven & by_mean, base * (2 - _EVEN), 0.0), num_ranks)
    off = work.load / most
    wanted = np.repeat(uneven, num_ranks) & ((off > 1) | (work.load < least))
    a, b = _partners(off, wanted, work.num_bins, number)
    if not len(a):
        return 0, 0

    slot_a, slot_b = work.some_slots(a, number, _SLOTS), work.some_slots(b, number + 1, _SLOTS)
    item_a, item_b = np.take_along_axis(work.slots[a], slot_a, 1), np.take_along_axis(work.slots[b], slot_b, 1)
    moved = work.length[item_a][:, :, None] - work.length[item_b][:, None, :]  # tokens from a to b
    moved_cost = work.cost[item_a][:, :, None] - work.cost[item_b][:, None, :]
    allowed = work.filled[b, None, None] + moved <= np.maximum(cap, work.filled[b])[:, None, None]
    allowed &= work.filled[a, None, None] - moved <= np.maximum(cap, work.filled[a])[:, None, None]

    def penalty(bins: IntArray, loads: FloatArray) -> FloatArray:
        shape = (len(bins),) + (1,) * (loads.ndim - 1)
        over = np.maximum(loads / most[bins].reshape(shape) - 1, 0)
        under = np.maximum(least[bins].reshape(shape) - loads, 0) / most[bins].reshape(shape)
        squares: FloatArray = over * over + _UNDER * under * under
        return squares

    score = penalty(a, work.load[a, None, None] - moved_cost) + penalty(b, work.load[b, None, None] + moved_cost)
    score[~allowed] = np.inf
    work.keep_last(score, a, b, item_a, item_b)
    score = score.reshape(len(a), -1)
    best = score.argmin(axis=1)
    now = penalty(a, work.load[a].astype(np.float64)) + penalty(b, work.load[b].astype(np.float64))
    pair = np.arange(len(a))
    helps = pair[score[pair, best] < now * (1 - 1e-9) - 1e-15]
    if len(helps):
        i, j = np.divmod(best[helps], slot_b.shape[1])
        work.swap(a[helps], slot_a[helps, i], b[helps], slot_b[helps, j])
        both = np.concatenate([a[helps], b[helps]])
        largest[both] = work.cost[work.slots[both]].max(axis=1)
    return len(a), len(helps)


def _partners(off: FloatArray, wanted: BoolArray, num_bins: int, number: int) -> tuple[IntArray, IntArray]:
    """Pairs of bins of a block, one of them `wanted` at least: dear with cheap, others from round to round."""
    half = num_bins // 2
    ranked = np.argsort(off.reshape(-1, num_bins), axis=1, kind="stable")
    ranked += np.arange(len(ranked), dtype=np.int64)[:, None] * num_bins
    low, high = ranked[:, :half], ranked[:, ::-1][:, :half]
    low = np.roll(low, number * 7 // 2 % half, axis=1) if number % 2 else low[:, ::-1] if number % 4 == 2 else low
    a, b = high.ravel(), low.ravel()
    chosen = wanted[a] | wanted[b]
    return a[chosen], b[chosen]


def _replaced(
    places: IntArray, starts: IntArray, bins: IntArray, held: IntArray, work: Bins, chosen: BoolArray
) -> tuple[IntArray, IntArray]:
    """The bins with the chosen ones as in `work`."""
    counts = np.diff(starts)
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    replaced = np.zeros(len(counts), np.bool_)
    replaced[bins[chosen]] = True
    keep = ~replaced[owner]
    mine = (np.arange(work.slots.shape[1]) < work.counts[:, None]) & chosen[:, None]
    new_places = np.concatenate([places[keep], held[work.slots[mine]]])
    new_owner = np.concatenate([owner[keep], np.repeat(bins[chosen], work.counts[chosen])])
    counts[bins[chosen]] = work.counts[chosen]
    new_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return new_places[np.argsort(new_owner, kind="stable")], new_starts
