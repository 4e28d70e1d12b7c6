"""Noise on times: what it does to costs, and what schedules lose beside a dispatcher that runs whatever is ready."""

from __future__ import annotations

import statistics
from functools import cache

import numpy as np
import pytest

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import compute_peak_bytes, simulate_ns, validate
from dynapipe_ext.schedules.planner import Planner
from tests.bench.noise import Loss, Noise, measure_slack, noisy_costs, readiness_first

LIMIT_BYTES = 36_000_000_000
ALLOWED = 1.5


@cache
def planned(split: bool, schedule: str = "adaptive") -> list[tuple[PipelineSchedule, MicroBatchCosts]]:
    """Replicas' schedules of two batches of some 65,000 tokens, most samples short, PP4 x DP2, a head on the last."""
    costs = TokenCosts(
        4,
        ns_per_token=18_000,
        ns_per_token_squared=2.0,
        overhead_ns=3_000_000,
        bytes_per_token=2_000_000,
        static_bytes=16_000_000_000,
        stage_scale=(1.0, 1.0, 1.0, 1.15),
    )
    planner = Planner(Topology(pp=4, dp=2), costs, LIMIT_BYTES, split_backward=split, schedule=schedule, effort=600)
    cases = []
    for seed in range(2):
        lengths = np.minimum(2048, np.random.default_rng(seed).lognormal(5.0, 1.0, 250).astype(int) + 8)
        plan = planner.plan([int(n) for n in lengths])
        for replica, chosen in zip(plan.batch.replicas, plan.schedules, strict=True):
            cases.append((chosen, costs.evaluate(replica.micro_batches)))
    return cases


def some_costs() -> MicroBatchCosts:
    return planned(False)[0][1]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("slow_stage", range(4))
def test_behind_a_slow_stage_the_loss_is_at_most_1_5_times_that_of_readiness_first_dispatch(split, slow_stage):
    slacks = [
        measure_slack(schedule, costs, Noise(slow_stage=slow_stage), memory_limit_bytes=LIMIT_BYTES, seeds=range(8))
        for schedule, costs in planned(split)
    ]

    def median_s(way: str) -> float:
        return statistics.median(s for slack in slacks for s in getattr(slack, way).losses_s)

    assert 0 < median_s("in_order") <= ALLOWED * median_s("readiness_first")


def test_without_noise_nothing_is_lost():
    schedule, costs = planned(True)[0]
    slack = measure_slack(schedule, costs, Noise(spread=0), memory_limit_bytes=LIMIT_BYTES, seeds=[0, 1])
    for loss in (slack.in_order, slack.readiness_first):
        assert loss.losses_s == (0.0, 0.0)
        assert loss.noise_free_s > 1


@pytest.mark.parametrize("split", [False, True])
def test_noise_stays_within_its_spread_and_slows_one_stage(split):
    costs = some_costs()
    noisy = noisy_costs(costs, Noise(spread=0.2, slow_stage=2, slow_factor=1.3), seed=5, split=split)
    pairs = [(noisy.forward_ns, costs.forward_ns)]
    if split:
        pairs += [(noisy.weight_ns, costs.weight_ns), (noisy.input_ns, costs.input_ns)]
    else:
        pairs += [(noisy.backward_ns, costs.backward_ns)]
    for after, before in pairs:
        ratio = after / before
        others = np.delete(ratio, 2, axis=0)
        assert 0.799 <= others.min() < 0.85
        assert 1.15 < others.max() <= 1.2
        assert ratio[2].min() >= 1.3 * 0.799
        assert 1.3 < ratio[2].max() <= 1.3 * 1.2
    for name in ("stored_bytes", "working_bytes", "transfer_ns", "static_bytes"):
        assert np.array_equal(getattr(noisy, name), getattr(costs, name))


def test_i_and_w_of_a_micro_batch_take_factors_of_their_own():
    costs = some_costs()
    noisy = noisy_costs(costs, Noise(), seed=2, split=True)
    factors = [noisy.input_ns / costs.input_ns, noisy.weight_ns / costs.weight_ns, noisy.forward_ns / costs.forward_ns]
    correlations = np.corrcoef([f.ravel() for f in factors])
    assert np.abs(correlations[~np.eye(3, dtype=bool)]).max() < 0.4


def test_a_draw_is_a_function_of_its_seed():
    costs = some_costs()
    first, again, other = (noisy_costs(costs, Noise(), seed=seed, split=True) for seed in (1, 1, 2))
    assert np.array_equal(first.backward_ns, again.backward_ns)
    assert not np.array_equal(first.forward_ns, other.forward_ns)


@pytest.mark.parametrize("split", [False, True])
def test_readiness_first_fits_the_limit_and_never_waits_beside_a_gradient_that_is_there(split):
    for _, costs in planned(split):
        schedule = readiness_first(costs, range(4), memory_limit_bytes=LIMIT_BYTES, split=split)
        validate(schedule, costs.num_micro_batches)
        assert schedule.is_split == split
        assert max(compute_peak_bytes(schedule, costs)) <= LIMIT_BYTES
        spans = simulate_ns(schedule, costs)
        rows = list(zip(schedule.ranks, spans, strict=True))
        ends = {a: end for actions, row in rows for a, (_, end) in zip(actions, row, strict=True)}
        back = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
        arrival = {a: ends[type(a)(a.stage + 1, back, a.micro_batch)] for a in ends if a.kind is back and a.stage < 3}
        for actions, row in rows:
            for i, (start, _) in enumerate(row):
                if actions[i].kind is not back:
                    later = [a for a in actions[i + 1 :] if a in arrival]
                    assert all(arrival[a] >= start for a in later), "a forward or W went before a gradient"


def test_bad_noise_is_refused_with_the_bound():
    with pytest.raises(ConfigError, match=r"spread is 1.0 but must be at least 0 and below 1"):
        Noise(spread=1.0)
    with pytest.raises(ConfigError, match=r"slow_factor is 0 but must be above 0"):
        Noise(slow_factor=0)
    with pytest.raises(ConfigError, match=r"slow stage 4 does not exist: choose one of 0 to 3"):
        noisy_costs(some_costs(), Noise(slow_stage=4), seed=0, split=False)
    with pytest.raises(ConfigError, match="at least one seed"):
        measure_slack(*planned(False)[0], Noise(), memory_limit_bytes=LIMIT_BYTES, seeds=())
    with pytest.raises(PlanError, match="blocked by a limit of 16000000001 B"):
        readiness_first(some_costs(), range(4), memory_limit_bytes=16_000_000_001, split=False)


def test_a_loss_is_summed_up_by_its_median_and_its_95th_percentile():
    loss = Loss(2.0, (2.1, 2.3, 2.2, 3.0, 2.0))
    assert loss.median_s == pytest.approx(0.2)
    assert loss.p95_s == pytest.approx(0.86)
