"""What every published family is: one value a family, from which readers, writers, tensors and counts follow.

A decoder-only family differs from Llama in the fields of its config.json (`ConfigField`), in what all its models have
(`traits`), and in the names of its tensors (`TensorNames`). `family_configs.py` has what takes more than a field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.family_configs import (
    deepseek_config,
    deepseek_v2_config,
    deepseek_v2_router,
    deepseek_v3_router,
    deepseek_values,
    experts_config,
    gemma_config,
    gemma_values,
    glm4_moe_values,
    gpt_oss_values,
    layers_without_rope,
    llama4_config,
    llama4_values,
    t5_config,
    t5_values,
)
from dynapipe_ext.models.forms import ConfigField, PublishedForm, TensorNames, per_head, same_as


def _sizes(
    eps: float = 1e-6,
    positions: int | None = None,
    *,
    groups: Any = None,
    head_dim: Any = per_head,
    tied: bool = False,
    eps_name: str = "rms_norm_eps",
    activation: str = "silu",
    activation_name: str = "hidden_act",
) -> tuple[ConfigField, ...]:
    """Llama's fields, with what transformers takes for those that are missing."""
    return (
        ConfigField("num_layers", "num_hidden_layers"),
        ConfigField("hidden_size", "hidden_size"),
        ConfigField("num_heads", "num_attention_heads"),
        ConfigField("num_query_groups", "num_key_value_heads", default=groups),
        ConfigField("head_dim", "head_dim", default=head_dim),
        ConfigField("ffn_hidden_size", "intermediate_size"),
        ConfigField("vocab_size", "vocab_size"),
        ConfigField("max_seq_len", "max_position_embeddings", default=positions),
        ConfigField("tied_embeddings", "tie_word_embeddings", "flag", tied),
        ConfigField("activation", activation_name, "activation", activation),
        ConfigField("norm_eps", eps_name, "number", eps),
    )


def _biases(name: str, *parts: str, default: bool = False) -> tuple[ConfigField, ...]:
    return tuple(ConfigField(part, name, "flag", default) for part in parts)


_ATTENTION_BIAS = _biases("attention_bias", "qkv_bias", "attention_output_bias")
_MLP_BIAS = _biases("mlp_bias", "mlp_bias")
_ALL_HEADS = same_as("num_heads")


def _experts(name: str, num: int, top_k: int, ffn: int) -> tuple[ConfigField, ...]:
    return (
        ConfigField("num_experts", name, default=num),
        ConfigField("top_k", "num_experts_per_tok", default=top_k),
        ConfigField("ffn_hidden_size", "moe_intermediate_size", default=ffn),
        ConfigField("norm_topk_prob", "norm_topk_prob", "flag", False),
    )


