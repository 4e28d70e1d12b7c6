"""Models, clusters and the costs of encoder-decoders that estimates rest on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.cluster import DEVICES, Cluster
from dynapipe_ext.costs.estimated import Strategy, estimate_costs
from dynapipe_ext.costs.states import count_parameters, count_states
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.models.flops import Positions, forward_flops
from dynapipe_ext.models.huggingface import write_config
from dynapipe_ext.models.named_models import PRESETS, preset, read_model
from dynapipe_ext.models.tensors import num_parameters, tensor_groups
from dynapipe_ext.models.written_arguments import write_arguments
from dynapipe_ext.tools.estimate.modules import MODULES, modules_of, positions_of

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "t5-small": 60_506_624,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "mt5-small": 300_176_768,
    "smollm3-3b": 3_075_098_624,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "olmo-3-7b": 7_298_011_136,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "starcoder2-3b": 3_030_371_328,
    "internlm2-7b": 7_737_708_544,
}
num_parameters = cache(num_parameters)  # a mixture of experts has tens of thousands of tensors
A100 = Cluster.from_device(DEVICES["a100"], nodes=2, gpus_per_node=8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert num_parameters(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_one_stage_has_every_parameter_once(name):
    assert count_parameters(preset(name), Topology()).total.tolist() == [num_parameters(preset(name))]


DIVIDED = {  # over tensor parallel ranks; each has a copy of the rest
    "embedding", "head", "attention_in", "attention_in_bias", "attention_out", "mlp_in", "mlp_in_bias", "mlp_out",
    "shared_in", "shared_out", "sinks", "experts_in", "experts_in_bias", "experts_out",
    "q_proj", "q_down", "q_up", "kv_down", "kv_up",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, raw in PRESETS.items() if raw["model_type"] not in ("t5", "mt5")])
def test_stages_hold_every_tensor_once_but_for_the_copies_of_tensor_parallel_ranks_and_of_a_tied_head(name):
    a, tensors = preset(name), Counter()
    for group in tensor_groups(a):
        tensors[group.kind, group.is_of_experts] += 0 if group.is_buffer else group.size
    divided = DIVIDED | ({"q_norm", "k_norm"} if a.qk_norm_whole else set())
    for topology in (Topology(pp=3), Topology(pp=2, dp=2), Topology(tp=4, pp=2)):
        if a.num_heads % topology.tp or a.num_query_groups % topology.tp:
            continue
        padded, held = a.padded(topology.tp), Counter()
        for (kind, is_of_experts), size in tensors.items():
            held[is_of_experts] += size // (topology.tp if kind in divided else 1)
        rows = 2 * padded.vocab_size - a.vocab_size * (1 if a.tied_embeddings else 2)  # beyond those that are published
        for ep in (1, 2) if a.num_experts and topology.dp > 1 else (1,):
            counted = count_parameters(padded, topology, ep)
            assert counted.common.sum() == held[False] + rows * a.hidden_size // topology.tp
            assert counted.experts.sum() == held[True] // ep


def test_stages_of_t5_share_nothing_but_the_embedding():
    """Four stages: copies of the embedding on the first decoder stage and, tied, on the last; position biases twice."""
    a = preset("t5-base")
    stages = count_parameters(a, Topology(pp=4)).total
    embedding, biases = a.vocab_size * a.hidden_size, a.relative_buckets * a.num_heads
    assert int(stages.sum()) == num_parameters(a) + 2 * embedding + 2 * biases


def test_tensor_parallel_ranks_together_hold_each_weight_once_and_norms_each():
    a = preset("llama-3-8b")
    one, four = (int(count_parameters(a, Topology(tp=tp)).total.sum()) for tp in (1, 4))
    assert 4 * four - one == 3 * 65 * 4096  # 65 norms, copied


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen2-7b", "gpt2", "t5-base", "mixtral-8x7b", "deepseek-v3"])
def test_a_model_is_read_from_its_config_its_folder_and_megatrons_arguments(name, tmp_path):
    a = preset(name)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(write_config(a)))
    assert read_model(str(config))[0] == read_model(str(tmp_path))[0] == a
    if name == "t5-base":
        return  # Megatron's arguments cannot say all of it
    arguments = tmp_path / "arguments.json"
    arguments.write_text(json.dumps({f"--{k.replace('_', '-')}": v for k, v in write_arguments(a).items()}))
    assert num_parameters(read_model(str(arguments))[0]) == num_parameters(a)


def test_a_model_that_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"'llama-9' is no preset: give the path of a config\.json, or llama-2-7b"):
        read_model("llama-9")
    path = tmp_path / "x.json"
    for text, error, said in (
        ("{", DataError, "cannot be read as a model's configuration"),
        ("[1]", ConfigError, "must be an object of a model's sizes"),
        ('{"layers": 3}', ConfigError, "has neither model_type .* nor num_layers"),
        ('{"model_type": "bert"}', ConfigError, "model_type is 'bert': known are"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=said):
            read_model(str(path))


def test_states_of_experts_are_divided_over_the_replicas_that_share_them():
    a = preset("mixtral-8x7b")
    topology = Topology(dp=8)
    held = {ep: count_states(a, topology, "megatron", zero_stage=1, ep=ep).device.total[0] for ep in (1, 8)}
    experts = count_parameters(a, topology).experts[0]
    assert held[1] - held[8] == (6 + 12 / 8) * experts - 18 * experts / 8


def test_offload_moves_states_to_the_host_and_counts_what_crosses_its_link():
    a, topology = preset("gpt2-xl"), Topology(dp=8)
    count = num_parameters(a)

    def held(zero_stage, offload):
        return count_states(a, topology, "megatron", zero_stage=zero_stage, offload=offload)

    share = -(-count // 8)
    first = held(1, "optimizer")
    assert (first.device.total[0], first.host[0]) == (6 * count, -(-12 * count // 8))
    assert first.moved[0] == 6 * share  # fp32 gradients down, 16-bit weights up
    second = held(2, "optimizer")
    assert second.device.total[0] == 2 * count
    assert second.host[0] == -(-12 * count // 8) + -(-4 * count // 8)
    third = held(3, "all")
    assert third.device.total[0] == 0
    assert third.host[0] == -(-12 * count // 8) + -(-4 * count // 8) + -(-2 * count // 8)
    assert third.moved[0] > second.moved[0]
    assert held(3, "none").host[0] == 0
    with pytest.raises(ConfigError, match="offload 'all' moves weights, which zero_stage 1 does not divide"):
        held(1, "all")


def test_cluster_figures_out_of_bounds_are_refused():
    for given, said in (
        ({"nodes": 0}, "nodes is 0 but must be 1 to 65,536"),
        ({"gpu_memory_gb": -1.0}, "gpu_memory_gb is -1 but must be above 0"),
        ({"reserved_gb": 80.0}, "reserved_gb is 80 of 80 GB of a device"),
        ({"efficiency": 1.5}, "efficiency is 1.5 but must be above 0, and at most 1"),
        ({"efficiency": 0.0}, "efficiency is 0 but must be above 0, and at most 1$"),
        ({"intra_bytes_per_s": float("nan")}, "intra_bytes_per_s is nan but must be above 0"),
        ({"host_memory_gb": -2.0}, "host_memory_gb is -2 but must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            Cluster.from_device(DEVICES["a100"], **given)


def test_tensor_parallel_sums_cost_what_a_ring_takes():
    """Two sums of s h values forward and as many backward, each 2 (t - 1) / t of its bytes over the link."""
    a = preset("llama-3-8b")
    batch = [MicroBatch((SampleLength(0, 4096),))]
    cluster = replace(A100, intra_latency_ns=0)

    def forward_ns(link_bytes_per_s):
        strategy = Strategy(topology=Topology(tp=4))
        costs = estimate_costs(
            a, replace(cluster, intra_bytes_per_s=link_bytes_per_s), strategy, precision="bf16", recipe="megatron"
        )
        return int(costs.evaluate(batch).forward_ns[0, 0])

    ring_ns = 32 * 2 * (4096 * 4096 * 2) * (2 * 3 / 4) / 100e9 * 1e9
    assert forward_ns(100e9) - forward_ns(1e15) == pytest.approx(ring_ns, rel=1e-4)


def _t5_costs(**changes):
    a = preset("t5-3b")
    values = {"topology": Topology(), "flops_per_s": 1e12, "links": A100.links}
    return a, AnalyticCosts(overhead_ns=0, architecture=a, **{**values, **changes})


def test_forward_flops_of_an_encoder_decoder_are_two_a_weight_and_token_and_attention():
    a, costs = _t5_costs()
    e, d = 512, 114
    (ns,) = costs.evaluate([MicroBatch((SampleLength(0, e, d),))]).forward_ns[:, 0]
    h, q, f = a.hidden_size, a.query_size, a.ffn_hidden_size
    layer, cross = 4 * h * q + 2 * h * f, 2 * h * q
    weights = 24 * (layer * e + layer * d + cross * d + cross * e) + a.vocab_size * h * d
    scores = 24 * 4 * q * (e * e + d * d + e * d)
    assert ns * 1e3 == pytest.approx(2 * weights + scores, rel=1e-9)


def test_an_encoder_decoder_of_twice_the_tokens_costs_at_least_twice_and_is_split_over_stages_without_loss():
    _, whole = _t5_costs()
    _, parts = _t5_costs(topology=Topology(pp=4))
    small, large = (MicroBatch((SampleLength(0, n, n // 4),)) for n in (256, 512))
    one = whole.evaluate([small, large])
    assert (one.forward_ns[:, 1] >= 2 * one.forward_ns[:, 0]).all()
    assert (one.stored_bytes[:, 1] >= 2 * one.stored_bytes[:, 0]).all()
    four = parts.evaluate([small, large])
    assert four.forward_ns.sum(axis=0) == pytest.approx(one.forward_ns.sum(axis=0), abs=4)
    assert four.transfer_bytes[:, 0].tolist() == [2 * 1024 * 256, 2 * 1024 * 256, 2 * 1024 * (256 + 64)]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_recomputation_of_an_encoder_decoder_trades_bytes_for_time(layout):
    _, costs = _t5_costs(topology=Topology(tp=2, pp=2), sequence_parallel=True)
    samples = (SampleLength(0, 512, 128), SampleLength(1, 300, 90))
    kinds = [MicroBatch(samples, layout, kind, pad_multiple=8) for kind in ("none", "selective", "full")]
    priced = costs.evaluate(kinds)
    assert (np.diff(priced.stored_bytes, axis=1) < 0).all()
    assert (np.diff(priced.backward_ns, axis=1) > 0).all()
    assert (priced.forward_ns[:, 0] == priced.forward_ns[:, 2]).all()


def test_shapes_of_an_encoder_decoder_cost_what_the_same_micro_batches_do():
    _, costs = _t5_costs(topology=Topology(pp=2))
    batch = MicroBatch(tuple(SampleLength(i, 96, 32) for i in range(3)))
    shapes, one = costs.evaluate_shapes([3], [96], [32]), costs.evaluate([batch])
    for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes", "working_bytes", "transfer_ns"):
        assert getattr(shapes, name).tolist() == getattr(one, name).tolist()


def test_heads_of_their_own_width_and_biases_of_qkv_alone_are_counted():
    """Qwen3-0.6B has 16 heads of 128 on a hidden size of 1,024: twice the attention of heads that fill it."""
    a = preset("qwen3-0.6b")
    assert (a.query_size, a.kv_size) == (2048, 1024)
    filled = replace(a, head_dim=64)
    long = MicroBatch((SampleLength(0, 32_768),))
    wide, narrow = (
        AnalyticCosts(s, Topology(), flops_per_s=1e12, overhead_ns=0).evaluate([long]).forward_ns[0, 0]
        for s in (a, filled)
    )
    matmul = 2 * 32_768 * 28 * (a.attention_parameters - filled.attention_parameters) / 1e3
    assert wide - narrow == pytest.approx(28 * 2 * 1024 * 32_768**2 / 1e3 + matmul, rel=1e-6)
    with_bias = preset("qwen2-7b")
    none = replace(with_bias, qkv_bias=False)
    (more,), (less,) = count_parameters(with_bias, Topology()).total, count_parameters(none, Topology()).total
    assert more - less == 28 * (3584 + 2 * 512)


@pytest.mark.parametrize("name", PRESETS)
def test_modules_have_every_parameter_once_and_the_work_of_a_forward(name):
    a, lengths = preset(name), np.array([[100, 7, 0], [512, 64, 0], [33, 1, 0]])
    lengths[:, 1] *= bool(a.num_decoder_layers)
    positions = positions_of(lengths)
    assert positions == Positions.of_samples((int(e), int(d)) for e, d, _ in lengths)
    found = modules_of(a, "megatron", positions, len(lengths))
    assert tuple(one.name for one in found) == MODULES
    assert sum(one.parameters for one in found) == num_parameters(a)
    assert sum(one.forward_flops for one in found) == pytest.approx(forward_flops(a, positions).total / 3, rel=1e-9)
    assert all(one.training_bytes == 9 * one.inference_bytes for one in found)
    assert all(one.forward_flops > 0 for one in found[1:])
