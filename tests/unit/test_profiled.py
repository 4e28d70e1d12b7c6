"""Cost tables from few measurements: surfaces between points, the choice of points, what is written."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import (
    HEAD_SLICE,
    MicroBatch,
    Recompute,
    SampleLength,
    recompute_of_layers,
    with_sliced_head,
)
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.layers import SLICED_HEAD
from dynapipe_ext.costs.measuring_time import TimedDevice
from dynapipe_ext.costs.profiled import Profile, ProfileRange, choose_and_measure, make_cost_table
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.costs.surface import (
    QUANTITIES,
    Measured,
    ModelPart,
    compute_left_out_errors,
    fit_surface,
    rank_shapes,
)
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.schedules.step_plan import StepPlan
from dynapipe_ext.tools.account.profile_errors import held_out_errors
from tests.support.priced import list_values

_SHAPE = Architecture.gpt(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=96,
    gated_mlp=True,
    vocab_size=256,
    max_seq_len=512,
    tied_embeddings=True,
    position="rope",
    norm="rmsnorm",
    bias=False,
)
_RANGE = ProfileRange(min_len=16, max_len=512, max_tokens=4096)


def truth(part: ModelPart, rows: int, length: int, recompute: Recompute, *, bend: float = 0.25) -> Measured:
    """Overhead, tokens and squares, slower by `bend` where the working set leaves a cache."""
    tokens, squares = rows * length, rows * length**2
    slow = 1 + bend / (1 + np.exp(-(np.log2(tokens) - 9)))
    forward = (2e-4 + 1e-6 * tokens + 2e-9 * squares) * slow * (1.0 if part == "layer" else 0.5)
    again = {"none": 0.0, "selective": 2e-9 * squares, "full": forward}[recompute_of_layers(recompute)]
    again = again if part == "layer" else 0.0
    stored = 1000 * tokens * (0.1 if recompute == "full" else 1) if part == "layer" else 700 * tokens
    weight = 0.0 if recompute == "full" else 0.8 * forward
    if (
        part == "head" and recompute == "head"
    ):  # in slices: the product again, two numbers a position, a slice of logits
        return Measured(forward, 3 * forward, 3 * forward, 0.0, 8 * tokens, 300_000 + 50 * tokens)
    return Measured(
        forward_s=forward,
        backward_s=2 * forward + again,
        input_s=2 * forward + again - weight,
        weight_s=weight,
        stored_bytes=int(stored),
        peak_bytes=int(stored) + 300 * tokens,
    )


class Device:
    """Measures by `truth`; what needs more than `room` tokens does not fit, and packed rows keep more bytes."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room, self.asked = room, 0

    def __call__(self, part: ModelPart, micro_batch: MicroBatch, *, bytes_only: bool = False) -> Measured | None:
        m = micro_batch
        self.asked += not bytes_only
        if m.padded_tokens > self.room:
            return None
        if m.layout == "padded":
            return truth(part, m.rows, m.encoder_len, m.recompute)
        return packed_truth(part, m)


def packed_truth(part: ModelPart, m: MicroBatch) -> Measured:
    """Of documents one by one, with more bytes."""
    more = {"none": 1.08, "selective": 1.04, "full": 0.9}[m.recompute] if part == "layer" else 1.0
    each = [asdict(truth(part, 1, sample.encoder, m.recompute)) for sample in m.samples]
    total = {name: sum(one[name] for one in each) for name in QUANTITIES}
    return Measured(**total | {name: int(more * total[name]) for name in ("stored_bytes", "peak_bytes")})


def measured(device: Device, within: ProfileRange = _RANGE, **given: Any) -> Profile:
    profile = Profile()
    options = {"error_target": 0.03, "most_shapes": 24, "go_on": lambda _profile: True} | given
    choose_and_measure(profile, TimedDevice(device), within, **options)
    return profile


@cache
def usual() -> Profile:
    return measured(Device())


def padded(rows: int, length: int, recompute: Recompute = "none") -> MicroBatch:
    return MicroBatch(tuple(SampleLength(i, length) for i in range(rows)), recompute=recompute)


