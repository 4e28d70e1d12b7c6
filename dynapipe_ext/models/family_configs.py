"""What takes more than a field to read from a config.json or to write: latent attention, routers, windows, T5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import Architecture, LatentAttention
from dynapipe_ext.models.config_fields import ACTIVATIONS, ConfigFields, rope_fields

LATENT_NORM_EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps says
WINDOWED, FULL = "sliding_attention", "full_attention"
Values = Mapping[str, Any]


def deepseek_values(
    fields: ConfigFields,
    values: Values,
    *,
    q_rank: int,
    num_shared: int,
    router: Callable[[ConfigFields, int], dict[str, Any]],
) -> dict[str, Any]:
    """Latent attention, experts and their router. Errors: ConfigError for what no layer of Megatron computes."""
    fields.refuse("num_key_value_heads", values["num_heads"])
    rope_fields(fields).refuse("truncate", True)
    latent = LatentAttention(
        q_rank=fields.count("q_lora_rank", q_rank),
        kv_rank=fields.integer("kv_lora_rank", 512),
        plain_dim=fields.integer("qk_nope_head_dim", 128),
        rotary_dim=fields.integer("qk_rope_head_dim", 64),
        value_dim=fields.integer("v_head_dim", 128),
    )
    width = {"latent": latent, "head_dim": latent.plain_dim + latent.rotary_dim}
    return width | _experts(fields, values, num_shared) | router(fields, values["top_k"])


def glm4_moe_values(fields: ConfigFields, values: Values) -> dict[str, Any]:
    """Experts and their router, which is DeepSeek-V3's."""
    return _experts(fields, values, 1) | deepseek_v3_router(fields, values["top_k"], groups=1, best=1)


def _experts(fields: ConfigFields, values: Values, num_shared: int) -> dict[str, Any]:
    """The shared experts, and the first layers, which have none."""
    dense = values["num_dense_layers"]
    if dense >= values["num_layers"]:
        raise ConfigError(
            f"{fields.where}: first_k_dense_replace is {dense} of {values['num_layers']} layers: a"
            f" {fields.raw.get('model_type')} without experts is not supported"
        )
    return {
        "shared_ffn_hidden_size": values["ffn_hidden_size"] * fields.count("n_shared_experts", num_shared),
        "dense_ffn_hidden_size": fields.integer("intermediate_size") if dense else 0,
    }


def deepseek_v2_router(fields: ConfigFields, top_k: int) -> dict[str, Any]:
    """Softmax; the best groups first where `topk_method` says so."""
    fields.refuse("scoring_func", "softmax")
    fields.refuse("norm_topk_prob", False)
    method = fields.raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"{fields.where}: topk_method is {short(method)}: give greedy or group_limited_greedy")
    limits = _limits(fields.count("n_group"), fields.count("topk_group")) if method != "greedy" else _limits(0, 0)
    return {"norm_topk_prob": False, "router_score": "softmax", "router_bias": False} | limits


def deepseek_v3_router(fields: ConfigFields, top_k: int, *, groups: int = 8, best: int = 4) -> dict[str, Any]:
    """Sigmoid with a bias where it chooses."""
    fields.refuse("scoring_func", "sigmoid")
    fields.refuse("topk_method", "noaux_tc")
    if fields.flag("norm_topk_prob", True) != (top_k > 1):
        raise ConfigError(
            f"{fields.where}: norm_topk_prob is {top_k <= 1} with num_experts_per_tok {top_k}: Megatron's sigmoid"
            " router makes weights sum to 1 where a token has several experts, and only there"
        )
    limits = _limits(fields.count("n_group", groups), fields.count("topk_group", best))
    return {"norm_topk_prob": top_k > 1, "router_score": "sigmoid", "router_bias": True} | limits


def _limits(groups: int, best: int) -> dict[str, Any]:
    """A limit that admits all groups is no limit."""
    has_limit = groups > 1 and best != groups
    return {"router_num_groups": groups if has_limit else 0, "router_group_topk": best if has_limit else 0}


def experts_config(a: Architecture) -> dict[str, Any]:
    """What `_experts` and the routers read."""
    return {
        "intermediate_size": a.dense_ffn_hidden_size or a.ffn_hidden_size,
        "n_shared_experts": a.shared_ffn_hidden_size // a.ffn_hidden_size,
        "n_group": a.router_num_groups or 1,
        "topk_group": a.router_group_topk or 1,
        "norm_topk_prob": a.norm_topk_prob,
    }


