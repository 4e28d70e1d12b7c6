"""Stages that hold a part of a head alone: what is ready there goes first, takes no turn, and plans end near bounds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import Topology, place_stages
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.data.shipped_lengths import shipped_lengths
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import simulate_ns
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.search.optimizer import NO_LIMIT, DispatchPolicy
from tests.bench.noise import dispatch

PLACEMENTS = [split_vocabulary(Topology(pp=pp), "head").placement for pp in (2, 3, 4)]
PLACEMENTS.append(split_vocabulary(Topology(pp=3, placement=place_stages("v", 3)), "head").placement)
F, B = Kind.FORWARD, Kind.BACKWARD


def dispatched(costs: MicroBatchCosts, stage_ranks: tuple[int, ...], rhythm: int) -> PipelineSchedule:
    """The order of a rule under which memory keeps nothing back."""
    ranks = max(stage_ranks) + 1
    short_stages = range(len(stage_ranks) - ranks + 1, len(stage_ranks))
    rule = DispatchPolicy(extra=NO_LIMIT, rhythm=rhythm)
    return dispatch(costs, rule, stage_ranks, [1 << 40] * ranks, split=False, short_stages=short_stages)[1]


def uneven_costs(seed: int, stages: int, ranks: int, count: int) -> MicroBatchCosts:
    rng = np.random.default_rng(seed)
    share = np.where(np.arange(stages) > stages - ranks, 0.1, 1.0)[:, None]
    forward = 1 + np.rint(1000 * share * rng.lognormal(0, 1, count)).astype(np.int64)
    none = np.zeros((stages, count), np.int64)
    sent = rng.integers(0, 30, (stages - 1, count))
    return MicroBatchCosts(
        forward_ns=forward, backward_ns=2 * forward, weight_ns=none, stored_bytes=none + 1, working_bytes=none,
        transfer_ns=sent, transfer_bytes=sent, static_bytes=np.zeros(stages, np.int64),
    )  # fmt: skip


def ready_at(schedule: PipelineSchedule, costs: MicroBatchCosts) -> dict[Action, int]:
    """When what an action needs from others has arrived on its rank."""
    ends = {
        action: end
        for rank, spans in zip(schedule.ranks, simulate_ns(schedule, costs), strict=True)
        for action, (_, end) in zip(rank, spans, strict=True)
    }
    ranks, last = schedule.stage_ranks, schedule.num_stages - 1

    def arrival(action: Action) -> int:
        s, m = action.stage, action.micro_batch
        if action.kind is F:
            before, link = Action(s - 1, F, m), s - 1
        else:
            before, link = (Action(s + 1, B, m), s) if s < last else (Action(s, F, m), -1)
        if before.stage < 0:
            return 0
        apart = link >= 0 and ranks[link] != ranks[link + 1]
        return ends[before] + (int(costs.transfer_ns[link, m]) if apart else 0)

    return {action: arrival(action) for action in ends}


@settings(max_examples=40)
@given(st.sampled_from(PLACEMENTS), st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([0, 1]))
def test_what_is_ready_on_a_short_stage_goes_first_and_takes_no_turn(stage_ranks, seed, count, rhythm) -> None:
    """An oracle reads the order again: of what was ready as each action began, the rule leaves this one alone."""
    ranks, stages = max(stage_ranks) + 1, len(stage_ranks)
    costs = uneven_costs(seed, stages, ranks, count)
    schedule = dispatched(costs, stage_ranks, rhythm)
    ready, spans = ready_at(schedule, costs), simulate_ns(schedule, costs)
    for order, times in zip(schedule.ranks, spans, strict=True):
        wants_forward = False
        for k, (action, (begin, _)) in enumerate(zip(order, times, strict=True)):
            next_of = {(one.stage, one.kind): one for one in reversed(order[k:])}  # the first of each that is left
            can = [
                one
                for (stage, kind), one in next_of.items()
                if ready[one] <= begin and (kind is F or Action(stage, F, one.micro_batch) in order[:k])
            ]
            short = [one for one in can if one.stage > stages - ranks]
            if short:
                assert action in short
                assert action.kind is B or all(one.kind is F for one in short)
                continue
            kinds = {one.kind for one in can}
            assert action.kind is (F if B not in kinds or (F in kinds and wants_forward) else B)
            wants_forward = rhythm > 0 and action.kind is B


def test_whole_backwards_under_a_spread_head_end_near_their_bound_on_uneven_rows() -> None:
    """Where parts of a head wait their turn they end 5.6 % above it."""
    drawn = shipped_lengths(65_536, most=2048)[:, 0]
    samples = sample_lengths(drawn[: int(np.searchsorted(np.cumsum(drawn), 65_536))].tolist())
    a = preset("llama-3-8b")
    topology = split_vocabulary(Topology(tp=2, pp=8).with_layers(a.num_layers), "head")
    costs = AnalyticCosts(a.padded(), topology, flops_per_s=400e12, sequence_parallel=True)
    plan = Planner(topology, costs, 40e9, layout="packed", pad_multiple=2, effort=2000).plan(samples)
    assert plan.makespan_s <= 1.02 * plan.lower_bound_s
