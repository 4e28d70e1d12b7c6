"""What parts of a head on pipeline ranks cost and hold, counted and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute, sample_lengths
from dynapipe_ext.batch.topology import Topology, Vocabulary
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.costs.adapters import price_adapters
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.layers import lay_out
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.settings.tables import LoraSettings
from tests.unit.test_costs_table import gpt, t5

HIDDEN, VOCAB, LAYERS, PP = 64, 768, 6, 3
MODEL = replace(
    preset("llama-2-7b"),
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_heads=4,
    num_query_groups=4,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=VOCAB,
)
TOKENS = np.array([2 * 32, 9 + 32 + 64])
WHOLE = Topology(tp=2, pp=PP, dp=2).with_layers(LAYERS)
HEAD = split_vocabulary(WHOLE, "head")
RECOMPUTES: tuple[Recompute, ...] = ("none", "full", "head", "stage")


def counted(topology: Topology = WHOLE, **options: object) -> AnalyticCosts:
    values = {"flops_per_s": 1e9, "overhead_ns": 1_000, "layer_overhead_ns": 50, "head_slice": 16} | options
    return AnalyticCosts(MODEL, topology, **values)  # type: ignore[arg-type]


def priced(costs: CostModel, topology: Topology, recompute: Recompute = "none") -> MicroBatchCosts:
    placed, _ = costs.with_topology(topology)
    samples = sample_lengths([9, 32, 64, 100])
    packed = MicroBatch(samples[:3], "packed", recompute)
    return placed.evaluate([MicroBatch(samples[:2], "padded", recompute), packed])


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("width", [1, 2])
def test_counted_parts_take_the_head_and_what_messages_add(recompute: Recompute, width: int) -> None:
    """All stages together take the FLOPs of a whole head, and beside them an action's overhead for each more stage."""
    costs = counted(split_backward=True)
    whole = priced(costs, WHOLE.at_width(width), recompute)
    spread = priced(costs, HEAD.at_width(width), recompute)
    for name in ("forward_ns", "backward_ns", "weight_ns"):
        one, parts = getattr(whole, name), getattr(spread, name)
        assert (parts[: PP - 1] == one[: PP - 1]).all()
        actions = {"forward_ns": 1, "backward_ns": 2 if recompute == "stage" else 1, "weight_ns": 0}[name]
        more = actions * (1_000 * (PP - 1) + 25 * PP)  # 25: half a layer's
        assert np.abs(parts.sum(axis=0) - one.sum(axis=0) - more).max() <= 3 * PP, name
        assert (parts[PP:] == parts[PP]).all()  # the parts are alike
        assert (parts[PP - 1] < one[PP - 1]).all() or name == "weight_ns"
    numbers = 2 * 4 * -(-TOKENS // width)
    hidden = whole.transfer_bytes[0]
    assert (spread.transfer_bytes[: PP - 1] == hidden).all()
    assert (spread.transfer_bytes[PP - 1 :] == hidden + numbers).all()


def test_each_part_keeps_its_logits_the_heads_input_and_four_numbers_a_position() -> None:
    tokens = TOKENS
    whole, spread = (priced(counted(), topology) for topology in (WHOLE, HEAD))
    part = 4 * tokens * VOCAB // 2 // PP + 2 * tokens * HIDDEN + 16 * tokens
    assert (spread.stored_bytes[PP:] == part).all()
    assert (spread.working_bytes[PP:] == 2 * tokens * VOCAB // 2 // PP).all()
    gone = whole.stored_bytes[PP - 1] - spread.stored_bytes[PP - 1]
    assert (gone == 4 * tokens * (VOCAB // 2 - VOCAB // 2 // PP) - 16 * tokens).all()
    sliced = priced(counted(), HEAD, "head")
    assert (sliced.stored_bytes[PP:] == 2 * tokens * HIDDEN + 8 * tokens + 16 * tokens).all()
    recomputed = priced(counted(), HEAD, "stage")
    assert (recomputed.stored_bytes[PP:] == spread.transfer_bytes[PP - 1 :]).all()  # its input


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", ["head", "both"])
def test_every_rank_holds_the_rows_of_its_part(vocabulary: Vocabulary, tied: bool) -> None:
    """Rows over tp and pp; all ranks together hold what a model on one rank does. Of a tied model they are one copy."""
    model = replace(MODEL, tied_embeddings=tied)
    topology = split_vocabulary(WHOLE, vocabulary)
    if tied and vocabulary == "head":
        with pytest.raises(ConfigError, match="this model ties its head to it: give 'both'"):
            count_parameters(model, topology)
        return
    held = count_parameters(model, topology).total
    assert sum(held) == count_parameters(model, Topology(tp=2)).total[0]
    rows = VOCAB * HIDDEN // 2 // PP
    assert [held[stage] for stage in topology.head_stages[1:]] == [0 if tied else rows] * (PP - 1)
    if vocabulary == "both":
        assert [held[stage] for stage in topology.embedding_stages[:-1]] == [rows] * (PP - 1)
    assert count_parameters(model, topology).largest_unit[-1] == rows


def test_zero_gathers_a_part_of_the_head_and_not_all_of_it() -> None:
    whole, spread = (priced(counted(zero_stage=3), topology) for topology in (WHOLE, HEAD))
    rows = VOCAB * HIDDEN // 2 // PP
    tokens = TOKENS
    assert (spread.working_bytes[PP:] == 2 * tokens * VOCAB // 2 // PP + rows * (2 + 4)).all()
    assert (spread.working_bytes[PP - 1] < whole.working_bytes[PP - 1]).all()


@pytest.mark.parametrize("pp", [4, 8, 16])
def test_the_busiest_rank_is_near_the_even_share(pp: int) -> None:
    """Llama 3 8B in rows of 2,048: a head of 2.4 layers leaves the busiest of 8 ranks 1.16 of the mean in whole layers,
    over all ranks less than 1.01."""
    even = Topology(tp=2, pp=pp).with_layers(32)
    costs = AnalyticCosts(preset("llama-3-8b"), even, flops_per_s=400e12, layer_overhead_ns=20_000)
    last = 1 if pp == 16 else 32 // pp - 3 + (pp == 8)
    given = [(32 - last) // (pp - 1) + (stage < (32 - last) % (pp - 1)) for stage in range(pp - 1)]
    busiest = {}
    for topology in replace(even, layers_per_stage=(*given, last)), split_vocabulary(even, "head"):
        rows = costs.with_topology(topology)[0].evaluate_shapes([1], [2048])
        work = (rows.forward_ns + rows.backward_ns)[:, 0]
        by_rank = np.bincount(topology.stage_ranks, weights=work)
        busiest[topology.vocabulary] = by_rank.max() / by_rank.mean()
    assert busiest["head"] <= 1.01
    assert busiest["whole"] >= {4: 1.04, 8: 1.15, 16: 1.3}[pp]


def test_measured_parts_take_their_share_of_the_measured_head(tmp_path: Path) -> None:
    table = gpt(tmp_path)
    parameters = {**table.parameter_bytes, "head": 3e6}
    for costs in replace(table, parameter_bytes=parameters), CostTable.from_json(table.to_json()):
        topology = split_vocabulary(Topology(tp=2, pp=3, dp=2), "head")
        samples = sample_lengths([60, 64])
        whole = costs.evaluate([MicroBatch(samples)])
        spread = costs.with_topology(topology)[0].evaluate([MicroBatch(samples)])
        for name in ("forward_ns", "backward_ns", "weight_ns"):
            one, parts = getattr(whole, name)[:, 0], getattr(spread, name)[:, 0]
            assert (parts[:2] == one[:2]).all()
            assert parts.sum() == pytest.approx(one.sum(), abs=6)
            assert parts[3] == parts[4] > 0
            assert parts[2] - parts[3] == pytest.approx(int(one[2] - 3 * parts[3]), abs=6)
        tokens = 2 * 64
        assert spread.stored_bytes[3, 0] == spread.stored_bytes[4, 0] >= tokens * (2 * costs.hidden_size + 16)
        assert (spread.transfer_bytes[2:] - spread.transfer_bytes[:2] == 8 * tokens).all()
        assert spread.static_bytes.sum() == pytest.approx(whole.static_bytes.sum(), abs=5)
        assert spread.static_bytes[3] == spread.static_bytes[4] == round(costs.parameter_bytes.get("head", 0) / 3 * 5)


def test_a_measured_peak_of_the_head_is_a_parts_share_beside_its_input() -> None:
    """Stored and running MB of a head of one known point: 30 and 42 of 8 rows of 128."""
    measured = {"forward_ms": 1.0, "backward_ms": 2.0, "stored_mb": 30.0, "peak_mb": 42.0}
    grid = Grid.from_points({name: {(1, 16): value, (8, 128): value} for name, value in measured.items()})
    topology = split_vocabulary(Topology(pp=3), "head")
    table = CostTable(
        grids={("none", "encoder"): grid, ("none", "postprocess"): grid},
        parameter_bytes={"encoder": 1.0, "embedding": 1.0, "head": 9.0, "tied_head": 0.0},
        hidden_size=1000,
        num_layers=3,
        topology=topology,
    )
    costs = table.evaluate_shapes([8], [128])
    kept = 8 * 128 * (2 * 1000 + 16)
    assert costs.stored_bytes[:, 0].tolist() == [
        30_000_000,
        30_000_000,
        40_000_000 + kept,
        10_000_000 + kept,
        10_000_000 + kept,
    ]
    assert costs.working_bytes[3:, 0].tolist() == [4_000_000] * 2


def test_facts_say_where_messages_hold_more(tmp_path: Path) -> None:
    for costs in counted(), gpt(tmp_path):
        spread, _ = costs.with_topology(split_vocabulary(Topology(tp=2, pp=3, dp=2), "head"))
        for model, first in (costs, None), (spread, 2):
            form = model.facts.activation_format
            assert form is not None
            assert form.first_head_stage == first
            assert model.facts.prices_spread
    assert lay_out(MODEL.num_layers, MODEL.total_layers, HEAD).find_holders() == ({0}, {2, 3, 4})
    assert AnalyticCosts.from_json(counted(HEAD).to_json()) == counted(HEAD)


def test_who_cannot_spread_a_vocabulary_says_so(tmp_path: Path) -> None:
    pairs, table = t5(tmp_path), gpt(tmp_path)
    four = split_vocabulary(Topology(tp=2, pp=4), "head")
    odd = replace(MODEL, vocab_size=VOCAB + 2)
    tied = replace(table, parameter_bytes={**table.parameter_bytes, "tied_head": 1.0})
    lora = LoraSettings(enabled=True)
    refused: dict[str, Callable[[], object]] = {
        "a table with a decoder side does not": lambda: pairs.with_topology(four),
        "this model ties its head to it": lambda: tied.with_topology(four),
        "vocab_size 770 does not divide over tp 2 x pp 3": lambda: AnalyticCosts(odd, HEAD),
        "a model with adapters does not": lambda: price_adapters(counted(HEAD), lora, MODEL, HEAD, recipe="mixed"),
    }
    for message, make in refused.items():
        with pytest.raises(ConfigError, match=message):
            make()
