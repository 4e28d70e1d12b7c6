"""Steps whose replicas are blocks of several data parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.codec import from_json, to_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import StepPosition
from dynapipe_ext.errors import ConfigError, VerificationError
from dynapipe_ext.executor.instructions import Send
from dynapipe_ext.executor.loader import InlinePlanSource
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.tools.check.check_plan import check
from dynapipe_ext.tools.check.plan_file import read_plan_file

LENGTHS = [37, 5, 120, 64, 9, 250, 31, 18, 77, 3]
FORMAT = ActivationFormat(16, sequence_shards=2)
COSTS = TokenCosts(2, overhead_ns=1000, ns_per_token_squared=2.0)


def planner(dp: int = 4, width: int = 1, costs: CostModel = TokenCosts(2), **options: Any) -> Planner:  # noqa: B008
    options = {"layout": "packed", "effort": 200, "pad_multiple": 2, "format": FORMAT, **options}
    options = {"collectives": ReplicaCollectives(), **options}
    return Planner(Topology(pp=2, dp=dp, width=width), costs, 10**9, **options)


@pytest.mark.parametrize("width", [3, 8, 0, -2, 6])
def test_a_width_that_does_not_divide_the_plane_in_powers_of_two_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match=f"width .*{width}"):
        Topology(dp=12, width=width)


def test_a_block_is_of_neighbouring_data_parallel_ranks() -> None:
    topology = Topology(tp=2, pp=2, dp=8, width=4)
    ranks = [topology.rank(tp_rank=1, pp_rank=1, dp_rank=d) for d in range(8) if d // topology.width == 1]
    assert ranks == [25, 27, 29, 31]
    assert to_json(topology.at_width(1)) == to_json(Topology(tp=2, pp=2, dp=8))
    assert "width" not in to_json(Topology(dp=8))


def test_a_plan_has_a_replica_a_block_and_rows_whose_slices_are_even() -> None:
    plan = planner(dp=8, width=4).plan(LENGTHS)
    assert (plan.width, len(plan.batch.replicas), len(plan.schedules)) == (4, 2, 2)
    assert all(m.encoder_len % (4 * 2) == 0 for m in plan.batch.micro_batches)


def plan_file(tmp_path: Path, plan: StepPlan, topology: Topology, **changed: Any) -> Path:
    raw = plan_json(plan, topology)
    raw["topology"] |= changed
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    return tmp_path / "plan.json"


def test_a_plan_s_file_says_its_width_and_is_judged_by_it(tmp_path: Path) -> None:
    plans = planner(width=2, costs=COSTS)
    plan = plans.plan(LENGTHS)
    path = plan_file(tmp_path, plan, plans.topology)
    file = read_plan_file(path)
    assert (file.topology.width, len(file.replicas)) == (2, 2)
    lengths = {i: (n, 0) for i, n in enumerate(LENGTHS)}
    verdict = check(file, COSTS.at_width(2), memory_limit_bytes=10**9, lengths=lengths)
    assert not verdict.faults
    assert verdict.makespan_s == pytest.approx(plan.makespan_s)
    assert check(file, COSTS, memory_limit_bytes=10**9, lengths=lengths).faults  # prices of whole rows
    for changed, why in (
        ({"width": 4}, "blocks of width 4 needs each of 0..0 once"),
        ({"width": 3}, "does not divide"),
    ):
        with pytest.raises(ConfigError, match=why):
            read_plan_file(plan_file(tmp_path, plan, plans.topology, **changed))
    assert "width" not in plan_json(planner(costs=COSTS).plan(LENGTHS), Topology(pp=2, dp=4))["topology"]


def test_rows_that_a_block_cannot_share_evenly_are_refused(tmp_path: Path) -> None:
    plans = planner(width=4, costs=COSTS)
    raw = plan_json(plans.plan(LENGTHS), plans.topology)
    raw["replicas"][0]["micro_batches"][0]["encoder_len"] += 2
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    lengths = {i: (n, 0) for i, n in enumerate(LENGTHS)}
    faults = check(
        read_plan_file(tmp_path / "plan.json"), COSTS.at_width(4), memory_limit_bytes=10**9, lengths=lengths
    ).faults
    assert any("do not divide over a width of 4" in fault for fault in faults)


def test_of_several_widths_a_step_takes_the_one_that_ends_first_and_no_bound_lies_above() -> None:
    long = [*LENGTHS, 4000]
    auto = planner(dp=4, widths=(1, 2, 4), costs=COSTS, pieces="auto")
    plan = auto.plan(long)
    fixed = {width: planner(dp=4, width=width, costs=COSTS, pieces="auto").plan(long) for width in (1, 2, 4)}
    best = min(fixed.values(), key=lambda one: (one.makespan_ns, one.width))
    assert plan.width == best.width > 1
    assert plan.makespan_ns <= best.makespan_ns
    assert plan.certificate is not None
    bounds = [one.certificate.batch_ns for one in fixed.values() if one.certificate]
    assert 0 < plan.certificate.batch_ns <= min(bounds)
    again = Planner.from_json(json.loads(json.dumps(auto.to_json())))
    assert again == auto
    assert again.plan(long) == plan
    short = planner(dp=4, widths=(1, 2, 4), costs=COSTS).plan([8] * 400)
    assert short.width == 1


@settings(max_examples=25)
@given(st.lists(st.integers(1, 3000), min_size=4, max_size=30), st.sampled_from(["packed", "padded"]), st.booleans())
def test_choosing_a_width_is_never_worse_than_any_and_keeps_every_promise(
    lengths: list[int], layout: str, cuts: bool
) -> None:
    options: dict[str, Any] = {"layout": layout, "costs": COSTS, "effort": 100}
    options["pieces"] = "auto" if cuts and layout == "packed" else "off"
    plan = planner(dp=4, widths=(1, 2, 4), **options).plan(lengths)
    fixed = [planner(dp=4, width=width, **options).plan(lengths) for width in (1, 2, 4)]
    assert plan.makespan_ns <= fixed[0].makespan_ns
    assert plan.makespan_ns <= 1.02 * min(one.makespan_ns for one in fixed)  # what was passed over hoped for no less
    for one in (plan, *fixed):
        assert one.certificate is not None
        assert max(one.certificate.batch_ns or 0, one.certificate.bound_ns) <= one.makespan_ns
        assert sorted({s.index for m in one.batch.micro_batches for s in m.samples}) == [*range(len(lengths))]
        assert all(m.encoder_len % (2 * one.width) == 0 for m in one.batch.micro_batches)


def test_all_joined_ranks_have_pieces_and_any_counts_where_replicas_need_equal_ones() -> None:
    long = [*LENGTHS, 4000]
    with pytest.raises(ConfigError, match="one replica of all data parallel ranks"):
        planner(dp=4, width=2, costs=COSTS, pieces=256, replica_counts="equal")
    joined = planner(dp=4, width=4, costs=COSTS, pieces=256, replica_counts="equal").plan(long)
    free = planner(dp=4, width=4, costs=COSTS, pieces=256).plan(long)
    assert joined == free
    assert any(m.attention == "carried" for m in joined.batch.micro_batches)
    auto = planner(dp=4, widths=(1, 2, 4), costs=COSTS, pieces="auto", replica_counts="equal")
    assert auto.plan(long).width == 4


def test_experts_within_a_block_leave_replicas_free_to_have_any_counts() -> None:
    collectives = ReplicaCollectives.of_zero(1, ep=2)
    options: dict[str, Any] = {"costs": COSTS, "collectives": collectives}
    counts = [256, 8, 8, 8, 8]
    proven = prove_step(planner(dp=4, width=2, **options), sample_lengths(counts), step=0)
    assert len({len(replica.micro_batches) for replica in proven.step_plan.batch.replicas}) > 1
    with pytest.raises(VerificationError, match="expert all-to-all"):
        prove_step(planner(dp=2, width=1, **options), sample_lengths(counts), step=0)
    assert from_json(ReplicaCollectives, to_json(collectives)) == collectives
    equal = planner(dp=4, width=2, replica_counts="equal", pieces=64, **options).plan(counts)
    assert any(m.attention == "carried" for m in equal.batch.micro_batches)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"widths": (2, 1)}, "ascending"),
        ({"widths": (1, 8)}, "of dp 4"),
        ({"widths": (1, 2), "width": 2}, "has width 2 already"),
    ],
)
def test_widths_that_data_parallel_ranks_cannot_have_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        planner(dp=4, costs=COSTS, **options)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_all_ranks_of_a_block_take_one_plan_in_shapes_of_slices(width: int) -> None:
    proven = prove_step(planner(width=width), sample_lengths(LENGTHS), step=3)
    assert {(plan.width, plan.step) for replica in proven.plans for plan in replica} == {(width, 3)}
    for dp_rank in range(4):
        source = InlinePlanSource(lambda place: proven, dp_rank=dp_rank, pp_rank=0)
        plan = source.plan(StepPosition(0, 0, 3))
        assert plan is proven.plans[dp_rank // width][0]
        assert plan.dp_rank == dp_rank // width
        for send in (one for one in plan.instructions if isinstance(one, Send)):
            whole = plan.micro_batches[send.buffer.micro_batch].encoder_len
            assert send.specs[0].shape[0] * width * FORMAT.sequence_shards == whole


def test_pieces_shorter_than_what_rows_are_rounded_up_to_are_as_long_as_that() -> None:
    """Eight positions a rank: pieces of 8 tokens on 4 joined ranks have 32."""
    costs = AnalyticCosts(preset("llama-3.2-1b"), Topology(pp=2, dp=4))
    joined = Planner(Topology(pp=2, dp=4, width=4), costs.at_width(4), 400e9, layout="packed", pieces=8, pad_multiple=8)
    pieces = [m.samples[0] for m in joined.plan([100, 20]).batch.micro_batches if m.attention == "carried"]
    assert [(p.start, p.encoder) for p in pieces if p.index == 0] == [(0, 32), (32, 32), (64, 32), (96, 4)]
