"""Training of a memory model from measured peaks: phases by least squares, boosted trees for the rest (scikit-learn).

Every pair of batches that fitted, the first with the longer texts and the other with more of them, is one example: the
peak of the other beside the first one's. Records are held out whole, in folds: an error is of a pair of two batches
that the model saw neither of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batching.inference.batches import IntArray
from dynapipe_ext.batching.inference.memory_model import (
    MONOTONE,
    NUM_TERMS,
    LearnedMemory,
    Trees,
    features,
    shapes_of,
    terms,
)
from dynapipe_ext.batching.inference.memory_records import MeasuredOn, MemoryRecord
from dynapipe_ext.errors import DataError
from dynapipe_ext.reproducible import FloatArray, exp, log, non_negative_least_squares, product

FEWEST_RECORDS = 50
FEWEST_LENGTHS = 6
FEWEST_SIZES = 4
THRESHOLDS = (0.01, 0.025, 0.05, 0.1, 0.2)

_NUM_FOLDS = 5
NUM_FITS = _NUM_FOLDS + 1  # one without each fold, and one of all
_MOST_PHASES = 4
_ROUNDS = 30  # of the alternation between phases and their members
_CENSORED_ROUNDS = 4
_MOST_PAIRS = 200_000
_MOST_ERRORS = 2000
_DECISIVE = (0.5, 1.3)  # predicted ratios near enough to a limit for their errors to decide
_FEWEST_ERRORS = 40  # so that 1 - 0.025 has a rank among them
_BETTER = 0.98  # a further phase must lower the held-out error to this share


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Of held-out batches at a threshold: the margin, and the share above it when learned from the other folds.

    `above_limit`: the share of the largest batches that the rule would allow whose real peak is above 90 % of the first
    one's.
    """

    threshold: float
    margin: float
    above_margin: float
    above_limit: float
    num_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model with what its held-out records say. Errors are relative, of ratios of peaks, near the limit."""

    model: LearnedMemory
    num_records: int
    num_out_of_memory: int
    num_phases: int
    num_pairs: int
    median_error: float
    largest_error: float
    phases_only_error: float
    out_of_memory_foreseen: float | None
    coverage: tuple[Coverage, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Records as arrays; `peak` of a batch that ran out of memory is what there was, a lower bound."""

    shapes: IntArray  # as `shapes_of` gives them
    peak: FloatArray
    fitted: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, records: Sequence[MemoryRecord]) -> _Table:
        return cls(
            shapes_of(records),
            np.array([r.limit_bytes if r.peak_bytes is None else r.peak_bytes for r in records], np.float64),
            np.array([r.peak_bytes is not None for r in records], np.bool_),
        )

    def take(self, chosen: npt.NDArray[np.bool_]) -> _Table:
        return _Table(self.shapes[chosen], self.peak[chosen], self.fitted[chosen])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _HeldOut:
    """Pairs of batches of one fold with peaks near each other: which batch is the first, and the ratio of their peaks.

    `foreseen`: of all pairs whose second batch ran out of memory, whether that was predicted.
    """

    first: IntArray
    predicted: FloatArray
    actual: FloatArray
    errors_of_phases: FloatArray  # actual over predicted without the trees
    foreseen: list[bool]

    @property
    def errors(self) -> FloatArray:
        """Actual over predicted."""
        ratio: FloatArray = self.actual / self.predicted
        return ratio


def train(
    measured_on: MeasuredOn,
    records: Sequence[MemoryRecord],
    *,
    seed: int = 0,
    on_fit: Callable[[], None] = lambda: None,
) -> Training:
    """A memory model and its held-out errors; `on_fit` is called after each of `NUM_FITS` fits.

    Errors: DataError with the number of records that are needed.
    """
    table = _Table.of(records)
    _check_enough(table)
    generator = np.random.default_rng(seed)
    fold = generator.permutation(len(records)) % _NUM_FOLDS
    phases_of_folds, num_phases = _held_out_phases(table, fold)
    folds = []
    for k, phases in enumerate(phases_of_folds):
        trees = _boosted(table.take(fold != k), phases, generator)
        folds.append(_held_out(table.take(fold == k), phases, trees))
        on_fit()
    every = np.sort(np.concatenate([held.errors for held in folds]))
    if len(every) < _FEWEST_ERRORS:
        raise DataError(
            f"only {len(every)} held-out pairs of batches have peaks near each other, but {_FEWEST_ERRORS} are needed:"
            f" collect {len(records)} more batches"
        )
    foreseen = [one for held in folds for one in held.foreseen]
    phases = fit_phases(table.shapes, table.peak, table.fitted, num_phases)
    trees = _boosted(table, phases, generator)
    on_fit()
    model = LearnedMemory(measured_on, tuple(records), phases, trees, _thinned(every))
    return Training(
        model=model,
        num_records=len(records),
        num_out_of_memory=int((~table.fitted).sum()),
        num_phases=len(phases),
        num_pairs=len(every),
        median_error=float(np.median(np.abs(every - 1.0))),
        largest_error=float(np.abs(every - 1.0).max()),
        phases_only_error=float(np.median(np.abs(np.concatenate([held.errors_of_phases for held in folds]) - 1.0))),
        out_of_memory_foreseen=float(np.mean(foreseen)) if foreseen else None,
        coverage=tuple(_coverage(threshold, model, folds) for threshold in THRESHOLDS),
    )


