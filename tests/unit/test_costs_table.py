"""The measured table against a slow scalar reading of the same CSV files, and its refusals."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, MicroBatch, Recompute, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import INFEASIBLE, Grid
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json, read_cost_file
from dynapipe_ext.costs.layers import KINDS, lay_on_stages
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, DataError, PlanError

ROWS, LENGTHS = (1, 2, 8), (16, 64, 256)
HIDDEN = 8
PARAMETERS_MB = {"embedding": 7.5, "encoder": 3.0, "decoder": 4.0}


def measured(recompute: str, layer: str, rows: int, encoder: int, decoder: int) -> dict[str, float] | None:
    """Made-up measurements with an overhead, a linear and a quadratic part; the largest points did not fit."""
    tokens = rows * (encoder + 2 * decoder)
    if recompute == "none" and tokens > 1500:
        return None
    square = rows * (encoder + decoder) ** 2
    factor = {"encoder": 1.0, "decoder": 1.7, "postprocess": 0.6}[layer]
    forward = factor * (0.5 + 1e-2 * tokens + 1e-5 * square)
    stored = factor * {"none": 1e-2, "selective": 6e-3, "full": 1e-3}[recompute] * (tokens + 3)
    return {
        "forward": forward,
        "backward": forward * (3.1 if recompute == "full" else 2.2),
        "stored": stored,
        "peak": stored + 2e-2 * factor * tokens,
    }


def write_csvs(directory: Path, model: str, *, decoder: bool) -> Path:
    time: list[list[Any]] = [
        ["tp", "recompute", "layer", "pass", "micro_batch_size", "encoder_len", "decoder_len", "ms"]
    ]
    memory: list[list[Any]] = [[*time[0][:3], "kind", *time[0][4:7], "mb"]]
    for recompute, layer in itertools.product(LAYER_RECOMPUTES, ("encoder", "decoder", "postprocess")):
        if layer == "decoder" and not decoder:
            continue
        for rows, enc, dec in itertools.product(ROWS, LENGTHS, LENGTHS if layer == "decoder" else (0,)):
            if values := measured(recompute, layer, rows, enc, dec):
                shape = [rows, enc, dec]
                time += [[2, recompute, layer, name, *shape, values[name]] for name in ("forward", "backward")]
                if layer != "postprocess":
                    memory += [[2, recompute, layer, name, *shape, values[name]] for name in ("stored", "peak")]
    sizes = [["tp", "recompute", "layer", "mb"], *([2, "none", name, mb] for name, mb in PARAMETERS_MB.items())]
    sizes.append([2, "full", "encoder", PARAMETERS_MB["encoder"] - 0.5])  # the largest of several counts
    for suffix, table in (("time_ms", time), ("activation_mb", memory), ("parameters_mb", sizes)):
        with (directory / f"{model}_{suffix}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(table)
    return directory


def gpt(directory: Path, **more: Any) -> CostTable:
    settings = {"topology": Topology(tp=2, pp=3, dp=2), "num_layers": 7, "hidden_size": HIDDEN, **more}
    return CostTable.read_a100(write_csvs(directory, "gpt", decoder=False), "gpt", **settings)


def t5(directory: Path, **more: Any) -> CostTable:
    settings = {"topology": Topology(tp=2, pp=4, dp=1), "num_layers": 5, "hidden_size": HIDDEN, **more}
    return CostTable.read_a100(write_csvs(directory, "t5", decoder=True), "t5", **settings)


def interpolate(column: str, recompute: str, layer: str, *at: float) -> float:
    """One value by the definition: blend the two neighbours along the first axis, each by the same rule."""
    axes = (ROWS, LENGTHS, LENGTHS)[: len(at)]

    def blend(fixed: tuple[int, ...]) -> float:
        if len(fixed) == len(at):
            values = measured(recompute, layer, *(fixed if len(fixed) == 3 else (*fixed, 0)))
            return math.inf if values is None else values[column]
        axis, x = axes[len(fixed)], max(at[len(fixed)], axes[len(fixed)][0])
        if x > axis[-1]:
            return math.inf
        if x in axis:
            return blend((*fixed, int(x)))
        high = next(i for i, point in enumerate(axis) if point > x)
        share = (x - axis[high - 1]) / (axis[high] - axis[high - 1])
        return (1 - share) * blend((*fixed, axis[high - 1])) + share * blend((*fixed, axis[high]))

    return blend(())


def expected(table: CostTable, recompute: str, rows: float, enc: float, dec: float) -> list[list[float]]:
    """[forward ns, backward ns, stored, running bytes] of every stage, layer by layer."""
    total = table.num_layers * (2 if table.has_decoder else 1)
    out = []
    for stage in range(table.num_stages):
        forward = backward = stored = running = 0.0
        for layer in range(total):
            if layer * table.num_stages // total != stage:
                continue
            kind = "decoder" if layer >= table.num_layers else "encoder"
            at = (rows, enc, dec) if kind == "decoder" else (rows, enc)
            running = max(running, stored + interpolate("peak", recompute, kind, *at))
            forward += interpolate("forward", recompute, kind, *at)
            backward += interpolate("backward", recompute, kind, *at)
            stored += interpolate("stored", recompute, kind, *at)
        if stage == table.num_stages - 1:
            head = (rows, dec if table.has_decoder else enc)
            forward += interpolate("forward", recompute, "postprocess", *head)
            backward += interpolate("backward", recompute, "postprocess", *head)
        out.append([x * 1e6 for x in (forward, backward, stored, running)])
    return out


@pytest.mark.parametrize("recompute", LAYER_RECOMPUTES)
@pytest.mark.parametrize("make", [gpt, t5])
def test_costs_equal_a_scalar_interpolation_layer_by_layer(tmp_path: Path, make: Any, recompute: Recompute) -> None:
    table: CostTable = make(tmp_path)
    rng = np.random.default_rng(3)
    shapes = [(int(r), int(e), int(d)) for r, e, d in zip(*rng.integers(1, (9, 280, 280), (60, 3)).T, strict=True)]
    shapes += [(1, 1, 1), (8, 16, 16), (2, 64, 64), (1, 257, 16), (9, 16, 16), (8, 256, 256), (1, 256, 256)]
    costs = table.evaluate_shapes(*np.array(shapes).T, recompute)
    for i, (rows, enc, dec) in enumerate(shapes):
        per_stage = np.array(expected(table, recompute, rows, enc, dec))
        have = np.array(
            [costs.forward_ns, costs.backward_ns, costs.stored_bytes, costs.stored_bytes + costs.working_bytes]
        )
        if np.isfinite(per_stage).all():
            assert np.allclose(have[:, :, i].T, per_stage, rtol=1e-6, atol=1.0)
        else:
            assert (costs.forward_ns[:, i] == INFEASIBLE).all()
            assert (costs.stored_bytes[:, i] == INFEASIBLE).all()


def test_some_shapes_of_that_test_are_infeasible_and_most_are_not(tmp_path: Path) -> None:
    costs = gpt(tmp_path).evaluate_shapes([1, 8, 9], [256, 256, 16], 0, "none")
    assert (costs.forward_ns[0] == INFEASIBLE).tolist() == [False, True, True]


def test_micro_batches_cost_what_their_shapes_cost(tmp_path: Path) -> None:
    table = t5(tmp_path)
    batch = [
        MicroBatch((SampleLength(0, 20, 9), SampleLength(1, 40, 30)), recompute="full", pad_multiple=8),
        MicroBatch((SampleLength(2, 100, 100),), recompute="selective"),
    ]
    costs = table.evaluate(batch)
    for i, m in enumerate(batch):
        shape = table.evaluate_shapes([m.rows], [m.encoder_len], [m.decoder_len], m.recompute)
        assert costs.backward_ns[:, i].tolist() == shape.backward_ns[:, 0].tolist()
        assert costs.transfer_bytes[:, i].tolist() == shape.transfer_bytes[:, 0].tolist()


def test_decoder_positions_cross_only_boundaries_after_the_first_decoder_layer(tmp_path: Path) -> None:
    table = replace(t5(tmp_path), comm_gbps=16.0, comm_latency_us=5.0)
    costs = table.evaluate([MicroBatch((SampleLength(0, 100, 30),), recompute="full")])
    assert table.layout.pairs == [(3, 0), (2, 0), (0, 3), (0, 2)]
    assert costs.transfer_bytes[:, 0].tolist() == [100 * HIDDEN * 2, 100 * HIDDEN * 2, 130 * HIDDEN * 2]
    assert costs.transfer_ns[:, 0].tolist() == [5000 + 100 * HIDDEN, 5000 + 100 * HIDDEN, 5000 + 130 * HIDDEN]


def test_links_price_each_boundary_by_whether_it_crosses_nodes(tmp_path: Path) -> None:
    links = Links(intra=Link(1000, 3e11), inter=Link(20_000, 1e9), ranks_per_node=4)
    table = replace(t5(tmp_path), comm_gbps=16.0)
    costs = replace(table, links=links).evaluate([MicroBatch((SampleLength(0, 100, 30),), recompute="full")])
    sent = costs.transfer_bytes[:, 0].tolist()
    assert costs.transfer_ns[:, 0].tolist() == [
        int(link.transfer_ns(num_bytes))
        for link, num_bytes in zip((links.intra, links.inter, links.intra), sent, strict=True)
    ]
    again = CostTable.from_json(json.loads(json.dumps(replace(table, links=links).to_json())))
    assert again.links == links
    assert len({table.fingerprint(), again.fingerprint()}) == 2


def layer_at(grid: Grid | None, place: np.ndarray) -> np.ndarray:
    """Forward, backward, W in ms, MB stored and MB at the peak: (5, M)."""
    layer = np.zeros((5, place.shape[1]))
    if grid is not None:
        values, _ = grid.interpolate(list(place))
        for row, name in enumerate(("forward_ms", "backward_ms", "weight_ms", "stored_mb", "peak_mb")):
            if name in grid.columns:
                layer[row] = values[grid.columns.index(name)]
    return layer


@pytest.mark.parametrize("make", [gpt, t5])
def test_stages_have_the_sums_of_their_layers_and_the_peak_of_the_last_one(tmp_path: Path, make: Any) -> None:
    rng = np.random.default_rng(2)
    shapes = np.stack([rng.uniform(0, 10, 4000), rng.uniform(0, 300, 4000), rng.uniform(0, 300, 4000)])
    shapes[:, :1000] = np.round(shapes[:, :1000] / 8) * 8  # on the axes' points, too
    for table in (make(tmp_path), make(tmp_path, topology=Topology(tp=2, pp=2))):
        layout = table.layout.pairs
        for recompute in LAYER_RECOMPUTES:
            grids = [table.grids.get((recompute, kind)) for kind in KINDS]
            axes = ([0, 1], [0, 1, 2], [0, 2] if table.has_decoder else [0, 1])
            e, d, head = (layer_at(grid, shapes[axis]) for grid, axis in zip(grids, axes, strict=True))
            prices = {"encoder": e, "decoder": d, "postprocess": head}
            total = lay_on_stages(prices, table.layout.counts)
            for stage, (encoders, decoders) in enumerate(layout):
                expected = encoders * e[:4] + decoders * d[:4]
                if stage == len(layout) - 1:
                    expected = expected + head[:4]
                assert (total[:4, stage] == expected).all()
                while_encoder = (encoders - 1) * e[3] + e[4] if encoders else 0 * e[3]
                while_decoder = encoders * e[3] + (decoders - 1) * d[3] + d[4] if decoders else 0 * e[3]
                assert (total[4, stage] == np.maximum(while_encoder, while_decoder)).all()


@pytest.mark.parametrize("share", [None, (10.0, 0.5, 30.0, 2.0)])
def test_halves_add_their_times_and_bytes_and_each_works_beside_all_that_is_stored(
    tmp_path: Path, share: tuple[float, float, float, float] | None
) -> None:
    rng = np.random.default_rng(3)
    shapes = np.stack([rng.uniform(0, 10, 2000), rng.uniform(0, 300, 2000), np.zeros(2000)])
    shapes[:, :500] = np.round(shapes[:, :500] / 8) * 8
    grid = gpt(tmp_path).grids["none", "encoder"]
    weighed = replace(grid, columns=(*grid.columns, "weight_ms"), values=np.vstack([grid.values, 0.3 * grid.values[1]]))
    halves = [replace(weighed, values=0.4 * weighed.values, share_of_bytes=share), replace(grid, share_of_bytes=share)]
    none = np.zeros((5, 2000))
    prices = {"encoder": layer_at(grid, shapes[:2]), "decoder": none, "postprocess": none}
    counts = {"encoder": np.array([[1], [2], [0]]), "decoder": np.array([[0]] * 3)}
    counts |= {"attention": counts["decoder"], "mlp": counts["decoder"]}
    total = lay_on_stages(prices, counts)
    prices |= {kind: layer_at(half, shapes[:2]) for kind, half in zip(("attention", "mlp"), halves, strict=True)}
    found = lay_on_stages(prices, counts | {"attention": np.array([[1], [0], [0]]), "mlp": np.array([[0], [0], [1]])})
    assert np.allclose(found[:, 1], total[:, 1], rtol=1e-15)
    for stage, half in ((0, halves[0]), (2, halves[1])):
        added = layer_at(half, shapes[:2])
        assert np.allclose(found[:4, stage], total[:4, stage] + added[:4], rtol=1e-14)
        working = np.maximum(total[4, stage] - total[3, stage], added[4] - added[3])
        assert np.allclose(found[4, stage], found[3, stage] + working, rtol=1e-14)


def test_states_are_8_bytes_of_parameters_sharded_by_zero_1_with_two_embeddings_in_an_encoder_decoder(
    tmp_path: Path,
) -> None:
    assert t5(tmp_path).count_static_bytes().tolist() == [int(1e6 * 8 * x) for x in (9 + 7.5, 6, 12 + 7.5, 8)]
    assert gpt(tmp_path).count_static_bytes().tolist() == [int(1e6 * 5 * x) for x in (9 + 7.5, 6, 6)]


def test_w_takes_its_share_of_the_backward(tmp_path: Path) -> None:
    costs = replace(gpt(tmp_path), split_w=0.25).evaluate_shapes([2], [64])
    assert np.abs(costs.weight_ns * 4 - costs.backward_ns).max() <= 2
    assert (costs.input_ns + costs.weight_ns == costs.backward_ns).all()


def test_uneven_layers_and_other_topologies_reuse_the_measurements(tmp_path: Path) -> None:
    table = gpt(tmp_path)
    uneven, _ = table.with_topology(Topology(tp=2, pp=2, layers_per_stage=(5, 2)))
    assert uneven.layout.pairs == [(5, 0), (2, 0)]
    with pytest.raises(ConfigError, match=r"comm_gbps is 0\.0 but must be 1e-06 to"):
        replace(t5(tmp_path), comm_gbps=0.0)
    with pytest.raises(ConfigError, match="measured at tp 2, not 1"):
        table.with_topology(Topology(tp=1, pp=2))
    with pytest.raises(ConfigError, match="sums to 3 but the model has 7 layers"):
        table.with_topology(Topology(tp=2, pp=2, layers_per_stage=(1, 2)))


@pytest.mark.parametrize(
    ("samples", "recompute", "message"),
    [
        ((300,), "full", r"1 x 300 lies above .* encoder_len 256 and refuses to extrapolate"),
        ((16,) * 9, "full", r"9 x 16 lies above .* rows 8 and refuses"),
        ((256,) * 8, "none", r"8 x 256 with recompute 'none' leans on points that were not measured"),
        ((16,), "stage", "with recompute 'stage': the cost table has only none, selective, full"),  # peaks of F alone
    ],
)
def test_a_shape_outside_the_grid_is_refused_with_shape_and_bound(
    tmp_path: Path, samples: tuple[int, ...], recompute: Recompute, message: str
) -> None:
    bad = MicroBatch(tuple(SampleLength(i, n) for i, n in enumerate(samples)), recompute=recompute)
    with pytest.raises(PlanError, match=message):
        gpt(tmp_path).evaluate([MicroBatch((SampleLength(0, 16),)), bad])


def test_packed_documents_are_priced_by_tokens_and_squares(tmp_path: Path) -> None:
    """Equal documents cost the padded rows of their shape; the row's overhead is paid once; tiny ones cost tokens."""
    table = gpt(tmp_path)

    def forward(lengths: list[int], **more: Any) -> int:
        samples = tuple(SampleLength(i, n) for i, n in enumerate(lengths))
        return int(table.evaluate([MicroBatch(samples, **more)]).forward_ns[0, 0])

    assert forward([64] * 4, layout="packed") == forward([64] * 4)
    assert forward([256], layout="packed") == forward([256])
    assert forward([64] * 4, layout="packed") < forward([256])
    assert forward([64] * 4, layout="packed", attention="row") == forward([256])
    assert forward([128, 64], layout="packed", recompute="full") > forward([64] * 3, layout="packed", recompute="full")
    assert forward([1] * 64, layout="packed") == forward([16] * 4)
    assert forward([128] * 4, layout="packed") > 0  # 512 positions: above the length axis, but no document is


