"""Costs of the pieces of a long sample: the bytes that pieces keep for later ones, and the time of a piece in addition
to that of an equally long document. It is measured for pairs (positions of the piece, positions before it), fitted, and
added to the prices of packed rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, SampleLength
from dynapipe_ext.costs.blocks import BlockAttention
from dynapipe_ext.costs.features import SUM_BYTES, Features, split_kinds
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.layers import price_layer
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts
from dynapipe_ext.costs.packed_rows import PackedLayer, count_packed_sizes
from dynapipe_ext.costs.surface import Measured
from dynapipe_ext.errors import DataError, short
from dynapipe_ext.reproducible import FloatArray, non_negative_least_squares, product

_MOST = 1e6  # ns or bytes for a position or a pair of them: so that those of the longest samples fit into 64 bits


def _check(name: str, value: float, least: float = 0.0) -> None:
    if not least <= value <= _MOST:
        raise DataError(f"{name} is {short(value)} but must be a number of {least:g} to {_MOST:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInPieces:
    """Measurements of one layer on a sample in pieces of `size` positions: `pieces` of all of them, `two` of only the
    first two, and `document` of a packed row with one document of that size. Stored bytes of pieces are those after the
    last F, with keys and values kept for other pieces."""

    size: int
    document: Measured
    pieces: Measured
    two: Measured

    @property
    def count(self) -> int:
        return len(self.pieces.each_s) // 2

    def with_table_bytes(self, grid: Grid, packed: PackedLayer | None) -> SampleInPieces:
        """Return the sample with a table's bytes of `document`: those of `grid`, or of `packed` if they are more."""
        megabytes = price_layer(grid, np.array([[1.0], [self.size]]))[0][3:]
        if packed is not None:
            row = MicroBatch((SampleLength(0, self.size),), "packed")
            megabytes = np.maximum(megabytes, packed.multiply(count_packed_sizes(Features.from_micro_batches([row]))))
        stored, peak = (int(1e6 * one) for one in megabytes[:, 0])
        return replace(self, document=replace(self.document, stored_bytes=stored, peak_bytes=peak))


@dataclass(frozen=True, slots=True)
class PairGrowth:
    """A cost in ns or bytes of a piece of q positions after p earlier ones: own_squared q^2 + before p + attended q p.
    No coefficient is negative.

    It is 0 for a sample's first piece, since that costs as much as a document. Kernels skip masked work of a document
    but not of a piece's own positions: hence the first term. Keys and values of all positions so far cause the
    second."""

    own_squared: float = 0.0
    before: float = 0.0
    attended: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _check(f"{name} of a piece", getattr(self, name))

    @classmethod
    def fit(cls, own: FloatArray, before: FloatArray, values: FloatArray, of_whole: FloatArray) -> PairGrowth:
        """Fit to `values` at pairs (q, p), all of shape (N,). Least squares of errors relative to `of_whole`: the full
        costs, of which `values` are parts."""
        return cls(*non_negative_least_squares(_stack_columns(own, before), values, relative_to=of_whole).tolist())

    def __call__(self, own: FloatArray | IntArray, before: FloatArray | IntArray) -> FloatArray:
        return product(_stack_columns(own, before), astuple(self))


