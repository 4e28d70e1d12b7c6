"""Lower bounds of times by a cost model, with which `find_batch_floor` bounds a global batch before it is divided.

They hold for every micro-batch that the model can price: `TablePoints` for times that are multilinear between measured
points, `GrowingTimes` for times that grow with tokens and squared lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.costs.grid import BoolArray, FloatArray, IntArray

# Rounding of F and B (or I and W) of one micro-batch on one stage, in the bound and in what is compared with it.
ROUNDING_NS = 3.0


@dataclass(frozen=True, slots=True)
class PaddedTimes:
    """Times in ns of n padded micro-batches under the fastest recomputation mode: F and B on S stages, (S, n), and the
    dependency chain of F on all stages and then B, (n,)."""

    forward: FloatArray
    backward: FloatArray
    chain: FloatArray


@dataclass(frozen=True, slots=True)
class GrowingTimes:
    """Times of the form overhead + a tokens + b squared lengths, none of which is negative, for padded and packed rows.

    `padded(rows, lengths)`: times if micro-batches have that many rows, for each (encoder, decoder) length, (n, 2).
    `rounding_ns`, (S,): what a model adds at most by rounding its work up (experts' capacity), which belongs to no
    sample. `error_ns`: the largest error by whole nanoseconds, in F and B of one micro-batch on one stage."""

    padded: Callable[[int, IntArray], PaddedTimes]
    rounding_ns: FloatArray
    error_ns: float = ROUNDING_NS


NEVER_NS = 1e300  # of a shape that cannot run: a minimum over points that include it stays far above any time
_ROUNDING_BYTES = 2
_Weights = tuple[tuple[IntArray, FloatArray | float], ...]  # indices of points of an axis, and their shares


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """Positions of n samples between measured points, by (encoder, decoder) axis. `between`: points below and above
    with their shares. `longer`: the first longer point. `outside`: the sample is longer than every point."""

    between: tuple[_Weights, _Weights]
    longer: tuple[_Weights, _Weights]
    outside: BoolArray

    def interpolate(
        self, values: FloatArray, encoder_is_longer: bool = False, decoder_is_longer: bool = False
    ) -> FloatArray:
        """Interpolate values (Q, E, D) at the samples' own lengths, or at the next longer point of a side: (Q, n)."""
        encoder = (self.longer if encoder_is_longer else self.between)[0]
        decoder = (self.longer if decoder_is_longer else self.between)[1]
        mixed = np.zeros(())
        for d, decoder_share in decoder:
            mixed = mixed + sum((values[:, e, d] * share for e, share in encoder), np.zeros(())) * decoder_share
        return mixed


@dataclass(frozen=True, slots=True)
class PointTable:
    """Values (Q, E, D) at measured encoder and decoder lengths. Of K recomputation modes and R numbers of rows,
    `rows_of` lists the Q that are there, each as mode x R + index of rows.

    `longer[i][j]`: if i, each value is the least of its and all larger encoder lengths, with one more point for "longer
    than any"; if j, the same for decoder lengths."""

    values: FloatArray
    rows_of: IntArray
    longer: tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]

    @classmethod
    def from_values(cls, values: FloatArray, num_rows: int) -> PointTable:
        """Make the table of `values` (K x R, E, D). It leaves out numbers of rows if another one, under the same
        recomputation mode, is nowhere above them: these never have the minimum."""
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

        If shapes are longer than the sample on one side only, their minimum is bounded at the other side's two
        points."""
        best = np.min([place.interpolate(self.longer[i][j], bool(i), bool(j)) for i in (0, 1) for j in (0, 1)], axis=0)
        if fits is not None:
            best = np.where(fits[self.rows_of], best, NEVER_NS)
        return np.where(place.outside, NEVER_NS, best.min(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePoints:
    """Times in ns at every measured point, NEVER_NS if it cannot run. Between points they are multilinear, and at fixed
    lengths time / rows is monotone between them. So minima over shapes are minima over points and the sample's own
    lengths (`find_batch_floor` has the argument). Ranks with equal work share a table: rank r has `work[work_of[r]]`.

    `needed`: for some stages, (bytes (K x R, E, D), static bytes) of activations that one micro-batch by itself holds
    there at some time, by K recomputation modes x R numbers of `rows`. These bytes grow with rows and lengths: each is
    the minimum over all larger shapes."""

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
        """Find where samples with (encoder, decoder) lengths (n, 2) are among the points."""
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
        """Return which numbers of rows of the samples' own lengths could fit in memory as one micro-batch: (K x R, n).

        Between two numbers the larger one counts as well, unless they are consecutive."""
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
    """Return at each index the least value from there to the end of an axis."""
    return np.flip(np.minimum.accumulate(np.flip(values, axis), axis=axis), axis)
