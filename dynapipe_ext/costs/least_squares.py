"""Coefficients that cannot be negative, of few columns: exact."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def non_negative_least_squares(x_NK: FloatArray, y_N: FloatArray) -> FloatArray:
    """The K non-negative coefficients with the least sum of squared relative errors, (x c - y) / y.

    Exact for the few columns there are: the optimum is the plain solution on the columns that are not zero, so the best
    of the non-negative ones over all subsets is it (Lawson and Hanson 1974, ch. 23).
    """
    scale_K = np.maximum(x_NK.max(axis=0), 1.0)
    design_NK, ones_N = x_NK / scale_K / y_N[:, None], np.ones(len(y_N))
    count = x_NK.shape[1]
    best, least = np.zeros(count), float(len(y_N))
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            columns = list(chosen)
            solution = np.linalg.lstsq(design_NK[:, columns], ones_N, rcond=None)[0]
            residual = float(((design_NK[:, columns] @ solution - ones_N) ** 2).sum())
            if (solution >= 0).all() and residual < least:
                least, best = residual, np.zeros(count)
                best[columns] = solution
    coefficients: FloatArray = best / scale_K
    return coefficients