def test_packed_rows_beside_a_hole_in_the_grid_are_priced_in_proportion(tmp_path: Path) -> None:
    """200 + 200 + 200 is 3 rows of 200, which lean on the missing 8 x 256: priced as 1.5 times 2 rows of 200."""
    table = gpt(tmp_path)
    samples = tuple(SampleLength(i, 200) for i in range(3))
    with pytest.raises(PlanError, match="leans on"):
        table.evaluate([MicroBatch(samples)])
    packed, two = table.evaluate([MicroBatch(samples, "packed"), MicroBatch(samples[:2])]).forward_ns.T
    assert np.abs(packed - 1.5 * two).max() <= 1


def test_files_keep_the_answers_and_the_fingerprint(tmp_path: Path) -> None:
    for table in (gpt(tmp_path), t5(tmp_path)):
        (tmp_path / "costs.json").write_text(json.dumps(table.to_json()))
        again = read_cost_file(tmp_path / "costs.json")
        assert again.fingerprint() == table.fingerprint()
        one, two = (t.evaluate_shapes([1, 3, 8], [30, 100, 256], [16, 50, 256]) for t in (table, again))
        assert one.backward_ns.tolist() == two.backward_ns.tolist()
        assert one.working_bytes.tolist() == two.working_bytes.tolist()
        assert (
            cost_model_from_json(json.loads(json.dumps(cost_model_to_json(table)))).fingerprint() == table.fingerprint()
        )


