"""A DeepSpeed configuration (`ds_config.json`) in the terms of a run, and a run's settings in the terms of its engine.

The file decides precision, optimizer, clipping and ZeRO stage: these become settings, which flags may override. Plans
decide batch sizes and accumulation: the file's are overridden. Values "auto" are filled in as transformers fills them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dynapipe_ext.batch.topology import ZERO_STAGES, ZeroStage
from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.settings.tables import DeepSpeedSettings, OptimizerSettings

Json = dict[str, Any]
Tables = dict[str, dict[str, Any]]

_ADAM = ("adam", "adamw")
_OF_TORCH = (*_ADAM, "adagrad", "sgd")  # what DeepSpeed computes by torch, without a compiler
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_FOREIGN = {  # sections that change what a step is or what it trains on, with what to do instead
    "fp16": "take bf16 or fp32",
    "amp": "take bf16",
    "torch_autocast": "take bf16",
    "elasticity": "start another run on other ranks with --resume",
    "autotuning": "measure by dynapipe profile",
    "curriculum_learning": "order the data before the run",
    "data_efficiency": "order the data before the run",
    "progressive_layer_drop": "train all layers",
}
_SECTIONS = ("optimizer", "scheduler", "zero_optimization", "bf16", "tensor_parallel", "checkpoint")
_MISSPELT = 0.85  # share of characters in common: no two names that DeepSpeed knows have as many
_LEAST_PRINTED = 1 << 30  # steps between DeepSpeed's own lines, where the file names none


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an engine, and the fields in which it differs from the file, each with the reason."""

    config: Json
    overridden: tuple[str, ...]