@settings(max_examples=25)
@given(st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-6), st.floats(1e-12, 1e-9), st.integers(0, 99))
def test_a_surface_is_exact_where_costs_are_a_polynomial(a: float, b: float, c: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    shapes = {(int(r), int(n)) for r, n in zip(random.integers(1, 64, 12), random.integers(8, 999, 12), strict=True)}
    surface = fit_surface({(r, n): a + b * r * n + c * r * n**2 for r, n in shapes})
    places = np.array([(3, 77), (17, 500), (50, 20)], np.float64)
    rows, length = places.T
    assert surface(places) == pytest.approx(a + b * rows * length + c * rows * length**2, rel=1e-6)


def test_a_surface_follows_points_that_no_polynomial_passes_through() -> None:
    points = {(r, n): truth("layer", r, n, "none", bend=0.6).forward_s for r, n in _RANGE.list_candidates()[::2]}
    found = fit_surface(points)(np.array(list(points), np.float64))
    assert found == pytest.approx(list(points.values()), rel=0.03)


def test_a_quantity_that_is_zero_stays_zero() -> None:
    surface = fit_surface(dict.fromkeys([(1, 16), (4, 64), (8, 32)], 0.0))
    assert surface(np.array([(2, 20)], np.float64)).tolist() == [0.0]
    with pytest.raises(DataError, match="at least 2"):
        fit_surface({(1, 1): 1.0})


def test_the_next_shape_is_far_from_the_known_and_near_the_badly_predicted() -> None:
    known = [(1, 16), (1, 512), (64, 16)]
    even = dict.fromkeys(known, 0.0)
    assert rank_shapes(even, [(1, 17), (8, 512), (60, 16)])[0] == (8, 512)
    errors = {(1, 16): 0.0, (1, 512): 0.5, (64, 16): 0.0}
    assert rank_shapes(errors, [(2, 128), (16, 32)]) == [(2, 128), (16, 32)]
    assert rank_shapes(even, []) == []


def test_left_out_errors_see_what_a_fit_hides() -> None:
    points = {(r, n): 1e-6 * r * n for r, n in [(1, 16), (1, 128), (8, 16), (8, 128), (4, 64)]}
    assert max(compute_left_out_errors(points).values()) < 1e-6
    points[4, 64] *= 1.5
    errors = compute_left_out_errors(points)
    assert errors[4, 64] == pytest.approx(1 / 3, rel=0.1)
    fitted = fit_surface(points)(np.array([(4, 64)], np.float64))[0]
    assert abs(fitted / points[4, 64] - 1) < 0.05


def test_few_shapes_are_enough_for_the_target() -> None:
    device = Device()
    profile = measured(device)
    assert len(profile.list_shapes()) <= 24
    table = make_cost_table(profile, _RANGE, _SHAPE, value_bytes=4)
    within = ProfileRange(min_len=16, max_len=512, max_tokens=2048)
    shapes = within.draw_held_out(40, seed=3)
    kinds: list[Recompute] = ["none", "selective", "full"]
    batches = [padded(*shape, kinds[i % 3]) for i, shape in enumerate(shapes)]
    errors = held_out_errors(table, TimedDevice(device), {"padded": batches})["padded"]
    assert all(mean <= 0.03 for name, mean in errors.mean.items() if name.endswith("_s")), errors.mean
    assert errors.worst["stored_bytes"] <= 0.01
    assert errors.worst["peak_bytes"] <= 0.01


def test_a_bent_device_is_measured_more_often_than_a_straight_one() -> None:
    class Straight(Device):
        def __call__(self, part: ModelPart, micro_batch: MicroBatch, *, bytes_only: bool = False) -> Measured | None:
            return truth(part, micro_batch.rows, micro_batch.encoder_len, micro_batch.recompute, bend=0.0)

    straight, bent = (measured(device, error_target=0.01, most_shapes=16) for device in (Straight(), Device()))
    assert len(straight.list_shapes()) < len(bent.list_shapes())


def test_what_does_not_fit_is_neither_asked_again_nor_priced() -> None:
    device = Device(room=1000)
    profile = measured(device)
    refused = [s for s, m in profile.points["layer", "none"].items() if m is None]
    assert refused
    table = make_cost_table(profile, _RANGE, _SHAPE, value_bytes=4)
    table.evaluate([padded(1, 100), padded(8, 64)])
    for rows, length in refused:
        with pytest.raises(PlanError):
            table.evaluate([padded(rows, length)])
    with pytest.raises(DataError, match="0 shapes of 16 to 512 positions"):
        measured(Device(room=10))


@pytest.mark.parametrize(
    "within",
    [
        ProfileRange(min_len=16, max_len=512, max_tokens=512),
        ProfileRange(min_len=16, max_len=16, max_tokens=512),
        ProfileRange(min_len=8, max_len=4096, max_tokens=5000, recomputes=("full",)),
        ProfileRange(min_len=16, max_len=512, max_tokens=4096, multiple=4, recomputes=("selective", "full")),
    ],
)
def test_every_shape_that_was_asked_for_is_priced(within: ProfileRange) -> None:
    table = make_cost_table(measured(Device(), within), within, _SHAPE, value_bytes=4)
    for shape in [(1, within.min_len), (1, within.max_len), *within.draw_held_out(200, seed=5)]:
        table.evaluate([padded(*shape, within.recomputes[-1])])


def test_a_device_that_holds_little_is_measured_where_it_does() -> None:
    profile = measured(Device(room=700), ProfileRange(min_len=16, max_len=512, max_tokens=4096))
    assert len(profile.list_fitting(_RANGE)) >= 3
    few = ProfileRange(min_len=64, max_len=64, max_tokens=64)
    with pytest.raises(DataError, match="a table needs 3"):
        measured(Device(), few)


def test_a_deadline_that_is_over_leaves_enough_for_a_table() -> None:
    profile = measured(Device(), go_on=lambda _profile: False)
    assert len(profile.list_fitting(_RANGE)) <= 4
    make_cost_table(profile, _RANGE, _SHAPE, value_bytes=4)


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_packed_rows_hold_what_layers_were_measured_to_keep_of_them_and_no_less_than_padded_ones(
    kind: Recompute,
) -> None:
    """Also in front of a head, which keeps nothing more, and of rows far from those that were measured."""
    table = CostTable.from_json(
        json.loads(json.dumps(make_cost_table(usual(), _RANGE, _SHAPE, value_bytes=4).to_json()))
    )
    assert not table.packed_bytes
    for lengths in ([16], [40, 17, 300], [16] * 30, [500, 400, 30]):
        samples = tuple(SampleLength(i, n) for i, n in enumerate(lengths))
        row, tokens = MicroBatch(samples, "packed", kind), sum(lengths)
        one, other = (table.evaluate(both) for both in ([row, padded(6, 100, kind)], [padded(6, 100, kind), row]))
        layer = tokens * max(table.packed_layers[kind, "encoder"].stored_bytes[1], 100 if kind == "full" else 1000)
        assert one.stored_bytes[0, 0] == pytest.approx(table.num_layers * layer + 700 * tokens, rel=2e-3)
        measured_layer = packed_truth("layer", row).stored_bytes
        assert layer == pytest.approx(max(measured_layer, 100 * tokens), rel=2e-3)
        assert other.stored_bytes[0].tolist() == one.stored_bytes[0, ::-1].tolist()
        assert other.working_bytes[0].tolist() == one.working_bytes[0, ::-1].tolist()


def test_bytes_of_packed_rows_that_no_layer_keeps_are_refused() -> None:
    raw = make_cost_table(usual(), _RANGE, _SHAPE, value_bytes=4).to_json()
    for damage in ([1.0] * 5, [float("nan")] * 6, [-1.0] * 6):
        raw["packed_layers"][0]["stored_bytes"] = damage
        with pytest.raises(DataError, match="stored_bytes of packed rows are"):
            CostTable.from_json(raw)


def test_heads_in_slices_are_priced_as_measured_and_whole_up_to_a_slice() -> None:
    table = make_cost_table(usual(), _RANGE, _SHAPE, value_bytes=4)
    assert table.facts.slices_head
    read = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert read.fingerprint() == table.fingerprint()
    short, long = (2, HEAD_SLICE // 2), (6, 300)
    for kind in table.recomputes:
        (sliced,) = with_sliced_head([kind])
        whole, in_slices = (read.evaluate([padded(*short, each), padded(*long, each)]) for each in (kind, sliced))
        for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes", "working_bytes"):
            assert getattr(whole, name)[0, 0] == getattr(in_slices, name)[0, 0], name
        head, layers = truth("head", *long, "head"), truth("layer", *long, kind)
        assert in_slices.stored_bytes[0, 1] == pytest.approx(4 * layers.stored_bytes + head.stored_bytes, rel=0.01)
        assert in_slices.backward_ns[0, 1] == pytest.approx(1e9 * (4 * layers.backward_s + head.backward_s), rel=0.05)
        assert in_slices.weight_ns[0, 1] == pytest.approx(1e9 * 4 * layers.weight_s, rel=0.05)
    sliced = [padded(*shape, "head") for shape in _RANGE.list_sliced(8)]
    errors = held_out_errors(table, TimedDevice(Device()), {"sliced": sliced})["sliced"]
    assert errors.num_unpriced == 0
    assert all(mean <= 0.03 for mean in errors.mean.values()), errors.mean
    arrays = table.evaluate_shapes([6], [300], 0, "head+full")
    assert list_values(arrays) == list_values(table.evaluate([padded(*long, "head+full")]))
    stage, none = (table.evaluate([padded(*long, kind)]) for kind in ("head+stage", "head"))
    assert np.array_equal(stage.keep_inputs(np.array([True])).stored_bytes, stage.stored_bytes)
    assert np.array_equal(stage.forward_ns, none.forward_ns)


def test_without_shapes_of_several_slices_there_is_no_price_for_them() -> None:
    within = replace(_RANGE, max_tokens=HEAD_SLICE // 2)
    table = make_cost_table(measured(Device(), within), within, _SHAPE, value_bytes=4)
    assert not table.facts.slices_head
    with pytest.raises(PlanError, match=r"with recompute 'head': the cost table has only none, selective, full"):
        table.evaluate([padded(1, 100, "head")])
    assert within.list_sliced(6) == []


def test_plans_by_measured_costs_have_heads_in_slices_where_memory_is_short() -> None:
    within = replace(_RANGE, max_len=2048)
    table = make_cost_table(measured(Device(), within), within, _SHAPE, value_bytes=4)
    whole = replace(table, grids={kind: grid for kind, grid in table.grids.items() if kind != SLICED_HEAD})
    both = table.evaluate([padded(1, 2000), padded(1, 2000, "head")])
    needs = both.static_bytes[0] + both.stored_bytes[0] + both.working_bytes[0]

    def planned(costs: CostTable, limit_bytes: float) -> StepPlan:
        return Planner(Topology(), costs, limit_bytes, effort=100).plan([2000] * 4)

    assert {m.recompute for m in planned(table, 1e12).batch.micro_batches} == {"none"}
    limit = float(needs.mean())
    sliced = planned(table, limit)
    assert {m.recompute for m in sliced.batch.micro_batches} == {"head"}
    assert sliced.lower_bound_s <= sliced.makespan_s
    assert sliced.peak_bytes <= limit
    assert sliced.makespan_ns < planned(whole, limit).makespan_ns


def test_a_shape_that_was_measured_is_not_measured_again() -> None:
    profile, first = Profile(), Device()
    choose_and_measure(
        profile, TimedDevice(first), _RANGE, error_target=0.01, most_shapes=12, go_on=lambda p: len(p.list_shapes()) < 4
    )
    kept = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert kept.points == profile.points
    second = Device()
    choose_and_measure(
        kept, TimedDevice(second), _RANGE, error_target=0.01, most_shapes=12, go_on=lambda _profile: True
    )
    at_once = Device()
    whole = measured(at_once, error_target=0.01, most_shapes=12)
    head = ("head", "head")  # in slices, of which a table of four shapes needed some more
    ours, theirs = (points.points.pop(head) for points in (kept, whole))
    assert kept.points == whole.points
    assert first.asked + second.asked - len(ours) == at_once.asked - len(theirs)


def test_measurements_of_another_kind_are_refused() -> None:
    with pytest.raises(DataError, match="entry 0 cannot be read"):
        Profile.from_json([{"part": "layer"}])


@pytest.mark.parametrize(
    "damage",
    [
        {"forward_s": float("nan")}, {"forward_s": -1.0}, {"stored_bytes": 1e300}, {"weight_s": "x"},
        {"peak_bytes": None}, {"rows": 0}, {"length": -4}, {"part": "tail"}, {"recompute": "some"},
    ],
)  # fmt: skip
def test_damaged_measurements_are_refused_by_entry(damage: dict[str, Any]) -> None:
    good = {"part": "layer", "recompute": "none", "rows": 1, "length": 16, **asdict(truth("layer", 1, 16, "none"))}
    assert Profile.from_json([good]).list_shapes() == [(1, 16)]
    with pytest.raises(DataError, match=r"costs\.json\.part: entry 1 "):
        Profile.from_json([good, good | damage], "costs.json.part")


def test_a_surface_refuses_costs_that_are_not_costs() -> None:
    for values in ([1.0, 0.0, 2.0], [1.0, float("nan"), 1.0], [-1.0, -1.0, -1.0]):
        with pytest.raises(DataError, match="must be above 0"):
            fit_surface(dict(zip([(1, 16), (2, 16), (4, 32)], values, strict=True)))


@pytest.mark.parametrize("value_bytes", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_states_are_those_of_every_stage(value_bytes: int, tied: bool) -> None:
    """fp32: weight, gradient, two moments (16 bytes); bf16: 2, an fp32 gradient, master and moments (18)."""
    shape = Architecture.gpt(
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_query_groups=2,
        ffn_hidden_size=96,
        gated_mlp=True,
        vocab_size=256,
        max_seq_len=512,
        tied_embeddings=tied,
        position="learned",
        norm="layernorm",
        bias=True,
    )
    table = make_cost_table(usual(), _RANGE, shape, value_bytes=value_bytes)
    for topology in (Topology(), Topology(pp=2), Topology(pp=4), Topology(pp=2, placement=(0, 1, 1, 0))):
        expected = count_parameters(shape, topology).total * (18 if value_bytes == 2 else 16)
        assert table.with_topology(topology)[0].count_static_bytes().tolist() == expected.tolist()


def test_a_distributed_optimizer_divides_its_states_over_replicas() -> None:
    table = make_cost_table(usual(), _RANGE, _SHAPE, value_bytes=2, distributed_optimizer=True)
    parameters = count_parameters(_SHAPE, Topology()).total[0]
    assert table.with_topology(Topology(dp=4))[0].count_static_bytes().tolist() == [parameters * (6 + 12 // 4)]


def test_the_table_says_w_the_heads_peak_and_wide_values() -> None:
    table = make_cost_table(usual(), _RANGE, _SHAPE, value_bytes=4).with_topology(Topology(pp=2))[0]
    again = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again.fingerprint() == table.fingerprint()
    for recompute in ("none", "selective", "full"):
        costs = again.evaluate([padded(4, 64, recompute)])
        layer, head = (truth(part, 4, 64, recompute) for part in ("layer", "head"))
        head = truth("head", 4, 64, "none")
        weights = np.array([2 * layer.weight_s, 2 * layer.weight_s + head.weight_s]) * 1e9
        assert costs.weight_ns[:, 0] == pytest.approx(weights, rel=0.06)
        backwards = np.array([2 * layer.backward_s, 2 * layer.backward_s + head.backward_s]) * 1e9
        assert costs.backward_ns[:, 0] == pytest.approx(backwards, rel=0.06)
        stored = 2 * layer.stored_bytes + head.stored_bytes
        assert costs.stored_bytes[1, 0] == pytest.approx(stored, rel=0.01)
        layers_run = layer.stored_bytes + layer.peak_bytes
        head_runs = 2 * layer.stored_bytes + head.peak_bytes
        assert costs.stored_bytes[1, 0] + costs.working_bytes[1, 0] == pytest.approx(
            max(stored, layers_run, head_runs), rel=0.01
        )
        assert costs.transfer_bytes[0, 0] == 4 * 64 * 64 * 4


def test_ranges_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="must ascend"):
        ProfileRange(min_len=32, max_len=16, max_tokens=64)
    tiny = ProfileRange(min_len=8, max_len=8, max_tokens=8)
    assert tiny.list_first() == [(1, 8)]
    assert all(_RANGE.holds(shape) for shape in itertools.chain(_RANGE.list_first(), _RANGE.list_candidates()))
    assert all(_RANGE.holds(shape) for shape in _RANGE.draw_held_out(50, seed=1))
