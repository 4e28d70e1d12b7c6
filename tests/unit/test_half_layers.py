"""Stages that begin or end between attention and MLP: what they cost, hold and refuse."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, sample_lengths
from dynapipe_ext.batch.topology import Topology, list_stage_layers
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.launch.job import settled
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.models.architecture import Architecture, LatentAttention
from dynapipe_ext.models.layer_pattern import HalfModule, LayerPattern, ProvenCut
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.placements import PlacementTrial
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.priced import list_values
from tests.unit.test_costs_table import gpt, t5

DENSE = Architecture.gpt(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=96,
    gated_mlp=True,
    vocab_size=512,
    max_seq_len=128,
    tied_embeddings=False,
)
EXPERTS = replace(DENSE, num_experts=4, top_k=2, num_dense_layers=1, dense_ffn_hidden_size=160)
LATENT = replace(DENSE, num_query_groups=4, head_dim=24, latent=LatentAttention(0, 16, 16, 8, 16), position="rope")
CUTS = ((2.5, 1.5), (0.5, 3.5), (3, 1))
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective")  # recomputed in full, either half keeps an input


def micro_batches(recompute: Recompute = "none") -> list[MicroBatch]:
    samples = sample_lengths([9, 31, 64, 100])
    packed = MicroBatch(samples[:3], "packed", recompute)
    return [MicroBatch(samples[:2], "padded", recompute), MicroBatch(samples[2:], "padded", recompute), packed]


def of_cut(costs: CostModel, cut: tuple[float, ...], recompute: Recompute = "none") -> MicroBatchCosts:
    placed, _ = costs.with_topology(replace(Topology(pp=2, dp=2), layers_per_stage=cut))
    return placed.evaluate(micro_batches(recompute))


def test_two_ranges_of_layers_say_what_a_stage_holds() -> None:
    """Every half of every layer lies on one stage, whatever the cut."""
    for cut in ((1.5, 0, 0.5, 0.5, 1.5), (0.5, 0.5, 3), (4,), (3.5, 0.5)):
        stages = list_stage_layers(cut)
        for name in ("attention", "mlp"):
            assert [layer for stage in stages for layer in getattr(stage, name)] == list(range(4))
        for stage, count in zip(stages, cut, strict=True):
            alone = [*stage.attention_half, *stage.mlp_half]
            assert len(stage.whole) + len(alone) / 2 == count
            assert sorted([*stage.whole, *alone]) == list(stage.held)


@pytest.mark.parametrize("architecture", [DENSE, EXPERTS, LATENT], ids=["dense", "experts", "latent"])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_counted_halves_of_a_layer_are_the_layer(architecture: Architecture, recompute: Recompute) -> None:
    """Times, stored bytes and states of all stages together are the same under any cut; each stage's are its own."""
    options: dict[str, Any] = {"flops_per_s": 1e9, "layer_overhead_ns": 1_000, "dropout": True, "flash": False}
    costs = AnalyticCosts(architecture, Topology(pp=2, dp=2, layers_per_stage=(2, 2)), **options)
    whole = of_cut(costs, (2, 2), recompute)
    for cut in CUTS:
        priced = of_cut(costs, cut, recompute)
        for name in ("forward_ns", "backward_ns", "weight_ns"):  # each stage rounds its own
            one, other = getattr(priced, name).sum(axis=0), getattr(whole, name).sum(axis=0)
            assert np.abs(one - other).max() <= 2, name
        assert (priced.stored_bytes.sum(axis=0) == whole.stored_bytes.sum(axis=0)).all()
        assert priced.static_bytes.sum() == whole.static_bytes.sum()
    assert (of_cut(costs, (2.5, 1.5)).forward_ns[0] > whole.forward_ns[0]).all()
    assert (of_cut(costs, (2.5, 1.5)).forward_ns[0] < of_cut(costs, (3, 1)).forward_ns[0]).all()


