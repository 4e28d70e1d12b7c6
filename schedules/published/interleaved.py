"""Interleaved 1F1B: several stages a rank, dealt round, so that the pipeline fills in a fraction of the time."""

from __future__ import annotations

from itertools import pairwise

from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.published.one_f_one_b import one_f_one_b
from dynapipe_ext.schedules.published.zero_bubble import check_counts


def interleaved_1f1b(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """Interleaved 1F1B (Narayanan et al. 2021, sec. 2.2.2) in Megatron's order; stage s lies on rank s mod p.

    Micro-batches go in rounds: a rank runs a round on its first stage, then on its second, and so on; backwards from
    its last stage to its first. Rank r begins with 2(p - 1 - r) + (v - 1) x (size of a round) forwards. Where p
    divides M, a round has p micro-batches, as in the paper. Else there are max(1, M div p) rounds as equal as can be,
    the larger ones first (a round of less than p would leave the ranks waiting for each other, or for ever): for
    M >= p the bubble is (p - 1)(F + B) of one stage, for any M. With one stage a rank the order is that of 1F1B.

    Errors: PlanError for less than one rank, micro-batch or stage a rank.

    >>> for line in interleaved_1f1b(2, 3).lines(): print(*line)
    0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2
    """
    check_counts(num_ranks, num_micro_batches)
    if stages_per_rank < 1:
        raise PlanError(f"{stages_per_rank} stages a rank: give at least 1")
    name = "interleaved-1f1b"
    if stages_per_rank == 1:
        plain = one_f_one_b(num_ranks, num_micro_batches)
        return PipelineSchedule(name, plain.ranks, plain.stage_ranks)
    rounds = _rounds(num_ranks, num_micro_batches)
    turns = [(turn, m) for members in rounds for turn in range(stages_per_rank) for m in members]
    ranks = []
    for rank in range(num_ranks):
        forwards = [Action(turn * num_ranks + rank, Kind.FORWARD, m) for turn, m in turns]
        backwards = [Action((stages_per_rank - 1 - turn) * num_ranks + rank, Kind.BACKWARD, m) for turn, m in turns]
        warm = min(2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * len(rounds[0]), len(turns))
        actions = forwards[:warm]
        for forward, backward in zip(forwards[warm:], backwards, strict=False):
            actions += [forward, backward]
        ranks.append(tuple(actions + backwards[len(turns) - warm :]))
    return PipelineSchedule(name, tuple(ranks), tuple(range(num_ranks)) * stages_per_rank)


def _rounds(num_ranks: int, num_micro_batches: int) -> list[range]:
    """
    >>> _rounds(4, 8), _rounds(4, 11), _rounds(4, 3)
    ([range(0, 4), range(4, 8)], [range(0, 6), range(6, 11)], [range(0, 3)])
    """
    num_rounds = max(1, num_micro_batches // num_ranks)
    least, larger = divmod(num_micro_batches, num_rounds)
    starts = [least * i + min(i, larger) for i in range(num_rounds + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