def test_the_fingerprint_sees_values_and_settings_but_not_the_provenance(tmp_path: Path) -> None:
    table = gpt(tmp_path)
    assert replace(table, provenance={"date": "2026"}).fingerprint() == table.fingerprint()
    raw = table.to_json()
    raw["grids"][0]["columns"]["forward_ms"][0] += 0.001
    prints = {CostTable.from_json(raw).fingerprint(), table.fingerprint(), replace(table, split_w=0.5).fingerprint()}
    assert len(prints) == 3


def test_files_that_are_no_cost_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_cost_file(tmp_path / "none.json")
    (tmp_path / "old.json").write_text('{"format": "dynapipe-costs/0", "kind": "table"}')
    with pytest.raises(DataError, match=r"'dynapipe-costs/0' .* reads 'dynapipe-costs/1'"):
        read_cost_file(tmp_path / "old.json")
    raw = gpt(tmp_path).to_json()
    del raw["grids"][0]["columns"]["forward_ms"][0]
    with pytest.raises(DataError, match="8 values for a grid of 9 points"):
        CostTable.from_json(raw)
    with pytest.raises(ConfigError, match=r"measured at tp \[2\], not at 4"):
        gpt(tmp_path, topology=Topology(tp=4, pp=1))
    with pytest.raises(ConfigError, match="kind 'magic'"):
        cost_model_from_json({"kind": "magic"})


