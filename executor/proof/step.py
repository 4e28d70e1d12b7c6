"""Proof that the collectives of all replicas of a step meet, beside the transfers between stages.

A collective is a rendezvous over its group, in program order: the k-th that a member issues on the group meets the
k-th of every other member, and the host of none goes on before all have come (a library may let it, but a plan that
needs that is not proven). Collectives are not instructions: the stage runs them inside micro-batches (tensor and expert
parallelism, gathers of sharded parameters) or at the end of the step (gradient reduction). `with_collectives` puts
those of a run there, and `verify_step` proves the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from dynapipe_ext.collectives import ReplicaCollectives
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction
from dynapipe_ext.executor.proof.rank import Collective, Event, Member, RankTrace
from dynapipe_ext.executor.proof.replica import NEVER, Need, check_progress, needs_of, traced

ProgramPlaces = list[int]


def with_collectives(
    replicas: Sequence[Sequence[Sequence[Instruction]]], collectives: ReplicaCollectives
) -> tuple[tuple[tuple[Event, ...], ...], ...]:
    """Programs [dp_rank][pp_rank] with the collectives over the ranks of all replicas that hold the same stages.

    A group that stays within a replica issues the same on every member by construction.
    """
    found = []
    for programs in replicas:
        ranks = []
        for pp_rank, program in enumerate(programs):
            group = tuple((dp_rank, pp_rank) for dp_rank in range(len(replicas)))
            events: Sequence[Event] = program
            if collectives.inside or collectives.with_gradients:
                events = [event for one in program for event in (one, *_issued(one, group, collectives))]
            ranks.append((*events, *(Collective(group, name) for name in collectives.at_end)))
        found.append(tuple(ranks))
    return tuple(found)


def _issued(instruction: Instruction, group: tuple[Member, ...], collectives: ReplicaCollectives) -> list[Collective]:
    """What an instruction issues, after it in the program: its output leaves when they have ended."""
    inside, with_gradients = collectives.inside, collectives.with_gradients
    match instruction:
        case Forward(stage):
            return [Collective(group, f"{name} in a forward of stage {stage}") for name in inside]
        case Backward(stage):
            return [Collective(group, f"{name} in a backward of stage {stage}") for name in (*inside, *with_gradients)]
        case BackwardInput(stage):
            return [Collective(group, f"{name} in a backward of stage {stage}") for name in inside]
        case BackwardWeight(stage):
            return [Collective(group, f"{name} in a weight gradient of stage {stage}") for name in with_gradients]
        case _:
            return []


def verify_step(
    replicas: Sequence[Sequence[Sequence[Event]]],
    stage_ranks: Sequence[int],
    num_micro_batches: Sequence[int],
    *,
    forward_only: bool = False,
) -> list[list[int]]:
    """Peak bytes of buffers in flight [dp_rank][pp_rank], as `verify` gives them, once the collectives are proven too.

    `num_micro_batches` has one count a replica. Raises VerificationError naming both ranks and the first difference.
    """
    traces = [
        traced(programs, stage_ranks, count, forward_only=forward_only)
        for programs, count in zip(replicas, num_micro_batches, strict=True)
    ]
    members = {(dp, pp): trace for dp, ranks in enumerate(traces) for pp, trace in enumerate(ranks)}
    issued = _checked_agreement(members)
    first = list(accumulate((len(ranks) for ranks in traces), initial=0))
    needs = [_all_needs(member, trace, issued, first) for member, trace in members.items()]
    names = list(members)

    def why(rank: int, i: int) -> str:
        return f"{_name(names[rank])} at its {members[names[rank]].program[needs[rank][i][0]]}"

    check_progress(needs, why)
    for trace in members.values():
        trace.check_end()
    return [[trace.peak_bytes for trace in ranks] for ranks in traces]


def _checked_agreement(members: dict[Member, RankTrace]) -> dict[tuple[Member, ...], dict[Member, ProgramPlaces]]:
    """The place of every collective, by group and member; all of a group issue the same ones in the same order."""
    issued: dict[tuple[Member, ...], dict[Member, ProgramPlaces]] = {}
    for member, trace in members.items():
        for place, collective in trace.collectives:
            group = collective.group
            if (sides := issued.get(group)) is None:
                sides = issued[group] = {}
                for other in group:
                    if other not in members:
                        raise VerificationError(f"the group of the {collective} names {_name(other)}: none")
            if (places := sides.get(member)) is None:
                if member not in group:
                    raise VerificationError(
                        f"{_name(member)} issues the {collective} on a group that it is not a member of"
                    )
                places = sides[member] = []
            places.append(place)
    for group, sides in issued.items():
        ours = _names_of(members[group[0]], sides.get(group[0], []))
        for member in group[1:]:
            theirs = _names_of(members[member], sides.get(member, []))
            if ours != theirs:
                raise _disagreement(group[0], ours, member, theirs)
    return issued


def _names_of(trace: RankTrace, places: ProgramPlaces) -> list[str]:
    return [str(trace.program[place]) for place in places]


def _disagreement(one: Member, ours: list[str], other: Member, theirs: list[str]) -> VerificationError:
    longest = max(len(ours), len(theirs))
    mine, met = (names + ["nothing"] * (longest - len(names)) for names in (ours, theirs))
    k = next(k for k in range(longest) if mine[k] != met[k])
    return VerificationError(
        f"{_name(one)} and {_name(other)} disagree on collective {k} of their group: {mine[k]} meets {met[k]}"
        f" ({len(ours)} and {len(theirs)} in all); a collective inside micro-batches that crosses replicas needs"
        ' replica_counts = "equal" and one order: take a published schedule (1f1b, gpipe, zb-h1, zb-h2)'
    )


def _all_needs(
    member: Member,
    trace: RankTrace,
    issued: dict[tuple[Member, ...], dict[Member, ProgramPlaces]],
    first: Sequence[int],
) -> list[Need]:
    """A rank's needs with those of its collectives: that every other member has come to its own side of each."""
    base = first[member[0]]
    needs = needs_of(trace, base)
    counts: dict[tuple[Member, ...], int] = {}
    for place, collective in trace.collectives:
        group = collective.group
        k = counts[group] = counts.get(group, -1) + 1
        needs += [(place, first[dp] + pp, issued[group][dp, pp][k] - 1) for dp, pp in group if (dp, pp) != member]
    if counts:
        needs.sort(key=lambda need: need[0])
    needs.append((NEVER, base + member[1], NEVER))
    return needs


def _name(member: Member) -> str:
    return f"pipeline rank {member[1]} of replica {member[0]}"
