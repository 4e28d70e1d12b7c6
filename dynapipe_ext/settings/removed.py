"""The flags and keys that earlier versions had, each with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dynapipe_ext.errors import ConfigError

_RENAMED = {f"[debug] {name}": f"[run] {name}" for name in ("log_dir", "log_level", "plan_dir")} | {
    "[plan] rule": "[plan] split_policy",
    "[topology] vocabulary": "[topology] vocabulary_parallel",
    "[topology] width": "[topology] context_parallel",
    "--vocabulary": "--vocabulary-parallel",
    "--width": "--context-parallel (or --cp)",
}
_SUCCESSORS = {
    ("--partitions", "--keep-sequential-samples"): "leave it out, as documents keep the order of the input",
    ("--split-sentences", "--lang", "--keep-newlines"): "give texts as lists of sentences",
    ("--json-key",): "use --json-keys",
    ("--input-key", "--target-key", "--pair-keys"): "use --fields PROMPT RESPONSE",
    ("[data] input_key", "[data] target_key"): "use fields = [PROMPT, RESPONSE]",
    ("--text-key", "[data] text_key"): "use fields = [TEXT], or --fields TEXT",
    ("--output-merged", "[checkpoint] output_merged"): "use dynapipe convert ADAPTER DIR --merge BASE",
    ("--save-format", "[checkpoint] save_format"): "use dynapipe convert OUTPUT DIR --to FORMAT",
    ("[checkpoint] background",): "leave it out, as runs on accelerators save so if memory allows",
    ("[data] prefetch_steps",): "leave it out, as planners stay 2 steps ahead",
    ("--stages-per-rank", "[topology] stages_per_rank"): "leave it out, or name more stages by layers_per_stage",
    ("--reserve-gb", "--host-memory-gb", "--efficiency", "--intra-gb-per-s", "--inter-gb-per-s", "--host-gb-per-s"): (
        "name it in a file of --cluster"
    ),
    ("--adapt-costs", "--clip-grad", "--grace", "--log-every", "--loss-norm", "--nan-policy", "--save-minutes"): (
        "set it in a file of settings, for --config"
    ),
    ("--rdzv-backend",): "leave it out, as the rendezvous is the package's own; --node-rank fixes the ranks of nodes",
    ("--replica-counts", "[plan] replica_counts"): "leave it out, as they are equal if replicas meet inside of these",
    ("[run] tensorboard",): 'use loggers = ["tensorboard"]',
    ("[run] traced_steps",): "leave it out, as the page draws the last 3 steps",
    ("--wandb", "[run] wandb"): "use --loggers wandb, and WANDB_PROJECT for the project's name",
}
_REMOVED = {name: successor for names, successor in _SUCCESSORS.items() for name in names}


def refuse_removed(names: Iterable[str], where: str = "") -> None:
    """Reject a flag, or a key like "[run] steps", that an earlier version had: ConfigError names its successor."""
    for name in names:
        if successor := _REMOVED.get(name, f"use {_RENAMED[name]}" if name in _RENAMED else ""):
            raise ConfigError(f"{where}{name} was removed: {successor}")


def translate_saved(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that an earlier version saved, under their names of today, without those that are gone."""
    translated: dict[str, Any] = {name: values for name, values in tables.items() if not isinstance(values, Mapping)}
    keys = {
        f"[{table}] {name}": value
        for table, values in tables.items()
        if table not in translated
        for name, value in values.items()
    }
    if fields := [keys[f"[data] {name}_key"] for name in ("input", "target", "text") if keys.get(f"[data] {name}_key")]:
        keys["[data] fields"] = fields[:2]
    if loggers := [name for name in ("tensorboard", "wandb") if keys.get(f"[run] {name}")]:
        keys["[run] loggers"] = loggers
    for key, value in keys.items():
        if key not in _REMOVED:
            table, _, name = _RENAMED.get(key, key).removeprefix("[").partition("] ")
            translated.setdefault(table, {})[name] = value
    return translated
