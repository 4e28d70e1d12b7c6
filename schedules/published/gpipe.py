"""GPipe: all forwards, then all backwards (Huang et al. 2019, sec. 2.3)."""

from __future__ import annotations

from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule, linear_schedule


def gpipe(num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """Every stage holds all micro-batches before its first backward; both run in injection order 0..M-1.

    Errors: PlanError for less than one stage or a negative number of micro-batches.

    >>> gpipe(2, 2).lines()
    [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1F1', '1B0', '1B1']]
    """
    if num_stages < 1 or num_micro_batches < 0:
        raise PlanError(
            f"a schedule of {num_stages} stages and {num_micro_batches} micro-batches: give at least 1 and 0 of them"
        )
    return linear_schedule(
        "gpipe",
        [
            [Action(stage, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(num_micro_batches)]
            for stage in range(num_stages)
        ],
    )
