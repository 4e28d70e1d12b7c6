"""Megatron-LM's arguments, by the names that its releases use, as an `Architecture`.

`written_arguments.py` is the way back.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.models.architecture import MOST, Activation, Architecture, Family, LatentAttention, Position
from dynapipe_ext.models.huggingface import read_config, write_config
from dynapipe_ext.models.rope_scaling import RopeScaling, Yarn

FOLLOWED = frozenset(
    """
    num_layers encoder_num_layers decoder_num_layers hidden_size num_attention_heads group_query_attention
    num_query_groups kv_channels ffn_hidden_size num_experts moe_ffn_hidden_size moe_router_topk vocab_size
    padded_vocab_size max_position_embeddings seq_length untie_embeddings_and_output_weights swiglu gated_linear_unit
    bias_gelu_fusion position_embedding_type use_rotary_position_embeddings add_position_embedding rotary_base
    use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor normalization norm_epsilon
    layernorm_epsilon add_bias_linear disable_bias_linear add_qkv_bias qk_layernorm window_size fp16 bf16
    relative_attention_num_buckets relative_attention_max_distance moe_router_pre_softmax
    moe_shared_expert_intermediate_size moe_shared_expert_gate multi_latent_attention q_lora_rank kv_lora_rank
    qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor mscale mscale_all_dim
    original_max_position_embeddings beta_fast beta_slow
    """.split()  # noqa: SIM905 (as below)
)

_OFF = (False,)
LEFT_AS_IT_IS: Mapping[str, tuple[Any, ...]] = {
    "rotary_percent": (1, 1.0),
    "rotary_interleaved": _OFF,
    "rope_type": ("rope",),
    "no_rope_freq": (0,),
    "mrope_section": (),
    "squared_relu": _OFF,
    "quick_geglu": _OFF,
    "openai_gelu": _OFF,
    "use_te_activation_func": _OFF,
    "activation_func": (),
    "activation_func_clamp_value": (),
    "glu_linear_offset": (0, 0.0),
    "softmax_scale": (),
    "softmax_type": ("vanilla",),
    "window_attn_skip_freq": (),
    "qk_l2_norm": _OFF,
    "export_qk_l2_norm": _OFF,
    "enable_gpt_oss": _OFF,
    "attention_output_gate": _OFF,
    "experimental_attention_variant": ("",),
    "linear_attention_freq": (),
    "apply_layernorm_1p": _OFF,
    "layernorm_zero_centered_gamma": _OFF,
    "apply_residual_connection_post_layernorm": _OFF,
    "mtp_num_layers": (0,),
    "enable_mhc_connections": _OFF,
    "use_mup": _OFF,
    "is_hybrid_model": _OFF,
    "hybrid_override_pattern": ("",),
    "hybrid_layer_pattern": ("",),
    "hybrid_attention_ratio": (0, 0.0),
    "hybrid_mlp_ratio": (0, 0.0),
    "heterogeneous_layers_config_path": ("",),
    "heterogeneous_layers_config_encoded_json": ("",),
    "heterogeneous_block_specs": _OFF,
    "spec": (),
    "yaml_cfg": (),
    "num_moe_experts": (),
    "moe_layer_freq": (1,),
    "moe_latent_size": (),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": _OFF,
    "moe_router_num_groups": (),
    "moe_router_group_topk": (),
    "moe_router_topk_limited_devices": (),
    "moe_router_topk_scaling_factor": (1, 1.0),
    "moe_router_force_load_balancing": _OFF,
    "moe_router_force_biased": (),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),  # not sinkhorn
    "moe_apply_probs_on_input": _OFF,
    "export_moe_apply_probs_on_input": _OFF,
    "moe_expert_capacity_factor": (),
    "moe_expert_rank_capacity_factor": (),
    "moe_router_quantile_balancing_ema": (0, 0.0),
    "moe_mlp_glu_interleave_size": (),
    "moe_shared_expert_glu_interleave_size": (),
    "moe_single_grouped_weight": _OFF,
    "moe_single_grouped_bias": _OFF,
    "use_grouped_gemm_for_dense_mlp": _OFF,
    "use_grouped_gemm_for_shared_expert": _OFF,
}

# Patterns of names of arguments that do not change what the model computes, grouped by topic.
_HARMLESS = """
    *_weight_shards *gtp_weight_remat_size use_layer_wise_param_layout pad_vocab_size yarn_* freeze_all_layers
    flash_attention_version use_transformer_engine_op_fuser high_priority_a2a_comm_stream start_eval_at_iter
    validation_set_names mhc_* gdp_* batch_invariant_backend gtp_remat_* gtp_expert_remat_* moe_use_grouped_tensor
    use_gigatoken otel_*
    *_parallel_size *_parallel_sizes *_parallel_comm_backend *_pipeline_num_layers *_parallel_layout
    num_layers_in_*_pipeline_stage num_*stage*_per_* num_layers_per_virtual_* *_in_pipeline_split sequence_parallel
    hybrid_context_parallel max_seqlen_per_dp_cp_rank pipeline_dtype params_dtype microbatch_group_size_per_vp_stage
    distribute_saved_* moe_extended_tp cp_comm_type world_size rank local_rank local_world_size

    tp_* overlap_* *overlap align_* delay_wgrad_compute ep_overlap_* defer_embedding_wgrad_compute
    wgrad_deferral_limit use_ring_exchange_p2p batch_p2p_* deallocate_pipeline_outputs scatter_gather_* distrib*
    *distributed* nccl_* ddp_* *fsdp* *sharp* *_sharding_strategy *_symmetric_* symmetric_ar_type
    create_all_gather_group lazy_mpu_init suggested_communication_unit_size keep_fp8_transpose_cache *_hsdp
    use_tp_pp_dp_mapping fake_process_group enable_gloo_process_groups high_priority_stream_groups
    data_parallel_random_init async_* use_gloo_process_groups gradient_reduce_div_fusion *grad*_func no_sync_func
    param_sync_func
    timers reuse_grad_buf_*

    init_* perform_initialization *use_cpu_initialization embedding_init_* output_layer_init_method seed *rng_tracker
    deterministic_mode batch_invariant_mode *_precision* *quantiz* quant_recipe *kitchen* fp4* fp8* fp16_lm_* fp32_*
    *_fp8_* *_fp8 first_last_layers_bf16 num_layers_at_*_in_bf16 *_dtype *_in_fp32 *autocast* *_bf16 grad_reduce_*
    accumulate_allreduce_* *loss_scale* hysteresis apply_query_key_layer_scaling *softmax_fusion *_fusion
    *_fusion_impl bias_*_fusion *_persist_layer_norm persist_layer_norm memory_efficient_layer_norm disable_jit_fuser
    fused_residual_rmsnorm onnx_safe fused_single_qkv_rope
    use_fused_weighted_squared_relu attention_backend use_flash_attn transformer_impl
    use_legacy_* *use_mcore_models use_inference_optimized_layers *cuda_graph* clone_scatter_output_in_embedding
    flash_decode cache_mla_latents mlp_chunks_for_* *chunked_prefill *_for_prefill inference_* *offload*
    recompute_* *_recompute *checkpoint_activations* num_microbatches_* disable_parameter_transpose_cache
    variable_seq_lengths config_logger_dir hetereogenous_dist_checkpoint nccl_ub empty_unused_memory_level

    *dropout mtp_* mup_* qk_clip* calculate_per_token_loss *weight_decay* apply_wd_* clip_grad adam_*
    lion_*
    sgd_* muon_* optimizer optimizer_* *optimizer lr lr_* *_lr warmup *_lr_mult *batch_size* rampup_* train_* *_iters
    iteration iterations_to_skip *_samples phase_transition_iterations skip_train test_mode eval_* *_validation
    multiple_validation_sets check_* *_interval exit_* *nan_in_loss* manual_gc* rerun_* error_injection_* result_*
    num_floating_point_* finetune override_* *opt_param_scheduler barrier_* pin_cpu_* dump_param_* consumed_train_bins

    moe_*loss* moe_*_logging moe_input_jitter_eps moe_router_dtype moe_router_bias_update_rate moe_router_padding_*
    moe_enable_* moe_*grouped_gemm moe_token_* moe_*dispatcher* moe_pad_* moe_*upcycling* moe_deepep_* *hybridep*
    moe_ncclep_* moe_paged_stash*
    dsa_* linear_*_dim linear_num_* mamba_* use_mamba_*

    save save_* no_save_* load load_* no_load_* *ckpt* non_persistent_* pretrained_checkpoint use_checkpoint_args
    use_mp_args_from_* use_tokenizer_model_* replication* use_persistent_* dist_* *data_path data_* *_data
    *split* per_dataset_* dataloader_* *dataset* mmap_bin_files *_cache_path encoder_seq_length decoder_seq_length
    sample_rate mask_* short_seq_prob num_workers reset_* eod_mask_loss create_attention_mask_* allow_ambiguous_*
    fim_* vocab_file merge_file vocab_extra_ids make_vocab_size_divisible_by *tokenizer* tiktoken_* trust_remote_code
    sft sft_*

    log_* timing_* tensorboard_* wandb_* logging_level *profile* use_pytorch_profiler record_memory_*
    memory_snapshot_* *straggler* *workload_inspector* *one_logger* app_tag_* *ft_* inprocess_* adlr_* enable_msc
    flight_recorder_* verify_integrity num_speculative_tokens fault_injector_* nvtx_ranges record_shapes
    moe_routing_trace_* logits_save_* logits_load_* chat_template special_tokens offset_sampling_seed_by_dp_rank
    disable_msc_deprecated
    enable_experimental model_type export_model_type export_legacy_megatron export_te_* export_*quant* export_kd_*
    teacher_* export_force_* export_offline_* export_default_* modelopt_* do_train do_valid do_test curr_iteration
    perform_rl_step rl_* grpo_* langrl_* refit_method max_tokens_to_oom *bert* ict_* biencoder_* titles_* query_in_*
    use_one_sent_docs evidence_* retriever_* block_data_* embedding_path indexer_* num_classes img_* num_channels
    patch_dim classes_fraction head_lr_mult vision_* swin_* iter_per_epoch dino_*
