"""The least times that a cost model promises, so that a global batch can be bounded before it is cut (`batch_floor`).

Either form holds for every micro-batch that the model can price: `TablePoints` for times that are multilinear between
measured points, `GrowingTimes` for times that grow with tokens and squared lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

ROUNDING_NS = (
    3.0  # of F and B (or I and W) of one micro-batch on one stage, in the floor and in what is held against it
)


@dataclass(frozen=True, slots=True)
class PaddedTimes:
    """Of n padded micro-batches under the fastest recomputation, ns: F and B (S, n), the dependency chain (n,)."""

    forward: FloatArray
    backward: FloatArray
    chain: FloatArray


@dataclass(frozen=True, slots=True)
class GrowingTimes:
    """Times of the form overhead + a tokens + b squares with nothing negative, for rows of either layout.

    `padded(rows, lengths)`: of micro-batches of so many rows of each (encoder, decoder) length (n, 2). `rounding_ns`,
    shape (S,): what a model adds at most by rounding its work up (experts' capacity), which is no sample's own.
    `error_ns`: what rounding to whole nanoseconds changes at most, of F and B of one micro-batch on one stage.
    """

    padded: Callable[[int, IntArray], PaddedTimes]
    rounding_ns: FloatArray
    error_ns: float = ROUNDING_NS


NEVER_NS = 1e300  # of a shape that cannot run: what leans on it in the least stays far above any time
_ROUNDING_BYTES = 2


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """Where n samples lie between measured points. For the encoder (e) and decoder (d) axis: the points below and
    above, the share of the upper one, and the first point that is longer. `outside`: the sample is longer than every
    point."""

    e_low: IntArray
    e_high: IntArray
    e_share: FloatArray
    e_longer: IntArray
    d_low: IntArray
    d_high: IntArray
    d_share: FloatArray
    d_longer: IntArray
    outside: BoolArray

    def between(self, values: FloatArray) -> FloatArray:
        """(Q, E, D) at the samples' own lengths: (Q, n)."""
        low = values[:, self.e_low, self.d_low] * (1 - self.e_share) + values[:, self.e_high, self.d_low] * self.e_share
        if values.shape[2] == 1:
            return low
        high = values[:, self.e_low, self.d_high] * (1 - self.e_share)
        high += values[:, self.e_high, self.d_high] * self.e_share
        return low * (1 - self.d_share) + high * self.d_share


@dataclass(frozen=True, slots=True)
class PointTable:
    """Values (Q, E, D) at points; `rows_of` tells which number of rows and which recomputation each q is of.

    `longer_e`, `longer_d`, `longer`: the least from a point on, over longer encoder sides, decoder sides, both; with
    one more place for "longer than any".
    """

    values: FloatArray
    rows_of: IntArray
    longer_e: FloatArray
    longer_d: FloatArray
    longer: FloatArray

    @classmethod
    def of(cls, values: FloatArray, num_rows: int) -> PointTable:
        """The table of `values` (K x R, E, D). It leaves out a number of rows if fewer rows under the same
        recomputation are nowhere above it: its minimum is never needed."""
        numbers: list[int] = []
        for q, one in enumerate(values):
            same = [k for k in numbers if k // num_rows == q // num_rows]
            if not any((values[k] <= one).all() for k in same):
                numbers.append(q)
        some = values[numbers]
        return cls(
            some,
            np.array(numbers),
            least_from_on(np.pad(some, ((0, 0), (0, 1), (0, 0)), constant_values=NEVER_NS), 1),
            least_from_on(np.pad(some, ((0, 0), (0, 0), (0, 1)), constant_values=NEVER_NS), 2),
            least_from_on(least_from_on(np.pad(some, ((0, 0), (0, 1), (0, 1)), constant_values=NEVER_NS), 1), 2),
        )

    def least(self, place: SamplePlace, fits: BoolArray | None) -> FloatArray:
        """Over all shapes that hold each sample, and of as many rows as `fits` (K x R, n) allows: (n,).

        On one side longer, it is bounded by the least on each of the other side's two points.
        """
        at = place
        best = np.minimum(at.between(self.values), self.longer[:, at.e_longer, at.d_longer])
        d_low, d_high = self.longer_e[:, at.e_longer, at.d_low], self.longer_e[:, at.e_longer, at.d_high]
        best = np.minimum(best, d_low * (1 - at.d_share) + d_high * at.d_share)
        if self.values.shape[2] > 1:
            e_low, e_high = self.longer_d[:, at.e_low, at.d_longer], self.longer_d[:, at.e_high, at.d_longer]
            best = np.minimum(best, e_low * (1 - at.e_share) + e_high * at.e_share)
        if fits is not None:
            best = np.where(fits[self.rows_of], best, NEVER_NS)
        return np.where(at.outside, NEVER_NS, best.min(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePoints:
    """Times at every measured point, NEVER_NS where it cannot run; between points they are multilinear, and at fixed
    lengths time over rows is monotone between them. So minima over shapes are minima over points, with a sample's own
    lengths among these (`batch_floor` has the argument). Ranks share equal tables of work: `work_of` says which.

    `needed`: for some stages (bytes (K x R, E, D), static bytes) of the activations that a micro-batch holds there by
    itself at some time. These bytes grow with rows and lengths: each is the minimum over all larger shapes.
    """

    rows: FloatArray
    axes: tuple[FloatArray, FloatArray]
    work: tuple[PointTable, ...]  # F + B of one row on a rank
    work_of: tuple[int, ...]
    head: tuple[PointTable, ...]  # F upstream of a rank
    tail: tuple[PointTable, ...]  # B upstream of a rank; 0 where backwards are split
    chain: PointTable  # of a whole micro-batch
    chain_of_row: PointTable
    attended_ns: tuple[float, ...] | None  # of F + B on a rank, a position of a piece with each before it
    needed: tuple[tuple[FloatArray, int], ...]
    has_decoder: bool
    error_ns: float = ROUNDING_NS

    def place(self, needs: FloatArray) -> SamplePlace:
        """Of samples with (encoder, decoder) lengths (n, 2)."""
        sides = []
        for side, axis in enumerate(self.axes):
            x = np.clip(needs[:, side], axis[0], axis[-1])
            low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, max(0, len(axis) - 2))
            high = np.minimum(low + 1, len(axis) - 1)
            width = axis[high] - axis[low]
            share = (x - axis[low]) / np.where(width > 0, width, 1.0)
            sides.append((low, high, share, np.searchsorted(axis, needs[:, side], side="right")))
        outside = (needs[:, 0] > self.axes[0][-1]) | (needs[:, 1] > self.axes[1][-1])
        return SamplePlace(*sides[0], *sides[1], outside)

    def fits(self, place: SamplePlace, limit_bytes: int) -> BoolArray:
        """Whether so many rows of the samples' own lengths could be in one micro-batch: (K x R, n).

        Between two points the next one above counts as well, unless no whole number lies between.
        """
        num_rows = len(self.rows)
        steps = np.diff(self.rows, append=np.inf) == 1
        allowed: BoolArray | None = None
        for num_bytes, static in self.needed:
            held = place.between(num_bytes).reshape(-1, num_rows, len(place.outside))
            below = (held <= limit_bytes - static + _ROUNDING_BYTES).sum(axis=1)  # rows only make it grow
            reach = np.where((below == 0) | steps[np.maximum(0, below - 1)], below, below + 1)
            within_reach = np.arange(num_rows)[:, None] < reach[:, None]
            allowed = within_reach if allowed is None else allowed & within_reach
        assert allowed is not None
        return allowed.reshape(-1, len(place.outside))


Floor = GrowingTimes | TablePoints


def least_from_on(values: FloatArray, axis: int) -> FloatArray:
    """The least from each place on along an axis."""
    return np.flip(np.minimum.accumulate(np.flip(values, axis), axis=axis), axis)
