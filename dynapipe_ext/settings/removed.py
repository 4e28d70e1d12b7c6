"""The flags and keys that earlier versions had, each with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from dynapipe_ext.errors import short

_RENAMED = {f"[debug] {name}": f"[run] {name}" for name in ("log_dir", "log_level", "plan_dir")} | {
    "[debug]": "[run]",
    "[plan] rule": "[plan] split_policy",
    "[topology] vocabulary": "[topology] vocabulary_parallel",
    "[topology] width": "[topology] context_parallel",
    "--json-key": "--json-keys",
    "--vocabulary": "--vocabulary-parallel",
    "--width": "--context-parallel (or --cp)",
}
# What to do without a flag names a flag of the commands that had it; {} is the flag's own name as a key.
_SUCCESSORS = {
    ("--partitions", "--keep-sequential-samples"): "leave it out, as documents keep the order of --input",
    ("--split-sentences", "--lang", "--keep-newlines"): "give texts as lists of sentences in --input",
    ("--input-key", "--target-key", "--pair-keys"): "use --fields PROMPT RESPONSE",
    ("[data] input_key", "[data] target_key"): "use fields = [PROMPT, RESPONSE]",
    ("--text-key", "[data] text_key"): "use fields = [TEXT], or --fields TEXT",
    (
        "--output-merged",
        "[checkpoint] output_merged",
    ): "use --lora, --output and dynapipe convert OUTPUT DIR --merge BASE",
    ("--save-format", "[checkpoint] save_format"): "use --output, and dynapipe convert OUTPUT DIR --to FORMAT",
    ("[checkpoint] background",): "leave it out, as runs on accelerators save so if memory allows",
    ("[data] prefetch_steps",): "leave it out, as planners stay 2 steps ahead",
    ("--stages-per-rank", "[topology] stages_per_rank"): (
        "leave it out for the usual number of --placement, or name more stages by layers_per_stage"
    ),
    ("--host-memory-gb", "--efficiency", "--intra-gb-per-s", "--inter-gb-per-s", "--host-gb-per-s"): (
        "set {} in the file of --cluster"
    ),
    ("--reserve-gb",): "set reserved_gb in the file of --cluster",
    ("--adapt-costs", "--loss-norm"): "set {} under [plan] in the file of --config",
    ("--clip-grad", "--nan-policy"): "set {} under [optimizer] in the file of --config",
    ("--grace",): "set grace_s under [checkpoint] in the file of --config",
    ("--log-every",): "set {} under [run] in the file of --config",
    ("--save-minutes",): "set {} under [checkpoint] in the file of --config",
    ("--rdzv-backend",): "leave it out, as the rendezvous is the package's own; --node-rank fixes the ranks of nodes",
    ("--replica-counts", "[plan] replica_counts"): (
        "leave it out, as counts are equal whenever --dp replicas exchange data within a micro-batch"
    ),
    ("[run] tensorboard",): 'use loggers = ["tensorboard"]',
    ("[run] traced_steps",): "leave it out, as the page draws the last 3 steps",
    ("--wandb", "[run] wandb"): "use --loggers wandb, and WANDB_PROJECT for the project's name",
}
_REMOVED = {old: f"use {new}" for old, new in _RENAMED.items()} | {
    name: successor.format(name.removeprefix("--").replace("-", "_"))
    for names, successor in _SUCCESSORS.items()
    for name in names
}
# The defaults of removed keys; of all others they were "", 0 or false.
_DEFAULTS = {
    "[checkpoint] save_format": "hf",
    "[data] prefetch_steps": 2,
    "[plan] replica_counts": "free",
    "[run] traced_steps": 3,
}


def describe_removed(name: str, known_flags: Collection[str] = ()) -> str:
    """Say what to use instead of a flag, or a key like "[run] steps", that an earlier version had.

    Empty for another name, and if `known_flags` lack a flag to use: then this command never had the removed one.
    """
    successor = _REMOVED.get(name, "")
    flags = re.findall(r"--[a-z-]+", successor.partition("dynapipe")[0])
    if not successor or (known_flags and not {*flags} <= {*known_flags}):
        return ""
    return f"{name} was removed: {successor}"


def translate_saved(tables: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that an earlier version saved, under their names of today, and what to do instead of those
    that are gone and did not have their defaults."""
    translated: dict[str, Any] = {name: values for name, values in tables.items() if not isinstance(values, Mapping)}
    keys, gone = list_keys(tables), []
    named = ("input_key", "target_key") if keys.get("[data] input_key") else ("text_key",)
    if fields := [field for name in named if (field := keys.pop(f"[data] {name}", ""))]:
        keys["[data] fields"] = fields
    if loggers := [name for name in ("tensorboard", "wandb") if keys.get(f"[run] {name}")]:
        keys["[run] loggers"] = loggers
        keys.pop("[run] tensorboard", None)
    for key, value in keys.items():
        if key in _RENAMED or key not in _REMOVED:
            table, _, name = _RENAMED.get(key, key).removeprefix("[").partition("] ")
            translated.setdefault(table, {})[name] = value
        elif value != _DEFAULTS.get(key, type(value)()):
            gone.append(f"{key} {short(value)} was removed: {_REMOVED[key]}")
    return translated, gone


def list_keys(tables: Mapping[str, Any]) -> dict[str, Any]:
    """List the values of settings by their keys, like "[run] steps"."""
    return {
        f"[{table}] {name}": value
        for table, values in tables.items()
        if isinstance(values, Mapping)
        for name, value in values.items()
    }