def deepseek_config(a: Architecture) -> dict[str, Any]:
    """The fields of config.json that Llama lacks or names otherwise."""
    assert a.latent is not None
    latent = {
        "head_dim": a.latent.rotary_dim,
        "q_lora_rank": a.latent.q_rank or None,
        "kv_lora_rank": a.latent.kv_rank,
        "qk_nope_head_dim": a.latent.plain_dim,
        "qk_rope_head_dim": a.latent.rotary_dim,
        "v_head_dim": a.latent.value_dim,
    }
    return experts_config(a) | latent


def deepseek_v2_config(a: Architecture) -> dict[str, Any]:
    return deepseek_config(a) | {"topk_method": "group_limited_greedy" if a.router_num_groups else "greedy"}


def gpt_oss_values(fields: ConfigFields, values: Values) -> dict[str, Any]:
    """Nothing. Errors: ConfigError without frequencies, for which transformers takes some kind of YaRN."""
    if not fields.raw.get("rope_parameters") and not fields.raw.get("rope_scaling"):
        raise ConfigError(
            f"{fields.where}: rope_parameters are missing: give them, or rope_type default for plain ones"
        )
    return {}


def gemma_values(
    fields: ConfigFields, values: Values, *, attention_cap: float = 0.0, logit_cap: float = 0.0
) -> dict[str, Any]:
    """The scale of scores, and caps; these are what transformers takes for missing ones."""
    return {
        "query_pre_attn_scalar": fields.integer("query_pre_attn_scalar", 256),
        "attention_softcap": _cap(fields, "attn_logit_softcapping", attention_cap),
        "logit_softcap": _cap(fields, "final_logit_softcapping", logit_cap),
    }


def gemma_config(a: Architecture) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": a.query_pre_attn_scalar,
        "attn_logit_softcapping": a.attention_softcap or None,
        "final_logit_softcapping": a.logit_softcap or None,
    }


def _cap(fields: ConfigFields, name: str, default: float) -> float:
    if name in fields.raw and fields.raw[name] is None:
        return 0.0
    return fields.number(name, default) if default or fields.raw.get(name) is not None else 0.0


def windows_by_layer(fields: ConfigFields, num_layers: int, *, default: int, every: int) -> dict[str, int]:
    """Which layers have a window, by `layer_types`. Errors: ConfigError for a pattern that is not of every n-th layer.

    `default` and `every` are what transformers takes for a missing width and pattern.
    """
    every = _full_attention_every(fields, num_layers, every)
    if every == 1:
        return {"sliding_window": 0, "full_attention_every": 0}
    return {"sliding_window": fields.integer("sliding_window", default), "full_attention_every": every}


def _full_attention_every(fields: ConfigFields, num_layers: int, default: int) -> int:
    """n, where every n-th layer has no window. 1: no layer has one; 0: all layers have one."""
    types = fields.raw.get("layer_types")
    if types is None:
        every = fields.integer("sliding_window_pattern", default)
        return every if every <= num_layers else 0
    if not isinstance(types, Sequence) or len(types) != num_layers or set(types) - {WINDOWED, FULL}:
        raise ConfigError(
            f"{fields.where}: layer_types is {short(types)} but must be {num_layers} of {WINDOWED} and {FULL}"
        )
    every = types.index(FULL) + 1 if FULL in types else 0
    if any((kind == FULL) != bool(every and (layer + 1) % every == 0) for layer, kind in enumerate(types)):
        raise ConfigError(
            f"{fields.where}: layer_types is {short(types)}: exactly every n-th layer, from the n-th on, must be"
            " without a window"
        )
    return every


def rope_of_type(fields: ConfigFields, layer_type: str) -> Mapping[str, Any]:
    """The frequencies of one type of layer, from `rope_parameters` (transformers 5; older files had one for all)."""
    rope = fields.raw.get("rope_parameters") or {}
    is_by_type = isinstance(rope, Mapping) and set(rope) <= {FULL, WINDOWED}
    if not is_by_type or not isinstance(of_type := rope.get(layer_type) or {}, Mapping):
        raise ConfigError(
            f"{fields.where}: rope_parameters is {short(rope)} but must be objects under {FULL} and {WINDOWED}"
        )
    return of_type


def layers_without_rope(fields: ConfigFields, values: Values) -> dict[str, int]:
    """Every n-th layer turns nothing: by `no_rope_layers`, whose 1 is a layer that turns, or the interval."""
    layers, num_layers = fields.raw.get("no_rope_layers"), values["num_layers"]
    if layers is None:
        every = fields.integer("no_rope_layer_interval", 4)
        return {"no_rope_every": every if every <= num_layers else 0}
    if not isinstance(layers, Sequence) or len(layers) != num_layers or set(layers) - {0, 1}:
        raise ConfigError(f"{fields.where}: no_rope_layers is {short(layers)} but must be {num_layers} of 0 and 1")
    every = list(layers).index(0) + 1 if 0 in layers else 0
    if list(layers) != [int(not every or (layer + 1) % every != 0) for layer in range(num_layers)]:
        raise ConfigError(
            f"{fields.where}: no_rope_layers is {short(layers)}: exactly every n-th layer, from the n-th on, must be 0"
        )
    return {"no_rope_every": every}


