"""What was measured at a few shapes, as a smooth function of all shapes between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np

from dynapipe_ext.errors import DataError
from dynapipe_ext.reproducible import FloatArray, exp, log, non_negative_least_squares, product, solve

ModelPart = Literal["layer", "head"]
PARTS: tuple[ModelPart, ...] = get_args(ModelPart)
Shape = tuple[int, int]  # rows, positions

_REACH = 1.5  # doublings over which two points' deviations from the fit still resemble each other
_NOISE = 0.02  # relative, of one measured time


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one layer or of the head, for one micro-batch. `backward_s` is B, `input_s` and `weight_s` I and W of a split
    one. `stored_bytes`: from F to B; `peak_bytes`: the most that one layer alone needs at any time.
    """

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    stored_bytes: int
    peak_bytes: int


QUANTITIES = tuple(f.name for f in fields(Measured))


@dataclass(frozen=True, slots=True)
class Surface:
    """overhead + rate x tokens + rate x tokens x length (+ rate x rows), times a correction that follows the points.

    The correction is a Gaussian process of the logarithm of measured over fitted (Rasmussen and Williams 2006, ch. 2)
    over doublings of rows and length: it passes within the noise of every point and fades into the fit between them.
    """

    coefficients: FloatArray  # (4,)
    points: FloatArray  # (N, 2), log2 of rows and length
    weights: FloatArray  # (N,)

    @classmethod
    def fit(cls, measured: Mapping[Shape, float], *, noise: float = _NOISE) -> Surface:
        """Zeros everywhere (a W that has nothing to do) stay zero. Errors: DataError for fewer than two shapes, and for
        values that are neither all zero nor all above it.
        """
        if len(measured) < 2:
            raise DataError(f"{len(measured)} shapes were measured but a cost surface needs at least 2: measure more")
        shapes = np.array(sorted(measured), np.float64)
        values = np.array([measured[shape] for shape in sorted(measured)], np.float64)
        points = _doublings(shapes)
        if not values.any():
            return cls(np.zeros(4), points, np.zeros(len(points)))
        if not (np.isfinite(values) & (values > 0)).all():
            raise DataError(f"costs from {values.min():g} to {values.max():g} were measured: all must be above 0")
        coefficients = non_negative_least_squares(_terms(shapes), values)
        deviation = log(values / product(_terms(shapes), coefficients))
        spread = max(float(np.mean(deviation**2)), 1e-12)
        kernel = spread * _likeness(points, points) + noise**2 * np.eye(len(points))
        weights = spread * solve(kernel, deviation)
        return cls(coefficients, points, weights)

    def __call__(self, shapes: FloatArray) -> FloatArray:
        """Values (M,) at shapes (M, 2)."""
        shapes = np.asarray(shapes, np.float64).reshape(-1, 2)
        correction = exp(product(_likeness(_doublings(shapes), self.points), self.weights))
        return product(_terms(shapes), self.coefficients) * correction


def _terms(shapes: FloatArray) -> FloatArray:
    """(M, 4): 1, rows, tokens, tokens x length."""
    rows, length = shapes.T
    return np.stack([np.ones_like(rows), rows, rows * length, rows * length**2], axis=1)


def _doublings(shapes: FloatArray) -> FloatArray:
    return log(shapes) / math.log(2.0)


def _likeness(left: FloatArray, right: FloatArray) -> FloatArray:
    squared = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2)
    return exp(-0.5 * squared / _REACH**2)


def left_out_errors(measured: Mapping[Shape, float]) -> dict[Shape, float]:
    """|predicted - measured| / measured of every shape, by a surface that has not seen it."""
    errors = {}
    for shape, value in measured.items():
        others = {other: v for other, v in measured.items() if other != shape}
        predicted = float(Surface.fit(others)(np.array([shape]))[0])
        errors[shape] = abs(predicted - value) / value if value else 0.0
    return errors


def next_shape(measured: Sequence[Shape], errors: Mapping[Shape, float], candidates: Sequence[Shape]) -> Shape | None:
    """The candidate about which least is known: far from what was measured, near what was predicted badly."""
    open_shapes = [shape for shape in candidates if shape not in set(measured)]
    if not open_shapes:
        return None
    known, places = (_doublings(np.array(s, np.float64)) for s in (measured, open_shapes))
    kernel = _likeness(known, known) + 1e-3 * np.eye(len(known))
    across = _likeness(places, known)
    unknown = 1.0 - (across.T * solve(kernel, across.T)).sum(axis=0)
    error = np.array([errors.get(shape, 0.0) for shape in measured]) + 1e-3
    nearby = product(across, error) / np.maximum(across.sum(axis=1), 1e-9)
    return open_shapes[int(np.argmax(np.sqrt(np.maximum(unknown, 0.0)) * nearby))]
