"""Measured tables on pieces of long samples: what is fitted to pairs, what rows then cost, what bounds say of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, SampleLength, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adjustments import FrozenWeights, adjust
from dynapipe_ext.costs.grid import INFEASIBLE, Grid
from dynapipe_ext.costs.interchange import read_cost_file
from dynapipe_ext.costs.measuring_time import TimedDevice
from dynapipe_ext.costs.pieces import PairGrowth, PieceSurcharge, PieceSurcharges, SampleInPieces
from dynapipe_ext.costs.profiled import Profile, ProfileRange, choose_and_measure, make_cost_table
from dynapipe_ext.costs.surface import Measured, ModelPart
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.partitioning.packing import make_evaluate
from dynapipe_ext.partitioning.pieces import RowTime, list_piece_choices
from dynapipe_ext.schedules.notation import plan_json
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.search.proposals import StepProblem
from dynapipe_ext.settings.plan_rules import PlanRules
from dynapipe_ext.tools.account.profile_errors import errors_of_pieces
from dynapipe_ext.tools.check.check_plan import check
from dynapipe_ext.tools.check.plan_file import read_plan_file
from dynapipe_ext.tools.check.recomputed_bounds import batch_bound_ns

KINDS: tuple[Recompute, ...] = ("none", "full")
_F, _B = PairGrowth(attended=0.02), PairGrowth(before=1.5, attended=0.05)
_WORKING = PairGrowth(before=128.0, attended=0.5)
SURCHARGE = PieceSurcharge(forward_ns=_F, backward_ns=_B, working_bytes=_WORKING, own_bytes=-100.0)
PIECES = PieceSurcharges(kept_values=64, by_recompute=dict.fromkeys(KINDS, SURCHARGE))


def table(pieces: PieceSurcharges | None = PIECES, **more: Any) -> CostTable:
    """Layers of 50 us + 100 ns a token + 0.01 ns a square, up to 4096 positions a row; heads of half of that."""
    points = list(itertools.product((1, 4, 16), (256, 512, 1024, 2048, 4096)))
    grids = {}
    for kind, part in itertools.product(KINDS, ("encoder", "postprocess")):
        forward = {(r, n): (0.05 + 1e-4 * r * n + 1e-8 * r * n * n) / (1 + (part != "encoder")) for r, n in points}
        columns = {"forward_ms": forward, "backward_ms": {at: (2 + (kind == "full")) * x for at, x in forward.items()}}
        columns |= {
            name: {(r, n): x * r * n for r, n in points} for name, x in (("stored_mb", 1e-3), ("peak_mb", 3e-3))
        }
        grids[kind, part] = Grid.from_points(columns)
    settings = {"num_layers": 4, "hidden_size": 64, "topology": Topology(pp=2), "value_bytes": 4}
    settings |= {"packed_bytes": {"none": 1.25}} | more
    sizes = {"encoder": 1e6, "embedding": 1e6}
    return CostTable(grids=grids, parameter_bytes=sizes, pieces=pieces, **settings)  # type: ignore[arg-type]


def piece(start: int, length: int, *others: SampleLength, recompute: Recompute = "none") -> MicroBatch:
    return MicroBatch((SampleLength(0, length, start=start), *others), "packed", recompute, "carried")


def row(*lengths: int, recompute: Recompute = "none") -> MicroBatch:
    return MicroBatch(tuple(SampleLength(i, n) for i, n in enumerate(lengths)), "packed", recompute)


def test_a_piece_costs_its_row_and_what_it_attends_to_and_the_first_holds_the_keys_of_all() -> None:
    """Two layers a stage; 64 keys and values of 4 bytes, and 4 of a gradient's sum before the last piece."""
    costs, whole = table().evaluate([piece(0, 1024), piece(1024, 512, SampleLength(5, 256))]), table()
    first, last = whole.evaluate([row(1024)]), whole.evaluate([row(512, 256)])
    assert (costs.forward_ns[:, 0] == first.forward_ns[:, 0]).all()
    assert (costs.forward_ns[:, 1] - last.forward_ns[:, 0]).tolist() == [2 * round(0.02 * 512 * 1024)] * 2
    more_ns = 2 * (1.5 * 1024 + 0.05 * 512 * 1024)
    assert (costs.backward_ns[:, 1] - last.backward_ns[:, 0]).tolist() == [round(more_ns)] * 2
    assert (costs.weight_ns[:, 1] == last.weight_ns[:, 0]).all()  # attention has no weights
    chain = 2 * 64 * (4 * 1536 + 4 * 1024)
    assert (costs.stored_bytes[:, 0] - first.stored_bytes[:, 0]).tolist() == [chain - 2 * 100 * 1024] * 2
    assert (costs.stored_bytes[:, 1] - last.stored_bytes[:, 0]).tolist() == [-2 * 100 * 512] * 2
    working = 128 * 1024 + 0.5 * 512 * 1024
    assert (costs.working_bytes[:, 1] - last.working_bytes[:, 0]).tolist() == [working] * 2


