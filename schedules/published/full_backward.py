"""Schedules with full backwards: GPipe, 1F1B and interleaved 1F1B. Micro-batches are injected in the order 0..M-1."""

from __future__ import annotations

from itertools import pairwise

from dynapipe_ext.errors import PlanError
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule, make_linear_schedule


def check_counts(**counts: int) -> None:
    """Raise PlanError for a count below 1; the keywords name what is counted."""
    for name, count in counts.items():
        if count < 1:
            raise PlanError(f"a schedule with {count} {name.replace('_', '-')}: give at least 1")


def gpipe(num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """Run all forwards, then all backwards (GPipe, Huang et al. 2019, sec. 2.3): a stage holds all micro-batches.

    Stage s is on rank s. Raises PlanError for less than one stage or micro-batch.

    >>> gpipe(2, 2).to_lines()
    [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1F1', '1B0', '1B1']]
    """
    check_counts(stages=num_stages, micro_batches=num_micro_batches)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return make_linear_schedule(
        "gpipe",
        [[Action(s, kind, m) for kind in kinds for m in range(num_micro_batches)] for s in range(num_stages)],
    )


def one_f_one_b(num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """Run warm-up forwards, then a forward and a backward in turn, then the backwards that are left (1F1B).

    After Narayanan et al. 2021, sec. 2.2.1: stage s begins with S - 1 - s forwards, and holds at most S - s
    micro-batches. Raises PlanError for less than one stage or micro-batch.

    >>> for line in one_f_one_b(3, 4).to_lines(): print(*line)
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    return interleaved_1f1b(num_stages, num_micro_batches, 1, name="1f1b")


def interleaved_1f1b(
    num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2, *, name: str = "interleaved-1f1b"
) -> PipelineSchedule:
    """Run interleaved 1F1B (Narayanan et al. 2021, sec. 2.2.2) in Megatron's order; stage s is on rank s mod p.

    p ranks with v stages each run M micro-batches in rounds: a round on a rank's first stage, then on its second, and
    so on; backwards from its last stage to its first. Rank r begins with 2(p - 1 - r) + (v - 1) x (size of a round)
    forwards, for v = 1 with p - 1 - r (plain 1F1B). If p divides M, a round has p micro-batches, as in the paper.
    Otherwise there are max(1, M div p) rounds as equal as possible, the larger ones first: in a round of less than p,
    ranks would wait for each other, or for ever. For M >= p the bubble is (p - 1)(F + B) of one stage.

    Raises PlanError for less than one rank, micro-batch or stage per rank.

    >>> for line in interleaved_1f1b(2, 3).to_lines(): print(*line)
    0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2
    """
    check_counts(ranks=num_ranks, micro_batches=num_micro_batches, stages_per_rank=stages_per_rank)
    rounds = _split_rounds(num_ranks, num_micro_batches)
    turns = [(turn, m) for members in rounds for turn in range(stages_per_rank) for m in members]
    ranks = []
    for rank in range(num_ranks):
        forwards = [Action(turn * num_ranks + rank, Kind.FORWARD, m) for turn, m in turns]
        backwards = [Action((stages_per_rank - 1 - turn) * num_ranks + rank, Kind.BACKWARD, m) for turn, m in turns]
        warm_up = num_ranks - 1 - rank
        if stages_per_rank > 1:
            warm_up = 2 * warm_up + (stages_per_rank - 1) * len(rounds[0])
        warm_up = min(warm_up, len(turns))
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            actions += [forward, backward]
        ranks.append(tuple(actions + backwards[len(turns) - warm_up :]))
    return PipelineSchedule(name, tuple(ranks), tuple(range(num_ranks)) * stages_per_rank)


def _split_rounds(num_ranks: int, num_micro_batches: int) -> list[range]:
    """Return the micro-batches of each round.

    >>> _split_rounds(4, 8), _split_rounds(4, 11), _split_rounds(4, 3)
    ([range(0, 4), range(4, 8)], [range(0, 6), range(6, 11)], [range(0, 3)])
    """
    num_rounds = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, num_rounds)
    starts = [size * i + min(i, larger) for i in range(num_rounds + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
