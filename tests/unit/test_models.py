"""Architectures, their tensors and their configurations against the models that transformers builds."""

from __future__ import annotations

import ast
import dataclasses
import re
import tarfile
from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.arguments import add_arguments
from dynapipe_ext.models.architecture import FAMILIES, Architecture, LatentAttention
from dynapipe_ext.models.families import FORMS
from dynapipe_ext.models.huggingface import read_config, write_config
from dynapipe_ext.models.megatron_arguments import FOLLOWED, LEFT_AS_IT_IS, is_harmless, read_arguments
from dynapipe_ext.models.named_models import read_sizes
from dynapipe_ext.models.rope_scaling import RopeScaling
from dynapipe_ext.models.tensors import num_parameters, tensor_groups
from dynapipe_ext.models.written_arguments import command_line, unsayable, write_arguments
from tests.support.megatron_lm import MEGATRON_LM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 131, "max_position_embeddings": 64,
}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
_EXPERTS = {"num_key_value_heads": 4, "n_routed_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 32}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SMALL),
    "llama, tied": ("llama", _SMALL | {"tie_word_embeddings": True}),
    "llama, biases": ("llama", _SMALL | {"attention_bias": True, "mlp_bias": True}),
    "llama, own head size": ("llama", _SMALL | {"head_dim": 32}),
    "mistral": ("mistral", _SMALL | {"sliding_window": 16}),
    "qwen2": ("qwen2", _SMALL | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", _SMALL | {"head_dim": 32}),
    "mixtral": ("mixtral", _SMALL | {"num_local_experts": 4}),
    "qwen2 moe": (
        "qwen2_moe",
        _SMALL | {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
    ),
    "qwen2 moe, no biases": (
        "qwen2_moe",
        _SMALL | {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 48, "qkv_bias": False},
    ),
    "qwen3 moe": (
        "qwen3_moe",
        _SMALL
        | {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"norm_topk_prob": True},
    ),
    "phi3": ("phi3", _SMALL | {"sliding_window": 16, "pad_token_id": None}),
    "olmo2": ("olmo2", _SMALL | {"attention_bias": True}),
    "gemma2": ("gemma2", _SMALL | {"attn_logit_softcapping": None, "query_pre_attn_scalar": 144}),
    "gemma3": ("gemma3_text", _SMALL | {"head_dim": 16, "num_hidden_layers": 7, "sliding_window": 512}),
    "gemma3, windows everywhere": ("gemma3_text", _SMALL | {"tie_word_embeddings": False}),
    "gemma3, stretched": (
        "gemma3_text",
        _SMALL
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}},
    ),
    "deepseek v2 lite": ("deepseek_v2", _SMALL | _EXPERTS | {"q_lora_rank": None, "first_k_dense_replace": 1}),
    "deepseek v3": ("deepseek_v3", _SMALL | _EXPERTS | {"first_k_dense_replace": 1}),
    "smollm3": ("smollm3", _SMALL | {"no_rope_layer_interval": 2, "attention_bias": True, "pad_token_id": None}),
    "granite": ("granite", _SMALL | {"residual_multiplier": 0.22, "logits_scaling": 8.0, "mlp_bias": True}),
    "olmoe": ("olmoe", _SMALL | {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": ("olmo3", _SMALL | {"num_hidden_layers": 5, "sliding_window": 16}),
    "gemma": ("gemma", _SMALL | {"head_dim": 32}),
    "starcoder2": ("starcoder2", _SMALL | {"sliding_window": 16}),
    "glm": ("glm", _SMALL | {"head_dim": 32, "pad_token_id": None}),
    "glm4": ("glm4", _SMALL | {"head_dim": 32, "attention_bias": False, "pad_token_id": None}),
    "glm4 moe": (
        "glm4_moe",
        _SMALL | _EXPERTS | {"num_key_value_heads": 2, "head_dim": 32, "use_qk_norm": True, "num_mtp_layers": 0},
    ),
    "nemotron": ("nemotron", _SMALL | {"mlp_bias": True}),
    "gpt-oss": (
        "gpt_oss",
        _SMALL
        | {"num_hidden_layers": 3, "num_local_experts": 4, "swiglu_limit": 5.0}
        | {"rope_parameters": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "rope_theta": 1.5e5}},
    ),
    "gpt-oss, plain": (
        "gpt_oss",
        _SMALL
        | {"head_dim": 32, "num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": False}
        | {"layer_types": ["full_attention"] * 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "llama4": (
        "llama4_text",
        _SMALL
        | {"num_hidden_layers": 5, "num_local_experts": 3, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2}
        | {"intermediate_size_mlp": 80, "attention_chunk_size": 16, "head_dim": 16},
    ),
    "llama4, experts everywhere": (
        "llama4_text",
        _SMALL | {"num_local_experts": 2, "attn_temperature_tuning": False, "attention_bias": True},
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 131}),
    "t5": ("t5", {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 131}),
    "t5 of many languages": ("mt5", {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_heads": 4,
                                     "vocab_size": 131}),
    "t5 1.1": (
        "t5",
        {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 1, "num_decoder_layers": 3, "num_heads": 4,
         "vocab_size": 131, "feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False},
    ),
}  # fmt: skip


def _built(family: str, values: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.AutoConfig.for_model(family, **values)
    with torch.device("meta"):
        seq2seq = family in ("t5", "mt5")
        auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
        return config, auto.from_config(config)


def _published_parameters(model: Any, family: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes as files have them: transformers 5 fuses experts in memory only."""
    found = {}
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for name, parameter in [*model.named_parameters(), *biases]:
        shape = tuple(parameter.shape)
        gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        moe = name.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else name
        joined = family in ("gpt_oss", "llama4_text")  # in files, too
        if name.endswith("experts.gate_up_proj") and not joined:
            for e in range(shape[0]):
                found[moe.replace("gate_up_proj", f"{e}.{gate}.weight")] = (shape[1] // 2, shape[2])
                found[moe.replace("gate_up_proj", f"{e}.{up}.weight")] = (shape[1] // 2, shape[2])
        elif name.endswith("experts.down_proj") and not joined:
            for e in range(shape[0]):
                found[moe.replace("down_proj", f"{e}.{down}.weight")] = shape[1:]
        else:
            found[moe] = shape
    return found


@pytest.mark.parametrize("case", _CASES)
def test_tensors_are_those_of_the_model_that_transformers_builds(case: str) -> None:
    family, values = _CASES[case]
    config, model = _built(family, values)
    architecture = read_config(config.to_dict())
    groups = tensor_groups(architecture)
    ours = {tensor.name: tensor.shape for group in groups for tensor in group.tensors}
    assert ours == _published_parameters(model, family)
    assert num_parameters(architecture) == sum(p.numel() for p in model.parameters())
    assert len({group.name for group in groups}) == len(groups)


@pytest.mark.parametrize("case", _CASES)
def test_a_config_comes_back_and_builds_the_same_model(case: str) -> None:
    family, values = _CASES[case]
    config, model = _built(family, values)
    architecture = read_config(config.to_dict())
    written = write_config(architecture)
    assert read_config(written) == architecture
    again, rebuilt = _built(family, {k: v for k, v in written.items() if k not in ("model_type", "architectures")})
    assert {n: p.shape for n, p in rebuilt.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert read_config(again.to_dict()) == architecture


def test_every_family_is_tried() -> None:
    assert set(FORMS) == set(FAMILIES)
    without_class = {"internlm2", "kimi_k2"}  # code of their own: test_family_configs.py and test_family_logits.py
    assert {family for family, _ in _CASES.values()} | without_class == set(FAMILIES)


# Parameter counts as their publishers give them, from the sizes in their papers or configurations.
_PUBLISHED = {
    "llama 2 7b": ({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                    "intermediate_size": 11008, "vocab_size": 32000, "model_type": "llama"}, 6_738_415_616),
    "llama 2 70b": ({"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
                     "intermediate_size": 28672, "vocab_size": 32000, "model_type": "llama"}, 68_976_648_192),
    "mixtral 8x7b": ({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                      "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
                      "model_type": "mixtral"}, 46_702_792_704),
    "gpt-2": ({"model_type": "gpt2"}, 124_439_808),
    "t5 small": ({"model_type": "t5"}, 60_506_624),
}  # fmt: skip


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_models_have_their_published_sizes(name: str) -> None:
    raw, parameters = _PUBLISHED[name]
    assert num_parameters(read_config(raw)) == parameters


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "falcon"}, "model_type is 'falcon'"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 10**200}, "hidden_size is"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": 10_000_000}, "num_layers is 10000000 but must be at most 10,000"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_key_value_heads": 3}, "num_heads 4 must be a multiple of num_query_groups 3"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "rope_type is 'longrope'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}, "use_sliding_window"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config({"model_type": "llama"} | _SMALL | change, "here.json")


def test_costs_of_older_families_keep_their_bytes() -> None:
    """Checkpoints are resumed by a hash of them: what newer families add is said where it is not the default."""
    old = set(read_config({"model_type": "llama"} | _SMALL).to_json())
    assert not old & {"norm_placement", "qk_norm_whole", "norm_topk_prob", "shared_ffn_hidden_size"}
    for case in ("qwen2 moe", "olmo2", "gemma3"):
        family, values = _CASES[case]
        architecture = read_config({"model_type": family} | values)
        assert Architecture.from_json(architecture.to_json()) == architecture
        assert old < set(architecture.to_json())


def test_t5_of_version_1_1_has_a_head_of_its_own_and_no_scale() -> None:
    raw = {"model_type": "t5", "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
    architecture = read_config(raw)
    assert not architecture.scaled_output
    assert tensor_groups(architecture)[-1].kind == "head"
    assert read_config(write_config(architecture)) == architecture


def test_rope_is_read_from_new_and_old_fields() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 4096}  # fmt: skip
    old = read_config({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling} | _SMALL)
    new = read_config({"model_type": "llama", "rope_parameters": scaling | {"rope_theta": 5e5}} | _SMALL)
    assert old == new
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 4096)
    assert old.rope_theta == 5e5


def test_sizes_that_cannot_be_are_refused() -> None:
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "ffn_hidden_size", "vocab_size", "max_seq_len"), 8)
    sizes |= {"num_layers": 1, "num_heads": 2, "num_query_groups": 2, "head_dim": 4, "tied_embeddings": False}
    latent = LatentAttention(0, 8, plain_dim=16, rotary_dim=8, value_dim=16)
    with pytest.raises(ConfigError, match="head_dim is 4 but latent attention has queries of 24"):
        Architecture(family="deepseek_v3", latent=latent, **sizes)
    with pytest.raises(ConfigError, match="top_k is 3"):
        Architecture(family="mixtral", num_experts=2, top_k=3, **sizes)
    with pytest.raises(ConfigError, match="num_decoder_layers"):
        Architecture(family="t5", **sizes)


_LOST = ("t5", "olmo", "gemma", "smollm3", "granite", "glm", "nemotron", "gpt-oss", "llama4")


@pytest.mark.parametrize("case", [case for case in _CASES if not case.startswith(_LOST)])
def test_megatrons_arguments_give_the_architecture_back(case: str) -> None:
    family, values = _CASES[case]
    architecture = read_config({"model_type": family} | values)
    if family == "phi3":  # which computes what Mistral does: no argument tells them apart
        architecture = replace(architecture, family="mistral")
    assert read_arguments(write_arguments(architecture)) == architecture


@pytest.mark.parametrize("case", [case for case in _CASES if case.startswith(_LOST)])
def test_what_megatrons_arguments_cannot_say_is_not_read_back_as_another_model(case: str) -> None:
    family, values = _CASES[case]
    arguments = write_arguments(read_config({"model_type": family} | values))
    with pytest.raises(ConfigError, match=r"lost|position_embedding_type"):
        read_arguments(arguments)


_NO_BIAS = {"add_bias_linear": False}
_NO_FAMILY = {"num_layers": 2, "position_embedding_type": "rope"}
_MEGATRON = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 131}
_ROPE = _MEGATRON | {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True} | _NO_BIAS
_MIXTURE = _ROPE | {"num_experts": 4}
_LATENT = _MIXTURE | {"multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": 16}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (_MEGATRON | {"decoder_num_layers": 2}, "decoder_num_layers is 2"),
        (_MEGATRON | {"num_experts": 4}, "num_experts 4"),
        (_MEGATRON | {"swiglu": True}, "gated_mlp True"),
        (_MEGATRON | {"group_query_attention": True, "num_query_groups": 2}, "num_query_groups 2"),
        (_MEGATRON | {"kv_channels": 32}, "head_dim 32"),
        (_MEGATRON | {"add_bias_linear": False}, "mlp_bias False"),
        (_MEGATRON | {"position_embedding_type": "yarn"}, "position_embedding_type is 'yarn'"),
        (_ROPE | {"position_embedding_type": 0}, "position_embedding_type is 0"),
        (_ROPE | {"normalization": "x"}, "normalization is 'x'"),
        (_ROPE | {"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        (_ROPE | {"position_embedding_type": "relative"}, "position_embedding_type is 'relative'"),
        (_ROPE | {"rotary_seq_len_interpolation_factor": 4}, "interpolation_factor is 4 .*without interpolation what"),
        (_ROPE | {"use_rope_scaling": True, "rope_scaling_factor": 32}, "rope_scaling_factor is 32 .*factor of 8"),
        (_MIXTURE | {"moe_layer_freq": 2}, "moe_layer_freq is 2 but .* only 1"),
        (_MIXTURE | {"moe_layer_freq": [0, 1]}, r"moe_layer_freq is \[0, 1\]"),
        (_MIXTURE | {"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor is 2.5"),
        (_MIXTURE | {"moe_router_num_groups": 2}, "moe_router_num_groups is 2"),
        (_MIXTURE | {"moe_router_group_topk": 1}, "moe_router_group_topk is 1"),
        (_MIXTURE | {"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input is True"),
        (_MIXTURE | {"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type is 'sinkhorn'"),
        (_MIXTURE | {"qk_layernorm": True, "moe_shared_expert_intermediate_size": 8}, "shared_ffn_hidden_size 8"),
        (_MIXTURE | {"moe_router_pre_softmax": True}, "those of mixtral but for norm_topk_prob False"),
        (_MIXTURE | {"moe_shared_expert_intermediate_size": 8}, "those of qwen2_moe but for shared_expert_gate False"),
        (_ROPE | {"window_size": (4, 0), "window_attn_skip_freq": 2}, "window_attn_skip_freq is 2"),
        (_ROPE | {"qk_l2_norm": True}, "qk_l2_norm is True but .* none of it"),
        (_ROPE | {"softmax_scale": 1.0}, "softmax_scale is 1.0"),
        (_ROPE | {"glu_linear_offset": 1.0}, "glu_linear_offset is 1.0"),
        (_ROPE | {"activation_func_clamp_value": 7.0}, "activation_func_clamp_value is 7.0"),
        (_ROPE | {"no_rope_freq": [0, 1]}, "no_rope_freq is"),
        (_ROPE | {"my_flag": 3, "another": "x"}, r"another 'x', my_flag 3: not known here"),
        (_ROPE | {"multi_latent_attention": True}, "qk_layernorm is off, but models"),
        (_LATENT | {"moe_layer_freq": [0, 1, 0]}, r"moe_layer_freq is \[0, 1, 0\] but must be 0 of the first"),
        (_LATENT | {"moe_layer_freq": [0, 0]}, "num_dense_layers is 2"),
        (_LATENT | {"rope_type": "llama3"}, "rope_type is 'llama3'"),
        (_LATENT | {"kv_lora_rank": None}, "kv_lora_rank is None"),
        (_LATENT | {"mtp_num_layers": 1}, "mtp_num_layers is 1"),
        (_LATENT | {"moe_router_score_function": "sigmoid"}, "router_bias False"),
        (_ROPE | {"add_bias_linear": "false"}, "add_bias_linear is 'false'"),
        (_ROPE | {"rotary_base": float("nan")}, "rotary_base is nan"),
        (_ROPE | {"norm_epsilon": 0}, "norm_epsilon is 0"),
        (_ROPE | {"rope_scaling_factor": "x", "use_rope_scaling": True}, "rope_scaling_factor is 'x'"),
        (_ROPE | {"num_attention_heads": 0}, "num_attention_heads is 0"),
        (_ROPE | {"window_size": (4, 4)}, r"window_size is \(4, 4\)"),
        (_ROPE | {"swiglu": False}, "gated_mlp False"),
        (_ROPE | {"add_bias_linear": True, "qk_layernorm": True}, "mlp_bias True"),
        (_MEGATRON | {"add_position_embedding": False}, "add_position_embedding is False"),
        (
            _NO_FAMILY | {"normalization": "LayerNorm", "swiglu": True},
            r"of no family known here: put the model's config\.json",
        ),
        (_NO_FAMILY | {"normalization": "RMSNorm"}, "num_attention_heads is None"),
    ],
)
def test_arguments_of_another_model_are_refused_by_name(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_arguments(arguments)


@pytest.mark.parametrize(
    "harmless",
    [
        {
            "rotary_percent": 1.0,
            "window_attn_skip_freq": 2,
            "no_rope_freq": [0, 0],
            "moe_router_topk_scaling_factor": 9,
        },
        {"lr": 1e-4, "save": "there", "fp8": "hybrid", "hidden_dropout": 0.3, "world_size": 64, "my_flag": False},
        {"mhc_num_residual_streams": 4, "gdp_num_householder": 3, "batch_invariant_backend": "te_native"},
    ],
)
def test_arguments_that_leave_the_model_as_it_is_are_passed_over(harmless: dict[str, Any]) -> None:
    assert read_arguments(_ROPE | harmless) == read_arguments(_ROPE)


@pytest.mark.parametrize(
    ("arguments", "activation"),
    [
        (_ROPE, "silu"),
        (_ROPE | {"swiglu": False, "gated_linear_unit": True}, "gelu"),  # fused only where there is a bias
        (_MEGATRON, "gelu_tanh"),
        (_MEGATRON | {"bias_gelu_fusion": False}, "gelu"),
    ],
)
def test_the_activation_is_what_megatrons_kernels_compute(arguments: dict[str, Any], activation: str) -> None:
    architecture = read_arguments(arguments)
    assert architecture.activation == activation
    if not unsayable(architecture):
        assert read_arguments(write_arguments(architecture)) == architecture


def test_our_own_arguments_of_megatron_lm_say_nothing_of_the_model() -> None:
    own = {action.dest: "given" for action in add_arguments(ArgumentParser(add_help=False))._actions}
    assert len(own) > 10
    assert read_arguments(_ROPE | own) == read_arguments(_ROPE)


def test_every_argument_of_megatron_has_one_meaning_here() -> None:
    """So what is new in another version is seen, and refused where it is set."""
    core = pytest.importorskip("megatron.core.transformer")
    names = {field.name for field in dataclasses.fields(core.MLATransformerConfig)} | _options_of_megatron_lm()
    unknown = {name for name in names if name not in FOLLOWED | set(LEFT_AS_IT_IS) and not is_harmless(name)}
    assert not unknown
    assert not FOLLOWED & set(LEFT_AS_IT_IS)
    others = {"norm_epsilon", "disable_bias_linear", "apply_layernorm_1p"}  # of earlier releases, and of later ones
    others |= {"use_mup", "hybrid_layer_pattern", "moe_router_force_biased", "moe_expert_rank_capacity_factor"}
    others |= {"moe_router_quantile_balancing_ema", "moe_mlp_glu_interleave_size", "moe_single_grouped_weight"}
    others |= {"moe_shared_expert_glu_interleave_size", "moe_single_grouped_bias", "use_grouped_gemm_for_dense_mlp"}
    others |= {"use_grouped_gemm_for_shared_expert", "enable_mhc_connections"}
    assert not (FOLLOWED | set(LEFT_AS_IT_IS)) - names - others or not MEGATRON_LM.is_file()


def _options_of_megatron_lm() -> set[str]:
    """By the names under which its parser keeps them; none where no copy of Megatron-LM is at hand."""
    if not MEGATRON_LM.is_file():
        return set()
    with tarfile.open(MEGATRON_LM) as archive:
        files = [archive.extractfile(f"megatron/{part}/arguments.py") for part in ("training", "post_training")]
        trees = [ast.parse(file.read()) for file in files if file is not None]
        calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = set()
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            dest = [word.value for word in call.keywords if word.arg == "dest"]
            word = (dest or call.args)[0]
            assert isinstance(word, ast.Constant)
            names.add(str(word.value).removeprefix("--").replace("-", "_"))
    return names


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "RoPE scaling linear by 4 "),
        ({"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 4096}}, "llama3 by 8 from 4,096 positions"),
        ({"rope_scaling": _LLAMA3 | {"factor": 32.0}}, "llama3 by 32 from 8,192 positions"),
        ({"rope_theta": 10000.5}, "rope_theta 10000.5"),
        ({"attention_bias": True}, "biases in some projections only"),
        ({"hidden_act": "gelu"}, "gated gelu in the MLP"),
        ({"rope_scaling": _LLAMA3}, ""),
        ({"attention_bias": True, "mlp_bias": True}, ""),
    ],
)
def test_what_megatrons_command_line_cannot_say_is_said(change: dict[str, Any], said: str) -> None:
    architecture = read_config({"model_type": "llama"} | _SMALL | change)
    assert said in "; ".join(unsayable(architecture))
    if said:
        with pytest.raises(ConfigError, match=re.escape(said)):
            command_line(architecture)
        with pytest.raises(ConfigError):
            read_arguments(write_arguments(architecture))
    else:
        assert not unsayable(architecture)
        assert read_arguments(write_arguments(architecture)) == architecture


@pytest.mark.parametrize(
    ("family", "layers", "heads", "longest"),
    [
        ("bloom", 2, 8, 1 << 20),  # scores by distance: any length
        ("mamba", 32, 1, 1 << 20),  # states: no heads
        ("mpt", 24, 16, 2048),
        ("xglm", 24, 16, 2048),
        ("nemotron_h", 4, 32, 4096),  # its layers are a list of kinds alone
        ("kimi_linear", 27, 32, 1 << 20),
    ],
)
def test_sizes_are_read_by_the_names_that_a_family_gives_them(
    family: str, layers: int, heads: int, longest: int
) -> None:
    sizes = read_sizes(transformers.AutoConfig.for_model(family).to_dict())
    assert (sizes.num_layers, sizes.num_heads, sizes.max_seq_len) == (layers, heads, longest)


def test_a_single_experts_weight_is_a_probability_since_its_share_would_teach_nothing() -> None:
    raw = transformers.AutoConfig.for_model("llama4").to_dict()
    assert (read_sizes(raw).top_k, read_sizes(raw).norm_topk_prob) == (1, False)
