"""What pieces of long samples keep for one another: positions whose keys and values lie in buffers, by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.costs.model import IntArray

SUM_BYTES = 4  # gradients of keys and values are summed in fp32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CarriedPositions:
    """Positions, (M,); 0 for whole samples. `own`: of the piece. `joined`: of its sample up to its end. On the first
    piece, from whose F to whose B, which is the last, they are held: `buffered`, of the whole sample, and `summed`,
    those before the last piece, to which later pieces give gradients."""

    own: IntArray
    joined: IntArray
    buffered: IntArray
    summed: IntArray

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch]) -> CarriedPositions:
        """All pieces of a sample are among these micro-batches."""
        pieces: dict[int, list[SampleLength]] = {}
        for m in micro_batches:
            if m.attention == "carried":
                pieces.setdefault(m.samples[0].index, []).append(m.samples[0])
        counted = np.zeros((4, len(micro_batches)), np.int64)
        for i, m in enumerate(micro_batches):
            if m.attention != "carried":
                continue
            piece = m.samples[0]
            counted[:2, i] = piece.encoder, piece.start + piece.encoder
            if not piece.start:
                every = pieces[piece.index]
                counted[2:, i] = sum(s.encoder for s in every), max(s.start for s in every)
        own, joined, buffered, summed = counted
        return cls(own=own, joined=joined, buffered=buffered, summed=summed)

    def kept_bytes(self, value_bytes: int) -> IntArray:
        """Of one key or value a position: the buffers of samples, and sums of gradients."""
        kept: IntArray = value_bytes * self.buffered + SUM_BYTES * self.summed
        return kept
