"""What configurations of the newer families say, and what of them is refused by name."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import MicroBatchCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.models.architecture import Architecture, layer_kinds
from dynapipe_ext.models.families import FORMS
from dynapipe_ext.models.huggingface import read_config, write_config
from dynapipe_ext.models.megatron_arguments import read_arguments
from dynapipe_ext.models.named_models import preset
from dynapipe_ext.models.rope_scaling import RopeScaling, Yarn
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.models.written_arguments import command_line, unsayable, write_arguments
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.estimate.options import balanced_layers
from tests.support.checkpoints import VARIANTS, tiny_config

_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 131, "max_position_embeddings": 64,
}  # fmt: skip
_DEEPSEEK = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "num_experts_per_tok": 8}
_YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
_FACTORS = {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_MSCALES = {"mscale": 1.3, "mscale_all_dim": 0.7}


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2: only 1 is supported"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]: only \[\] is supported"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8}, "windows in some layers only"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            "short_factor is None but must be",
        ),
        ("phi3", {"rope_scaling": {"type": "su"} | _FACTORS | {"short_factor": [1, 2]}}, "has 2 numbers but 16 values"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        ("phi3", {"partial_rotary_factor": 0.01}, "partial_rotary_factor is 0.01 of heads of 16"),
        ("smollm3", {"no_rope_layers": [0, 1]}, r"no_rope_layers is \[0, 1\]: exactly every n-th layer"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is .* must be 2 of 0 and 1"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("glm", {"head_dim": 6}, "rotary_dim is 3 but must be even"),
        ("llama", {"rope_scaling": _YARN | {"attention_factor": 1.2}}, "attention_factor is 1.2: only 1.36"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2: only 1 is supported"),
        ("llama4_text", {"moe_layers": [0]}, r"moe_layers is \[0\] .* exactly every n-th layer"),
        ("llama4_text", {"layer_types": ["full_attention"] * 2}, "layer_types is .* must be chunked_attention where"),
        ("gpt_oss", {"swiglu_alpha": 1.5} | _PLAIN, "swiglu_alpha is 1.5: only 1.702 is supported"),
        ("gpt_oss", {}, "rope_parameters are missing"),
        ("deepseek_v3", {"rope_scaling": _YARN | {"truncate": False}}, "truncate is False: only True"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "exactly every n-th layer"),
        ("gemma3_text", {"layer_types": ["sliding_attention"]}, "layer_types is .* must be 2 of sliding_attention"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope of windows: rope_type is 'linear'",
        ),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False: only True is supported"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2: only 4 is supported"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False with num_experts_per_tok 8"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "norm_topk_prob is True with num_experts_per_tok 1"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "first_k_dense_replace is 2 of 2 layers"),
        ("deepseek_v3", {"n_group": 7}, "router_group_topk is 4 of router_num_groups 7"),
        ("deepseek_v3", {"rope_scaling": {"type": "llama3"}}, "rope_type is 'llama3': .* default and yarn"),
        ("deepseek_v3", {"rope_scaling": _YARN | {"attention_factor": 1.2}}, "attention_factor is 1.2"),
        ("deepseek_v3", {"rope_scaling": _YARN | {"mscale_all_dim": 1.0}}, "mscale_all_dim is 1 without mscale"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "gptq"}},
            "weights of quant_method .gptq. are not read",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        (
            "gemma3",
            {},
            "model_type is 'gemma3': it has a vision tower; give its text_config, of model_type gemma3_text",
        ),
    ],
)
def test_what_a_newer_familys_config_says_in_vain_is_refused(family: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config({"model_type": family} | _SMALL | (_DEEPSEEK if "deepseek" in family else {}) | change)


def test_deepseek_is_said_by_megatrons_arguments_and_read_back() -> None:
    v3 = read_config({"model_type": "deepseek_v3"} | _SMALL | _DEEPSEEK | {"rope_scaling": _YARN | _MSCALES})
    assert read_config(write_config(v3)) == read_arguments(write_arguments(v3)) == v3
    assert Architecture.from_json(json.loads(json.dumps(v3.to_json()))) == v3
    options = " ".join(command_line(v3))
    for said in (
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512",
        "--rope-type yarn --rotary-scaling-factor 40.0 --mscale 1.3 --mscale-all-dim 0.7",
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 8",
        "--moe-layer-freq ([0]*1+[1]*1)",
    ):
        assert said in options
    lite = read_config({"model_type": "deepseek_v2"} | _SMALL | _DEEPSEEK | {"q_lora_rank": None})
    assert read_config(write_config(lite)) == read_arguments(write_arguments(lite)) == lite


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": _YARN | {"original_max_position_embeddings": 32}}, "YaRN with .*embeddings 32 "),
        ({"rms_norm_eps": 1e-5}, "norms of latent vectors with another epsilon"),
        ({"topk_group": 2, "num_experts_per_tok": 8}, r"best 2, megatron-core by its best .* 8 // topk_group 2 = 4"),
    ],
)
def test_what_megatron_cannot_say_of_deepseek_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        command_line(read_config({"model_type": "deepseek_v3"} | _SMALL | _DEEPSEEK | change))


def test_dense_layers_and_those_of_experts_cost_what_models_of_each_alone_cost() -> None:
    model = read_config({"model_type": "deepseek_v3"} | _SMALL | _DEEPSEEK | {"num_hidden_layers": 6}).padded()
    model = replace(model, num_dense_layers=2)
    (dense, first), (experts, others) = layer_kinds(model)
    assert (first, others) == ((0, 1), (2, 3, 4, 5))
    micro_batches = [MicroBatch((SampleLength(0, 48, 0, 9),), recompute=kind) for kind in ("none", "selective", "full")]

    def costs(a: Architecture, layers: tuple[int, ...]) -> MicroBatchCosts:
        return AnalyticCosts(a, Topology(pp=len(layers), layers_per_stage=layers)).evaluate(micro_batches)

    found = costs(model, (2, 1, 3))
    alone, mixed = costs(dense, (2, 1, 3)), costs(experts, (2, 1, 3))
    for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes", "working_bytes"):
        assert np.array_equal(getattr(found, name)[0], getattr(alone, name)[0])
        assert np.array_equal(getattr(found, name)[1:], getattr(mixed, name)[1:])
    assert found.static_bytes.tolist() == [alone.static_bytes[0], *mixed.static_bytes[1:]]
    both = costs(model, (3, 3)).forward_ns[0] - costs(model, (2, 4)).forward_ns[0]
    assert np.array_equal(both, mixed.forward_ns[1] - AnalyticCosts(experts, Topology(pp=3)).overhead_ns)


def test_stages_are_balanced_by_what_their_layers_are() -> None:
    """A dense layer of DeepSeek-V3 is as much as one of experts, and a narrower one less."""
    v3 = preset("deepseek-v3")
    assert balanced_layers(v3, Topology(pp=8)) == (7, 8, 8, 8, 8, 8, 8, 6)
    assert balanced_layers(replace(v3, dense_ffn_hidden_size=1024), Topology(pp=8)) == (9, 7, 7, 8, 8, 8, 8, 6)


def test_gemma_is_read_as_it_was_published_before_layers_had_types() -> None:
    old = {"model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512, "sliding_window_pattern": 6}
    old |= {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    gemma = read_config(_SMALL | old)
    assert [layer for layer in range(26) if not gemma.has_window(layer)] == [5, 11, 17, 23]
    assert (gemma.rope_theta, gemma.local_rope_theta, gemma.rope_scaling) == (2e6, 2e4, RopeScaling("linear", 8.0))
    assert "capped scores" in "; ".join(unsayable(gemma))
    gemma = read_config({"model_type": "gemma2"} | _SMALL)
    assert (gemma.full_attention_every, gemma.attention_softcap, gemma.logit_softcap) == (2, 50.0, 30.0)


def test_an_olmo_is_not_said_by_megatrons_arguments() -> None:
    architecture = read_config({"model_type": "olmo2"} | _SMALL)
    assert [reason.split(" (")[0] for reason in unsayable(architecture)] == [
        "norms after attention and MLP",
        "norms of queries and keys over all heads together",
    ]
    with pytest.raises(ConfigError, match="lost 'norms after attention and MLP"):
        read_arguments(write_arguments(architecture))


def test_kimi_k2_is_a_deepseek_v3_under_its_own_name() -> None:
    own = _SMALL | _DEEPSEEK | {"n_group": 1, "topk_group": 1, "rope_scaling": _YARN | {"factor": 32.0}}
    kimi = read_config({"model_type": "kimi_k2"} | own)
    v3 = read_config({"model_type": "deepseek_v3"} | own)
    assert kimi == replace(v3, family="kimi_k2")
    assert tensor_groups(kimi) == tensor_groups(v3)
    assert write_config(kimi) == write_config(v3) | {"model_type": "kimi_k2"}


def test_a_gpt_oss_is_read_as_it_is_published() -> None:
    """With the names that OpenAI's config.json has besides, and weights in MXFP4."""
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    rope |= {"original_max_position_embeddings": 4096}
    own = {"rope_scaling": rope, "experts_per_token": 4, "num_local_experts": 32, "rope_theta": 150_000}
    own |= {"hidden_act": "silu", "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}}
    oss = read_config({"model_type": "gpt_oss", "num_experts_per_tok": 4, "attention_bias": True} | _SMALL | own)
    assert oss.rope_scaling == Yarn(32.0, 4096, truncate=False)
    assert (oss.sliding_window, oss.full_attention_every, oss.gate_clamp, oss.up_offset) == (128, 2, 7.0, 1.0)
    assert read_config(write_config(oss)) == oss
    assert Architecture.from_json(json.loads(json.dumps(oss.to_json()))) == oss
    v3 = read_config({"model_type": "deepseek_v3"} | _SMALL | _DEEPSEEK | {"rope_scaling": _YARN})
    assert "truncate" not in v3.to_json()["rope_scaling"]  # as files had it before
    assert "attention sinks" in replace(oss, sliding_window=0, full_attention_every=0).pieces_fault
    assert "attention sinks, clamped gates" in "; ".join(unsayable(oss))


def test_an_internlm2_has_biases_unless_it_says_otherwise() -> None:
    intern = read_config({"model_type": "internlm2"} | _SMALL)
    assert (intern.qkv_bias, intern.attention_output_bias, intern.mlp_bias) == (True, True, False)
    assert read_config(write_config(intern)) == intern
    assert not read_config({"model_type": "internlm2", "bias": False} | _SMALL).qkv_bias


def test_samples_whose_frequencies_would_follow_from_their_length_are_refused_before_a_run() -> None:
    """Phi-4-mini's, and a dynamic Llama's: what was trained is exact, and more is refused by the trained length."""
    phi = read_config(
        {"model_type": "phi3", "rope_scaling": {"type": "longrope"} | _FACTORS, "partial_rotary_factor": 1.0}
        | _SMALL
        | {"max_position_embeddings": 131_072}
    )
    llama = read_config({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}} | _SMALL)
    for model, longest in ((phi, 4096), (llama, 64)):
        assert model.most_exact_tokens == longest
        assert Architecture.from_json(json.loads(json.dumps(model.to_json()))) == model
        assert read_config(write_config(model)) == model
        config = TrainConfig().with_values(topology={"tp": 1, "pp": 1, "dp": 1})
        exact = replace(config, model=replace(config.model, described=model, max_seq_len=longest))
        topology_of(exact)
        with pytest.raises(ConfigError, match=rf"more than {longest} tokens .*--truncate {longest}"):
            topology_of(replace(exact, model=replace(exact.model, max_seq_len=longest + 1)))


