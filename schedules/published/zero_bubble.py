"""Zero-bubble schedules with one stage a rank: the backward split in I and W, and W run where a rank would wait.

After Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), the schedules made by hand of sec. 2.
"""

from __future__ import annotations

from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule, linear_schedule


def zb_h1(num_ranks: int, num_micro_batches: int) -> PipelineSchedule:
    """ZB-H1: the warm-up of 1F1B, and the W of rank r put off by r backwards.

    Every rank holds at most p = `num_ranks` micro-batches, 1F1B's most; the bubble is (p - 1)(F + I - W) for M >= p
    and W at most F and I.

    Errors: PlanError for less than one rank or micro-batch.

    >>> for line in zb_h1(3, 4).lines(): print(*line)
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    check_counts(num_ranks, num_micro_batches)
    return linear_schedule(
        "zb-h1", [_rank_actions(rank, num_ranks - rank, rank, num_micro_batches) for rank in range(num_ranks)]
    )


def zb_h2(num_ranks: int, num_micro_batches: int) -> PipelineSchedule:
    """ZB-H2: more forwards in the warm-up fill the wait for the first backward.

    Every rank holds at most 2p - 1 micro-batches. With F = I = W and M >= 2p - 1 no rank waits between its first and
    its last action. The ranks start and end one after the other, so what the step loses is what its optimizer loses by
    waiting for all of them, which the paper avoids by checking gradients afterwards.

    Errors: PlanError for less than one rank or micro-batch.

    >>> for line in zb_h2(2, 4).lines(): print(*line)
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    check_counts(num_ranks, num_micro_batches)
    return linear_schedule(
        "zb-h2",
        [_rank_actions(rank, 2 * (num_ranks - rank) - 1, 2 * rank, num_micro_batches) for rank in range(num_ranks)],
    )


def check_counts(num_ranks: int, num_micro_batches: int) -> None:
    if num_ranks < 1 or num_micro_batches < 1:
        raise PlanError(
            f"a schedule of {num_ranks} ranks and {num_micro_batches} micro-batches: give at least 1 of each"
        )


def _rank_actions(stage: int, warm: int, lag: int, num: int) -> list[Action]:
    """`warm` forwards, then I and F in turn, each I from number `lag` on with the oldest W behind it.

    Once there are no forwards left to fill the time between two I, every I has a W behind it. With M >= warm + lag the
    rank has by then begun its W anyway, so this matters for few micro-batches alone.
    """
    actions = [Action(stage, Kind.FORWARD, m) for m in range(min(warm, num))]
    forwards, weights = len(actions), 0
    for m in range(num):
        actions.append(Action(stage, Kind.BACKWARD_INPUT, m))
        if m >= lag or forwards == num:
            actions.append(Action(stage, Kind.BACKWARD_WEIGHT, weights))
            weights += 1
        if forwards < num:
            actions.append(Action(stage, Kind.FORWARD, forwards))
            forwards += 1
    return actions + [Action(stage, Kind.BACKWARD_WEIGHT, m) for m in range(weights, num)]
