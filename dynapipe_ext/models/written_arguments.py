"""A model as Megatron-LM's arguments and as options of its pretrain_gpt.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture, LatentAttention
from dynapipe_ext.models.family_configs import LATENT_NORM_EPS
from dynapipe_ext.models.megatron_arguments import DTYPE_FLAGS, LLAMA3_SCALING, NORM_NAMES, POSITION_NAMES
from dynapipe_ext.models.rope_scaling import Yarn

_VALUES = (
    "num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "num_experts",
    "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "max_position_embeddings",
    "position_embedding_type", "rotary_base", "normalization", "norm_epsilon",
)  # fmt: skip
_SWITCHES = (
    "untie_embeddings_and_output_weights", "swiglu", "add_qkv_bias", "qk_layernorm", "use_rope_scaling",
    "moe_router_pre_softmax", "moe_shared_expert_gate",
    *DTYPE_FLAGS.values(),
)  # fmt: skip
_WITHOUT_OPTION = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}  # and its value


def write_arguments(architecture: Architecture) -> dict[str, Any]:
    """The model as the arguments that Megatron-LM records.

    Arguments cannot express every model. The extra entry `lost` names what the arguments cannot express. No release of
    Megatron-LM reads it; our `read_arguments` refuses such arguments unless a config.json lies beside them.
    """
    a = architecture
    scaling = a.rope_scaling
    arguments: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_heads,
        "group_query_attention": a.num_query_groups != a.num_heads,
        "num_query_groups": a.num_query_groups,
        "kv_channels": a.head_dim,
        "ffn_hidden_size": a.dense_ffn_hidden_size or a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_seq_len,
        "untie_embeddings_and_output_weights": not a.tied_embeddings,
        "swiglu": a.gated_mlp and a.activation == "silu",
        "gated_linear_unit": a.gated_mlp,
        "bias_gelu_fusion": a.activation == "gelu_tanh" and a.mlp_bias,
        "position_embedding_type": {kind: name for name, kind in POSITION_NAMES.items()}[a.position],
        "normalization": {kind: name for name, kind in NORM_NAMES.items()}[a.norm],
        "norm_epsilon": a.norm_eps,
        "layernorm_epsilon": a.norm_eps,  # megatron-core 0.16's name for it
        "add_bias_linear": a.mlp_bias,
        "add_qkv_bias": a.qkv_bias,
        "qk_layernorm": a.qk_norm,
        "rotary_base": int(a.rope_theta) if a.rope_theta.is_integer() else a.rope_theta,
        "rotary_seq_len_interpolation_factor": scaling.factor if scaling and scaling.kind == "linear" else None,
        "use_rope_scaling": scaling is not None and scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor if scaling and scaling.kind == "llama3" else 8.0,
        "window_size": (a.sliding_window - 1, 0) if a.sliding_window else None,
    }
    if a.num_decoder_layers:
        arguments |= {
            "encoder_num_layers": a.num_layers,
            "decoder_num_layers": a.num_decoder_layers,
            "relative_attention_num_buckets": a.relative_buckets,
            "relative_attention_max_distance": a.relative_max_distance,
        }
    arguments |= _expert_arguments(a)
    if a.latent:
        arguments |= {"multi_latent_attention": True, "qk_layernorm": True} | latent_arguments(a, a.latent)
        arguments |= router_arguments(a)
    if unwritable := unsayable(a):
        arguments["lost"] = "; ".join(unwritable)
    return arguments | {flag: a.dtype == dtype for dtype, flag in DTYPE_FLAGS.items()}


def _expert_arguments(a: Architecture) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if a.num_experts:
        arguments = {
            "num_experts": a.num_experts,
            "moe_router_topk": a.top_k,
            "moe_ffn_hidden_size": a.ffn_hidden_size,
            "moe_router_pre_softmax": not a.norm_topk_prob,
        }
    if a.shared_ffn_hidden_size:
        arguments |= {
            "moe_shared_expert_intermediate_size": a.shared_ffn_hidden_size,
            "moe_shared_expert_gate": a.shared_expert_gate,
        }
    return arguments


def run_arguments(architecture: Architecture, dtype: str) -> dict[str, Any]:
    """The arguments of a model in training: with the rows of its padded embedding. `dtype` is torch's name."""
    written = write_arguments(replace(architecture, dtype=dtype))
    return written | {"padded_vocab_size": architecture.padded_vocab_size()}


