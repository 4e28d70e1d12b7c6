"""Bytes of a layer on packed rows, fitted to what was measured: documents end to end keep what padded rows do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute
from dynapipe_ext.costs.layers import LayerKind
from dynapipe_ext.errors import DataError, short
from dynapipe_ext.reproducible import FloatArray, non_negative_least_squares, product

_SIZES = 6  # of a row: 1; positions of encoder and decoder; squares of documents, on either side and across
_GROWS_WITH: Mapping[LayerKind, tuple[int, ...]] = {"encoder": (0, 1, 3), "decoder": (0, 1, 2, 4, 5)}


def packed_sizes(micro_batches: Sequence[MicroBatch]) -> FloatArray:
    """What bytes of packed rows grow with, (6, M); zeros for rows that are not packed, or attended to as a whole."""
    sizes = np.zeros((_SIZES, len(micro_batches)))
    for m, own in zip(micro_batches, sizes.T, strict=True):
        if m.layout != "packed" or m.attention == "row":
            continue
        pairs = [(s.encoder, s.decoder) for s in m.samples] if m.decoder_len else [(n, 0) for n in m.documents]
        encoder, decoder = np.array(pairs, np.float64).T
        pad_e, pad_d = m.encoder_len - encoder.sum(), m.decoder_len - decoder.sum()
        squares = [(a * b).sum() + pad for a, b, pad in _products(encoder, decoder, pad_e, pad_d)]
        own[:] = 1, m.encoder_len, m.decoder_len, *squares
    return sizes


def _products(e: FloatArray, d: FloatArray, pad_e: float, pad_d: float) -> list[tuple[FloatArray, FloatArray, float]]:
    return [(e, e, pad_e * pad_e), (d, d, pad_d * pad_d), (e, d, pad_e * pad_d)]


def sizes_of_slice(sizes: FloatArray, width: int) -> FloatArray:
    """Of rows of a `width`-th of the positions in as many documents."""
    return sizes / np.array([1, *[width] * 2, *[width**2] * 3], np.float64)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """Bytes that one layer stores of a packed row, and needs most at any time, for each of what they grow with."""

    stored_bytes: tuple[float, ...]
    peak_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in self.__slots__:
            terms = getattr(self, name)
            if len(terms) != _SIZES or not all(isinstance(x, int | float) and 0 <= x <= 1e12 for x in terms):
                raise DataError(f"{name} of packed rows are {short(terms)} but must be {_SIZES} numbers of 0 to 1e12")

    @classmethod
    def fit(cls, kind: LayerKind, rows: Sequence[MicroBatch], measured: Sequence[tuple[int, int]]) -> PackedLayer:
        """Of (stored, peak) bytes of rows, with the least relative errors."""
        places = list(_GROWS_WITH[kind])
        terms = packed_sizes(rows)[places].T

        def fitted(values: Sequence[int]) -> tuple[float, ...]:
            coefficients = np.zeros(_SIZES)
            coefficients[places] = non_negative_least_squares(terms, np.array(values, np.float64))
            return tuple(round(float(x), 6) for x in coefficients)

        stored, peak = zip(*measured, strict=True)
        return cls(stored_bytes=fitted(stored), peak_bytes=fitted(peak))

    def of(self, sizes: FloatArray) -> FloatArray:
        """(stored, peak) MB, (2, M)."""
        return np.stack([1e-6 * product(sizes.T, terms) for terms in (self.stored_bytes, self.peak_bytes)])

    def to_json(self) -> dict[str, Any]:
        return {name: list(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PackedLayer:
        return cls(stored_bytes=tuple(raw["stored_bytes"]), peak_bytes=tuple(raw["peak_bytes"]))


PackedLayers = Mapping[tuple[Recompute, LayerKind], PackedLayer]


def packed_to_json(layers: PackedLayers) -> list[dict[str, Any]]:
    return [{"recompute": kind, "layer": layer, **one.to_json()} for (kind, layer), one in sorted(layers.items())]


def packed_from_json(raw: Iterable[Mapping[str, Any]]) -> PackedLayers:
    return {(one["recompute"], one["layer"]): PackedLayer.from_json(one) for one in raw}


def added_to_stages(
    layers: Sequence[tuple[int, int]], more: Mapping[LayerKind, FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """MB that every stage stores in addition, and those that it needs in addition while its last layer runs, each
    (stages, M). `layers`: the numbers of (encoder, decoder) layers of each stage. `more`: for each kind of layer its
    additional (stored, peak) MB, (2, M), none below 0."""
    stored = sum(np.outer([pair[side] for pair in layers], more[kind][0]) for side, kind in enumerate(more))
    running = []
    for num_encoder, num_decoder in layers:
        held, last = 0.0 * more["encoder"][0], 0.0 * more["encoder"][0]
        for kind, count in zip(more, (num_encoder, num_decoder), strict=False):
            if count:
                last = np.maximum(last, held + (count - 1) * more[kind][0] + more[kind][1])
            held = held + count * more[kind][0]
        running.append(last)
    return np.asarray(stored), np.array(running)
