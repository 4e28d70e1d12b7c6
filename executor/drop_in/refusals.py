"""What cannot go together, refused by name before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynapipe_ext.errors import ConfigError

_NO_FSDP = (
    "use Megatron's DistributedDataParallel with the distributed optimizer; FSDP gathers in the order of micro-batches"
)
_INSTANCES = "num_distributed_optimizer_instances"

# Settings of a TransformerConfig that another schedule than Megatron's own cannot follow, and what to do instead.
UNSUPPORTED_CONFIG: dict[str, tuple[tuple[Any, ...], str]] = {
    "context_parallel_size": ((1,), "give 1: sequences that are cut over ranks are not supported"),
    "hybrid_context_parallel": ((False,), "leave it out: sequences that are cut over ranks are not supported"),
    "enable_cuda_graph": ((False,), "leave it out: a graph fixes the shapes that a plan changes"),
    "external_cuda_graph": ((False,), "leave it out: a graph fixes the shapes that a plan changes"),
    "cuda_graph_impl": (("none",), 'give "none": a graph fixes the order that a plan decides'),
    "overlap_moe_expert_parallel_comm": ((False,), "leave it out: it runs forwards and backwards in its own order"),
    "delay_wgrad_compute": ((False,), "leave it out, and split backwards by split_backward"),
    "defer_embedding_wgrad_compute": ((False,), "leave it out, and split backwards by split_backward"),
    "num_microbatches_with_partial_activation_checkpoints": (
        (),
        "leave it out: it follows the number of micro-batches in flight of Megatron's own schedule",
    ),
    "fine_grained_activation_offloading": ((False,), "leave it out: it follows the order of Megatron's own schedule"),
    "cpu_offloading": ((False,), "leave it out: it follows the order of Megatron's own schedule"),
    # From megatron-core 0.18 and 0.19 on:
    "moe_paged_stash": ((False,), "leave it out: it follows the order of Megatron's own schedule"),
    "moe_expert_rank_capacity_factor": ((), "leave it out: it runs a step again by Megatron's own schedule"),
    "overlap_dispatch_backward_with_experts_wgrad": ((False,), "leave it out, and split backwards by split_backward"),
    "gtp_weight_remat_size": ((1,), "give 1: ranks are taken in the order tp-cp-ep-dp-pp"),
    "expert_gtp_weight_remat_size": ((1,), "give 1: ranks are taken in the order tp-cp-ep-dp-pp"),
}


# Arguments of Megatron-LM that no TransformerConfig holds.
UNSUPPORTED_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_megatron_fsdp": ((False,), _NO_FSDP),
    "use_torch_fsdp2": ((False,), _NO_FSDP),
    "use_tp_pp_dp_mapping": ((False,), "leave it out: ranks are taken in the order tp-cp-ep-dp-pp"),
    _INSTANCES: (
        (1,),
        "give 1: with more, buckets whose reductions a plan starts would be reduced again at the end of the step",
    ),
    "perform_rl_step": ((False,), "leave it out: reinforcement learning makes its micro-batches itself"),
}


# Arguments of Megatron-LM that planned data cannot follow: their steps are not made of batches of one shape.
UNSUPPORTED_DATA: dict[str, tuple[tuple[Any, ...], str]] = {
    "phase_transition_iterations": ((), "leave it out: planned data have one phase"),
    "iterations_to_skip": (([],), "leave it out: it reads batches of one shape"),
    "decoder_seq_length": ((), "leave --dynapipe-data out: planned data have one side"),
    "dataloader_save": ((), "leave it out: the number of consumed samples says where a run goes on"),
    "mtp_num_layers": ((0,), "leave it out: its labels roll over the ends of samples"),
    "reset_position_ids": ((False,), "leave it out: positions begin anew with every sample"),
    "reset_attention_mask": ((False,), "leave it out: attention begins anew with every sample"),
    "tp_comm_overlap": ((False,), "leave it out: its buffers have the shape of --micro-batch-size x --seq-length"),
    "dataloader_inter_document_masking": ((False,), "leave it out, and give --dynapipe-layout packed"),
}

# Arguments of Megatron-LM that say what --dynapipe-data says, or what becomes of Megatron's own data alone.
UNSUPPORTED_BESIDE_DATA: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(
        (
            "mock_data",
            "data_path",
            "train_data_path",
            "valid_data_path",
            "test_data_path",
            "data_args_path",
            "per_split_data_args_path",
        ),
        ((False,), "data come from --dynapipe-data or from it: leave one of them out"),
    ),
    "eod_mask_loss": ((False,), "leave it out: a sample ends with its document, whose end is a target"),
    "fim_data": ((False,), "leave it out: samples are taken as they are"),
}


def check_planned_arguments(args: Any, *, from_path: bool) -> None:
    """Refuse what would take other batches out of planned data, or be ignored by them, which may come `from_path`, the
    one of --dynapipe-data. Errors: ConfigError."""
    _check(args, UNSUPPORTED_DATA | (UNSUPPORTED_BESIDE_DATA if from_path else {}))
    check_planned_experts(args)
    if getattr(args, "multiple_validation_sets", False):
        stages = getattr(args, "virtual_pipeline_model_parallel_size", None)
        if not getattr(args, "full_validation", False) or stages is not None:
            raise ConfigError(
                f"multiple_validation_sets is True with full_validation {getattr(args, 'full_validation', False)} and"
                f" {stages or 1} stages a rank, but Megatron-LM validates on several sets in full, and with one stage a"
                " rank alone: give --full-validation, and no virtual stages"
            )


def check_planned_experts(settings: Any) -> None:
    """`settings` are Megatron-LM's arguments, or a TransformerConfig. Errors: ConfigError for mixtures of experts whose
    ranks would have to hold as many tokens as one another."""
    dispatcher = getattr(settings, "moe_token_dispatcher_type", None)
    tp = getattr(settings, "tensor_model_parallel_size", None) or 1
    ep = getattr(settings, "expert_model_parallel_size", None) or 1
    etp = getattr(settings, "expert_tensor_parallel_size", None) or tp
    if (ep > 1 or etp > tp) and dispatcher != "alltoall":
        raise ConfigError(
            f"moe_token_dispatcher_type is {dispatcher!r} with expert_model_parallel_size {ep} and"
            f" expert_tensor_parallel_size {etp}, but micro-batches of planned data have other shapes on each rank:"
            f" give alltoall, or 1 and {tp}"
        )
    balancing = getattr(settings, "moe_router_load_balancing_type", None) or ()
    if "global_aux_loss" in ((balancing,) if isinstance(balancing, str) else balancing):
        raise ConfigError(
            f"moe_router_load_balancing_type is {balancing!r}, whose global_aux_loss sums over replicas inside each"
            " micro-batch and follows their order: give aux_loss or seq_aux_loss"
        )


def dense_layers(settings: Any) -> tuple[int, ...]:
    """The numbers of the layers without experts, by `moe_layer_freq`; empty for a model that has none at all.
    `settings` are Megatron-LM's arguments, or a TransformerConfig.
    """
    num_experts = getattr(settings, "num_experts", None) or getattr(settings, "num_moe_experts", None)
    frequency, num_layers = getattr(settings, "moe_layer_freq", 1), settings.num_layers
    if not num_experts or frequency == 1:
        return ()
    has_experts = (
        [i % frequency == 0 for i in range(num_layers)] if isinstance(frequency, int) else map(bool, frequency)
    )
    return tuple(layer for layer, one in enumerate(has_experts) if not one)


def check_arguments(args: Any) -> None:
    """Refuse, at start-up, what `check_config` and `rank_topology` would refuse later. Errors: ConfigError."""
    _check(args, UNSUPPORTED_CONFIG | UNSUPPORTED_ARGUMENTS)
    pp = getattr(args, "pipeline_model_parallel_size", 1)
    if (group := getattr(args, "microbatch_group_size_per_vp_stage", None)) not in (None, pp):
        raise ConfigError(
            f"microbatch_group_size_per_vp_stage is {group}, which orders Megatron's own interleaved schedule: leave it"
            " out"
        )
    if getattr(args, "decoder_seq_length", None) is not None and pp > 1:
        raise ConfigError(
            f"pipeline_model_parallel_size is {pp} with decoder_seq_length {args.decoder_seq_length}, but Megatron-LM"
            " has encoder-decoders on one pipeline rank alone: give 1 and more tensor parallel ranks, or train it over"
            " pipeline stages by `dynapipe train` (num_decoder_layers under [model])"
        )


def check_config(config: Any, chunks: Sequence[Any]) -> None:
    """Errors: ConfigError, naming the setting, its value and the next move."""
    _check(config, UNSUPPORTED_CONFIG)
    for chunk in chunks:
        ddp_config = getattr(chunk, "ddp_config", None)
        _check(ddp_config, {_INSTANCES: UNSUPPORTED_ARGUMENTS[_INSTANCES]})
        if getattr(ddp_config, "use_megatron_fsdp", False) or "FSDP" in type(chunk).__name__:
            raise ConfigError(f"the model is a {type(chunk).__name__}, sharded by FSDP: {_NO_FSDP}")


def _check(settings: Any, unsupported: dict[str, tuple[tuple[Any, ...], str]]) -> None:
    for name, (fine, move) in unsupported.items():
        value = getattr(settings, name, None)
        if value is not None and value not in fine:
            raise ConfigError(f"{name} is {value!r}, which planned schedules do not support: {move}")
