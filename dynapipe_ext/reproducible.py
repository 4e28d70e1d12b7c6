"""Arithmetic with the same bits on every processor, so that fits to measurements, and plans after them, are the same.

IEEE 754 rounds sums, products, quotients and square roots alike everywhere. BLAS kernels order sums by the width of
registers and the number of threads; exponentials and logarithms differ between libraries: neither is used here.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # fdlibm's; the first has trailing zeros
_EXP_TERMS, _LOG_TERMS = 14, 12  # below half a unit in the last place of what they are added to
_NEGLIGIBLE = 1e-9  # relative: what two fits differ by, or a column adds to others, without meaning


def log(x: npt.ArrayLike) -> FloatArray:
    """Natural logarithms, within 5e-16 of themselves: 2 artanh((m - 1) / (m + 1)) of the mantissa m; of 0, -inf."""
    x = np.asarray(x, np.float64)
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa, exponent = np.where(small, 2.0 * mantissa, mantissa), exponent - small
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = np.zeros_like(s)
    for k in reversed(range(_LOG_TERMS)):
        series = series * (s * s) + 1.0 / (2 * k + 1)
    logarithms = exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2.0 * s * series)
    return np.where(x > 0, logarithms, np.where(x == 0, -np.inf, np.nan))


def exp(x: npt.ArrayLike) -> FloatArray:
    """Exponentials, within 5e-16 of themselves: 2^k times Taylor's series of what is left, below ln 2 / 2."""
    x = np.clip(np.asarray(x, np.float64), -750.0, 750.0)
    k = np.rint(x / math.log(2.0))
    left = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = np.ones_like(left)
    for n in reversed(range(1, _EXP_TERMS)):
        series = 1.0 + series * left / n
    powers: FloatArray = np.ldexp(series, k.astype(np.int32))
    return powers


def product(a_MK: npt.ArrayLike, b_KN: npt.ArrayLike) -> FloatArray:
    """a @ b of a matrix and a vector or matrix; each sum in one order."""
    a, b = np.asarray(a_MK, np.float64), np.asarray(b_KN, np.float64)
    if b.ndim == 1:
        return product(a, b[:, None])[:, 0]
    total = np.zeros((len(a), b.shape[1]))
    for k in range(len(b)):
        total += a[:, k, None] * b[k]
    return total


def solve(matrix_NN: FloatArray, right_NM: FloatArray) -> FloatArray:
    """matrix^-1 right for a symmetric positive definite matrix, by elimination, which then needs no pivots."""
    size = len(matrix_NN)
    work = np.concatenate([matrix_NN, right_NM.reshape(size, -1)], axis=1)
    for k in range(size):
        work[k + 1 :] -= (work[k + 1 :, k] / work[k, k])[:, None] * work[k]
    solution = work[:, size:]
    for k in reversed(range(size)):
        solution[k] /= work[k, k]
        solution[:k] -= work[:k, k, None] * solution[k]
    return solution.reshape(right_NM.shape)


def non_negative_least_squares(
    x_NK: FloatArray, y_N: FloatArray, *, relative_to: FloatArray | None = None
) -> FloatArray:
    """The K non-negative coefficients with the least sum of squared relative errors, (x c - y) / y, for positive y;
    `relative_to` (N,), positive, is the divisor instead of a y that is only a part of it. Zeros where no y is above 0.

    Of fits that are practically equal, the one with the fewest columns, then the earliest. Exact for the few columns
    there are: the optimum is the plain solution on the columns that are not zero, so the best of the non-negative ones
    over all subsets is it (Lawson and Hanson 1974, ch. 23).

    >>> x = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    >>> non_negative_least_squares(x, np.array([2.0, 4.0, 6.0])).round(9).tolist()
    [0.0, 2.0]
    """
    count = x_NK.shape[1]
    scale_N = y_N if relative_to is None else relative_to
    relative_NK, target_N = x_NK / scale_N[:, None], y_N / scale_N
    target_length = math.sqrt(float((target_N * target_N).sum()))
    if not target_length:
        return np.zeros(count)
    lengths_K = np.sqrt((relative_NK * relative_NK).sum(axis=0))
    scale_K = np.where(lengths_K > 0, lengths_K, 1.0)
    target_N1 = (target_N / target_length)[:, None]
    # Columns, then the target, all of length 1, over a record of the columns that each was made of.
    top = _triangle(np.concatenate([relative_NK / scale_K, target_N1], axis=1))
    states = np.concatenate([top, np.eye(count, count + 1)])[None]
    for _ in range(count):  # (state, row, column that is not decided upon): without the first one, and with it
        first, rest = states[:, :, :1], states[:, :, 1:]
        length = np.sqrt((first[:, : count + 1] ** 2).sum(axis=1, keepdims=True))
        matters = length > _NEGLIGIBLE
        unit = np.where(matters, first, 0.0) / np.where(matters, length, 1.0)
        share = (unit[:, : count + 1] * rest[:, : count + 1]).sum(axis=1, keepdims=True)
        states = np.concatenate([rest, rest - unit * share])
    errors, solutions = (states[:, : count + 1, 0] ** 2).sum(axis=1), -states[:, count + 1 :, 0]
    errors = np.where((solutions >= 0).all(axis=1), errors, np.inf)
    equal = errors <= errors.min() * (1 + _NEGLIGIBLE) + _NEGLIGIBLE**2
    chosen = min(np.flatnonzero(equal).tolist(), key=lambda subset: (subset.bit_count(), subset))
    coefficients: FloatArray = np.maximum(solutions[chosen], 0.0) / scale_K * target_length
    return coefficients


def _triangle(x_NK: FloatArray) -> FloatArray:
    """(K, K): R of x = Q R, by the modified Gram-Schmidt process (Björck 1967)."""
    count = x_NK.shape[1]
    triangle = np.zeros((count, count))
    for k in range(count):
        length = math.sqrt(float((x_NK[:, 0] * x_NK[:, 0]).sum()))
        unit = x_NK[:, 0] / (length or 1.0)
        triangle[k, k] = length
        triangle[k, k + 1 :] = (unit[:, None] * x_NK[:, 1:]).sum(axis=0)
        x_NK = x_NK[:, 1:] - unit[:, None] * triangle[k, k + 1 :]
    return triangle


def splitmix64(state: int) -> tuple[int, int]:
    """Next state and a random number of 64 bits (Steele, Lea and Flood 2014): the same on every machine.

    >>> splitmix64(0)[1], splitmix64(splitmix64(0)[0])[1]
    (16294208416658607535, 7960286522194355700)
    """
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return state, z ^ (z >> 31)
