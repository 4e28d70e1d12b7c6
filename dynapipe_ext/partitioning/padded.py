"""Ordered samples cut into padded micro-batches, each shape priced once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, assert_never

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, SampleLength, rows_a_sample
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts, PricesShapes, bottleneck
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.balance import MOST_SAMPLES, best_partition, cut_again, good_partitions
from dynapipe_ext.partitioning.pair_rows import PairRows

ShapeIndex = npt.NDArray[np.int32]


class Cut(NamedTuple):
    """Items `first` .. `end` - 1 of an order as one micro-batch; `kind`: the index of its kind of recomputation."""

    first: int
    end: int
    kind: int


_BOUNDS = 16  # bounds on t that are tried up to the longest sample's time: these cuts are only a start
_FEW = 64  # samples of which every range may be priced
_LARGER = 2  # every block of row counts ends at so many times the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Hard limits of one micro-batch (None: no limit) and the multiple its lengths are rounded up to."""

    max_bytes: int | None = None
    max_rows: int | None = None
    max_tokens: int | None = None
    pad_multiple: int = 1


NO_CAPS = Caps()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedCuts:
    """Samples in order, and the prices of every range of them that may become a micro-batch.

    `shapes[j, r - 1]` is the shape of the r samples that end at sample j, or -1 where these break a cap or take too
    long. `sizes` (3, shapes) are the rows and padded lengths of each shape; `kind_costs` price it under every kind of
    recomputation.
    """

    order: tuple[SampleLength, ...]
    kinds: tuple[Recompute, ...]
    kind_costs: tuple[MicroBatchCosts, ...]
    shapes: ShapeIndex
    sizes: IntArray
    caps: Caps
    stage_ranks: tuple[int, ...] | None = None

    def micro_batch(self, cut: Cut) -> MicroBatch:
        first, end, kind = cut
        return MicroBatch(self.order[first:end], recompute=self.kinds[kind], pad_multiple=self.caps.pad_multiple)

    def first_cuts(self, *, pp: int, dp: int, min_in_flight: int, equal_counts: bool = False) -> list[Cut]:
        """Cuts that cover the samples in turn, of about least sum(t) / dp + (pp - 1) max(t) over bottleneck times t.

        Each is under the fastest kind of which `min_in_flight` like it can be held (see `bottleneck`). There is at
        least one a replica; under `equal_counts` their number is a multiple of dp.

        Errors: PlanError where a sample does not fit so often, or counts cannot be made equal.
        """
        answers = (bottleneck(costs, min_in_flight, self.stage_ranks) for costs in self.kind_costs)
        times, kinds = fastest(answers, self.caps.max_bytes)
        costs = np.append(times, INFEASIBLE)[self.shapes]  # the last one for those that are -1
        if (costs[:, 0] >= INFEASIBLE).any():
            worst = int(np.flatnonzero(costs[:, 0] >= INFEASIBLE)[0])
            raise PlanError(
                f"sample {self.order[worst].index} does not fit {min_in_flight} times into {self.caps.max_bytes} B:"
                " hold fewer in flight, recompute more or raise tp"
            )
        parts = best_partition(costs, dp * (pp - 1), thinning_ns=int(costs[:, 0].max()) // _BOUNDS)
        num_parts = max(dp, len(parts.ends))
        if equal_counts:
            num_parts = min(-(-num_parts // dp), len(self.order) // dp) * dp
        ends = list(parts.ends) if len(parts.ends) > num_parts else list(cut_again(costs, parts, num_parts).ends)
        while len(ends) > num_parts:
            ends = self._merged(ends, costs, dp)
        bounds = list(pairwise([0, *ends]))
        return [Cut(a, b, int(kinds[self.shapes[b - 1, b - a - 1]])) for a, b in bounds]

    def times(self, cuts: Sequence[Cut]) -> list[int]:
        """Bottleneck time of each cut under its kind, ns."""
        first, end, kind = np.array(cuts, np.int64).reshape(-1, 3).T
        chosen = MicroBatchCosts.choose(self.kind_costs, kind, self.shapes[end - 1, end - first - 1])
        times: list[int] = bottleneck(chosen, stage_ranks=self.stage_ranks)[0].tolist()
        return times

    def _merged(self, ends: list[int], costs: IntArray, dp: int) -> list[int]:
        """The ends without the one between the two neighbours that take least time as one."""
        merged = [
            (int(costs[c - 1, c - a - 1]) if c - a <= costs.shape[1] else INFEASIBLE, k)
            for k, (a, c) in enumerate(zip([0, *ends], ends[1:], strict=False))
        ]
        time_ns, k = min(merged, default=(INFEASIBLE, 0))
        if time_ns >= INFEASIBLE:
            raise no_equal_counts(len(self.order), len(ends), dp, self.caps)
        return [*ends[:k], *ends[k + 1 :]]


def no_equal_counts(num_samples: int, num_parts: int, dp: int, caps: Caps) -> PlanError:
    """The error where so many micro-batches do not divide over the replicas and no two of them can be merged."""
    return PlanError(
        f"{num_samples} samples make {num_parts} micro-batches, which do not divide over {dp} replicas of equal counts,"
        f" and no two of them fit into one (max_bytes {caps.max_bytes}, max_tokens {caps.max_tokens}): enlarge the"
        " global batch, raise the caps or let counts differ"
    )


def price_cuts(
    order: Sequence[SampleLength],
    costs: PricesShapes,
    kinds: Sequence[Recompute],
    caps: Caps,
    *,
    weight: int,
    equal_counts: bool = False,
    least_work: bool = False,
    stage_ranks: tuple[int, ...] | None = None,
) -> PricedCuts:
    """Prices of the ranges of samples within the caps that are not too long to be worth a look.

    Even cuts, judged by sum(t) + `weight` x max(t), are best at some time a micro-batch. A range may take a quarter
    more, or twice as long where two may be joined (`equal_counts`, `least_work`). For the least work of a few samples
    every range is priced. Assumes that a range which breaks a cap or takes too long still does so with more samples.

    Errors: PlanError, naming the sample, if one does not fit by itself.
    """
    if (rows := rows_a_sample(order)) > 1:  # two of a pair
        costs, caps = PairRows(costs, rows), replace(caps, max_tokens=caps.max_tokens and caps.max_tokens // rows)
    encoder = padded_lengths(np.array([max(s.documents) for s in order], np.int64), caps.pad_multiple)
    decoder = padded_lengths(np.array([s.decoder for s in order], np.int64), caps.pad_multiple)
    table = _Table(encoder, decoder, costs, kinds, caps, stage_ranks)
    singles = table.times[table.cells[0][table.member]]
    if (bad := np.flatnonzero(singles >= INFEASIBLE)).size:
        i, choices = int(bad[0]), {kind: shape_evaluate(costs, recompute=kind) for kind in kinds}
        raise PlanError(refusal(order[i], choices, int(encoder[i]), int(decoder[i]), caps))
    if int(singles.min()) < 0:
        raise PlanError(
            f"the cost model gives {singles.min()} ns for a single sample: its times overflow 64 bits or are wrong, so"
            " check its settings and the lengths"
        )
    least_ns, most_ns = 0, max(1, int(singles.max()))  # where nothing takes time, all cuts are equal
    if least_work and len(order) <= _FEW:
        most_ns = INFEASIBLE - 1
        table.grow(most_ns)
    else:
        while not least_ns or table.even_cuts(most_ns, weight) < table.even_cuts(least_ns, weight):
            least_ns, most_ns = most_ns, most_ns * (8 if equal_counts or least_work else 5) // 4
            table.grow(most_ns)
    return PricedCuts(
        order=tuple(order),
        kinds=tuple(kinds),
        kind_costs=tuple(MicroBatchCosts.join(parts, like=parts[0]) for parts in table.priced),
        shapes=table.shapes(most_ns),
        sizes=np.concatenate(table.sizes, axis=1),
        caps=caps,
        stage_ranks=stage_ranks,
    )


class _Table:
    """Shapes of ranges of samples with their costs, from one sample up."""

    def __init__(
        self,
        encoder: IntArray,
        decoder: IntArray,
        costs: PricesShapes,
        kinds: Sequence[Recompute],
        caps: Caps,
        stage_ranks: tuple[int, ...] | None,
    ) -> None:
        self.costs, self.kinds, self.caps, self.stage_ranks = costs, kinds, caps, stage_ranks
        self.own = np.stack([encoder, decoder])
        count = len(encoder)
        # Without a decoder side all ranges that end at samples of one length are alike but for their rows.
        alike = not decoder.any() and bool((np.diff(encoder) >= 0).all())
        _, first, self.member = np.unique(
            encoder if alike else np.arange(count), return_index=True, return_inverse=True
        )
        self.last = np.append(first[1:], count) - 1  # of the samples of each class
        self.priced: list[list[MicroBatchCosts]] = [[] for _ in kinds]
        self.times = np.zeros(0, np.int64)
        self.sizes: list[IntArray] = []
        self.cells: list[ShapeIndex] = []  # of each row count: the shape of each class, -1 while not priced
        self.grow(0)

    def grow(self, most_ns: int) -> None:
        """Price all ranges that take no longer than that; 0: those of one sample."""
        count = self.own.shape[1] if most_ns else 1
        alive, longest, low = np.arange(len(self.last)), self.own, 1
        while low <= count and len(alive):
            high = min(count, _LARGER * low)
            sizes: list[IntArray] = []
            places: list[tuple[int, IntArray]] = []
            for rows in range(low, high + 1):
                if rows > 1:
                    longest = np.maximum(longest[:, 1:], self.own[:, : self.own.shape[1] - rows + 1])
                if rows > len(self.cells):
                    self.cells.append(np.full(len(self.last), -1, np.int32))
                classes = alive[(self.last[alive] >= rows - 1) & (self.cells[rows - 1][alive] < 0)]
                ends = self.last[classes] - rows + 1
                shapes = np.empty((3, len(classes)), np.int64)
                shapes[0], shapes[1:] = rows, longest[:, ends]
                sizes.append(shapes)
                places.append((rows - 1, classes))
            self._price(np.concatenate(sizes, axis=1), places)
            at_end = self.cells[high - 1][alive]
            alive = alive[(at_end >= 0) & (self.times[at_end] <= (most_ns or INFEASIBLE))]
            low = high + 1

    def _price(self, sizes: IntArray, places: list[tuple[int, IntArray]]) -> None:
        if not sizes.shape[1]:
            return
        back = None
        if sizes[2].any():  # equal shapes are many where samples resemble each other
            key = (sizes[0] * (int(sizes[1].max()) + 1) + sizes[1]) * (int(sizes[2].max()) + 1) + sizes[2]
            _, first, back = np.unique(key, return_index=True, return_inverse=True)
            sizes = sizes[:, first]
        priced = [self.costs.evaluate_shapes(sizes[0], sizes[1], sizes[2], kind) for kind in self.kinds]
        answers = (bottleneck(one, stage_ranks=self.stage_ranks) for one in priced)
        time_ns, _ = fastest(answers, self.caps.max_bytes)
        time_ns[sizes[0] * (sizes[1] + sizes[2]) > (self.caps.max_tokens or INFEASIBLE)] = INFEASIBLE
        shapes = len(self.times) + (np.arange(len(time_ns)) if back is None else back.reshape(-1))
        at = 0
        for row, classes in places:
            self.cells[row][classes] = shapes[at : at + len(classes)]
            at += len(classes)
        self.times = np.concatenate([self.times, time_ns])
        self.sizes.append(sizes)
        for parts, costs in zip(self.priced, priced, strict=True):
            parts.append(costs)

    def _cells(self, most_ns: int) -> tuple[ShapeIndex, IntArray]:
        """(rows, classes): shapes and times of the ranges that take no longer than that, and of single samples."""
        cells = np.array(self.cells)
        times = np.where(cells >= 0, self.times[cells], INFEASIBLE)
        late = times > most_ns
        late[0] = False
        cells[late], times[late] = -1, INFEASIBLE
        return cells, times

    def shapes(self, most_ns: int) -> ShapeIndex:
        """(samples, rows): see `PricedCuts`."""
        cells, _ = self._cells(most_ns)
        cells = cells[: int(np.flatnonzero((cells >= 0).any(axis=1))[-1]) + 1]
        shapes = np.ascontiguousarray(cells.T[self.member])
        for rows in range(2, min(shapes.shape) + 1):
            shapes[: rows - 1, rows - 1] = -1  # no range reaches back beyond the first sample
        shapes[:, len(shapes) :] = -1
        return shapes

    def even_cuts(self, most_ns: int, weight: int) -> int:
        """sum + weight x max where ranges are cut from the end, each as long as `most_ns` lets it be."""
        _, times = self._cells(most_ns)
        fits = times < INFEASIBLE
        longest = (len(fits) - fits[::-1].argmax(axis=0))[self.member].tolist()
        total = most = 0
        end = len(longest)
        while end > 0:
            rows = min(longest[end - 1], end)
            cost = int(times[rows - 1, self.member[end - 1]])
            total, most, end = total + cost, max(most, cost), end - rows
        return total + weight * most


# (rows, encoder_len, decoder_len) of padded shapes, one array each -> (bottleneck ns, bytes) of each shape; INFEASIBLE
# (dynapipe_ext.costs.grid) or more for shapes that cannot run.
ShapeEvaluate = Callable[[IntArray, IntArray, IntArray], tuple[IntArray, IntArray]]

SortOrder = Literal["sorted", "classes"]

# Decoder lengths at which classes begin. Powers of 3: of the factors 1.4 to 4 it gave the shortest plans on T5 batches.
_CLASSES = tuple(3**k for k in range(1, 20))

_ROWS_AT_ONCE = 64


def shape_evaluate(costs: PricesShapes, *, recompute: Recompute = "none", min_in_flight: int = 1) -> ShapeEvaluate:
    """The `evaluate` of `split_padded` for a cost model."""

    def evaluate(rows: IntArray, encoder_len: IntArray, decoder_len: IntArray) -> tuple[IntArray, IntArray]:
        return bottleneck(costs.evaluate_shapes(rows, encoder_len, decoder_len, recompute), min_in_flight)

    return evaluate


def split_padded(
    samples: Sequence[SampleLength],
    evaluate: ShapeEvaluate | Mapping[Recompute, ShapeEvaluate],
    *,
    pp: int,
    dp: int,
    caps: Caps = NO_CAPS,
    equal_counts: bool = False,
    orders: Sequence[SortOrder] = ("sorted", "classes"),
    thinning_ns: int = 0,
) -> list[MicroBatch]:
    """The micro-batches that minimise sum(t) / dp + (pp - 1) max(t), t being a micro-batch's bottleneck time.

    Each is a contiguous range of the ordered samples (DynaPipe, arXiv 2311.10418, sec. 4: dynamic programming under a
    bound on t, which is scanned). The optimum over all such ranges, and over the `orders` (see `ordered`), is exact
    with `thinning_ns` 0; else bounds are tried that far apart. Up to 9 samples of an encoder-decoder may be grouped in
    any way, and the optimum is that over all partitions. Given one `evaluate` for each of several recomputation types,
    every micro-batch takes the fastest that the byte cap allows (the first of equals).
    Bytes are as `evaluate` counts them, tokens are padded ones of encoder and decoder. If the optimum has fewer
    micro-batches than replicas (or, under `equal_counts`, a number that does not divide over them), its dearest are cut
    again. Assumes that ranges too long to be worth their time at 64 successive row counts stay so at more.

    Errors: PlanError, naming the sample, if one does not fit by itself, and for fewer samples than replicas.
    """
    if not samples:
        return []
    if len(samples) < dp:
        raise PlanError(f"{len(samples)} samples cannot feed {dp} replicas: enlarge the global batch or lower dp")
    choices: Mapping[Recompute, ShapeEvaluate] = evaluate if isinstance(evaluate, Mapping) else {"none": evaluate}
    if not choices:
        raise PlanError("split_padded was given no recomputation type to choose from: give at least one evaluate")
    if not orders:
        raise PlanError("split_padded was given no order of samples to try: give at least one of sorted, classes")
    weight = dp * (pp - 1)
    has_decoder = any(s.decoder for s in samples)
    worth_trying = [name for i, name in enumerate(orders) if has_decoder or name != "classes" or not i]
    splits = []
    for name in worth_trying:
        order = ordered(samples, name)
        value, ends = _best_ends(order, choices, weight, caps, dp, equal_counts, thinning_ns)
        splits.append((value, [MicroBatch(tuple(order[a:b]), pad_multiple=caps.pad_multiple) for a, b in ends]))
    best_value, micro_batches = min(splits, key=lambda split: split[0])
    if len(samples) <= MOST_SAMPLES and has_decoder and not equal_counts:
        few = _exact(samples, choices, weight, caps)
        if few and len(few[1]) >= dp and few[0] < best_value:
            micro_batches = few[1]
    return under_fastest(micro_batches, choices, caps.max_bytes)


def _best_ends(
    order: Sequence[SampleLength],
    choices: Mapping[Recompute, ShapeEvaluate],
    weight: int,
    caps: Caps,
    dp: int,
    equal_counts: bool,
    thinning_ns: int,
) -> tuple[int, list[tuple[int, int]]]:
    """The best objective of ordered samples in contiguous ranges, and these ranges' bounds; see `split_padded`."""
    table = _interval_costs(order, choices, weight, caps)
    parts = best_partition(np.where(table.cost < table.worth, table.cost, INFEASIBLE), weight, thinning_ns)
    num_parts = -(-len(parts.ends) // dp) * dp if equal_counts else max(dp, len(parts.ends))
    parts = cut_again(table.cost, parts, num_parts)
    return parts.value(weight), list(pairwise([0, *parts.ends]))


def under_fastest(
    micro_batches: Sequence[MicroBatch], choices: Mapping[Recompute, ShapeEvaluate], max_bytes: int | None
) -> list[MicroBatch]:
    """Padded micro-batches, each under its fastest kind of recomputation within the byte cap."""
    shapes = np.array([(m.rows, m.encoder_len, m.decoder_len) for m in micro_batches], np.int64).T
    _, chosen = fastest((evaluate(shapes[0], shapes[1], shapes[2]) for evaluate in choices.values()), max_bytes)
    kinds = list(choices)
    return [replace(m, recompute=kinds[k]) for m, k in zip(micro_batches, chosen, strict=True)]


def _exact(
    samples: Sequence[SampleLength], choices: Mapping[Recompute, ShapeEvaluate], weight: int, caps: Caps
) -> tuple[int, list[MicroBatch]] | None:
    """The best split into micro-batches of any members, and its objective."""
    order, costs = subset_costs(samples, choices, caps)
    for masks in good_partitions(costs.tolist(), (weight,), 1):
        each = [int(costs[mask]) for mask in masks]
        made = [MicroBatch(members_of(order, mask), pad_multiple=caps.pad_multiple) for mask in masks]
        return sum(each) + weight * max(each), made
    return None


def members_of(order: Sequence[SampleLength], mask: int) -> tuple[SampleLength, ...]:
    """The samples of the bits of a mask."""
    return tuple(sample for i, sample in enumerate(order) if mask >> i & 1)


def subset_costs(
    samples: Sequence[SampleLength], choices: Mapping[Recompute, ShapeEvaluate], caps: Caps
) -> tuple[list[SampleLength], IntArray]:
    """Few samples in order, and for every mask of them the time of their subset as one micro-batch."""
    order = ordered(samples, "sorted")
    masks = np.arange(1, 1 << len(order))
    members = (masks[:, None] >> np.arange(len(order))) & 1
    rows = members.sum(axis=1)
    encoder = (members * padded_lengths(np.array([s.encoder for s in order], np.int64), caps.pad_multiple)).max(axis=1)
    decoder = (members * padded_lengths(np.array([s.decoder for s in order], np.int64), caps.pad_multiple)).max(axis=1)
    time_ns = _evaluate_distinct(choices, rows, encoder, decoder, caps.max_bytes)
    within = (rows <= (caps.max_rows or len(order))) & (rows * (encoder + decoder) <= (caps.max_tokens or INFEASIBLE))
    return order, np.concatenate([[0], np.where(within, time_ns, INFEASIBLE)])


def ordered(samples: Sequence[SampleLength], order: SortOrder) -> list[SampleLength]:
    """Samples in the order in which they are cut.

    sorted: by encoder length (of a pair, its longer document's), then decoder length. classes, for encoder-decoder
    models: by class of decoder length (each up to three times as long as the one before), and within a class by encoder
    length, up and down in turns, so that neighbours resemble each other on both sides.

    >>> lengths = [(9, 1), (2, 1), (5, 2), (7, 3), (3, 4)]
    >>> [(s.encoder, s.decoder) for s in ordered([SampleLength(0, e, d) for e, d in lengths], "classes")]
    [(2, 1), (5, 2), (9, 1), (7, 3), (3, 4)]
    """
    match order:
        case "sorted":
            return sorted(samples, key=lambda s: (max(s.documents), s.decoder, s.index, s.start))
        case "classes":

            def place(s: SampleLength) -> tuple[int, int, int, int, int]:
                decoder_class = bisect_right(_CLASSES, s.decoder)
                return (decoder_class, -s.encoder if decoder_class % 2 else s.encoder, s.decoder, s.index, s.start)

            return sorted(samples, key=place)
        case _:
            assert_never(order)


@dataclass(frozen=True, slots=True)
class _Intervals:
    """`cost[j, r - 1]`: time of samples j - r + 1 .. j as one micro-batch, INFEASIBLE if it breaks a cap. No part of an
    optimal partition takes `worth` or longer; row counts stop where all ranges do.
    """

    cost: IntArray
    worth: int


def _interval_costs(
    order: Sequence[SampleLength], choices: Mapping[Recompute, ShapeEvaluate], weight: int, caps: Caps
) -> _Intervals:
    """Costs of all ranges worth a look; each is padded to its longest encoder and its longest decoder."""
    encoder = padded_lengths(np.array([s.encoder for s in order], np.int64), caps.pad_multiple)
    decoder = padded_lengths(np.array([s.decoder for s in order], np.int64), caps.pad_multiple)
    longest = (encoder, decoder)  # of the ranges that end at each sample, as they grow
    num_samples = len(order)
    limit = min(num_samples, caps.max_rows or num_samples)
    blocks, worth = list[IntArray](), INFEASIBLE
    for first in range(1, limit + 1, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE - 1, limit)
        ranges: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
        for r in range(first, last + 1):
            if r > 1:
                old_encoder, old_decoder = longest
                count = num_samples - r + 1
                longest = (np.maximum(old_encoder[1:], encoder[:count]), np.maximum(old_decoder[1:], decoder[:count]))
            ranges.append((np.arange(r - 1, num_samples), np.full(num_samples - r + 1, r, np.int64), *longest))
        end, row, enc, dec = (np.concatenate(column) for column in zip(*ranges, strict=True))
        within = row * (enc + dec) <= (caps.max_tokens or INFEASIBLE)
        block = np.full((num_samples, last - first + 1), INFEASIBLE, np.int64)
        block[end[within], row[within] - first] = _evaluate_distinct(
            choices, row[within], enc[within], dec[within], caps.max_bytes
        )
        if first == 1 and (block[:, 0] >= INFEASIBLE).any():
            index = int(np.flatnonzero(block[:, 0] >= INFEASIBLE)[0])
            raise PlanError(refusal(order[index], choices, int(encoder[index]), int(decoder[index]), caps))
        blocks.append(block)
        if first == 1 and weight:
            # The value of any partition is one of the optimum: no part of it takes longer than that value / weight.
            worth = min(INFEASIBLE, _uniform_objective(block, weight) // weight + 1)
        if not (block < worth).any():
            break
    return _Intervals(np.concatenate(blocks, axis=1), worth)


def padded_lengths(lengths: IntArray, multiple: int) -> IntArray:
    """Lengths rounded up to a multiple."""
    padded: IntArray = -(-lengths // multiple) * multiple
    return padded


def _evaluate_distinct(
    choices: Mapping[Recompute, ShapeEvaluate],
    rows: IntArray,
    encoder_len: IntArray,
    decoder_len: IntArray,
    max_bytes: int | None,
) -> IntArray:
    """Times of the fastest choice; every distinct shape is evaluated once."""
    if not len(rows):
        return rows
    key = (rows * (int(encoder_len.max()) + 1) + encoder_len) * (int(decoder_len.max()) + 1) + decoder_len
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    shapes = (rows[first], encoder_len[first], decoder_len[first])
    time_ns, _ = fastest((evaluate(*shapes) for evaluate in choices.values()), max_bytes)
    spread: IntArray = time_ns[back.reshape(-1)]
    return spread


def fastest(answers: Iterable[tuple[IntArray, IntArray]], max_bytes: int | None) -> tuple[IntArray, IntArray]:
    """Of (times, bytes) of the same shapes under several kinds of recomputation: each shape's least time within the
    byte cap (INFEASIBLE for none), and which kind has it (the first of equals)."""
    cap = INFEASIBLE - 1 if max_bytes is None else min(max_bytes, INFEASIBLE - 1)
    times = [
        np.where((num_bytes > cap) | (time_ns >= INFEASIBLE), INFEASIBLE, time_ns).astype(np.int64, copy=False)
        for time_ns, num_bytes in answers
    ]
    table = np.stack(times)
    return table.min(axis=0), table.argmin(axis=0)


def _uniform_objective(block: IntArray, weight: int) -> int:
    """The objective of the best cut into equal row counts (greedily fewer where a range does not fit)."""
    best = 1 << 61
    num_samples, widest = block.shape
    rows = 1
    while rows <= widest:
        total = most = 0
        end = num_samples
        while end > 0:
            fits = np.flatnonzero(block[end - 1, : min(rows, end)] < INFEASIBLE)
            cost = int(block[end - 1, fits[-1]])
            total, most, end = total + cost, max(most, cost), end - int(fits[-1]) - 1
        best = min(best, total + weight * most)
        rows *= 2
    return best


def refusal(
    sample: SampleLength, choices: Mapping[Recompute, ShapeEvaluate], encoder_len: int, decoder_len: int, caps: Caps
) -> str:
    """Why a sample cannot be a micro-batch by itself, and what to do."""
    name = (
        f"sample {sample.index} ({sample.encoder} + {sample.decoder} positions, {encoder_len} + {decoder_len} padded)"
    )
    if caps.max_tokens is not None and encoder_len + decoder_len > caps.max_tokens:
        return (
            f"{name} is above the cap of {caps.max_tokens} tokens a micro-batch: raise the cap or truncate the sample"
        )
    one = np.ones(1, np.int64)
    answers = [evaluate(one, one * encoder_len, one * decoder_len) for evaluate in choices.values()]
    needed = min(int(num_bytes[0]) for _, num_bytes in answers)
    if needed >= INFEASIBLE or caps.max_bytes is None or needed <= caps.max_bytes:
        return f"{name} cannot run by itself on these costs (outside the measured grid?): truncate it or recompute more"
    return (
        f"{name} needs {needed} B by itself but {caps.max_bytes} B is the limit: recompute more, raise tp or truncate"
    )