def _held_out(held: _Table, phases: FloatArray, trees: Trees) -> _HeldOut:
    i, j = _pairs(held)
    predicted, actual = _ratios(held, i, j, phases, trees), held.peak[j] / held.peak[i]
    lost = ~held.fitted[j]
    near = (predicted > _DECISIVE[0]) & (predicted < _DECISIVE[1]) & (~lost | (actual > predicted))
    return _HeldOut(
        first=i[near],
        predicted=predicted[near],
        actual=actual[near],
        errors_of_phases=(actual / _ratios(held, i, j, phases, None))[near],
        foreseen=(predicted[lost] >= actual[lost]).tolist(),
    )


def _check_enough(table: _Table) -> None:
    num_fitted = int(table.fitted.sum())
    if num_fitted < FEWEST_RECORDS:
        raise DataError(
            f"{num_fitted} batches that fitted are too few: {FEWEST_RECORDS} are needed, so collect"
            f" {FEWEST_RECORDS - num_fitted} more"
        )
    for name, values, fewest, flag in (
        ("lengths", table.shapes[:, 1], FEWEST_LENGTHS, "--max-length"),
        ("numbers of texts", table.shapes[:, 0], FEWEST_SIZES, "--max-rows"),
    ):
        num_values = len(np.unique(values[table.fitted]))
        if num_values < fewest:
            raise DataError(
                f"{num_values} different {name} are too few: {fewest} are needed, so collect with more {flag}"
            )


def _pairs(table: _Table) -> tuple[IntArray, IntArray]:
    """Places (first, other): the first fitted, the other has no longer texts and no fewer of them."""
    places = np.arange(len(table.peak))
    i, j = (x.ravel() for x in np.meshgrid(places, places, indexing="ij"))
    rows, longest = table.shapes[:, 0], table.shapes[:, 1]
    wanted = (longest[j] <= longest[i]) & (rows[j] >= rows[i]) & (i != j) & table.fitted[i]
    return i[wanted], j[wanted]


def _ratios(table: _Table, i: IntArray, j: IntArray, phases: FloatArray, trees: Trees | None) -> FloatArray:
    height = product(terms(table.shapes), phases.T).max(axis=1)
    ratio: FloatArray = height[j] / height[i]
    if trees is not None:
        ratio = ratio * exp(trees.predict(_features(table, i, j)))
    return ratio


def _features(table: _Table, i: IntArray, j: IntArray) -> FloatArray:
    return features(table.shapes[j], table.shapes[i])


def fit_phases(shapes_B4: IntArray, peak: FloatArray, fitted: npt.NDArray[np.bool_], num_phases: int) -> FloatArray:
    """(phase, term): the maximum of polynomials with least squared relative error; never below 0.

    Batches go to the phase that is highest for them and the phases are fitted again, from several starts. Where a batch
    out of memory is predicted to fit, what there was stands in for its peak, and all is fitted again.
    """
    x_BT = terms(shapes_B4)
    counted = fitted.copy()
    phases = _alternated(x_BT[counted], peak[counted], num_phases)
    for _ in range(_CENSORED_ROUNDS):
        wrong = ~fitted & (product(x_BT, phases.T).max(axis=1) < peak)
        if (wrong <= counted).all():
            break
        counted |= wrong
        phases = _alternated(x_BT[counted], peak[counted], num_phases)
    return phases


def _alternated(x_BT: FloatArray, peak: FloatArray, num_phases: int) -> FloatArray:
    longest = x_BT[:, 1]
    fitted: dict[bytes, FloatArray] = {}  # by members: starts come to the same ones

    def polynomial(members: npt.NDArray[np.bool_]) -> FloatArray:
        if members.sum() < NUM_TERMS:
            return np.zeros(NUM_TERMS)
        if (key := members.tobytes()) not in fitted:
            fitted[key] = non_negative_least_squares(x_BT[members], peak[members])
        return fitted[key]

    best_error, best = math.inf, np.zeros((1, NUM_TERMS))
    for key in (longest, x_BT[:, 4], x_BT[:, 5], peak / x_BT[:, 3]) if num_phases > 1 else (longest,):
        member = np.argsort(np.argsort(key, kind="stable"), kind="stable") * num_phases // len(key)
        for _ in range(_ROUNDS):
            phases = np.stack([polynomial(member == phase) for phase in range(num_phases)])
            heights = product(x_BT, phases.T)
            highest = np.maximum(heights.max(axis=1), 1e-3)
            error = float(np.mean(log(highest / peak) ** 2))
            if error < best_error:
                best_error, best = error, phases
            moved = heights.argmax(axis=1)
            if (moved == member).all():
                break
            member = moved
    used: FloatArray = best[best.sum(axis=1) > 0.0]
    return used


