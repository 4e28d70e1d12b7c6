"""Long samples in pieces, and short documents beside them, as packed rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dynapipe_ext.errors import PlanError
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.plan import MicroBatch, Pieces, round_up
from dynapipe_ext.splits.packing import MicroBatchEvaluate, RowRule, document_costs, fill_lightest
from dynapipe_ext.splits.rules import piece

PIECE_TOKENS = (2048, 4096, 8192, 16384, 32768)  # that are tried where the planner chooses
CutBy = Literal["length", "time"]

_LOOSER = 16  # a row more, of so many, where documents find no room


def piece_sizes(pieces: Pieces, longest: int, max_tokens: int) -> list[int]:
    """Tokens of a piece that are worth a try, none above `max_tokens` (0: no cap); [] where no sample is longer.

    >>> piece_sizes("auto", 9000, 0), piece_sizes(3000, 9000, 0), piece_sizes("auto", 2048, 0)
    ([2048, 4096, 8192], [3000], [])
    """
    sizes: tuple[int, ...] = () if pieces == "off" else PIECE_TOKENS if pieces == "auto" else (pieces,)
    return [size for size in sizes if size < longest and size <= (max_tokens or size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Time of a row of one document of x positions: in proportion to x + `squared` x^2, overhead aside."""

    squared: float

    @classmethod
    def of(cls, evaluate: MicroBatchEvaluate, longest: int) -> Slope:
        """By rows of a quarter, a half and three quarters of the longest sample."""
        x = max(1, longest // 4)
        rows = [MicroBatch((SampleLength(0, k * x),), "packed") for k in (1, 2, 3)]
        one, two, three = (int(t) for t in evaluate(rows)[0])
        squares = max(0, three - 2 * two + one) / 2  # of x^2
        return cls(squared=squares / max(1.0, two - one - 3 * squares) / x)

    def position(self, share: float, length: int) -> float:
        """How far into a sample that share of its time is.

        >>> round(Slope(squared=0.0).position(0.5, 100)), round(Slope(squared=1.0).position(0.25, 100))
        (50, 50)
        """
        time = share * (length + self.squared * length * length)
        return 2 * time / (1 + math.sqrt(1 + 4 * self.squared * time))  # no difference of near numbers


def cut(sample: SampleLength, most_tokens: int, multiple: int, slope: Slope) -> list[SampleLength]:
    """Pieces of a sample, as many as pieces of `most_tokens` would be, that take equal times by the slope (of one
    without squares: of equal lengths), each but the last a multiple of `multiple`.

    >>> [(p.start, p.encoder) for p in cut(SampleLength(0, 100), 40, 8, Slope(squared=0.0))]
    [(0, 40), (40, 32), (72, 28)]
    """
    count = -(-sample.encoder // most_tokens)
    wanted = [slope.position(k / count, sample.encoder) for k in range(1, count)]
    ends = [*(round_up(math.ceil(end), multiple) for end in wanted), sample.encoder]
    pieces, start = [], 0
    for end in ends:
        if start < end <= sample.encoder:
            pieces.append(piece(sample, start, end - start))
            start = end
    return pieces


def document_weights(
    samples: Sequence[SampleLength], evaluate: MicroBatchEvaluate, rules: Sequence[RowRule]
) -> dict[SampleLength, int]:
    """What the samples cost that stay whole under any of the rules (`document_costs`)."""
    most, least = (choose(rules, key=lambda rule: rule.room) for choose in (max, min))
    short = [s for s in samples if s.encoder <= most.room]
    return dict(zip(short, document_costs(short, evaluate, least), strict=True)) if short else {}


def carried_rows(
    samples: Sequence[SampleLength],
    weights: Mapping[SampleLength, int],
    evaluate: MicroBatchEvaluate,
    rule: RowRule,
    cut_by: CutBy,
) -> list[MicroBatch]:
    """Packed rows of about `rule.max_tokens` positions: samples above that in pieces, a piece a row; and documents, the
    dearest first, each in the row that has cost least so far and has room, be there a piece in it or not.

    Errors: PlanError for what `evaluate` cannot price, and for samples with a decoder side.
    """
    if any(s.decoder for s in samples):
        raise PlanError("samples with a decoder side cannot be cut into pieces: plan whole samples (pieces off)")
    long = [s for s in samples if s.encoder > rule.room]
    short = [s for s in samples if s.encoder <= rule.room]
    slope = Slope(squared=0.0)
    if cut_by == "time" and long:
        slope = Slope.of(evaluate, max(s.encoder for s in long))
    heads = [_carried(rule, (p,)) for s in long for p in cut(s, rule.room, rule.pad_multiple, slope)]
    if not short:
        return heads
    loads = evaluate(heads)[0].tolist() if heads else []
    costs = [weights[s] for s in short]
    fills = [head.samples[0].encoder for head in heads]
    free = sum(max(0, rule.room - fill) for fill in fills)
    num_rows = max(0, -(-(sum(s.encoder for s in short) - free) // rule.room))
    while (rows := _filled(short, costs, fills + [0] * num_rows, loads + [0] * num_rows, rule.room)) is None:
        num_rows += 1 + num_rows // _LOOSER
    mixed = [_carried(rule, (*head.samples, *rule.row(row).samples)) for head, row in zip(heads, rows, strict=False)]
    return mixed + [rule.row(row) for row in rows[len(heads) :] if row]


def _carried(rule: RowRule, samples: tuple[SampleLength, ...]) -> MicroBatch:
    return MicroBatch(samples, "packed", rule.recompute, "carried", rule.pad_multiple)


def _filled(
    samples: Sequence[SampleLength], weights: Sequence[int], fills: Sequence[int], loads: Sequence[int], room: int
) -> list[list[SampleLength]] | None:
    """The documents of each row beside what fills it already; None where one finds no room."""
    rows: list[list[SampleLength]] = [[] for _ in fills]
    order = sorted(range(len(samples)), key=lambda i: (-weights[i], -samples[i].tokens, i))
    fits = fill_lightest(samples, weights, order, rows, loads, [[fill, 0] for fill in fills], room)
    return rows if fits else None
