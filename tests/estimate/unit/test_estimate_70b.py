"""LLaMA-70B on 6 nodes of 4 devices of 80 GB: the question whose usual calculator gets nearly every line wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength, sample_lengths
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.batch.vocabulary_parallel import split_vocabulary
from dynapipe_ext.costs.cluster import DEVICES, Cluster
from dynapipe_ext.costs.estimated import Strategy
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.models.tensors import num_parameters
from dynapipe_ext.tools.estimate.lengths import distribution_data
from dynapipe_ext.tools.estimate.options import Limits, Question, strategy_name
from dynapipe_ext.tools.estimate.ranking import Search, estimate

LLAMA = preset("llama-2-70b")
CLUSTER = Cluster.from_device(DEVICES["a100"], nodes=6, gpus_per_node=4, gpu_memory_gb=80.0)
SEQ_LEN, BATCH, GB = 4096, 8, 1e9
ONE_BATCH = Search(tokens_per_batch=(64 * SEQ_LEN, 64 * SEQ_LEN), most_plans=12, effort=100)


def question(recipe="megatron", **limits) -> Question:
    return Question(
        architecture=LLAMA,
        name="llama-2-70b",
        cluster=CLUSTER,
        data=distribution_data("uniform:4096", LLAMA, 0),
        recipe=recipe,
        limits=Limits(**limits),
    )


def micro_batch(rows: int, recompute="none") -> MicroBatch:
    return MicroBatch(tuple(SampleLength(i, SEQ_LEN) for i in range(rows)), recompute=recompute)


@pytest.fixture(scope="module")
def answer():
    return estimate(question(offloads=("none",)), ONE_BATCH)


def test_parameters_count_grouped_queries_three_matrices_an_mlp_and_the_head():
    """64.72B without them; the published model has 68.98B."""
    assert num_parameters(LLAMA) == 68_976_648_192
    without_head = replace(LLAMA, tied_embeddings=True)
    assert num_parameters(LLAMA) - num_parameters(without_head) == 32_000 * 8192


@pytest.mark.parametrize(("zero_stage", "gigabytes"), [(0, 1103.6), (1, 310.4), (2, 178.2), (3, 46.0)])
def test_states_of_replicas_on_24_devices_are_those_of_each_zero_stage(zero_stage, gigabytes):
    answer = estimate(question("mixed", tp=(8,)), ONE_BATCH)  # which leaves no option; the states are there
    assert answer.options == ()
    assert round(answer.states_if_replicated[zero_stage] / GB, 1) == gigabytes


def test_megatron_keeps_18_bytes_a_parameter_or_6_and_12_over_the_replicas():
    """Not 16: gradients are summed in fp32."""
    none, first = estimate(question(tp=(8,)), ONE_BATCH).states_if_replicated[:2]
    assert none == 18 * num_parameters(LLAMA)
    assert first == pytest.approx((6 + 12 / 24) * num_parameters(LLAMA), rel=1e-9)


def test_activations_under_full_recomputation_are_bytes_and_not_their_root():
    """2 s b h L: 42.9 GB for 8 rows."""
    costs = question().costs(Strategy(topology=Topology()), "padded")
    priced = costs.evaluate([micro_batch(BATCH, "full")])
    layers = int(priced.stored_bytes[0, 0] - costs.count_head_bytes([micro_batch(BATCH, "full")])[0, 0])
    assert layers == 2 * SEQ_LEN * BATCH * 8192 * 80
    assert round(layers / GB, 1) == 42.9


def test_logits_are_counted():
    """fp32 probabilities of 32,000 words: 4.2 GB for 8 rows, kept, and once more in 16 bits while they run."""
    costs = question().costs(Strategy(topology=Topology()), "padded")
    batch = [micro_batch(BATCH)]
    logits = SEQ_LEN * BATCH * 32_000
    assert costs.count_head_bytes(batch)[0, 0] == 4 * logits + 2 * 2 * SEQ_LEN * BATCH * 8192
    assert costs.evaluate(batch).working_bytes[0, 0] >= 2 * logits


def test_attention_flops_are_counted():
    """The forward of one row is its products with weights and causal attention, 2 s^2 h a layer."""
    q = question()
    costs = q.costs(Strategy(topology=Topology()), "padded")
    flops = float(costs.base.evaluate([micro_batch(1)]).forward_ns[0, 0]) / 1e9 * CLUSTER.flops_per_s("bf16")
    weights = (num_parameters(LLAMA) - 32_000 * 8192 - 8192 * 161) * 2 * SEQ_LEN  # neither embedding nor norms
    attention = 80 * 2 * SEQ_LEN**2 * 8192
    assert flops - 80 * 20e-6 * CLUSTER.flops_per_s("bf16") == pytest.approx(weights + attention, rel=1e-6)
    assert attention / weights > 0.03


def test_every_stage_of_tp4_pp6_holds_what_its_layers_take():
    """16 bytes x 68.98B / 24 = 46.0 GB on average; 46.7 where the first stage has its share of layers, a sixth of 80,
    and the embedding; whole layers make it 44.5 to 47.9."""
    strategy = Strategy(topology=Topology(tp=4, pp=6, layers_per_stage=(13, 13, 13, 14, 14, 13)))
    held = question("mixed").costs(strategy, "padded").states.device.total / GB
    assert round(float(held.mean()), 1) == 46.0
    embedding = 32_000 * 8192
    layer = (num_parameters(LLAMA) - 2 * embedding - 8192) / 80
    assert round(16 * (80 / 6 * layer + embedding) / 4 / GB, 1) == 46.7
    assert [round(float(gigabytes), 1) for gigabytes in held] == [45.6, 44.5, 44.5, 47.9, 47.9, 45.6]


def test_nothing_is_recommended_that_does_not_fit(answer):
    """The calculator recommends 97.7 GB on a card of 80."""
    assert answer.options
    for option in answer.options:
        assert option.peak_bytes <= 80 * GB
        assert all(stage.total <= 80 * GB for stage in option.memory)
    reasons = " ".join(answer.dropped.lines())
    assert "weights and states alone do not fit (closest: " in reasons
    assert "tp does not divide the 4 devices of a node" in reasons


def test_zero_3_is_planned_with_its_activations_and_its_gathered_layer():
    """46.0 GB of states at 16 bytes leave room for few rows, and none without recomputation beyond those."""
    found = estimate(
        question("mixed", tp=(1,), pp=(1,), zero_stages=(3,), offloads=("none",)),
        ONE_BATCH,
    )
    assert found.options
    for option in found.options:
        (stage,) = option.memory
        assert round((stage.weights + stage.gradients + stage.optimizer) / GB, 1) == 46.0
        layer = int(count_parameters(LLAMA, Topology()).largest_unit[0])
        assert stage.buffers == 4 * layer  # its weights and gradients, 2 bytes each
        assert stage.activations > 0
        assert stage.logits > 0


def test_step_times_hold_the_bubble_and_the_exchanges(answer):
    for option in answer.options:
        assert option.time.pipeline_s >= option.lower_bound_s
        if option.strategy.topology.pp > 1:
            assert option.bubble_ratio > 0.0
        if option.strategy.topology.dp > 1 and option.strategy.zero_stage < 2:
            assert option.time.exchange_s > 0
        assert option.time.optimizer_s > 0
        assert option.tokens_per_s == pytest.approx(option.real_tokens / option.time.total_s)
        assert 0 < option.mfu < CLUSTER.efficiency


def test_the_fastest_without_offload_is_tp4_pp6(answer):
    best = answer.options[0]
    assert strategy_name(best.strategy) == "tp 4 x pp 6 x dp 1"
    assert sum(best.costs.layers_per_stage) == 80
    assert best.costs.layers_per_stage.tolist()[0] == 13  # the stage with most in flight has no layer too many


def test_options_are_ranked_and_the_answer_is_a_pure_function_of_the_question(answer):
    rates = [option.tokens_per_s for option in answer.options]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[0] >= 0.95 * max(rates)
    few = question(offloads=("none",), tp=(4,), recomputes=("none", "auto"))
    once, again = estimate(few, ONE_BATCH), estimate(few, ONE_BATCH)
    assert [o.tokens_per_s for o in again.options] == [o.tokens_per_s for o in once.options]
    assert again.dropped.lines() == once.dropped.lines()


def test_memory_by_part_is_the_peak_that_the_planner_proved(answer):
    """Stage by stage, without what is reserved."""
    from dynapipe_ext.schedules.planner import Planner
    from dynapipe_ext.tools.estimate.memory import planned_memory

    option = answer.options[0]
    planner = Planner(
        option.costs.topology,
        option.costs,
        CLUSTER.limit_bytes,
        effort=0,
        recompute=option.candidate.recompute,
    )
    plan = planner.plan(question().data.batch(option.tokens_per_batch, 0), step=0)
    peaks = np.max([prediction.peak_bytes for prediction in plan.predictions], axis=0)
    assert [stage.total for stage in planned_memory(plan, option.costs, 0)] == peaks.tolist()


def test_an_estimate_counts_the_head_on_every_stage_that_has_a_part() -> None:
    topology = split_vocabulary(Topology(pp=4).with_layers(80), "head")
    whole, spread = (
        question().costs(Strategy(topology=one), "padded") for one in (Topology(pp=4).with_layers(80), topology)
    )
    batch = [MicroBatch(sample_lengths([512]))]
    assert (spread.count_head_bytes(batch)[3:] > 0).all()
    assert not spread.count_head_bytes(batch)[:3].any()
    held = [costs.evaluate(batch).static_bytes for costs in (whole, spread)]
    assert held[0].sum() == held[1].sum()
    assert held[1].max() < held[0].max()