def test_a_half_counts_its_own_products_parameters_and_activations() -> None:
    """Of h wide layers: 4 h^2 weights and 4 h L FLOPs a token in attention, the rest in the MLP (by hand, without a
    head, a norm's weights beside both)."""
    a = replace(preset("llama-2-7b"), num_layers=4, hidden_size=64, num_heads=4, num_query_groups=4, head_dim=16)
    a = replace(a, ffn_hidden_size=96, vocab_size=8)
    h, f = a.hidden_size, a.ffn_hidden_size
    costs = AnalyticCosts(a, Topology(pp=2, layers_per_stage=(0.5, 3.5)), flops_per_s=1e9, overhead_ns=0, flash=False)
    (attention, _), tokens, length = count_parameters(a, costs.topology).total, 2 * 32, 32
    assert attention == 4 * h * h + h + 8 * h
    priced = costs.evaluate_shapes([2], [32])
    assert priced.forward_ns[0, 0] == 8 * h * h * tokens + 4 * h * tokens * length
    assert priced.stored_bytes[0, 0] == 2 * tokens * (2 * h + 4 * h) + 2 * 4 * tokens * length  # 4 heads' scores
    costs, _ = costs.with_topology(Topology(pp=4, layers_per_stage=(1, 0.5, 0.5, 2)))
    mlp = costs.evaluate_shapes([2], [32])
    assert mlp.forward_ns[2, 0] == 2 * 3 * h * f * tokens
    assert mlp.stored_bytes[2, 0] == 2 * tokens * (2 * h + 3 * f)
    assert count_parameters(a, costs.topology).total[2] == 3 * h * f + h
    full = costs.evaluate_shapes([2], [32], 0, "full").stored_bytes[:, 0]
    assert full[0] == full[1] == full[2] == 2 * tokens * h  # a layer, an attention, an MLP: an input each


@pytest.mark.parametrize("length", [64, 71, 100])
def test_measured_layers_are_shared_out_by_their_flops_and_bytes(length: int, tmp_path: Path) -> None:
    """Attention takes (8 h + 4 L) / (24 h + 4 L) of a layer; what it stores is of Korthikanti et al. Between grid
    points, too, bytes are to the byte, since a plan may fill the memory; times are interpolated."""
    table = gpt(tmp_path)
    table = CostTable.from_json(table.to_json())
    h = table.hidden_size
    shape = ([2], [length], [0])

    def priced(cut: tuple[float, ...], recompute: Recompute = "none") -> MicroBatchCosts:
        return table.with_topology(Topology(tp=2, pp=4, dp=2, layers_per_stage=cut))[0].evaluate_shapes(
            *shape, recompute
        )

    layer, halves = priced((1, 1, 1, 4)), priced((1, 0.5, 0.5, 5))
    work = (8 * h + 4 * length) / (24 * h + 4 * length)
    stored = (13 + 5 * length / 128) / (34 + 5 * length / 128)
    for name, share in (("forward_ns", work), ("backward_ns", work), ("stored_bytes", stored)):
        one, two = getattr(layer, name)[1, 0], getattr(halves, name)[1:3, 0]
        assert two.sum() == pytest.approx(one, abs=2)
        if name == "stored_bytes" or length == 64:
            assert two == pytest.approx([share * one, (1 - share) * one], abs=1)
    assert halves.static_bytes[1:3] == pytest.approx([layer.static_bytes[1] / 3, layer.static_bytes[1] * 2 / 3])
    full = priced((1, 0.5, 0.5, 5), "full").stored_bytes[:3, 0]
    assert full[0] == full[1] == full[2]
    assert (
        table.with_topology(Topology(tp=2, pp=2, dp=2, layers_per_stage=(3.5, 3.5)))[0].count_static_bytes() > 0
    ).all()


PAIRS = {"num_decoder_layers": 2, "num_layers": 2, "position": "relative", "norm": "rmsnorm", "bias": False}


