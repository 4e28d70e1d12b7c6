"""Interpolation over random grids: exact where the truth is multilinear, silent where a point is missing."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.costs.grid import Grid

STEADY = settings(derandomize=True)
AXES = st.lists(st.integers(1, 500), min_size=2, max_size=4, unique=True).map(sorted)


@STEADY
@given(st.lists(AXES, min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_a_multilinear_function_is_interpolated_exactly_inside_and_held_below(axes: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    slopes = rng.random((len(axes), 2))
    table = {}
    for point in itertools.product(*axes):
        table[point] = float(np.prod([a + b * x for (a, b), x in zip(slopes, point, strict=True)]))
    grid = Grid.from_points({"value": table})
    places = np.array([rng.uniform(0.3 * axis[0], axis[-1], 50) for axis in axes])
    values, known = grid.interpolate(list(places))
    held = np.maximum(places, [[axis[0]] for axis in axes])
    assert known.all()
    assert np.allclose(values[0], np.prod(slopes[:, :1] + slopes[:, 1:] * held, axis=0), rtol=1e-9)
    assert Grid.from_json(grid.to_json()).interpolate(list(places))[0].tolist() == values.tolist()


@STEADY
@given(AXES, AXES, st.integers(0, 2**32 - 1))
def test_an_answer_is_known_exactly_if_no_missing_corner_carries_weight(
    rows: list[int], lengths: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    points = list(itertools.product(rows, lengths))
    have = {point: 1.0 for point in points if rng.random() < 0.7}
    have |= {(x, lengths[0]): 1.0 for x in rows} | {(rows[0], x): 1.0 for x in lengths}  # keep the axes whole
    grid = Grid.from_points({"value": have})
    places = rng.integers(1, 520, (2, 60)).astype(float)
    places[:, :10] = np.array([points[i] for i in rng.integers(0, len(points), 10)], float).T
    values, known = grid.interpolate(list(places))
    for i, (x, y) in enumerate(np.maximum(places.T, [rows[0], lengths[0]])):
        corners = itertools.product(
            {max((p for p in rows if p <= x), default=rows[0]), min((p for p in rows if p >= x), default=None)},
            {
                max((p for p in lengths if p <= y), default=lengths[0]),
                min((p for p in lengths if p >= y), default=None),
            },
        )
        assert known[i] == all(corner in have for corner in corners)
        if known[i]:
            assert abs(values[0, i] - 1.0) < 1e-12
