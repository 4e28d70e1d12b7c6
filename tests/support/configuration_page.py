"""The page of every key and flag, made of their declarations.

python -m tests.support.configuration_page    writes .github/docs/configuration.md
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from dynapipe_ext.launch.command_parser import CommandParser
from dynapipe_ext.launch.subcommands import SUBCOMMANDS
from dynapipe_ext.settings.declared import Setting
from dynapipe_ext.settings.train_config import TrainConfig, list_tables

PAGE = Path(__file__).resolve().parents[2] / ".github" / "docs" / "configuration.md"
_OPENING = """# Configuration

Every key of the settings file and every flag, made of their declarations by
`python -m tests.support.configuration_page`.

- A run reads TOML: `dynapipe train --config mine.toml`, one table a concern.
- `launch/configs/quickstart.toml` spells out all of it, and what differs there from the defaults.
- A key that is left out keeps its default. A flag overrides its key. Unknown names are refused, with what may be meant.
- A degree (tp, pp, dp) that has no flag is 1 as soon as another has one; with `--config` it is the file's, or 2.
- `--steps` replaces epochs, `--batch-size` the tokens of a batch, `--placement` the stages of a rank.
- A run writes the settings it had into `config.toml` of its folder.
"""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every subcommand, by its name."""
    made = {}
    for subcommand in SUBCOMMANDS:
        made[subcommand.name] = CommandParser(prog=f"dynapipe {subcommand.name}")
        importlib.import_module(subcommand.module).add_arguments(made[subcommand.name])
    return made


def page() -> str:
    return "\n".join([_OPENING, "## Keys of the file", "", *_tables(), "## Flags of each command", "", *_commands()])


def _tables() -> Iterator[str]:
    owners = get_type_hints(TrainConfig)
    for table, settings in list_tables().items():
        yield f"### [{table}]"
        yield ""
        yield " ".join((owners[table].__doc__ or "").split()).replace("|", "\\|")
        yield ""
        yield "| key | takes | default | flag | what |"
        yield "|---|---|---|---|---|"
        for one in settings.values():
            flag = f"`{one.flag}`" if one.flag else ""
            yield f"| `{one.name}` | {_takes(one)} | `{_toml(one.default)}` | {flag} | {_cell(one.help)} |"
        yield ""


def _takes(one: Setting) -> str:
    """The words, types and bounds of a setting's values.

    >>> _takes(Setting(name="steps", kind=int, default=1, at_least=1))
    'integer, at least 1'
    """
    kinds = get_args(one.kind) if get_origin(one.kind) in (UnionType, Union) else (one.kind,)
    words = [f"`{_toml(word)}`" for word in one.choices]
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    types = [names[kind] for kind in kinds if kind in names]
    if get_origin(one.kind) is tuple:
        words, types = [], [f"list of {' '.join(words) or f'{names[get_args(one.kind)[0]]}s'}"]
    return ", ".join(filter(None, (" ".join(words), *types, one.bounds)))


def _toml(value: object) -> str:
    """
    >>> _toml(True), _toml("a"), _toml((0.9, 0.999)), _toml(1.0)
    ('true', '"a"', '[0.9, 0.999]', '1.0')
    """
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            return str(value)


def _commands() -> Iterator[str]:
    """The flags of each command that stand for no key of the file."""
    keys = {one.flag for settings in list_tables().values() for one in settings.values()}
    for name, parser in parsers().items():
        shown = [action for action in parser._actions if action.dest != "help"]
        own = [action for action in shown if not {*action.option_strings} & keys]
        of_keys = sorted({*keys} & {flag for action in shown for flag in action.option_strings})
        yield f"### dynapipe {name}"
        yield ""
        yield f"{next(one.summary for one in SUBCOMMANDS if one.name == name)}."
        yield ""
        if name in ("train", "quickstart", "launch"):
            yield "Takes the flags of all keys above."
            yield ""
        elif of_keys:
            yield f"Of the flags above: {', '.join(f'`{flag}`' for flag in of_keys)}."
            yield ""
        if own:
            yield "| argument | what |"
            yield "|---|---|"
            for action in own:
                yield f"| `{_argument(action)}` | {_cell(_help(action))} |"
            yield ""


def _argument(action: argparse.Action) -> str:
    """
    >>> _argument(argparse.ArgumentParser().add_argument("--out", metavar="FILE"))
    '--out FILE'
    """
    name = action.option_strings[0] if action.option_strings else ""
    if action.nargs == 0:
        return name
    metavar = action.metavar or (action.dest.upper() if not action.choices else "{" + ",".join(action.choices) + "}")
    if isinstance(metavar, tuple):
        metavar = " ".join(metavar)
    value = f"[{metavar}]" if action.nargs in ("?", "*") else f"{metavar} …" if action.nargs == "+" else metavar
    return f"{name} {value}".strip().replace("|", "\\|")


def _help(action: argparse.Action) -> str:
    """As `--help` shows it, with the default of those that have one."""
    formatter: Any = CommandParser(prog="dynapipe")._get_formatter()
    return str(formatter._expand_help(action))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
