"""The proven step: how room is left for buffers in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dynapipe_ext.batch.micro_batches import SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import PlanError
from dynapipe_ext.executor.proven_step import prove, prove_step
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan, certify, predict

FORMAT = ActivationFormat(8)
SAMPLES = [SampleLength(i, n, target=n) for i, n in enumerate((9, 3, 11, 4, 5, 9, 2, 7, 12, 6, 8, 10))]


def planner(costs: CostModel | None = None, **settings: Any) -> Planner:
    costs = costs or TokenCosts(3, overhead_ns=2000, bytes_per_token=100)
    options: dict[str, Any] = {"memory_limit_bytes": 4000, "pad_multiple": 1, "format": FORMAT, **settings}
    topology = costs.topology if isinstance(costs, AnalyticCosts) else Topology(pp=costs.num_stages)
    return Planner(topology, costs, **options)


WHOLE = planner(schedule="1f1b", memory_limit_bytes=10**6)
MEETING = ReplicaCollectives(inside=("expert all-to-all",))
LARGE = replace(WHOLE, costs=TokenCosts(3, overhead_ns=10**7, bytes_per_token=100))


def in_flight(of: Planner) -> int:
    """The most bytes of buffers that a rank has in flight beside what the planner has counted."""
    return max(prove_step(of, SAMPLES, step=0).in_flight_bytes[0])


@dataclass
class Filling:
    """A planner whose plans claim the first of `claims` that its limit allows; the plan itself is `plans`' of it."""

    memory_limit_bytes: float
    claims: Mapping[int, Planner]
    asked: list[int] = field(default_factory=list)

    topology, activation_format, replica_collectives = WHOLE.topology, FORMAT, ReplicaCollectives()

    def plan(self, samples: Sequence[SampleLength], *, step: int) -> StepPlan:
        return self._plan(samples, step, 0)

    def replan(self, plan: StepPlan, samples: Sequence[SampleLength], *, reserve_bytes: int) -> StepPlan:
        return self._plan(samples, plan.batch.step, reserve_bytes)

    def _plan(self, samples: Sequence[SampleLength], step: int, reserve_bytes: int) -> StepPlan:
        room = int(self.memory_limit_bytes) - reserve_bytes
        self.asked.append(room)
        for claim, of in self.claims.items():
            if claim <= room:
                plan = of.plan(samples, step=step)
                peaks = (claim,) * self.topology.pp
                return replace(plan, predictions=tuple(replace(p, peak_bytes=peaks) for p in plan.predictions))
        raise PlanError(f"nothing fits {room} B")

    def to_json(self) -> Mapping[str, Any]:
        raise NotImplementedError


def test_a_plan_that_is_too_large_by_what_is_in_flight_is_planned_again_with_that_much_less() -> None:
    limit, buffers = 10_000, in_flight(WHOLE)
    full = Filling(limit, {limit - buffers + size: WHOLE for size in (600, -20, -90)})
    plans = prove_step(full, SAMPLES, step=0).plans
    assert max(plans[0][0].prediction.peak_bytes) == limit - 20
    assert full.asked == [limit, limit - 600]
    exact = Filling(limit, {limit - buffers: WHOLE})
    assert prove_step(exact, SAMPLES, step=0).peak_bytes == limit
    assert exact.asked == [limit]


def test_where_a_little_less_changes_nothing_the_third_plan_leaves_room_for_all_that_is_in_flight() -> None:
    """Less room by the 5 B that are too many, again and again, would end in the same plan more than 200 times."""
    limit, buffers = 10_000, in_flight(WHOLE)
    tight = Filling(limit, {limit - buffers + 5: WHOLE, limit - buffers - 100: WHOLE})
    plans = prove_step(tight, SAMPLES, step=0).plans
    assert max(plans[0][0].prediction.peak_bytes) == limit - 100
    assert tight.asked == [limit, limit - 5, limit - buffers]


def test_where_nothing_fits_beside_the_most_in_flight_a_plan_with_less_in_flight_is_still_found() -> None:
    limit, large, small = 10_000, in_flight(LARGE), in_flight(WHOLE)
    too_many = large * 2 // 5  # so that the large one fits once more, and then no longer
    assert small <= too_many
    tight = Filling(limit, {limit - large + too_many: LARGE, limit - 2 * too_many: WHOLE})
    plans = prove_step(tight, SAMPLES, step=0).plans
    assert max(plans[0][0].prediction.peak_bytes) == limit - 2 * too_many + small
    assert tight.asked == [limit, limit - too_many, limit - large, limit - 2 * too_many]