def unsayable(architecture: Architecture) -> tuple[str, ...]:
    """The properties of a model that no argument of Megatron-LM's pretrain_gpt.py (0.16) expresses, so that it would
    train another model."""
    a = architecture
    if a.num_decoder_layers:
        return ("T5 (its attention is not scaled, and pretrain_gpt.py has no encoder)",)
    lost_properties = []
    if a.latent:
        lost_properties += latent_unsayable(a, a.latent)
    scaling = a.rope_scaling
    if scaling and not a.latent and scaling != LLAMA3_SCALING:
        lost_properties.append(
            f"RoPE scaling {scaling.kind} by {scaling.factor:g}"
            + (f" from {scaling.original_max_seq_len:,} positions" if scaling.kind != "linear" else "")
            + " (its GPT follows --use-rope-scaling alone: llama3 by 8 from 8,192)"
        )
    if not a.rope_theta.is_integer():
        lost_properties.append(f"rope_theta {a.rope_theta:g} (--rotary-base is an integer)")
    biases = (a.qkv_bias, a.attention_output_bias, a.mlp_bias)
    if biases not in ((True, True, True), (True, False, False), (False, False, False)):
        lost_properties.append(
            "biases in some projections only (--disable-bias-linear leaves out all, --add-qkv-bias adds one)"
        )
    if a.norm_placement != "pre":
        lost_properties.append("norms after attention and MLP (it has norms before them only)")
    if a.scaled_embedding or a.attention_softcap or a.logit_softcap or a.local_rope_theta:
        lost_properties.append(
            "embeddings times sqrt(hidden_size), capped scores and logits, or another RoPE base under windows"
        )
    if a.qk_norm_whole:
        lost_properties.append("norms of queries and keys over all heads together (--qk-layernorm norms each head)")
    if a.rotary_dim or a.rotary_interleaved or a.no_rope_every:
        lost_properties.append("rotation of a part of each head, of neighbours, or not in every layer")
    if (a.embedding_scale, a.residual_scale, a.score_scale, a.logit_divisor) != (1, 1, 0, 1):
        lost_properties.append("scales of embeddings, residuals, scores or logits")
    if a.attention_sinks or a.gate_clamp or a.up_offset:
        lost_properties.append("attention sinks, clamped gates and their offset (--enable-gpt-oss is not written here)")
    if a.zero_centered_norm and not a.scaled_embedding:
        lost_properties.append("norms' weights as their distance from 1")
    if a.attention_chunk or a.qk_unit_norm or a.temperature_floor or a.router_on_inputs:
        lost_properties.append("attention in chunks, scales of queries, or routers that scale what enters experts")
    if (a.dense_ffn_hidden_size or a.router_score != "softmax") and not a.latent:
        lost_properties.append("routers by sigmoid or layers without experts beside plain attention")
    if a.top_k == 1 and a.norm_topk_prob:
        lost_properties.append("one expert a token with a weight of 1 (it wants --moe-router-pre-softmax)")
    sayable = ("silu",) if a.gated_mlp else ("gelu_tanh", "gelu")
    if a.activation not in sayable:
        lost_properties.append(f"{'gated ' * a.gated_mlp}{a.activation} in the MLP (it has {' and '.join(sayable)})")
    return tuple(lost_properties)


