"""Multilinear interpolation in a grid of measured values, some of which may be missing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.core import native
from dynapipe_ext.errors import DataError, short

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
GridPoint = tuple[int, ...]

INFEASIBLE = (
    1 << 50
)  # ns or bytes of a shape that cannot run: above any real cost, and 8,000 of them still sum in int64


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Columns of measured values, such as "forward_ms", over a rectangular grid of points (rows and lengths).

    `axes`: ascending coordinates, one array per axis; `values`: shape (num_columns, points in row-major order).
    `is_measured`: shape (points,); if it is False, the value is 0 and must not be used. `share_of_bytes`: if the grid
    is of a part of the measured layer, the share of the columns in MB that this part has. (a, b, c, d) is (a + b L) /
    (c + d L), where L is the coordinate on the second axis; it is exact between points too, although it is not
    linear."""

    columns: tuple[str, ...]
    axes: tuple[FloatArray, ...]
    values: FloatArray
    is_measured: BoolArray
    share_of_bytes: tuple[float, float, float, float] | None = None

    @classmethod
    def from_points(cls, columns: Mapping[str, Mapping[GridPoint, float]]) -> Grid:
        """Make a grid of values by column and point. Its axes have all coordinates of points; a point counts as
        measured if every column has it. Raises DataError without points, and for values below 0 or not finite."""
        points = sorted(set().union(*columns.values()))
        if not points:
            raise DataError(f"a cost grid of {', '.join(columns) or 'no columns'} has no points: measure at least one")
        for point, value in itertools.chain.from_iterable(column.items() for column in columns.values()):
            if not np.isfinite(value) or value < 0:
                raise DataError(f"cost {value} at grid point {point} is not a finite, non-negative number")
        axes = [sorted(set(axis)) for axis in zip(*points, strict=True)]
        every = list(itertools.product(*axes))
        values = np.array([[column.get(point, -1.0) for point in every] for column in columns.values()], np.float64)
        is_measured: BoolArray = np.logical_and.reduce(values >= 0)
        places = tuple(np.array(axis, np.float64) for axis in axes)
        return cls(tuple(columns), places, np.maximum(values, 0.0), is_measured)

    def interpolate(self, coordinates: Sequence[FloatArray]) -> tuple[FloatArray, BoolArray]:
        """Interpolate each column at `coordinates`, one array per axis. Return values (num_columns, num_shapes) and
        which shapes are known, (num_shapes,).

        Below the grid the smallest coordinate counts. Above it, or if an unmeasured corner has weight, a shape is not
        known: do not use its values. A fixed order of operations gives all machines equal bits."""
        total, in_table = native.interpolate(
            self.axes, self.values, self.is_measured, np.array(coordinates, np.float64)
        )
        if self.share_of_bytes:
            a, b, c, d = self.share_of_bytes
            share = (a + b * coordinates[1]) / (c + d * coordinates[1])
            total[[name.endswith("_mb") for name in self.columns]] *= share
        return total, in_table

    def to_json(self) -> dict[str, Any]:
        """Return the axes and, by column, the values in row-major order, null for points that were not measured."""
        return {
            "axes": [[int(x) for x in axis] for axis in self.axes],
            **({"share_of_bytes": list(self.share_of_bytes)} if self.share_of_bytes else {}),
            "columns": {
                name: [float(v) if ok else None for v, ok in zip(row, self.is_measured, strict=True)]
                for name, row in zip(self.columns, self.values, strict=True)
            },
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Grid:
        axes = [list(axis) for axis in raw["axes"]]
        if not all(type(x) is int and 0 < x < INFEASIBLE for axis in axes for x in axis):
            raise DataError(f"grid axes {short(axes)} must be rows and lengths: whole numbers, above 0")
        points, columns = list(itertools.product(*axes)), dict[str, dict[GridPoint, float]]()
        for name, values in raw["columns"].items():
            if len(values) != len(points):
                raise DataError(f"column {name!r} has {len(values)} values for a grid of {len(points)} points")
            columns[name] = {point: float(v) for point, v in zip(points, values, strict=True) if v is not None}
        grid = cls.from_points(columns)
        if [list(axis) for axis in grid.axes] != axes:
            raise DataError(f"grid axes {short(axes)} must ascend, each coordinate with a measured point: correct them")
        if "share_of_bytes" not in raw:
            return grid
        a, b, c, d = map(float, raw["share_of_bytes"])
        if len(axes) < 2 or min(a, b, d) < 0 or c <= 0 or a > c or b > d:
            raise DataError(
                f"share_of_bytes {[a, b, c, d]} must be a share, (a + b L) / (c + d L), of rows and lengths"
            )
        return replace(grid, share_of_bytes=(a, b, c, d))
