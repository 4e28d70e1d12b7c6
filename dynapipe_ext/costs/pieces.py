"""Costs of the pieces of a long sample: the bytes that pieces keep for later ones, and the time of a piece beyond that
of an equally long document. That time is measured for pairs (positions of the piece, positions before it), fitted, and
added to the prices of packed rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, SampleLength
from dynapipe_ext.costs.blocks import BlockAttention
from dynapipe_ext.costs.features import SUM_BYTES, Features, PiecePositions, split_kinds
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.layers import COLUMNS
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.costs.packed_rows import PackedLayer, count_packed_sizes
from dynapipe_ext.costs.surface import Measured
from dynapipe_ext.errors import DataError, short
from dynapipe_ext.reproducible import FloatArray, non_negative_least_squares, product

_MOST = 1e6  # ns or bytes for a position or a pair of them: so that those of the longest samples fit into 64 bits


@dataclass(frozen=True, slots=True)
class MeasuredPieces:
    """One layer's measurement of a sample in pieces, all forwards, then all backwards: seconds of each F and B in the
    order of positions. `stored_bytes` are those after the last F, with the keys and values kept for other pieces.
    `peak_bytes` are the maximum at any time.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    stored_bytes: int
    peak_bytes: int


class MeasurePieces(Protocol):
    """A measurement of one sample's pieces in one layer; None if they do not fit. With `bytes_only` times are 0."""

    def __call__(self, pieces: Sequence[MicroBatch], *, bytes_only: bool = False) -> MeasuredPieces | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInPieces:
    """A sample measured in pieces of `size` positions each, its first two by themselves, and `document`, a packed row
    with one document of that size."""

    size: int
    document: Measured
    pieces: MeasuredPieces
    two: MeasuredPieces

    @property
    def starts(self) -> list[int]:
        return [number * self.size for number in range(len(self.pieces.forward_s))]

    def with_table_bytes(self, grid: Grid, packed: PackedLayer | None) -> SampleInPieces:
        """Take a table's bytes for the document: those of its grid of layers, or of packed rows, if more."""
        values, _ = grid.interpolate([np.ones(1), np.array([self.size], np.float64)])
        megabytes = values[[grid.columns.index(name) for name in COLUMNS[2:]]]
        if packed is not None:
            row = MicroBatch((SampleLength(0, self.size),), "packed")
            megabytes = np.maximum(megabytes, packed.multiply(count_packed_sizes(Features.from_micro_batches([row]))))
        stored, peak = (int(1e6 * one) for one in megabytes[:, 0])
        return replace(self, document=replace(self.document, stored_bytes=stored, peak_bytes=peak))


@dataclass(frozen=True, slots=True)
class PairGrowth:
    """own_squared q^2 + before p + attended q p for a piece of q positions after the sample's first p; none negative.

    Of the first piece it is 0: that costs what a document does. Kernels that skip what causality hides of a document,
    but nothing of a piece's own, make up the first term, keys and values of all positions so far the second.
    """

    own_squared: float = 0.0
    before: float = 0.0
    attended: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not isinstance(value := getattr(self, name), int | float) or not 0 <= value <= _MOST:
                raise DataError(f"{name} of a piece is {short(value)} but must be a number of 0 to {_MOST:g}")

    @classmethod
    def fit(cls, pairs: Sequence[tuple[int, int]], values: FloatArray, of_whole: FloatArray) -> PairGrowth:
        """Fit values at pairs (q, p) with the least squared errors relative to `of_whole`, which they are parts of."""
        columns = _stack_columns(*np.array(pairs, np.float64).T)
        return cls(*non_negative_least_squares(columns, values, relative_to=of_whole).tolist())

    def __call__(self, own: FloatArray | IntArray, before: FloatArray | IntArray) -> FloatArray:
        return product(_stack_columns(own, before), astuple(self))

    def __mul__(self, factor: float) -> PairGrowth:
        return PairGrowth(*(factor * coefficient for coefficient in astuple(self)))