@pytest.mark.parametrize("values", [{"model": PAIRS}, {"lora": {"enabled": True}}], ids=["pairs", "adapters"])
def test_jobs_whose_stages_cannot_be_cut_inside_a_layer_neither_try_nor_take_it(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search of `placement` "auto" is told so, and a cut by name is refused."""
    tried: list[bool] = []

    def trials(base: Topology, *_: Any, halves: bool, **__: Any) -> tuple[PlacementTrial, ...]:
        tried.append(halves)
        return (PlacementTrial(topology=base, makespan_s=1.0, peak_bytes=1, bubble_ratio=0.0),)

    monkeypatch.setattr(settled, "placement_trials", trials)
    for settings in (values, {}):
        config = TrainConfig().with_values(topology={"tp": 1, "pp": 2, "placement": "auto"})
        for table, changed in settings.items():
            config = replace(config, **{table: replace(getattr(config, table), **changed)})
        topology = Topology(pp=2, dp=2, layers_per_stage=(2, 2))
        planning = settled.SettledPlanning(
            config=config, costs=AnalyticCosts(DENSE, topology), topology=topology, num_cores=None, is_of_config=True
        )
        settled.placed_planning(planning, lambda: [])
    assert tried == [False, True]
    named = replace(config.topology, placement="linear", layers_per_stage=(2.5, 1.5))
    assert topology_of(replace(config, topology=named)).has_half_layers
    for table, changed in values.items():
        config = replace(config, **{table: replace(getattr(config, table), **changed)})
    with pytest.raises(ConfigError, match=r"is \(2.5, 1.5\) but layers .* stay whole: give whole numbers"):
        topology_of(replace(config, topology=named))


@pytest.mark.parametrize("has_halves", [True, False])
def test_a_model_of_transformers_has_halves_where_that_is_proven_of_its_family(*, has_halves: bool) -> None:
    halves = (HalfModule(name="attn", half="attention"), HalfModule(name="mlp", half="mlp")) if has_halves else ()
    cut = ProvenCut(pattern=LayerPattern(layers="layers", first=(), last=(), halves=halves))
    config = TrainConfig().with_values(topology={"tp": 1, "pp": 2, "layers_per_stage": [2.5, 1.5]})
    config = replace(config, model=replace(config.model, backend="transformers", described=DENSE, cut=cut))
    says = "cuts a layer between attention and MLP, which this model of transformers"
    if has_halves:
        assert topology_of(config).has_half_layers
        config, says = replace(config, lora=replace(config.lora, enabled=True)), "layers with adapters stay whole"
    with pytest.raises(ConfigError, match=says):
        topology_of(config)


def test_who_cannot_be_cut_inside_a_layer_says_so(tmp_path: Path) -> None:
    pairs = t5(tmp_path)
    with pytest.raises(ConfigError, match="cuts a layer between attention and MLP, which a model with a decoder side"):
        pairs.with_topology(Topology(tp=2, pp=4, dp=2, layers_per_stage=(0.5, 0.5, 1, pairs.total_layers - 2)))
    table = gpt(tmp_path)
    unmeasured = {key: grid for key, grid in table.grids.items() if key[1] not in ("attention", "mlp")}
    with pytest.raises(ConfigError, match="which a cost table without grids of both halves does not"):
        replace(table, grids=unmeasured).with_topology(Topology(tp=2, pp=2, layers_per_stage=(3.5, 3.5)))


def test_a_recomputation_mode_without_measured_halves_has_no_price_on_stages_with_halves(tmp_path: Path) -> None:
    table, halves = gpt(tmp_path), Topology(tp=2, pp=2, layers_per_stage=(3.5, 3.5))
    of_none = {key: grid for key, grid in table.grids.items() if key[0] == "none"}
    of_layers = {key: grid for key, grid in table.grids.items() if key[1] not in ("attention", "mlp")}
    partly = replace(table, grids=of_layers | of_none)
    assert not partly.evaluate_shapes([2], [64], 0, "full").infeasible.any()
    placed, expected = replace(partly, topology=halves), replace(table, grids=of_none, topology=halves)
    assert placed.evaluate_shapes([2], [64], 0, "full").infeasible.all()
    with pytest.raises(PlanError, match="with recompute 'full': the cost table has only none"):
        placed.evaluate([MicroBatch(sample_lengths([64, 64]), "padded", "full")])
    assert list_values(placed.evaluate_shapes([2], [64])) == list_values(expected.evaluate_shapes([2], [64]))
    floors = [costs.get_floor((0, 1), split=False).needed for costs in (placed, expected)]
    assert [values.tolist() for values, _ in floors[0]] == [values.tolist() for values, _ in floors[1]]


def test_a_half_that_was_not_measured_at_a_point_has_no_price_there(tmp_path: Path) -> None:
    table = replace(gpt(tmp_path), topology=Topology(tp=2, pp=2, layers_per_stage=(3.5, 3.5)))
    mlp = table.grids["none", "mlp"]
    (without,) = np.flatnonzero((np.array(list(itertools.product(*mlp.axes)))[:, :2] == (2, 64)).all(axis=1))
    is_measured = mlp.is_measured & (np.arange(len(mlp.is_measured)) != without)
    costs = replace(table, grids={**table.grids, ("none", "mlp"): replace(mlp, is_measured=is_measured)})
    assert costs.evaluate_shapes([2, 1], [64, 16]).infeasible.tolist() == [True, False]
