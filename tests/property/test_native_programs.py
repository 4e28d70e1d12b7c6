"""Programs of the native core: their values, their bytes on the wire, and proofs that agree with the one in Python."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import (
    Backward,
    Forward,
    Load,
    Program,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
    lower_schedule,
)
from dynapipe_ext.executor.proof import peaks_by_core, verified_in_python, verify, verify_step, with_collectives
from dynapipe_ext.executor.proven_step import prove
from dynapipe_ext.executor.wire import decode, encode
from dynapipe_ext.schedules.evaluation.simulate import simulate_ns
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.published.full_backward import one_f_one_b
from tests.property.test_instructions import lowered, micro_batch_of, plans, random_costs, random_schedule
from tests.property.test_wire import example_plan

FORMS = (ActivationFormat(2), ActivationFormat(2, first_decoder_stage=1), ActivationFormat(4, first_head_stage=1))
_KEY = bytes(32)


@settings(max_examples=100)
@given(plans, st.sampled_from(FORMS))
def test_a_program_and_its_instructions_one_by_one_have_the_same_bytes(drawn, form) -> None:
    seed, stage_ranks, count = drawn
    rng = random.Random(seed)
    schedule, costs = random_schedule(rng, stage_ranks, count), random_costs(rng, len(stage_ranks), count)
    micro_batches = [micro_batch_of(rng.randrange(3), form) for _ in range(count)]  # some of one shape
    for program in lower_schedule(schedule, simulate_ns(schedule, costs), micro_batches, form):
        assert isinstance(program, Program)
        again = Program.of(tuple(program))
        assert (again, hash(again), len(again)) == (program, hash(program), len(program))
        coded = encode(replace(example_plan(), instructions=program), _KEY)
        assert coded == encode(replace(example_plan(), instructions=tuple(program)), _KEY)
        assert decode(coded, _KEY).instructions == program


@settings(max_examples=400)
@given(plans, st.integers(0, 10**6), st.booleans(), st.booleans())
def test_the_core_proves_what_python_proves_and_nothing_else(drawn, seed, forward_only, carries) -> None:
    """Of sound programs and of those with one row moved, left out, repeated or changed."""
    schedule, programs = lowered(*drawn)
    rng, count = random.Random(seed), drawn[2]
    settings = {"forward_only": forward_only, "sample_pieces": [(0, count - 1)] if carries and count > 1 else []}
    if forward_only:
        programs = [Program(one.table[_is_forward(one.table)], one.specs) for one in programs]
    for changed in (programs, _changed(programs, rng)):
        peaks = peaks_by_core(changed, schedule.stage_ranks, count, **settings)
        verdicts = [
            _verdict(proof, changed, schedule.stage_ranks, count, settings) for proof in (verified_in_python, verify)
        ]
        assert verdicts == [peaks or verdicts[0]] * 2
        assert (peaks is None) == isinstance(verdicts[0], str)


def test_the_core_sees_ranks_that_wait_for_each_other_though_each_queue_agrees() -> None:
    """A rank waits for the gradient of what it sends behind it: sound of each rank and each queue alone."""
    schedule, costs = one_f_one_b(2, 1), TokenCosts(2)
    micro_batches = [micro_batch_of(0, FORMS[0])]
    times = simulate_ns(schedule, costs.evaluate(micro_batches))
    sound = lower_schedule(schedule, times, micro_batches, FORMS[0])
    send, receive, computes = (
        [place for place, one in enumerate(sound[0]) if isinstance(one, kinds)]
        for kinds in ((Send, WaitSend), (Recv, WaitRecv), (Load, Forward, Backward))
    )
    rest = {"forward_only": False, "sample_pieces": ()}
    for order, is_sound in (([*send, *receive], True), ([*receive, *send], False)):
        places = [*computes[:2], *order, *computes[2:]]
        programs = [Program(sound[0].table[places], sound[0].specs), sound[1]]
        assert (peaks_by_core(programs, schedule.stage_ranks, 1, **rest) is not None) == is_sound
        if not is_sound:
            with pytest.raises(VerificationError, match="deadlock, as ranks post in orders that disagree"):
                verified_in_python(programs, schedule.stage_ranks, 1, **rest)


def _verdict(proof, programs, stage_ranks, count, settings):
    try:
        return proof(programs, stage_ranks, count, **settings)
    except VerificationError as error:
        return str(error)


def test_replicas_that_meet_at_the_end_alone_are_proven_each_by_itself_to_what_all_give_together() -> None:
    planner = Planner(Topology(pp=2, dp=3), TokenCosts(num_stages=2), 10**9, format=ActivationFormat(2))
    step, meet = planner.plan([5, 900, 3, 70, 11, 200, 1, 8, 60]), ReplicaCollectives()
    proven = prove(step, planner.activation_format, meet)
    programs = [[plan.instructions for plan in replica] for replica in proven.plans]
    counts = [len(replica.micro_batches) for replica in step.batch.replicas]
    together = verify_step(with_collectives(programs, meet), step.schedules[0].stage_ranks, counts)
    assert [list(replica) for replica in proven.in_flight_bytes] == together


def _is_forward(table):
    """Load, Forward, and what moves activations."""
    return (table[:, 0] <= 1) | ((table[:, 0] >= 5) & (table[:, 3] == 0))


def _changed(programs, rng):
    rank = rng.randrange(len(programs))
    table = programs[rank].table.copy()
    row, other = rng.randrange(len(table)), rng.randrange(len(table))
    match rng.randrange(5):
        case 0:
            table = np.delete(table, row, axis=0)
        case 1:
            table = np.insert(table, other, table[row], axis=0)
        case 2:
            table[[row, other]] = table[[other, row]]
        case 3 if row + 1 < len(table):
            table[[row, row + 1]] = table[[row + 1, row]]
        case _:
            column, num_specs = rng.randrange(table.shape[1]), len(programs[rank].specs)
            most = (9 if num_specs else 5, 7, 7, 2, 4, 2, max(1, num_specs))[column]
            table[row, column] = rng.randrange(-1 if column in (1, 2, 4) else 0, most)
    return [Program(table, one.specs) if r == rank else one for r, one in enumerate(programs)]