def test_a_piece_whose_stage_is_recomputed_takes_its_forward_twice_and_stores_what_it_received() -> None:
    none, stage = (
        table(packed_bytes={}).evaluate([piece(n, 512, recompute=kind) for n in (0, 512)]) for kind in ("none", "stage")
    )
    assert (stage.backward_ns == none.backward_ns + none.forward_ns).all()
    assert stage.stored_bytes[:, 1].tolist() == [0, 512 * 64 * 4]
    assert (stage.stored_bytes + stage.working_bytes == none.stored_bytes + none.working_bytes).all()
    assert not stage.weight_ns.any()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 2000), min_size=2, max_size=8),
    st.sampled_from([*KINDS, "stage"]),
    st.tuples(*[st.floats(0, 0.1)] * 2),
)
def test_attention_of_pieces_is_that_of_the_sample_and_nothing_falls_with_what_is_before(lengths, kind, rates) -> None:
    """With w q^2 / 2 of a later piece's own the sum over any pieces is that of half the squares, but for those of the
    first, which costs what a document does; within a rounding each."""
    starts = [0, *itertools.accumulate(lengths)][:-1]
    grown = [PairGrowth(own_squared=rate / 2, attended=rate) for rate in rates]
    fair = replace(SURCHARGE, forward_ns=grown[0], backward_ns=grown[1])
    made = table(PieceSurcharges(kept_values=64, by_recompute=dict.fromkeys(KINDS, fair)))
    pieces, further = (
        [piece(more + start, length, recompute=kind) for start, length in zip(starts, lengths, strict=True)]
        for more in (0, 100)
    )
    rows = made.evaluate([row(length, recompute=kind) for length in lengths])
    costs = made.evaluate(pieces)
    forward, backward = (
        (getattr(costs, name) - getattr(rows, name)).sum(axis=1)[0] for name in ("forward_ns", "backward_ns")
    )
    total = (sum(lengths) ** 2 - lengths[0] ** 2) / 2
    assert forward == pytest.approx(2 * rates[0] * total, abs=len(lengths))
    assert backward == pytest.approx(2 * (rates[1] + rates[0] * (kind == "stage")) * total, abs=2 * len(lengths))
    for name in ("forward_ns", "backward_ns", "working_bytes"):
        assert (getattr(made.evaluate(further), name) >= getattr(costs, name)).all()


def test_the_first_piece_holds_the_keys_of_all_where_a_later_one_has_no_price_under_its_recomputation() -> None:
    whole, points = table(), list(itertools.product((1, 4), (256, 2048)))
    short = {
        at: Grid.from_points({name: dict.fromkeys(points, 1.0) for name in grid.columns})
        for at, grid in whole.grids.items()
    }
    costs = replace(whole, grids={at: short[at] if "full" in at else grid for at, grid in whole.grids.items()})
    pieces = [piece(0, 1024), piece(1024, 4096)]
    rules = PlanRules(layout="packed", pad_multiple=1)
    made = StepProblem(topology=Topology(pp=2), costs=costs, limit_bytes=10**9, rules=rules, kinds=KINDS)
    (proposed,) = made.propose_fixed([[pieces]])
    full = proposed.start.kind_costs[KINDS.index("full")]
    alone = costs.evaluate([replace(pieces[0], recompute="full")])
    assert (full.stored_bytes[:, 0] - alone.stored_bytes[:, 0]).tolist() == [2 * 64 * (4 * 4096 + 4 * 1024)] * 2
    assert (full.forward_ns[:, 1] == INFEASIBLE).all()


