"""The points of measured grids together, and the bytes at them, made to grow: what bounds over all plans lean on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dynapipe_ext.batch.micro_batches import Recompute, recompute_of_layers
from dynapipe_ext.costs.floor import least_from_on
from dynapipe_ext.costs.grid import FloatArray, Grid
from dynapipe_ext.costs.layers import COLUMNS, HALVES, LayerKind

# Numbers of rows that count as points besides the measured ones: how many fit is known to the row up to 16.
_MORE_ROWS = (*range(1, 16), 20, 24, 28, 40, 48, 56)


def merged_axes(
    grids: Mapping[tuple[Recompute, LayerKind], Grid], *, has_decoder: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Rows, encoder and decoder coordinates of all grids together; 0 for the decoder side of a decoder-only table."""
    axes: tuple[list[FloatArray], ...] = ([], [], [])
    for (_, kind), grid in grids.items():
        places = (0, 2) if kind == "postprocess" and has_decoder else (0, 1, 2)
        for place, axis in zip(places, grid.axes, strict=False):
            axes[place].append(axis)
    rows, encoder, decoder = (np.unique(np.concatenate(parts)) if parts else np.zeros(1) for parts in axes)
    more = np.array([n for n in _MORE_ROWS if n < rows[-1]], np.float64)
    return np.union1d(rows, more), encoder, decoder


def running_bytes(
    grids: Mapping[tuple[Recompute, LayerKind], Grid],
    recompute: Recompute,
    shapes: tuple[FloatArray, FloatArray, FloatArray],
    stages_held: Sequence[tuple[tuple[int, int], tuple[int, int]]],
) -> list[list[FloatArray]]:
    """Per stage of (layers, halves), what it holds while the last encoder layer runs, and the last decoder layer."""
    layer: dict[LayerKind, list[FloatArray]] = {}
    sides: dict[LayerKind, Sequence[FloatArray]] = {"encoder": shapes[:2], "decoder": shapes}
    sides |= dict.fromkeys(HALVES, shapes[:2])
    for kind, side in sides.items():
        if grid := grids.get((recompute_of_layers(recompute), kind)):
            values = 1e6 * grid.at(list(side))[0]
            layer[kind] = [values[grid.columns.index(name)] for name in COLUMNS[2:]]
    stages = []
    for (num_encoder, num_decoder), halves in stages_held:
        alone = [kind for kind, count in zip(HALVES, halves, strict=True) if count]
        held = sum((layer[kind][0] for kind in alone), 0 * shapes[0])
        parts = [num_encoder * layer["encoder"][0] + held - layer[kind][0] + layer[kind][1] for kind in alone]
        if num_encoder:
            parts.append((num_encoder - 1) * layer["encoder"][0] + layer["encoder"][1] + held)
        if num_decoder:
            before = num_encoder * layer["encoder"][0] + (num_decoder - 1) * layer["decoder"][0]
            parts.append(before + layer["decoder"][1])
        stages.append(parts)
    return stages


def that_grow(values: FloatArray) -> FloatArray:
    """The largest table that is nowhere above this one and grows with rows and lengths."""
    for axis in range(3):
        values = least_from_on(values, axis)
    return values


def hardest(tables: Sequence[FloatArray], static: Sequence[int]) -> tuple[tuple[FloatArray, int], ...]:
    """Equal tables once, with the most static bytes beside them."""
    most_of: list[tuple[FloatArray, int]] = []
    for table, beside in zip(tables, static, strict=True):
        for i, (other, most) in enumerate(most_of):
            if np.array_equal(table, other):
                most_of[i] = (other, max(most, beside))
                break
        else:
            most_of.append((table, beside))
    return tuple(most_of)