def read_deepspeed_config(path: str | Path) -> Json:
    """Read the file as it is. Raises ConfigError for another file, or for one that asks for what runs cannot do."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a DeepSpeed configuration ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {short(raw)}, not a DeepSpeed configuration: give a JSON object")
    for name in raw:
        for near_name in get_close_matches(name, (*_SECTIONS, *_FOREIGN, "gradient_clipping"), n=1, cutoff=_MISSPELT):
            if name != near_name:
                raise ConfigError(f"{path}: {name} is unknown to DeepSpeed: did you mean {near_name}?")
    if "bfloat16" in raw:
        raise ConfigError(f"{path}: bfloat16 is the old name of a section: write bf16")
    for name in (*_SECTIONS, *_FOREIGN):
        if not isinstance(raw.get(name, {}), dict):
            raise ConfigError(f"{path}: {name} is {short(raw[name])} but must be an object")
    _refuse_misfits(raw, path)
    for name, instead in _FOREIGN.items():
        if raw.get(name, {}).get("enabled") is True:
            raise ConfigError(f"{path}: {name} is enabled, which runs here cannot follow: {instead}")
    if raw.get("tensor_parallel", {}).get("autotp_size", 1) not in (0, 1):
        raise ConfigError(f"{path}: tensor_parallel cuts the model, which runs here do by --pp: leave it out")
    zero_stage(raw, path)
    return raw


def _refuse_misfits(raw: Json, path: str | Path) -> None:
    """Reject values of another kind that settings are read from. Raises ConfigError."""
    for name in ("optimizer", "scheduler"):
        if not isinstance(params := raw.get(name, {}).get("params", {}), dict):
            raise ConfigError(f"{path}: {name}.params is {short(params)} but must be an object")
        if unread := raw.get(name, {}).keys() - {"type", "params", "legacy_fusion"}:  # DeepSpeed ignores such
            raise ConfigError(f"{path}: {name}.{min(unread)} is unknown to DeepSpeed: write type and params")
    parameters = raw.get("optimizer", {}).get("params", {})
    values = {f"optimizer.params.{name}": parameters.get(name, "auto") for name in ("lr", "weight_decay")}
    values |= {name: raw.get(name, "auto") for name in ("gradient_clipping", "steps_per_print")}
    for name, value in values.items():
        if value != "auto" and type(value) not in (int, float):
            raise ConfigError(f'{path}: {name} is {short(value)} but must be a number or "auto"')
    for name in ("offload_optimizer", "offload_param"):
        if not isinstance(section := raw.get("zero_optimization", {}).get(name), dict | None):
            raise ConfigError(f"{path}: zero_optimization.{name} is {short(section)} but must be an object")
    betas, enabled = parameters.get("betas", "auto"), raw.get("bf16", {}).get("enabled", "auto")
    if betas != "auto" and not (isinstance(betas, list) and len(betas) == 2 and {*map(type, betas)} <= {int, float}):
        raise ConfigError(f'{path}: optimizer.params.betas is {short(betas)} but must be two numbers or "auto"')
    if enabled not in (True, False, "auto"):
        raise ConfigError(f'{path}: bf16.enabled is {short(enabled)} but must be true, false or "auto"')


def with_decided(tables: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """Return the tables with what their DeepSpeed configuration decides and they do not set themselves."""
    path = tables.get("deepspeed", {}).get("config")
    if not path or not isinstance(path, str):
        return tables
    decided = extract_settings(read_deepspeed_config(path))
    return {**tables, **{name: values | dict(tables.get(name, {})) for name, values in decided.items()}}


def with_read(settings: DeepSpeedSettings) -> DeepSpeedSettings:
    return replace(settings, described=read_deepspeed_config(settings.config) if settings.config else None)


def zero_stage(raw: Mapping[str, Any], path: str | Path = "ds_config") -> ZeroStage:
    """Return the ZeRO stage of a configuration. Raises ConfigError.

    >>> zero_stage({"zero_optimization": {"stage": 2}}), zero_stage({})
    (2, 0)
    """
    stage = raw.get("zero_optimization", {}).get("stage", 0)
    for zero in ZERO_STAGES:
        if type(stage) is int and stage == zero:
            return zero
    raise ConfigError(f"{path}: zero_optimization.stage is {short(stage)} but must be 0, 1, 2 or 3")


def extract_settings(raw: Mapping[str, Any]) -> Tables:
    """Return what the file decides, as settings. It decides only the optimizer's values that it names, and no clipping
    if it has none.

    >>> tables = extract_settings({"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    >>> tables["model"]["dtype"], tables["optimizer"]["lr"], tables["optimizer"]["clip_grad"]
    ('bfloat16', 0.001, 0.0)
    """
    parameters = raw.get("optimizer", {}).get("params", {})
    of_adam = {name: parameters.get(name, "auto") for name in ("lr", "betas", "weight_decay")}
    optimizer: Json = {k: tuple(v) if k == "betas" else float(v) for k, v in of_adam.items() if v != "auto"}
    if "lr" in optimizer:
        optimizer["min_lr"] = optimizer["lr"] / 10
    clipping, enabled = raw.get("gradient_clipping", 0.0), raw.get("bf16", {}).get("enabled", False)
    if clipping != "auto":
        optimizer["clip_grad"] = float(clipping)
    tables: Tables = {"model": {"backend": "transformers"}, "optimizer": optimizer}
    if enabled != "auto":
        tables["model"]["dtype"] = "bfloat16" if enabled else "float32"
    return tables


def make_engine_config(
    raw: Mapping[str, Any],
    optimizer: OptimizerSettings,
    *,
    dtype: str,
    hidden_size: int,
    num_steps: int,
    num_replicas: int,
    compiles: bool,
) -> EngineConfig:
    """Make the configuration that `deepspeed.initialize` takes for a run of these settings.

    `compiles`: DeepSpeed may compile kernels as it starts, as it does for its own Adam; else torch's takes their place.
    Raises ConfigError for an optimizer that needs a compiler if there is not one.
    """
    zero = dict(raw.get("zero_optimization", {})) | {"stage": zero_stage(raw)}
    sizes = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    zero |= {name: size for name, size in sizes.items() if zero.get(name) == "auto"}
    if zero["stage"] == 1:
        zero["overlap_comm"] = False
    bf16 = dict(raw.get("bf16", {})) | {"enabled": dtype == "bfloat16"}
    for section, name in ((zero, "compute_grad_norm"), (bf16, "check_grad_overflow")):  # not known to every version
        if name in section:
            section[name] = True
    decided: Json = {
        "train_batch_size": num_replicas,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.clip_grad,
        "bf16": bf16,
        "optimizer": _make_optimizer(raw.get("optimizer", {}), optimizer, compiles=compiles),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": raw.get("steps_per_print", _LEAST_PRINTED),
    }
    if "scheduler" in raw:
        decided["scheduler"] = _make_scheduler(raw["scheduler"], optimizer, num_steps)
    config = _without_auto(dict(raw) | decided)
    config.get("checkpoint", {}).pop("load_universal", None)
    return EngineConfig(config, tuple(_list_overridden(raw, config)))


def _make_optimizer(section: Mapping[str, Any], settings: OptimizerSettings, *, compiles: bool) -> Json:
    kind = section.get("type", "AdamW")
    if not compiles and str(kind).lower() not in _OF_TORCH:
        raise ConfigError(
            f"optimizer.type {kind} is compiled by DeepSpeed, and not for this device: take AdamW, which torch has"
        )
    parameters = dict(section.get("params", {})) | {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if str(kind).lower() in _ADAM:
        parameters["betas"] = list(settings.betas)
        if not compiles or not section:
            parameters["torch_adam"] = True
    return {"type": kind, "params": parameters}


def _make_scheduler(section: Mapping[str, Any], settings: OptimizerSettings, num_steps: int) -> Json:
    warmup = round(settings.warmup_fraction * num_steps) if settings.warmup_fraction else settings.warmup_steps
    values = {
        "total_num_steps": num_steps,
        "warmup_num_steps": warmup,
        "warmup_max_lr": settings.lr,
        "warmup_min_lr": 0,
    }
    parameters = section.get("params", {})
    filled = {name: values.get(name, value) if value == "auto" else value for name, value in parameters.items()}
    return dict(section) | {"params": filled}


def _without_auto(config: Json) -> Json:
    """Return the configuration without values "auto", for which DeepSpeed then takes its defaults."""
    return {k: _without_auto(v) if isinstance(v, dict) else v for k, v in config.items() if v != "auto"}


_CHECKED = "steps that are not finite are refused"
_REASONS = {
    **dict.fromkeys(_BATCH_SIZES, "plans cut batches"),
    "gradient_clipping": "by [optimizer] clip_grad",
    "bf16.enabled": "by --dtype",
    "bf16.check_grad_overflow": _CHECKED,
    "zero_optimization.compute_grad_norm": _CHECKED,
    "optimizer.params.lr": "by --lr",
    "optimizer.params.betas": "by --betas",
    "optimizer.params.weight_decay": "by --weight-decay",
    "optimizer.params.torch_adam": "DeepSpeed's Adam would be compiled first",
    "zero_optimization.overlap_comm": "ZeRO 1 reduces once, after the last backward",
    "checkpoint.load_universal": "--resume goes on from the run's own checkpoints",
}


def _list_overridden(raw: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    before, after = dict(_list_leaves(raw)), dict(_list_leaves(config))
    if own := [name for name in before if name.startswith("scheduler.params.") and before[name] != "auto"]:
        yield f"{', '.join(own)}: the file's, whatever --lr, --min-lr, --lr-schedule and --warmup say"
    for name, reason in _REASONS.items():
        in_file, used = before.get(name), after.get(name)
        by_us = name == "optimizer.params.torch_adam" and "optimizer" in raw
        if (in_file not in (None, "auto") or by_us) and in_file != used:
            yield f"{name} {short(in_file)} -> {short(used)} ({reason})"


def _list_leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _list_leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner
