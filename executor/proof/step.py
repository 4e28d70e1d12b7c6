"""Proof that the collectives of all replicas of a step meet, beside the transfers between stages.

A collective is a rendezvous over its group, in program order: the k-th that a member issues on the group meets the
k-th of every other member, and the host of none goes on before all have come (a library may let it, but a plan that
needs that is not proven). Collectives are not instructions: the stage runs them inside micro-batches (tensor and expert
parallelism, gathers of sharded parameters) or at the end of the step (gradient reduction). `with_collectives` puts
those of a run there, and `verify_step` proves the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynapipe_ext.collectives import ReplicaCollectives
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction
from dynapipe_ext.executor.proof.order import check_one_order
from dynapipe_ext.executor.proof.rank import Collective, Event, Member, RankTrace
from dynapipe_ext.executor.proof.replica import traced
from dynapipe_ext.pieces import Chain


def with_collectives(
    replicas: Sequence[Sequence[Sequence[Instruction]]], collectives: ReplicaCollectives
) -> tuple[tuple[tuple[Event, ...], ...], ...]:
    """Programs [dp_rank][pp_rank] with the collectives over the ranks of all replicas that hold the same stages.

    A group that stays within a replica issues the same on every member by construction.
    """
    found = []
    groups = [
        tuple((dp_rank, pp_rank) for dp_rank in range(len(replicas)))
        for pp_rank in range(max(map(len, replicas), default=0))
    ]
    for programs in replicas:
        ranks = []
        for group, program in zip(groups, programs, strict=False):
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
    chains: Sequence[Sequence[Chain]] | None = None,
) -> list[list[int]]:
    """Peak bytes of buffers in flight [dp_rank][pp_rank], as `verify` gives them, once the collectives are proven too.

    `num_micro_batches` has one count a replica, `chains` (None: no sample is cut) the chains of each. Raises
    VerificationError naming both ranks and the first difference.
    """
    traces = [
        traced(programs, stage_ranks, count, forward_only=forward_only, chains=of_replica)
        for programs, count, of_replica in zip(
            replicas, num_micro_batches, [()] * len(replicas) if chains is None else chains, strict=True
        )
    ]
    members = {(dp, pp): trace for dp, ranks in enumerate(traces) for pp, trace in enumerate(ranks)}
    _check_agreement(members)

    def why(dp_rank: int, pp_rank: int, i: int) -> str:
        trace = traces[dp_rank][pp_rank]
        return f"{_name((dp_rank, pp_rank))} at its {trace.program[trace.places[i]]}"

    check_one_order([[trace.operations for trace in ranks] for ranks in traces], why)
    for trace in members.values():
        trace.check_end()
    return [[trace.peak_bytes for trace in ranks] for ranks in traces]


def _check_agreement(members: dict[Member, RankTrace]) -> None:
    """All of a group issue the same collectives in the same order."""
    groups: dict[tuple[Member, ...], None] = {}
    for member, trace in members.items():
        for group, issued in trace.issued.items():
            groups[group] = None
            for other in group:
                if other not in members:
                    raise VerificationError(f"the group of the {issued[0]} names {_name(other)}: none")
            if member not in group:
                raise VerificationError(f"{_name(member)} issues the {issued[0]} on a group that it is not a member of")
    for group in groups:
        ours = [str(one) for one in members[group[0]].issued.get(group, [])]
        for member in group[1:]:
            theirs = [str(one) for one in members[member].issued.get(group, [])]
            if ours != theirs:
                raise _disagreement(group[0], ours, member, theirs)


def _disagreement(one: Member, ours: list[str], other: Member, theirs: list[str]) -> VerificationError:
    longest = max(len(ours), len(theirs))
    mine, met = (names + ["nothing"] * (longest - len(names)) for names in (ours, theirs))
    k = next(k for k in range(longest) if mine[k] != met[k])
    return VerificationError(
        f"{_name(one)} and {_name(other)} disagree on collective {k} of their group: {mine[k]} meets {met[k]}"
        f" ({len(ours)} and {len(theirs)} in all); a collective inside micro-batches that crosses replicas needs"
        ' replica_counts = "equal" and one order: take a published schedule (1f1b, gpipe, zb-h1, zb-h2)'
    )


def _name(member: Member) -> str:
    return f"pipeline rank {member[1]} of replica {member[0]}"
