"""Samples of a global batch as packed micro-batches: documents end to end, balanced by what they cost."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from dynapipe_ext.batch.micro_batches import Attention, MicroBatch, Recompute, SampleLength
from dynapipe_ext.costs.model import CostModel, IntArray, bottleneck
from dynapipe_ext.errors import PlanError

# Micro-batches -> (bottleneck ns, bytes) of each. Raises PlanError for one that cannot run.
MicroBatchEvaluate = Callable[[Sequence[MicroBatch]], tuple[IntArray, IntArray]]

_WORSE = 1.02  # numbers of rows are tried until these take so much more at least than others at most
MOST_TRIES = (
    8  # numbers of rows, about, between the neighbours of the best one, and as many that the search begins with
)
_FULL = 0.97  # of a row's room is filled where rows are graded, so that documents find their places
GRADES = (0.8, 0.85)  # sizes of graded rows beside the next larger ones: which of them is better, depends on lengths
_SMALLEST = 0.1  # of a full row
_MOST_DOCUMENTS = 1 << 18  # in the rows that say what documents cost: more take seconds and say the same


def micro_batch_evaluate(costs: CostModel, *, min_in_flight: int = 1) -> MicroBatchEvaluate:
    """How rows are priced by a cost model (see `padded.bottleneck` for what it counts)."""

    def evaluate(micro_batches: Sequence[MicroBatch]) -> tuple[IntArray, IntArray]:
        return bottleneck(costs.evaluate(micro_batches), min_in_flight)

    return evaluate


def in_row_order(documents: Sequence[SampleLength]) -> tuple[SampleLength, ...]:
    """As they stand in a row: by their index."""
    return tuple(sorted(documents, key=attrgetter("index", "start")) if len(documents) > 1 else documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """How samples become a packed row: the row's room in positions, and the settings of the micro-batch."""

    max_tokens: int
    pad_multiple: int = 1
    recompute: Recompute = "none"
    attention: Attention = "document"

    @property
    def room(self) -> int:
        """Positions that documents may fill so that the row, rounded up, has at most `max_tokens`."""
        return self.max_tokens // self.pad_multiple * self.pad_multiple

    def row(self, samples: Sequence[SampleLength]) -> MicroBatch:
        """One packed micro-batch."""
        return MicroBatch(in_row_order(samples), "packed", self.recompute, self.attention, self.pad_multiple)

    def check(self, samples: Sequence[SampleLength]) -> None:
        """Refuse, by name, a sample that is longer than a row."""
        for sample in samples:
            if max(sample.encoder, sample.decoder) > self.room:
                raise PlanError(
                    f"sample {sample.index} has {max(sample.encoder, sample.decoder)} positions but a packed row has"
                    f" {self.room} (max_tokens {self.max_tokens}, pad_multiple {self.pad_multiple}): raise max_tokens"
                    " or truncate the sample"
                )


@dataclass(frozen=True, slots=True)
class _Value:
    """What rows take about, times dp: sum(t) + dp (pp - 1) x the least or the largest t, t being a row's bottleneck
    time. A pipeline is filled and drained by short rows if it has enough of them, by its longest if all are alike.
    Of split backwards, W fills the waits: the sum may be all."""

    whole_ns: int
    least_ns: int
    most_ns: int


def _least(values: Mapping[int, _Value]) -> int:
    """The number of rows that may take least where short rows fill and drain the pipeline."""
    return min(values, key=lambda count: (values[count].least_ns, count))


def _whole(values: Mapping[int, _Value]) -> int:
    """The number of rows that take least together."""
    return min(values, key=lambda count: (values[count].whole_ns, count))


def _most(values: Mapping[int, _Value]) -> int:
    """The number of rows that takes least where the longest one fills and drains it."""
    return min(values, key=lambda count: (values[count].most_ns, count))


