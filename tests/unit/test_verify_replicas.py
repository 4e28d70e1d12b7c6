"""No plan is published whose replicas would issue different collectives: what they issue is a fact of the run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import SampleLength, as_length_array
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import StepPosition
from dynapipe_ext.errors import ConfigError, VerificationError
from dynapipe_ext.executor.instructions import Backward, BackwardInput, BackwardWeight, Forward, lower
from dynapipe_ext.executor.plans.planner_process import PlanPublisher
from dynapipe_ext.executor.proof import Collective, verify_step, with_collectives
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.store.address import Keys
from dynapipe_ext.executor.store.opening import MemoryStore
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.published.full_backward import gpipe
from dynapipe_ext.schedules.step_plan import StepPlan

SHAPE = Architecture.gpt(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_query_groups=4,
    ffn_hidden_size=64,
    gated_mlp=False,
    vocab_size=128,
    max_seq_len=128,
    tied_embeddings=True,
    num_experts=4,
    top_k=2,
)
TOPOLOGY = Topology(pp=2, dp=2)
SHARDED = AnalyticCosts(SHAPE, TOPOLOGY, zero_stage=2)
LENGTHS = as_length_array([60, 60, 60])  # no two fit a micro-batch: one replica holds two, the other one
KEYS = Keys("topic/1")


def planner(costs: CostModel, **settings: Any) -> Planner:
    options = {"schedule": "1f1b", "max_tokens": 96, "pad_multiple": 1, "format": ActivationFormat(32), **settings}
    if costs.facts.replica_collectives is None:
        options = {"collectives": ReplicaCollectives(), **options}
    return Planner(TOPOLOGY, costs, 1e12, **options)


def samples() -> list[SampleLength]:
    return [SampleLength(i, int(n)) for i, (n, *_) in enumerate(LENGTHS)]


@dataclass(frozen=True)
class OneReplicaOtherwise:
    """A planner whose last replica runs all its forwards first."""

    inner: Planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def plan(self, lengths: Any, **where: int) -> StepPlan:
        plan = self.inner.plan(lengths, **where)
        count = len(plan.batch.replicas[-1].micro_batches)
        assert count >= 2
        return replace(plan, schedules=(*plan.schedules[:-1], gpipe(2, count)))


def published(costs: CostModel) -> MemoryStore:
    """What is in the store once the first step has been planned, or refused."""
    store, steps = MemoryStore(), [(StepPosition(), tuple(range(len(LENGTHS))))]
    with suppress(VerificationError):
        PlanPublisher(
            store=store,
            keys=KEYS,
            plan_key=b"k" * 32,
            planner=planner(costs),
            lengths=LENGTHS,
            worker=0,
            num_workers=1,
            ahead=2,
        ).publish(steps)
    return store


@pytest.mark.parametrize(
    ("costs", "is_proven"),
    [
        (replace(SHARDED, zero_stage=1), True),
        (SHARDED, False),
        (replace(SHARDED, zero_stage=3), False),
        (replace(SHARDED, zero_stage=0, ep=2), False),
    ],
    ids=["zero1", "zero2", "zero3", "experts"],
)
def test_unequal_counts_are_published_only_where_nothing_inside_micro_batches_crosses_replicas(
    costs: CostModel, is_proven: bool
) -> None:
    counts = [len(replica[0].micro_batches) for replica in prove_step(planner(TokenCosts(2)), samples(), step=0).plans]
    assert sorted(counts) == [1, 2]
    store = published(costs)
    keys = [KEYS.plan(epoch=0, step=0, dp_rank=d, pp_rank=p) for d in range(2) for p in range(2)]
    assert [store.try_get(key) is not None for key in keys] == [is_proven] * 4
    assert (store.try_get(KEYS.failure(0)) is None) == is_proven
    if not is_proven:
        with pytest.raises(VerificationError, match=r'replica 0 and .* replica 1 disagree.*replica_counts = "equal"'):
            prove_step(planner(costs), samples(), step=0)


def test_equal_counts_in_one_order_are_proven_with_all_collectives() -> None:
    costs = replace(SHARDED, zero_stage=3, ep=2)
    plans = prove_step(planner(costs, replica_counts="equal"), [*samples(), SampleLength(3, 60)], step=0).plans
    assert [len(replica[0].micro_batches) for replica in plans] == [2, 2]


def test_equal_counts_in_two_orders_are_refused_where_collectives_cross() -> None:
    settings: dict[str, Any] = {"replica_counts": "equal", "max_tokens": 24}
    lengths = [SampleLength(i, 20) for i in range(6)]
    prove_step(OneReplicaOtherwise(planner(replace(SHARDED, zero_stage=1), **settings)), lengths, step=0)
    with pytest.raises(
        VerificationError, match=r"collective 2 of .*: weight gather in a backward of stage 0 meets .* in a forward"
    ):
        prove_step(OneReplicaOtherwise(planner(replace(SHARDED, zero_stage=3), **settings)), lengths, step=0)


def test_a_cost_model_says_what_its_training_issues_over_replicas_or_that_it_does_not_know() -> None:
    gathers = ("weight gather",)
    three = replace(SHARDED, zero_stage=3)
    assert three.facts.replica_collectives.of_micro_batches == (gathers, ("gradient scatter",))
    assert replace(three, ep=2).facts.replica_collectives.inside == (*gathers, "expert all-to-all")
    assert SHARDED.facts.replica_collectives.of_micro_batches == ((), ("gradient scatter",))
    assert replace(SHARDED, zero_stage=1).facts.replica_collectives == ReplicaCollectives()
    assert TokenCosts(2).facts.replica_collectives is None


def test_collectives_that_nobody_knows_are_refused_when_a_plan_is_proven_and_not_when_it_is_made() -> None:
    unknown = replace(planner(TokenCosts(2)), collectives=None)
    assert unknown.plan(samples()).makespan_s > 0
    with pytest.raises(ConfigError, match=r"TokenCosts do not say what dp 2 replicas .*collectives=ReplicaCollectives"):
        prove_step(unknown, samples(), step=0)
    assert prove_step(replace(unknown, topology=Topology(pp=2)), samples(), step=0).plans  # one replica meets nobody


def test_costs_that_do_not_know_of_zero_are_proven_with_the_gathers_of_the_run() -> None:
    gathered = replace(planner(TokenCosts(2)), collectives=ReplicaCollectives.of_zero(3))
    with pytest.raises(VerificationError, match=r'weight gather .*replica_counts = "equal"'):
        prove_step(gathered, samples(), step=0)
    assert Planner.from_json(gathered.to_json()) == gathered  # and in planner processes


@pytest.mark.parametrize("given", [ReplicaCollectives(), ReplicaCollectives.of_zero(3)], ids=["zero1", "zero3"])
def test_a_run_that_issues_other_collectives_than_its_costs_price_is_refused(given: ReplicaCollectives) -> None:
    with pytest.raises(ConfigError, match=r"the costs are those of a run with \(\(\), \('gradient scatter',\)\)"):
        planner(SHARDED, collectives=given)
    at_end_alone = replace(SHARDED.facts.replica_collectives, at_end=("gradient norm",))  # which no costs price
    assert planner(SHARDED, collectives=at_end_alone).replica_collectives == at_end_alone


def test_a_split_backward_scatters_gradients_once_they_are_there() -> None:
    """I gathers weights and exchanges tokens, W scatters; B does both."""
    plans = prove_step(planner(TokenCosts(2), schedule="zb-h1"), samples(), step=0).plans
    whole = prove_step(planner(TokenCosts(2)), samples(), step=0).plans
    for made, first, last in ((plans, BackwardInput, BackwardWeight), (whole, Backward, Backward)):
        programs = [[plan.instructions for plan in replica] for replica in made]
        issued = ReplicaCollectives(inside=("gather",), with_gradients=("scatter",), at_end=())
        events = with_collectives(programs, issued)[0][0]
        issuers = {"gather": set(), "scatter": set()}
        for before, event in pairwise(events):
            if isinstance(event, Collective):
                name = event.name.split()[0]
                if not isinstance(before, Collective):
                    issuer = type(before)
                issuers[name].add(issuer)
        assert issuers == {"gather": {Forward, first}, "scatter": {last}}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_replicas_that_meet_inside_micro_batches_transfer_in_one_order_whatever_each_would_take(schedule: str) -> None:
    """By times of their own, ranks of two replicas would wait for each other in a circle."""
    collectives, form = ReplicaCollectives.of_zero(3), ActivationFormat(8)
    options: dict[str, Any] = {"schedule": schedule, "replica_counts": "equal", "max_tokens": 16, "format": form}
    uneven = Planner(Topology(pp=4, dp=2), TokenCosts(4), 1e12, collectives=collectives, **options)
    for seed in (2, 4):
        lengths = np.random.default_rng(seed).integers(1, 16, 20).tolist()
        step = prove_step(uneven, [SampleLength(i, n) for i, n in enumerate(lengths)], step=0).step_plan
        by_own_times = [[plan.instructions for plan in replica] for replica in lower(step, form)]
        counts = [len(replica.micro_batches) for replica in step.batch.replicas]
        with pytest.raises(VerificationError, match="deadlock"):
            verify_step(with_collectives(by_own_times, collectives), range(4), counts)
