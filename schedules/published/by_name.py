"""The published schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError, did_you_mean
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.published.cyclic import clustered_cyclic
from dynapipe_ext.schedules.published.full_backward import gpipe, interleaved_1f1b, one_f_one_b
from dynapipe_ext.schedules.published.v_shape import v_half, zb_v
from dynapipe_ext.schedules.published.zero_bubble import zb_h1, zb_h2
from dynapipe_ext.settings.plan_rules import ScheduleName

# Each takes the numbers of ranks and of micro-batches; interleaved-1f1b the stages per rank as well.
PUBLISHED: Mapping[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_1f1b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
}
_STAGES_PER_RANK = {"zb-v": 2, "v-half": 2}


def make_published_schedule(
    name: str, num_ranks: int, num_micro_batches: int, *, stages_per_rank: int | None = None
) -> PipelineSchedule:
    """Return the schedule of that name in PUBLISHED; only interleaved-1f1b has a choice of `stages_per_rank` (2).

    Raises ConfigError for an unknown name, and for stages per rank that it cannot have; PlanError for counts below 1.
    """
    if name not in PUBLISHED:
        near = did_you_mean(name, PUBLISHED)
        raise ConfigError(f"schedule {name!r} is not known: choose one of {', '.join(PUBLISHED)}{near}")
    if name == "interleaved-1f1b":
        return interleaved_1f1b(num_ranks, num_micro_batches, 2 if stages_per_rank is None else stages_per_rank)
    fixed = _STAGES_PER_RANK.get(name, 1)
    if stages_per_rank not in (None, fixed):
        raise ConfigError(
            f"{name} has {fixed} stage{'s' * (fixed > 1)} per rank, not {stages_per_rank}:"
            " leave that out, or choose interleaved-1f1b"
        )
    return PUBLISHED[name](num_ranks, num_micro_batches)


def make_schedule_of_costs(
    name: ScheduleName, stage_ranks: Sequence[int], memory_limit_bytes: int, costs: MicroBatchCosts
) -> PipelineSchedule:
    """Return the schedule of that name, cyclic included, for a replica's micro-batches (no actions if there are none).

    Raises PlanError and ConfigError as the schedules do.
    """
    num_ranks, count = max(stage_ranks) + 1, costs.num_micro_batches
    if not count:
        return PipelineSchedule(name, ((),) * num_ranks, tuple(stage_ranks))
    if name == "cyclic":
        return clustered_cyclic(costs, memory_limit_bytes=memory_limit_bytes)
    return make_published_schedule(name, num_ranks, count, stages_per_rank=len(stage_ranks) // num_ranks)
