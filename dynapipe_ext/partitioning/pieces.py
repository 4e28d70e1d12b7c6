"""Packed rows of long samples in pieces, with short samples next to the pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Literal

from dynapipe_ext.batch.micro_batches import MicroBatch, Pieces, Recompute, SampleLength, round_up
from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.packing import (
    MicroBatchEvaluate,
    RowPackingPolicy,
    compute_document_costs,
    fill_lightest,
    sort_by_weight,
    sort_documents,
)

PIECE_TOKENS = (2048, 4096, 8192, 16384, 32768)  # tried if the planner chooses
FINER_TOKENS = (2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152)  # if it chooses the cp degree, too

_LOOSER = 16  # one row more for this many, if documents find no row


def list_piece_sizes(pieces: Pieces | Literal["finer"], longest: int, max_tokens: int) -> list[int]:
    """List the piece sizes, in tokens, to try: below the longest sample and up to `max_tokens` (0: no limit).

    >>> list_piece_sizes("auto", 9000, 0), list_piece_sizes(3000, 9000, 0), list_piece_sizes("auto", 2048, 0)
    ([2048, 4096, 8192], [3000], [])
    """
    choices: Mapping[object, tuple[int, ...]] = {"off": (), "auto": PIECE_TOKENS, "finer": FINER_TOKENS}
    sizes = choices[pieces] if isinstance(pieces, str) else (pieces,)
    return [size for size in sizes if size < longest and size <= (max_tokens or size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTime:
    """Approximate ns of a row with one sample of x positions: `overhead_ns` + `token_ns` x + `square_ns` x^2."""

    overhead_ns: float = 0.0
    token_ns: float = 1.0
    square_ns: float = 0.0

    @staticmethod
    def make_rows(tokens: int, longest: int, recompute: Recompute) -> list[MicroBatch]:
        """Return the three rows that `from_times` needs. Two begin a sample, with half of `tokens` and with about all.
        The third has half of them and ends the longest sample."""
        half = max(1, tokens // 2)
        pieces = (
            SampleLength(0, half),
            SampleLength(0, max(half + 1, tokens)),
            SampleLength(0, half, start=longest - half),
        )
        return [MicroBatch((one,), "packed", recompute, "carried") for one in pieces]

    @classmethod
    def from_times(cls, rows: Sequence[MicroBatch], times_ns: Sequence[int]) -> RowTime:
        """Fit the time of any row to the times of the three `rows` that `make_rows` returns."""
        half, whole, start = rows[0].encoder_len, rows[1].encoder_len, rows[2].samples[0].start
        short_ns, long_ns, late_ns = times_ns
        square_ns = max(0.0, (late_ns - short_ns) / (2 * half * start))
        more_ns = long_ns - short_ns - square_ns * (whole * whole - half * half)
        token_ns = max(1.0, more_ns) / (whole - half)
        overhead_ns = max(0.0, short_ns - half * (token_ns + square_ns * half))
        return cls(overhead_ns=overhead_ns, token_ns=token_ns, square_ns=square_ns)

    def work_ns(self, length: int, count: int) -> float:
        """Return the ns of a sample of `length` positions in `count` pieces, all together."""
        return count * self.overhead_ns + length * (self.token_ns + self.square_ns * length)

    def find_position(self, share: float, length: int) -> float:
        """Return the position at which `share` (0 to 1) of a sample's time has passed, overheads not counted.

        >>> round(RowTime().find_position(0.5, 100)), round(RowTime(square_ns=1e9).find_position(0.25, 100))
        (50, 50)
        """
        squared = self.square_ns / self.token_ns
        time = share * (length + squared * length * length)
        return 2 * time / (1 + math.sqrt(1 + 4 * squared * time))  # no difference of near numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceChoice:
    """A way to cut long samples: pieces of about `tokens` positions, of equal time by `even` (or equal length).

    `makespan_ns`: the expected makespan, the work of the busiest replica plus the time that its pipeline waits for the
    longest row; searches end a few percent below it. `hoped_ns`: with half of that wait. No search has got below this:
    good orders have short rows first and last, and the long ones in between.
    """

    tokens: int
    even: RowTime
    makespan_ns: float
    hoped_ns: float

    @classmethod
    def estimate(
        cls, samples: Sequence[SampleLength], time: RowTime, tokens: int, even: RowTime, *, dp: int, depth: int
    ) -> PieceChoice:
        """Return the choice of `tokens` and `even` with its times, by a few sums: rows are as `pack_with_pieces` fills
        them on `dp` replicas of `depth` ranks, and take `time`."""
        lengths = [s.encoder for s in samples]
        long = [(length, -(-length // tokens)) for length in lengths if length > tokens]
        short = [length for length in lengths if length <= tokens]
        free = sum(count * tokens - length for length, count in long)
        num_rows = max(0, -(-(sum(short) - free) // tokens))
        works = [time.work_ns(length, count) for length, count in long]
        if even is time:
            max_ns = [work / count for work, (_, count) in zip(works, long, strict=True)]
        else:  # the last full piece attends to the most positions
            max_ns = [time.work_ns(n, 1) - time.work_ns(n - tokens, 0) for n, _ in long]
        short_ns = math.fsum(time.work_ns(length, 0) for length in short) + num_rows * time.overhead_ns
        busiest_ns = max((math.fsum(works) + short_ns) / dp, *works, 0.0)
        fill_ns = (depth - 1) * max(*max_ns, (num_rows > 0) * time.work_ns(tokens, 1), 0.0)
        return cls(tokens=tokens, even=even, makespan_ns=busiest_ns + fill_ns, hoped_ns=busiest_ns + fill_ns / 2)

    def make_rows(
        self, samples: Sequence[SampleLength], evaluate: MicroBatchEvaluate, rule: RowPackingPolicy
    ) -> list[MicroBatch]:
        """Return packed rows with the long samples cut in this way (`pack_with_pieces`)."""
        return pack_with_pieces(samples, self.even, evaluate, rule)


def pick_promising(choices: Sequence[PieceChoice], *, with_smallest: bool = False) -> list[PieceChoice]:
    """Return the choices with the least `makespan_ns` and the least `hoped_ns` (often the same one). With
    `with_smallest`, choices with the smallest pieces follow: one of them needs the least memory."""
    best = [min(choices, key=attrgetter(by)) for by in ("makespan_ns", "hoped_ns")]
    tokens = min(choice.tokens for choice in choices)
    return list(dict.fromkeys([*best, *(one for one in choices if with_smallest and one.tokens == tokens)]))


def list_piece_choices(
    samples: Sequence[SampleLength],
    evaluate: MicroBatchEvaluate,
    sizes: Sequence[int],
    *,
    dp: int,
    depth: int,
    recompute: Recompute = "none",
) -> list[PieceChoice]:
    """List ways to cut long samples into pieces of about `sizes` positions, of equal length or equal time.

    `dp` replicas have `depth` ranks. Raises PlanError if `evaluate` can price none, and for samples with a decoder
    side.
    """
    if any(s.decoder for s in samples):
        raise PlanError("samples with a decoder side cannot be cut into pieces: plan whole samples (pieces off)")
    longest = max(s.encoder for s in samples)
    rows = [RowTime.make_rows(tokens, longest, recompute) for tokens in sizes]
    times_ns = iter(_prices(evaluate, [row for three in rows for row in three]))
    row_times: dict[int, RowTime] = {}
    for tokens, three in zip(sizes, rows, strict=True):
        priced_ns = [ns for ns in islice(times_ns, len(three)) if ns is not None]
        if len(priced_ns) == len(three):
            row_times[tokens] = RowTime.from_times(three, priced_ns)
    if not row_times:
        evaluate(rows[0])  # raises, naming what has no price
    firsts: list[MicroBatch] = []  # the longest pieces of equal time: first ones attend to the fewest positions
    for tokens, time in row_times.items():
        ends = (time.find_position(1 / -(-s.encoder // tokens), s.encoder) for s in samples if s.encoder > tokens)
        firsts.append(MicroBatch((SampleLength(0, math.ceil(max(ends))),), "packed", recompute, "carried"))
    choices: list[PieceChoice] = []
    for (tokens, time), first_ns in zip(row_times.items(), _prices(evaluate, firsts), strict=True):
        ways = [RowTime()] if first_ns is None else [RowTime(), time]
        choices += [PieceChoice.estimate(samples, time, tokens, even, dp=dp, depth=depth) for even in ways]
    return choices


def _prices(evaluate: MicroBatchEvaluate, rows: Sequence[MicroBatch]) -> list[int | None]:
    """Return the times of rows, None for those without a price."""
    try:
        return [int(ns) for ns in evaluate(rows)[0]]
    except PlanError:
        return [None] if len(rows) == 1 else [ns for row in rows for ns in _prices(evaluate, [row])]


def cut_piece(sample: SampleLength, offset: int, length: int) -> SampleLength:
    """Return positions `offset` to `offset` + `length` - 1 of a decoder-only sample, with the targets among them.

    >>> [cut_piece(SampleLength(7, 10, target=4), at, 5).target for at in (0, 3, 5)]
    [0, 2, 4]
    """
    first_target = sample.encoder - sample.target
    target = max(0, offset + length - max(offset, first_target))
    return SampleLength(sample.index, length, 0, target, sample.start + offset)


def cut_into_pieces(sample: SampleLength, max_tokens: int, multiple: int, time: RowTime) -> list[SampleLength]:
    """Return a sample as pieces of about equal time (equal length if squares cost nothing), as many as with
    `max_tokens` each. So the first pieces may be longer. All but the last have a multiple of `multiple` positions.

    >>> [(p.start, p.encoder) for p in cut_into_pieces(SampleLength(0, 100), 40, 8, RowTime())]
    [(0, 40), (40, 32), (72, 28)]
    """
    count = -(-sample.encoder // max_tokens)
    even_ends = [time.find_position(k / count, sample.encoder) for k in range(1, count)]
    ends = [*(round_up(math.ceil(end), multiple) for end in even_ends), sample.encoder]
    pieces, start = [], 0
    for end in ends:
        if start < end <= sample.encoder:
            pieces.append(cut_piece(sample, start, end - start))
            start = end
    return pieces


def pack_with_pieces(
    samples: Sequence[SampleLength], time: RowTime, evaluate: MicroBatchEvaluate, rule: RowPackingPolicy
) -> list[MicroBatch]:
    """Return packed rows of about `rule.max_tokens` positions. Raises PlanError if `evaluate` cannot price one.

    Samples longer than a row (`rule.room`) are cut into pieces of equal `time`, one per row. Then each shorter sample,
    the most expensive first, joins the row of least time so far with enough free positions, with or without a piece.
    """
    long = [s for s in samples if s.encoder > rule.room]
    short = [s for s in samples if s.encoder <= rule.room]
    heads = [_make_piece_row(rule, (p,)) for s in long for p in cut_into_pieces(s, rule.room, rule.pad_multiple, time)]
    if not short:
        return heads
    loads = evaluate(heads)[0].tolist() if heads else []
    costs = compute_document_costs(short, evaluate, rule)
    order = sort_by_weight(short, costs)
    starts = [(load, head.samples[0].encoder, 0) for load, head in zip(loads, heads, strict=True)]
    free = sum(max(0, rule.room - fill) for _, fill, _ in starts)
    num_rows = max(0, -(-(sum(s.encoder for s in short) - free) // rule.room))
    while (rows := fill_lightest(short, costs, order, [*starts, *[(0, 0, 0)] * num_rows], rule.room)) is None:
        num_rows += 1 + num_rows // _LOOSER
    mixed = [
        _make_piece_row(rule, (*head.samples, *sort_documents(row))) for head, row in zip(heads, rows, strict=False)
    ]
    return mixed + [rule.make_row(row) for row in rows[len(heads) :] if row]


def _make_piece_row(rule: RowPackingPolicy, samples: tuple[SampleLength, ...]) -> MicroBatch:
    return MicroBatch(samples, "packed", rule.recompute, "carried", rule.pad_multiple)
