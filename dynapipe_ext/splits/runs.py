"""Runs of ordered samples that may become micro-batches: their shapes, what these cost, and where to cut first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts, PricesShapes
from dynapipe_ext.errors import PlanError
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import MicroBatch, Recompute
from dynapipe_ext.splits.padded import Caps, bottleneck, fastest, padded_lengths, refusal, shape_evaluate
from dynapipe_ext.splits.partition import best_partition, cut_again

ShapeIndex = npt.NDArray[np.int32]
Cut = tuple[int, int, int]  # first sample, end, index of the kind of recomputation

_BOUNDS = 16  # bounds on t that are tried up to the longest sample's time: these cuts are only a start
_FEW = 64  # samples whose runs may all be priced
_LARGER = 2  # every block of row counts ends at so many times the one before


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Samples in order, and every run of them worth a look.

    `shapes[j, r - 1]` is the shape of the run of r samples that ends at sample j, or -1 where it breaks a cap or takes
    too long; `sizes` (3, shapes) are the rows and padded lengths of each shape, `kind_costs` price it under every kind
    of recomputation.
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

    def cuts(self, *, pp: int, dp: int, min_in_flight: int, equal_counts: bool = False) -> list[Cut]:
        """The runs, in turn, of about least sum(t) / dp + (pp - 1) max(t) over bottleneck times t, each under the
        fastest kind that lets `min_in_flight` of its like be held (see `bottleneck`); at least one a replica, under
        `equal_counts` in a multiple of dp.

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
        wanted = max(dp, len(parts.ends))
        if equal_counts:
            wanted = min(-(-wanted // dp), len(self.order) // dp) * dp
        ends = list(parts.ends) if len(parts.ends) > wanted else list(cut_again(costs, parts, wanted).ends)
        while len(ends) > wanted:
            ends = self._merged(ends, costs, dp)
        bounds = list(pairwise([0, *ends]))
        return [(a, b, int(kinds[self.shapes[b - 1, b - a - 1]])) for a, b in bounds]

    def times(self, cuts: Sequence[Cut]) -> list[int]:
        """Bottleneck time of each run under its kind, ns."""
        first, end, kind = np.array(cuts, np.int64).reshape(-1, 3).T
        chosen = MicroBatchCosts.choose(self.kind_costs, kind, self.shapes[end - 1, end - first - 1])
        times: list[int] = bottleneck(chosen, stage_ranks=self.stage_ranks)[0].tolist()
        return times

    def _merged(self, ends: list[int], costs: IntArray, dp: int) -> list[int]:
        """The two neighbours that take least time as one, as one."""
        merged = [
            (int(costs[c - 1, c - a - 1]) if c - a <= costs.shape[1] else INFEASIBLE, k)
            for k, (a, c) in enumerate(zip([0, *ends], ends[1:], strict=False))
        ]
        time_ns, k = min(merged, default=(INFEASIBLE, 0))
        if time_ns >= INFEASIBLE:
            raise PlanError(
                f"{len(self.order)} samples make {len(ends)} micro-batches, which do not divide over {dp} replicas of"
                f" equal counts, and no two of them fit into one (max_bytes {self.caps.max_bytes}, max_tokens"
                f" {self.caps.max_tokens}): enlarge the global batch, raise the caps or let counts differ"
            )
        return [*ends[:k], *ends[k + 1 :]]


def price_runs(
    order: Sequence[SampleLength],
    costs: PricesShapes,
    kinds: Sequence[Recompute],
    caps: Caps,
    *,
    weight: int,
    equal_counts: bool = False,
    least_work: bool = False,
    stage_ranks: tuple[int, ...] | None = None,
) -> Runs:
    """The runs within the caps that take at most a quarter longer than the time around which even cuts are best, or
    twice as long under `equal_counts`, which may have to join two, and for the `least_work`, which joins what it can;
    for that, of few samples, all.

    Even cuts are judged by sum(t) + `weight` x max(t). Assumes that a run which breaks a cap or takes too long still
    does so with more samples. Raises PlanError, naming the sample, if one does not fit by itself.
    """
    encoder = padded_lengths(np.array([s.encoder for s in order], np.int64), caps.pad_multiple)
    decoder = padded_lengths(np.array([s.decoder for s in order], np.int64), caps.pad_multiple)
    table = _Table(encoder, decoder, costs, kinds, caps, stage_ranks)
    singles = table.times[table.cells[0][table.member]]
    if (bad := np.flatnonzero(singles >= INFEASIBLE)).size:
        i = int(bad[0])
        choices = {kind: shape_evaluate(costs, recompute=kind) for kind in kinds}
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
    return Runs(
        order=tuple(order),
        kinds=tuple(kinds),
        kind_costs=tuple(MicroBatchCosts.join(pieces, like=pieces[0]) for pieces in table.priced),
        shapes=table.shapes(most_ns),
        sizes=np.concatenate(table.sizes, axis=1),
        caps=caps,
        stage_ranks=stage_ranks,
    )


class _Table:
    """Shapes of runs with their costs, from one sample up."""

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
        # Without a decoder side all runs that end at samples of one length are alike but for their rows.
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
        """Price all runs that take no longer than that; 0: of one sample."""
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
                sizes.append(np.stack([np.full(len(classes), rows), *longest[:, ends]]))
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
        known = len(self.times)
        shapes = known + (np.arange(len(time_ns)) if back is None else back.reshape(-1))
        at = 0
        for row, classes in places:
            self.cells[row][classes] = shapes[at : at + len(classes)]
            at += len(classes)
        self.times = np.concatenate([self.times, time_ns])
        self.sizes.append(sizes)
        for pieces, piece in zip(self.priced, priced, strict=True):
            pieces.append(piece)

    def _cells(self, most_ns: int) -> tuple[ShapeIndex, IntArray]:
        """(rows, classes): the shapes of runs that take no longer than that, and of single samples; and their times."""
        cells = np.array(self.cells)
        times = np.where(cells >= 0, self.times[cells], INFEASIBLE)
        late = times > most_ns
        late[0] = False
        cells[late], times[late] = -1, INFEASIBLE
        return cells, times

    def shapes(self, most_ns: int) -> ShapeIndex:
        """(samples, rows): see `Runs`."""
        cells, _ = self._cells(most_ns)
        cells = cells[: int(np.flatnonzero((cells >= 0).any(axis=1))[-1]) + 1]
        shapes = np.ascontiguousarray(cells.T[self.member])
        for rows in range(2, min(shapes.shape) + 1):
            shapes[: rows - 1, rows - 1] = -1  # no run reaches back beyond the first sample
        shapes[:, len(shapes) :] = -1
        return shapes

    def even_cuts(self, most_ns: int, weight: int) -> int:
        """sum + weight x max where runs are cut from the end, each as long as `most_ns` lets it be."""
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