def _held_out_phases(table: _Table, fold: IntArray) -> tuple[list[FloatArray], int]:
    """Phases without each fold, and how many: the fewest whose held-out error no further one lowers by much."""
    scores: list[float] = []
    phases_of_fold: list[list[FloatArray]] = []
    for num_phases in range(1, _MOST_PHASES + 1):
        squares = []
        phases_of_fold.append([])
        for k in range(_NUM_FOLDS):
            seen, held = table.take(fold != k), table.take((fold == k) & table.fitted)
            phases = fit_phases(seen.shapes, seen.peak, seen.fitted, num_phases)
            heights = product(terms(held.shapes), phases.T).max(axis=1)
            squares.append(log(heights / held.peak) ** 2)
            phases_of_fold[-1].append(phases)
        scores.append(float(np.sqrt(np.concatenate(squares).mean())))
    chosen = 0
    for number, score in enumerate(scores):
        if score < _BETTER * scores[chosen]:
            chosen = number
    return phases_of_fold[chosen], chosen + 1


def _boosted(table: _Table, phases: FloatArray, generator: np.random.Generator) -> Trees:
    """Trees for the logarithm of actual over the phases' ratio of each pair."""
    # Neither has type information; the second comes with the first.
    from sklearn.ensemble import HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    i, j = _pairs(table)
    ratio = _ratios(table, i, j, phases, None)
    target = log(table.peak[j] / table.peak[i] / ratio)
    counted = table.fitted[j] | (target > 0.0)  # a batch out of memory says only that its peak is no lower
    i, j, target = i[counted], j[counted], target[counted]
    if len(i) > _MOST_PAIRS:
        some = generator.choice(len(i), _MOST_PAIRS, replace=False)
        i, j, target = i[some], j[some], target[some]
    regressor = HistGradientBoostingRegressor(
        max_iter=100,
        learning_rate=0.1,
        max_leaf_nodes=15,
        min_samples_leaf=20,
        monotonic_cst=list(MONOTONE),
        early_stopping=False,
        random_state=0,
    )
    with threadpool_limits(1):  # threads that wait for each other cost more than so few examples
        regressor.fit(_features(table, i, j), target)
    return exported(regressor)


def exported(regressor: object) -> Trees:
    """The trees of a fitted HistGradientBoostingRegressor of one output, without categories or missing values."""
    read: Callable[[str], object] = regressor.__getattribute__
    iterations, baseline = read("_predictors"), read("_baseline_prediction")
    trees = []
    for (predictor,) in iterations:  # type: ignore[attr-defined]  # scikit-learn has no type information
        nodes = predictor.nodes
        leaf = nodes["is_leaf"].astype(bool)
        trees.append(
            {
                "feature": np.where(leaf, 0, nodes["feature_idx"]).tolist(),
                "threshold": np.where(leaf, 0.0, nodes["num_threshold"]).tolist(),
                "left": np.where(leaf, -1, nodes["left"].astype(np.int64)).tolist(),
                "right": np.where(leaf, -1, nodes["right"].astype(np.int64)).tolist(),
                "value": np.where(leaf, nodes["value"], 0.0).tolist(),
            }
        )
    return Trees.from_lists(float(np.asarray(baseline).ravel()[0]), trees, "the regressor")


def _thinned(errors: FloatArray) -> tuple[float, ...]:
    """At most so many of ascending errors that quantiles come out no lower."""
    if len(errors) <= _MOST_ERRORS:
        return tuple(errors.tolist())
    places = np.ceil(np.arange(1, _MOST_ERRORS + 1) * len(errors) / _MOST_ERRORS).astype(int) - 1
    return tuple(errors[places].tolist())


def _coverage(threshold: float, model: LearnedMemory, folds: Sequence[_HeldOut]) -> Coverage:
    """Each fold is judged by the margin that the errors of the others give."""
    above, over, num_picks = 0, 0, 0
    for held in folds:
        others = np.sort(np.concatenate([other.errors for other in folds if other is not held]))
        rank = min(math.ceil((len(others) + 1) * (1.0 - threshold)), len(others))
        margin = max(1.0, float(others[rank - 1]))
        above += int((held.errors > margin).sum())
        for first in np.unique(held.first):
            allowed = (held.first == first) & (held.predicted * margin <= 0.9)
            if allowed.any():
                pick = np.flatnonzero(allowed)[held.predicted[allowed].argmax()]
                num_picks += 1
                over += int(held.actual[pick] > 0.9)
    rank = min(math.ceil((len(model.errors) + 1) * (1.0 - threshold)), len(model.errors))
    return Coverage(
        threshold=threshold,
        margin=max(1.0, model.errors[rank - 1]),
        above_margin=above / sum(len(held.errors) for held in folds),
        above_limit=over / max(1, num_picks),
        num_batches=num_picks,
    )
