"""Proof that the collectives of all replicas of a step meet, beside the transfers between stages.

A collective is a rendezvous over its group, in program order: the k-th that a member issues on the group meets the
k-th of every other member, and the host of none goes on before all have come (a library may let it, but a plan that
needs that is not proven). Collectives are not instructions: the stage runs them inside micro-batches (tensor and expert
parallelism, gathers of sharded parameters) or at the end of the step (gradient reduction). `with_collectives` says
where, and `verify_step` proves the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypedDict

from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.fitted import FittedCosts
from dynapipe_ext.costs.forwards import ForwardCosts
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import VerificationError
from dynapipe_ext.executor.instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction
from dynapipe_ext.executor.proof.rank import Collective, Event, Member, RankTrace
from dynapipe_ext.executor.proof.replica import NEVER, Need, check_progress, needs_of, traced

Places = list[int]


def with_collectives(
    replicas: Sequence[Sequence[Sequence[Instruction]]],
    *,
    inside: Sequence[str] = (),
    with_gradients: Sequence[str] = (),
    at_end: Sequence[str] = ("gradient reduction",),
) -> tuple[tuple[tuple[Event, ...], ...], ...]:
    """Programs [dp_rank][pp_rank] with collectives over the ranks of all replicas that hold the same stages.

    `inside` are issued by each Forward, Backward and BackwardInput (gathers of sharded weights, expert parallelism over
    data ranks), `with_gradients` by each Backward and BackwardWeight (gradients that are scattered as they come),
    `at_end` once by each rank. A group that stays within a replica issues the same on every member by construction.
    """
    found = []
    for programs in replicas:
        ranks = []
        for pp_rank, program in enumerate(programs):
            group = tuple((dp_rank, pp_rank) for dp_rank in range(len(replicas)))
            events: Sequence[Event] = program
            if inside or with_gradients:
                events = [event for one in program for event in (one, *_issued(one, group, inside, with_gradients))]
            ranks.append((*events, *(Collective(group, name) for name in at_end)))
        found.append(tuple(ranks))
    return tuple(found)


def _issued(
    instruction: Instruction, group: tuple[Member, ...], inside: Sequence[str], with_gradients: Sequence[str]
) -> list[Collective]:
    """What an instruction issues, after it in the program: its output leaves when they have ended."""
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


class Crossing(TypedDict, total=False):
    """Names of collectives over replicas, as `with_collectives` takes them."""

    inside: tuple[str, ...]
    with_gradients: tuple[str, ...]


def crossing_collectives(costs: CostModel) -> Crossing:
    """What micro-batches issue over replicas in the training that a cost model prices, for `with_collectives`.

    ZeRO from stage 2 on scatters gradients as they come, stage 3 gathers weights besides (Rajbhandari et al. 2020, sec.
    5); expert parallelism over data ranks exchanges tokens. Other models know nothing of them and have none.
    """
    if isinstance(costs, FittedCosts | ForwardCosts):
        return crossing_collectives(costs.base)
    if not isinstance(costs, AnalyticCosts):
        return {}
    gathers = ("weight gather",) if costs.zero_stage == 3 else ()
    experts = ("expert all-to-all",) if costs.ep > 1 else ()
    return {
        "inside": (*gathers, *experts),
        "with_gradients": ("gradient scatter",) if costs.zero_stage >= 2 else (),
    }


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


def _checked_agreement(members: dict[Member, RankTrace]) -> dict[tuple[Member, ...], dict[Member, Places]]:
    """The place of every collective, by group and member; all of a group issue the same ones in the same order."""
    issued: dict[tuple[Member, ...], dict[Member, Places]] = {}
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


def _names_of(trace: RankTrace, places: Places) -> list[str]:
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
    member: Member, trace: RankTrace, issued: dict[tuple[Member, ...], dict[Member, Places]], first: Sequence[int]
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
