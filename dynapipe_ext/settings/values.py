"""Values in TOML as settings have them: their types, their bounds, and no unknown names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from dynapipe_ext.errors import ConfigError, did_you_mean

_AT_LEAST = {
    "run": {"steps": 1, "epochs": 0, "seed": 0, "log_every": 1, "traced_steps": 0},
    "topology": {"tp": 1, "pp": 1, "dp": 1, "stages_per_rank": 0},
    "model": {
        "num_layers": 1,
        "num_decoder_layers": 0,
        "hidden_size": 1,
        "num_heads": 1,
        "num_query_groups": 1,
        "ffn_hidden_size": 1,
        "max_seq_len": 1,
    },
    "data": {
        "max_input_len": 0,
        "max_target_len": 0,
        "num_samples": 1,
        "vocab_size": 1,
        "tokens_per_batch": 0,
        "batch_size": 0,
        "num_workers": 0,
        "prefetch_steps": 1,
    },
    "plan": {"pad_multiple": 1, "max_tokens": 0, "effort": 0},
    "optimizer": {"min_lr": 0, "warmup_steps": 0, "weight_decay": 0, "clip_grad": 0, "max_skips": 1},
    "checkpoint": {"save_every": 0, "save_minutes": 0, "keep_last": 0},
    "eval": {"every": 0, "steps": 0},
}
_ABOVE_ZERO = {
    "plan": ("memory_limit_gb",),
    "optimizer": ("lr",),
    "checkpoint": ("grace_s",),
    "job": ("timeout_s",),
}
_AT_MOST: dict[str, dict[str, float]] = {
    "run": {"epochs": 10_000},  # each is laid out before the run, for its steps
    "topology": {"tp": 1 << 16, "pp": 1 << 16, "dp": 1 << 20, "stages_per_rank": 1 << 10},
    "data": {"num_workers": 1 << 12, "prefetch_steps": 1 << 16},
    "plan": {"effort": 10**9},
    "optimizer": {"lr": 1e6, "weight_decay": 1e6},
    "checkpoint": {"grace_s": 1e7},
    "job": {"timeout_s": 1e7},
}
_MOST = 10**15  # of any other number


def refuse_out_of_bounds(tables: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Errors: ConfigError naming table, setting, value and bound."""
    for table, values in tables.items():
        for name, value in values.items():
            said = f"{where}: [{table}] {name} is {value}"
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{said} but must be a finite number")
            if name in _ABOVE_ZERO.get(table, ()) and value <= 0:
                raise ConfigError(f"{said} but must be above 0")
            most = _AT_MOST.get(table, {}).get(name, _MOST)
            if isinstance(value, int | float) and abs(value) > most:
                raise ConfigError(f"{said} but must be at most {most:,}")
            least = _AT_LEAST.get(table, {}).get(name)
            if least is not None and value < least:
                raise ConfigError(f"{said} but must be at least {least}")


def checked_value(value: Any, hint: Any, where: str) -> Any:
    """A TOML value as the type of its field: integers pass for floats, lists for tuples, choices must match."""
    if get_origin(hint) in (UnionType, Union):  # choices, or a number
        number, choices = get_args(hint)[1], get_args(hint)[0]
        return value if type(value) is number else checked_value(value, choices, f"{where} (or a number)")
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            near = did_you_mean(str(value), map(str, get_args(hint)))
            raise ConfigError(f"{where} is {value!r}: choose from {list(get_args(hint))}{near}")
        return value
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        kinds, allowed = {str: ("strings", str), int: ("integers", int), float: ("numbers", int | float)}[kind]
        listed = value if isinstance(value, list | tuple) else [None]
        if any(not isinstance(v, allowed) or isinstance(v, bool) for v in listed):
            raise ConfigError(f"{where} is {value!r} but must be a list of {kinds}")
        return tuple(kind(v) for v in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r} but must be of type {hint.__name__}")
    return value
