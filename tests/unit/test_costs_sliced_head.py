"""Costs of a head in slices of positions, and plans that take them where memory is short."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import (
    ALL_RECOMPUTES,
    HEAD_SLICE,
    RECOMPUTES,
    MicroBatch,
    SampleLength,
    recompute_of_layers,
    slices_head,
)
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.flops import Work, step_flops, work_of
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.planner import Planner
from tests.support.priced import list_values

LLAMA = preset("llama-3-8b")
WHOLE = AnalyticCosts(LLAMA, Topology(tp=2, pp=4), sequence_parallel=True, split_backward=True)
SLICED = replace(WHOLE, head_slice=HEAD_SLICE)
PAIRS = AnalyticCosts(
    overhead_ns=0, architecture=Architecture.t5(
        num_layers=4, num_decoder_layers=4, hidden_size=64, num_heads=4, ffn_hidden_size=128, vocab_size=32_000,
        max_seq_len=4096, tied_embeddings=True, gated_mlp=False,
    ),
    topology=Topology(pp=2), flops_per_s=1e12, head_slice=HEAD_SLICE,
)  # fmt: skip
ROW = 32 * 1024


def one(tokens: int, kind: str, decoder: int = 0) -> list[MicroBatch]:
    return [MicroBatch((SampleLength(0, tokens, decoder),), "padded", kind)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [kind for kind in ALL_RECOMPUTES if slices_head(kind)])
def test_the_last_stage_computes_its_head_again_and_keeps_no_logits(kind):
    whole = SLICED.evaluate(one(ROW, recompute_of_layers(kind)))
    sliced = SLICED.evaluate(one(ROW, kind))
    head_ns = round(2 * LLAMA.vocab_size * LLAMA.hidden_size // 2 * ROW * 1e9 / SLICED.flops_per_s)
    assert np.array_equal(sliced.forward_ns, whole.forward_ns)
    assert np.array_equal(sliced.backward_ns[:-1], whole.backward_ns[:-1])
    assert sliced.backward_ns[-1, 0] - whole.backward_ns[-1, 0] == pytest.approx(head_ns, abs=2)
    has_weights = recompute_of_layers(kind) in ("none", "selective")
    assert whole.weight_ns[-1, 0] - sliced.weight_ns[-1, 0] == pytest.approx(head_ns * has_weights, abs=2)
    assert np.array_equal(sliced.stored_bytes[:-1], whole.stored_bytes[:-1])
    logits = 4 * LLAMA.vocab_size // 2 * ROW
    kept = 0 if kind == "head+stage" else logits - 8 * ROW
    assert whole.stored_bytes[-1, 0] - sliced.stored_bytes[-1, 0] == kept


def test_all_bytes_of_logits_of_a_row_of_32k_tokens_are_an_eighth_or_less():
    """Beside what both have, the inputs and gradients of the head."""
    none, sliced = (SLICED.evaluate(one(ROW, kind)) for kind in ("none", "head"))
    width, columns = SLICED.activation_bytes_per_value, LLAMA.vocab_size // 2
    whole_logits = (4 + width) * columns * ROW
    of_slices = (4 + width) * columns * HEAD_SLICE + 8 * ROW
    assert none.stored_bytes[-1, 0] - sliced.stored_bytes[-1, 0] > 7 / 8 * 4 * columns * ROW
    assert of_slices < whole_logits / 8


def test_a_head_of_no_more_positions_than_a_slice_is_whole():
    for costs, decoder in ((SLICED, 0), (PAIRS, HEAD_SLICE)):
        whole, sliced = (costs.evaluate(one(HEAD_SLICE, kind, decoder)) for kind in ("none", "head"))
        assert list_values(whole) == list_values(sliced)
        longer = [costs.evaluate(one(2 * HEAD_SLICE, kind, 2 * decoder)) for kind in ("full", "head+full")]
        assert longer[1].stored_bytes[-1, 0] < longer[0].stored_bytes[-1, 0]


def test_shapes_as_arrays_cost_what_micro_batches_cost():
    for costs, decoder in ((SLICED, 0), (PAIRS, 1500)):
        for kind in ALL_RECOMPUTES:
            arrays = costs.evaluate_shapes([1], [3000], [decoder], kind)
            assert list_values(arrays) == list_values(costs.evaluate(one(3000, kind, decoder))), kind


def test_costs_without_slices_refuse_them_and_are_written_as_before():
    with pytest.raises(PlanError, match="no price for a head in slices"):
        WHOLE.evaluate(one(ROW, "head"))
    assert "head_slice" not in WHOLE.to_json()
    assert "head_slice" not in replace(PAIRS, head_slice=0).to_json()
    assert not WHOLE.facts.slices_head
    for costs in (SLICED, PAIRS):
        again = cost_model_from_json(cost_model_to_json(costs))
        assert again.fingerprint() == costs.fingerprint() != replace(costs, head_slice=0).fingerprint()
    with pytest.raises(ConfigError, match="head_slice is -1"):
        replace(WHOLE, head_slice=-1)


def planned(costs: AnalyticCosts, lengths: list[int], limit_gb: float, **options):
    planner = Planner(costs.topology, costs, limit_gb * 1e9, layout="packed", effort=200, **options)
    return planner.plan(lengths)


def test_plans_are_equal_where_nothing_is_recomputed_for_want_of_memory():
    lengths = [500, 1800, 3000, 700, 2500, 1200]
    plans = [planned(costs, lengths, 200) for costs in (WHOLE, SLICED)]
    assert plans[0].batch == plans[1].batch
    assert plans[0].schedules == plans[1].schedules
    assert {m.recompute for m in plans[1].batch.micro_batches} == {"none"}


def test_plans_of_little_memory_have_heads_in_slices_and_end_earlier_or_hold_what_whole_logits_cannot():
    costs = replace(WHOLE, split_backward=False), replace(SLICED, split_backward=False)
    lengths = [60_000, 40_000, 50_000]
    whole, sliced = (planned(one, lengths, 62) for one in costs)
    assert {m.recompute for m in whole.batch.micro_batches} - {"none"}
    assert any(slices_head(m.recompute) for m in sliced.batch.micro_batches)
    assert sliced.makespan_ns < whole.makespan_ns
    assert max(sliced.peak_bytes, whole.peak_bytes) <= 62e9
    assert sliced.lower_bound_s <= sliced.makespan_s
    with pytest.raises(PlanError):
        planned(costs[0], [250_000], 72)
    alone = planned(costs[1], [250_000], 72)
    assert [m.recompute for m in alone.batch.micro_batches] == ["head+full"]


def test_room_that_is_reserved_later_keeps_micro_batches_with_heads_in_slices():
    costs = replace(SLICED, split_backward=False)
    planner = Planner(costs.topology, costs, 62e9, effort=200, schedule="adaptive")
    plan = planner.plan([60_000, 40_000, 50_000])
    again = planner.replan(plan, [60_000, 40_000, 50_000], reserve_bytes=10**9)
    assert again.peak_bytes <= 61e9


def test_flops_count_the_head_again_where_it_has_more_positions_than_a_slice():
    short, long = MicroBatch((SampleLength(0, HEAD_SLICE),)), MicroBatch((SampleLength(0, HEAD_SLICE + 1),))
    for kind in RECOMPUTES:
        sliced = kind.replace("none", "head") if kind == "none" else f"head+{kind}"
        counted = {}
        for m in (short, long):
            works = [work_of([replace(m, recompute=name)]) for name in (kind, sliced)]
            counted[m.encoder_len] = [step_flops(LLAMA, work).recompute for work in works]
            numbers = [Work.from_numbers(work.numbers()) for work in works]
            assert numbers == works
        whole, in_slices = counted[HEAD_SLICE + 1]
        assert in_slices - whole == 2 * LLAMA.vocab_size * LLAMA.hidden_size * (HEAD_SLICE + 1)
        assert len(set(counted[HEAD_SLICE])) == 1
