"""Micro-batches that a search has cut, in the rounds of interleaved 1F1B where these end earlier.

The search's dispatcher admits micro-batches one by one. Where many are alike, rounds of as many as ranks fill an
interleaved pipeline faster.
"""

from __future__ import annotations

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import compute_mean_makespan_ns, compute_peak_bytes
from dynapipe_ext.schedules.published.full_backward import interleaved_1f1b
from dynapipe_ext.schedules.step_plan import StepPlan


def takes_rounds(plan: StepPlan) -> bool:
    """Whether rounds are an order of this plan on interleaved stages: whole backwards, no pieces, a core a rank."""
    if plan.forward_only or plan.cores is not None:
        return False
    is_whole = not any(m.attention == "carried" for m in plan.batch.micro_batches)
    return is_whole and not any(schedule.is_split for schedule in plan.schedules)


def in_rounds(plan: StepPlan, limit_bytes: int, noise: float) -> tuple[PipelineSchedule, ...]:
    """The plan's schedules. A replica whose micro-batches end earlier in rounds, and fit so, gets the schedule in
    rounds; twins share theirs. Under noise, "earlier" is by the mean over disturbed times."""
    made: dict[tuple[int, int], PipelineSchedule] = {}
    schedules = []
    for schedule, costs in zip(plan.schedules, plan.costs, strict=True):
        if (twins := (id(schedule), id(costs))) not in made:
            made[twins] = _sooner(schedule, costs, limit_bytes, noise)
        schedules.append(made[twins])
    return tuple(schedules)


def _sooner(schedule: PipelineSchedule, costs: MicroBatchCosts, limit_bytes: int, noise: float) -> PipelineSchedule:
    if not costs.num_micro_batches:
        return schedule
    order = [a.micro_batch for a in schedule.ranks[0] if a.stage == 0 and a.kind is Kind.FORWARD]
    num_ranks = len(schedule.ranks)
    table = interleaved_1f1b(num_ranks, len(order), schedule.num_stages // num_ranks)
    ranks = tuple(tuple(Action(a.stage, a.kind, order[a.micro_batch]) for a in rank) for rank in table.ranks)
    rounds = PipelineSchedule(schedule.name, ranks, schedule.stage_ranks)
    if max(compute_peak_bytes(rounds, costs)) > limit_bytes:
        return schedule
    return min(schedule, rounds, key=lambda order: compute_mean_makespan_ns(order, costs, noise))
