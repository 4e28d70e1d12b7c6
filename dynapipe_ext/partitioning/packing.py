"""Packed rows: samples end to end, balanced by cost. Bottleneck time: F + B of a row on its busiest pipeline rank."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from dynapipe_ext.batch.micro_batches import Attention, MicroBatch, Recompute, SampleLength
from dynapipe_ext.costs.model import CostModel, IntArray, find_bottleneck
from dynapipe_ext.errors import PlanError

# Micro-batches -> (bottleneck ns, bytes) of each. Raises PlanError for one that cannot run.
MicroBatchEvaluate = Callable[[Sequence[MicroBatch]], tuple[IntArray, IntArray]]
Row = list[SampleLength]

MOST_TRIES = 8  # numbers of rows, about, that are tried near the best one, and as many that the search begins with
GRADES = (0.8, 0.85)  # sizes of graded rows over the next larger ones: which is better, depends on the lengths
_WORSE = 1.02  # numbers of rows are tried until their lower estimate is this much above the best upper one
_FULL = 0.97  # of a graded row's positions are filled, so that documents find their places
_SMALLEST = 0.1  # of a full row
_HALVED = (2, 4)  # rows per replica
_MANY, _ENDS = 16, 6  # rows of documents next to pieces: from this many on they are joined, except this many
_MOST_DOCUMENTS = 1 << 18  # in the rows that say what documents cost: more take seconds and say the same


def make_evaluate(costs: CostModel, *, min_in_flight: int = 1) -> MicroBatchEvaluate:
    """Return a function from rows to (bottleneck ns, bytes for `min_in_flight`) of each, by `find_bottleneck`."""
    return lambda micro_batches: find_bottleneck(costs.evaluate(micro_batches), min_in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPackingPolicy:
    """Settings of packed rows: at most `max_tokens` positions per side, padding included. The other fields are those of
    the `MicroBatch` that each row becomes."""

    max_tokens: int
    pad_multiple: int = 1
    recompute: Recompute = "none"
    attention: Attention = "document"

    @property
    def room(self) -> int:
        """Maximum positions that samples fill on a side of a row, so that rounding up stays within `max_tokens`."""
        return self.max_tokens // self.pad_multiple * self.pad_multiple

    def make_row(self, samples: Sequence[SampleLength]) -> MicroBatch:
        """Return a packed micro-batch of these samples, in the order of their indices."""
        return MicroBatch(sort_documents(samples), "packed", self.recompute, self.attention, self.pad_multiple)

    def check(self, samples: Sequence[SampleLength]) -> None:
        """Raise PlanError, naming the sample, if a side of one is longer than a row."""
        for sample in samples:
            if max(sample.encoder, sample.decoder) > self.room:
                raise PlanError(
                    f"sample {sample.index} has {max(sample.encoder, sample.decoder)} positions but a packed row has"
                    f" {self.room} (max_tokens {self.max_tokens}, pad_multiple {self.pad_multiple}): raise max_tokens"
                    " or truncate the sample"
                )


def sort_documents(documents: Sequence[SampleLength]) -> tuple[SampleLength, ...]:
    """Return samples in the order in which a row holds them: by `index`, then by `start`."""
    return tuple(sorted(documents, key=attrgetter("index", "start")) if len(documents) > 1 else documents)


@dataclass(frozen=True, slots=True, eq=False)
class RowPackings:
    """Packings of one batch into various numbers of rows under the policy `rule`, each made only once. `weights`: ns of
    each sample (`compute_document_costs`). `sort_by_weight`: sample indices by falling weight."""

    samples: Sequence[SampleLength]
    rule: RowPackingPolicy
    weights: list[int]
    sort_by_weight: list[int]
    _made: dict[object, tuple[MicroBatch, ...] | None] = field(default_factory=dict)
    _single: dict[int, MicroBatch] = field(default_factory=dict)  # rows of one sample, by its identity

    @classmethod
    def from_samples(
        cls, samples: Sequence[SampleLength], evaluate: MicroBatchEvaluate, rule: RowPackingPolicy
    ) -> RowPackings:
        """Return packings of samples under `rule`. Raises PlanError for a sample that is too long or has no price."""
        rule.check(samples)
        weights = compute_document_costs(samples, evaluate, rule)
        return cls(samples, rule, weights, sort_by_weight(samples, weights))

    @property
    def least(self) -> int:
        """The fewest rows possible: positions of the longer side over positions that fit in a row, rounded up."""
        sides = sum(s.encoder for s in self.samples), sum(s.decoder for s in self.samples)
        return max(1, *(-(-positions // self.rule.room) for positions in sides))

    def with_count(self, count: int) -> tuple[MicroBatch, ...] | None:
        """Return the batch in `count` rows, the same tuple at every call; None if `pack` finds no such rows."""
        if count not in self._made:
            rows = pack(self.samples, self.weights, count, self.rule.room, self.sort_by_weight)
            self._made[count] = None if rows is None else tuple(map(self._make_row, rows))
        return self._made[count]

    def with_grades(self, step: float, dp: int, room: int) -> tuple[MicroBatch, ...] | None:
        """Return rows of graded loads, the largest about `room` positions long; None if a sample finds no row. `step`
        and `dp` are those of `list_graded_sizes`. The same tuple is returned at every call."""
        if (step, dp, room) not in self._made:
            tokens, whole = sum(s.tokens for s in self.samples), sum(self.weights)
            sizes = list_graded_sizes(whole, max(1, int(_FULL * whole * room / tokens)), step, dp)
            # A smaller row counts as if it held the difference already.
            starts = [(sizes[0] - size, 0, 0) for size in sizes]
            rows = fill_lightest(self.samples, self.weights, self.sort_by_weight, starts, self.rule.room)
            self._made[step, dp, room] = None if rows is None else tuple(self._make_row(row) for row in rows if row)
        return self._made[step, dp, room]

    def list_graded_rooms(self) -> Iterator[int]:
        """Yield positions to try for the largest graded row: of a full row, halved while the longest sample fits."""
        longest = max(max(s.encoder, s.decoder) for s in self.samples)
        room = min(self.rule.room, sum(s.tokens for s in self.samples))
        while room >= longest:
            yield room
            room //= 2

    def _make_row(self, samples: Row) -> MicroBatch:
        if len(samples) > 1:
            return self.rule.make_row(samples)
        key = id(samples[0])  # `samples` keeps them
        if key not in self._single:
            self._single[key] = self.rule.make_row(samples)
        return self._single[key]

    def list_finalists(
        self,
        evaluate: MicroBatchEvaluate,
        *,
        pp: int,
        dp: int,
        max_bytes: int | None,
        equal_counts: bool,
        is_split: bool = False,
        tries: int = MOST_TRIES,
    ) -> list[tuple[MicroBatch, ...]]:
        """Return packings that may take the least time, of about `tries` numbers of rows, up to one row per sample.

        Two estimates judge a number of rows: sum(t) + dp (pp - 1) x the least or the largest t, t being a row's
        bottleneck time. The least t counts if enough short rows fill and drain the pipeline, the largest if all rows
        are alike. With `is_split`, W fills the waits, so the number of least sum(t) stays, too. Numbers that grow by
        half (twofold for one try) are tried while that may pay, then about `tries` near the best.

        A number is ruled out by rows above `max_bytes` or without a price. It is at least `dp`, at most the number of
        samples, and under `equal_counts` a multiple of `dp`. Raises PlanError, for the largest number, if none is left.
        """
        most = len(self.samples) // dp * dp if equal_counts else len(self.samples)
        estimates: dict[int, tuple[int, int, int]] = {}
        estimate = partial(self._estimate, estimates, evaluate, pp=pp, dp=dp, max_bytes=max_bytes)

        def find_best(column: int) -> int:
            return min(estimates, key=lambda count: (estimates[count][column], count))

        coarse = list(_list_counts(self.least, most, dp, 2 if tries > 1 else 1))
        refusal = estimate(coarse)
        if not estimates:  # that of one row per sample, the last one tried
            assert refusal is not None
            raise refusal
        estimate([n for count in sorted({find_best(1), find_best(2)}) for n in _list_between(coarse, count, dp, tries)])
        ends = find_best(1), find_best(2)
        close = sorted({*ends, *(count for count in coarse if count in estimates and min(ends) < count < max(ends))})
        chosen = [find_best(2), *close[:: -(-len(close) // tries)], close[-1], *([find_best(0)] if is_split else [])]
        return [rows for count in dict.fromkeys(chosen) if (rows := self.with_count(count)) is not None]

    def _estimate(
        self,
        estimates: dict[int, tuple[int, int, int]],
        evaluate: MicroBatchEvaluate,
        counts: Sequence[int],
        *,
        pp: int,
        dp: int,
        max_bytes: int | None,
    ) -> PlanError | None:
        """Add (the sum, with the least t, with the largest t) of numbers of rows as long as that may pay; return the
        last refusal."""
        refusal = None
        for count in counts:
            try:
                time_ns = self._price(count, evaluate, dp=dp, max_bytes=max_bytes)
            except PlanError as error:
                refusal = error
                continue
            whole, weight = int(time_ns.sum()), dp * (pp - 1)
            estimates[count] = whole, whole + weight * int(time_ns.min()), whole + weight * int(time_ns.max())
            if estimates[count][1] > _WORSE * min(high for _, _, high in estimates.values()):
                break
        return refusal

    def _price(self, count: int, evaluate: MicroBatchEvaluate, *, dp: int, max_bytes: int | None) -> IntArray:
        """Return the time of each of `count` rows. Raises PlanError if they are too tight or cannot run."""
        rows = self.with_count(count)
        if rows is None:  # one row per sample always packs, but under equal counts the last rows may have to be shared
            raise PlanError(
                f"no multiple of {dp} replicas from {self.least} to {count} rows of {self.rule.room} positions holds"
                f" these {len(self.samples)} samples: raise max_tokens, or let counts differ"
            )
        time_ns, num_bytes = evaluate(rows)  # raises for a row outside a measured grid: shorter rows may be inside
        if max_bytes is None or int(num_bytes.max()) <= max_bytes:
            return time_ns
        samples = rows[int(num_bytes.argmax())].samples
        longest = max(samples, key=attrgetter("tokens"))
        row, move = f"sample {longest.index} with {longest.tokens:,} positions", "recompute more, or raise tp"
        if len(samples) > 1:
            row, move = f"a packed row of {len(samples)} samples, the longest {row},", f"lower max_tokens, {move}"
        raise PlanError(f"{row} needs {num_bytes.max():,} B but {max_bytes:,} B is the limit: {move} or the limit")


def _list_counts(least: int, most: int, dp: int, part: int) -> Iterator[int]:
    """Yield numbers of rows from `least` to `most`, multiples of dp that grow by one part in `part`; the last is
    `most`."""
    count = min(most, -(-least // dp) * dp)
    while count < most:
        yield count
        count += max(dp, count // part // dp * dp)
    yield most


def _list_between(tried: Sequence[int], best: int, dp: int, most: int) -> list[int]:
    """Return about `most` multiples of dp, evenly spread, between the neighbours of the best number tried."""
    at = tried.index(best)
    low, high = tried[max(0, at - 1)], tried[min(len(tried) - 1, at + 1)]
    counts = range(-(-(low + 1) // dp) * dp, high, dp)
    return [count for count in counts[:: -(-len(counts) // most) or 1] if count not in tried]


def compute_document_costs(
    samples: Sequence[SampleLength], evaluate: MicroBatchEvaluate, rule: RowPackingPolicy
) -> list[int]:
    """Return what each sample costs in ns: the bottleneck time of a full row of equal samples, divided by their number.
    So a short sample does not bear the overhead of a micro-batch of its own.

    If `evaluate` cannot price such rows, or those of all lengths hold over 2^18 samples, rows are halved, down to the
    longest sample. Raises PlanError if that has no price either.
    """
    shapes = {(s.encoder, s.decoder, s.first): s for s in samples}
    longest = max(max(shape) for shape in shapes)
    row_len = rule.room
    while sum(row_len // max(shape) for shape in shapes) > max(_MOST_DOCUMENTS, len(shapes)):
        row_len //= 2
    while True:
        rows = [
            MicroBatch((sample,) * max(1, row_len // max(shape)), "packed", rule.recompute, rule.attention)
            for shape, sample in shapes.items()
        ]
        try:
            time_ns, _ = evaluate(rows)
            break
        except PlanError:
            if row_len <= longest:
                raise
            row_len = max(longest, row_len // 2)
    each = {shape: int(t) // len(row.samples) for shape, t, row in zip(shapes, time_ns, rows, strict=True)}
    return [each[s.encoder, s.decoder, s.first] for s in samples]


def list_graded_sizes(whole: int, full: int, step: float, dp: int) -> list[int]:
    """Return sizes of rows that hold at least `whole` together, the largest first; in the unit of `whole`, such as ns.

    A multiple of dp rows have size `full`. Each smaller size, about `step` times the one before, has two rows per
    replica: one for each end of its order. If all smaller rows together exceed `whole`, their largest sizes are left
    out. A pipeline fills and drains fast if sizes change slowly.

    >>> list_graded_sizes(100, 10, 0.8, 1)
    [10, 10, 10, 10, 8, 8, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1]
    """
    sizes = [full]
    while (smaller := int(full * step ** len(sizes))) >= max(1, _SMALLEST * full):
        sizes.append(smaller)
    smaller_ones = sizes[1:]
    while smaller_ones and 2 * dp * sum(smaller_ones) > whole:
        del smaller_ones[0]
    num_full = -(-max(0, whole - 2 * dp * sum(smaller_ones)) // (full * dp)) * dp
    return [full] * num_full + [size for size in smaller_ones for _ in range(2 * dp)]


def sort_by_weight(samples: Sequence[SampleLength], weights: Sequence[int]) -> list[int]:
    """Return the indices of samples by falling weight; among equal weights the longest sample comes first."""
    return sorted(range(len(samples)), key=lambda i: (-weights[i], -samples[i].tokens, i))


def pack(
    samples: Sequence[SampleLength], weights: Sequence[int], num_rows: int, room: int, order: Sequence[int]
) -> list[Row] | None:
    """Return `num_rows` rows of balanced weight, none empty, none above `room` positions per side; None if it fails.

    Samples in `order` (indices, the most expensive first) go into the least loaded row with enough free positions. If
    one finds no row, all go longest first into the fullest row that holds them (best fit), which packs tighter.
    """
    if num_rows > len(samples):
        return None
    firsts = [(weights[i], samples[i].encoder, samples[i].decoder) for i in order[:num_rows]]
    balanced = fill_lightest(samples, weights, order[num_rows:], firsts, room)
    if balanced is not None:
        return [[samples[i], *row] for i, row in zip(order, balanced, strict=False)]
    rows = pack_best_fit(samples, room, num_rows)
    return rows if len(rows) == num_rows else None


def fill_lightest(
    samples: Sequence[SampleLength],
    weights: Sequence[int],
    order: Sequence[int],
    starts: Sequence[tuple[int, int, int]],
    room: int,
) -> list[Row] | None:
    """Put each sample, in `order` (indices), into the row of least load with enough free positions on both sides.

    `starts`: the load of each row at the start, in the unit of `weights`, and its filled encoder and decoder positions,
    of `room` on each side. Returns the samples that each row receives; None if a sample finds no row.
    """
    rows: list[Row] = [[] for _ in starts]
    filled = [[encoder, decoder] for _, encoder, decoder in starts]
    heap = [(load, row) for row, (load, _, _) in enumerate(starts)]
    heapq.heapify(heap)
    aside: list[tuple[int, int, int]] = []  # (-free, load, row) of rows without room for a longer sample
    for i in order:
        sample, passed = samples[i], []
        while aside and -aside[0][0] >= sample.encoder:
            heapq.heappush(heap, heapq.heappop(aside)[1:])
        while heap:
            load, row = heapq.heappop(heap)
            free = room - filled[row][0]
            if free < sample.encoder:
                heapq.heappush(aside, (-free, load, row))
            elif filled[row][1] + sample.decoder > room:
                passed.append((load, row))
            else:
                rows[row].append(sample)
                filled[row][0] += sample.encoder
                filled[row][1] += sample.decoder
                passed.append((load + weights[i], row))
                break
        else:
            return None
        for entry in passed:
            heapq.heappush(heap, entry)
    return rows


def pack_best_fit(samples: Sequence[SampleLength], room: int, num_rows: int = 1) -> list[Row]:
    """Pack samples, the longest first, each into the fullest row with enough free positions (best-fit decreasing).

    The `num_rows` longest samples begin a row each; more rows are opened for samples that fit into none. No sample may
    be longer than `room` on either side.
    """
    order = sorted(samples, key=lambda s: (-max(s.encoder, s.decoder), -s.tokens, s.index, s.start))
    decoder_room = room if any(s.decoder for s in samples) else 0
    rows: list[Row] = []
    fullest: list[tuple[int, int, int, int]] = []  # (free positions of both sides, row, free encoder, free decoder)
    for number, sample in enumerate(order):
        row, encoder, decoder = len(rows), room, decoder_room
        for at in range(bisect_left(fullest, (sample.tokens,)), len(fullest)) if number >= num_rows else ():
            if fullest[at][2] >= sample.encoder and fullest[at][3] >= sample.decoder:
                _, row, encoder, decoder = fullest.pop(at)
                break
        else:
            rows.append([])
        rows[row].append(sample)
        encoder, decoder = encoder - sample.encoder, decoder - sample.decoder
        insort(fullest, (encoder + decoder, row, encoder, decoder))
    return rows


def list_finer_splits(
    replicas: Sequence[Sequence[MicroBatch]], *, equal_counts: bool, max_tokens: int
) -> Iterator[list[list[MicroBatch]]]:
    """Yield variants of the replicas: rows joined in pairs up to `max_tokens` (0: no limit); each replica's 2 shortest
    rows halved; then its 4 shortest. Under `equal_counts`, only those with equally many rows per replica."""
    joined = [join_rows(rows, max_tokens) for rows in replicas]
    splits = [joined] if any(len(few) < len(rows) for few, rows in zip(joined, replicas, strict=True)) else []
    for split in (*splits, *([halve_rows(rows, count) for rows in replicas] for count in _HALVED)):
        if not equal_counts or len({*map(len, split)}) == 1:
            yield split


def halve_rows(micro_batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """Return the rows with the `count` shortest, of those with several whole samples, divided into two rows each.

    A row's samples go, the longest first, to the half with fewer positions. Rows with a piece of a long sample stay.

    >>> row = MicroBatch(tuple(SampleLength(i, n) for i, n in enumerate((5, 3, 1))), "packed")
    >>> [m.documents for m in halve_rows([row], 1)]
    [(5,), (3, 1)]
    """
    several = [i for i, m in enumerate(micro_batches) if len(m.samples) > 1 and m.attention != "carried"]
    chosen = set(sorted(several, key=lambda i: (micro_batches[i].encoder_len, i))[:count])
    rows: list[MicroBatch] = []
    for i, row in enumerate(micro_batches):
        lengths = [s.encoder for s in row.samples]
        order = sorted(range(len(lengths)), key=lambda j: (-lengths[j], row.samples[j].index))
        halves = fill_lightest(row.samples, lengths, order, [(0, 0, 0)] * 2, sum(lengths)) if i in chosen else None
        rows += [replace(row, samples=tuple(half)) for half in halves] if halves else [row]
    return rows


def join_rows(micro_batches: Sequence[MicroBatch], max_tokens: int) -> list[MicroBatch]:
    """Return the rows, those of whole samples joined in pairs, so that the overhead of a row is paid less often. A few
    of the shortest stay, as they fill and drain the pipeline.

    All rows stay if they are few, or if no sample is in pieces. No row becomes longer than the longest with a piece, or
    than `max_tokens` (0: no limit).
    """
    pieces = [m for m in micro_batches if m.attention == "carried"]
    short = sorted((m for m in micro_batches if m.attention != "carried"), key=attrgetter("encoder_len"))
    if not pieces or len(short) < _MANY:
        return list(micro_batches)
    longest = max(m.encoder_len for m in pieces)
    joined, rest = short[:_ENDS], short[_ENDS:]
    while len(rest) > 1:
        first, last = rest.pop(0), rest.pop()
        both = replace(last, samples=(*last.samples, *first.samples))
        fits = both.encoder_len <= min(longest, max_tokens or longest) and first.recompute == last.recompute
        joined += [both] if fits else [first, last]
    return [*joined, *rest, *pieces]
