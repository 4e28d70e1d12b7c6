"""Cost tables of encoder-decoders from few measurements, of a synthetic device whose costs are known."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import HEAD_SLICE, MicroBatch, Recompute, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.layers import lay_out
from dynapipe_ext.costs.measuring_time import TimedDevice
from dynapipe_ext.costs.profiled import Profile, ProfileRange, choose_and_measure, make_cost_table
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.costs.surface import QUANTITIES, Measured, ModelPart
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.launch.job.configured import check_fits
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.profile_errors import held_out_errors

RANGE = ProfileRange(min_len=16, max_len=256, max_decoder_len=128, max_tokens=4096)
SHAPES = 14


def t5(**more: Any) -> Architecture:
    sizes: dict[str, Any] = {"num_layers": 4, "num_decoder_layers": 4, "hidden_size": 64, "num_heads": 4}
    sizes |= {"ffn_hidden_size": 96, "gated_mlp": True, "vocab_size": 256, "max_seq_len": 256, "tied_embeddings": True}
    return Architecture.t5(**sizes | more)


def truth(part: ModelPart, rows: int, encoder: int, decoder: int, recompute: Recompute) -> Measured:
    """Overhead, tokens, scores and one row's biases, slower by a quarter where the working set leaves a cache."""
    match part:
        case "encoder":
            tokens, scores, biases = rows * encoder, rows * encoder**2, encoder**2
        case "decoder":
            tokens = rows * decoder + rows * encoder // 3
            scores, biases = rows * decoder * (decoder + encoder), decoder**2
        case _:
            tokens, scores, biases = rows * decoder, 0, 0
    slow = 1 + 0.25 / (1 + np.exp(-(np.log2(tokens) - 9)))
    forward_s = (2e-4 + 1e-6 * tokens + 3e-9 * scores + 2e-9 * biases) * slow
    again_s = {"none": 0.0, "selective": 3e-9 * scores, "full": forward_s}[recompute] if part != "head" else 0.0
    weight_s = 0.0 if recompute == "full" else 0.7 * forward_s
    if part == "head" and recompute == "head":  # in slices
        return Measured(forward_s, 3 * forward_s, 3 * forward_s, 0.0, 8 * tokens, 300_000 + 50 * tokens)
    kept = {"none": 1000 * tokens + 4 * scores, "selective": 1000 * tokens, "full": 100 * tokens}[recompute]
    stored = kept + 4 * biases
    return Measured(
        forward_s=forward_s,
        backward_s=2 * forward_s + again_s,
        input_s=2 * forward_s + again_s - weight_s,
        weight_s=weight_s,
        stored_bytes=stored,
        peak_bytes=stored + 300 * tokens,
    )


