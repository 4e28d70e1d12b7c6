"""Columns of numbers that prices depend on, computed once from micro-batches or from padded shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import mul

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import (
    ALL_RECOMPUTES,
    RECOMPUTES,
    MicroBatch,
    Recompute,
    SampleLength,
    make_length_error,
    recompute_of_layers,
)
from dynapipe_ext.costs.grid import BoolArray, IntArray

Kinds = npt.NDArray[np.str_]
SUM_BYTES = 4  # gradients of keys and values are summed in fp32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PiecePositions:
    """Positions of pieces, arrays of shape (M,); 0 for whole samples. `own`: of the piece. `joined`: of its sample up
    to the piece's end. For a first piece, whose B is the last one, `buffered`: all positions of the sample; `summed`:
    those before the last piece, as later pieces add gradients to their keys and values."""

    own: IntArray
    joined: IntArray
    buffered: IntArray
    summed: IntArray

    @classmethod
    def from_micro_batches(cls, micro_batches: Sequence[MicroBatch]) -> PiecePositions:
        """Count the positions of pieces. All pieces of a sample must be among these micro-batches."""
        pieces: dict[int, list[SampleLength]] = {}
        for m in micro_batches:
            if m.attention == "carried":
                pieces.setdefault(m.samples[0].index, []).append(m.samples[0])
        counts = np.zeros((4, len(micro_batches)), np.int64)
        for i, m in enumerate(micro_batches):
            if m.attention != "carried":
                continue
            piece = m.samples[0]
            counts[:2, i] = piece.encoder, piece.start + piece.encoder
            if not piece.start:
                every = pieces[piece.index]
                counts[2:, i] = sum(s.encoder for s in every), max(s.start for s in every)
        own, joined, buffered, summed = counts
        return cls(own=own, joined=joined, buffered=buffered, summed=summed)

    @property
    def before(self) -> IntArray:
        """Positions of the sample before the piece, (M,)."""
        return self.joined - self.own

    def count_kept_bytes(self, value_bytes: int) -> IntArray:
        """Return the bytes kept per key or value of a position, (M,): sample buffers, and fp32 gradient sums."""
        kept_bytes: IntArray = value_bytes * self.buffered + SUM_BYTES * self.summed
        return kept_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """The numbers from which M micro-batches are priced.

    `positions`, shape (5, M): padded positions of encoder and of decoder; then query x key positions within the
    encoder, within the decoder, and from decoder to encoder. Attention restarts at each document of a packed row, whose
    padding is one more document; a piece also attends to the earlier pieces of its sample. `recompute`, (M,):
    recomputation modes. `padded_shapes`, (3, M): rows, encoder and decoder lengths, if made of shapes; there are no
    `micro_batches` then. `pieces`: None if all samples are whole."""

    positions: IntArray
    recompute: Kinds
    padded_shapes: IntArray | None = None
    micro_batches: Sequence[MicroBatch] = ()
    pieces: PiecePositions | None = None

    @classmethod
    def from_micro_batches(cls, micro_batches: Sequence[MicroBatch]) -> Features:
        """Count the features of micro-batches. Raises PlanError for rows whose squared lengths exceed 64 bits."""
        try:
            counts = np.fromiter(chain.from_iterable(map(_count_positions, micro_batches)), np.int64)
        except OverflowError as error:
            raise make_length_error(max(m.padded_tokens for m in micro_batches)) from error
        positions, pieces = np.ascontiguousarray(counts.reshape(-1, 5).T), None
        if any(m.attention == "carried" for m in micro_batches):
            pieces = PiecePositions.from_micro_batches(micro_batches)
            positions[2] += 2 * pieces.before * pieces.own
        recompute = np.array([m.recompute for m in micro_batches], dtype=np.str_)
        return cls(positions=positions, recompute=recompute, micro_batches=micro_batches, pieces=pieces)

    @classmethod
    def from_shapes(
        cls,
        rows: npt.ArrayLike,
        encoder_len: npt.ArrayLike,
        decoder_len: npt.ArrayLike,
        recompute: Recompute,
    ) -> Features:
        """Return the features of padded shapes: numbers of rows and lengths, broadcast against each other."""
        r, e, d = (np.ravel(one).astype(np.int64) for one in np.broadcast_arrays(rows, encoder_len, decoder_len))
        positions = np.stack([r * e, r * d, r * e * e, r * d * d, r * e * d])
        return cls(positions=positions, recompute=np.full(r.shape, recompute), padded_shapes=np.stack([r, e, d]))

    def with_recompute(self, recompute: Recompute) -> Features:
        """Return the features of the same micro-batches under another recomputation mode."""
        micro_batches = [m.with_recompute(recompute) for m in self.micro_batches]
        return replace(self, recompute=np.full(self.recompute.shape, recompute), micro_batches=micro_batches)

    @property
    def shapes(self) -> IntArray:
        """Rows, encoder and decoder length of each micro-batch, shape (3, M)."""
        if self.padded_shapes is not None:
            return self.padded_shapes
        sizes = [(m.rows, m.encoder_len, m.decoder_len) for m in self.micro_batches]
        return np.array(sizes, np.int64).reshape(-1, 3).T

    @property
    def layers_within_stage(self) -> Kinds:
        """Recomputation modes of layers, (M,); "none" if their whole stage is computed again."""
        kinds, _ = split_kinds(self.recompute)
        return np.where(kinds == "stage", "none", kinds)

    @property
    def tokens(self) -> IntArray:
        """Padded positions of both sides, (M,)."""
        tokens: IntArray = self.positions[0] + self.positions[1]
        return tokens

    @property
    def squares(self) -> IntArray:
        """Query x key positions in the self-attention of both sides, (M,): the sum of squared lengths."""
        squares: IntArray = self.positions[2] + self.positions[3]
        return squares


def count_positions(m: MicroBatch) -> tuple[int, int]:
    """Return `Features.tokens` and `Features.squares` of one micro-batch."""
    features = Features.from_micro_batches([m])
    return int(features.tokens[0]), int(features.squares[0])


def _count_positions(m: MicroBatch) -> tuple[int, int, int, int, int]:
    """Return the `Features.positions` of one micro-batch, without what a piece attends to in earlier pieces."""
    encoder, decoder, documents = m.encoder_len, m.decoder_len, m.documents
    if len(documents) == 1 and not decoder:  # as in most rows that a planner tries
        length = encoder if m.layout == "padded" or m.attention == "row" else documents[0]
        return encoder, 0, length * length + (encoder - length) ** 2, 0, 0
    if m.layout == "padded" or m.attention == "row":
        rows = m.rows
        return rows * encoder, rows * decoder, rows * encoder**2, rows * decoder**2, rows * encoder * decoder
    padding = encoder - sum(documents)
    squares = sum(map(mul, documents, documents)) + padding * padding
    if not decoder:
        return encoder, 0, squares, 0, 0
    pairs = [(s.encoder, s.decoder) for s in m.samples]
    pairs.append((padding, decoder - sum(d for _, d in pairs)))
    return encoder, decoder, squares, sum(d * d for _, d in pairs), sum(e * d for e, d in pairs)


def split_kinds(recompute: Kinds) -> tuple[Kinds, BoolArray]:
    """Return the recomputation modes of layers, and which micro-batches ask for a chunked head, both of shape (M,)."""
    if recompute.dtype.itemsize // 4 < len("head") or not (is_chunked := np.char.startswith(recompute, "head")).any():
        return recompute, np.zeros(recompute.shape, bool)
    layers = recompute
    for kind in ALL_RECOMPUTES[len(RECOMPUTES) :]:
        layers = np.where(recompute == kind, recompute_of_layers(kind), layers)
    return layers, is_chunked