def test_a_plan_made_to_fit_keeps_its_micro_batches() -> None:
    tight = planner()
    first = tight.plan(SAMPLES)
    second = tight.replan(first, SAMPLES, reserve_bytes=500)
    assert first.peak_bytes > 3500 >= second.peak_bytes
    assert {m.samples for m in second.batch.micro_batches} == {m.samples for m in first.batch.micro_batches}


def test_replicas_that_leave_the_reserve_as_they_are_stay_so_with_their_bounds_and_instructions() -> None:
    two = replace(planner(), topology=Topology(pp=3, dp=2))
    first = two.plan(SAMPLES)
    roomy, full = sorted((0, 1), key=lambda d: max(first.predictions[d].peak_bytes))
    room = max(first.predictions[full].peak_bytes) - 1
    assert max(first.predictions[roomy].peak_bytes) <= room
    second = two.replan(first, SAMPLES, reserve_bytes=4000 - room)
    assert second.peak_bytes <= room
    assert second.batch.replicas[roomy] == first.batch.replicas[roomy]
    assert second.schedules[roomy] == first.schedules[roomy]
    assert second.predictions[roomy] == first.predictions[roomy]
    assert second.batch.replicas[full] != first.batch.replicas[full]

    assert first.certificate
    assert second.certificate
    assert second.certificate.replicas[roomy] == first.certificate.replicas[roomy]
    assert second.certificate == certify(second, two.costs, SAMPLES, memory_limit_bytes=4000)
    before = prove(first, FORMAT, ReplicaCollectives())
    assert before.peak_bytes == max(plans[0].peak_bytes for plans in before.plans)
    assert before.peak_bytes > before.plans[roomy][0].peak_bytes
    after = prove(second, FORMAT, ReplicaCollectives(), like=before)
    assert after == prove(second, FORMAT, ReplicaCollectives())
    assert after.plans[roomy][0].instructions is before.plans[roomy][0].instructions
    assert after.plans[full][0].instructions is not before.plans[full][0].instructions


def test_one_replica_s_new_costs_change_its_instructions_and_where_replicas_meet_in_micro_batches_all() -> None:
    """There all order their transfers by the times of the first: those of before would not be proven with its own."""
    two = replace(WHOLE, topology=Topology(pp=3, dp=2), replica_counts="equal").plan(SAMPLES)
    costs, work_ns = two.costs[0], sum(int((c.forward_ns + c.backward_ns).sum()) for c in two.costs)
    assert two.bubble_ratio == pytest.approx(1 - work_ns / (6 * 1e9 * two.makespan_s))
    slower = replace(two, costs=(replace(costs, forward_ns=3 * costs.forward_ns[::-1, ::-1]), two.costs[1]))
    for meet, is_changed in ((ReplicaCollectives(), [True, False]), (MEETING, [True, True])):
        before, anew = prove(two, FORMAT, meet), prove(slower, FORMAT, meet)
        assert prove(slower, FORMAT, meet, like=before) == anew
        pairs = zip(instructions(before.plans), instructions(anew.plans), strict=True)
        assert [one != other for one, other in pairs] == is_changed
    micro_batches = [replica.micro_batches for replica in two.batch.replicas]
    slow, same = predict(micro_batches, slower.schedules, slower.costs, cores=None, memory_limit_bytes=10**6)
    assert slow.makespan_ns > two.predictions[0].makespan_ns
    assert same == replace(two.predictions[1], lower_bound_ns=0)


def test_micro_batches_that_cannot_be_made_to_fit_are_cut_anew() -> None:
    roomy, room = planner(LARGE.costs, memory_limit_bytes=10_000, recompute="none"), 2000
    first = roomy.plan(SAMPLES)
    assert max(m.padded_tokens for m in first.batch.micro_batches) * 100 > room
    assert roomy.replan(first, SAMPLES, reserve_bytes=10_000 - room).peak_bytes <= room


def test_where_nothing_fits_with_its_buffers_the_planner_says_why() -> None:
    with pytest.raises(PlanError, match="nothing fits"):
        prove_step(Filling(10_000, {10_000: WHOLE}), SAMPLES, step=0)


def instructions(plans: Any) -> list[list[tuple[Any, ...]]]:
    return [[plan.instructions for plan in replica] for replica in plans]