def test_files_keep_the_prices_of_pieces_and_tables_without_them_refuse_by_name(tmp_path: Path) -> None:
    made, before = table(), table(None)
    (tmp_path / "costs.json").write_text(json.dumps(made.to_json()))
    again = read_cost_file(tmp_path / "costs.json")
    assert again.pieces == made.pieces
    assert again.fingerprint() == made.fingerprint() != before.fingerprint()
    assert "pieces" not in before.to_json()
    old = CostTable.from_json(before.to_json())
    with pytest.raises(PlanError, match=r"positions 0 to 64 of sample 0, but these CostTable have no price"):
        old.evaluate([piece(0, 64)])
    for costs in (old, adjust(old, frozen=FrozenWeights((1.0, 1.0)))):
        with pytest.raises(ConfigError, match=r"Costs|CostTable have no price for pieces .* `dynapipe profile`"):
            Planner(Topology(pp=2), costs, 1e9, layout="packed", pieces="auto")
    raw = made.to_json()
    del raw["pieces"]["by_recompute"]["none"]
    with pytest.raises(ConfigError, match="pieces were measured under recompute full but shapes under none, full"):
        CostTable.from_json(raw)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"forward_ns": {**asdict(_F), "attended": -1.0}}, r"attended of a piece is -1\.0 but must be a number of 0"),
        ({"backward_ns": {**asdict(_F), "own_squared": float("nan")}}, "own_squared of a piece is nan"),
        ({"working_bytes": {**asdict(_F), "before": 1e30}}, "before of a piece is 1e"),
        ({"own_bytes": float("inf")}, "own_bytes of a piece is inf"),
        ({"own_bytes": "some"}, "cannot be read: TypeError"),
        ({"forward_ns": {"behind": 0.0}}, "cannot be read: TypeError"),
        ({"forward_ns": None}, "cannot be read: AttributeError"),
    ],
)
def test_damaged_prices_of_pieces_are_refused(damage: dict[str, Any], said: str) -> None:
    raw = table().to_json()
    raw["pieces"]["by_recompute"]["full"] |= damage
    with pytest.raises(DataError, match=said):
        CostTable.from_json(raw)
    with pytest.raises(DataError, match="kept_values of pieces is -1"):
        CostTable.from_json({**raw, "pieces": {"kept_values": -1, "by_recompute": {}}})
    with pytest.raises(DataError, match="cannot be read: AttributeError"):
        CostTable.from_json({**raw, "pieces": {"kept_values": 1, "by_recompute": []}})


LONG = sample_lengths([30_000, 100, 400, 900, 1200, 3000, 50, 60, 2000, 4000])


