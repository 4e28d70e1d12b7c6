"""The search of an estimate: what it drops and why, what it chooses, and what it says of data."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.cluster import DEVICES, Cluster
from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.estimate import ranking
from dynapipe_ext.tools.estimate.answer import Prices, advice, settings, show_estimate
from dynapipe_ext.tools.estimate.lengths import distribution_data, file_data
from dynapipe_ext.tools.estimate.options import Dropped, Limits, Question, balanced_layers, spreads
from dynapipe_ext.tools.estimate.ranking import Search, estimate, tokens_bounds

QUICK = Search(tokens_per_batch=(1, 1 << 16), most_plans=4, effort=0)


def question(name="llama-3.2-1b", *, nodes=1, gpus=8, memory=80.0, lengths="uniform:2048", **limits) -> Question:
    a = preset(name)
    return Question(
        architecture=a,
        name=name,
        cluster=Cluster.from_device(DEVICES["h100"], nodes=nodes, gpus_per_node=gpus, gpu_memory_gb=memory),
        data=distribution_data(lengths, a, 0),
        limits=Limits(**{"placement": "linear"} | limits),
    )


def reasons(q: Question) -> tuple[set[tuple[int, int, int, int, str, int]], Dropped]:
    dropped = Dropped()
    found = set()
    for s in spreads(q, dropped):
        t = s.topology
        found.add((t.tp, t.pp, t.dp, s.zero_stage, s.offload, s.ep))
    return found, dropped


def test_every_spread_uses_every_device_and_divides_the_model():
    found, dropped = reasons(question("gpt2-xl", nodes=3, gpus=4, lengths="uniform:1024"))
    assert {tp * pp * dp for tp, pp, dp, *_ in found} == {12}
    assert {tp for tp, *_ in found} == {1}  # 25 heads
    assert dropped.counts["tp does not divide num_heads 25"] == 2
    assert dropped.counts["tp does not divide the 4 devices of a node"] == 3  # 3, 6, 12


def test_zero_stages_come_with_and_without_offload_and_not_where_they_cannot_work():
    found, dropped = reasons(question(gpus=4))
    alone = {(zero, offload) for tp, pp, dp, zero, offload, _ in found if (tp, pp, dp) == (1, 1, 4)}
    assert alone == {(z, o) for z in range(4) for o in ("none", "optimizer")} | {(3, "all")}
    assert {zero for _, pp, _, zero, *_ in found if pp > 1} == {0, 1}
    assert {zero for _, _, dp, zero, *_ in found if dp == 1} == {0}
    assert any("ZeRO stage 2 or 3 under a pipeline" in reason for reason in dropped.counts)


def test_experts_are_shared_by_replicas():
    found, _ = reasons(question("mixtral-8x7b", offloads=("none",)))
    assert {ep for _, _, dp, _, _, ep in found if dp == 8} == {1, 2, 4, 8}
    assert {ep for _, _, dp, _, _, ep in found if dp == 1} == {1}


def test_the_head_counts_as_layers_and_what_is_left_over_goes_to_later_stages():
    llama = preset("llama-3-8b")  # a head of 128,256 words is 2.4 layers
    assert balanced_layers(llama, Topology(pp=4)) == (8, 9, 9, 6)
    assert balanced_layers(preset("llama-2-70b"), Topology(pp=6)) == (13, 13, 13, 14, 14, 13)
    assert balanced_layers(preset("t5-base"), Topology(pp=4)) == ()


def test_what_does_not_fit_is_counted_with_how_much_is_missing():
    answer = estimate(question("llama-2-13b", gpus=2, memory=24.0, offloads=("none",)), QUICK)
    assert not answer.options
    (line,) = [line for line in answer.dropped.lines() if "weights and states alone do not fit" in line]
    assert "GB)" in line
    assert "closest: tp " in line


def test_less_memory_leaves_fewer_options_and_more_recomputation():
    roomy, tight = (
        estimate(question("llama-3-8b", memory=memory, offloads=("none",)), QUICK) for memory in (80.0, 26.0)
    )
    assert 0 < tight.num_fitting < roomy.num_fitting
    assert roomy.options[0].tokens_per_s > tight.options[0].tokens_per_s
    assert all(option.peak_bytes <= 26e9 for option in tight.options)


def test_a_strategy_that_fits_in_pieces_alone_is_found():
    """Whole, one sample of 512k needs more than 80 GB at TP2 PP4, whatever is recomputed."""
    lengths = np.array([[524_288, 0, 0], *([500, 0, 0] for _ in range(40))])
    q = question("llama-3-8b", tp=(2,), pp=(4,), zero_stages=(1,), offloads=("none",), layouts=("packed",))
    q = replace(q, data=file_data(lengths, "long.npy", replace(q.architecture, max_seq_len=1 << 20)))
    search = Search(tokens_per_batch=(545_000, 545_000), most_plans=3, effort=100)
    whole, pieces = (estimate(replace(q, limits=replace(q.limits, pieces=p)), search) for p in ("off", "auto"))
    assert not whole.options
    assert whole.dropped.counts["the longest sample does not fit even alone"]
    assert {option.candidate.recompute for option in pieces.options} >= {"auto"}
    assert all(option.peak_bytes <= 80e9 for option in pieces.options)


def test_offload_fits_where_nothing_else_does_and_says_what_it_costs():
    q = question("llama-3-8b", gpus=2, memory=40.0)
    assert not estimate(replace(q, limits=Limits(offloads=("none",))), QUICK).options
    best = estimate(q, QUICK).options[0]
    assert best.strategy.offload != "none"
    assert best.host_bytes_per_node > 0
    assert best.time.offload_s > 0
    small = replace(q, cluster=replace(q.cluster, host_memory_gb=16.0))
    answer = estimate(small, QUICK)
    assert not answer.options
    assert any("exceed the host's 16 GB a node" in line for line in answer.dropped.lines())


def test_what_needs_more_than_hosts_usually_have_comes_last_and_help_is_said():
    q = question("llama-3.1-405b", gpus=8, memory=80.0)
    q = replace(q, cluster=replace(q.cluster, nodes=2))
    answer = estimate(q, QUICK)
    usual = q.cluster.usual_host_bytes
    assert usual == 2000e9
    unusual = [option.host_bytes_per_node > usual for option in answer.options]
    assert unusual == sorted(unusual)
    assert all(unusual)  # 18 bytes a parameter are 3.65 TB a node
    told = " ".join(advice(answer))
    assert "15 nodes would hold the states of ZeRO 3" in told  # 405.9e9 x 18 bytes in 0.8 x 78 GB x 8
    assert "LoRA (dynapipe train --lora) keeps little but the weights, 50.7 GB of a device under --pp or ZeRO 3" in told
    shown = io.StringIO()
    show_estimate(answer, Prices(), Console(file=shown, width=200), most=3)
    assert not re.search(r"\de\+\d", shown.getvalue())  # 1632 s, 16,210 TFLOPs
    assert "ZeRO stage 3 with offload optimizer: it has stages 0 and 1, on the device (others at tp" in shown.getvalue()
    assert not list(advice(estimate(question("llama-3-8b"), QUICK)))
    large_hosts = estimate(replace(q, cluster=replace(q.cluster, host_memory_gb=4000.0)), QUICK)
    assert not list(advice(large_hosts))


def test_fp32_keeps_16_bytes_a_parameter_and_is_slower():
    q = question(offloads=("none",), zero_stages=(1,))
    wide, narrow = (estimate(replace(q, precision=p), QUICK).options[0] for p in ("fp32", "bf16"))
    assert wide.tokens_per_s < narrow.tokens_per_s / 4
    assert wide.memory[0].weights == 2 * narrow.memory[0].weights or wide.strategy != narrow.strategy
    fp16 = estimate(replace(q, precision="fp16"), QUICK).options[0]
    assert fp16.tokens_per_s == narrow.tokens_per_s


def test_the_batch_is_the_smallest_that_is_as_fast():
    answer = estimate(question(gpus=4, offloads=("none",), pp=(4,)), replace(QUICK, tokens_per_batch=(1, 1 << 20)))
    best = answer.options[0]
    rates = dict(best.batch_curve)
    chosen = min(tokens for tokens, rate in rates.items() if rate >= 0.97 * max(rates.values()))
    assert best.tokens_per_batch == chosen < 1 << 20
    assert len(rates) >= 2


def test_a_batch_that_is_asked_for_is_kept():
    answer = estimate(question(gpus=2), Search(tokens_per_batch=(65_536, 65_536), most_plans=3, effort=0))
    assert {option.tokens_per_batch for option in answer.options} == {65_536}
    assert {option.real_tokens for option in answer.options} == {65_536}


def test_micro_batches_of_unequal_samples_are_searched_in_both_layouts():
    q = question(lengths="lognormal:300,1,2048", gpus=2, offloads=("none",))
    answer = estimate(q, replace(QUICK, most_plans=8))
    assert {option.candidate.layout for option in answer.options} == {"padded", "packed"}
    best = answer.options[0]
    assert 0.8 < best.padding_efficiency <= 1.0
    assert best.largest.padded_tokens > 300


def test_evaluation_needs_less_than_training_and_less_still_alone():
    for option in estimate(question(offloads=("none",)), QUICK).options:
        assert option.evaluation.alone_bytes < option.evaluation.beside_bytes <= option.peak_bytes
        assert 0 < option.evaluation.seconds < option.time.pipeline_s


@pytest.mark.parametrize("name", ["t5-large", "qwen3-0.6b", "mixtral-8x7b", "gpt2-medium", "qwen2-7b", "mistral-7b"])
def test_every_family_is_estimated(name):
    lengths = "uniform:512/uniform:128" if name.startswith("t5") else "uniform:1024"
    q = question(name, nodes=2, lengths=lengths, offloads=("none",))
    answer = estimate(q, replace(QUICK, most_plans=4, effort=0))
    assert answer.options
    for option in answer.options:
        assert option.time.pipeline_s >= option.lower_bound_s > 0
        assert 0 < option.mfu < 0.5
        assert option.memory[-1].logits > 0


def test_a_lognormal_distribution_has_its_mean_and_its_largest_sample():
    data = distribution_data("lognormal:500,0.5,100000", preset("llama-3-8b"), 0)
    assert data.mean_tokens == pytest.approx(500, rel=0.01)
    assert distribution_data("lognormal:500,1,600", preset("llama-3-8b"), 0).most_tokens == 600
    batch = data.batch(100_000, 0)
    assert 90_000 < sum(s.tokens for s in batch) <= 100_000
    assert distribution_data("lognormal:500,1,600", preset("llama-3-8b"), 0).batch(50_000, 0) == distribution_data(
        "lognormal:500,1,600", preset("llama-3-8b"), 0
    ).batch(50_000, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("uniform", "is not known: give uniform:N"),
        ("uniform:0", "is not known"),
        ("uniform:1.5", "is not known"),
        ("lognormal:100,1", "is not known"),
        ("lognormal:0.5,1,100", "is not known"),
        ("lognormal:100,99,100", "is not known"),
        ("uniform:10/uniform:10", "has 2 sides but the model takes one side"),
        ("zipf:3", "is not known"),
    ],
)
def test_a_distribution_that_cannot_be_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        distribution_data(text, preset("llama-3-8b"), 0)


def test_lengths_of_a_file_are_taken_as_the_model_takes_them():
    table = np.array([[5, 3, 3], [900, 100, 100]])
    llama, t5, gpt = preset("llama-3-8b"), preset("t5-base"), preset("gpt2")
    joined = file_data(table, "x.npy", llama)
    assert joined.table[:, :2].tolist() == [[8, 0], [1000, 0]]
    assert "both sides joined" in joined.description
    assert file_data(table, "x.npy", t5, 512).table[:, :2].tolist() == [[5, 3], [512, 100]]
    assert "1 cut at 512" in file_data(table, "x.npy", t5, 512).description
    with pytest.raises(DataError, match=r"sample 0 has no decoder length but the model has a decoder"):
        file_data(np.array([[5, 0, 0]]), "x.npy", t5)
    with pytest.raises(DataError, match=r"2,000 positions but the model has 1,024 learned ones: give --truncate"):
        file_data(np.array([[2000, 0, 0]]), "x.npy", gpt)
    with pytest.raises(DataError, match=r"2,000,000 positions but 1,048,576 are the most: give --truncate"):
        file_data(np.array([[2_000_000, 0, 0]]), "x.npy", llama)
    with pytest.raises(DataError, match=r"x.npy has no lengths"):
        file_data(np.zeros((0, 3), np.int64), "x.npy", gpt)


def test_a_batch_that_cannot_hold_a_sample_is_refused_and_a_file_bounds_it():
    q = question(lengths="uniform:4096")
    with pytest.raises(ConfigError, match=r"a sample has 4,096 tokens but a global batch has at most 1,000"):
        estimate(q, Search(tokens_per_batch=(1, 1000)))
    with pytest.raises(ConfigError, match="give a range from 1 up"):
        estimate(q, Search(tokens_per_batch=(10, 5)))
    few = file_data(np.array([[100, 0, 0], [60, 0, 0]]), "x.npy", q.architecture)
    assert tokens_bounds(replace(q, data=few), Search(tokens_per_batch=(1, 1 << 20))) == (100, 160)


def test_batches_are_those_that_training_forms():
    table = np.random.default_rng(0).integers(1, 300, 5000)
    data = file_data(np.stack([table, 0 * table, table], axis=1), "x.npy", preset("llama-3-8b"))
    batches = GlobalBatches(table, tokens_per_batch=20_000, seed=3)
    for index in (0, 1, len(batches) - 1):
        wanted = [int(table[i]) for i in batches[index]]
        assert [s.encoder for s in data.batch(20_000, 3, index)] == wanted


def test_options_are_planned_by_the_rules_that_are_written_for_train(monkeypatch: pytest.MonkeyPatch) -> None:
    planners: list[Planner] = []
    monkeypatch.setattr(ranking, "Planner", lambda *a, **rules: planners.append(Planner(*a, **rules)) or planners[-1])
    q = question(
        gpus=4, lengths="lognormal:300,1,2048", tp=(1,), pp=(1,), zero_stages=(0, 2), offloads=("none",),
        layouts=("packed",), recomputes=("full",), pieces="auto",
    )  # fmt: skip
    written = set()
    for option in estimate(q, QUICK).options:
        config = TrainConfig.from_json(settings(q, option))
        plan = config.plan
        written.add((plan.layout, plan.recompute, plan.pieces))
        assert any(
            planner.topology.with_layers(q.architecture.num_layers) == topology_of(config)
            and int(planner.memory_limit_bytes) == plan.memory_limit_bytes
            and planner.as_keywords() | {"effort": plan.effort, "replica_counts": "free"} == plan.as_keywords()
            for planner in planners
        )
    assert written == {("packed", "full", "auto"), ("packed", "full", "off")}


def test_of_options_that_are_as_fast_the_one_with_the_least_machinery_comes_first():
    """Offload gains 70B on 24 devices less than 5 %: not worth a host's memory."""
    q = question("llama-2-70b", nodes=6, gpus=4, lengths="uniform:4096", tp=(4,), recomputes=("none",))
    q = replace(q, cluster=Cluster.from_device(DEVICES["a100"], nodes=6, gpus_per_node=4))
    answer = estimate(q, Search(tokens_per_batch=(1, 1 << 20), most_plans=8, effort=50))
    first, *others = answer.options
    assert first.strategy.offload == "none"
    fastest = max(answer.options, key=lambda option: option.tokens_per_s)
    assert first.tokens_per_s >= 0.95 * fastest.tokens_per_s
    assert any(option.strategy.offload != "none" for option in others)


def test_no_option_is_faster_for_moving_its_optimizer_to_the_host() -> None:
    """Where overheads count, both are as fast only if both may take a large batch."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 64}
    a = read_config({"model_type": "llama", **sizes})
    q = Question(
        architecture=a,
        name="small",
        cluster=Cluster.from_device(DEVICES["h100"], nodes=1, gpus_per_node=1, gpu_memory_gb=8.0),
        data=distribution_data("uniform:60", a, 0),
        limits=Limits(),
    )
    found = estimate(q, Search(tokens_per_batch=(1, 1 << 16)))
    rates = {o.candidate.strategy.offload: o.tokens_per_s for o in reversed(found.options)}
    assert len(rates) > 1
    assert rates["none"] == max(rates.values())
    assert found.options[0].candidate.strategy.offload == "none"