@dataclass(frozen=True, slots=True, eq=False)
class RowPackings:
    """One batch as packed rows of any number under a rule, each number packed once, whatever it is judged by."""

    samples: Sequence[SampleLength]
    rule: RowRule
    weights: list[int]
    dearest_first: list[int]
    _made: dict[int, tuple[MicroBatch, ...] | None] = field(default_factory=dict)
    _graded: dict[tuple[float, int, int], tuple[MicroBatch, ...] | None] = field(default_factory=dict)
    _alone: dict[int, MicroBatch] = field(default_factory=dict)  # rows of one sample, by its identity

    @classmethod
    def of(cls, samples: Sequence[SampleLength], evaluate: MicroBatchEvaluate, rule: RowRule) -> RowPackings:
        """Errors: PlanError for a sample longer than a row, or that `evaluate` cannot price."""
        rule.check(samples)
        weights = document_costs(samples, evaluate, rule)
        return cls(samples, rule, weights, dearest_first(samples, weights))

    @property
    def least(self) -> int:
        """Rows that the positions need at least."""
        sides = sum(s.encoder for s in self.samples), sum(s.decoder for s in self.samples)
        return max(1, *(-(-positions // self.rule.room) for positions in sides))

    def numbering(self, count: int) -> tuple[MicroBatch, ...] | None:
        """So many rows, the same object each time; None where they are too tight."""
        if count not in self._made:
            rows = pack(self.samples, self.weights, count, self.rule.room, self.dearest_first)
            self._made[count] = None if rows is None else tuple(map(self._row, rows))
        return self._made[count]

    def graded(self, step: float, dp: int, room: int) -> tuple[MicroBatch, ...] | None:
        """Rows of `graded_sizes`, the largest of about `room` positions, the same object each time; None where
        documents do not go into such rows."""
        if (step, dp, room) not in self._graded:
            self._graded[step, dp, room] = self._in_graded_rows(step, dp, room)
        return self._graded[step, dp, room]

    def graded_rooms(self) -> Iterator[int]:
        """Positions of the largest of graded rows: all of the room, and halves of it that hold the longest sample."""
        longest = max(max(s.encoder, s.decoder) for s in self.samples)
        room = min(self.rule.room, sum(s.tokens for s in self.samples))
        while room >= longest:
            yield room
            room //= 2

    def _in_graded_rows(self, step: float, dp: int, room: int) -> tuple[MicroBatch, ...] | None:
        tokens, whole = sum(s.tokens for s in self.samples), sum(self.weights)
        sizes = graded_sizes(whole, max(1, int(_FULL * whole * room / tokens)), step, dp)
        rows: list[list[SampleLength]] = [[] for _ in sizes]
        filled = [[0, 0] for _ in sizes]
        loads = [sizes[0] - size for size in sizes]  # A smaller row counts as if it held the difference already.
        if not fill_lightest(self.samples, self.weights, self.dearest_first, rows, loads, filled, self.rule.room):
            return None
        return tuple(self._row(row) for row in rows if row)

    def _row(self, samples: Sequence[SampleLength]) -> MicroBatch:
        if len(samples) > 1:
            return self.rule.row(samples)
        key = id(samples[0])  # `samples` keeps them
        if key not in self._alone:
            self._alone[key] = self.rule.row(samples)
        return self._alone[key]

    def best(
        self, evaluate: MicroBatchEvaluate, *, pp: int, dp: int, max_bytes: int | None, equal_counts: bool
    ) -> list[MicroBatch]:
        """The number of rows that takes least by its longest row: the first of `finalists`."""
        first, *_ = self.finalists(evaluate, pp=pp, dp=dp, max_bytes=max_bytes, equal_counts=equal_counts)
        return list(first)

    def finalists(
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
        """Packings of the few numbers of rows, up to one row a sample, that may take least time; see `_Value`.

        Numbers that grow by half (twofold, where there is one try) are tried as long as that may pay, then about
        `tries` between the neighbours of the best. The packings are about `tries`, too.

        Rows above `max_bytes`, or that `evaluate` cannot price, rule a number out. There are never fewer rows than
        replicas; under `equal_counts` only multiples of `dp`. Errors: PlanError, naming a sample above the byte cap
        alone, or for too few samples.
        """
        if len(self.samples) < dp:
            raise PlanError(
                f"{len(self.samples)} samples cannot feed {dp} replicas: enlarge the global batch or lower dp"
            )
        least = self.least
        most = len(self.samples) // dp * dp if equal_counts else len(self.samples)
        values: dict[int, _Value] = {}

        def judge(counts: Iterable[int]) -> None:
            for count in counts:
                value = self._value(count, evaluate, weight=dp * (pp - 1), max_bytes=max_bytes)
                if value is not None:
                    values[count] = value
                    if value.least_ns > _WORSE * min(one.most_ns for one in values.values()):
                        return

        coarse = list(_counts(least, most, dp, 2 if tries > 1 else 1))
        judge(coarse)
        if not values:  # one row a sample always packs, but under equal_counts the last rows may have to be shared
            raise self._refusal(most, evaluate, max_bytes) or PlanError(
                f"no multiple of {dp} replicas from {least} to {most} rows of {self.rule.room} positions holds these"
                f" {len(self.samples)} samples: raise max_tokens, or let counts differ"
            )
        judge(n for best in sorted({_least(values), _most(values)}) for n in _between(coarse, best, dp, tries))
        ends = _least(values), _most(values)
        close = sorted({*ends, *(count for count in coarse if count in values and min(ends) < count < max(ends))})
        chosen = [*close[:: -(-len(close) // tries)], close[-1]]
        of_split = [_whole(values)] if is_split else []
        packings = map(self.numbering, dict.fromkeys([_most(values), *chosen, *of_split]))
        return [rows for rows in packings if rows is not None]

    def _value(self, count: int, evaluate: MicroBatchEvaluate, *, weight: int, max_bytes: int | None) -> _Value | None:
        rows = self.numbering(count)
        if rows is None:
            return None
        try:
            time_ns, num_bytes = evaluate(rows)
        except PlanError:  # a row outside a measured grid: shorter rows may be inside
            return None
        if max_bytes is not None and int(num_bytes.max()) > max_bytes:
            return None
        whole = int(time_ns.sum())
        return _Value(whole, whole + weight * int(time_ns.min()), whole + weight * int(time_ns.max()))

    def _refusal(self, count: int, evaluate: MicroBatchEvaluate, max_bytes: int | None) -> PlanError | None:
        """Why so many rows cannot run; None where they are too tight."""
        rows = self.numbering(count)
        if rows is None:
            return None
        try:
            _, num_bytes = evaluate(rows)
        except PlanError as error:
            return error
        return None if max_bytes is None else _too_large(rows, num_bytes, max_bytes)


def _counts(least: int, most: int, dp: int, part: int) -> Iterator[int]:
    """Numbers of rows from `least` to `most`, in multiples of dp that grow by one in so many; `most` comes last."""
    count = min(most, -(-least // dp) * dp)
    while count < most:
        yield count
        count += max(dp, count // part // dp * dp)
    yield most


def _between(tried: Sequence[int], best: int, dp: int, most: int) -> list[int]:
    """Multiples of dp between the neighbours of the best number that was tried, about `most`, evenly spread."""
    at = tried.index(best)
    low, high = tried[max(0, at - 1)], tried[min(len(tried) - 1, at + 1)]
    counts = range(-(-(low + 1) // dp) * dp, high, dp)
    return [count for count in counts[:: -(-len(counts) // most) or 1] if count not in tried]


def document_costs(samples: Sequence[SampleLength], evaluate: MicroBatchEvaluate, rule: RowRule) -> list[int]:
    """Cost of each sample as its share of a full row of its like: linear and quadratic parts, without the overhead of a
    micro-batch of one short document. The row is halved while all shapes' rows have too many documents, and while
    `evaluate` cannot price it, down to the longest sample.
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
        except PlanError:
            if row_len <= longest:
                raise
            row_len = max(longest, row_len // 2)
        else:
            break
    each = {shape: int(t) // len(row.samples) for shape, t, row in zip(shapes, time_ns, rows, strict=True)}
    return [each[s.encoder, s.decoder, s.first] for s in samples]


def graded_sizes(whole: int, full: int, step: float, dp: int) -> list[int]:
    """Sizes of rows that hold `whole` together, the largest first: those of `full` size, a multiple of dp, and of each
    smaller size, `step` times the next, two a replica, for the first and the last micro-batches.

    A pipeline fills and drains without waiting for long where micro-batches grow and shrink by little.

    >>> graded_sizes(100, 10, 0.8, 1)
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


def dearest_first(samples: Sequence[SampleLength], weights: Sequence[int]) -> list[int]:
    """The samples' places by falling weight; of equals the longest comes first."""
    return sorted(range(len(samples)), key=lambda i: (-weights[i], -samples[i].tokens, i))


def pack(
    samples: Sequence[SampleLength],
    weights: Sequence[int],
    num_rows: int,
    room: int,
    order: Sequence[int] | None = None,
) -> list[list[SampleLength]] | None:
    """`num_rows` rows of balanced weight, none above `room` positions a side and none empty; None where it fails.

    Dearest first (in `order`, where it is known) into the least loaded row with room; if a document finds none, longest
    first into the fullest row that takes it (best fit), which packs tighter.
    """
    if num_rows > len(samples):
        return None
    order = dearest_first(samples, weights) if order is None else order
    return _pack_balanced(samples, weights, num_rows, room, order) or _pack_tight(samples, num_rows, room)


def _pack_balanced(
    samples: Sequence[SampleLength], weights: Sequence[int], num_rows: int, room: int, order: Sequence[int]
) -> list[list[SampleLength]] | None:
    rows: list[list[SampleLength]] = [[samples[i]] for i in order[:num_rows]]
    filled = [[row[0].encoder, row[0].decoder] for row in rows]
    loads = [weights[i] for i in order[:num_rows]]
    return rows if fill_lightest(samples, weights, order[num_rows:], rows, loads, filled, room) else None


def fill_lightest(
    samples: Sequence[SampleLength],
    weights: Sequence[int],
    order: Sequence[int],
    rows: Sequence[list[SampleLength]],
    loads: Sequence[int],
    filled: Sequence[list[int]],
    room: int,
) -> bool:
    """Put samples, by their indices in turn, each into the row of least load that has room for it on both sides; False
    where none has. `rows` and `filled`, the (encoder, decoder) positions of each, change in place."""
    heap = [(load, row) for row, load in enumerate(loads)]
    heapq.heapify(heap)
    aside: list[tuple[int, int, int]] = []  # (-free, load, row), where a longer sample found no room
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
            return False
        for entry in passed:
            heapq.heappush(heap, entry)
    return True


def _pack_tight(samples: Sequence[SampleLength], num_rows: int, room: int) -> list[list[SampleLength]] | None:
    rows = best_fit(samples, room, num_rows)
    return rows if len(rows) == num_rows else None


def best_fit(samples: Sequence[SampleLength], room: int, num_rows: int = 1) -> list[list[SampleLength]]:
    """Pack the longest sample first, each into the fullest row that has room for it (best-fit decreasing).

    The `num_rows` longest begin rows of their own; more rows are opened for what fits into none. No sample may be
    longer than `room` on either side.
    """
    order = sorted(samples, key=lambda s: (-max(s.encoder, s.decoder), -s.tokens, s.index, s.start))
    decoder_room = room if any(s.decoder for s in samples) else 0
    rows: list[list[SampleLength]] = []
    free: list[tuple[int, int]] = []
    fullest: list[tuple[int, int]] = []  # (free positions of both sides, row)

    def put(sample: SampleLength, row: int, encoder: int, decoder: int) -> None:
        rows[row].append(sample)
        free[row] = encoder - sample.encoder, decoder - sample.decoder
        insort(fullest, (sum(free[row]), row))

    def open_row(sample: SampleLength) -> None:
        rows.append([])
        free.append((0, 0))
        put(sample, len(rows) - 1, room, decoder_room)

    for sample in order[:num_rows]:
        open_row(sample)
    for sample in order[num_rows:]:
        for at in range(bisect_left(fullest, (sample.tokens, 0)), len(fullest)):
            row = fullest[at][1]
            encoder, decoder = free[row]
            if encoder >= sample.encoder and decoder >= sample.decoder:
                del fullest[at]
                put(sample, row, encoder, decoder)
                break
        else:
            open_row(sample)
    return rows


def _too_large(micro_batches: Sequence[MicroBatch], num_bytes: IntArray, max_bytes: int) -> PlanError:
    worst = int(num_bytes.argmax())
    samples = micro_batches[worst].samples
    longest = max(samples, key=lambda s: s.tokens)
    row, move = f"sample {longest.index} with {longest.tokens:,} positions", "recompute more, or raise tp or the limit"
    if len(samples) > 1:
        row, move = f"a packed row of {len(samples)} samples, the longest {row},", f"lower max_tokens, {move}"
    return PlanError(f"{row} needs {num_bytes[worst]:,} B but {max_bytes:,} B is the limit: {move}")
