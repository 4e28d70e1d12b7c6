"""Bytes of a layer on packed rows, fitted to measurements, as these rows store what padded rows do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.costs.features import Features
from dynapipe_ext.costs.layers import LayerKind
from dynapipe_ext.errors import DataError, short
from dynapipe_ext.reproducible import FloatArray, non_negative_least_squares, product

_SIZES = 6  # of a row: 1; positions of encoder and decoder; squares of documents, on either side and across
_GROWS_WITH: Mapping[LayerKind, tuple[int, ...]] = {"encoder": (0, 1, 3), "decoder": (0, 1, 2, 4, 5)}


def count_packed_sizes(features: Features) -> FloatArray:
    """Return the sizes that bytes of packed rows grow with, (6, M): 1, positions of encoder and decoder, squared
    lengths of encoder and decoder documents, and encoder x decoder. All are 0 for rows that are not packed, and for
    rows that are attended to in full."""
    is_packed = np.zeros(features.positions.shape[1], bool)
    if features.micro_batches:
        is_packed[:] = [m.layout == "packed" and m.attention != "row" for m in features.micro_batches]
    sizes = is_packed * np.vstack([is_packed, features.positions]).astype(np.float64)
    if features.pieces is not None:
        sizes[3] -= 2 * features.pieces.before * features.pieces.own  # of documents, not of earlier pieces
    return sizes


def slice_sizes(sizes: FloatArray, width: int) -> FloatArray:
    """Return the sizes, (6, M), of one of `width` position shards: as many documents, each 1 / `width` as long."""
    return sizes / np.array([1, *[width] * 2, *[width**2] * 3], np.float64)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """Bytes that one layer stores of a packed row, and its peak while it runs: coefficients in bytes for each of the 6
    sizes of `count_packed_sizes`."""

    stored_bytes: tuple[float, ...]
    peak_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in self.__slots__:
            terms = getattr(self, name)
            if len(terms) != _SIZES or not all(isinstance(x, int | float) and 0 <= x <= 1e12 for x in terms):
                raise DataError(f"{name} of packed rows are {short(terms)} but must be {_SIZES} numbers of 0 to 1e12")

    @classmethod
    def fit(cls, kind: LayerKind, rows: Sequence[MicroBatch], measured: Sequence[tuple[int, int]]) -> PackedLayer:
        """Fit to `measured`, the (stored, peak) bytes of each row, with least relative errors."""
        places = list(_GROWS_WITH[kind])
        terms = count_packed_sizes(Features.from_micro_batches(rows))[places].T
        fitted = np.zeros((2, _SIZES))
        fitted[:, places] = [non_negative_least_squares(terms, values) for values in np.array(measured, np.float64).T]
        stored, peak = (tuple(round(x, 6) for x in coefficients) for coefficients in fitted.tolist())
        return cls(stored_bytes=stored, peak_bytes=peak)

    def multiply(self, sizes: FloatArray) -> FloatArray:
        """Return (stored, peak) MB, (2, M), of rows with these `count_packed_sizes`; 0 if all sizes are 0."""
        megabytes, is_packed = np.zeros((2, sizes.shape[1])), sizes[0] > 0
        if is_packed.any():
            coefficients = np.transpose([self.stored_bytes, self.peak_bytes])
            megabytes[:, is_packed] = 1e-6 * product(sizes[:, is_packed].T, coefficients).T
        return megabytes
