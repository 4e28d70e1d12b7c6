"""Stages per rank and context parallelism as dimensions of an estimate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynapipe_ext.batch.topology import Topology, place_stages
from dynapipe_ext.costs.cluster import DEVICES, Cluster
from dynapipe_ext.costs.estimated import Strategy
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.models.tensors import num_parameters
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.estimate import ranking
from dynapipe_ext.tools.estimate.answer import advice, settings
from dynapipe_ext.tools.estimate.lengths import LengthData, distribution_data
from dynapipe_ext.tools.estimate.memory import planned_memory
from dynapipe_ext.tools.estimate.options import Dropped, Limits, Question, placed_otherwise, spreads, train_fault
from dynapipe_ext.tools.estimate.ranking import Search, estimate

QUICK = Search(tokens_per_batch=(1, 1 << 17), most_plans=6, effort=50)
V = Topology(tp=2, pp=2, dp=2, placement=place_stages("v", 2))


def question(name="llama-3.2-1b", *, gpus=8, lengths="uniform:2048", **limits) -> Question:
    a = preset(name)
    cluster = Cluster.from_device(DEVICES["h100"], gpus_per_node=gpus)
    return Question(
        architecture=a,
        name=name,
        cluster=cluster,
        data=distribution_data(lengths, a, 0),
        limits=Limits(offloads=("none",), **limits),
    )


def spread_names(q: Question) -> set[tuple[int, str]]:
    return {(s.topology.pp, s.topology.placement_name) for s in spreads(q, Dropped())}


def placed_names(q: Question) -> set[tuple[int, str]]:
    linear = spreads(q, Dropped())
    placed = (p for s in linear for p in placed_otherwise(q, s, Dropped()))
    return {(s.topology.pp, s.topology.placement_name) for s in placed}


def test_placements_are_those_that_are_asked_for_and_that_layers_fill():
    assert {name for _, name in spread_names(question())} == {"linear"}
    every = placed_names(question())
    two = {name for pp, name in every if pp == 2}  # 16 layers: 8 of a rank
    assert two == {f"interleaved, {n} stages a rank" for n in (2, 4, 8)} | {f"v, {n} stages a rank" for n in (2, 4)}
    assert not {name for pp, name in every if pp == 1}
    assert {name for pp, name in every if pp == 8} == {"v, 2 stages a rank", "interleaved, 2 stages a rank"}
    assert {name for _, name in spread_names(question(placement="v"))} == {"v, 2 stages a rank"}
    assert not placed_names(question("t5-base", lengths=""))


def test_pipelines_of_several_stages_a_rank_are_searched_unasked_and_come_first_where_they_are_faster():
    limits = {"tp": (1,), "pp": (8,), "zero_stages": (0,), "recomputes": ("full",)}
    search = Search(tokens_per_batch=(8 * 4096, 8 * 4096), effort=50)
    best = {}
    for placement in ("auto", "linear"):
        q = question("llama-2-70b", gpus=8, lengths="uniform:4096", placement=placement, **limits)
        q = replace(q, cluster=replace(q.cluster, gpu_memory_gb=400.0))
        best[placement] = estimate(q, search).options[0]
    assert best["auto"].strategy.topology.placement
    assert best["auto"].tokens_per_s > 1.1 * best["linear"].tokens_per_s


def test_what_train_runs_comes_first_even_where_other_ways_are_faster():
    """405B on 16,384 devices: ZeRO 3 over all has no bubble, but nothing here runs it."""
    q = question("llama-3.1-405b", lengths="uniform:8192", tp=(8,), pp=(1, 16), zero_stages=(1, 3))
    q = replace(q, cluster=replace(q.cluster, nodes=2048))
    options = estimate(
        q, Search(tokens_per_batch=(1 << 24, 1 << 24), most_samples=4096, most_plans=8, effort=0)
    ).options
    faults = [bool(train_fault(q, option.strategy)) for option in options]
    assert faults == sorted(faults)
    assert {False, True} == set(faults)
    assert options[0].num_samples == 2048


_UNEQUAL = "lognormal:700,1,4096"


@pytest.mark.parametrize(("dp", "lengths"), [(64, "uniform:2048"), (64, _UNEQUAL), (61, _UNEQUAL), (1, "uniform:512")])
def test_some_replicas_tell_of_all(dp, lengths, monkeypatch):
    """A step of as many samples, as long and as short, takes what all replicas together take."""
    q = question(
        "gpt2" if lengths.startswith("uniform:512") else "llama-3.2-1b", lengths=lengths, pp=(1,), zero_stages=(0,)
    )
    q = replace(
        q,
        cluster=Cluster.from_device(DEVICES["h100"], nodes=dp, gpus_per_node=1),
        limits=replace(q.limits, zero_stages=(0,)),
    )
    search = Search(tokens_per_batch=(dp * 16_384, dp * 16_384), most_samples=1 << 14, most_plans=1, effort=0)
    few = estimate(q, search).options[0]
    monkeypatch.setattr(ranking, "_MOST_REPLICAS", dp)
    monkeypatch.setattr(LengthData, "is_uniform", False)
    same = ranking.planned(q, few.candidate, few.tokens_per_batch, few.effort, 1 if "uniform" in lengths else 2)
    assert few.num_samples == same.num_samples
    assert few.time.total_s == pytest.approx(same.time.total_s, rel=0.03)
    assert few.mfu == pytest.approx(same.mfu, rel=0.03)


def test_a_placed_option_is_trained_where_it_was_estimated():
    q = question(placement="v", tp=(2,), pp=(2,), zero_stages=(0,))
    best = estimate(q, QUICK).options[0]
    assert best.strategy.topology.placement == V.placement
    assert not train_fault(q, best.strategy)
    config = TrainConfig.from_json(settings(q, best), "the estimate")
    assert topology_of(config) == best.strategy.topology.with_layers(q.architecture.num_layers)


@pytest.mark.parametrize("placement", [(), *(place_stages(name, 2) for name in ("interleaved", "v"))])
def test_the_memory_of_ranks_with_several_stages_is_what_the_planner_keeps_to(placement):
    q = question(lengths="lognormal:700,1,4096")
    costs = q.costs(Strategy(topology=replace(V, placement=placement)), "padded")
    samples = q.data.batch(60_000, 0)
    plan = Planner(costs.topology, costs, q.cluster.limit_bytes, 0, pad_multiple=8, effort=50).plan(samples)
    memory = planned_memory(plan, costs, reserved_bytes=0)
    peaks = np.array([prediction.peak_bytes for prediction in plan.predictions])
    assert [m.total for m in memory] == peaks.max(axis=0).tolist()


def test_tied_embeddings_that_a_v_puts_on_one_rank_are_one():
    a = preset("llama-3.2-1b")
    assert a.tied_embeddings
    embedding = a.vocab_size * a.hidden_size
    for name, copies in (("v", 0), ("interleaved", 1)):
        placed = Topology(pp=2, placement=place_stages(name, 2))
        assert count_parameters(a, placed).total.sum() == num_parameters(a) + copies * embedding


def test_context_parallel_ranks_share_rows_and_hold_the_same_weights():
    q = question()
    one, two = (q.costs(Strategy(topology=Topology(pp=2, dp=2), zero_stage=1, cp=cp), "padded") for cp in (1, 2))
    whole, half = (costs.evaluate_shapes([1, 4], [4096, 1024]) for costs in (one, two))
    np.testing.assert_array_equal(half.stored_bytes * 2, whole.stored_bytes)
    np.testing.assert_array_equal(half.transfer_bytes * 2, whole.transfer_bytes)
    assert (half.forward_ns < whole.forward_ns).all()
    assert (half.forward_ns * 2 > whole.forward_ns).all()  # keys and values are gathered
    np.testing.assert_array_equal(one.states.device.weights, two.states.device.weights)
    np.testing.assert_array_equal(one.states.device.optimizer, two.states.device.optimizer * 2)
    assert one.fingerprint() != two.fingerprint()


def test_a_sample_that_no_rank_holds_fits_over_several_which_training_joins():
    q = question("llama-3-8b", gpus=8, lengths="uniform:524288", recomputes=("none", "selective"), placement="linear")
    search = Search(tokens_per_batch=(1, 1 << 19), most_plans=3, effort=0)
    alone = estimate(q, search)
    assert not alone.options
    assert "--cp 2,4,8" in " ".join(advice(alone))
    q = replace(q, cluster=replace(q.cluster, nodes=8), limits=replace(q.limits, cp=(8,)))
    options = estimate(q, search).options
    assert {option.strategy.cp for option in options} == {8}
    for option in options:
        t = option.strategy.topology
        assert t.tp * t.pp * t.dp * 8 == q.cluster.world_size
        assert option.peak_bytes <= 80e9
        topology = TrainConfig.from_json(settings(q, option), "the estimate").topology
        assert (topology.context_parallel, topology.dp) == (8, 8 * t.dp)


def test_context_parallelism_is_dropped_by_name_where_attention_cannot_be_divided():
    for name, said in (("gemma-2-2b", "stores its scores"), ("t5-base", "stores its scores")):
        dropped = Dropped()
        assert {s.cp for s in spreads(question(name, lengths="", cp=(1, 2)), dropped)} == {1}
        assert any(said in reason for reason in dropped.counts)
    q = question("gpt2", lengths="lognormal:300,1,1024", cp=(2,))
    assert "packed" in {option.candidate.layout for option in estimate(q, QUICK).options}
    cpu = replace(q, cluster=Cluster.from_device(DEVICES["cpu"], gpus_per_node=4))
    dropped = Dropped()
    assert not list(spreads(cpu, dropped))
    assert any("without fused attention" in reason for reason in dropped.counts)