""".split()  # noqa: SIM905 (a table of names, not a list of strings)
_HARMLESS_NAME = re.compile("|".join(fnmatch.translate(pattern) for pattern in _HARMLESS))


OWN_PREFIX = "dynapipe_"  # of every argument that this package adds: they decide how steps run, not what is computed


def is_harmless(name: str) -> bool:
    """Whether an argument, whatever its value, never changes what the model computes."""
    if name.startswith(OWN_PREFIX):
        return True
    return name not in FOLLOWED and name not in LEFT_AS_IT_IS and _HARMLESS_NAME.fullmatch(name) is not None


def is_without_experts(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an argument is for mixtures of experts and the model has none."""
    return "moe_" in name and not arguments.get("num_experts")


DTYPE_FLAGS = {"float16": "fp16", "bfloat16": "bf16"}
POSITION_NAMES = {"learned_absolute": "learned", "rope": "rope", "relative": "relative"}
LLAMA3_SCALING = RopeScaling("llama3", 8.0)  # Megatron-LM's GPT builds only this one, whatever its arguments say
NORM_NAMES = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
# Only models with latent attention may give these arguments other values than the usual ones.
OF_LATENT = (
    "rope_type", "moe_layer_freq", "moe_router_score_function", "moe_router_enable_expert_bias",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
)  # fmt: skip


