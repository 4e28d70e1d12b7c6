"""What a micro-batch costs on one rank of a block: counted by hand, and refused where it cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.adjustments import FittedTimes, FrozenWeights, TimeCorrection, adjust
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.blocks import BlockAttention
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.costs.model import CostModel, as_cost_model
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.planner import Planner
from tests.support.priced import list_values

GPT = Architecture.gpt(
    num_layers=4, hidden_size=64, num_heads=8, num_query_groups=4, ffn_hidden_size=96, gated_mlp=True, vocab_size=512,
    max_seq_len=128, tied_embeddings=True, position="rope", norm="rmsnorm", bias=False,
)  # fmt: skip
HEAD = 8  # values of a head
ROW = MicroBatch((SampleLength(0, 96), SampleLength(1, 32)), "packed", pad_multiple=8)
LINKS = Links(intra=Link(1_000, 1e9), inter=Link(50_000, 1e8), ranks_per_node=8)


def counted(dp: int = 8, width: int = 1, **options: Any) -> AnalyticCosts:
    options = {"flops_per_s": 1e9, "overhead_ns": 7_000, "layer_overhead_ns": 300, "width_tax": 0.0, **options}
    return AnalyticCosts(GPT, Topology(tp=2, pp=2, dp=dp, width=width), **options)


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "stage"])
def test_overheads_and_states_stay_and_all_else_is_divided(recompute: Any) -> None:
    one, two = (counted(width=w).evaluate([replace(ROW, recompute=recompute)]) for w in (1, 2))
    overhead = 7_000 + 2 * 300
    again = overhead if recompute == "stage" else 0  # a stage runs its whole forward again
    np.testing.assert_allclose(2 * (two.forward_ns - overhead), one.forward_ns - overhead, atol=4)
    np.testing.assert_allclose(2 * (two.backward_ns - overhead - again), one.backward_ns - overhead - again, atol=8)
    np.testing.assert_allclose(2 * two.weight_ns, one.weight_ns, atol=4)
    np.testing.assert_array_equal(2 * two.transfer_bytes, one.transfer_bytes)
    np.testing.assert_array_equal(2 * two.stored_bytes, one.stored_bytes)
    np.testing.assert_array_equal(two.static_bytes, one.static_bytes)


def test_a_tax_stands_for_exchanges_that_no_links_count() -> None:
    free, taxed = (counted(width=2, width_tax=tax).evaluate([ROW]) for tax in (0.0, 0.25))
    overhead = 7_000 + 2 * 300
    np.testing.assert_allclose(taxed.forward_ns - overhead, 1.25 * (free.forward_ns - overhead), atol=1)
    np.testing.assert_allclose(taxed.backward_ns - overhead, 1.25 * (free.backward_ns - overhead), atol=1)
    assert list_values(counted(width_tax=0.25).evaluate([ROW])) == list_values(counted().evaluate([ROW]))


@pytest.mark.parametrize(
    ("width", "heads", "gathers", "key_heads"), [(2, 2, 1, 1), (4, 4, 1, 1), (8, 4, 2, 1), (16, 4, 4, 1)]
)
def test_heads_are_divided_first_and_keys_and_values_gathered_over_the_rest(
    width: int, heads: int, gathers: int, key_heads: int
) -> None:
    """On each of 2 tensor parallel ranks: 4 query heads, 2 key heads."""
    block = BlockAttention.from_architecture(GPT, Topology(tp=2, dp=16, width=width))
    assert (block.head_ranks, block.gather_ranks, block.kept_values) == (heads, gathers, 2 * key_heads * HEAD)
    # Of 16 positions a rank has 16 / width. It attends with as many queries in all as it has, of other positions, and
    # what they attend to returns; keys and values of its heads come of all positions that it does not have.
    queries = 2 * (16 / width) * 4 * HEAD * (width - 1) / width
    keys = (16 - 16 / width) * 2 * key_heads * HEAD
    assert 16 * block.exchanged_values == pytest.approx(queries + keys)
    assert 16 * block.copied_values == pytest.approx(16 * 2 * key_heads * HEAD - (16 / width) * 2 * 2 * HEAD)


@pytest.mark.parametrize(("width", "count", "link"), [(4, 2, LINKS.intra), (8, 3, LINKS.inter)])
def test_exchanges_take_the_slowest_link_of_the_block_forwards_backwards_and_again(
    width: int, count: int, link: Link
) -> None:
    """Nodes have 8 ranks: 4 data parallel ones of 2 tensor parallel ones each."""
    free, linked = (counted(width=width, links=links) for links in (None, LINKS))
    block, tokens, layers, values = BlockAttention.from_architecture(GPT, linked.topology), 128, 2, 2
    time_ns = layers * (count * link.latency_ns + tokens * values * block.exchanged_values / link.bytes_per_s * 1e9)
    for recompute, times in (("none", 1), ("selective", 2), ("full", 2), ("stage", 2)):
        row = [replace(ROW, recompute=recompute)]
        a, b = free.evaluate(row), linked.evaluate(row)
        np.testing.assert_allclose(b.forward_ns - a.forward_ns, time_ns, atol=1)
        np.testing.assert_allclose(b.backward_ns - a.backward_ns, times * time_ns, atol=2)


def test_carried_keys_lie_by_heads_with_all_positions() -> None:
    rows = [MicroBatch((SampleLength(0, 64, start=64 * i),), "packed", attention="carried") for i in range(2)]
    whole = [MicroBatch((SampleLength(i, 64),), "packed") for i in range(2)]
    for width, kept in ((2, 2 * HEAD), (4, 2 * HEAD), (8, 2 * HEAD)):  # 2 key heads a rank of tp, then one
        costs = counted(width=width)
        more = costs.evaluate(rows).stored_bytes - costs.evaluate(whole).stored_bytes
        buffers = 2 * kept * 128 + 4 * kept * 64  # keys and values of all, sums of gradients of those before the last
        np.testing.assert_array_equal(more[:, 0], 2 * (buffers - 2 * kept * 64))
        np.testing.assert_array_equal(more[:, 1], -2 * 2 * kept * 64)


def test_copies_of_key_heads_are_kept_by_each_rank_that_has_them() -> None:
    """2 key heads on a rank of tp, 4 head ranks: each has its 32 positions' keys for 4 heads' worth of positions."""
    one, four = (counted(width=w).evaluate([ROW]).stored_bytes for w in (1, 4))
    np.testing.assert_array_equal(4 * four - one, 2 * 2 * (4 - 2) * 2 * HEAD * 128)


def test_gathered_keys_and_values_are_kept_and_need_room_for_what_is_sent_and_their_gradients() -> None:
    apart, gathered = (counted(width=w).evaluate([ROW]) for w in (4, 8))
    keys_and_values = 2 * (2 * HEAD) * 128  # bytes, of all positions of one key head
    np.testing.assert_array_equal(gathered.working_bytes - 2 * keys_and_values, -(-apart.working_bytes // 2))
    more = {4: 2 * HEAD - 4 * HEAD // 4, 8: 2 * HEAD - 4 * HEAD // 8}  # values a position, beyond a slice's
    copies = {width: 2 * 2 * values * 128 for width, values in more.items()}  # bytes, of two layers
    np.testing.assert_array_equal(gathered.stored_bytes - copies[8], (apart.stored_bytes - copies[4]) // 2)


@pytest.mark.parametrize("costs", [TokenCosts(2, ns_per_token_squared=3.0), counted(dp=4), counted(dp=4, links=LINKS)])
def test_costs_at_a_width_come_back_from_json_and_at_width_1_are_written_as_before(costs: CostModel) -> None:
    assert '"width":' not in json.dumps(cost_model_to_json(costs))
    wide = costs.at_width(2)
    assert wide.facts.width == 2
    assert wide.fingerprint() != costs.fingerprint()
    again = cost_model_from_json(cost_model_to_json(wide))
    assert again == wide
    assert again.at_width(1) == costs


def test_adjustments_are_of_a_rank_s_share() -> None:
    frozen = adjust(counted(), frozen=FrozenWeights((0.0, 0.0), token_bytes=(100, 100)))
    fitted = adjust(counted(), fitted=FittedTimes(({"F": TimeCorrection(1.0, 0, 50)},) * 2))
    for costs, name, more in ((frozen, "stored_bytes", 100), (fitted, "forward_ns", 50)):
        for width in (1, 4):
            got = getattr(costs.at_width(width).evaluate([ROW]), name)
            np.testing.assert_array_equal(
                got - getattr(counted(width=width).evaluate([ROW]), name), more * 128 // width
            )


def test_costs_that_do_not_know_what_attention_exchanges_are_refused_by_name() -> None:
    class Own:
        num_stages = 2

        def evaluate(self, micro_batches: Any) -> Any: ...

        def fingerprint(self) -> str:
            return ""

    costs = as_cost_model(Own())
    assert costs.at_width(1) is costs
    with pytest.raises(ConfigError, match="Own do not say what attention exchanges"):
        costs.at_width(2)


PAIRS = [MicroBatch((SampleLength(0, 90, 30, 30), SampleLength(1, 20, 18, 18)), "packed", pad_multiple=4)]
T5 = AnalyticCosts(
    overhead_ns=0,
    architecture=preset("t5-small").padded(),
    topology=Topology(tp=2, pp=4, dp=8),
    flops_per_s=1e9,
    width_tax=0.0,
)


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "stage"])
def test_two_sides_are_divided_over_joined_ranks_in_all_but_weights(recompute: Any) -> None:
    """Four heads on each of two tensor parallel ranks."""
    pairs = [replace(PAIRS[0], recompute=recompute)]
    one, four = (T5.at_width(width).evaluate(pairs) for width in (1, 4))
    for name in ("forward_ns", "backward_ns", "weight_ns"):
        np.testing.assert_allclose(4 * getattr(four, name), getattr(one, name), atol=8)
    np.testing.assert_array_equal(4 * four.transfer_bytes, one.transfer_bytes)
    np.testing.assert_allclose(4 * four.stored_bytes, one.stored_bytes, rtol=1e-4)
    np.testing.assert_allclose(4 * four.working_bytes, one.working_bytes, rtol=1e-4, atol=16)
    np.testing.assert_array_equal(four.static_bytes, one.static_bytes)
    taxed = replace(T5, width_tax=0.25).at_width(4).evaluate(pairs)
    np.testing.assert_allclose(taxed.forward_ns, 1.25 * four.forward_ns, atol=2)
    np.testing.assert_array_equal(taxed.weight_ns, four.weight_ns)


def test_a_width_that_does_not_divide_the_heads_of_two_sides_is_refused_and_no_step_tries_it() -> None:
    assert T5.facts.priced_widths == (1, 2, 4)
    with pytest.raises(ConfigError, match=r"degree 8 does not divide the 4 heads .* take one of 1, 2, 4"):
        T5.at_width(8)
    again = cost_model_from_json(cost_model_to_json(T5.at_width(2)))
    assert again == T5.at_width(2)
    assert '"width' not in json.dumps(cost_model_to_json(replace(T5, width_tax=0.1)))


def test_steps_of_pairs_take_the_width_that_ends_first() -> None:
    costs = replace(T5, width_tax=0.1, flops_per_s=1e12)
    options: dict[str, Any] = {"layout": "packed", "effort": 100, "pad_multiple": 2}
    planner = Planner(T5.topology, costs, 10**12, widths=(1, 2, 4), **options)
    long = [SampleLength(0, 4000, 200, 200), *(SampleLength(i, 40, 20, 20) for i in range(1, 12))]
    short = [SampleLength(i, 60, 30, 30) for i in range(64)]
    plans = [planner.plan(samples) for samples in (long, short)]
    assert [plan.width for plan in plans] == [4, 1]
    fixed = [Planner(T5.topology.at_width(w), costs.at_width(w), 10**12, **options).plan(long) for w in (1, 2, 4)]
    assert plans[0].makespan_ns <= min(plan.makespan_ns for plan in fixed)
