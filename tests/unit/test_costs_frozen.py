"""What frozen weights take from the costs of training."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adjustments import FrozenWeights, adjust
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.schedules.planner import Planner

BASE = TokenCosts(num_stages=2, ns_per_token_squared=3, static_bytes=1000)
FROZEN = adjust(BASE, frozen=FrozenWeights((0.25, 0.0), static_bytes=(300, 200)))
LENGTHS = [12, 7, 350, 41, 9, 24, 88, 16]


def test_backwards_and_w_are_shorter_by_the_frozen_share_under_every_recomputation():
    micro_batches = [MicroBatch((SampleLength(0, 40),), recompute=kind) for kind in (*LAYER_RECOMPUTES, "full")]
    all_trained, frozen = BASE.evaluate(micro_batches), FROZEN.evaluate(micro_batches)
    saved = all_trained.backward_ns - frozen.backward_ns
    assert saved.tolist() == [[30_000] * 4, [40_000] * 4]  # three quarters, and all, of W's 40 x 1000 ns
    assert frozen.weight_ns.tolist() == (all_trained.weight_ns - saved).tolist()
    assert (frozen.input_ns == all_trained.input_ns).all()
    assert frozen.static_bytes.tolist() == [300, 200]
    assert (frozen.forward_ns == all_trained.forward_ns).all()
    all_but_none = adjust(BASE, frozen=FrozenWeights((1, 1)))
    assert all_but_none.evaluate(micro_batches).backward_ns.tolist() == all_trained.backward_ns.tolist()


def test_plans_with_frozen_weights_are_shorter_and_survive_json():
    makespans = []
    for costs in (BASE, FROZEN, cost_model_from_json(json.loads(json.dumps(cost_model_to_json(FROZEN))))):
        plan = Planner(Topology(pp=2), costs, 1e9, split_backward=True).plan(LENGTHS)
        makespans.append(plan.makespan_s)
        assert np.isfinite(plan.lower_bound_s)
        assert plan.lower_bound_s <= plan.makespan_s
    assert makespans[2] == makespans[1] < 0.95 * makespans[0]
    forwards = Planner(Topology(pp=2), FROZEN, 1e9).for_forwards().costs
    assert cost_model_from_json(cost_model_to_json(forwards)).fingerprint() == forwards.fingerprint()
    assert FROZEN.fingerprint() != adjust(BASE, frozen=FrozenWeights((0.25, 0.0))).fingerprint()


@pytest.mark.parametrize(
    ("error", "make", "says"),
    [
        (ConfigError, lambda: adjust(BASE, frozen=FrozenWeights((0.5,))), "trained_shares has 1 entries for 2 stages"),
        (
            ConfigError,
            lambda: adjust(BASE, frozen=FrozenWeights((0.5, 1.5))),
            r"shares has 1\.5 but must be numbers of 0 to 1",
        ),
        (ConfigError, lambda: adjust(BASE, frozen=FrozenWeights((0, 1), (5, -1))), "static_bytes has -1"),
        (DataError, lambda: cost_model_from_json({"kind": "frozen", "base": 3}), "have the base 3"),
        (
            ConfigError,
            lambda: cost_model_from_json({"kind": "frozen", "base": cost_model_to_json(BASE)}),
            "frozen costs .* cannot be read",
        ),
    ],
)
def test_costs_that_are_none_are_refused(error, make, says):
    with pytest.raises(error, match=says):
        make()
