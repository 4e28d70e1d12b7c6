"""Micro-batches that a search has cut, in the rounds of interleaved 1F1B where these end earlier.

The search's dispatcher admits micro-batches one by one. Where many are alike, rounds of as many as ranks fill an
interleaved pipeline faster.
"""

from __future__ import annotations

from dataclasses import replace

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.schedules.actions import Kind, PipelineSchedule
from dynapipe_ext.schedules.judge.simulate import last_end_ns, peak_bytes, simulate_ns
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.schedules.tables.interleaved import interleaved_1f1b


def takes_rounds(plan: StepPlan) -> bool:
    """Whether rounds are an order of this plan on interleaved stages: whole backwards, no pieces, a core a rank."""
    if plan.forward_only or plan.cores is not None:
        return False
    is_whole = not any(m.attention == "carried" for m in plan.batch.micro_batches)
    return is_whole and not any(schedule.is_split for schedule in plan.schedules)


def in_rounds(plan: StepPlan, limit_bytes: int) -> tuple[PipelineSchedule, ...]:
    """The plan's schedules, those of replicas that end earlier in rounds and fit so replaced; twins share theirs."""
    made: dict[tuple[int, int], PipelineSchedule] = {}
    schedules = []
    for schedule, costs, prediction in zip(plan.schedules, plan.costs, plan.predictions, strict=True):
        if (twins := (id(schedule), id(costs))) not in made:
            made[twins] = _sooner(schedule, costs, prediction.makespan_ns, limit_bytes)
        schedules.append(made[twins])
    return tuple(schedules)


def _sooner(schedule: PipelineSchedule, costs: MicroBatchCosts, makespan_ns: int, limit_bytes: int) -> PipelineSchedule:
    if not costs.num_micro_batches:
        return schedule
    order = [a.micro_batch for a in schedule.ranks[0] if a.stage == 0 and a.kind is Kind.FORWARD]
    num_ranks = len(schedule.ranks)
    table = interleaved_1f1b(num_ranks, len(order), schedule.num_stages // num_ranks)
    ranks = tuple(tuple(replace(a, micro_batch=order[a.micro_batch]) for a in rank) for rank in table.ranks)
    rounds = PipelineSchedule(schedule.name, ranks, schedule.stage_ranks)
    fits = max(peak_bytes(rounds, costs)) <= limit_bytes
    return rounds if fits and last_end_ns(simulate_ns(rounds, costs)) < makespan_ns else schedule
