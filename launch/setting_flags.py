"""Flags that stand for settings: their form, choices, words and defaults are those that the setting declares."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from dynapipe_ext.settings.declared import Setting
from dynapipe_ext.settings.train_config import declared_tables

Tables = dict[str, dict[str, Any]]
DEGREES = ("tp", "pp", "dp")


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Those of all settings, in groups by their table in the file."""
    for table, settings in declared_tables().items():
        group = parser.add_argument_group(f"[{table}]")
        for one in settings.values():
            if one.flag:
                _add(group, one)


def add_flags(parser: argparse._ActionsContainer, *names: str) -> None:
    """Those of the settings that are named, as "plan.layout"."""
    for name in names:
        _add(parser, _named(name))


def add_flag(parser: argparse._ActionsContainer, name: str, help: str, **options: Any) -> None:
    """That of one setting, with help of its own, and other `options` of argparse."""
    one = _named(name)
    parser.add_argument(one.flag, **one.flag_options | options, help=help)


def _named(name: str) -> Setting:
    table, _, key = name.partition(".")
    return declared_tables()[table][key]


def _add(parser: argparse._ActionsContainer, one: Setting) -> None:
    says_default = "default" in one.help or one.default in ("", False, ())
    default = "" if says_default else f" (default: {one.default})"
    parser.add_argument(one.flag, **one.flag_options, help=one.help + default)
    if one.alias:
        dest = one.flag.lstrip("-").replace("-", "_")
        parser.add_argument(one.alias, dest=dest, **one.flag_options, help=f"another name of {one.flag}")


def settings_of_flags(args: argparse.Namespace, tables: Mapping[str, Mapping[str, Any]], *, of_file: bool) -> Tables:
    """The settings in `tables`, overridden by the flags of the command line.

    A flag that replaces another setting resets that one: `--steps` the epochs, `--batch-size` the tokens of a batch,
    `--placement` the stages of a rank. With `of_file` degrees of parallelism without a flag stay those of the file.
    Else they are 1, once one of them has a flag.
    """
    settings: Tables = {table: dict(tables.get(table, {})) for table in declared_tables()}
    for table, declared in declared_tables().items():
        for name, one in declared.items():
            value = getattr(args, one.flag.lstrip("-").replace("-", "_"), None) if one.flag else None
            if value is not None:
                settings[table][name] = tuple(value) if isinstance(value, list) else value
    run, topology, data = settings["run"], settings["topology"], settings["data"]
    if "steps" in run:
        run["epochs"] = 0.0
    if "placement" in topology:  # another one's stages and layers are not for it
        settings["topology"] = topology = {"stages_per_rank": 0, "layers_per_stage": ()} | topology
    if topology.get("vocabulary") == "auto":  # which chooses layers
        settings["topology"] = topology = {"layers_per_stage": ()} | topology
    if not of_file and topology.keys() & {*DEGREES}:
        settings["topology"] = dict.fromkeys(DEGREES, 1) | topology
    if "batch_size" in data or "tokens_per_batch" in data:
        settings["data"] = {"batch_size": 0, "tokens_per_batch": 0} | data
    return {table: values for table, values in settings.items() if values}