@pytest.mark.parametrize(("split", "placement"), [(False, ()), (True, (0, 1, 1, 0))])
def test_samples_longer_than_any_measured_row_are_planned_in_pieces_and_checked(
    tmp_path: Path, split: bool, placement: tuple[int, ...]
) -> None:
    """30,000 positions where rows were measured up to 4096: pieces alike in time would begin with a longer one."""
    costs, topology = table().with_topology(Topology(pp=2, dp=2, placement=placement))
    made = Planner(topology, costs, 2e9, layout="packed", pieces="auto", effort=300, split_backward=split)
    with pytest.raises(PlanError, match="1 x 30000"):
        replace(made, pieces="off").plan(LONG)
    plan = made.plan(LONG)
    assert sum(m.attention == "carried" for m in plan.batch.micro_batches) >= 8
    assert plan.certificate is not None
    assert 0.8 * plan.makespan_ns < plan.certificate.batch_ns
    (tmp_path / "plan.json").write_text(json.dumps(plan_json(plan, made.topology)))
    read = read_plan_file(tmp_path / "plan.json")
    lengths = {s.index: (s.encoder, 0) for s in LONG}
    assert not check(read, costs, memory_limit_bytes=2 * 10**9, lengths=lengths).faults
    with pytest.raises(PlanError, match="1 x 8192"):
        replace(made, pieces=8192).plan(LONG)
    choices = list_piece_choices(LONG, make_evaluate(costs), [512, 4096, 8192], dp=2, depth=2)
    by_length = [(choice.tokens, choice.even == RowTime()) for choice in choices]
    assert by_length == [(512, True), (512, False), (4096, True)]
    grids = {at: grid for at, grid in costs.grids.items() if "full" in at}
    full = replace(costs, grids=grids, pieces=replace(PIECES, by_recompute={"full": SURCHARGE}))
    assert {m.recompute for m in replace(made, costs=full, recompute="full").plan(LONG).batch.micro_batches} == {"full"}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 4096), min_size=1, max_size=12),
    st.sampled_from([256, 512, 2048]),
    st.integers(1, 2),
    st.floats(0, 0.05),
)
def test_no_plan_in_pieces_is_below_its_bound_which_is_that_of_the_definition(lengths, tokens, dp, attended) -> None:
    surcharge = replace(SURCHARGE, forward_ns=PairGrowth(attended=attended), backward_ns=PairGrowth())
    costs = table(PieceSurcharges(kept_values=64, by_recompute=dict.fromkeys(KINDS, surcharge)))
    made = Planner(Topology(pp=2, dp=dp), costs, 1e9, layout="packed", pieces=tokens, effort=50)
    plan = made.plan(sample_lengths(lengths))  # refuses a bound above the makespan
    is_cut = any(m.attention == "carried" for m in plan.batch.micro_batches)
    needs = [(n, 0) for n in lengths]
    again_ns = batch_bound_ns(costs, needs, (0, 1), dp=dp, split=False, packed=True, pieces=is_cut)
    assert plan.certificate.batch_ns <= again_ns <= plan.certificate.batch_ns + 12 * (sum(lengths) + 100)


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.floats(1e-4, 1e-1)] * 3), st.tuples(*[st.floats(1e-4, 1e-1)] * 3), st.integers(0, 99))
def test_what_was_measured_of_pairs_is_fitted(forward, backward, seed) -> None:
    random = np.random.default_rng(seed)
    truth = PairGrowth(*forward), PairGrowth(*backward)
    cut = [in_pieces(size, count, *truth) for size, count in ((256, 8), (1024, 4))]
    found = PieceSurcharge.fit(cut, kept_values=64, value_bytes=4)
    own, before = random.integers(1, 99_999, (2, 50)).astype(float)
    for fitted, true in zip((found.forward_ns, found.backward_ns), truth, strict=True):
        assert fitted(own, before) == pytest.approx(true(own, before), rel=1e-6)
    assert found.own_bytes == pytest.approx(-100, abs=1)
    bumpy = [replace(one, two=replace(one.two, peak_bytes=one.two.peak_bytes * 2)) for one in cut]
    for fitted, measured in ((found, cut), (PieceSurcharge.fit(bumpy, kept_values=64, value_bytes=4), bumpy)):
        for one, all_or_two in itertools.product(measured, ("pieces", "two")):
            part = getattr(one, all_or_two)
            before = one.size * (len(part.each_s) // 2 - 1)
            sums = 4 * 64 * before
            held = 1000 * one.size + fitted.working_bytes(np.array([one.size]), np.array([before]))[0]
            assert held >= part.peak_bytes - part.stored_bytes - sums - 1
    assert PairGrowth.fit(np.full(2, 8.0), np.array([0.0, 8.0]), np.array([-1.0, -2.0]), np.ones(2)) == PairGrowth()


def in_pieces(size: int, count: int, forward: PairGrowth, backward: PairGrowth) -> SampleInPieces:
    """As if measured: 1000 bytes a position stored and 1000 more while it runs, 100 of them spared in pieces."""
    document = Measured(1e-4 * size, 2e-4 * size, 1e-4 * size, 1e-4 * size, 1000 * size, 2000 * size)

    def whole(count: int) -> Measured:
        own, before = np.full(count, size), size * np.arange(count)
        forward_s, backward_s = (
            seconds + grown(own, before) / 1e9
            for seconds, grown in ((document.forward_s, forward), (document.backward_s, backward))
        )
        stored = (900 + 64 * 4) * size * count
        peak = stored + (1000 + (4 * 64 + 300) * (count - 1)) * size
        each_s = (*forward_s.tolist(), *backward_s.tolist())
        return Measured(forward_s.sum(), backward_s.sum(), 0.0, 0.0, stored, peak, each_s)

    return SampleInPieces(size=size, document=document, pieces=whole(count), two=whole(2))


class Device:
    """Rows as `in_pieces` has documents; samples of more than `room` positions do not fit."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room

    def __call__(self, part: ModelPart, *micro_batches: MicroBatch, bytes_only: bool = False) -> Measured | None:
        m, *others = micro_batches
        if others:
            size, count = m.encoder_len, len(micro_batches)
            return in_pieces(size, count, _F, _B).pieces if size * count <= self.room else None
        n, seconds = (m.encoder_len * x * m.rows for x in (1, 1e-4))
        n = int(1.1 * n) if m.layout == "packed" and len(m.samples) > 1 else n  # what the table then has for all rows
        return Measured(seconds, 2 * seconds, seconds, seconds, 1000 * n, 2000 * n)


_MODEL = Architecture.gpt(
    num_layers=4, hidden_size=32, num_heads=2, num_query_groups=2, ffn_hidden_size=64, gated_mlp=True, vocab_size=64,
    max_seq_len=512, tied_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(("room", "counts"), [(1 << 40, {64: 16, 512: 4}), (1024, {64: 16, 512: 2}), (700, {64: 8})])
def test_a_profile_measures_pieces_as_far_as_they_fit_and_tells_their_error(room: int, counts: dict[int, int]) -> None:
    within, profile = ProfileRange(max_len=512, max_tokens=2048, recomputes=KINDS), Profile()
    device = TimedDevice(Device(room))
    go_on = {"error_target": 0.05, "most_shapes": 8, "go_on": lambda _profile: True}
    choose_and_measure(profile, device, within, **go_on)
    assert not make_cost_table(profile, within, _MODEL, value_bytes=4).facts.prices_pieces
    done: list[None] = []
    profile.cut(device, within, lambda: done.append(None))
    assert len(done) == len(within.cut_samples) == 2 * len(KINDS)
    assert {one.size: one.count for one in profile.pieces["full"]} == counts
    made = make_cost_table(profile, within, _MODEL, value_bytes=4)
    assert made.pieces is not None
    assert made.pieces.kept_values == 64
    errors = errors_of_pieces(made, device, [within.sample_in_pieces(170, kind)[:3] for kind in KINDS])
    assert max(errors.worst["forward_s"], errors.worst["backward_s"]) < 0.02
    assert errors.worst["stored_bytes"] < 0.001
    assert errors.worst["peak_bytes"] < 0.02
    profile.cut(TimedDevice(Device(room=100)), within, done.clear)
    assert not make_cost_table(profile, within, _MODEL, value_bytes=4).facts.prices_pieces


HEADS = {"model": {"num_heads": 4, "num_query_groups": 2, "head_dim": 16}}


def test_a_measured_row_takes_its_share_of_the_time_and_the_counted_exchanges_at_a_width() -> None:
    whole = table(provenance=HEADS, topology=Topology(pp=2, dp=4), comm_gbps=8.0, comm_latency_us=3.0)
    halves = whole.at_width(2)
    for kind, times in (("none", 1), ("full", 2), ("stage", 2)):
        row = [MicroBatch((SampleLength(0, 2048),), "packed", kind)]
        one, two = whole.evaluate(row), halves.evaluate(row)
        # Half of 1024 values of queries and of what they attend to go to the other rank, as do those of one key head.
        values = 2048 * (2 * 4 * 16 / 2 / 2 + 2 * 16 / 2)
        exchanged_ns = 2 * (2 * 3_000 + 4 * values)
        np.testing.assert_allclose(two.forward_ns, one.forward_ns / 2 + exchanged_ns, atol=2)
        np.testing.assert_allclose(two.backward_ns, one.backward_ns / 2 + times * exchanged_ns, atol=4)
        np.testing.assert_array_equal(2 * two.transfer_bytes, one.transfer_bytes)
        assert (2 * two.stored_bytes >= one.stored_bytes).all()
        np.testing.assert_array_equal(two.static_bytes, one.static_bytes)
    with pytest.raises(ConfigError, match="costs of this table do not say what attention exchanges"):
        table(topology=Topology(pp=2, dp=4)).at_width(2)


def test_bounds_of_plans_by_measured_tables_hold_at_a_width_and_are_found_again() -> None:
    costs = table(provenance=HEADS, topology=Topology(pp=2, dp=2))
    lengths = [6000, 300, 256, 700, 512, 300]
    plan = Planner(Topology(pp=2, dp=2, width=2), costs, 10**9, layout="packed", pieces=2048, effort=100).plan(lengths)
    assert any(m.attention == "carried" for m in plan.batch.micro_batches)
    assert plan.certificate is not None
    assert plan.certificate.batch_ns is not None
    assert 0 < plan.certificate.batch_ns <= plan.makespan_ns
    needs = [(n, 0) for n in lengths]
    again = batch_bound_ns(costs.at_width(2), needs, (0, 1), dp=1, split=False, packed=True, pieces=True)
    assert 0 <= again - plan.certificate.batch_ns <= 3.1 * sum(lengths)  # rounding of each position