_WHOLE = {"partial_rotary_factor": (1.0,)}  # whole heads turn
_EVERY_LAYER = _WHOLE | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_ROUTED = {"num_experts": "n_routed_experts"}
_GEMMA_NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm")
_GEMMA: dict[str, Any] = {"zero_centered_norm": True, "scaled_embedding": True}
_JOINED = TensorNames(attention_in=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",))
_UNGATED: dict[str, Any] = {"gated_mlp": False, "norm": "layernorm"}


def _gemma_sizes(positions: int) -> tuple[ConfigField, ...]:
    tanh: dict[str, Any] = {"activation": "gelu_pytorch_tanh", "activation_name": "hidden_activation"}
    return (*_sizes(1e-6, positions, groups=4, head_dim=256, tied=True, **tanh), *_ATTENTION_BIAS)


def _deepseek_sizes(
    positions: int, *, experts: int, top_k: int | None, ffn: int, dense: int, scale: float
) -> tuple[ConfigField, ...]:
    sizes = _sizes(1e-6, positions, groups=_ALL_HEADS)
    return (
        *(size for size in sizes if size.part not in ("head_dim", "ffn_hidden_size")),
        ConfigField("num_experts", "n_routed_experts", default=experts),
        ConfigField("top_k", "num_experts_per_tok", default=top_k),
        ConfigField("ffn_hidden_size", "moe_intermediate_size", default=ffn),
        ConfigField("num_dense_layers", "first_k_dense_replace", "count", dense),
        ConfigField("router_scale", "routed_scaling_factor", "number", scale),
    )


_DEEPSEEK_REFUSED = _WHOLE | {
    "attention_bias": (False,), "mlp_bias": (False,), "rope_interleave": (True,), "moe_layer_freq": (1,),
}  # fmt: skip
_DEEPSEEK_V3 = PublishedForm(
    model_class="DeepseekV3ForCausalLM",
    fields=_deepseek_sizes(4096, experts=256, top_k=8, ffn=2048, dense=3, scale=2.5),
    names=TensorNames(shared_expert="mlp.shared_experts"),
    aliases={"num_local_experts": "n_routed_experts"},
    refused=_DEEPSEEK_REFUSED,
    ropes=("default", "yarn"),
    read=partial(deepseek_values, q_rank=1536, num_shared=1, router=deepseek_v3_router),
    write=deepseek_config,
    written={
        "attention_bias": False, "pad_token_id": None, "moe_layer_freq": 1, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "rope_interleave": True, "num_nextn_predict_layers": 0,
    },
    has_prediction_layers=True,
)  # fmt: skip
_GLM = PublishedForm(
    model_class="GlmForCausalLM",
    fields=(
        *_sizes(0.00000015625, 131_072, groups=2, head_dim=128),
        *_biases("attention_bias", "qkv_bias", default=True),
    ),
    traits={"rotary_interleaved": True},
    names=TensorNames(mlp_in=("mlp.gate_up_proj",)),
    written={"pad_token_id": None},
    rotary_share=0.5,
)


def _t5_fields(*, layers: int, heads: int, ffn: int, vocab: int) -> tuple[ConfigField, ...]:
    return (
        ConfigField("num_layers", "num_layers", default=layers),
        ConfigField("num_decoder_layers", "num_decoder_layers", default=same_as("num_layers")),
        ConfigField("hidden_size", "d_model", default=512),
        ConfigField("num_heads", "num_heads", default=heads),
        ConfigField("num_query_groups", "", default=_ALL_HEADS),
        ConfigField("head_dim", "d_kv", default=64),
        ConfigField("ffn_hidden_size", "d_ff", default=ffn),
        ConfigField("vocab_size", "vocab_size", default=vocab),
        ConfigField("max_seq_len", "n_positions", default=512),
        ConfigField("tied_embeddings", "tie_word_embeddings", "flag", True),
        ConfigField("norm_eps", "layer_norm_epsilon", "number", 1e-6),
        ConfigField("relative_buckets", "relative_attention_num_buckets", default=32),
        ConfigField("relative_max_distance", "relative_attention_max_distance", default=128),
    )


_T5 = PublishedForm(
    model_class="T5ForConditionalGeneration",
    fields=(
        *_t5_fields(layers=6, heads=8, ffn=2048, vocab=32_128),
        ConfigField("scaled_output", "scale_decoder_outputs", "flag", same_as("tied_embeddings")),
    ),
    traits={"position": "relative"},
    aliases={
        "hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    written={"is_encoder_decoder": True, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
    ropes=(),
    read=t5_values,
    write=t5_config,
)  # fmt: skip

FORMS: Mapping[str, PublishedForm] = MappingProxyType({
    "llama": PublishedForm(
        model_class="LlamaForCausalLM",
        fields=(*_sizes(1e-6, 2048, groups=_ALL_HEADS), *_ATTENTION_BIAS, *_MLP_BIAS),
        refused=_WHOLE,
    ),
    "mistral": PublishedForm(
        model_class="MistralForCausalLM",
        fields=_sizes(1e-6, 131_072),
        refused=_WHOLE,
        windows="all",
        default_window=4096,
    ),
    "mixtral": PublishedForm(
        model_class="MixtralForCausalLM",
        fields=(
            *_sizes(1e-5, 131_072),
            ConfigField("num_experts", "num_local_experts", default=8),
            ConfigField("top_k", "num_experts_per_tok", default=2),
        ),
        names=TensorNames(
            router="block_sparse_moe.gate",
            expert_in=("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
            expert_out="block_sparse_moe.experts.{e}.w2",
        ),
        aliases={"num_experts": "num_local_experts"},
        refused=_WHOLE,
        rope_theta=1e6,
        windows="all",
    ),
    "qwen2": PublishedForm(
        model_class="Qwen2ForCausalLM",
        fields=_sizes(1e-6, 32_768),
        traits={"qkv_bias": True},
        refused=_WHOLE,
        windows="refused",
    ),
    "qwen2_moe": PublishedForm(
        model_class="Qwen2MoeForCausalLM",
        fields=(
            *_sizes(1e-6, 32_768),
            *_biases("qkv_bias", "qkv_bias", default=True),
            *_experts("num_experts", 60, 4, 1408),
            ConfigField("shared_ffn_hidden_size", "shared_expert_intermediate_size", default=5632),
        ),
        traits={"shared_expert_gate": True},
        refused=_EVERY_LAYER,
        windows="refused",
    ),
    "qwen3": PublishedForm(
        model_class="Qwen3ForCausalLM",
        fields=(*_sizes(1e-6, 32_768, head_dim=128), *_ATTENTION_BIAS),
        traits={"qk_norm": True},
        refused=_WHOLE,
        windows="refused",
    ),
    "qwen3_moe": PublishedForm(
        model_class="Qwen3MoeForCausalLM",
        fields=(*_sizes(1e-6, 32_768), *_ATTENTION_BIAS, *_experts("num_experts", 128, 8, 768)),
        traits={"qk_norm": True},
        aliases={"num_local_experts": "num_experts"},  # transformers 5 writes it
        refused=_EVERY_LAYER,
        windows="refused",
    ),
    "phi3": PublishedForm(
        model_class="Phi3ForCausalLM",
        fields=_sizes(1e-5, 4096, groups=_ALL_HEADS),
        names=_JOINED,
        written={"pad_token_id": None},  # transformers' default would lie outside a small vocabulary
        ropes=("default", "longrope"),
        rotary_share=1.0,
        trained_len=4096,
        windows="all",
    ),
    "olmo2": PublishedForm(
        model_class="Olmo2ForCausalLM",
        fields=(*_sizes(1e-5, 2048, groups=_ALL_HEADS), *_ATTENTION_BIAS),
        traits={"norm_placement": "post", "qk_norm": True, "qk_norm_whole": True},
        refused=_WHOLE,
    ),
    "gemma2": PublishedForm(
        model_class="Gemma2ForCausalLM",
        fields=_gemma_sizes(8192),
        traits=_GEMMA | {"norm_placement": "both"},
        names=_GEMMA_NAMES,
        refused=_WHOLE | {"use_bidirectional_attention": (False,), "sliding_window_pattern": (2,)},
        windows="by_layer",
        default_window=4096,
        full_attention_every=2,
        read=partial(gemma_values, attention_cap=50.0, logit_cap=30.0),
        write=gemma_config,
    ),
    "gemma3_text": PublishedForm(
        model_class="Gemma3ForCausalLM",
        fields=_gemma_sizes(131_072),
        traits=_GEMMA | {"norm_placement": "both", "qk_norm": True},
        names=_GEMMA_NAMES,
        refused=_WHOLE | {"use_bidirectional_attention": (False,)},
        ropes=("default", "linear", "llama3"),
        rope_theta=1e6,
        window_rope=ConfigField("local_rope_theta", "rope_local_base_freq", "number", 1e4),
        windows="by_layer",
        default_window=4096,
        full_attention_every=6,
        read=gemma_values,
        write=gemma_config,
    ),
    "deepseek_v2": PublishedForm(
        model_class="DeepseekV2ForCausalLM",
        fields=_deepseek_sizes(2048, experts=64, top_k=None, ffn=1407, dense=0, scale=1.0),
        names=TensorNames(shared_expert="mlp.shared_experts"),
        aliases=_ROUTED,
        refused=_DEEPSEEK_REFUSED,
        ropes=("default", "yarn"),
        read=partial(deepseek_values, q_rank=1536, num_shared=2, router=deepseek_v2_router),
        write=deepseek_v2_config,
        written={
            "attention_bias": False, "mlp_bias": False, "pad_token_id": None, "moe_layer_freq": 1,
            "scoring_func": "softmax",
        },
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "gpt2": PublishedForm(
        model_class="GPT2LMHeadModel",
        fields=(
            ConfigField("num_layers", "n_layer", default=12),
            ConfigField("hidden_size", "n_embd", default=768),
            ConfigField("num_heads", "n_head", default=12),
            ConfigField("num_query_groups", "", default=_ALL_HEADS),
            ConfigField("head_dim", "", default=per_head),
            ConfigField("ffn_hidden_size", "n_inner", default=lambda values: 4 * values["hidden_size"]),
            ConfigField("max_seq_len", "n_positions", default=1024),
            ConfigField("vocab_size", "vocab_size", default=50_257),
            ConfigField("tied_embeddings", "tie_word_embeddings", "flag", True),
            ConfigField("norm_eps", "layer_norm_epsilon", "number", 1e-5),
            ConfigField("activation", "activation_function", "activation", "gelu_new"),
        ),
        traits=_UNGATED
        | {"position": "learned", "qkv_bias": True, "attention_output_bias": True, "mlp_bias": True},
        names=TensorNames(
            embedding="transformer.wte",
            position="transformer.wpe",
            final_norm="transformer.ln_f",
            layer="transformer.h.{i}",
            attention_norm="ln_1",
            mlp_norm="ln_2",
            attention_in=("attn.c_attn",),
            attention_out="attn.c_proj",
            mlp_in=("mlp.c_fc",),
            mlp_out="mlp.c_proj",
            transposed=True,
        ),
        aliases={
            "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
        },
        refused={
            "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
        },
        ropes=(),
        write=lambda a: {"activation_function": "gelu_new"} if a.activation == "gelu_tanh" else {},
    ),
    "t5": _T5,
    "mt5": replace(
        _T5,
        model_class="MT5ForConditionalGeneration",
        fields=_t5_fields(layers=8, heads=6, ffn=1024, vocab=250_112),
        traits={"position": "relative", "scaled_output": False},
        read=partial(t5_values, default="gated-gelu"),
    ),
    "smollm3": PublishedForm(
        model_class="SmolLM3ForCausalLM",
        fields=(*_sizes(1e-6, 32_768, groups=4, tied=True), *_ATTENTION_BIAS, *_MLP_BIAS),
        refused=_WHOLE,
        written={"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
        rope_theta=2e6,
        windows="refused",
        read=layers_without_rope,
        write=lambda a: {"no_rope_layers": [int(a.turns(layer)) for layer in range(a.num_layers)]},
    ),
    "granite": PublishedForm(
        model_class="GraniteForCausalLM",
        fields=(
            *_sizes(1e-6, 2048, groups=_ALL_HEADS),
            *_ATTENTION_BIAS,
            *_MLP_BIAS,
            ConfigField("embedding_scale", "embedding_multiplier", "number", 1.0),
            ConfigField("residual_scale", "residual_multiplier", "number", 1.0),
            ConfigField("score_scale", "attention_multiplier", "number", 1.0),
            ConfigField("logit_divisor", "logits_scaling", "number", 1.0),
        ),
        refused=_WHOLE,
    ),
    "olmoe": PublishedForm(
        model_class="OlmoeForCausalLM",
        fields=(
            *_sizes(1e-5, 4096, groups=_ALL_HEADS),
            *_ATTENTION_BIAS,
            ConfigField("num_experts", "num_experts", default=64),
            ConfigField("top_k", "num_experts_per_tok", default=8),
            ConfigField("norm_topk_prob", "norm_topk_prob", "flag", False),
        ),
        traits={"qk_norm": True, "qk_norm_whole": True},
        aliases={"num_local_experts": "num_experts"},
        refused=_WHOLE | {"clip_qkv": ()},
        written={"pad_token_id": None, "eos_token_id": None},
    ),
    "olmo3": PublishedForm(
        model_class="Olmo3ForCausalLM",
        fields=(*_sizes(1e-5, 2048, groups=_ALL_HEADS), *_ATTENTION_BIAS),
        traits={"norm_placement": "post", "qk_norm": True, "qk_norm_whole": True},
        refused=_WHOLE | {"sliding_window_pattern": (4,)},
        written={"pad_token_id": None, "eos_token_id": None},
        rope_theta=5e5,
        window_rope=ConfigField("local_rope_theta", "", "number", 5e5),
        windows="by_layer",
        default_window=4096,
        full_attention_every=4,
    ),
    "gemma": PublishedForm(
        model_class="GemmaForCausalLM",
        fields=(
            *_sizes(1e-6, 8192, groups=16, head_dim=256, tied=True, activation="gelu_pytorch_tanh"),
            *_ATTENTION_BIAS,
        ),
        traits=_GEMMA,
        refused=_WHOLE | {"use_bidirectional_attention": (False,)},
        read=lambda fields, values: {"activation": "gelu_tanh"} if values["activation"] == "gelu" else {},
    ),
    "starcoder2": PublishedForm(
        model_class="Starcoder2ForCausalLM",
        fields=(
            *_sizes(1e-5, 4096, groups=2, tied=True, eps_name="norm_epsilon", activation="gelu_pytorch_tanh"),
            *_biases("use_bias", "qkv_bias", "attention_output_bias", "mlp_bias", default=True),
        ),
        traits=_UNGATED,
        names=TensorNames(mlp_in=("mlp.c_fc",), mlp_out="mlp.c_proj"),
        refused=_WHOLE,
        written={"bos_token_id": None, "eos_token_id": None},
        windows="all",
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        model_class="Glm4ForCausalLM",
        traits={"rotary_interleaved": True, "norm_placement": "both"},
        names=replace(
            _GLM.names, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
        ),
    ),
    "glm4_moe": PublishedForm(
        model_class="Glm4MoeForCausalLM",
        fields=(
            *_sizes(1e-5, 131_072, groups=8),
            *_biases("attention_bias", "qkv_bias"),
            ConfigField("qk_norm", "use_qk_norm", "flag", False),
            ConfigField("num_experts", "n_routed_experts", default=128),
            ConfigField("top_k", "num_experts_per_tok", default=8),
            ConfigField("ffn_hidden_size", "moe_intermediate_size", default=1408),
            ConfigField("num_dense_layers", "first_k_dense_replace", "count", 1),
            ConfigField("router_scale", "routed_scaling_factor", "number", 1.0),
        ),
        names=TensorNames(shared_expert="mlp.shared_experts"),
        aliases={"num_local_experts": "n_routed_experts"},
        written={"num_nextn_predict_layers": 0},
        rotary_share=0.5,
        read=glm4_moe_values,
        write=experts_config,
        has_prediction_layers=True,
    ),
    "nemotron": PublishedForm(
        model_class="NemotronForCausalLM",
        fields=(
            *_sizes(1e-5, 4096, groups=_ALL_HEADS, eps_name="norm_eps", activation="relu2"),
            *_ATTENTION_BIAS,
            *_MLP_BIAS,
        ),
        traits=_UNGATED | {"zero_centered_norm": True},
        names=TensorNames(mlp_in=("mlp.up_proj",)),
        rotary_share=0.5,
    ),
    "internlm2": PublishedForm(
        model_class="InternLM2ForCausalLM",
        fields=(
            *_sizes(1e-6, 2048, groups=_ALL_HEADS),
            *_biases("bias", "qkv_bias", "attention_output_bias", default=True),
        ),
        names=TensorNames(
            embedding="model.tok_embeddings",
            head="output",
            attention_norm="attention_norm",
            mlp_norm="ffn_norm",
            attention_in=("attention.wqkv",),
            attention_out="attention.wo",
            mlp_in=("feed_forward.w1", "feed_forward.w3"),
            mlp_out="feed_forward.w2",
            grouped_qkv=True,
        ),
        refused=_WHOLE,
        ropes=("default", "linear", "dynamic"),
    ),
    "kimi_k2": _DEEPSEEK_V3,
    "gpt_oss": PublishedForm(
        model_class="GptOssForCausalLM",
        fields=(
            *(size for size in _sizes(1e-5, 131_072, head_dim=64) if size.part != "activation"),
            *_biases("attention_bias", "qkv_bias", "attention_output_bias", default=True),
            ConfigField("num_experts", "num_local_experts", default=128),
            ConfigField("top_k", "num_experts_per_tok", default=4),
            ConfigField("gate_clamp", "swiglu_limit", "number", 7.0),
        ),
        traits={"activation": "quick_gelu", "up_offset": 1.0, "mlp_bias": True, "attention_sinks": True},
        names=TensorNames(
            router="mlp.router",
            expert_in=("mlp.experts.gate_up_proj",),
            expert_out="mlp.experts.down_proj",
            joined_experts="neighbours",
        ),
        aliases={"num_experts": "num_local_experts"},
        refused=_WHOLE | {"swiglu_alpha": (1.702,)},
        written={"hidden_act": "silu", "swiglu_alpha": 1.702},
        rope_theta=150_000.0,
        windows="by_layer",
        default_window=128,
        full_attention_every=2,
        read=gpt_oss_values,
    ),
    "llama4_text": PublishedForm(
        model_class="Llama4ForCausalLM",
        fields=(
            *_sizes(1e-5, 131_072, groups=8, head_dim=128),
            *_ATTENTION_BIAS,
            ConfigField("num_experts", "num_local_experts", default=16),
            ConfigField("top_k", "num_experts_per_tok", default=1),
        ),
        traits={
            "rotary_interleaved": True, "norm_topk_prob": False, "router_score": "sigmoid", "router_on_inputs": True,
        },
        names=TensorNames(
            mlp_in=("feed_forward.gate_proj", "feed_forward.up_proj"),
            mlp_out="feed_forward.down_proj",
            router="feed_forward.router",
            expert_in=("feed_forward.experts.gate_up_proj",),
            expert_out="feed_forward.experts.down_proj",
            shared_expert="feed_forward.shared_expert",
            joined_experts="halves",
        ),
        aliases={"num_experts": "num_local_experts"},
        refused=_WHOLE,
        written={"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
        ropes=("default", "llama3"),
        rope_theta=5e5,
        read=llama4_values,
        write=llama4_config,
    ),
})  # fmt: skip


def published_form(architecture: Architecture) -> PublishedForm:
    """Errors: ConfigError for a model in custom sizes, which nobody publishes."""
    if architecture.family in ("gpt", "transformers"):
        raise ConfigError(
            "a model in custom sizes has no published names of tensors: give a published model's config.json"
        )
    return FORMS[architecture.family]
