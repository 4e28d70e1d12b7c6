"""Packed rows of documents, cut in two where small ones fill and drain a pipeline better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength

_COUNTS = (2, 4)  # of rows a replica


def halved_splits(replicas: Sequence[Sequence[MicroBatch]], *, equal_counts: bool) -> Iterator[list[list[MicroBatch]]]:
    """The replicas with some of the shortest rows of each in two; under `equal_counts` only where all have as many."""
    for count in _COUNTS:
        halved = [halved_rows(rows, count) for rows in replicas]
        if not equal_counts or len({*map(len, halved)}) == 1:
            yield halved


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


def _halves(row: MicroBatch) -> list[MicroBatch]:
    halves: tuple[list[SampleLength], list[SampleLength]] = ([], [])
    filled = [0, 0]
    for sample in sorted(row.samples, key=lambda s: (-s.encoder, s.index)):
        half = filled.index(min(filled))
        halves[half].append(sample)
        filled[half] += sample.encoder
    return [replace(row, samples=tuple(samples)) for samples in halves]
