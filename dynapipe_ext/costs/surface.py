"""Measurements at a few shapes, as a smooth function of all shapes between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np

from dynapipe_ext.errors import DataError
from dynapipe_ext.reproducible import FloatArray, exp, log, non_negative_least_squares, product, solve

ModelPart = Literal["layer", "encoder", "decoder", "head"]  # a layer of a decoder-only model, or of either side
PARTS: tuple[ModelPart, ...] = get_args(ModelPart)
MeasuredShape = tuple[int, ...]  # rows and positions; of an encoder-decoder, rows and the positions of either side

_REACH = 1.5  # doublings over which two points' deviations from the fit still resemble each other
_NOISE = 0.02  # relative, of one measured time


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs of one layer or the head, for one micro-batch. `backward_s` is B, `input_s` and `weight_s` are I and W of a
    split one. `stored_bytes`: from F to B; `peak_bytes`: the most that one layer by itself needs at any time. Neither
    has the encoder's output, which a stage holds once for all its decoder layers.
    """

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    stored_bytes: int
    peak_bytes: int


QUANTITIES = tuple(f.name for f in fields(Measured))


def reduce_shape(part: ModelPart, shape: MeasuredShape) -> MeasuredShape:
    """Return what the costs of a part depend on in a shape.

    >>> [reduce_shape(part, (4, 96, 16)) for part in ("encoder", "decoder", "head")]
    [(4, 96), (4, 96, 16), (4, 16)]
    """
    if part == "head":
        return shape[0], shape[-1]
    return shape[:2] if part == "encoder" else shape


@dataclass(frozen=True, slots=True)
class Surface:
    """A sum of overhead and rates x tokens, tokens x length and the like (`_list_terms`), times a correction that
    follows the points.

    The correction is a Gaussian process of the logarithm of measured over fitted (Rasmussen and Williams 2006, ch. 2)
    over doublings of rows and length. It passes within the noise of every point and fades into the fit between them.
    """

    part: ModelPart
    coefficients: FloatArray  # (K,)
    points: FloatArray  # (N, 2 or 3), log2 of rows and lengths
    weights: FloatArray  # (N,)

    @classmethod
    def fit(
        cls, measured: Mapping[MeasuredShape, float], part: ModelPart = "layer", *, noise: float = _NOISE
    ) -> Surface:
        """Fit a surface. Zeros everywhere (a W that has nothing to do) stay zero. Raises DataError for fewer than two
        shapes, and for values that are neither all zero nor all above it.
        """
        if len(measured) < 2:
            raise DataError(f"{len(measured)} shapes were measured but a cost surface needs at least 2: measure more")
        shapes = np.array(sorted(measured), np.float64)
        values = np.array([measured[shape] for shape in sorted(measured)], np.float64)
        points, terms = _to_doublings(shapes), _list_terms(part, shapes)
        if not values.any():
            return cls(part, np.zeros(terms.shape[1]), points, np.zeros(len(points)))
        if not (np.isfinite(values) & (values > 0)).all():
            raise DataError(f"costs from {values.min():g} to {values.max():g} were measured: all must be above 0")
        coefficients = non_negative_least_squares(terms, values)
        deviation = log(values / product(terms, coefficients))
        spread = max(float(np.mean(deviation**2)), 1e-12)
        kernel = spread * _compute_likeness(points, points) + noise**2 * np.eye(len(points))
        weights = spread * solve(kernel, deviation)
        return cls(part, coefficients, points, weights)

    def __call__(self, shapes: FloatArray) -> FloatArray:
        """Return values (M,) at shapes (M, 2 or 3)."""
        shapes = np.asarray(shapes, np.float64).reshape(-1, self.points.shape[1])
        correction = exp(product(_compute_likeness(_to_doublings(shapes), self.points), self.weights))
        return product(_list_terms(self.part, shapes), self.coefficients) * correction


def _list_terms(part: ModelPart, shapes: FloatArray) -> FloatArray:
    """Return what costs grow with, (M, K): 1 and rows first, then tokens and scores. Relative position biases of an
    encoder-decoder's layers are laid out once for all rows: scores of one row. A decoder reads the encoder's tokens.
    """
    rows, *lengths = shapes.T
    own = lengths[-1]
    terms = [np.ones_like(rows), rows, rows * own, rows * own**2]
    if part in ("encoder", "decoder"):
        terms.append(own**2)
    if part == "decoder":
        terms += [rows * lengths[0], rows * lengths[0] * own]
    return np.stack(terms, axis=1)


def _to_doublings(shapes: FloatArray) -> FloatArray:
    return log(shapes) / math.log(2.0)


def _compute_likeness(left: FloatArray, right: FloatArray) -> FloatArray:
    squared = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2)
    return exp(-0.5 * squared / _REACH**2)


def compute_left_out_errors(
    measured: Mapping[MeasuredShape, float], part: ModelPart = "layer"
) -> dict[MeasuredShape, float]:
    """Return |predicted - measured| / measured of every shape, by a surface that has not seen it."""
    errors = {}
    for shape, value in measured.items():
        others = {other: v for other, v in measured.items() if other != shape}
        predicted = float(Surface.fit(others, part)(np.array([shape]))[0])
        errors[shape] = abs(predicted - value) / value if value else 0.0
    return errors


def choose_next_shape(
    errors: Mapping[MeasuredShape, float], candidates: Sequence[MeasuredShape]
) -> MeasuredShape | None:
    """Return the most uncertain candidate: far from the measured shapes, near those with large `errors`."""
    open_shapes = [shape for shape in candidates if shape not in errors]
    if not open_shapes:
        return None
    points, places = (_to_doublings(np.array(s, np.float64)) for s in ([*errors], open_shapes))
    kernel = _compute_likeness(points, points) + 1e-3 * np.eye(len(points))
    across = _compute_likeness(places, points)
    unknown = 1.0 - (across.T * solve(kernel, across.T)).sum(axis=0)
    error = np.array([*errors.values()]) + 1e-3
    nearby = product(across, error) / np.maximum(across.sum(axis=1), 1e-9)
    return open_shapes[int(np.argmax(np.sqrt(np.maximum(unknown, 0.0)) * nearby))]
