"""Fits and plans have the same bits on every processor: portable functions, and runs under several BLAS kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from dynapipe_ext.reproducible import exp, log, non_negative_least_squares, product, solve
from tests.conftest import ROOT
from tests.support.limits import LIMIT_S

SEEDS = st.integers(0, 10_000)


def digests(**environment: str) -> dict[str, str]:
    # The variables are read as numpy loads: each needs a process of its own.
    done = subprocess.run(
        [sys.executable, Path("tests/support/fits_digest.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_fits_and_plans_have_the_same_bits_under_every_blas_kernel_vector_width_and_number_of_threads() -> None:
    vectors = " ".join(np.show_config(mode="dicts")["SIMD Extensions"]["found"])  # type: ignore[index]
    here = digests(OPENBLAS_NUM_THREADS="1")
    assert len(here) == 6
    assert digests(OPENBLAS_CORETYPE="Haswell", OPENBLAS_NUM_THREADS="2") == here
    assert digests(OPENBLAS_CORETYPE="Prescott", NPY_DISABLE_CPU_FEATURES=vectors) == here


def test_exponentials_and_logarithms_are_those_of_the_library_to_the_last_places() -> None:
    random = np.random.default_rng(0)
    x = np.concatenate([random.uniform(-700, 700, 20_000), random.uniform(-1, 1, 20_000), [0.0]])
    np.testing.assert_allclose(exp(x), np.exp(x), rtol=1e-15)
    y = np.concatenate([np.exp(x), random.uniform(0.5, 2, 20_000)])
    np.testing.assert_allclose(log(y), np.log(y), rtol=1e-15)
    assert exp([-np.inf, 0.0]).tolist() == [0.0, 1.0]
    assert log([0.0, 1.0]).tolist() == [-np.inf, 0.0]


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 12), st.integers(1, 5))
def test_products_and_solutions_are_those_of_lapack(seed: int, size: int, columns: int) -> None:
    random = np.random.default_rng(seed)
    a, b = random.normal(size=(size, size)), random.normal(size=(size, columns))
    np.testing.assert_allclose(product(a, b), a @ b, atol=1e-12)
    np.testing.assert_allclose(product(a, b[:, 0]), a @ b[:, 0], atol=1e-12)
    positive = a @ a.T + np.eye(size)
    np.testing.assert_allclose(solve(positive, b), np.linalg.solve(positive, b), rtol=1e-9, atol=1e-12)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_non_negative_least_squares_are_as_near_as_scipys(seed: int, rows: int, columns: int, exact: bool) -> None:
    random = np.random.default_rng(seed)
    x = random.lognormal(size=(rows, columns), sigma=2.0)
    y = product(x, np.maximum(random.normal(size=columns), 0.01)) if exact else random.lognormal(size=rows)
    found, relative = non_negative_least_squares(x, y), x / y[:, None]
    scale = relative.max(axis=0)
    theirs = nnls(relative / scale, np.ones(rows))[0] / scale
    assert (found >= 0).all()
    ours, best = (float(((product(relative, c) - 1) ** 2).sum()) for c in (found, theirs))
    assert ours <= best * (1 + 1e-8) + rows * 1e-17


@pytest.mark.parametrize("law", [(0, 0, 3.0, 0), (2.0, 0, 3.0, 0), (0, 5.0, 0, 1e-3)])
@pytest.mark.parametrize("num_points", [3, 4, 9])
def test_of_fits_that_are_exact_the_one_with_the_fewest_columns_is_taken(
    law: tuple[float, ...], num_points: int
) -> None:
    rows, length = np.array([(1, 16), (2, 16), (4, 16), (1, 128), (8, 16), (8, 128), (4, 64), (2, 32), (1, 64)]).T
    x = np.stack([np.ones(9), rows, rows * length, rows * length**2], axis=1)[:num_points]
    # The first three points have one length: rows, tokens and squares say the same there, and the earliest is taken.
    found = non_negative_least_squares(x, product(x, law))
    assert np.count_nonzero(found) <= np.count_nonzero(law)
    np.testing.assert_allclose(product(x, found), product(x, law), rtol=1e-12)
    if num_points == 9:
        np.testing.assert_allclose(found, law, rtol=1e-9, atol=0)


def test_least_squares_leave_out_a_column_that_would_be_negative() -> None:
    x = np.array([[1.0, n] for n in range(1, 9)])
    constant, slope = non_negative_least_squares(x, 100 - 3 * x[:, 1])
    assert slope == 0
    assert 70 < constant < 100


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 30), st.integers(1, 4))
def test_parts_of_a_whole_are_fitted_relative_to_it(seed: int, rows: int, columns: int) -> None:
    random = np.random.default_rng(seed)
    x, whole = random.lognormal(size=(rows, columns)), random.lognormal(size=rows)
    part = random.normal(size=rows) * whole  # noise makes some negative
    found = non_negative_least_squares(x, part, relative_to=whole)
    theirs = nnls(x / whole[:, None], part / whole)[0]
    ours, best = (float((((product(x, c) - part) / whole) ** 2).sum()) for c in (found, theirs))
    assert (found >= 0).all()
    assert ours <= best * (1 + 1e-8) + rows * 1e-17
    assert not non_negative_least_squares(x, -np.abs(part), relative_to=whole).any()