class _Arguments:
    """Checked reading of a mapping of arguments; None counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def refused(self, name: str, rule: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {short(self.values.get(name))} but {rule}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise self.refused(name, f"must be an integer of 1 to {MOST:,}: put the model's config.json beside it")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refused(name, "must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refused(name, "must be true or false")
        return value

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            raise self.refused(name, f"only {', '.join(choices)} belong to a family here")
        return choices[value]


def read_arguments(arguments: Mapping[str, Any], where: str = "Megatron arguments") -> Architecture:
    """The architecture in `arguments`, which have Megatron's names with underscores.

    Megatron does not record the family: the arguments describe its layers. Errors: ConfigError naming the argument, its
    value and the possible ones.
    """
    a = _Arguments(arguments, where)
    refuse_another_model(arguments, where)
    _refuse_unknown(a)
    family = _family(a)
    heads, hidden = a.integer("num_attention_heads"), a.integer("hidden_size")
    kv_channels = arguments.get("kv_channels")
    if kv_channels is None and hidden % heads:
        raise a.refused("num_attention_heads", f"must divide hidden_size {hidden} where kv_channels is absent")
    swiglu = a.flag("swiglu")
    ffn = a.integer("ffn_hidden_size", max(64, hidden * 8 // 3 // 64 * 64) if swiglu else 4 * hidden)
    gated = swiglu or a.flag("gated_linear_unit")
    bias = _bias(a)
    try:
        architecture = Architecture(
            family=family,
            num_layers=_layers(a),
            hidden_size=hidden,
            num_heads=heads,
            num_query_groups=a.integer("num_query_groups", heads) if a.flag("group_query_attention") else heads,
            head_dim=a.integer("kv_channels", hidden // heads),
            vocab_size=_vocab_size(a),
            max_seq_len=a.integer("max_position_embeddings", arguments.get("seq_length") or 2048),
            tied_embeddings=not a.flag("untie_embeddings_and_output_weights"),
            gated_mlp=gated,
            activation="silu" if swiglu else _gelu(a, bias),
            position=_position(a),
            norm=a.choice("normalization", NORM_NAMES, "LayerNorm"),
            norm_eps=a.number("norm_epsilon", a.number("layernorm_epsilon", 1e-5)),
            qkv_bias=bias or a.flag("add_qkv_bias"),
            attention_output_bias=bias,
            mlp_bias=bias,
            qk_norm=a.flag("qk_layernorm"),
            rope_theta=a.number("rotary_base", 10_000.0),
            rope_scaling=_rope_scaling(a),
            sliding_window=_window(a),
            dtype=next((dtype for dtype, flag in DTYPE_FLAGS.items() if a.flag(flag)), "float32"),
            **_mlp_values(a, ffn),
        )
        if a.flag("multi_latent_attention"):
            architecture = replace(architecture, **latent_values(arguments, where, ffn))
        _refuse_unpublished(architecture, where)
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
    return architecture


def _mlp_values(a: _Arguments, ffn_hidden_size: int) -> dict[str, Any]:
    """The fields of an Architecture that describe plain MLPs of this width, or experts in their place."""
    if not a.values.get("num_experts"):
        return {"ffn_hidden_size": ffn_hidden_size}
    has_shared = bool(a.values.get("moe_shared_expert_intermediate_size"))
    return {
        "ffn_hidden_size": a.integer("moe_ffn_hidden_size", ffn_hidden_size),
        "num_experts": a.integer("num_experts"),
        "top_k": a.integer("moe_router_topk", 2),
        "norm_topk_prob": not a.flag("moe_router_pre_softmax"),
        "shared_ffn_hidden_size": a.integer("moe_shared_expert_intermediate_size") if has_shared else 0,
        "shared_expert_gate": has_shared and a.flag("moe_shared_expert_gate"),
    }


def refuse_another_model(arguments: Mapping[str, Any], where: str) -> None:
    """Errors: ConfigError naming an argument whose value no family here has."""
    for name, fine in LEFT_AS_IT_IS.items():
        value = arguments.get(name)
        if value is None or value in fine or is_without_experts(name, arguments):
            continue
        if (
            isinstance(value, list | tuple) and value and all(each in fine for each in value)
        ):  # one value for each layer, or loss
            continue
        if name in OF_LATENT and arguments.get("multi_latent_attention"):
            continue
        if name == "window_attn_skip_freq" and arguments.get("window_size") is None:
            continue
        raise ConfigError(
            f"{where}: {name} is {short(value)} but models of the families here have {_or(fine)}: only"
            " Megatron-LM can train such a model"
        )


def _or(fine: tuple[Any, ...]) -> str:
    return "none of it" if not fine or fine == (False,) else f"only {' or '.join(map(str, fine))}"


def _refuse_unknown(a: _Arguments) -> None:
    unknown = [
        f"{name} {short(value)}"
        for name, value in a.values.items()
        if value and name not in FOLLOWED and name not in LEFT_AS_IT_IS and not is_harmless(name)
    ]
    if unknown:
        raise ConfigError(
            f"{a.where}: {', '.join(sorted(unknown))}: not known here, so the arguments do not describe the model"
            " fully: put its config.json beside the checkpoint"
        )


def _layers(a: _Arguments) -> int:
    if a.values.get("decoder_num_layers") is not None:
        raise a.refused(
            "decoder_num_layers",
            "arguments alone do not describe a model with an encoder: put its config.json beside the checkpoint",
        )
    return a.integer("num_layers", a.values.get("encoder_num_layers"))


def _position(a: _Arguments) -> Position:
    position: Position = a.choice("position_embedding_type", POSITION_NAMES, "learned_absolute")
    if position == "learned" and a.flag("use_rotary_position_embeddings"):  # older releases say it so
        return "rope"
    if position == "learned" and not a.flag("add_position_embedding", True):
        raise a.refused("add_position_embedding", "all models of the families here have positions")
    return position


def _rope_scaling(a: _Arguments) -> RopeScaling | None:
    """The scaling of rotary frequencies. Megatron-LM's GPT (0.16) follows `use_rope_scaling` alone; other programs
    follow more arguments."""
    unsure = (
        "Megatron-LM 0.16 trains a GPT {} whatever this says, and other programs follow it: put a config.json beside"
        " the checkpoint that says which scaling the model was trained with"
    )
    if a.values.get("rotary_seq_len_interpolation_factor") not in (None, 1):
        raise a.refused("rotary_seq_len_interpolation_factor", unsure.format("without interpolation"))
    if not a.flag("use_rope_scaling"):
        return None
    if a.number("rope_scaling_factor", LLAMA3_SCALING.factor) != LLAMA3_SCALING.factor:
        raise a.refused("rope_scaling_factor", unsure.format(f"with a factor of {LLAMA3_SCALING.factor:g}"))
    return LLAMA3_SCALING


def _family(a: _Arguments) -> Family:
    position = _position(a)
    norm = a.choice("normalization", NORM_NAMES, "LayerNorm")
    if position == "relative":
        raise a.refused(
            "position_embedding_type",
            "the arguments do not say how a T5 scales its attention and its output: put the model's config.json beside"
            " the"
            " checkpoint",
        )
    if position == "learned" and norm == "layernorm":
        return "gpt2"
    if position == "rope" and norm == "layernorm" and _bias(a) and not a.flag("swiglu"):
        return "starcoder2"
    if position == "learned" or norm == "layernorm":
        raise ConfigError(
            f"{a.where}: position_embedding_type {position} with normalization {norm} is of no family known here: put"
            " the model's config.json beside the checkpoint"
        )
    if a.values.get("num_experts"):
        if a.flag("qk_layernorm"):
            return "qwen3_moe"
        return "qwen2_moe" if a.values.get("moe_shared_expert_intermediate_size") else "mixtral"
    if a.flag("qk_layernorm"):
        return "qwen3"
    if a.flag("add_qkv_bias") and not _bias(a):
        return "qwen2"
    return "mistral" if a.values.get("window_size") else "llama"


def _refuse_unpublished(model: Architecture, where: str) -> None:
    """Errors: ConfigError where no config.json of the family can describe the model, though each argument is known."""
    published = read_config(write_config(model), where)
    names = [field.name for field in fields(model) if getattr(model, field.name) != getattr(published, field.name)]
    if names:
        shown = ", ".join(f"{name} {short(getattr(model, name))}" for name in names)
        raise ConfigError(
            f"{where}: the arguments are those of {model.family} but for {shown}, which no model of the Hub's"
            f" {model.family} has: such a model is not supported"
        )


def _bias(a: _Arguments) -> bool:
    return not a.flag("disable_bias_linear", not a.flag("add_bias_linear", True))


def _gelu(a: _Arguments, bias: bool) -> Activation:
    """Megatron's fused kernel approximates GELU by tanh. Without fusion it is exact. Fusion needs a bias."""
    return "gelu_tanh" if a.flag("bias_gelu_fusion", True) and bias else "gelu"


