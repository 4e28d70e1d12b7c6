"""Whole samples or long ones in pieces: the faster plan, where each is searched only if it may be that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.splits.carried import PieceCuts


def whole_or_pieces(
    cuts: PieceCuts, least_whole_ns: int, whole: Callable[[], StepPlan], in_pieces: Callable[[], StepPlan]
) -> StepPlan:
    """The faster of the two plans, whole samples of equals. No plan of these can take less than `least_whole_ns`: where
    pieces are expected to, they come first, and whole samples only if they did not. Else whole samples come first, and
    pieces only if there is hope that they are faster.

    Errors: PlanError where neither fits, with what whole samples say.
    """
    found: list[StepPlan] = []
    refused: PlanError | None = None
    pieces_first = cuts.makespan_ns <= least_whole_ns
    if not pieces_first:
        try:
            found.append(whole())
        except PlanError as error:
            refused = error
    if not found or cuts.hoped_ns < found[0].makespan_ns:
        with suppress(PlanError):
            found.append(in_pieces())
    if not found:
        if refused:
            raise refused
        return whole()
    if pieces_first and found[0].makespan_ns > least_whole_ns:
        with suppress(PlanError):
            found.insert(0, whole())
    return min(found, key=lambda plan: plan.makespan_ns)