class PairDevice:
    """Measures by `truth`; what needs more than `room` tokens does not fit, and packed rows keep more bytes."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room, self.asked = room, list[tuple[ModelPart, int, int, int, Recompute]]()

    def __call__(self, part: ModelPart, micro_batch: MicroBatch, *, bytes_only: bool = False) -> Measured | None:
        m, (first, *_) = micro_batch, micro_batch.samples
        if not bytes_only:
            self.asked.append((part, m.rows, m.encoder_len, m.decoder_len, m.recompute))
        if m.padded_tokens > self.room:
            return None
        if m.layout == "padded":
            return truth(part, len(m.samples), first.encoder, first.decoder, m.recompute)
        return packed_truth(part, m)


def packed_truth(part: ModelPart, m: MicroBatch) -> Measured:
    """Of pairs one by one, with more bytes."""
    more = {"encoder": 1.02, "decoder": 1.08}.get(part, 1.0)
    each = [asdict(truth(part, 1, s.encoder, s.decoder, m.recompute)) for s in m.samples]
    total = {name: sum(one[name] for one in each) for name in QUANTITIES}
    return Measured(**total | {name: int(more * total[name]) for name in ("stored_bytes", "peak_bytes")})


def measured(device: PairDevice, within: ProfileRange = RANGE, most_shapes: int = SHAPES) -> Profile:
    profile = Profile()
    always = lambda _profile: True  # noqa: E731
    choose_and_measure(profile, TimedDevice(device), within, error_target=0.01, most_shapes=most_shapes, go_on=always)
    return profile


@pytest.fixture(scope="module")
def device() -> PairDevice:
    return PairDevice()


@pytest.fixture(scope="module")
def table(device: PairDevice) -> CostTable:
    """Of 4 + 4 layers of fp32 on one stage."""
    return make_cost_table(measured(device), RANGE, t5(), value_bytes=4)


def small(architecture: Architecture, value_bytes: int = 4, multiple: int = 1, **options: Any) -> CostTable:
    """Of few shapes: for what does not depend on them."""
    within = ProfileRange(
        min_len=16, max_len=32, max_decoder_len=16, max_tokens=64, multiple=multiple, recomputes=("none",)
    )
    profile = measured(PairDevice(), within, most_shapes=6)
    return make_cost_table(profile, within, architecture, value_bytes=value_bytes, **options)


def padded(rows: int, encoder: int, decoder: int, recompute: Recompute = "none") -> MicroBatch:
    return MicroBatch(tuple(SampleLength(i, encoder, decoder, decoder) for i in range(rows)), recompute=recompute)


def test_few_shapes_price_pairs_that_nobody_measured(table: CostTable) -> None:
    shapes = replace(RANGE, max_tokens=2048).draw_held_out(40, seed=3)
    kinds: list[Recompute] = ["none", "selective", "full"]
    batches = [padded(*shape, kinds[i % 3]) for i, shape in enumerate(shapes)]
    errors = held_out_errors(table, TimedDevice(PairDevice()), {"padded": batches})["padded"]
    assert errors.num_unpriced == 0
    assert all(mean <= 0.02 for name, mean in errors.mean.items() if name.endswith("_s")), errors.mean
    assert errors.worst["stored_bytes"] <= 0.005
    assert errors.worst["peak_bytes"] <= 0.005


def test_a_part_is_measured_once_for_all_shapes_that_are_the_same_to_it(table: CostTable, device: PairDevice) -> None:
    assert table.has_decoder
    sides = {"encoder": (1, 2, 4), "decoder": (1, 2, 3, 4), "head": (1, 3, 4)}
    seen = [(one[0], *(one[i] for i in sides[one[0]])) for one in device.asked]
    assert len(seen) == len(set(seen))
    counts = {part: sum(one[0] == part for one in seen) for part in sides}
    assert counts["decoder"] == 3 * SHAPES > counts["encoder"]
    heads = [one for one in seen if one[0] == "head"]
    assert sum(one[-1] == "none" for one in heads) < SHAPES
    in_slices = [(rows, decoder) for _, rows, decoder, kind in heads if kind == "head"]
    assert in_slices
    assert all(rows * decoder > HEAD_SLICE for rows, decoder in in_slices)
    assert {one[4] for one in device.asked if one[0] == "head"} == {"none", "head"}


@pytest.mark.parametrize(
    "within",
    [
        ProfileRange(min_len=8, max_len=64, max_decoder_len=8, max_tokens=72, recomputes=("full",)),
        ProfileRange(min_len=16, max_len=32, max_decoder_len=128, max_tokens=999, multiple=4, recomputes=("none",)),
    ],
)
def test_every_pair_that_was_asked_for_is_priced(within: ProfileRange) -> None:
    found = make_cost_table(measured(PairDevice(), within, most_shapes=8), within, t5(), value_bytes=4)
    corners = [(1, within.min_len, within.min_len), (1, within.max_len, within.max_decoder_len)]
    for shape in [*corners, *within.draw_held_out(100, seed=5)]:
        found.evaluate([padded(*shape, within.recomputes[0])])


def test_pairs_that_do_not_fit_are_neither_asked_again_nor_priced() -> None:
    device, within = PairDevice(room=1000), replace(RANGE, recomputes=("none",))
    profile = measured(device, within, most_shapes=16)
    refused = [shape for shape, found in profile.points["decoder", "none"].items() if found is None]
    assert refused
    asked = [one[1:4] for one in device.asked if one[0] == "decoder" and one[1] * (one[2] + one[3]) > 1000]
    assert not any(
        a != b and all(x <= y for x, y in zip(a, b, strict=True)) for a in asked for b in asked[asked.index(a) :]
    )
    found = make_cost_table(profile, within, t5(), value_bytes=4)
    found.evaluate([padded(2, 200, 100)])
    for shape in refused:
        with pytest.raises(PlanError):
            found.evaluate([padded(*shape)])


def test_measurements_of_pairs_go_on_where_they_were_kept() -> None:
    within = replace(RANGE, recomputes=("none",))
    first, second, at_once = PairDevice(), PairDevice(), PairDevice()
    kept = Profile.from_json(json.loads(json.dumps(measured(first, within, most_shapes=11).to_json())))
    always = lambda _profile: True  # noqa: E731
    choose_and_measure(kept, TimedDevice(second), within, error_target=0.01, most_shapes=13, go_on=always)
    assert kept.points == measured(at_once, within, most_shapes=13).points
    assert first.asked + second.asked == at_once.asked
    entry = {"part": "decoder", "recompute": "none", "rows": 1, "length": 16}
    with pytest.raises(DataError, match="entry 0 cannot be read"):
        Profile.from_json([entry | asdict(truth("decoder", 1, 16, 16, "none"))])


@pytest.mark.parametrize(
    ("topology", "tied"),
    [
        (Topology(), True),
        (Topology(pp=2), True),
        (Topology(pp=2, dp=3), False),
        (Topology(pp=4), True),
        (Topology(pp=4, layers_per_stage=(3, 1, 1, 2)), True),
        (Topology(pp=4, layers_per_stage=(1, 4, 1, 1)), False),
    ],
    ids=str,
)
def test_states_are_those_of_every_stage_of_unequal_sides(topology: Topology, tied: bool) -> None:
    """bf16: weight 2, fp32 gradient, master and two moments, 18 bytes a parameter."""
    shape = t5(num_layers=4, num_decoder_layers=3, tied_embeddings=tied)
    found = CostTable.from_json(json.loads(json.dumps(small(shape, value_bytes=2).to_json()))).with_topology(topology)[
        0
    ]
    assert found.total_layers == 7
    assert found.layout.pairs == lay_out(shape.num_layers, shape.total_layers, topology).pairs
    expected = count_parameters(shape, topology).total * 18
    assert found.count_static_bytes().tolist() == expected.tolist()


def test_parameters_are_those_of_a_tensor_parallel_rank() -> None:
    found = small(t5(), tp=2).with_topology(Topology(tp=2, pp=4))[0]
    expected = count_parameters(t5(), Topology(tp=2, pp=4)).total * 16
    assert found.count_static_bytes().tolist() == expected.tolist()


def test_a_stage_holds_its_layers_the_encoders_output_once_and_where_the_encoder_ends_its_norm() -> None:
    """Of 2 x 24 encoder positions of 64 fp32 values, whose sequence two ranks share."""
    costs = small(t5(), multiple=2).with_topology(Topology(pp=4))[0].evaluate([padded(2, 24, 8)])
    encoder, decoder, head = (truth(part, 2, 24, 8, "none") for part in ("encoder", "decoder", "head"))
    output, norm = 2 * 24 * 64 * 4 // 2, 2 * (2 * 24 * 64 * 4) // 2
    layers = [2 * encoder.stored_bytes, 2 * encoder.stored_bytes + norm]
    layers += [2 * decoder.stored_bytes + output, 2 * decoder.stored_bytes + output + head.stored_bytes]
    assert costs.stored_bytes[:, 0] == pytest.approx(layers, rel=0.01)
    running = [encoder.stored_bytes + encoder.peak_bytes, encoder.stored_bytes + encoder.peak_bytes + norm]
    running += [decoder.stored_bytes + decoder.peak_bytes + output]
    running += [2 * decoder.stored_bytes + head.peak_bytes + output]
    peaks = costs.stored_bytes[:, 0] + costs.working_bytes[:, 0]
    assert peaks == pytest.approx(np.maximum(layers, running), rel=0.01)


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_packed_pairs_hold_what_layers_of_either_side_were_measured_to_keep_or_padded_pairs_do(
    table: CostTable, kind: Recompute
) -> None:
    pairs = [(20, 60), (200, 16), (100, 100), (16, 16)]
    row = MicroBatch(tuple(SampleLength(i, e, d, d) for i, (e, d) in enumerate(pairs)), "packed", kind)
    alone = replace(table, once_bytes={}).with_topology(Topology(pp=8))[0].evaluate([row]).stored_bytes
    for stage, part in ((0, "encoder"), (4, "decoder")):
        kept = packed_truth(part, row).stored_bytes  # type: ignore[arg-type]
        assert 0.99 * kept <= alone[stage, 0] <= 1.06 * kept


def test_packed_pairs_are_priced_where_each_of_them_would_be(table: CostTable) -> None:
    """Equal squares alone would make rows of 120 + 161 positions of these, longer than any target was measured."""
    samples = (SampleLength(0, 256, 128, 128), SampleLength(1, 16, 128, 128), SampleLength(2, 16, 128, 128))
    costs, rows = (table.evaluate([m]) for m in (MicroBatch(samples, "packed"), padded(3, 96, 128)))
    assert costs.forward_ns.tolist() == rows.forward_ns.tolist()
    with pytest.raises(PlanError, match="above the cost table, which ends at decoder_len 128"):
        table.evaluate([MicroBatch((*samples, SampleLength(3, 16, 160, 160)), "packed")])


def test_a_target_that_is_longer_than_the_table_is_refused_before_the_launch(table: CostTable) -> None:
    """Though another pair is longer on the whole."""
    config = TrainConfig().with_values(model={"num_decoder_layers": 4}, topology={"tp": 1, "pp": 2, "dp": 1})
    costs, _ = table.with_topology(Topology(pp=2))
    check_fits(config, costs, np.array([[250, 128, 128], [9, 5, 5]]))
    with pytest.raises(PlanError, match=r"sample 1 with 150 tokens cannot be priced: .*ends at decoder_len 128"):
        check_fits(config, costs, np.array([[250, 128, 128], [10, 140, 140]]))


def test_a_range_whose_longest_pair_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"16 to 64, 99 tokens per micro-batch, which a pair of 64 \+ 64 must fit"):
        ProfileRange(max_len=64, max_decoder_len=64, max_tokens=99)
    with pytest.raises(ConfigError, match="4 to 30 must be multiples of 4"):
        ProfileRange(max_len=64, max_decoder_len=30, max_tokens=99, multiple=4)
