"""Proof that the collectives of all replicas of a step meet, beside the transfers between stages.

A collective is a rendezvous over its group, in program order: the k-th that a member issues on the group meets the
k-th of every other member, and the host of none goes on before all have come (a library may let it, but a plan that
needs that is not proven). Collectives are not instructions: the stage runs them inside micro-batches (tensor and expert
parallelism, gathers of sharded parameters) or at the end of the step (gradient reduction). `with_collectives` says
where, and `verify_step` proves the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)
from dynapipe_ext.executor.verify import verify

Member = tuple[int, int]  # (dp_rank, pp_rank)


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's part in a rendezvous of all of `group`; members issue the same `name` at the same place."""

    group: tuple[Member, ...]
    name: str

    def __str__(self) -> str:
        return self.name


Event = Instruction | Collective


def with_collectives(
    replicas: Sequence[Sequence[Sequence[Instruction]]],
    *,
    inside: Sequence[str] = (),
    at_end: Sequence[str] = ("gradient reduction",),
) -> tuple[tuple[tuple[Event, ...], ...], ...]:
    """Programs [dp_rank][pp_rank] with collectives over the ranks of all replicas that hold the same stages.

    `inside` are issued by each Forward, Backward and BackwardInput (ZeRO-2/3, expert parallelism over data ranks),
    `at_end` once by each rank. A group that stays within a replica issues the same on every member by construction.
    """
    found = []
    for programs in replicas:
        ranks = []
        for pp_rank, program in enumerate(programs):
            group = tuple((dp_rank, pp_rank) for dp_rank in range(len(replicas)))
            events: list[Event] = []
            for instruction in program:
                if isinstance(instruction, Forward | Backward | BackwardInput):
                    half = "forward" if isinstance(instruction, Forward) else "backward"
                    events += [Collective(group, f"{name} in a {half} of stage {instruction.stage}") for name in inside]
                events.append(instruction)
            ranks.append((*events, *(Collective(group, name) for name in at_end)))
        found.append(tuple(ranks))
    return tuple(found)


def verify_step(
    replicas: Sequence[Sequence[Sequence[Event]]], stage_ranks: Sequence[int], num_micro_batches: Sequence[int]
) -> list[list[int]]:
    """Peak bytes of buffers in flight [dp_rank][pp_rank], as `verify` gives them, once the collectives are proven too.

    `num_micro_batches` has one count a replica. Raises VerificationError naming both ranks and the first difference.
    """
    peaks = [
        verify([_transfers(events) for events in programs], stage_ranks, count)
        for programs, count in zip(replicas, num_micro_batches, strict=True)
    ]
    programs = {(dp, pp): events for dp, ranks in enumerate(replicas) for pp, events in enumerate(ranks)}
    _check_agreement(programs)
    _check_progress(programs)
    return peaks


def _transfers(events: Sequence[Event]) -> list[Instruction]:
    return [event for event in events if not isinstance(event, Collective)]


def _check_agreement(programs: dict[Member, Sequence[Event]]) -> None:
    """All members of a group issue the same collectives on it, in the same order and number."""
    issued: dict[tuple[Member, ...], dict[Member, list[Collective]]] = {}
    for member, events in programs.items():
        for event in events:
            if isinstance(event, Collective):
                if member not in event.group:
                    raise VerificationError(f"{_name(member)} issues the {event} on a group that it is not a member of")
                issued.setdefault(event.group, {}).setdefault(member, []).append(event)
    for group, sides in issued.items():
        for member in group:
            if member not in programs:
                raise VerificationError(f"the group of the {next(iter(sides.values()))[0]} names {_name(member)}: none")
        first = sides.get(group[0], [])
        for member in group[1:]:
            other = sides.get(member, [])
            for k in range(max(len(first), len(other))):
                ours = str(first[k]) if k < len(first) else "nothing"
                theirs = str(other[k]) if k < len(other) else "nothing"
                if ours != theirs:
                    raise VerificationError(
                        f"{_name(group[0])} and {_name(member)} disagree on collective {k} of their group:"
                        f" {ours} meets {theirs} ({len(first)} and {len(other)} in all); a collective inside"
                        ' micro-batches that crosses replicas needs replica_counts = "equal" and one order'
                    )


def _check_progress(programs: dict[Member, Sequence[Event]]) -> None:
    """Run all ranks to a fixed point: waits and collectives hold a rank, and what a rank has posted stays posted."""
    runs = {member: _Run(member, events) for member, events in programs.items()}
    counts: Counter[tuple[Member, object]] = Counter()  # (who, queue or group) -> how many it has posted or come to
    waiting = list(runs.values())
    while waiting:
        before = [run.pc for run in waiting]
        for run in waiting:
            run.advance(counts)
        blocked = [run for run in waiting if run.pc < len(run.events)]
        if blocked and before == [run.pc for run in waiting]:
            stuck = "; ".join(f"{_name(run.member)} at its {run.events[run.pc]}" for run in blocked)
            raise VerificationError(f"deadlock: {stuck}")
        waiting = blocked


class _Run:
    """How far one rank has come; `advance` runs it up to what holds it."""

    def __init__(self, member: Member, events: Sequence[Event]) -> None:
        self.member, self.events, self.pc = member, events, 0
        self._entered = -1  # the place of the collective that it has come to last
        self._posted: dict[tuple[object, bool], tuple[Member, object, int]] = {}  # -> peer, its queue, index

    def advance(self, counts: Counter[tuple[Member, object]]) -> None:
        while self.pc < len(self.events) and self._step(self.events[self.pc], counts):
            self.pc += 1

    def _step(self, event: Event, counts: Counter[tuple[Member, object]]) -> bool:
        dp_rank, pp_rank = self.member
        match event:
            case Collective(group):
                if self._entered < self.pc:
                    self._entered = self.pc
                    counts[self.member, group] += 1
                needed = counts[self.member, group]
                return all(counts[member, group] >= needed for member in group)
            case Send(buffer, peer, channel) | Recv(buffer, peer, channel):
                mine, theirs = (peer, channel), (pp_rank, channel)
                self._posted[buffer, isinstance(event, Send)] = ((dp_rank, peer), theirs, counts[self.member, mine])
                counts[self.member, mine] += 1
            case WaitSend(buffer) | WaitRecv(buffer):
                other, queue, k = self._posted[buffer, isinstance(event, WaitSend)]
                return counts[other, queue] > k
        return True


def _name(member: Member) -> str:
    return f"pipeline rank {member[1]} of replica {member[0]}"
