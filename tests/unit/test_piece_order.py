"""Pieces of a sample: which micro-batches have them, and that every order but theirs is refused, by all."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength, find_pieces, sample_lengths, sample_pieces
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import PlanError, VerificationError
from dynapipe_ext.executor.instructions import lower
from dynapipe_ext.executor.proof import verify
from dynapipe_ext.executor.proven_step import prove
from dynapipe_ext.executor.wire import decode, encode
from dynapipe_ext.schedules.actions import Action, Kind, PipelineSchedule
from dynapipe_ext.schedules.evaluation.simulate import validate
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.tools.check.check_plan import Verdict, check
from dynapipe_ext.tools.check.plan_file import read_plan_file
from dynapipe_ext.tools.show.plan import list_orders

LIMIT = 10**9
LENGTHS = [[300, 40, 25, 9, 180, 12], [130, 7], [520, 30, 300, 60], [90, 260, 14, 33]]
PLACES = [Topology(), Topology(pp=2), Topology(pp=3), Topology(pp=2, placement=(0, 1, 1, 0)), Topology(pp=2, dp=2)]
CASES = [(n, t) for n in (0, 3) for t in range(len(PLACES))]


def planned(n: int, t: int) -> tuple[Planner, StepPlan]:
    topology, split = PLACES[t], (n + t) % 2 == 0
    planner = Planner(
        topology, TokenCosts(topology.num_stages, ns_per_token_squared=3), LIMIT, layout="packed", pieces=64 + 16 * t,
        split_backward=split, effort=50, format=ActivationFormat(8),
    )  # fmt: skip
    return planner, planner.plan(sample_lengths(LENGTHS[n]))


def swapped(schedule: PipelineSchedule, one: int, other: int, kind: Kind, stages: set[int]) -> PipelineSchedule:
    """The same with two micro-batches' actions of a kind in each other's places on some stages."""
    other_of = {one: other, other: one}

    def of(a: Action) -> Action:
        if a.stage not in stages or a.kind is not kind:
            return a
        return Action(a.stage, a.kind, other_of.get(a.micro_batch, a.micro_batch))

    return replace(schedule, ranks=tuple(tuple(map(of, rank)) for rank in schedule.ranks))


def checked(plan: StepPlan, planner: Planner, path: Path) -> Verdict:
    path.write_text(json.dumps(plan_json(plan, planner.topology)))
    lengths: Counter[int] = Counter()
    for micro_batch in plan.batch.micro_batches:
        for sample in micro_batch.samples:
            lengths[sample.index] += sample.encoder
    whole = {index: (length, 0) for index, length in lengths.items()}
    return check(read_plan_file(path), planner.costs, memory_limit_bytes=LIMIT, lengths=whole)


@pytest.mark.parametrize(("n", "t"), CASES)
def test_every_swap_of_two_pieces_is_refused_by_validate_verify_and_check_plan(n: int, t: int, tmp_path: Path) -> None:
    planner, plan = planned(n, t)
    assert not checked(plan, planner, tmp_path / "plan.json").faults
    swaps = 0
    for d, (replica, schedule) in enumerate(zip(plan.batch.replicas, plan.schedules, strict=True)):
        mine, count = sample_pieces(replica.micro_batches), len(replica.micro_batches)
        gradient = Kind.BACKWARD_INPUT if schedule.is_split else Kind.BACKWARD
        everywhere = set(range(schedule.num_stages))
        for chain, kind in itertools.product(mine, (Kind.FORWARD, gradient)):
            for one, other in itertools.combinations(chain, 2):
                for stages in (everywhere, {0}, {schedule.num_stages - 1}):
                    wrong = swapped(schedule, one, other, kind, stages)
                    with pytest.raises(PlanError):
                        validate(wrong, count, mine)
                    broken = replace(plan, schedules=(*plan.schedules[:d], wrong, *plan.schedules[d + 1 :]))
                    faults = checked(broken, planner, tmp_path / "wrong.json").faults
                    assert any("of the same sample" in fault for fault in faults)
                    if not _is_sound(wrong, count):  # not only for its pieces: it cannot be lowered
                        continue
                    with pytest.raises(PlanError, match="pieces of one sample"):
                        validate(wrong, count, mine)
                    programs = [rank.instructions for rank in lower(broken, ActivationFormat(8))[d]]
                    verify(programs, wrong.stage_ranks, count)  # nothing else is wrong with it
                    with pytest.raises(VerificationError, match="the piece"):
                        verify(programs, wrong.stage_ranks, count, sample_pieces=mine)
                    with pytest.raises(VerificationError, match="the piece"):
                        prove(broken, ActivationFormat(8), ReplicaCollectives())
                    swaps += 1
    assert swaps


def _is_sound(schedule: PipelineSchedule, count: int) -> bool:
    try:
        validate(schedule, count)
    except PlanError:
        return False
    return True


def test_pieces_go_through_the_wire_and_the_plan_file_and_a_file_with_others_is_refused(tmp_path: Path) -> None:
    planner, plan = planned(0, 1)
    sent = lower(plan, ActivationFormat(8))[0][0]
    assert decode(encode(sent, b"k" * 16), b"k" * 16).micro_batches == plan.batch.replicas[0].micro_batches
    raw = plan_json(plan, planner.topology)
    carried = [m for m in raw["replicas"][0]["micro_batches"] if "carried" in m]
    assert {m["samples"][0] for m in carried} == {0, 4}
    for found, said in (
        ({"carried": [1, 64]}, "end at 0"),
        ({"carried": [0, 63]}, "end at 63"),
        ({"layout": "padded", "rows": len(carried[0]["samples"])}, "packed"),
    ):
        wrong = json.loads(json.dumps(raw))
        first = next(m for m in wrong["replicas"][0]["micro_batches"] if m.get("carried", [1])[0] == 0)
        first |= found
        path = tmp_path / "wrong.json"
        path.write_text(json.dumps(wrong))
        with pytest.raises(PlanError, match=said):
            list_orders(read_plan_file(path))
        lengths = {s.index: (s.encoder, 0) for s in sample_lengths(LENGTHS[0])}
        faults = check(read_plan_file(path), planner.costs, memory_limit_bytes=LIMIT, lengths=lengths).faults
        assert any(said in fault for fault in faults)


def _piece(index: int, start: int, length: int, *others: SampleLength) -> MicroBatch:
    return MicroBatch((SampleLength(index, length, start=start), *others), "packed", attention="carried")


def test_pieces_are_told_apart_in_any_injection_order_beside_whole_samples() -> None:
    whole = MicroBatch((SampleLength(7, 3),))
    plan = [_piece(1, 4, 2, SampleLength(5, 2)), whole, _piece(0, 0, 8), _piece(1, 0, 4), _piece(0, 8, 8)]
    assert sample_pieces(plan) == ((2, 4), (3, 0))
    assert sample_pieces([whole]) == ()
    assert {position: str(piece) for position, piece in find_pieces(plan).items()} == {
        2: "sample 0, piece 1 of 2, tokens 0-7",
        4: "sample 0, piece 2 of 2, tokens 8-15",
        3: "sample 1, piece 1 of 2, tokens 0-3",
        0: "sample 1, piece 2 of 2, tokens 4-5",
    }
    assert find_pieces([whole, _piece(0, 0, 8)]) == {}  # all of its sample: not cut


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([_piece(0, 4, 4)], "from position 4 but the pieces before it on this replica end at 0"),
        ([_piece(0, 0, 4), _piece(0, 8, 4)], "end at 4"),
        ([_piece(0, 0, 4), _piece(0, 0, 4)], "from position 0"),
        ([_piece(0, 0, 4, SampleLength(1, 4, start=4))], "a second piece"),
        ([MicroBatch((SampleLength(0, 4),), "padded", attention="carried")], "is padded"),
    ],
)
def test_pieces_that_do_not_make_up_a_sample_are_refused(plan: list[MicroBatch], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        sample_pieces(plan)
