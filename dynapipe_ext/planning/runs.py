"""Runs of ordered samples that may become micro-batches: their shapes, what these cost, and where to cut first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import MicroBatch, Recompute
from dynapipe_ext.planning.padded import Caps, ShapeCosts, bottleneck, padded_lengths, refusal, shape_evaluate
from dynapipe_ext.planning.partition import best_partition, cut_again

ShapeIndex = npt.NDArray[np.int32]
Cut = tuple[int, int, int]  # first sample, end, index of the kind of recomputation

_LARGER = 2.5  # every block of row counts ends at so many times the one before


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Samples in order, and every run of them worth a look.

    `shapes[j, r - 1]` is the shape of the run of r samples that ends at sample j, or -1 where it breaks a cap or takes
    too long; `kind_costs` price each shape under every kind of recomputation.
    """

    order: tuple[SampleLength, ...]
    kinds: tuple[Recompute, ...]
    kind_costs: tuple[MicroBatchCosts, ...]
    shapes: ShapeIndex
    caps: Caps

    def micro_batch(self, cut: Cut) -> MicroBatch:
        first, end, kind = cut
        return MicroBatch(self.order[first:end], recompute=self.kinds[kind], pad_multiple=self.caps.pad_multiple)

    def cuts(self, *, pp: int, dp: int, min_in_flight: int, equal_counts: bool = False) -> list[Cut]:
        """The runs, in turn, that minimise sum(t) / dp + (pp - 1) max(t) over bottleneck times t, each under the
        fastest kind that lets `min_in_flight` of its like be held (see `bottleneck`); at least one a replica, under
        `equal_counts` in a multiple of dp.

        Errors: PlanError where a sample does not fit so often, or counts cannot be made equal.
        """
        times, kinds = self._fastest(min_in_flight)
        costs = np.where(self.shapes >= 0, times[self.shapes], INFEASIBLE)
        if (costs[:, 0] >= INFEASIBLE).any():
            worst = int(np.flatnonzero(costs[:, 0] >= INFEASIBLE)[0])
            raise PlanError(
                f"sample {self.order[worst].index} does not fit {min_in_flight} times into {self.caps.max_bytes} B:"
                " hold fewer in flight, recompute more or raise tp"
            )
        parts = best_partition(costs, dp * (pp - 1))
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
        each = [bottleneck(costs)[0] for costs in self.kind_costs]
        return [int(each[kind][self.shapes[end - 1, end - first - 1]]) for first, end, kind in cuts]

    def _fastest(self, min_in_flight: int) -> tuple[IntArray, IntArray]:
        return _fastest(self.kind_costs, self.caps, min_in_flight)

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
    order: Sequence[SampleLength], costs: ShapeCosts, kinds: Sequence[Recompute], caps: Caps, *, weight: int
) -> Runs:
    """The runs within the caps that take no longer than twice the time around which cutting evenly is best.

    Even cuts are judged by sum(t) + `weight` x max(t). Assumes that a run which breaks a cap or takes too long still
    does so with more samples. Raises PlanError, naming the sample, if one does not fit by itself.
    """
    encoder = padded_lengths(np.array([s.encoder for s in order], np.int64), caps.pad_multiple)
    decoder = padded_lengths(np.array([s.decoder for s in order], np.int64), caps.pad_multiple)
    most_ns = 0
    best = 1 << 62
    while True:
        table = _Table(encoder, decoder, costs, kinds, caps, most_ns)
        if not most_ns:
            singles = table.times[table.shapes[:, 0]]
            if (bad := np.flatnonzero(singles >= INFEASIBLE)).size:
                i = int(bad[0])
                choices = {kind: shape_evaluate(costs, recompute=kind) for kind in kinds}
                raise PlanError(refusal(order[i], choices, int(encoder[i]), int(decoder[i]), caps))
            most_ns = 2 * int(singles.max())
            continue
        value = table.even_cuts(most_ns, weight)
        if value >= min(best, table.even_cuts(most_ns // 2, weight)):
            return Runs(
                order=tuple(order),
                kinds=tuple(kinds),
                kind_costs=tuple(table.kind_costs),
                shapes=table.shapes,
                caps=caps,
            )
        best, most_ns = value, 2 * most_ns


class _Table:
    """Shapes of runs up to `most_ns` (0: of one sample), with their costs."""

    def __init__(
        self,
        encoder: IntArray,
        decoder: IntArray,
        costs: ShapeCosts,
        kinds: Sequence[Recompute],
        caps: Caps,
        most_ns: int,
    ) -> None:
        self.encoder, self.decoder, self.caps = encoder, decoder, caps
        count = len(encoder)
        # Without a decoder side all runs that end at samples of one length are alike but for their rows.
        alike = not decoder.any() and bool((np.diff(encoder) >= 0).all())
        _, first, member = np.unique(
            encoder if alike else np.arange(count), return_index=True, return_inverse=True
        )
        last = np.append(first[1:], count) - 1 if alike else np.arange(count)  # of the samples of each class
        alive = np.arange(len(last))
        pieces: list[list[MicroBatchCosts]] = [[] for _ in kinds]
        columns: list[ShapeIndex] = []
        times: list[IntArray] = []
        known = 0
        for rows, longest in self._blocks(last, most_ns):
            if not len(alive):
                break
            block = np.full((len(last), len(rows)), -1, np.int32)
            where = [(k, alive[last[alive] >= r - 1]) for k, r in enumerate(rows)]
            sizes = np.concatenate(
                [np.stack([np.full(len(c), rows[k]), *longest[k][:, last[c]]]) for k, c in where], axis=1
            )
            priced = [costs.evaluate_shapes(*sizes, kind) for kind in kinds]
            time_ns, _ = _fastest(priced, caps, 1)
            time_ns[sizes[0] * (sizes[1] + sizes[2]) > (caps.max_tokens or INFEASIBLE)] = INFEASIBLE
            keep = (time_ns <= most_ns) | (sizes[0] == 1) if most_ns else np.ones(len(time_ns), bool)
            index = np.where(keep, known + np.cumsum(keep) - 1, -1)
            at = 0
            for k, classes in where:
                block[classes, k] = index[at : at + len(classes)]
                at += len(classes)
            for kind_pieces, piece in zip(pieces, priced, strict=True):
                kind_pieces.append(piece.take(np.flatnonzero(keep)))
            times.append(time_ns[keep])
            known += int(keep.sum())
            columns.append(block)
            alive = alive[(block[alive, -1] >= 0)]
        self.kind_costs = [MicroBatchCosts.join(piece, like=piece[0]) for piece in pieces]
        self.times = np.concatenate(times)
        shapes = np.concatenate(columns, axis=1)[member]
        width = int(np.flatnonzero((shapes >= 0).any(axis=0))[-1]) + 1
        rows_at = np.arange(1, width + 1) <= np.arange(1, count + 1)[:, None]
        self.shapes: ShapeIndex = np.ascontiguousarray(np.where(rows_at, shapes[:, :width], -1).astype(np.int32))

    def _blocks(self, last: IntArray, most_ns: int) -> Iterator[tuple[list[int], list[IntArray]]]:
        """Row counts block by block, with the longest (encoder, decoder) of the runs that end at each sample."""
        count = len(self.encoder)
        longest = np.stack([self.encoder, self.decoder])
        own, low = longest, 1
        while low <= (count if most_ns else 1):
            high = min(count if most_ns else 1, max(low + 1, int(low * _LARGER)))
            rows, each = list(range(low, high + 1)), []
            for r in rows:
                if r > 1:
                    longest = longest.copy()
                    np.maximum(longest[:, r - 1 :], own[:, : count - r + 1], out=longest[:, r - 1 :])
                each.append(longest)
            yield rows, each
            low = high + 1

    def even_cuts(self, most_ns: int, weight: int) -> int:
        """sum + weight x max where runs are cut from the end as long as they take at most `most_ns`."""
        costs = np.where(self.shapes >= 0, self.times[self.shapes], INFEASIBLE)
        fits = costs <= most_ns
        longest = np.where(fits.any(axis=1), costs.shape[1] - fits[:, ::-1].argmax(axis=1), 1)
        total = most = 0
        end = len(costs)
        while end > 0:
            rows = int(longest[end - 1])
            cost = int(costs[end - 1, rows - 1])
            total, most, end = total + cost, max(most, cost), end - rows
        return total + weight * most


def _fastest(
    kind_costs: Sequence[MicroBatchCosts], caps: Caps, min_in_flight: int
) -> tuple[IntArray, IntArray]:
    """Bottleneck time of each shape under its fastest kind within the byte cap (INFEASIBLE for none), and the kind."""
    cap = INFEASIBLE - 1 if caps.max_bytes is None else min(caps.max_bytes, INFEASIBLE - 1)
    times = []
    for costs in kind_costs:
        time_ns, num_bytes = bottleneck(costs, min_in_flight)
        times.append(np.where((num_bytes > cap) | (time_ns >= INFEASIBLE), INFEASIBLE, time_ns))
    table = np.stack(times)
    return table.min(axis=0), table.argmin(axis=0)
