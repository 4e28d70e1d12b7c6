"""A smooth function of all shapes, fitted to measurements at a few of them; its errors, and what to measure next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.errors import DataError
from dynapipe_ext.reproducible import FloatArray, exp, log, non_negative_least_squares, product, solve

ModelPart = Literal["layer", "encoder", "decoder", "head"]  # a layer of a decoder-only model, or of either side
PARTS: tuple[ModelPart, ...] = get_args(ModelPart)
MeasuredShape = tuple[int, ...]  # rows and positions; of an encoder-decoder, rows and the positions of either side
QUANTITIES = ("forward_s", "backward_s", "input_s", "weight_s", "stored_bytes", "peak_bytes")

_REACH = 1.5  # doublings over which two points' deviations from the fit still resemble each other
NOISE, EXACT = 0.02, 1e-3  # relative: of one measured time, of counted bytes


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured costs of one layer, or the head, for one micro-batch. Seconds are of F, B, and I and W, the parts of a
    split B. `stored_bytes` are held from F to B; `peak_bytes` are the most that the layer needs at any time, stored
    ones included. Neither includes the encoder's output, which a stage holds once for all its decoder layers.

    For pieces of a sample, all F run before all B. Seconds are then sums, without I and W, and bytes those of all
    pieces together. `each_s`: the seconds of every F, then of every B, in the order of positions."""

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    stored_bytes: int
    peak_bytes: int
    each_s: tuple[float, ...] = ()


class Measure(Protocol):
    """A function that measures one layer, or the head, for one micro-batch or for pieces of one sample. It returns None
    if these do not fit in memory; with `bytes_only` times are 0. A part reads only the lengths of `reduce_shape`."""

    def __call__(self, part: ModelPart, *micro_batches: MicroBatch, bytes_only: bool = False) -> Measured | None: ...


def reduce_shape(part: ModelPart, shape: MeasuredShape) -> MeasuredShape:
    """Return the sizes of a shape that a part's costs depend on: the number of rows, and the lengths that it reads.

    >>> [reduce_shape(part, (4, 96, 16)) for part in ("encoder", "decoder", "head")]
    [(4, 96), (4, 96, 16), (4, 16)]
    """
    if part == "head":
        return shape[0], shape[-1]
    return shape[:2] if part == "encoder" else shape


def fit_surface(
    measured: Mapping[MeasuredShape, float], part: ModelPart = "layer", *, noise: float = NOISE
) -> Callable[[FloatArray], FloatArray]:
    """Fit a cost surface to values at shapes. Return a function from shapes, (M, 2 or 3), to values, (M,): a sum of
    fitted rates x terms (1, tokens, tokens x length and the like, `_list_terms`), times a correction that follows the
    points.

    The correction is a Gaussian process (Rasmussen and Williams 2006, ch. 2) of log(measured / sum), over doublings of
    rows and length. The function passes each point within the relative `noise` and fades into the sum between points.
    If all values are 0 (a W without work), it is 0. Raises DataError for fewer than two shapes, and for values that are
    neither all 0 nor all above 0."""
    if len(measured) < 2:
        raise DataError(f"{len(measured)} shapes were measured but a cost surface needs at least 2: measure more")
    shapes = np.array(sorted(measured), np.float64)
    values = np.array([measured[shape] for shape in sorted(measured)], np.float64)
    if not values.any():
        return lambda places: np.zeros(len(places))
    if not (np.isfinite(values) & (values > 0)).all():
        raise DataError(f"costs from {values.min():g} to {values.max():g} were measured: all must be above 0")
    terms = _list_terms(part, shapes)
    coefficients = non_negative_least_squares(terms, values)
    deviation = log(values / product(terms, coefficients))
    spread = max(float(np.mean(deviation**2)), 1e-12)
    weights = spread * solve(spread * _compute_likeness(shapes, shapes) + noise**2 * np.eye(len(shapes)), deviation)

    def evaluate(places: FloatArray) -> FloatArray:
        correction = exp(product(_compute_likeness(places, shapes), weights))
        return product(_list_terms(part, places), coefficients) * correction

    return evaluate


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


def _compute_likeness(left: FloatArray, right: FloatArray) -> FloatArray:
    """Return how much shapes (M, 2 or 3) resemble others (N, 2 or 3), by their distance in doublings: (M, N)."""
    doublings, others = (log(shapes) / math.log(2.0) for shapes in (left, right))
    return exp(-0.5 * ((doublings[:, None, :] - others[None, :, :]) ** 2).sum(axis=2) / _REACH**2)


def compute_left_out_errors(
    measured: Mapping[MeasuredShape, float], part: ModelPart = "layer"
) -> dict[MeasuredShape, float]:
    """Return |predicted - measured| / measured of every shape, predicted by a surface fitted to all other shapes."""
    errors = {}
    for shape, value in measured.items():
        others = {other: v for other, v in measured.items() if other != shape}
        predicted = float(fit_surface(others, part)(np.array([shape], np.float64))[0])
        errors[shape] = abs(predicted - value) / value if value else 0.0
    return errors


def rank_shapes(errors: Mapping[MeasuredShape, float], candidates: Sequence[MeasuredShape]) -> list[MeasuredShape]:
    """Return the candidates, the most uncertain first: those far from the measured shapes, which are the keys of
    `errors`, and those near shapes with a large relative error."""
    if not candidates:
        return []
    points, places = (np.array(shapes, np.float64) for shapes in ([*errors], candidates))
    kernel = _compute_likeness(points, points) + 1e-3 * np.eye(len(points))
    across = _compute_likeness(places, points)
    unknown = 1.0 - (across.T * solve(kernel, across.T)).sum(axis=0)
    nearby = product(across, np.array([*errors.values()]) + 1e-3) / np.maximum(across.sum(axis=1), 1e-9)
    uncertainty = np.sqrt(np.maximum(unknown, 0.0)) * nearby
    return [candidates[place] for place in np.argsort(-uncertainty, kind="stable")]
