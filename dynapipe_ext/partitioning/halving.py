"""Packed rows of documents, cut in two where small ones fill and drain a pipeline better, and two in one in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength

_COUNTS = (2, 4)  # of rows a replica
_MANY, _ENDS = 16, 6  # rows of documents beside pieces: from so many on they are joined, but for so many


def finer_splits(
    replicas: Sequence[Sequence[MicroBatch]], *, equal_counts: bool, max_tokens: int
) -> Iterator[list[list[MicroBatch]]]:
    """The replicas with many rows two in one, then with some of the shortest rows of each in two; under `equal_counts`
    only where all have as many."""
    joined = [joined_rows(rows, max_tokens) for rows in replicas]
    others = [joined] if any(len(few) < len(rows) for few, rows in zip(joined, replicas, strict=True)) else []
    others += [[halved_rows(rows, count) for rows in replicas] for count in _COUNTS]
    for split in others:
        if not equal_counts or len({*map(len, split)}) == 1:
            yield split


def halved_rows(micro_batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """The same with the `count` shortest rows of several whole documents in two each; fewer where there are fewer.

    A row's documents go, the longest first, to the half of fewer positions. Rows with a piece of a long sample stay.

    >>> row = MicroBatch(tuple(SampleLength(i, n) for i, n in enumerate((5, 3, 1))), "packed")
    >>> [m.documents for m in halved_rows([row], 1)]
    [(5,), (3, 1)]
    """
    several = [i for i, m in enumerate(micro_batches) if len(m.samples) > 1 and m.attention != "carried"]
    chosen = set(sorted(several, key=lambda i: (micro_batches[i].encoder_len, i))[:count])
    return [part for i, m in enumerate(micro_batches) for part in (_halves(m) if i in chosen else [m])]


def joined_rows(micro_batches: Sequence[MicroBatch], max_tokens: int) -> list[MicroBatch]:
    """The same with rows of whole documents two in one each, but for some of the shortest, which fill and drain: what a
    row costs beside its tokens is then paid less often. All as they are where they are few, or no sample is in pieces.
    None is longer than the longest row with a piece, nor than `max_tokens` (0: no limit)."""
    pieces = [m.encoder_len for m in micro_batches if m.attention == "carried"]
    short = sorted((m for m in micro_batches if m.attention != "carried"), key=lambda m: m.encoder_len)
    if not pieces or len(short) < _MANY:
        return list(micro_batches)
    most = min(max(pieces), max_tokens or max(pieces))
    joined, rest = short[:_ENDS], short[_ENDS:]
    while len(rest) > 1:
        first, last = rest.pop(0), rest.pop()
        both = replace(last, samples=(*last.samples, *first.samples))
        joined += [both] if both.encoder_len <= most and first.recompute == last.recompute else [first, last]
    return [*joined, *rest, *(m for m in micro_batches if m.attention == "carried")]


def _halves(row: MicroBatch) -> list[MicroBatch]:
    halves: tuple[list[SampleLength], list[SampleLength]] = ([], [])
    filled = [0, 0]
    for sample in sorted(row.samples, key=lambda s: (-s.encoder, s.index)):
        half = filled.index(min(filled))
        halves[half].append(sample)
        filled[half] += sample.encoder
    return [replace(row, samples=tuple(samples)) for samples in halves]
