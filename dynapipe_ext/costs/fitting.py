"""Fits of costs to a run's action times: `MeasuredAction`s are the input, costs with `FittedTimes` the output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.batch.micro_batches import Recompute
from dynapipe_ext.costs.adjustments import (
    CORRECTED,
    LETTERS,
    OF_KIND,
    FittedTimes,
    TimeCorrection,
    adjust,
    correct_times,
    find_fitted_times,
    make_correction_terms,
)
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.reproducible import FloatArray, non_negative_least_squares, product

_ENOUGH = 8  # actions of one kind of recomputation for a correction of their own
_WORTH_MORE_TERMS = 0.5  # of the error with only a factor: more terms than are needed follow noise


@dataclass(frozen=True, slots=True)
class MeasuredAction:
    """One action of `letter` (F, B, I or W) that has run. `base_ns`: its time by the costs before any fit.
    `predicted_ns`: its time by the costs that its plan was made with. `tokens` and `squares` are those of
    `count_positions`; `shape` is (rows, encoder_len, decoder_len)."""

    stage: int
    letter: str
    recompute: Recompute
    shape: tuple[int, int, int]
    tokens: int
    squares: int
    base_ns: int
    predicted_ns: int
    measured_ns: int


def fit_times(costs: CostModel, actions: Sequence[MeasuredAction]) -> CostModel:
    """Return the costs with times fitted to measured actions, by stage and action kind; those of B and I also by
    recomputation mode if it has at least 8 actions. A correction stays if nothing was measured for it this time."""
    alike: dict[tuple[int, str], list[MeasuredAction]] = defaultdict(list)
    for action in actions:
        if action.base_ns > 0 and action.measured_ns > 0:
            alike[action.stage, action.letter].append(action)
            if of_kind := OF_KIND.get((action.letter, action.recompute)):
                alike[action.stage, of_kind].append(action)
    earlier = find_fitted_times(costs)
    corrections = [dict(stage) for stage in earlier.corrections] if earlier else [{} for _ in range(costs.num_stages)]
    for name in CORRECTED:
        for stage, of_stage in enumerate(corrections):
            if len(same := alike[stage, name]) >= (1 if name in LETTERS else _ENOUGH):
                of_stage[name] = _fit(same)
    return adjust(costs, fitted=FittedTimes(tuple(corrections)))


def find_prediction_error(times: FittedTimes, actions: Sequence[MeasuredAction]) -> tuple[float, float]:
    """Return sum |predicted - measured| / sum of measured times, as the plans predicted them and as `times` do."""
    measured_ns = sum(action.measured_ns for action in actions)
    before_ns = sum(abs(action.predicted_ns - action.measured_ns) for action in actions)
    after_ns = 0.0
    for action in actions:
        stage, kind = times.corrections[action.stage], np.array([action.recompute])
        fitted_ns = correct_times(stage, action.letter, _list_terms([action]), kind)
        after_ns += abs(float(fitted_ns[0]) - action.measured_ns)
    return before_ns / measured_ns, after_ns / measured_ns


def _fit(actions: Sequence[MeasuredAction]) -> TimeCorrection:
    """Fit with least relative errors: only a factor, unless overhead, tokens and squares explain much of the rest."""
    terms, measured = _list_terms(actions), np.array([a.measured_ns for a in actions], np.float64)
    factor = np.append(non_negative_least_squares(terms[:, :1], measured), [0.0, 0.0, 0.0])
    full = non_negative_least_squares(terms, measured)
    errors = [float(np.abs(product(terms, fit) - measured).sum()) for fit in (factor, full)]
    return TimeCorrection(*(full if errors[1] < _WORTH_MORE_TERMS * errors[0] else factor).tolist())


def _list_terms(actions: Sequence[MeasuredAction]) -> FloatArray:
    return make_correction_terms(*np.array([(a.base_ns, a.tokens, a.squares) for a in actions], np.int64).T)
