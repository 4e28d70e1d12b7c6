"""Lowered plans pass the proof whatever the schedule, and damaged ones do not."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import PlanError, VerificationError
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    Buffer,
    Forward,
    Load,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
    lower_schedule,
)
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import simulate_ns
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.published.full_backward import one_f_one_b

FORMAT = ActivationFormat(2)


def random_schedule(rng: random.Random, stage_ranks: tuple[int, ...], num_micro_batches: int) -> PipelineSchedule:
    """Any order that respects data flow: ready actions are drawn at random; some backwards are split."""
    last = len(stage_ranks) - 1
    split = {(s, m) for s in range(last + 1) for m in range(num_micro_batches) if rng.random() < 0.4}
    done: set[Action] = set()
    ranks: list[list[Action]] = [[] for _ in range(max(stage_ranks) + 1)]
    waiting = {Action(0, Kind.FORWARD, m) for m in range(num_micro_batches)}
    while waiting:
        action = rng.choice(sorted(waiting, key=str))
        waiting.discard(action)
        done.add(action)
        ranks[stage_ranks[action.stage]].append(action)
        s, m = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD and s < last:
            waiting.add(Action(s + 1, Kind.FORWARD, m))
        elif action.kind is Kind.FORWARD:
            waiting.add(Action(s, Kind.BACKWARD_INPUT if (s, m) in split else Kind.BACKWARD, m))
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            if action.kind is Kind.BACKWARD_INPUT:
                waiting.add(Action(s, Kind.BACKWARD_WEIGHT, m))
            if s > 0:
                waiting.add(Action(s - 1, Kind.BACKWARD_INPUT if (s - 1, m) in split else Kind.BACKWARD, m))
    return PipelineSchedule("random", tuple(tuple(rank) for rank in ranks), stage_ranks)


def random_costs(rng: random.Random, num_stages: int, num_micro_batches: int) -> MicroBatchCosts:
    def array(rows: int, high: int) -> np.ndarray:
        values = [[rng.choice([0, 1, rng.randrange(high)]) for _ in range(num_micro_batches)] for _ in range(rows)]
        return np.array(values, np.int64).reshape(rows, num_micro_batches)

    zeros = np.zeros((num_stages, num_micro_batches), np.int64)
    backward = array(num_stages, 100)
    return MicroBatchCosts(
        forward_ns=array(num_stages, 100),
        backward_ns=backward,
        weight_ns=backward // 2,
        stored_bytes=zeros,
        working_bytes=zeros,
        transfer_ns=array(num_stages - 1, 50),
        transfer_bytes=zeros[:-1],
        static_bytes=np.zeros(num_stages, np.int64),
    )


PLACEMENTS = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1), (0, 1, 2, 2, 1, 0), (1, 0)]


def lowered(seed: int, stage_ranks: tuple[int, ...], num_micro_batches: int, form: ActivationFormat = FORMAT):
    rng = random.Random(seed)
    schedule = random_schedule(rng, stage_ranks, num_micro_batches)
    costs = random_costs(rng, len(stage_ranks), num_micro_batches)
    micro_batches = [micro_batch_of(i, form) for i in range(num_micro_batches)]
    times = simulate_ns(schedule, costs)
    return schedule, lower_schedule(schedule, times, micro_batches, form, costs.transfer_ns.tolist())


def micro_batch_of(i: int, form: ActivationFormat) -> MicroBatch:
    return MicroBatch((SampleLength(i, i + 1, 0 if form.first_decoder_stage is None else 2 * i + 1),))


plans = st.tuples(st.integers(0, 10**6), st.sampled_from(PLACEMENTS), st.integers(1, 6))


@settings(max_examples=120)
@given(plans)
def test_every_schedule_that_simulates_lowers_to_a_plan_that_is_proven_with_the_bytes_it_has_in_flight(drawn):
    schedule, programs = lowered(*drawn)
    assert verify(programs, schedule.stage_ranks, drawn[2]) == [most_in_flight(program) for program in programs]


def most_in_flight(program) -> int:
    """Bytes from each Send to its WaitSend, and from each Recv to the action that takes what came."""
    sent, received, most = {}, {}, 0
    for one in program:
        match one:
            case Send() | Recv():
                (sent if isinstance(one, Send) else received)[one.buffer] = sum(spec.num_bytes for spec in one.specs)
            case WaitSend():
                del sent[one.buffer]
            case Forward(stage, m):
                received.pop(Buffer("activation", stage - 1, m), None)
            case Backward(stage, m) | BackwardInput(stage, m):
                received.pop(Buffer("gradient", stage + 1, m), None)
        most = max(most, sum(sent.values()) + sum(received.values()))
    return most


@settings(max_examples=50)
@given(plans)
def test_every_send_has_one_recv_in_the_same_place_of_its_queue_and_the_shapes_of_its_boundary(drawn):
    form = ActivationFormat(8, first_decoder_stage=drawn[0] % len(drawn[1]))
    _, programs = lowered(*drawn, form)
    sends: dict[tuple[int, int, int], list] = {}
    recvs: dict[tuple[int, int, int], list] = {}
    for rank, program in enumerate(programs):
        for instruction in program:
            if isinstance(instruction, Send):
                lane = (rank, instruction.peer, instruction.channel)
                sends.setdefault(lane, []).append((instruction.buffer, instruction.specs))
            elif isinstance(instruction, Recv):
                lane = (instruction.peer, rank, instruction.channel)
                recvs.setdefault(lane, []).append((instruction.buffer, instruction.specs))
    assert sends == recvs
    assert all(channel == (sender > receiver) for sender, receiver, channel in sends)
    for buffer, specs in itertools.chain.from_iterable(sends.values()):
        boundary = buffer.stage - (buffer.payload == "gradient")
        assert specs == form.specs(micro_batch_of(buffer.micro_batch, form), boundary)


@settings(max_examples=50)
@given(plans)
def test_each_rank_runs_exactly_its_schedule_loads_each_micro_batch_once_and_frees_what_it_sent_before_it_waits(drawn):
    schedule, programs = lowered(*drawn)
    for program, actions in zip(programs, schedule.ranks, strict=True):
        computed = [i for i in program if not isinstance(i, Load | Send | Recv | WaitSend | WaitRecv)]
        assert [(i.stage, i.micro_batch) for i in computed] == [(a.stage, a.micro_batch) for a in actions]
        loads = Counter(i.micro_batch for i in program if isinstance(i, Load))
        assert loads == Counter(range(drawn[2]))
        for before, after in itertools.pairwise(program):
            assert not (isinstance(before, WaitRecv) and isinstance(after, WaitSend))


def damaged(rng: random.Random, programs):
    """A plan with one fault: an instruction dropped, doubled or retargeted, two sends swapped, or channels crossed."""
    rank = rng.randrange(len(programs))
    program = list(programs[rank])
    at = rng.randrange(len(program))
    match rng.choice(["drop", "double", "retarget", "swap", "shape"]):
        case "drop":
            del program[at]
        case "double":
            program.insert(at, program[at])
        case "retarget":
            places = [i for i, x in enumerate(program) if isinstance(x, Send | Recv)]
            assume(places)
            at = rng.choice(places)
            program[at] = replace(program[at], channel=1 - program[at].channel)
        case "swap":
            kind = rng.choice([Send, Recv])
            places = [i for i, x in enumerate(program) if isinstance(x, kind)]
            assume(len(places) > 1)
            i, j = rng.sample(places, 2)
            assume((program[i].peer, program[i].channel) == (program[j].peer, program[j].channel))
            program[i], program[j] = program[j], program[i]
        case "shape":
            places = [i for i, x in enumerate(program) if isinstance(x, Send | Recv)]
            assume(places)
            at = rng.choice(places)
            spec = program[at].specs[0]
            program[at] = replace(program[at], specs=(replace(spec, shape=(*spec.shape, 1)),))
    return [*programs[:rank], tuple(program), *programs[rank + 1 :]]


@settings(max_examples=150)
@given(plans, st.integers(0, 10**6))
def test_a_damaged_plan_is_refused(drawn, seed):
    schedule, programs = lowered(*drawn)
    with pytest.raises(VerificationError):
        verify(damaged(random.Random(seed), programs), schedule.stage_ranks, drawn[2])


def test_crossed_sends_on_one_communicator_are_a_deadlock_that_names_both_ranks():
    """What gloo forgives and NCCL does not: both ranks send first on the queue that they share."""
    schedule = one_f_one_b(2, 2)
    costs = random_costs(random.Random(0), 2, 2)
    micro_batches = [MicroBatch((SampleLength(i, 4),)) for i in range(2)]
    programs = lower_schedule(schedule, simulate_ns(schedule, costs), micro_batches, FORMAT)
    first, second = (
        [replace(i, channel=0) if isinstance(i, Send | Recv) else i for i in program] for program in programs
    )
    # Rank 1 sends the first gradient before it posts the second activation; rank 0 has that send before the receive.
    activation = next(i for i in second if isinstance(i, Recv) and i.buffer.micro_batch == 1)
    gradient = next(i for i in second if isinstance(i, Send))
    second.remove(activation)
    second.insert(second.index(gradient) + 1, activation)
    assert [i.buffer.micro_batch for i in first if isinstance(i, Send | Recv)][1] == 1
    with pytest.raises(VerificationError, match=r"rank [01].*communicator \(0, 1, 0\) have sends"):
        verify([first, second], schedule.stage_ranks, 2)


def test_waiting_for_a_send_before_posting_the_peers_receive_is_a_deadlock():
    schedule = one_f_one_b(2, 1)
    costs = random_costs(random.Random(1), 2, 1)
    programs = lower_schedule(schedule, simulate_ns(schedule, costs), [MicroBatch((SampleLength(0, 4),))], FORMAT)
    first, second = (list(program) for program in programs)
    sent = next(i for i in first if isinstance(i, Send))
    # Both ranks now wait at once for something that the other does only afterwards.
    first.remove(WaitSend(sent.buffer))
    first.insert(first.index(sent) + 1, WaitSend(sent.buffer))
    received = next(i for i in second if isinstance(i, Recv))
    gradient = next(i for i in first if isinstance(i, Recv))
    first.remove(gradient)
    first.insert(first.index(WaitRecv(gradient.buffer)), gradient)
    second.remove(received)
    second.insert(second.index(Forward(1, 0)) + 1, received)
    second.remove(WaitRecv(received.buffer))
    second.insert(second.index(Backward(1, 0)), WaitRecv(received.buffer))
    with pytest.raises(VerificationError, match="has not arrived"):
        verify([first, second], schedule.stage_ranks, 1)


def test_a_transfer_that_the_other_side_never_posts_is_named():
    schedule = one_f_one_b(2, 1)
    costs = random_costs(random.Random(1), 2, 1)
    programs = lower_schedule(schedule, simulate_ns(schedule, costs), [MicroBatch((SampleLength(0, 4),))], FORMAT)
    without_send = [i for i in programs[0] if not isinstance(i, Send | WaitSend)]
    with pytest.raises(VerificationError, match=r"rank 1, instruction 0 Recv of the activation.*never meets .* rank 0"):
        verify([[i for i in without_send if isinstance(i, Load | Forward)], programs[1]], schedule.stage_ranks, 1)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=24), st.integers(1, 4), st.floats(1.0, 3.0))
def test_no_published_plan_exceeds_the_limit_with_its_buffers_in_flight(lengths, num_stages, room):
    """The limit is what one micro-batch needs alone, with its buffers, times some room."""
    costs = TokenCosts(num_stages, bytes_per_token=64, ns_per_token_squared=3)
    longest = 64 * max(lengths) + 2 * FORMAT.specs(MicroBatch((SampleLength(0, max(lengths)),)))[0].num_bytes
    planner = Planner(Topology(pp=num_stages), costs, int(longest * room), pad_multiple=1, effort=2, format=FORMAT)
    samples = [SampleLength(i, n, target=n) for i, n in enumerate(lengths)]
    try:
        plans = prove_step(planner, samples, step=0).plans
    except PlanError:
        return  # nothing fits: refused, not exceeded
    assert all(plan.peak_bytes <= planner.memory_limit_bytes for plan in plans[0])
