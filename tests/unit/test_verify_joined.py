"""Joined ranks exchange slices inside actions: the proof has these collectives, and refuses orders that do not meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from dynapipe_ext.batch.topology import ReplicaCollectives
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import Backward, BackwardInput, BackwardWeight, Forward
from dynapipe_ext.executor.proof import Collective, verify, verify_step, with_collectives
from dynapipe_ext.schedules.published.full_backward import gpipe, one_f_one_b
from dynapipe_ext.schedules.published.zero_bubble import zb_h1
from tests.support.lowered import Programs, lowered, uniform_costs

STAGE_RANKS = (0, 1)
REDUCED = ReplicaCollectives()


def block(count: int, schedule=one_f_one_b) -> Programs:
    return lowered(schedule(2, count), uniform_costs(2, count))


def proven(events, counts: Sequence[int], width: int = 2) -> list[list[int]]:
    return verify_step(events, STAGE_RANKS, counts, width=width)


def edited(events, dp_rank: int, pp_rank: int, program):
    ranks = [list(programs) for programs in events]
    ranks[dp_rank][pp_rank] = tuple(program)
    return ranks


def test_every_forward_and_input_gradient_exchanges_slices_and_no_weight_gradient_does():
    events = with_collectives([block(2, zb_h1), block(3, zb_h1)], REDUCED, width=2)
    assert len(events) == 4
    for dp_rank, ranks in enumerate(events):
        for pp_rank, program in enumerate(ranks):
            own = tuple((d, pp_rank) for d in range(dp_rank // 2 * 2, dp_rank // 2 * 2 + 2))
            for before, event in pairwise(program):
                exchanges = isinstance(before, Forward | Backward | BackwardInput)
                assert exchanges == (event == Collective(own, f"exchange of slices in {before}"))
            assert any(isinstance(event, BackwardWeight) for event in program)
            assert program[-1] == Collective(tuple((d, pp_rank) for d in range(4)), "gradient reduction")


def test_blocks_of_unequal_counts_are_proven_and_have_the_bytes_of_one_pipeline():
    replicas = [block(2), block(5)]
    found = proven(with_collectives(replicas, REDUCED, width=4), [2, 5], width=4)
    of_one = [verify(programs, STAGE_RANKS, count) for programs, count in zip(replicas, (2, 5), strict=True)]
    assert found == [of_one[0]] * 4 + [of_one[1]] * 4


def test_every_swap_of_two_actions_on_one_of_the_joined_ranks_is_refused():
    """Where the program alone would still be one; a swap that changes no exchange is none of these."""
    events = with_collectives([block(4)], REDUCED, width=2)
    program = events[1][0]
    places = [i for i, event in enumerate(program) if isinstance(event, Forward)]
    for i, j in pairwise(places):
        swapped = list(program)
        swapped[i : i + 2], swapped[j : j + 2] = program[j : j + 2], program[i : i + 2]
        with pytest.raises(VerificationError):
            proven(edited(events, 1, 0, swapped), [4])


def test_a_joined_rank_with_a_schedule_of_its_own_is_refused_with_both_slices_and_the_next_move():
    events = with_collectives([block(3)], REDUCED, width=2)
    other = with_collectives([block(3, gpipe)], REDUCED, width=2)
    with pytest.raises(
        VerificationError,
        match=r"rank 0 of replica 0, slice 0 and pipeline rank 0 of replica 0, slice 1 disagree on collective 2 of"
        r" their group: exchange of slices in 0B0 meets exchange of slices in 0F2 .*give all of a block the same plan",
    ):
        proven([events[0], other[1]], [3])


def test_exchanges_that_cross_those_over_all_ranks_are_a_deadlock():
    """One slice enters the reduction over all replicas before its last exchange, which the other slice waits for."""
    events = with_collectives([block(2), block(2)], REDUCED, width=2)
    proven(events, [2, 2])
    program = list(events[3][0])
    assert isinstance(program[-2], Collective)
    program[-2:] = program[:-3:-1]
    with pytest.raises(VerificationError, match=r"deadlock.*replica 1, slice 1 at its gradient reduction"):
        proven(edited(events, 3, 0, program), [2, 2])


def test_blocks_whose_collectives_cross_need_equal_orders():
    """ZeRO 3 and experts over data parallel ranks: a group of all blocks, inside micro-batches."""
    everywhere = ReplicaCollectives(inside=("expert all-to-all",))
    assert proven(with_collectives([block(3), block(3)], everywhere, width=2), [3, 3])
    with pytest.raises(VerificationError, match=r"replica 0, slice 0 and .* replica 1, slice 0.*equal"):
        proven(with_collectives([block(2), block(3)], everywhere, width=2), [2, 3])
    assert proven(with_collectives([block(3)], everywhere, width=4), [3], width=4)  # one block: its count is its own