def llama4_values(fields: ConfigFields, values: Values) -> dict[str, Any]:
    """Chunks, scaled queries and layers with experts. Errors: ConfigError for what no layer of Megatron computes."""
    fields.refuse("num_experts_per_tok", 1)  # megatron-core scales what enters an expert where a token has one
    num_layers, turning = values["num_layers"], layers_without_rope(fields, values)
    every = turning["no_rope_every"]
    kinds = ["chunked_attention" if not every or (i + 1) % every else "full_attention" for i in range(num_layers)]
    if (types := fields.raw.get("layer_types")) not in (None, kinds):
        raise ConfigError(
            f"{fields.where}: layer_types is {short(types)} but must be chunked_attention where no_rope_layers is 1,"
            " and full_attention elsewhere"
        )
    dense_layers = _layers_between_experts(fields, num_layers)
    tuned = fields.flag("attn_temperature_tuning", True)
    return turning | {
        "shared_ffn_hidden_size": values["ffn_hidden_size"],
        "dense_layers": dense_layers,
        "dense_ffn_hidden_size": fields.integer("intermediate_size_mlp", 16_384) if dense_layers else 0,
        "attention_chunk": fields.integer("attention_chunk_size", 8192),
        "qk_unit_norm": fields.flag("use_qk_norm", True),
        "temperature_floor": fields.integer("floor_scale", 8192) if tuned else 0,
        "temperature_scale": fields.number("attn_scale", 0.1) if tuned else 0.0,
    }


def _layers_between_experts(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """All but every n-th layer, which have experts. Errors: ConfigError for other layers of experts."""
    layers = fields.raw.get("moe_layers")
    step = fields.integer("interleave_moe_layer_step", 1)
    if layers is not None:
        step = layers[0] + 1 if isinstance(layers, list) and layers and isinstance(layers[0], int) else 0
    if not 1 <= step <= num_layers or layers not in (None, list(range(step - 1, num_layers, step))):
        raise ConfigError(
            f"{fields.where}: moe_layers is {short(layers)} (interleave_moe_layer_step {step}) of {num_layers} layers:"
            " exactly every n-th layer, from the n-th on, must have experts"
        )
    return tuple(layer for layer in range(num_layers) if (layer + 1) % step)


def llama4_config(a: Architecture) -> dict[str, Any]:
    turns = [a.turns(layer) for layer in range(a.num_layers)]
    experts = [layer for layer in range(a.num_layers) if a.has_experts(layer)]
    return {
        "no_rope_layers": [int(turned) for turned in turns],
        "layer_types": ["chunked_attention" if turned else "full_attention" for turned in turns],
        "moe_layers": experts,
        "interleave_moe_layer_step": experts[0] + 1,
        "intermediate_size_mlp": a.dense_ffn_hidden_size or 2 * a.ffn_hidden_size,
        "attention_chunk_size": a.attention_chunk,
        "use_qk_norm": a.qk_unit_norm,
        "attn_temperature_tuning": bool(a.temperature_floor),
        "floor_scale": a.temperature_floor or 8192,
        "attn_scale": a.temperature_scale,
    }


def t5_values(fields: ConfigFields, values: Values, *, default: str = "relu") -> dict[str, Any]:
    """transformers 5 writes tie_word_embeddings true for every T5: only the weight files tell whether a head is
    tied."""
    kind = fields.raw.get("feed_forward_proj") or default
    gated, _dash, name = str(kind).rpartition("-")
    if gated not in ("", "gated") or name not in ACTIVATIONS:
        raise ConfigError(f"{fields.where}: feed_forward_proj is {short(kind)}: give relu, gated-gelu or gated-silu")
    if start := fields.raw.get("decoder_start_token_id"):
        raise ConfigError(f"{fields.where}: decoder_start_token_id is {short(start)} but every T5 starts with 0")
    followed = "gelu_new" if kind == "gated-gelu" else name
    # What follows from the kind counts only if the file does not say it itself.
    activation = fields.activation("dense_act_fn", followed)
    return {"gated_mlp": fields.flag("is_gated_act", bool(gated)), "activation": activation}


def t5_config(a: Architecture) -> dict[str, Any]:
    name: str = "gelu_new" if a.activation == "gelu_tanh" else a.activation
    kind = "gelu" if a.gated_mlp and a.activation == "gelu_tanh" else name
    kind = f"gated-{kind}" if a.gated_mlp else kind
    return {"feed_forward_proj": kind, "dense_act_fn": name, "is_gated_act": a.gated_mlp}
