"""The names that DeepSpeed reads in the sections of its configuration which runs here use.

Declared, since its own models take ten seconds to import; `tests/integration` compares them with those of the installed
version. Of another version only names that are like a known one are refused: the engine itself refuses the others.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import ConfigError, did_you_mean, short

VERSION = "0.19.8"
_LIKE = 0.8  # share of letters in common of a misspelt name
_PREFIXED = (  # of stage 3, each also without the prefix
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip
_ZERO = """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
    allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param
    offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload
    stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
    parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
""".split()  # noqa: SIM905 (a table of names)
SECTIONS: Mapping[str, Collection[str]] = {
    "zero_optimization": (*_ZERO, *_PREFIXED, *(f"stage3_{name}" for name in _PREFIXED)),
    "zero_optimization.offload_optimizer": (
        "device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio",
        "super_offload", "cpuadam_cores_perc",
    ),
    "zero_optimization.offload_param": (
        "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory",
    ),
    "bf16": (
        "enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
    ),
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
}  # fmt: skip
_TORCH = ("lr", "weight_decay", "maximize", "foreach", "differentiable", "fused")
_ADAM = (
    *_TORCH, "betas", "eps", "amsgrad", "capturable", "bias_correction", "adam_w_mode", "adamw_mode", "set_grad_none",
    "torch_adam", "fp32_optimizer_states",
)  # fmt: skip
OPTIMIZERS: Mapping[str, Collection[str]] = {  # by names as DeepSpeed compares them; of others nothing is known
    "adam": _ADAM,
    "adamw": _ADAM,
    "adagrad": (*_TORCH, "lr_decay", "initial_accumulator_value", "eps", "amsgrad", "fp32_optimizer_states"),
    "sgd": (*_TORCH, "momentum", "dampening", "nesterov"),
}


_WARMUP = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
_WARMUP_LR = (*_WARMUP, "warmup_min_lr", "warmup_max_lr")
SCHEDULERS: Mapping[str, Collection[str]] = {
    "WarmupLR": _WARMUP_LR,
    "WarmupDecayLR": (*_WARMUP_LR, "total_num_steps"),
    "WarmupCosineLR": (*_WARMUP, "total_num_steps", "warmup_min_ratio", "cos_min_ratio"),
    "OneCycle": (
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
        "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom",
        "cycle_max_mom", "decay_mom_rate", "last_batch_iteration",
    ),
    "LRRangeTest": (
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase",
        "last_batch_iteration",
    ),
}  # fmt: skip
_REQUIRED: Mapping[str, Collection[str]] = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
_FLAGS = (
    "maximize", "foreach", "differentiable", "fused", "amsgrad", "capturable", "bias_correction", "adam_w_mode",
    "adamw_mode", "set_grad_none", "torch_adam", "fp32_optimizer_states", "nesterov", "cycle_momentum",
    "lr_range_test_staircase",
)  # fmt: skip
_MAY_BE_NULL = ("foreach", "fused", "cycle_second_step_size", "cycle_second_stair_count", "warmup_max_lr")
_WARMUP_TYPES = ("log", "linear")
_MEANT = {  # other programs' names
    "learning_rate": "lr",
    "wd": "weight_decay",
    "max_grad_norm": "gradient_clipping, outside of optimizer",
    "warmup_steps": "warmup_num_steps",
    "total_steps": "total_num_steps",
}


def refuse_unread(raw: Mapping[str, Any], path: str | Path, version: str | None = None) -> None:
    """Errors: ConfigError for a name in a section, or a parameter of optimizer or scheduler, that DeepSpeed of this
    `version` (default: the installed one) does not take. The sections are known to be objects."""
    version = _installed() if version is None else version
    for place, names_read in SECTIONS.items():
        section: Any = raw
        for name in place.split("."):
            section = section.get(name) or {}
        _refuse(section, names_read, place, path, version)
    optimizer, scheduler = raw.get("optimizer", {}), raw.get("scheduler", {})
    parameters = OPTIMIZERS.get(str(optimizer.get("type", "adamw")).lower())
    if parameters is not None:
        _refuse(optimizer.get("params", {}), parameters, "optimizer.params", path, version)
        _refuse_values(optimizer.get("params", {}), "optimizer.params", path)
    if not scheduler:
        return
    kind = scheduler.get("type")
    if not isinstance(kind, str) or kind not in SCHEDULERS:
        if version == VERSION:
            near = did_you_mean(str(kind), SCHEDULERS)
            raise ConfigError(f"{path}: scheduler.type is {short(kind)}: choose from {', '.join(SCHEDULERS)}{near}")
        return
    _refuse(scheduler.get("params", {}), SCHEDULERS[kind], "scheduler.params", path, version)
    _refuse_values(scheduler.get("params", {}), "scheduler.params", path)
    for name in _REQUIRED.get(kind, ()):
        is_filled, value = name == "total_num_steps", scheduler.get("params", {}).get(name)
        if value is None or (value == "auto" and not is_filled):
            or_auto = ', or "auto" for the steps of the run' if is_filled else ""
            raise ConfigError(
                f"{path}: scheduler.params.{name} is {short(value)}, but {kind} needs it: give a number{or_auto}"
            )


def _refuse_values(section: Mapping[str, Any], place: str, path: str | Path) -> None:
    """Errors: ConfigError for a value of another kind, on which DeepSpeed or torch would fail while ranks start."""
    for name, value in section.items():
        if value == "auto" or name == "betas" or (value is None and name in _MAY_BE_NULL):
            continue
        is_of_groups = place.startswith("scheduler") and isinstance(value, list) and value
        values = value if is_of_groups else [value]  # one for all groups of weights, or one each
        if name in _FLAGS:
            must = "" if isinstance(value, bool) else "true or false"
        elif name == "warmup_type":
            must = "" if value in _WARMUP_TYPES else " or ".join(map(repr, _WARMUP_TYPES))
        else:
            must = (
                "" if all(type(one) in (int, float) and math.isfinite(one) for one in values) else 'a number or "auto"'
            )
        if must:
            raise ConfigError(f"{path}: {place}.{name} is {short(value)} but must be {must}")


def _refuse(
    section: Mapping[str, Any], names_read: Collection[str], place: str, path: str | Path, version: str
) -> None:
    for name in section:
        if name in names_read:
            continue
        near = [meant] if (meant := _MEANT.get(name)) else get_close_matches(name, names_read, n=1, cutoff=_LIKE)
        if near:
            raise ConfigError(f"{path}: {place}.{name} is no name that DeepSpeed reads: did you mean {near[0]}?")
        if version == VERSION:
            names = ", ".join(sorted(names_read))
            raise ConfigError(f"{path}: {place}.{name} is no name that DeepSpeed {version} reads: known are {names}")


def _installed() -> str:
    """The version of DeepSpeed here; without one, that of these tables."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return VERSION
