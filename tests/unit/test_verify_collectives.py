"""Replicas whose collectives do not meet are refused, with the two ranks and the first difference named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from dynapipe_ext.batch.topology import ReplicaCollectives
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import Backward, Forward, Recv
from dynapipe_ext.executor.proof import Collective, verify, verify_step, with_collectives
from dynapipe_ext.schedules.actions import PipelineSchedule
from dynapipe_ext.schedules.published.full_backward import gpipe, one_f_one_b
from tests.support.lowered import Programs, lowered, uniform_costs

STAGE_RANKS = (0, 1)
REDUCED, EXCHANGED = ReplicaCollectives(), ReplicaCollectives(inside=("expert all-to-all",))


def replica(num_micro_batches: int, schedule: Callable[[int, int], PipelineSchedule] = one_f_one_b) -> Programs:
    return lowered(schedule(2, num_micro_batches), uniform_costs(2, num_micro_batches))


def test_equal_replicas_with_collectives_inside_micro_batches_are_proven():
    replicas = [replica(3), replica(3)]
    events = with_collectives(replicas, ReplicaCollectives(inside=("parameter gather", "expert all-to-all")))
    assert sum(isinstance(event, Collective) for event in events[0][0]) == 2 * 6 + 1
    assert verify_step(events, STAGE_RANKS, [3, 3]) == [verify(programs, STAGE_RANKS, 3) for programs in replicas]


def test_counts_are_free_where_replicas_meet_at_the_end_of_the_step_only():
    assert len(verify_step(with_collectives([replica(2), replica(5)], REDUCED), STAGE_RANKS, [2, 5])) == 2


def test_unequal_counts_are_refused_where_a_group_crosses_replicas_inside_micro_batches():
    events = with_collectives([replica(2), replica(3)], EXCHANGED)
    with pytest.raises(
        VerificationError, match=r"pipeline rank 0 of replica 0 and pipeline rank 0 of replica 1.*equal"
    ):
        verify_step(events, STAGE_RANKS, [2, 3])


def test_another_order_of_collectives_is_refused_with_the_first_difference():
    """Both replicas hold three micro-batches, but one runs 1F1B and the other all forwards first."""
    replicas = [replica(3), replica(3, gpipe)]
    verify_step(with_collectives(replicas, REDUCED), STAGE_RANKS, [3, 3])
    with pytest.raises(
        VerificationError,
        match=r"rank 0 of replica 0 and .*rank 0 of replica 1 disagree on collective 2 of their group: expert"
        r" all-to-all in a backward of stage 0 meets expert all-to-all in a forward of stage 0 \(7 and 7 in all\)",
    ):
        verify_step(with_collectives(replicas, EXCHANGED), STAGE_RANKS, [3, 3])


def edited(events, dp_rank: int, pp_rank: int, program: Sequence):
    ranks = [list(programs) for programs in events]
    ranks[dp_rank][pp_rank] = tuple(program)
    return ranks


def test_a_collective_that_is_dropped_doubled_or_misnamed_is_refused():
    events = with_collectives([replica(2), replica(2), replica(2)], REDUCED)
    program = events[2][1]
    for wrong in (program[:-1], (*program, program[-1]), (*program[:-1], Collective(program[-1].group, "norm"))):
        with pytest.raises(VerificationError, match="rank 1 of replica 0 and pipeline rank 1 of replica 2"):
            verify_step(edited(events, 2, 1, wrong), STAGE_RANKS, [2, 2, 2])


def test_groups_entered_in_crossed_orders_are_a_deadlock_though_each_group_agrees():
    """Each group sees one collective a member; but the two ranks of a replica enter the two groups in other orders."""
    events = with_collectives([replica(1)], ReplicaCollectives(at_end=()))
    members = ((0, 0), (0, 1))
    a, b = Collective(members, "a"), Collective(members[::-1], "b")
    verify_step([[(*events[0][0], a, b), (*events[0][1], a, b)]], STAGE_RANKS, [1])
    with pytest.raises(VerificationError, match=r"deadlock.*: pipeline rank 0 of replica 0 at its a; .*rank 1.* its b"):
        verify_step([[(*events[0][0], a, b), (*events[0][1], b, a)]], STAGE_RANKS, [1])


def test_a_collective_that_waits_for_a_rank_that_waits_for_a_transfer_is_a_deadlock():
    """Rank 1 enters before its first forward, so rank 0 may not post the receive of what follows before it enters."""
    first, second = replica(1)
    group = Collective(((0, 0), (0, 1)), "norm")

    def entering(program, found):
        at = next(i for i, instruction in enumerate(program) if found(instruction))
        return (*program[:at], group, *program[at:])

    second = entering(second, lambda i: isinstance(i, Forward))
    early = entering(first, lambda i: isinstance(i, Recv))
    late = entering(first, lambda i: isinstance(i, Backward))
    verify_step([[early, second]], STAGE_RANKS, [1])
    with pytest.raises(
        VerificationError, match=r"deadlock.*: pipeline rank 0 of replica 0 at its Recv .*rank 1.* its norm"
    ):
        verify_step([[late, second]], STAGE_RANKS, [1])


def test_a_group_may_not_name_a_rank_that_does_not_exist():
    events = with_collectives([replica(1)], ReplicaCollectives(at_end=()))
    for member in ((1, 0), (0, 2)):
        with pytest.raises(VerificationError, match=rf"names pipeline rank {member[1]} of replica {member[0]}: none"):
            verify_step([[events[0][0], (*events[0][1], Collective(((0, 1), member), "a"))]], STAGE_RANKS, [1])


def test_a_rank_outside_the_group_may_not_issue_on_it():
    events = with_collectives([replica(1)], ReplicaCollectives(at_end=()))
    with pytest.raises(VerificationError, match="not a member"):
        verify_step([[events[0][0], (*events[0][1], Collective(((0, 0),), "a"))]], STAGE_RANKS, [1])