def _stack_columns(own: FloatArray | IntArray, before: FloatArray | IntArray) -> FloatArray:
    q, p = np.asarray(own, np.float64), np.asarray(before, np.float64)
    return np.stack([q * q * (p > 0), p, q * p], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSurcharge:
    """Costs of a piece in one layer on top of those of an equally long document, under one recomputation mode. Times
    are of F and B. `working_bytes` are needed while the layer runs. `own_bytes`: stored per position of the piece,
    mostly below 0, without cached keys and values."""

    forward_ns: PairGrowth
    backward_ns: PairGrowth
    working_bytes: PairGrowth
    own_bytes: float

    def __post_init__(self) -> None:
        _check("own_bytes of a piece", self.own_bytes, -_MOST)

    @classmethod
    def fit(cls, samples: Sequence[SampleInPieces], kept_values: int, value_bytes: int) -> PieceSurcharge:
        """Fit to measured samples. `kept_values`: keys and values per position; `value_bytes`: of one of these. No
        measured bytes exceed the fit. Working bytes include the gradients of the keys and values of all earlier
        positions, even if the measured peak was at another moment."""
        gradients, times, ends, own_bytes = kept_values * value_bytes, [], [], []
        for one in samples:
            document, stored = one.document, one.pieces.stored_bytes - gradients * one.size * one.count
            own_bytes.append((stored / one.count - document.stored_bytes) / one.size)
            for index, seconds in enumerate(np.reshape(one.pieces.each_s, (2, -1)).T):
                times.append((one.size, one.size * index, document.forward_s, document.backward_s, *seconds))
            for count, measured in ((2, one.two), (one.count, one.pieces)):
                working = (part.peak_bytes - part.stored_bytes for part in (document, measured))
                ends.append((one.size, one.size * (count - 1), *working))
        own, before, *seconds_N = np.array(times).T
        forward_ns, backward_ns = (
            PairGrowth.fit(own, before, (whole - alone) * 1e9, whole * 1e9)
            for alone, whole in zip(seconds_N[:2], seconds_N[2:], strict=True)
        )
        own, before, of_document, of_last = np.array(ends, np.float64).T
        more = of_last - SUM_BYTES * kept_values * before - of_document
        fitted = PairGrowth.fit(own, before, more - gradients * before, of_last)
        working_bytes = replace(fitted, before=fitted.before + gradients)
        factor = max(1.0, float((more / working_bytes(own, before)).max()))
        return cls(
            forward_ns=forward_ns,
            backward_ns=backward_ns,
            working_bytes=PairGrowth(*(factor * coefficient for coefficient in astuple(working_bytes))),
            own_bytes=max(own_bytes),
        )

    def price(self, own: IntArray, before: IntArray) -> FloatArray:
        """Return F and B in ns, working and stored bytes, (4, M), of pieces with `own` positions, `before` others."""
        grown = [growth(own, before) for growth in (self.forward_ns, self.backward_ns, self.working_bytes)]
        return np.stack([*grown, self.own_bytes * own])


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSurcharges:
    """Costs of pieces in one layer beyond those of documents, by recomputation mode. `kept_values`: keys and values of
    one position on one rank."""

    kept_values: int
    by_recompute: Mapping[Recompute, PieceSurcharge]

    def __post_init__(self) -> None:
        _check("kept_values of pieces", self.kept_values)

    def find_attended_ns(self, layers: IntArray, stage_ranks: tuple[int, ...], width: int) -> tuple[float, ...]:
        """Return the least ns of F + B, over recomputation modes, per pair of a piece's position and an earlier one, by
        pipeline rank. `layers`: on each stage. Each of `width` ranks of a context-parallel group has its share."""
        modes = self.by_recompute.values()
        least_ns = min(one.forward_ns.attended + one.backward_ns.attended for one in modes)
        held = [layers[np.equal(stage_ranks, rank)].sum() for rank in sorted(set(stage_ranks))]
        return tuple(int(count) * least_ns / width for count in held)

    def add(
        self,
        costs: MicroBatchCosts,
        features: Features,
        layers: IntArray,
        value_bytes: int,
        *,
        block: BlockAttention | None = None,
        tax: float = 0.0,
    ) -> MicroBatchCosts:
        """Return `costs`, where pieces are priced as documents, with what pieces cost on top. `layers`: on each stage,
        (S,). All pieces of a sample must be among the micro-batches.

        A sample's first piece holds the keys and values of all its positions, and gradient sums of those before the
        last piece. In a context-parallel group, `block`, these and the keys and values of a running layer are divided
        by heads, all else by ranks, and times have a `tax` on top (0.1: 10 %)."""
        width = 1 if block is None else block.width
        of_keys = 1.0 if block is None or width == 1 else block.kept_values / block.key_values
        positions, layer = features.pieces, layers[:, None]
        assert positions is not None, "rows without pieces"
        again = split_kinds(features.recompute)[0] == "stage"
        total = np.zeros((4, len(again)))
        for kind, one in self.by_recompute.items():
            its = features.layers_within_stage == kind
            total[:, its] = one.price(positions.own[its], positions.before[its])
        forward_ns, backward_ns = np.rint(layer * total[:2, None] / width * (1 + tax)).astype(np.int64)
        running_bytes = (layer > 0) * np.ceil(total[2] * of_keys).astype(np.int64)
        own_bytes = np.ceil(layer * total[3] / width).astype(np.int64)
        kept_bytes = math.ceil(self.kept_values * of_keys) * positions.count_kept_bytes(value_bytes)
        return replace(
            costs,
            forward_ns=costs.forward_ns + forward_ns,
            backward_ns=costs.backward_ns + backward_ns + np.where(again, forward_ns, 0),
            stored_bytes=np.maximum(0, costs.stored_bytes + ~again * own_bytes) + layer * kept_bytes,
            working_bytes=np.maximum(0, costs.working_bytes + running_bytes + again * own_bytes),
        )
