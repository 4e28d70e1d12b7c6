"""Every argument of Megatron-LM and megatron-core's TransformerConfig (0.16.1 to 0.20), by what it does to a model.

    FOLLOWED         `read_arguments` makes something of it
    LEFT_AS_IT_IS    the model is one of the families here under these values only
    is_harmless      changes how a model is trained, split, stored, fed or run, or nothing without another argument

What is none of these is not known, and refused where it is set.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

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

# Patterns of names, by trade.
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


def is_harmless(name: str) -> bool:
    """Whether an argument leaves the function of a model as it is, whatever its value."""
    return name not in FOLLOWED and name not in LEFT_AS_IT_IS and _HARMLESS_NAME.fullmatch(name) is not None


def is_without_experts(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an argument is for mixtures of experts, of which the model has none."""
    return "moe_" in name and not arguments.get("num_experts")
