"""The options of all subcommands and the keys of the settings file, read off the one declaration of each setting."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.launch import subcommands
from dynapipe_ext.launch.command_parser import CommandParser
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.declared import list_settings
from dynapipe_ext.settings.plan_rules import PlanRules
from dynapipe_ext.settings.tables import PlanSettings
from dynapipe_ext.settings.train_config import TrainConfig, list_tables
from tests.support.limits import LIMIT_S

# Where one word means a choice of another set in another subcommand: figures of a GPU, or torch's device.
OWN_CHOICES = {"device", "dtype", "schedule", "recompute"}
# `estimate` searches: it takes several, with commas, of what others take one of; and a range of tokens.
SEARCHED = {("estimate", name) for name in ("tp", "pp", "cp", "layout", "recompute", "tokens_per_batch")}
SEARCHED.add(("profile", "recompute"))
DECLARED = {flag: one for settings in list_tables().values() for one in settings.values() if (flag := one.flag)}
HOUSE = Path(__file__).parents[2]


def parsers() -> dict[str, argparse.ArgumentParser]:
    made = {}
    for subcommand in subcommands.SUBCOMMANDS:
        made[subcommand.name] = CommandParser(prog=f"dynapipe {subcommand.name}")
        importlib.import_module(subcommand.module).add_arguments(made[subcommand.name])
    return made


PARSERS = parsers()
OPTIONS = [
    (command, action)
    for command, parser in PARSERS.items()
    for action in parser._actions
    if action.option_strings and action.dest != "help"
]


def form(action: argparse.Action) -> tuple[object, ...]:
    choices = tuple(action.choices) if action.choices and action.dest not in OWN_CHOICES else bool(action.choices)
    return (
        type(action).__name__,
        action.nargs,
        action.const,
        action.metavar,
        getattr(action.type, "__name__", ""),
        choices,
    )


def test_an_option_of_several_subcommands_has_one_form() -> None:
    forms: dict[str, dict[object, list[str]]] = defaultdict(lambda: defaultdict(list))
    for command, action in OPTIONS:
        if (command, action.dest) not in SEARCHED:
            forms[action.option_strings[0]][form(action)].append(command)
    assert {flag: dict(found) for flag, found in forms.items() if len(found) > 1} == {}


def test_every_option_that_stands_for_a_setting_has_the_declared_form() -> None:
    parser = argparse.ArgumentParser()
    forms = {flag: form(parser.add_argument(flag, **one.flag_options)) for flag, one in DECLARED.items()}
    assert {flag: options for flag, options in DECLARED.items() if flag not in parser._option_string_actions} == {}
    options = [option for option in OPTIONS if option[1].option_strings[0] in DECLARED]
    others = {(command, action.dest) for command, action in options if form(action) != forms[action.option_strings[0]]}
    assert others == SEARCHED - {("profile", "recompute"), ("estimate", "recompute"), ("estimate", "cp")}
    assert {action.option_strings[0] for command, action in options if command == "train"} == DECLARED.keys()


def test_no_flag_of_a_setting_is_declared_by_hand() -> None:
    """But `estimate` takes a range of tokens, and several numbers of ranks, where others take a number."""
    sources = [*(HOUSE / "launch" / "commands").glob("*.py"), HOUSE / "dynapipe_ext" / "settings" / "train_config.py"]
    by_hand = {
        (source.stem, call.args[0].value)
        for source in sources
        for call in ast.walk(ast.parse(source.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        if call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value in DECLARED.keys() | {"--cp"}
    }
    assert by_hand == {("estimate", "--tokens-per-batch"), ("estimate", "--cp")}


def test_every_key_of_the_settings_file_has_a_declared_type_and_default_within_its_bounds() -> None:
    tables = {table: owner for table, owner in get_type_hints(TrainConfig).items() if table != "named"}
    fields_of = {table: {field.name for field in fields(owner)} for table, owner in tables.items()}
    undeclared = {table: names - list_tables()[table].keys() for table, names in fields_of.items()}
    assert {table: names for table, names in undeclared.items() if names} == {
        "model": {"described", "cut"},  # read from what the settings name, and proven of it
        "lora": {"described"},
        "deepspeed": {"described"},
        "plan": {"replica_counts"},  # decided by what replicas do together
    }
    for table, settings in list_tables().items():
        for one in settings.values():
            assert one.check_value(one.default, f"[{table}] ") == getattr(getattr(TrainConfig(), table), one.name)


@pytest.mark.parametrize("owner", [PlanSettings, Planner, DropInSettings])
def test_plan_rules_are_declared_once_and_held_whole(owner: type) -> None:
    """By a run's settings, the planner and the drop-in; another default is all that they may say themselves."""
    assert issubclass(owner, PlanRules)
    same = {name: replace(one, default=None) for name, one in list_settings(PlanRules).items()}
    assert {name: replace(list_settings(owner)[name], default=None) for name in same} == same


def test_an_option_has_one_name() -> None:
    several = {tuple(action.option_strings) for _, action in OPTIONS if len(action.option_strings) != 1}
    assert several == {("--context-parallel", "--cp")}
    renamed = [action for _, action in OPTIONS if action.option_strings[0] != "--" + action.dest.replace("_", "-")]
    assert {action.option_strings[0] for action in renamed} == {"--from"}  # a word of Python


