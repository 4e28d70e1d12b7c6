"""What a cost model says of its least times, so that a global batch can be bounded before it is cut (`batch_floor`).

Either form is a promise about every micro-batch that the model can price: `TablePoints`, times that are multilinear
between measured points, or `GrowingTimes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.costs.model import IntArray, MicroBatchCosts, PricesShapes

FloatArray = npt.NDArray[np.float64]


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
    """

    padded: Callable[[int, IntArray], PaddedTimes]
    rounding_ns: FloatArray


def growing_times(costs: PricesShapes, *, split: bool, rounds_up: bool = False) -> GrowingTimes:
    """Of a model whose times have that form; `rounds_up`: by no more than one token costs alone."""

    def padded(rows: int, lengths: IntArray) -> PaddedTimes:
        priced = costs.evaluate_shapes(np.full(len(lengths), rows), lengths[:, 0], lengths[:, 1], "none")
        forward, backward = (times.astype(np.float64) for times in (priced.forward_ns, priced.backward_ns))
        return PaddedTimes(forward, backward, chain_ns_of(priced, split))

    rounding_ns = np.zeros(costs.num_stages)
    if rounds_up:
        token = padded(1, np.array([[1, 0]]))
        rounding_ns = (token.forward + token.backward)[:, 0]
    return GrowingTimes(padded, rounding_ns)


def chain_ns_of(priced: MicroBatchCosts, split: bool) -> FloatArray:
    """F down, then B, or I, back up to stage 0, where W has to follow: (M,)."""
    forward = priced.forward_ns.sum(axis=0).astype(np.float64)
    if not split:
        return np.asarray(forward + priced.backward_ns.sum(axis=0))
    return np.asarray(forward + priced.input_ns.sum(axis=0) + priced.weight_ns[0])