def test_configs_are_written_in_the_words_of_their_publishers() -> None:
    """GPT-2's own GELU has other bits than torch's, and DeepSeek's own code reads `type`."""
    assert write_config(preset("gpt2"))["activation_function"] == "gelu_new"
    assert write_config(preset("deepseek-v3"))["rope_scaling"]["type"] == "yarn"
    assert write_config(preset("gemma-2-2b"))["hidden_activation"] == "gelu_pytorch_tanh"


_OUTSIDE = {"original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_INSIDE = {"original_max_position_embeddings": 32}
_STRETCHED = {"rope_type": "yarn", "factor": 4.0}
_LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
SPELLINGS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"rope_scaling": scaling | inside} | outside
        for scaling in (_STRETCHED, _LLAMA3)
        for inside in ({}, _INSIDE)
        for outside in ({}, _OUTSIDE)
    ],
    "phi3": [{"rope_scaling": _LONG | inside} | outside for inside in ({}, _INSIDE) for outside in ({}, _OUTSIDE)],
    "deepseek_v3": [{"rope_scaling": _STRETCHED | _INSIDE} | _OUTSIDE],
    "t5": [
        {"feed_forward_proj": kind, **own}
        for kind in ("relu", "gated-gelu", "gated-silu")
        for own in ({}, {"dense_act_fn": "gelu"}, {"is_gated_act": True}, {"is_gated_act": False})
    ],
}


@pytest.mark.parametrize("family", dict.fromkeys(family for family, _ in VARIANTS.values()))
def test_what_a_config_leaves_out_or_says_twice_is_what_transformers_takes(family: str) -> None:
    """Of every field in turn, left out of a config.json that has all; of spellings that differ within themselves."""
    config = tiny_config(family)
    full = json.loads(config.to_json_string(use_diff=False))
    names = {field.name for field in FORMS[family].fields} | {*full, "rope_theta"}
    names -= {"num_key_value_heads"} if family == "deepseek_v3" else set()  # which means nothing there
    cases = [{name: value for name, value in full.items() if name != left_out} for left_out in sorted(names)]
    spelled = {name: value for name, value in full.items() if name not in ("rope_parameters", "dense_act_fn")}
    spelled.pop("is_gated_act", None)
    cases += [spelled | change for change in SPELLINGS.get(family, ())]
    num_read = 0
    for raw in cases:
        try:
            found = read_config(raw)
        except ConfigError:  # refused, which is no other model
            continue
        assert found == read_config(type(config).from_dict(copy.deepcopy(raw)).to_dict()), raw
        assert read_config(write_config(found)) == found
        num_read += 1
    assert num_read > len(full) // 2