def command_line(architecture: Architecture) -> tuple[str, ...]:
    """Options of pretrain_gpt.py that build the model and set its weights' type, without ranks, data and training.

    Errors: ConfigError where `unsayable` names a property.
    """
    a = architecture
    if unwritable := unsayable(a):
        raise ConfigError(f"Megatron-LM's arguments cannot say {'; '.join(unwritable)}: train it with dynapipe train")
    arguments = write_arguments(a)
    options: list[str] = []
    for name in _VALUES:
        if name in arguments:
            options += [f"--{name.replace('_', '-')}", str(arguments[name])]
    options += [f"--{name.replace('_', '-')}" for name in _SWITCHES if arguments.get(name)]
    options += latent_options(a, a.latent) if a.latent else []
    options += ["--disable-bias-linear"] * (not a.mlp_bias)
    options += ["--no-bias-gelu-fusion"] * (a.activation == "gelu")
    if a.num_query_groups != a.num_heads:
        options += ["--group-query-attention", "--num-query-groups", str(a.num_query_groups)]
    if a.sliding_window:
        options += ["--window-size", f"{a.sliding_window - 1},0"]
    return (*options, "--attention-dropout", "0", "--hidden-dropout", "0")


def latent_arguments(architecture: Architecture, latent: LatentAttention) -> dict[str, Any]:
    """The fields that MLATransformerConfig has beyond TransformerConfig, with YaRN's only where the model uses it."""
    arguments: dict[str, Any] = {
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "rope",
    }
    if isinstance(yarn := architecture.rope_scaling, Yarn):
        arguments |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn.factor,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
            "original_max_position_embeddings": yarn.original_max_seq_len,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    return arguments


def router_arguments(architecture: Architecture) -> dict[str, Any]:
    """How the model chooses experts and which layers have them, as fields of TransformerConfig. Defaults are left
    out."""
    a = architecture
    arguments: dict[str, Any] = {}
    if a.router_score != "softmax":
        arguments["moe_router_score_function"] = a.router_score
    if a.router_bias:
        arguments["moe_router_enable_expert_bias"] = True
    if a.router_num_groups:
        arguments |= {"moe_router_num_groups": a.router_num_groups, "moe_router_group_topk": a.router_group_topk}
    if a.router_scale != 1:
        arguments["moe_router_topk_scaling_factor"] = a.router_scale
    if a.dense_ffn_hidden_size:
        arguments["moe_layer_freq"] = [int(a.has_experts(layer)) for layer in range(a.num_layers)]
    return arguments


def latent_unsayable(architecture: Architecture, latent: LatentAttention) -> list[str]:
    """The properties of a model with latent attention that pretrain_gpt.py has no argument for."""
    arguments = latent_arguments(architecture, latent)
    unusual = [
        f"{name} {arguments[name]:g}" for name, value in _WITHOUT_OPTION.items() if arguments.get(name, value) != value
    ]
    lost_properties = [f"YaRN with {', '.join(unusual)} (it has no option)"] * bool(unusual)
    if architecture.norm_eps != LATENT_NORM_EPS:
        lost_properties.append(
            f"norms of latent vectors with another epsilon ({LATENT_NORM_EPS:g}) than --norm-epsilon"
        )
    return lost_properties + [fault for fault in [router_fault(architecture)] if fault]


def latent_options(architecture: Architecture, latent: LatentAttention) -> list[str]:
    """Options of pretrain_gpt.py. A value of None has no option, a switch only its name."""
    options = ["--multi-latent-attention"]
    values = {**latent_arguments(architecture, latent), **router_arguments(architecture)}
    for name, value in values.items():
        if name == "moe_layer_freq":
            dense, num_experts = value.count(0), value.count(1)
            if value == [0] * dense + [1] * num_experts:
                value = f"([0]*{dense}+[1]*{num_experts})"
        if value is not None and name not in _WITHOUT_OPTION:
            options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return options


def router_fault(a: Architecture) -> str:
    """Why megatron-core 0.16 would choose other experts than this model; empty where it chooses the same.

    It scores a group by the sum of its best top_k // router_group_topk experts; DeepSeek-V2 by its best one, V3 by its
    best two.
    """
    best = 2 if a.router_score == "sigmoid" else 1
    if not a.router_num_groups or a.top_k // a.router_group_topk == best:
        return ""
    return (
        f"{a.family} scores a group of experts by its best {best}, megatron-core by its best num_experts_per_tok"
        f" {a.top_k} // topk_group {a.router_group_topk} = {a.top_k // a.router_group_topk}: it chooses others"
    )