_TRAIN = {"train", "quickstart", "launch"}


@pytest.mark.parametrize(
    ("flag", "commands", "says"),
    [
        ("--json-key", {"preprocess"}, "use --json-keys"),
        ("--vocabulary", {"estimate", "plan"} | _TRAIN, "use --vocabulary-parallel"),
        ("--width", {"plan"} | _TRAIN, "use --context-parallel (or --cp)"),
        ("--partitions", {"preprocess"}, "leave it out, as documents keep the order of --input"),
        ("--input-key", {"preprocess"} | _TRAIN, "use --fields PROMPT RESPONSE"),
        ("--stages-per-rank", {"estimate", "plan"} | _TRAIN, "leave it out for the usual number of --placement"),
        ("--efficiency", {"estimate"}, "set efficiency in the file of --cluster"),
        ("--reserve-gb", {"estimate"}, "set reserved_gb in the file of --cluster"),
        (
            "--grace",
            {"plan", "check-plan", "profile"} | _TRAIN,
            "set grace_s under [checkpoint] in the file of --config",
        ),
        ("--rdzv-backend", {"launch"}, "leave it out"),
        ("--replica-counts", {"plan"} | _TRAIN, "leave it out, as counts are equal"),
        ("--wandb", _TRAIN, "use --loggers wandb, and WANDB_PROJECT"),
    ],
)
def test_a_removed_flag_says_what_to_use_in_the_commands_that_have_it(
    flag: str, commands: set[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {}
    for command in PARSERS.keys() - {"show-schedule" if flag == "--stages-per-rank" else ""}:
        with pytest.raises(SystemExit):
            PARSERS[command].parse_args([flag, "2"])
        answers[command] = capsys.readouterr().err
    assert {command for command, answer in answers.items() if f"{flag} was removed: {says}" in answer} == commands
    assert all(f"unknown {flag}" in answers[command] for command in answers.keys() - commands)


def test_memory_is_given_in_one_way() -> None:
    limits = {action.option_strings[0] for _, action in OPTIONS if re.search(r"memory|mb$", action.dest)}
    assert limits == {"--gpu-memory-gb", "--memory-limit-gb"}  # a device, a run's rank


@pytest.mark.parametrize("command", PARSERS)
def test_every_help_says_what_each_option_is_with_examples_and_exit_statuses(command: str) -> None:
    text = PARSERS[command].format_help()
    assert f"examples:\n  dynapipe {command}" in text
    assert "exit status: 0 done; 1 " in text
    for _, action in (option for option in OPTIONS if option[0] == command):
        said = action.help or ""
        assert said, action.option_strings
        assert not said.endswith("."), said
        assert not re.search(r"\((\d|none|line)[^)]*\)$", said), f"{said}: say (default: …)"


def test_no_help_and_no_early_mistake_loads_what_is_slow_to_load(tmp_path: Path) -> None:
    """One after the other in one process, so that the first to load it is at the head of those that differ; of a CUDA
    build of torch, doctor asks for its devices."""
    script = """
import io, sys
from contextlib import redirect_stdout, suppress
from dynapipe_ext.launch import cli, subcommands
words = [[one.name, "--help"] for one in subcommands.SUBCOMMANDS]
mistaken = (["nothere", "there"], ["here", "there"], ["here", "here"], ["here", "there", "--tp", "2"])
for arguments in [*words, *(["convert", *one, "--to", "hf"] for one in mistaken), ["doctor"]]:
    with redirect_stdout(io.StringIO()), suppress(SystemExit):
        cli.main(arguments)
    print(*arguments, *{"torch", "transformers", "megatron", "scipy", "tokenizers"} & {*sys.modules})
"""
    (tmp_path / "here").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert run.returncode == 0, run.stderr
    assert [line.rpartition(": ")[2].strip() for line in run.stderr.splitlines() if "error" in line] == [
        "give the folder of a checkpoint",
        "give the folder that holds one of these",
        "choose another DST, or remove it",
        "leave out --tp",
    ]
    wanted = [f"{one.name} --help" for one in subcommands.SUBCOMMANDS]
    wanted += [f"convert {one} --to hf" for one in ("nothere there", "here there", "here here", "here there --tp 2")]
    if not torch.version.cuda:
        wanted.append("doctor")
    assert run.stdout.splitlines()[: len(wanted)] == wanted


@pytest.mark.parametrize("command", PARSERS)
def test_no_option_takes_an_empty_value(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a shell's variable that is not set leaves; each would else mean that the option was not given."""
    for _, action in (option for option in OPTIONS if option[0] == command and option[1].nargs != 0):
        flag, values = action.option_strings[0], 2 if action.nargs == 2 else 1
        with pytest.raises(SystemExit, match=r"^2$"):
            PARSERS[command].parse_args([flag, *[""] * values])
        assert re.search(rf"argument {flag}(/--cp)?: (is empty|'' )", capsys.readouterr().err.splitlines()[-1]), flag
