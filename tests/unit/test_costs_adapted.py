"""Times fitted to what actions have taken: what they find, what they leave, and where they hold."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import RECOMPUTES, Layout, MicroBatch, Recompute, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adjustments import (
    AdjustedCosts,
    FittedTimes,
    FrozenWeights,
    TimeCorrection,
    adjust,
    find_fitted_times,
    list_times,
)
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.features import count_positions
from dynapipe_ext.costs.fitting import MeasuredAction, find_prediction_error, fit_times
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.model import CostCapabilities, CostModel
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.drift import fitted_costs
from dynapipe_ext.models.named_models import preset
from tests.support.priced import list_values

RIGHT = TokenCosts(4, ns_per_token_squared=8, overhead_ns=20_000, stage_scale=(1.0, 0.8, 1.1, 1.3))
WRONG = {
    "scaled by stage": replace(RIGHT, stage_scale=(1.0, 2.0, 0.5, 0.3)),
    "without the quadratic part": replace(RIGHT, ns_per_token_squared=0),
    "with ten times the quadratic part": replace(RIGHT, ns_per_token_squared=80),
    "without an overhead": replace(RIGHT, overhead_ns=0, stage_scale=()),
}


def batches(seed: int, layout: Layout = "padded") -> list[MicroBatch]:
    """As many of each kind of recomputation."""
    draw = np.random.default_rng(seed)
    sizes = [draw.integers(8, 600, draw.integers(1, 6)) for _ in range(30)]
    return [
        MicroBatch(tuple(SampleLength(j, int(n)) for j, n in enumerate(of)), layout, RECOMPUTES[i % 3])
        for i, of in enumerate(sizes)
    ]


def measured(
    costs: CostModel, right: CostModel, micro_batches: list[MicroBatch], *, letters: str, noise: float = 0.0
) -> list[MeasuredAction]:
    """What a step of `micro_batches`, planned with `costs`, has taken where `right` is the truth."""
    base = adjust(costs, fitted=None)
    tables = [list_times(model.evaluate(micro_batches)) for model in (base, costs, right)]
    draw = np.random.default_rng(1)
    return [
        MeasuredAction(
            s,
            letter,
            m.recompute,
            (m.rows, m.encoder_len, m.decoder_len),
            *count_positions(m),
            int(tables[0][letter][s, i]),
            int(tables[1][letter][s, i]),
            round(int(tables[2][letter][s, i]) * float(draw.uniform(1 - noise, 1 + noise))),
        )
        for letter in letters
        for s in range(4)
        for i, m in enumerate(micro_batches)
    ]


@pytest.mark.parametrize("letters", ["FB", "FIW"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_times_of_actions_tell_the_right_costs_of_other_shapes(wrong: TokenCosts, letters: str) -> None:
    seen, others = batches(0), batches(1) + batches(2, "packed")
    found = fit_times(wrong, measured(wrong, RIGHT, seen, letters=letters)).evaluate(others)
    right, before = RIGHT.evaluate(others), wrong.evaluate(others)
    assert np.abs(before.forward_ns / right.forward_ns - 1).max() > 0.1
    np.testing.assert_allclose(found.forward_ns, right.forward_ns, rtol=1e-3)
    np.testing.assert_allclose(found.backward_ns, right.backward_ns, rtol=1e-3)
    if letters == "FIW":
        np.testing.assert_allclose(found.weight_ns, right.weight_ns, rtol=1e-3)
    assert (found.stored_bytes == before.stored_bytes).all()
    assert (found.transfer_ns == before.transfer_ns).all()


def test_costs_are_fitted_where_they_are_far_off_and_the_fit_is_much_closer_and_then_no_more() -> None:
    wrong, seen = WRONG["scaled by stage"], batches(0)
    found = fitted_costs(measured(wrong, RIGHT, seen, letters="FB", noise=0.1), wrong)
    assert found is not None
    costs, errors = found
    assert errors.error_before > 0.4
    assert errors.error_after < 0.1
    assert fitted_costs(measured(costs, RIGHT, batches(3), letters="FB", noise=0.1), costs) is None
    again = fit_times(costs, measured(costs, RIGHT, batches(3), letters="FB"))
    assert isinstance(again, AdjustedCosts)
    assert again.fitted
    assert again.prices is wrong  # a fit of a fit would keep the errors of both
    assert find_prediction_error(again.fitted, measured(again, RIGHT, batches(4), letters="FB"))[0] < 1e-3
    doubled = replace(RIGHT, ns_per_token=1_100)  # nearly right
    assert fitted_costs(measured(doubled, RIGHT, seen, letters="FB"), doubled) is None
    assert fitted_costs([], wrong) is None


def test_noise_alone_makes_no_terms_of_its_own() -> None:
    corrections = fit_times(RIGHT, measured(RIGHT, RIGHT, batches(0), letters="FB", noise=0.15))
    times = find_fitted_times(corrections)
    assert times is not None
    for stage in times.corrections:
        for correction in stage.values():
            assert correction.scale == pytest.approx(1.0, abs=0.06)
            assert (correction.overhead_ns, correction.ns_per_token, correction.ns_per_token_squared) == (0, 0, 0)


def test_shapes_cost_what_their_micro_batches_do_and_what_cannot_be_stays_so() -> None:
    costs = adjust(
        RIGHT, fitted=FittedTimes(({"F": TimeCorrection(2.0, 5, 3, 0.5), "B": TimeCorrection(0.5)}, {}, {}, {}))
    )
    for recompute in RECOMPUTES:
        one = costs.evaluate([MicroBatch(tuple(SampleLength(i, 40) for i in range(3)), recompute=recompute)])
        shape = costs.evaluate_shapes(np.array([3]), np.array([40]), 0, recompute)
        for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes"):
            assert (getattr(one, name) == getattr(shape, name)).all(), name
    f = int(RIGHT.evaluate([MicroBatch((SampleLength(0, 40),))]).forward_ns[0, 0])
    found = costs.evaluate([MicroBatch((SampleLength(0, 40),))])
    assert found.forward_ns[0, 0] == 2 * f + 5 + 3 * 40 + 0.5 * 1600
    assert (found.forward_ns[1:] == RIGHT.evaluate([MicroBatch((SampleLength(0, 40),))]).forward_ns[1:]).all()

    class Short:
        num_stages, facts = 4, CostCapabilities()

        def price(self, features: Any) -> Any:
            of = RIGHT.price(features)
            return replace(of, **{n: np.full_like(getattr(of, n), INFEASIBLE) for n in ("forward_ns", "backward_ns")})

    never = AdjustedCosts(Short(), fitted=find_fitted_times(costs)).evaluate_shapes([1, 2], 8)  # type: ignore[arg-type]
    assert (never.forward_ns == INFEASIBLE).all()
    assert (never.backward_ns == INFEASIBLE).all()


def test_fitted_times_are_of_their_stages_with_any_number_of_replicas() -> None:
    counted = AnalyticCosts(preset("llama-2-7b"), Topology(tp=2, pp=4).with_layers(32), flops_per_s=1e14)
    costs = adjust(counted, fitted=FittedTimes(({"F": TimeCorrection(2.0)},) * 4))
    wider, _ = costs.with_topology(Topology(tp=2, pp=4, dp=8).with_layers(32))
    assert isinstance(wider, AdjustedCosts)
    assert wider.fitted == find_fitted_times(costs)
    assert wider.prices == counted.with_topology(Topology(tp=2, pp=4, dp=8).with_layers(32))[0]
    for other in (Topology(tp=2, pp=8), Topology(tp=1, pp=4), Topology(tp=2, pp=4, layers_per_stage=(7, 9, 8, 8))):
        assert isinstance(costs.with_topology(other.with_layers(32))[0], AnalyticCosts)
    of_tokens = adjust(RIGHT, fitted=FittedTimes(({},) * 4))  # which price stages wherever they are
    assert of_tokens.with_topology(Topology(pp=4, dp=2, layers_per_stage=(1, 1, 1, 1)))[0] == of_tokens


def test_they_survive_json_with_every_bit() -> None:
    costs = fit_times(WRONG["without an overhead"], measured(RIGHT, RIGHT, batches(0), letters="FIW", noise=0.3))
    again = cost_model_from_json(json.loads(json.dumps(cost_model_to_json(costs))))
    assert again == costs
    assert again.fingerprint() == costs.fingerprint() != adjust(costs, fitted=None).fingerprint()


@pytest.mark.parametrize(
    ("error", "make", "says"),
    [
        (ConfigError, lambda: adjust(RIGHT, fitted=FittedTimes(({},))), "1 corrections for 4 stages"),
        (
            ConfigError,
            lambda: adjust(RIGHT, fitted=FittedTimes(({"X": TimeCorrection()}, {}, {}, {}))),
            "of actions 'X': give one of F, B, I, W, B none",
        ),
        (ConfigError, lambda: TimeCorrection(-1.0), r"scale of a correction is -1\.0 but must be a number of 0 to"),
        (ConfigError, lambda: TimeCorrection(float("nan")), "scale of a correction is nan"),
        (DataError, lambda: cost_model_from_json({"kind": "adapted", "base": 3}), "have the base 3"),
        (
            ConfigError,
            lambda: cost_model_from_json({"kind": "adapted", "base": cost_model_to_json(RIGHT)}),
            "adapted costs .* cannot be read",
        ),
    ],
)
def test_what_is_no_correction_is_refused(error: type[Exception], make: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_adjustments_are_one_list_in_one_order_and_a_second_of_a_kind_takes_the_place_of_the_first() -> None:
    """As in a resumed run of adapters that had fitted its times: weights are frozen once."""
    times, weights = FittedTimes(({"B": TimeCorrection(2.0)},) * 4), FrozenWeights((0.1,) * 4)
    both = AdjustedCosts(RIGHT, weights, times)
    assert adjust(adjust(RIGHT, fitted=times), frozen=weights) == both
    assert adjust(adjust(RIGHT, frozen=weights), fitted=times) == both
    assert adjust(both, frozen=weights) == both
    assert adjust(both, fitted=None) == adjust(RIGHT, frozen=weights)
    forwards = adjust(both, forward_only=True)
    assert cost_model_from_json(json.loads(json.dumps(cost_model_to_json(forwards)))) == forwards
    nested = cost_model_to_json(forwards)
    assert [nested["kind"], nested["base"]["kind"], nested["base"]["base"]["kind"]] == ["forwards", "adapted", "frozen"]


def test_trained_shares_stay_with_their_stages() -> None:
    counted = AnalyticCosts(preset("llama-2-7b"), Topology(pp=4).with_layers(32))
    frozen = adjust(counted, frozen=FrozenWeights((0.1,) * 4))
    wider, _ = frozen.with_topology(Topology(pp=4, dp=8).with_layers(32))
    assert isinstance(wider, AdjustedCosts)
    assert wider.frozen == FrozenWeights((0.1,) * 4)
    with pytest.raises(ConfigError, match="give that topology, or the costs before adapters"):
        frozen.with_topology(Topology(pp=8).with_layers(32))


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_frozen_and_fitted_shapes_cost_what_their_micro_batches_do(recompute: Recompute) -> None:
    counted = AnalyticCosts(preset("llama-2-7b"), Topology(pp=4).with_layers(32), zero_stage=2)
    times = FittedTimes(({"F": TimeCorrection(1.5, 9), "I": TimeCorrection(0.5), "W": TimeCorrection(2.0)},) * 4)
    costs = adjust(adjust(counted, frozen=FrozenWeights((0.1,) * 4, token_bytes=(64,) * 4)), fitted=times)
    one = costs.evaluate([MicroBatch(tuple(SampleLength(i, 40) for i in range(3)), recompute=recompute)])
    assert list_values(one) == list_values(costs.evaluate_shapes([3], [40], 0, recompute))
    assert costs.facts == counted.facts