def test_an_axis_of_one_point_answers_at_and_below_it_only() -> None:
    grid = Grid.from_points({"x": {(1, 8): 2.0, (1, 16): 4.0}})
    values, known = grid.interpolate([np.array([0.5, 1.0, 2.0]), np.array([12.0, 4.0, 8.0])])
    assert values[0, :2].tolist() == [3.0, 2.0]
    assert known.tolist() == [True, True, False]


def test_token_costs_are_their_polynomial_and_survive_json() -> None:
    model = TokenCosts(
        2, ns_per_token=10, ns_per_token_squared=1, overhead_ns=5, transfer_ns_per_token=3, stage_scale=(1.0, 2.0)
    )
    costs = model.evaluate([MicroBatch((SampleLength(0, 4), SampleLength(1, 2)))])
    assert costs.forward_ns[:, 0].tolist() == [5 + 80 + 32, 5 + 160 + 64]
    assert costs.backward_ns[:, 0].tolist() == [2 * 117, 2 * 229]
    assert costs.weight_ns[:, 0].tolist() == [80, 160]
    assert costs.transfer_ns.tolist() == [[24]]
    assert model.evaluate_shapes([2], [4], [0]).forward_ns.tolist() == costs.forward_ns.tolist()
    packed = MicroBatch((SampleLength(0, 4), SampleLength(1, 1)), "packed", pad_multiple=8)
    assert model.evaluate([packed]).forward_ns[0, 0] == 5 + 80 + 16 + 1 + 9
    again = cost_model_from_json(json.loads(json.dumps(cost_model_to_json(model))))
    assert again == model
    assert again.fingerprint() == model.fingerprint() != TokenCosts(2).fingerprint()
    with pytest.raises(ConfigError, match="overhead_ns is -1"):
        TokenCosts(1, overhead_ns=-1)
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenCosts.from_json({"num_stages": 1, "colour": 3})
