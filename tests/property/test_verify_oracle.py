"""The proof agrees with an exhaustive search over all interleavings, on sound plans and on damaged ones.

The search knows nothing of the proof: its state is what every rank has run and which operations have been completed,
its moves are single instructions of single ranks and single completions of transfers, in any order, and it asks whether
some order gets stuck, mixes up two buffers or reaches an instruction that cannot run. Ranks complete what they have
posted one at a time over all communicators, or, freely, one at a time on each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Instruction,
    Load,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from tests.support.lowered import Programs, costs_of, lowered

Lane = tuple[int, int, int]  # the lower rank, the other, the communicator
Queue = tuple[Lane, tuple[list[int], list[int]]]
PLACEMENTS = [(0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (1, 0)]


class HarmError(Exception):
    """Some interleaving fails."""


class StuckError(HarmError):
    """Some interleaving ends in a deadlock."""


def explore(programs: Programs, stage_ranks: Sequence[int], num_micro_batches: int, *, freely: bool = False) -> int:
    """Number of states that some interleaving reaches; raises HarmError if one of them fails or is stuck."""
    queues = _queues(programs)
    start = ((0,) * len(programs), (0,) * len(queues))  # what each rank has run, what of each queue has ended
    seen, todo = {start}, [start]
    # What does not depend on what has ended is found once for each place.
    awaited_at = cache(partial(_awaited, programs, [lane for lane, _ in queues]))
    check_local = cache(partial(_check_local, programs, stage_ranks))
    while todo:
        pcs, ended = todo.pop()
        startable = _startable(programs, queues, pcs, ended, freely)
        moves = [(pcs, (*ended[:q], ended[q] + 1, *ended[q + 1 :])) for q in startable]
        for rank, pc in enumerate(pcs):
            if pc == len(programs[rank]):
                continue
            queue, k = awaited_at(rank, pc) or (0, -1)
            if k < 0 or k < ended[queue]:
                check_local(rank, pc)
                moves.append(((*pcs[:rank], pc + 1, *pcs[rank + 1 :]), ended))
        if not moves and any(pc < len(program) for pc, program in zip(pcs, programs, strict=True)):
            raise StuckError(f"stuck at {pcs}")
        if not moves:
            for rank, program in enumerate(programs):
                _check_end(program, rank, stage_ranks, num_micro_batches)
        for move in moves:
            if move not in seen:
                seen.add(move)
                todo.append(move)
    return len(seen)


def _queues(programs: Programs) -> list[Queue]:
    """Pairs of ranks with a communicator, and where in the programs of both they post something there."""
    places: dict[Lane, tuple[list[int], list[int]]] = {}
    for rank, program in enumerate(programs):
        for place, x in enumerate(program):
            if isinstance(x, Send | Recv):
                lane = (min(rank, x.peer), max(rank, x.peer), x.channel)
                places.setdefault(lane, ([], []))[rank > x.peer].append(place)
    return sorted(places.items())


def _startable(programs: Programs, queues: list[Queue], pcs, ended: tuple[int, ...], freely: bool) -> list[int]:
    """The queues whose front both sides have posted.

    Unless `freely`, no side may have posted something before it, on any queue, that has not ended.
    """
    found, fronts = [], {}  # rank -> place of the first that it has posted and that has not ended
    posted = []
    for ((low, high, _), sides), k in zip(queues, ended, strict=True):
        of_both = 0
        for rank, places in zip((low, high), sides, strict=True):
            if k < len(places) and places[k] < pcs[rank]:
                fronts[rank] = min(places[k], fronts.get(rank, places[k]))
                of_both += 1
        posted.append(of_both == 2)
    for number, (((low, high, _), (ours, theirs)), k) in enumerate(zip(queues, ended, strict=True)):
        if posted[number]:
            a, b = programs[low][ours[k]], programs[high][theirs[k]]
            if type(a) is type(b) or a.buffer != b.buffer or a.specs != b.specs:
                raise HarmError(f"{a} meets {b}")
            if freely or (ours[k] == fronts[low] and theirs[k] == fronts[high]):
                found.append(number)
    return found


def _awaited(programs: Programs, lanes: list[Lane], rank: int, pc: int) -> tuple[int, int] | None:
    """What a wait needs to have ended: (queue, place in it) of the last posted of that name. One for nothing fails."""
    instruction = programs[rank][pc]
    if not isinstance(instruction, WaitSend | WaitRecv):
        return None
    kind = Send if isinstance(instruction, WaitSend) else Recv
    before = programs[rank][:pc]
    posts = [i for i, x in enumerate(before) if isinstance(x, kind) and x.buffer == instruction.buffer]
    if not posts:
        raise HarmError(f"rank {rank} waits for nothing")
    post = before[posts[-1]]
    lane = (post.peer, post.channel)
    k = sum(isinstance(x, Send | Recv) and (x.peer, x.channel) == lane for x in before[: posts[-1]])
    return lanes.index((min(rank, post.peer), max(rank, post.peer), post.channel)), k


def _history(program: Sequence[Instruction], pc: int, num_stages: int) -> Counter:
    """What a rank holds at `pc`, counted by name: +1 where something puts it there, -1 where something uses it up."""
    held: Counter = Counter()
    for instruction in program[:pc]:
        for name, change in _effects(instruction, num_stages):
            held[name] += change
    return held


def _effects(instruction: Instruction, num_stages: int) -> list[tuple[tuple, int]]:
    """(name, +1 or -1): tickets, each of which must stay 0 or 1 and none of which may be left."""
    match instruction:
        case Load(m):
            return [(("loaded", m), 1)]
        case Forward(s, m):
            taken = [(("has", Buffer("activation", s - 1, m)), -1)] if s else []
            left = [(("has", Buffer("activation", s, m)), 1)] if s + 1 < num_stages else []
            return [*taken, *left, (("ran", s, m), 1), (("to do", s, m), 1)]
        case Backward(s, m) | BackwardInput(s, m):
            taken = [(("has", Buffer("gradient", s + 1, m)), -1)] if s + 1 < num_stages else []
            left = [(("has", Buffer("gradient", s, m)), 1)] if s else []
            half = [(("half", s, m), 1)] if isinstance(instruction, BackwardInput) else []
            return [*taken, *left, (("to do", s, m), -1), *half]
        case BackwardWeight(s, m):
            return [(("half", s, m), -1)]
        case Send(buffer):
            return [(("has", buffer), -1), (("sending", buffer), 1)]
        case Recv(buffer):
            return [(("receiving", buffer), 1)]
        case WaitSend(buffer):
            return [(("sending", buffer), -1)]
        case WaitRecv(buffer):
            return [(("receiving", buffer), -1), (("has", buffer), 1)]


def _check_local(programs: Programs, stage_ranks: Sequence[int], rank: int, pc: int) -> None:
    instruction = programs[rank][pc]
    held = _history(programs[rank], pc, len(stage_ranks))
    for name, change in _effects(instruction, len(stage_ranks)):
        if held[name] + change not in (0, 1):
            raise HarmError(f"rank {rank}, {instruction}: {name}")
    match instruction:
        case Forward(s, m) if stage_ranks[s] != rank or not held["loaded", m]:
            raise HarmError(f"rank {rank}, {instruction}: cannot run")
        case Backward(s, m) | BackwardInput(s, m) if held["has", Buffer("activation", s, m)]:
            raise HarmError(f"rank {rank}, {instruction}: output not sent")
        case Recv(buffer) if held["has", buffer]:
            raise HarmError(f"rank {rank}, {instruction}: overwrites")


def _check_end(program: Sequence[Instruction], rank: int, stage_ranks: Sequence[int], num_micro_batches: int) -> None:
    held = _history(program, len(program), len(stage_ranks))
    stages = [s for s, owner in enumerate(stage_ranks) if owner == rank]
    wanted = {("ran", s, m) for s in stages for m in range(num_micro_batches)}
    wanted |= {("loaded", m) for m in range(num_micro_batches)}
    if {name for name, count in held.items() if count} != wanted:
        raise HarmError(f"rank {rank} ends with {held - Counter(wanted)}, without {wanted - set(held)}")


@cache
def sound_plan(seed: int) -> tuple[tuple[tuple[Instruction, ...], ...], tuple[int, ...], int]:
    """Random order, split, costs and placement, lowered: (programs, stage_ranks, number of micro-batches)."""
    rng = random.Random(seed)
    stage_ranks = rng.choice(PLACEMENTS)
    num_micro_batches = rng.randint(1, 4 if len(stage_ranks) == 2 else 2)
    if seed == 0:  # the largest, once
        stage_ranks, num_micro_batches = (0, 1, 2), 4
    num_stages = len(stage_ranks)
    schedule = _random_schedule(rng, stage_ranks, num_micro_batches)
    costs = _costs(rng, num_stages, num_micro_batches)
    return lowered(schedule, costs), stage_ranks, num_micro_batches


def _random_schedule(rng: random.Random, stage_ranks: tuple[int, ...], num_micro_batches: int) -> PipelineSchedule:
    last, ranks = len(stage_ranks) - 1, [[] for _ in range(max(stage_ranks) + 1)]
    ready = [Action(0, Kind.FORWARD, m) for m in range(num_micro_batches)]
    while ready:
        action = ready.pop(rng.randrange(len(ready)))
        ranks[stage_ranks[action.stage]].append(action)
        s, m, backward = action.stage, action.micro_batch, rng.choice([Kind.BACKWARD, Kind.BACKWARD_INPUT])
        if action.kind is Kind.FORWARD:
            ready.append(Action(s + 1, Kind.FORWARD, m) if s < last else Action(s, backward, m))
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and s > 0:
            ready.append(Action(s - 1, backward, m))
        if action.kind is Kind.BACKWARD_INPUT:
            ready.append(Action(s, Kind.BACKWARD_WEIGHT, m))
    return PipelineSchedule("random", tuple(map(tuple, ranks)), stage_ranks)


def _costs(rng: random.Random, num_stages: int, num_micro_batches: int) -> MicroBatchCosts:
    def array(rows: int) -> np.ndarray:
        return np.array([[rng.randrange(60) for _ in range(num_micro_batches)] for _ in range(rows)], np.int64)

    backward = array(num_stages)
    return costs_of(array(num_stages), backward, array(num_stages - 1))


def mutated(rng: random.Random, programs: Programs, kind: str) -> Programs:
    """One fault of that kind, which may turn out to be harmless."""
    changed = [list(program) for program in programs]
    rank = rng.randrange(len(programs))
    program = changed[rank]
    at = rng.randrange(len(program))
    post = rng.choice([i for i, x in enumerate(program) if isinstance(x, Send | Recv)])
    match kind:
        case "drop":
            del program[at]
        case "double":
            program.insert(rng.randint(at, len(program)), program[at])
        case "swap":
            other = (at + rng.randint(1, 3)) % len(program)
            program[at], program[other] = program[other], program[at]
        case "retarget":
            ends = [(r, channel) for r in range(len(programs)) if r != rank for channel in (0, 1)]
            ends.remove((program[post].peer, program[post].channel))
            peer, channel = rng.choice(ends)
            program[post] = replace(program[post], peer=peer, channel=channel)
        case "reroute":  # a send and its receive change communicators together
            for ours in changed:
                for i, x in enumerate(ours):
                    if isinstance(x, Send | Recv) and x.buffer == program[post].buffer:
                        ours[i] = replace(x, channel=1 - x.channel)
        case "reshape":
            spec = program[post].specs[0]
            program[post] = replace(program[post], specs=(replace(spec, shape=(*spec.shape[:2], spec.shape[2] + 1)),))
        case "cross":  # one communicator carries both directions; a receive is posted where it is waited for
            for ours in changed:
                ours[:] = [replace(x, channel=0) if isinstance(x, Send | Recv) else x for x in ours]
                _post_receives_late(ours)
        case "late":  # a receive is posted where it is waited for
            recv = rng.choice([x for x in program if isinstance(x, Recv)] or [None])
            if recv is not None:
                program.remove(recv)
                program.insert(program.index(WaitRecv(recv.buffer)), recv)
        case "hoist":  # a send is waited for at once, as a blocking send would be; receives are posted late
            for ours in changed:
                _post_receives_late(ours)
            sends = [x for x in program if isinstance(x, Send)]
            for send in rng.sample(sends, rng.randint(0, len(sends))):
                program.remove(WaitSend(send.buffer))
                program.insert(program.index(send) + 1, WaitSend(send.buffer))
    return changed


def _post_receives_late(program: list[Instruction]) -> None:
    for recv in [x for x in program if isinstance(x, Recv)]:
        program.remove(recv)
        program.insert(program.index(WaitRecv(recv.buffer)), recv)


def harm_of(programs: Programs, stage_ranks: Sequence[int], num_micro_batches: int) -> str:
    try:
        explore(programs, stage_ranks, num_micro_batches)
    except StuckError:
        return "stuck"
    except HarmError:
        return "mixed up"
    return "harmless"


def refused(programs: Programs, stage_ranks: Sequence[int], num_micro_batches: int) -> bool:
    try:
        verify(programs, stage_ranks, num_micro_batches)
    except VerificationError:
        return True
    return False


def test_no_interleaving_of_a_sound_plan_fails_and_the_proof_accepts_it():
    seeds = range(0, 60)
    for seed in seeds:
        programs, stage_ranks, num_micro_batches = sound_plan(seed)
        one_at_a_time = explore(programs, stage_ranks, num_micro_batches)
        assert sum(map(len, programs)) < one_at_a_time <= explore(programs, stage_ranks, num_micro_batches, freely=True)
        verify(programs, stage_ranks, num_micro_batches)
    assert {sound_plan(seed)[1] for seed in seeds} == set(PLACEMENTS)
    assert any(sound_plan(seed)[1:] == ((0, 1, 2), 4) for seed in seeds)


# Of 240 mutants, at least so many: (harmless, mixed up, stuck). A harmless one changes the order and no outcome.
LEAST = {
    "drop": (0, 240, 0),
    "double": (0, 230, 1),
    "swap": (50, 100, 0),
    "retarget": (0, 100, 1),
    "reroute": (240, 0, 0),  # one order over all queues is one on any
    "reshape": (0, 240, 0),
    "cross": (10, 100, 0),
    "hoist": (50, 0, 20),
    "late": (100, 20, 10),
}


@pytest.mark.parametrize("kind", LEAST)
def test_the_proof_refuses_exactly_the_mutants_that_some_interleaving_fails(kind):
    rng, found = random.Random(f"mutants {kind}"), Counter()
    for seed in range(240):
        programs, stage_ranks, num_micro_batches = sound_plan(seed % 60)
        mutant = mutated(rng, programs, kind)
        harm = harm_of(mutant, stage_ranks, num_micro_batches)
        assert refused(mutant, stage_ranks, num_micro_batches) == (harm != "harmless"), (kind, harm, mutant)
        found[harm] += 1
    print(f"{kind}: {dict(found)}")
    assert all(found[harm] >= least for harm, least in zip(("harmless", "mixed up", "stuck"), LEAST[kind], strict=True))
