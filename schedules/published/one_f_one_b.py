"""1F1B: warm-up forwards, then one forward and one backward in turn, then the backwards that are left."""

from __future__ import annotations

from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule, linear_schedule


def warm_up(stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Forwards before the steady state of 1F1B (Narayanan et al. 2021, sec. 2.2.1); it begins with a forward too.

    >>> [warm_up(stage, 4, 8) for stage in range(4)]
    [3, 2, 1, 0]
    >>> [warm_up(stage, 4, 2) for stage in range(4)]
    [2, 2, 1, 0]
    """
    return min(num_stages - stage - 1, num_micro_batches)


def one_f_one_b(num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """1F1B without interleaving, injection order 0..M-1; stage s holds at most S - s micro-batches.

    Errors: PlanError for less than one stage or a negative number of micro-batches.

    >>> for line in one_f_one_b(3, 4).lines(): print(*line)
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    if num_stages < 1 or num_micro_batches < 0:
        raise PlanError(
            f"a schedule of {num_stages} stages and {num_micro_batches} micro-batches: give at least 1 and 0 of them"
        )
    stages = []
    for stage in range(num_stages):
        warm = warm_up(stage, num_stages, num_micro_batches)
        actions = [Action(stage, Kind.FORWARD, m) for m in range(warm)]
        for m in range(num_micro_batches - warm):
            actions += [Action(stage, Kind.FORWARD, warm + m), Action(stage, Kind.BACKWARD, m)]
        actions += [Action(stage, Kind.BACKWARD, m) for m in range(num_micro_batches - warm, num_micro_batches)]
        stages.append(actions)
    return linear_schedule("1f1b", stages)
