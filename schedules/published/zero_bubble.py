"""Zero-bubble schedules with one stage per rank: backwards are split into I and W, and W runs while a rank would wait.

After Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), the schedules made by hand of sec. 2.
"""

from __future__ import annotations

from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule, make_linear_schedule
from dynapipe_ext.schedules.published.full_backward import check_counts


def zb_h1(num_ranks: int, num_micro_batches: int) -> PipelineSchedule:
    """Run the warm-up of 1F1B, and delay the W of rank r by r backwards (ZB-H1).

    Every rank holds at most p = `num_ranks` micro-batches, as in 1F1B; the bubble is (p - 1)(F + I - W) if M >= p and W
    is at most F and I. Raises PlanError for less than one rank or micro-batch.

    >>> for line in zb_h1(3, 4).to_lines(): print(*line)
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    check_counts(ranks=num_ranks, micro_batches=num_micro_batches)
    ranks = [_list_actions(rank, num_ranks - rank, rank, num_micro_batches) for rank in range(num_ranks)]
    return make_linear_schedule("zb-h1", ranks)


def zb_h2(num_ranks: int, num_micro_batches: int) -> PipelineSchedule:
    """Fill the wait for the first backward with more warm-up forwards (ZB-H2).

    Every rank holds at most 2p - 1 micro-batches, p being `num_ranks`. With F = I = W and M >= 2p - 1 no rank waits
    between its first and its last action. But ranks start and end one after the other: the optimizer, which waits for
    all of them, makes the step longer. The paper avoids this by checking gradients afterwards.

    Raises PlanError for less than one rank or micro-batch.

    >>> for line in zb_h2(2, 4).to_lines(): print(*line)
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    check_counts(ranks=num_ranks, micro_batches=num_micro_batches)
    ranks = [_list_actions(r, 2 * (num_ranks - r) - 1, 2 * r, num_micro_batches) for r in range(num_ranks)]
    return make_linear_schedule("zb-h2", ranks)


def _list_actions(stage: int, warm_up: int, lag: int, num: int) -> list[Action]:
    """Return `warm_up` forwards, then I and F in turn, each I from number `lag` on followed by the oldest W.

    Once there are no forwards left to fill the time between two I, every I is followed by a W. With M >= warm_up + lag
    the rank has by then begun its W anyway, so this matters only for few micro-batches.
    """
    actions = [Action(stage, Kind.FORWARD, m) for m in range(min(warm_up, num))]
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
