"""Of several ways to plan a step, the one that ends first: whole samples or pieces, and of which width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dynapipe_ext.errors import PlanError
from dynapipe_ext.partitioning.pieces import PieceChoices
from dynapipe_ext.schedules.step_plan import StepPlan


def whole_or_pieces(
    choices: PieceChoices, least_whole_ns: int, whole: Callable[[], StepPlan], in_pieces: Callable[[], StepPlan]
) -> StepPlan:
    """The faster of two plans, of whole samples and of samples in pieces. If both take the same time, that of whole
    samples.

    No plan of whole samples takes less than `least_whole_ns`. If pieces are expected to take no longer than that, they
    are planned first, and whole samples only where pieces then take longer. Otherwise whole samples are planned first,
    and pieces only if they may still be faster. Errors: PlanError where neither fits, as whole samples raise it.
    """
    plans: list[StepPlan] = []
    refusal: PlanError | None = None
    pieces_first = choices.makespan_ns <= least_whole_ns
    if not pieces_first:
        try:
            plans.append(whole())
        except PlanError as error:
            refusal = error
    if not plans or choices.hoped_ns < plans[0].makespan_ns:
        with suppress(PlanError):
            plans.append(in_pieces())
    if not plans:
        if refusal:
            raise refusal
        return whole()
    if pieces_first and plans[0].makespan_ns > least_whole_ns:
        with suppress(PlanError):
            plans.insert(0, whole())
    return min(plans, key=lambda plan: plan.makespan_ns)


# Searches have ended up to 1.2 % before `hoped_ns`, where rows of several lengths filled and drained the pipeline.
_MAY_BE_OFF = 1 / 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrial:
    """A step of one width, of whole samples or of pieces. A plan of about `expected_ns` is likely, and hardly one
    that ends before `hoped_ns`: the work of the busiest replica, and half of the time in which its pipeline fills
    and drains with the longest row."""

    width: int
    hoped_ns: float
    expected_ns: float
    plan: Callable[[], StepPlan]

    def may_beat(self, makespan_ns: int) -> bool:
        return self.hoped_ns * (1 - _MAY_BE_OFF) < makespan_ns


def times_of_whole_ns(
    least_ns: int, *, longest_ns: int, overhead_ns: int, depth: int, most_rows: int
) -> tuple[float, float]:
    """(hoped, expected) time of a step of whole samples, with the best number of rows: the work `least_ns` of the
    busiest replica, an overhead for each row, and half (hoped) or all (expected) of the time in which `depth` ranks
    fill and drain with the longest sample, or with a mean row.

    >>> times_of_whole_ns(100, longest_ns=10, overhead_ns=1, depth=4, most_rows=16)
    (125.0, 143)
    """
    hoped, expected = [], []
    for count in (1 << i for i in range(most_rows.bit_length())):
        work_ns = least_ns + (count - 1) * overhead_ns
        fill_ns = (depth - 1) * max(longest_ns, least_ns // count)
        hoped.append(work_ns + fill_ns / 2)
        expected.append(work_ns + fill_ns)
    return min(hoped), min(expected)


def soonest(trials: Sequence[StepTrial]) -> StepPlan:
    """The plan that ends first; of plans that end together, that of the smaller width.

    The most promising trial is planned first. Each other trial is planned only if it may still be faster. Errors:
    PlanError where none can be planned, as the smallest width raises it.
    """
    best: StepPlan | None = None
    refusals: dict[int, PlanError] = {}
    for trial in sorted(trials, key=lambda one: (one.expected_ns, one.width)):
        if best is not None and not trial.may_beat(best.makespan_ns):
            continue
        try:
            plan = trial.plan()
        except PlanError as error:
            refusals.setdefault(trial.width, error)
            continue
        if best is None or (plan.makespan_ns, plan.width) < (best.makespan_ns, best.width):
            best = plan
    if best is None:
        raise refusals[min(refusals)]
    return best