def _stack_columns(own: FloatArray | IntArray, before: FloatArray | IntArray) -> FloatArray:
    q, p = np.asarray(own, np.float64), np.asarray(before, np.float64)
    return np.stack([q * q * (p > 0), p, q * p], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSurcharge:
    """Additional costs in one layer under one recomputation mode. `own_bytes`: what it stores more per position of a
    piece than of a document (mostly less), without keys and values in buffers.
    """

    forward_ns: PairGrowth
    backward_ns: PairGrowth
    working_bytes: PairGrowth
    own_bytes: float

    def __post_init__(self) -> None:
        if not -_MOST <= self.own_bytes <= _MOST:
            raise DataError(f"own_bytes of a piece is {self.own_bytes} but must be a number of -{_MOST:g} to {_MOST:g}")

    @classmethod
    def fit(cls, samples: Sequence[SampleInPieces], kept_values: int, value_bytes: int) -> PieceSurcharge:
        """Fit measured samples. Bytes are fitted from above: no measurement exceeds the fit. A running layer counts the
        gradients of all keys and values so far, even if a measurement had its fullest moment elsewhere.
        """
        pairs = [(one.size, start) for one in samples for start in one.starts]

        def fit_times(name: str) -> PairGrowth:
            whole = np.array([s for one in samples for s in getattr(one.pieces, name)])
            more = whole - np.array([getattr(one.document, name) for one in samples for _ in one.starts])
            return PairGrowth.fit(pairs, more * 1e9, whole * 1e9)

        def own_bytes(one: SampleInPieces) -> float:
            count = len(one.starts)
            stored = one.pieces.stored_bytes - kept_values * value_bytes * one.size * count
            return (stored / count - one.document.stored_bytes) / one.size

        lasts = [(one, measured) for one in samples for measured in (one.two, one.pieces)]
        ends = [(one.size, one.size * (len(measured.forward_s) - 1)) for one, measured in lasts]
        of_document = np.array([one.document.peak_bytes - one.document.stored_bytes for one, _ in lasts], np.float64)
        of_last = np.array([measured.peak_bytes - measured.stored_bytes for _, measured in lasts], np.float64)
        own, before = np.array(ends, np.float64).T
        more, gradients = of_last - SUM_BYTES * kept_values * before - of_document, kept_values * value_bytes
        fitted = PairGrowth.fit(ends, more - gradients * before, of_last)
        working = replace(fitted, before=fitted.before + gradients)
        missed = more / working(own, before)
        return cls(
            forward_ns=fit_times("forward_s"),
            backward_ns=fit_times("backward_s"),
            working_bytes=working * max(1.0, float(missed.max())),
            own_bytes=max(map(own_bytes, samples)),
        )

    @property
    def attended_ns(self) -> float:
        """Time of F and B for each pair of a position of the piece and one before it."""
        return self.forward_ns.attended + self.backward_ns.attended


_GROWTHS = ("forward_ns", "backward_ns", "working_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSurcharges:
    """Additional costs in one layer, by recomputation; `kept_values`: keys and values per position, on one rank."""

    kept_values: int
    by_recompute: Mapping[Recompute, PieceSurcharge]

    def __post_init__(self) -> None:
        if not 0 <= self.kept_values <= _MOST:
            raise DataError(f"kept_values of pieces is {self.kept_values} but must be a number of 0 to {_MOST:g}")

    @property
    def sum_bytes(self) -> int:
        """Bytes of the gradients' sums for one position in one layer, on one rank."""
        return SUM_BYTES * self.kept_values

    @property
    def least_attended_ns(self) -> float:
        """The minimum of `attended_ns` over the recomputation modes."""
        return min(one.attended_ns for one in self.by_recompute.values())

    def find_attended_ns(self, layers: IntArray, stage_ranks: tuple[int, ...], width: int) -> tuple[float, ...]:
        """Return that minimum on every pipeline rank, of stages with `layers`, for one rank of `width`."""
        held = [
            sum(n for n, r in zip(layers, stage_ranks, strict=True) if r == rank) for rank in sorted(set(stage_ranks))
        ]
        return tuple(count * self.least_attended_ns / width for count in held)

    def add(
        self,
        costs: MicroBatchCosts,
        features: Features,
        layers: IntArray,
        value_bytes: int,
        *,
        block: BlockAttention | None = None,
        tax: float = 0.0,
    ) -> MicroBatchCosts:
        """Add to the costs of packed rows, with `layers` on every stage, what pieces take in the place of first
        documents; all pieces of a sample are among them.

        The first piece holds keys and values of all positions, and sums of the gradients of those before the last. On a
        rank of a `block` these are divided by heads, like those that a running layer holds; all else is divided by its
        width, and times have a `tax` on top.
        """
        width = 1 if block is None else block.width
        of_keys = 1.0 if block is None or width == 1 else block.kept_values / block.key_values
        positions = features.pieces or PiecePositions.from_micro_batches(())
        own, before, kinds = positions.own, positions.before, features.layers_within_stage
        again = split_kinds(features.recompute)[0] == "stage"
        forward, backward, working, stored = np.zeros((4, len(own)))
        for kind, one in self.by_recompute.items():
            its = kinds == kind
            grown = [getattr(one, name)(own, before) for name in _GROWTHS]
            for total, more in zip((forward, backward, working, stored), (*grown, one.own_bytes * own), strict=True):
                total += its * more
        kept_bytes = math.ceil(self.kept_values * of_keys) * positions.count_kept_bytes(value_bytes)
        layer = layers[:, None]
        forward_ns, backward_ns = (np.rint(layer * x / width * (1 + tax)).astype(np.int64) for x in (forward, backward))
        of_own = np.ceil(layer * stored / width).astype(np.int64)
        of_running = (layer > 0) * np.ceil(working * of_keys).astype(np.int64)
        return replace(
            costs,
            forward_ns=costs.forward_ns + forward_ns,
            backward_ns=costs.backward_ns + backward_ns + np.where(again, forward_ns, 0),
            stored_bytes=np.maximum(0, costs.stored_bytes + ~again * of_own) + layer * kept_bytes,
            working_bytes=np.maximum(0, costs.working_bytes + of_running + again * of_own),
        )