def _vocab_size(a: _Arguments) -> int:
    """The unpadded vocabulary, where the arguments name it; else the padded one."""
    for name in ("vocab_size", "padded_vocab_size"):
        if a.values.get(name) is not None:
            return a.integer(name) + (num_added_tokens(a.values) if name == "vocab_size" else 0)
    raise ConfigError(f"{a.where}: neither vocab_size nor padded_vocab_size is there: pass the model's config.json")


def num_added_tokens(arguments: Mapping[str, Any]) -> int:
    """Tokens that Megatron adds to `vocab_size`: an end of document where there is no tokenizer."""
    return int(arguments.get("tokenizer_type") in ("NullTokenizer", "NullMultimodalTokenizer"))


def _window(a: _Arguments) -> int:
    window = a.values.get("window_size")
    if window is None:
        return 0
    match window:
        case [int(left), int(right)] if right == 0 and 0 <= left <= MOST:
            return left + 1  # Megatron leaves the token itself out
    raise a.refused("window_size", "only windows to the left, like (4095, 0), are supported")


def latent_values(arguments: Mapping[str, Any], where: str, dense_ffn_hidden_size: int) -> dict[str, Any]:
    """The fields of an Architecture that `multi_latent_attention` changes. Errors: ConfigError naming the argument."""

    def number(name: str, default: float | None = None) -> Any:
        value = arguments.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{where}: {name} is {short(arguments.get(name))} but must be a number of at least 0")
        return value

    if not arguments.get("qk_layernorm"):
        raise ConfigError(f"{where}: qk_layernorm is off, but models of the families here norm their latent vectors")
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
    num_dense = _dense_layers(arguments.get("moe_layer_freq"), where)
    score = arguments.get("moe_router_score_function") or "softmax"
    weights = {"norm_topk_prob": number("moe_router_topk", 2) > 1} if score == "sigmoid" else {}
    return weights | {
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


def _dense_layers(pattern: object, where: str) -> int:
    """How many layers without experts come first, by `moe_layer_freq`. Errors: ConfigError for another pattern."""
    has_experts = list(pattern) if isinstance(pattern, list | tuple) else [1]
    num_dense = has_experts.index(1) if 1 in has_experts else len(has_experts)
    if pattern not in (None, 1) and has_experts != [int(layer >= num_dense) for layer in range(len(has_experts))]:
        raise ConfigError(f"{where}: moe_layer_freq is {short(pattern)} but must be 0 of the first layers and then 1")
    return num_dense
