"""Megatron's names for latent attention and for routers of DeepSeek's kind: of its configuration and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import Architecture, LatentAttention, Yarn
from dynapipe_ext.models.family_configs import LATENT_NORM_EPS, router_fault

# Arguments that only models of latent attention may have at other values than the usual ones.
OF_LATENT = (
    "rope_type", "moe_layer_freq", "moe_router_score_function", "moe_router_enable_expert_bias",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
)  # fmt: skip
_WITHOUT_OPTION = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}  # and its value


def latent_arguments(architecture: Architecture, latent: LatentAttention) -> dict[str, Any]:
    """What MLATransformerConfig says beyond TransformerConfig. YaRN's names are there with it only."""
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
    """How experts are chosen and which layers have them, as TransformerConfig says it; nothing where it is as ever."""
    a = architecture
    found: dict[str, Any] = {}
    if a.router_score != "softmax":
        found["moe_router_score_function"] = a.router_score
    if a.router_bias:
        found["moe_router_enable_expert_bias"] = True
    if a.router_num_groups:
        found |= {"moe_router_num_groups": a.router_num_groups, "moe_router_group_topk": a.router_group_topk}
    if a.router_scale != 1:
        found["moe_router_topk_scaling_factor"] = a.router_scale
    if a.num_dense_layers:
        found["moe_layer_freq"] = [int(layer >= a.num_dense_layers) for layer in range(a.num_layers)]
    return found


def latent_values(arguments: Mapping[str, Any], where: str, dense_ffn_hidden_size: int) -> dict[str, Any]:
    """The fields of an Architecture that `multi_latent_attention` changes. Errors: ConfigError naming the argument."""

    def number(name: str, default: float | None = None) -> Any:
        value = arguments.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{where}: {name} is {short(arguments.get(name))} but must be a number of at least 0")
        return value

    if not arguments.get("qk_layernorm"):
        raise ConfigError(f"{where}: qk_layernorm is off, but latent vectors of the families here are normed")
    kind = arguments.get("rope_type") or "yarn"
    if kind not in ("rope", "yarn"):
        raise ConfigError(f"{where}: rope_type is {short(kind)}: give rope or yarn")
    latent = LatentAttention(
        q_rank=number("q_lora_rank", 0),
        kv_rank=number("kv_lora_rank"),
        plain_dim=number("qk_head_dim", 128),
        rotary_dim=number("qk_pos_emb_head_dim", 64),
        value_dim=number("v_head_dim", 128),
    )
    yarn = Yarn(
        factor=float(number("rotary_scaling_factor", 1.0)),
        original_max_seq_len=number("original_max_position_embeddings", 4096),
        beta_fast=float(number("beta_fast", 32.0)),
        beta_slow=float(number("beta_slow", 1.0)),
        mscale=float(number("mscale", 1.0)),
        mscale_all_dim=float(number("mscale_all_dim", 0.0)),
    )
    pattern = arguments.get("moe_layer_freq")
    each = list(pattern) if isinstance(pattern, list | tuple) else [1]
    num_dense = each.index(1) if 1 in each else len(each)
    if pattern not in (None, 1) and each != [int(layer >= num_dense) for layer in range(len(each))]:
        raise ConfigError(f"{where}: moe_layer_freq is {short(pattern)} but must be 0 of the first layers and then 1")
    score = arguments.get("moe_router_score_function") or "softmax"
    sums = {"norm_topk_prob": number("moe_router_topk", 2) > 1} if score == "sigmoid" else {}
    return sums | {
        "family": "deepseek_v3" if score == "sigmoid" else "deepseek_v2",
        "head_dim": latent.plain_dim + latent.rotary_dim,
        "latent": latent,
        "rope_scaling": None if kind == "rope" or yarn.factor == 1 else yarn,
        "qk_norm": False,
        "num_dense_layers": num_dense,
        "dense_ffn_hidden_size": dense_ffn_hidden_size if num_dense else 0,
        "router_score": score,
        "router_bias": bool(arguments.get("moe_router_enable_expert_bias")),
        "router_num_groups": number("moe_router_num_groups", 0),
        "router_group_topk": number("moe_router_group_topk", 0),
        "router_scale": float(number("moe_router_topk_scaling_factor", 1.0)),
    }


def latent_unsayable(architecture: Architecture, latent: LatentAttention) -> list[str]:
    """What pretrain_gpt.py cannot be told of such a model."""
    said = latent_arguments(architecture, latent)
    other = [f"{name} {said[name]:g}" for name, value in _WITHOUT_OPTION.items() if said.get(name, value) != value]
    found = [f"YaRN with {', '.join(other)} (it has no option)"] * bool(other)
    if architecture.norm_eps != LATENT_NORM_EPS:
        found.append(f"norms of latent vectors with another epsilon ({LATENT_NORM_EPS:g}) than --norm-epsilon")
    return found + [fault for fault in [router_fault(architecture)] if fault]


def latent_options(architecture: Architecture, latent: LatentAttention) -> list[str]:
    """Options of pretrain_gpt.py; of a value none at None, of a switch its name alone."""
    options = ["--multi-latent-attention"]
    values = {**latent_arguments(architecture, latent), **router_arguments(architecture)}
    for name, value in values.items():
        if name == "moe_layer_freq":
            dense = architecture.num_dense_layers
            value = f"([0]*{dense}+[1]*{architecture.num_layers - dense})"
        if value is not None and name not in _WITHOUT_OPTION:
            options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return options
