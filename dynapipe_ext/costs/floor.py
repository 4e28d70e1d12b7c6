"""Minimum times that a cost model promises, by which `find_batch_floor` bounds a global batch before it is cut.

Either form holds for every micro-batch that the model can price: `TablePoints` for times that are multilinear between
measured points, `GrowingTimes` for times that grow with tokens and squared lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.costs.grid import BoolArray, FloatArray, IntArray

# Rounding of F and B (or I and W) of one micro-batch on one stage, in the bound and in what is compared with it.
ROUNDING_NS = 3.0


@dataclass(frozen=True, slots=True)
class PaddedTimes:
    """Times in ns of n padded micro-batches under the fastest recomputation: F and B (S, n), dependency chain (n,)."""

    forward: FloatArray
    backward: FloatArray
    chain: FloatArray


@dataclass(frozen=True, slots=True)
class GrowingTimes:
    """Times of the form overhead + a tokens + b squares with nothing negative, for rows of either layout.

    `padded(rows, lengths)`: micro-batches of `rows` rows of each (encoder, decoder) length (n, 2). `rounding_ns`, shape
    (S,): what a model adds at most by rounding its work up (experts' capacity), which belongs to no sample. `error_ns`:
    what rounding to whole nanoseconds changes at most, of F and B of one micro-batch on one stage.
    """

    padded: Callable[[int, IntArray], PaddedTimes]
    rounding_ns: FloatArray
    error_ns: float = ROUNDING_NS


NEVER_NS = 1e300  # of a shape that cannot run: a minimum over points that include it stays far above any time
_ROUNDING_BYTES = 2
_Weights = tuple[tuple[IntArray, FloatArray | float], ...]  # indices of points of an axis, and their shares


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """The places of n samples among measured points. For the encoder and the decoder axis: the points below and above
    with their shares, and the first point that is longer. `outside`: the sample is longer than every point."""

    between: tuple[_Weights, _Weights]
    longer: tuple[_Weights, _Weights]
    outside: BoolArray

    def interpolate(
        self, values: FloatArray, encoder_is_longer: bool = False, decoder_is_longer: bool = False
    ) -> FloatArray:
        """Interpolate (Q, E, D) at the samples' own lengths, or take the first longer point of a side: (Q, n)."""
        encoder = (self.longer if encoder_is_longer else self.between)[0]
        decoder = (self.longer if decoder_is_longer else self.between)[1]
        mixed = np.zeros(())
        for d, decoder_share in decoder:
            mixed = mixed + sum((values[:, e, d] * share for e, share in encoder), np.zeros(())) * decoder_share
        return mixed


@dataclass(frozen=True, slots=True)
class PointTable:
    """Values (Q, E, D) at points; `rows_of` tells which number of rows and which recomputation mode each q is of.

    `longer[i][j]`: if i, each value is the least over encoder sides from its point on, and there is one more point for
    "longer than any"; if j, the same for decoder sides.
    """

    values: FloatArray
    rows_of: IntArray
    longer: tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]

    @classmethod
    def from_values(cls, values: FloatArray, num_rows: int) -> PointTable:
        """Make the table of `values` (K x R, E, D), without numbers of rows if fewer rows under the same recomputation
        are nowhere above them: their minimum is never needed."""
        numbers: list[int] = []
        for q, one in enumerate(values):
            same = [k for k in numbers if k // num_rows == q // num_rows]
            if not any((values[k] <= one).all() for k in same):
                numbers.append(q)

        def extend(values: FloatArray, axis: int) -> FloatArray:
            never = np.full_like(values.take([0], axis), NEVER_NS)
            return accumulate_minimum(np.concatenate([values, never], axis), axis)

        some, longer = values[numbers], extend(values[numbers], 1)
        return cls(some, np.array(numbers), ((some, extend(some, 2)), (longer, extend(longer, 2))))

    def find_min(self, place: SamplePlace, fits: BoolArray | None) -> FloatArray:
        """Return the minimum, (n,), over all shapes that hold each sample, with numbers of rows that `fits` (K x R, n).

        If one side is longer, the minimum is bounded by those at the other side's two points.
        """
        best = np.min([place.interpolate(self.longer[i][j], bool(i), bool(j)) for i in (0, 1) for j in (0, 1)], axis=0)
        if fits is not None:
            best = np.where(fits[self.rows_of], best, NEVER_NS)
        return np.where(place.outside, NEVER_NS, best.min(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePoints:
    """Times at every measured point, NEVER_NS if it cannot run; between points they are multilinear, and at fixed
    lengths time over rows is monotone between them. So minima over shapes are minima over points, with a sample's own
    lengths among these (`find_batch_floor` has the argument). Ranks share equal tables of work: `work_of` says which.

    `needed`: for some stages (bytes (K x R, E, D), static bytes) of the activations that a micro-batch holds there by
    itself at some time. These bytes grow with rows and lengths: each is the minimum over all larger shapes.
    """

    rows: FloatArray
    axes: tuple[FloatArray, FloatArray]
    work: tuple[PointTable, ...]  # F + B of one row on a rank
    work_of: tuple[int, ...]
    head: tuple[PointTable, ...]  # F upstream of a rank
    tail: tuple[PointTable, ...]  # B upstream of a rank; 0 if backwards are split
    chain: PointTable  # of a whole micro-batch
    chain_of_row: PointTable
    attended_ns: tuple[float, ...] | None  # of F + B on a rank, a position of a piece with each before it
    needed: tuple[tuple[FloatArray, int], ...]
    has_decoder: bool
    error_ns: float = ROUNDING_NS

    def place(self, needs: FloatArray) -> SamplePlace:
        """Find the places of samples with (encoder, decoder) lengths (n, 2)."""
        between, longer = [], []
        for axis, lengths in zip(self.axes, needs.T, strict=True):
            x = np.clip(lengths, axis[0], axis[-1])
            low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, max(0, len(axis) - 2))
            high = np.minimum(low + 1, len(axis) - 1)
            step = axis[high] - axis[low]
            share = (x - axis[low]) / np.where(step > 0, step, 1.0)
            between.append(((low, 1 - share), (high, share)))
            longer.append(((np.searchsorted(axis, lengths, side="right"), 1.0),))
        outside = (needs[:, 0] > self.axes[0][-1]) | (needs[:, 1] > self.axes[1][-1])
        return SamplePlace((between[0], between[1]), (longer[0], longer[1]), outside)

    def fits(self, place: SamplePlace, limit_bytes: int) -> BoolArray:
        """Return which numbers of rows of the samples' own lengths could be in one micro-batch: (K x R, n).

        Between two points the next one above counts as well, unless there is no whole number between them.
        """
        num_rows = len(self.rows)
        steps = np.diff(self.rows, append=np.inf) == 1
        allowed: BoolArray | None = None
        for num_bytes, static in self.needed:
            held = place.interpolate(num_bytes).reshape(-1, num_rows, len(place.outside))
            below = (held <= limit_bytes - static + _ROUNDING_BYTES).sum(axis=1)  # rows only make it grow
            reach = np.where((below == 0) | steps[np.maximum(0, below - 1)], below, below + 1)
            within_reach = np.arange(num_rows)[:, None] < reach[:, None]
            allowed = within_reach if allowed is None else allowed & within_reach
        assert allowed is not None
        return allowed.reshape(-1, len(place.outside))


Floor = GrowingTimes | TablePoints


def accumulate_minimum(values: FloatArray, axis: int) -> FloatArray:
    """Return the least value from each index on along an axis."""
    return np.flip(np.minimum.accumulate(np.flip(values, axis), axis=axis), axis)
