"""Ranges of ordered samples as padded micro-batches: their costs, and the cuts that a search begins with. A bottleneck
time is a micro-batch's F + B on its busiest pipeline rank."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, SampleLength
from dynapipe_ext.core import native
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import CostModel, IntArray, MicroBatchCosts, find_bottleneck
from dynapipe_ext.errors import PlanError

ShapeIndex = npt.NDArray[np.int32]
SortOrder = Literal["sorted", "classes"]

_BOUNDS = 16  # bounds on t that are tried up to the longest sample's time: these cuts are only a start
_FEW = 64  # samples of which every range may be priced
_LARGER = 2  # every block of row counts ends at this multiple of the one before
# Decoder lengths at which classes begin. Powers of 3: of the factors 1.4 to 4 it gave the shortest plans on T5 batches.
_CLASSES = tuple(3**k for k in range(1, 20))


class Cut(NamedTuple):
    """One micro-batch: samples (or `Start` items) `first` to `end` - 1; `kind` is its recomputation mode's index."""

    first: int
    end: int
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLimits:
    """Limits of a micro-batch (None: no limit), padding included. Lengths are rounded up to `pad_multiple`."""

    max_bytes: int | None = None
    max_tokens: int | None = None
    pad_multiple: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeCosts:
    """Samples in order, and the costs of every range of neighbours that may become a padded micro-batch.

    A shape is an index into `sizes` (3, num_shapes), rows and padded encoder and decoder lengths, and into each of
    `kind_costs`, one per recomputation mode of `kinds`. `shapes[j, r - 1]` is the shape of the r samples that end at
    sample j; -1: they break a limit or take too long. `stage_ranks`: the rank of each stage (None: stage s on rank s).
    """

    order: tuple[SampleLength, ...]
    kinds: tuple[Recompute, ...]
    kind_costs: tuple[MicroBatchCosts, ...]
    shapes: ShapeIndex
    sizes: IntArray
    caps: MicroBatchLimits
    stage_ranks: tuple[int, ...] | None = None

    def make_micro_batch(self, cut: Cut) -> MicroBatch:
        first, end, kind = cut
        return MicroBatch(self.order[first:end], recompute=self.kinds[kind], pad_multiple=self.caps.pad_multiple)

    def pick_fastest(self, min_in_flight: int) -> tuple[IntArray, IntArray]:
        """Return each shape's least bottleneck ns, and its mode's index; `min_in_flight` of it must fit into memory."""
        return pick_fastest(self.kind_costs, self.caps.max_bytes, min_in_flight, self.stage_ranks)

    def make_first_cuts(
        self, *, pp: int, dp: int, min_in_flight: int, equal_counts: bool = False, thinning_ns: int = 0
    ) -> list[Cut]:
        """Return cuts that cover the samples in turn, with about the least sum(t) / dp + (pp - 1) max(t).

        Each t is a cut's bottleneck time in ns, in the fastest mode in which ranks can hold `min_in_flight` such
        micro-batches (see `find_bottleneck`). There is at least one cut per replica; under `equal_counts` their number
        is a multiple of dp. Bounds on t are tried `thinning_ns` apart (0: a share of the longest sample's time).

        Raises PlanError if a sample does not fit `min_in_flight` times, or if counts cannot be made equal.
        """
        times, kinds = self.pick_fastest(min_in_flight)
        costs = np.append(times, INFEASIBLE)[self.shapes]  # the last one for those that are -1
        if (costs[:, 0] >= INFEASIBLE).any():
            worst = int(np.flatnonzero(costs[:, 0] >= INFEASIBLE)[0])
            raise PlanError(
                f"sample {self.order[worst].index} does not fit {min_in_flight} times into {self.caps.max_bytes} B:"
                " hold fewer in flight, recompute more or raise tp"
            )
        thinning_ns = thinning_ns or max(1, int(costs[:, 0].max()) // _BOUNDS)
        ends = find_best_partition(costs, dp * (pp - 1), thinning_ns)
        count = max(dp, len(ends))
        if equal_counts:
            count = min(-(-count // dp), len(self.order) // dp) * dp
        bounds = pairwise([0, *self._with_count(ends, count, costs, dp)])
        return [Cut(a, b, int(kinds[self.shapes[b - 1, b - a - 1]])) for a, b in bounds]

    def compute_times(self, cuts: Sequence[Cut]) -> list[int]:
        """Return the bottleneck time in ns of each cut under its recomputation mode."""
        first, end, kind = np.array(cuts, np.int64).reshape(-1, 3).T
        chosen = MicroBatchCosts.choose(self.kind_costs, kind, self.shapes[end - 1, end - first - 1])
        times: list[int] = find_bottleneck(chosen, stage_ranks=self.stage_ranks)[0].tolist()
        return times

    def _with_count(self, ends: list[int], count: int, costs: IntArray, dp: int) -> list[int]:
        """Cut the most expensive range of two rows or more where its more expensive half costs least, or merge the two
        neighbours that take least time as one, until there are `count` ranges."""

        def get_cost(first: int, end: int) -> int:
            return int(costs[end - 1, end - first - 1]) if end - first <= costs.shape[1] else INFEASIBLE

        while len(ends) < count:
            ranges = [(a, b) for a, b in pairwise([0, *ends]) if b - a > 1]
            first, end = max(ranges, key=lambda one: get_cost(*one))
            insort(ends, min(range(first + 1, end), key=lambda c: max(get_cost(first, c), get_cost(c, end))))
        while len(ends) > count:
            merged = [get_cost(a, c) for a, c in zip([0, *ends], ends[1:], strict=False)]
            if min(merged, default=INFEASIBLE) >= INFEASIBLE:
                raise PlanError(
                    f"{len(self.order)} samples make {len(ends)} micro-batches on {dp} replicas, and no two of them fit"
                    f" into one (max_bytes {self.caps.max_bytes}, max_tokens {self.caps.max_tokens}): raise the limits"
                    " or let counts differ"
                )
            del ends[merged.index(min(merged))]
        return ends


def pick_fastest(
    kind_costs: Sequence[MicroBatchCosts],
    max_bytes: int | None,
    min_in_flight: int = 1,
    stage_ranks: Sequence[int] | None = None,
) -> tuple[IntArray, IntArray]:
    """Return each shape's least bottleneck time in ns over the recomputation modes, and the mode's index (the first of
    equals). Modes that need over `max_bytes` do not count; INFEASIBLE if none is left (see `find_bottleneck`)."""
    cap = INFEASIBLE - 1 if max_bytes is None else min(max_bytes, INFEASIBLE - 1)
    answers = (find_bottleneck(costs, min_in_flight, stage_ranks) for costs in kind_costs)
    times = np.stack([np.where(num_bytes > cap, INFEASIBLE, np.minimum(ns, INFEASIBLE)) for ns, num_bytes in answers])
    return times.min(axis=0), times.argmin(axis=0)


def find_best_partition(costs: IntArray, weight: int, thinning_ns: int) -> list[int]:
    """Return the ends (exclusive) of contiguous ranges of items that minimise sum + `weight` x max of their costs.

    `costs[j, r - 1]` is the cost in ns of the r items that end at item j; each single item must be feasible. As in
    DynaPipe (arXiv 2311.10418, sec. 4), the least sum is found under each of several bounds on a range's cost. They are
    `thinning_ns` apart, from the smallest feasible one up to what the least sum of all leaves for the maximum.
    """
    costs = np.ascontiguousarray(costs, np.int64)
    feasible = costs < INFEASIBLE
    widths = (costs.shape[1] - feasible[:, ::-1].argmax(axis=1)).astype(np.int32)

    def solve(bounds: Sequence[int]) -> list[tuple[int, list[int], int]]:
        """List (objective, ends, max) of the least sum under each bound."""
        solved = []
        for total, ends in native.cheapest_cuts(costs, widths, list(bounds)):
            last = np.array(ends, np.int64)
            most = int(costs[last - 1, np.diff(last, prepend=0) - 1].max())
            solved.append((int(total) + weight * most, list(ends), most))
        return solved

    tightest_ns = native.least_bound(costs, widths)
    loosest, tightest = solve([INFEASIBLE - 1, tightest_ns])
    if not weight:
        return loosest[1]
    best = min(loosest, tightest)
    room_ns = loosest[2] + (best[0] - loosest[0]) // weight
    return min(best, *solve([*range(tightest_ns, room_ns, thinning_ns), room_ns]))[1]


def price_cuts(
    order: Sequence[SampleLength],
    costs: CostModel,
    kinds: Sequence[Recompute],
    caps: MicroBatchLimits,
    *,
    weight: int,
    equal_counts: bool = False,
    least_work: bool = False,
    stage_ranks: tuple[int, ...] | None = None,
    min_in_flight: int = 1,
    is_exact: bool = False,
) -> RangeCosts:
    """Price all ranges of samples that may be a micro-batch: within `caps`, and not far slower than even cuts.

    Even cuts are ranges whose times t are each as near to T as they can be; T makes sum(t) + `weight` x max(t) least.
    Ranges of up to 1.25 T are priced, or of up to twice T if two ranges may be merged (`equal_counts`, `least_work`).
    With `is_exact`, or `least_work` and few samples, all that an optimum may have are priced.

    Raises PlanError, naming the sample, if one does not fit `min_in_flight` times by itself.
    """
    table = _Table(order, costs, kinds, caps, stage_ranks, min_in_flight)
    singles = table.check_singles(order)
    is_exact = is_exact or (least_work and len(order) <= _FEW)
    least_ns, most_ns = 0, max(1, int(singles.max()))  # if nothing takes time, all cuts are equal
    if is_exact and not weight:
        most_ns = INFEASIBLE - 1
        table.price_up_to(most_ns)
    else:
        while not least_ns or table.cut_evenly(most_ns, weight) < table.cut_evenly(least_ns, weight):
            least_ns, most_ns = most_ns, most_ns * (8 if equal_counts or least_work else 5) // 4
            table.price_up_to(most_ns)
        if is_exact:  # no part of an optimum takes longer than the value of any partition / weight
            most_ns = max(most_ns, min(INFEASIBLE - 1, table.cut_evenly(least_ns, weight) // weight))
            table.price_up_to(most_ns)
    return RangeCosts(
        order=tuple(order),
        kinds=tuple(kinds),
        kind_costs=tuple(MicroBatchCosts.join(parts, like=parts[0]) for parts in table.priced),
        shapes=table.list_shapes(most_ns),
        sizes=np.concatenate(table.sizes, axis=1),
        caps=table.caps,
        stage_ranks=stage_ranks,
    )


class _Table:
    """Shapes of ranges of samples with their costs, from one sample up."""

    def __init__(
        self,
        order: Sequence[SampleLength],
        costs: CostModel,
        kinds: Sequence[Recompute],
        caps: MicroBatchLimits,
        stage_ranks: tuple[int, ...] | None,
        min_in_flight: int,
    ) -> None:
        rows = {len(sample.documents) for sample in order}
        if len(rows) > 1:
            raise PlanError("padded micro-batches hold pairs or single documents, and this batch has both: split them")
        self.rows_a_sample = rows.pop()  # two of a pair
        if self.rows_a_sample > 1:
            caps = replace(caps, max_tokens=caps.max_tokens and caps.max_tokens // self.rows_a_sample)
        self.costs, self.kinds, self.caps, self.stage_ranks = costs, kinds, caps, stage_ranks
        self.min_in_flight = min_in_flight
        # The encoder length (of a pair, its longer document's) and the decoder length of each sample, rounded up.
        sides = np.array([(max(s.documents), s.decoder) for s in order], np.int64).T
        self.own = encoder, decoder = -(-sides // caps.pad_multiple) * caps.pad_multiple
        # Without a decoder side all ranges that end at samples of one length are alike but for their rows.
        is_alike = not decoder.any() and bool((np.diff(encoder) >= 0).all())
        _, first, self.member = np.unique(
            encoder if is_alike else np.arange(len(encoder)), return_index=True, return_inverse=True
        )
        self.last = np.append(first[1:], len(encoder)) - 1  # of the samples of each class
        self.priced: list[list[MicroBatchCosts]] = [[] for _ in kinds]
        self.times = np.zeros(0, np.int64)
        self.sizes: list[IntArray] = []
        self.cells = np.zeros((0, len(self.last)), np.int32)  # (row counts, classes): the shape, -1 while not priced
        self.price_up_to(0)

    def price_up_to(self, most_ns: int) -> None:
        """Price all ranges of neighbouring samples that take up to `most_ns`; 0: single samples."""
        count = self.own.shape[1] if most_ns else 1
        alive, longest, high = np.arange(len(self.last)), self.own[:, self.last], 0
        while high < count and len(alive):
            low, high = high + 1, min(count, _LARGER * (high + 1))
            self.cells = np.pad(self.cells, ((0, max(0, high - len(self.cells))), (0, 0)), constant_values=-1)
            rows = np.arange(low, high + 1)[:, None]
            first = self.last[alive] - rows + 1
            added = self.own[:, np.maximum(first, 0)]
            sides = np.maximum.accumulate(np.concatenate([longest[:, None], added], axis=1), axis=1)[:, 1:]
            row, place = np.nonzero((first >= 0) & (self.cells[low - 1 : high, alive] < 0))
            self.cells[low - 1 + row, alive[place]] = self._price(low + row, *sides[:, row, place])
            at_end = self.cells[high - 1, alive]
            is_short = (at_end >= 0) & (self.times[at_end] <= (most_ns or INFEASIBLE))
            alive, longest = alive[is_short], sides[:, -1, is_short]

    def _price(self, rows: IntArray, encoder: IntArray, decoder: IntArray) -> IntArray:
        """Price shapes, equal ones once, and return their numbers."""
        if not len(rows):
            return rows
        key = (rows * (int(encoder.max()) + 1) + encoder) * (int(decoder.max()) + 1) + decoder
        _, first, back = np.unique(key, return_index=True, return_inverse=True)
        rows, encoder, decoder = sizes = np.stack([rows, encoder, decoder])[:, first]
        priced = [self.costs.evaluate_shapes(self.rows_a_sample * rows, encoder, decoder, kind) for kind in self.kinds]
        time_ns, _ = pick_fastest(priced, self.caps.max_bytes, self.min_in_flight, self.stage_ranks)
        time_ns[rows * (encoder + decoder) > (self.caps.max_tokens or INFEASIBLE)] = INFEASIBLE
        shapes: IntArray = len(self.times) + back.reshape(-1)
        self.times = np.concatenate([self.times, time_ns])
        self.sizes.append(sizes)
        for parts, costs in zip(self.priced, priced, strict=True):
            parts.append(costs)
        return shapes

    def _list_cells(self, most_ns: int) -> tuple[ShapeIndex, IntArray]:
        """Return shapes and times (rows, classes) of single samples and of the ranges that take at most `most_ns`."""
        times = np.where(self.cells >= 0, self.times[self.cells], INFEASIBLE)
        late = times > most_ns
        late[0] = False
        return np.where(late, np.int32(-1), self.cells), np.where(late, INFEASIBLE, times)

    def list_shapes(self, most_ns: int) -> ShapeIndex:
        """Return shapes: [j, r - 1] is that of the r samples that end at sample j; -1 if they take over `most_ns` or
        break a limit. Single samples always have a shape."""
        cells, _ = self._list_cells(most_ns)
        cells = cells[: int(np.flatnonzero((cells >= 0).any(axis=1))[-1]) + 1]
        rows, samples = np.indices((len(cells), len(self.member)), np.int32, sparse=True)
        shapes = np.where(rows > samples, np.int32(-1), cells[:, self.member])  # none reaches beyond the first sample
        return np.ascontiguousarray(shapes.T)

    def cut_evenly(self, most_ns: int, weight: int) -> int:
        """Return sum(t) + `weight` x max(t) of ranges, cut from the end on, each as long as `most_ns` allows."""
        _, times = self._list_cells(most_ns)
        fits = times < INFEASIBLE
        longest = (len(fits) - fits[::-1].argmax(axis=0))[self.member].tolist()
        total = most = 0
        end = len(longest)
        while end > 0:
            rows = min(longest[end - 1], end)
            cost = int(times[rows - 1, self.member[end - 1]])
            total, most, end = total + cost, max(most, cost), end - rows
        return total + weight * most

    def check_singles(self, order: Sequence[SampleLength]) -> IntArray:
        """Return ns of F + B of every sample by itself on its busiest rank. Raises PlanError if one cannot run."""
        singles: IntArray = self.times[self.cells[0, self.member]]
        if int(singles.min()) < 0:
            raise PlanError(
                f"the cost model gives {singles.min()} ns for a single sample: its times overflow 64 bits or are wrong,"
                " so check its settings and the lengths"
            )
        if not (singles >= INFEASIBLE).any():
            return singles
        place = int((singles >= INFEASIBLE).argmax())
        encoder, decoder = self.own[:, place].tolist()
        sample, max_tokens, max_bytes = order[place], self.caps.max_tokens, self.caps.max_bytes
        name = f"sample {sample.index} ({sample.encoder} + {sample.decoder} positions, {encoder} + {decoder} padded)"
        if max_tokens is not None and encoder + decoder > max_tokens:
            raise PlanError(f"{name} is above the cap of {max_tokens} tokens per micro-batch: raise it or truncate")
        columns = (parts[0].take([int(self.cells[0, self.member[place]])]) for parts in self.priced)
        needed = min(int(find_bottleneck(one, self.min_in_flight, self.stage_ranks)[1][0]) for one in columns)
        if needed >= INFEASIBLE or max_bytes is None or needed <= max_bytes:
            raise PlanError(f"{name} has no price on these costs (outside the measured grid?): truncate it")
        raise PlanError(
            f"{name} needs {needed} B by itself but {max_bytes} B is the limit: recompute more, raise tp or truncate"
        )


def sort_samples(samples: Sequence[SampleLength], order: SortOrder) -> list[SampleLength]:
    """Return the samples in the order in which they are cut into micro-batches.

    sorted: by encoder length (of a pair, its longer document's), then decoder length. classes, for encoder-decoder
    models: by class of decoder length, each up to three times as long as the one before. Within a class they are sorted
    by encoder length, ascending and descending in turns, so that neighbours are similar on both sides.

    >>> lengths = [(9, 1), (2, 1), (5, 2), (7, 3), (3, 4)]
    >>> [(s.encoder, s.decoder) for s in sort_samples([SampleLength(0, e, d) for e, d in lengths], "classes")]
    [(2, 1), (5, 2), (9, 1), (7, 3), (3, 4)]
    """

    def place(s: SampleLength) -> tuple[int, int, int, int, int]:
        decoder_class = 0 if order == "sorted" else bisect_right(_CLASSES, s.decoder)
        encoder = max(s.documents)
        return decoder_class, -encoder if decoder_class % 2 else encoder, s.decoder, s.index, s.start

    return sorted(samples, key=place)
