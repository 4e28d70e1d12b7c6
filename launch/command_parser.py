"""The parser of every subcommand, and the flags that stand for settings."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from dynapipe_ext.errors import ConfigError, did_you_mean, short
from dynapipe_ext.settings.declared import parse_layer_counts
from dynapipe_ext.settings.removed import describe_removed
from dynapipe_ext.tools.files import ALONE, deliver_error

_MOST_POSITIONS = 1 << 40  # of a sample
_NUMBERS = re.compile(r"[0-9.,]+")
_STATUSES = {
    0: "done",
    1: "a defect of dynapipe, after its traceback",
    2: "a mistake in what was given",
    130: "Ctrl-C",
}


class CommandParser(argparse.ArgumentParser):
    """Takes whole flags only. Each subcommand refuses unknown flags itself, and suggests what may be meant. The parsed
    words stay in `words`."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", _Help)
        super().__init__(allow_abbrev=False, **settings)
        self._line_words: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._line_words = tuple(map(str, sys.argv[1:] if args is None else args))
        if self._subparsers is None:  # before anything else is said to be wrong or missing
            words = [word.partition("=")[0] for word in self._line_words]
            for word in words[: words.index("--") if "--" in words else None]:
                if word.startswith("--") and word not in self._option_string_actions:
                    unknown = f"unknown {word}{did_you_mean(word, self._option_string_actions)}"
                    self.error(describe_removed(word, self._option_string_actions) or unknown)
        parsed, unknown = super().parse_known_args(self._with_lists_joined(self._line_words), namespace)
        if unknown:
            self.error(f"unknown {' '.join(unknown)}")
        if self._subparsers is None:
            parsed.words = self._line_words
        return parsed, unknown

    def _with_lists_joined(self, words: Sequence[str]) -> list[str]:
        """The words, numbers in a row behind a flag that takes several as one of them: `8.5 8` is `8.5,8`."""
        joined: list[str] = []
        for word in words:
            action = self._option_string_actions.get(joined[-2]) if len(joined) > 1 else None
            if action and action.type is parse_layer_counts and all(map(_NUMBERS.fullmatch, (joined[-1], word))):
                joined[-1] += f",{word}"
            else:
                joined.append(word)
        return joined

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        if "--json" in self._option_string_actions:
            deliver_error(json_place(self._line_words), message, 2)
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help says more)\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # Most often a variable of a shell that is not set. A subcommand's value is all the words behind it.
        if not arg_string.strip() and not isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(action, "is empty: give a value, or leave it out")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            near = did_you_mean(str(value), map(str, action.choices))
            choices = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"{value!r} is unknown: choose from {choices}{near}")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Says the default of each option that has one and does not say it itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if "default" in text or action.required or default in (None, "", False, argparse.SUPPRESS):
            return text
        if isinstance(default, list | tuple):
            return f"{text} (default: {','.join(map(str, default))})"
        return f"{text} (default: %(default)s)"


def ending(epilog: str, statuses: Mapping[int, str] | None = None) -> str:
    """A subcommand's epilog, which opens with examples, and then what its exit statuses mean."""
    meanings = _STATUSES | dict(statuses or {})
    return f"{epilog.strip()}\n\nexit status: {'; '.join(f'{status} {what}' for status, what in meanings.items())}\n"


def add_json(parser: argparse._ActionsContainer, what: str) -> None:
    """`--json [FILE]`, whose value `tools.console.deliver` takes. A command that fails delivers its error instead."""
    parser.add_argument(
        "--json", nargs="?", const=ALONE, metavar="FILE", help=f"{what} as JSON: alone on standard output, or in FILE"
    )


def json_place(words: Sequence[str]) -> str | None:
    """The value of `--json` in a command line that may not be parsed; None without.

    >>> json_place(["--json"]), json_place(["--json", "out.json", "a"]), json_place(["--json=b"]), json_place(["a"])
    ('-', 'out.json', 'b', None)
    """
    before = words[: words.index("--")] if "--" in words else words
    for word, following in pairwise([*before, ""]):
        if word.startswith("--json="):
            return word.partition("=")[2]
        if word == "--json":
            return following if following and not following.startswith("-") else ALONE
    return None


def given_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """The long flags of a parsed command line, in their order."""
    return tuple(dict.fromkeys(word.partition("=")[0] for word in args.words if word.startswith("--")))


def flag_of(name: str) -> str:
    """
    >>> flag_of("log_interval")
    '--log-interval'
    """
    return f"--{name.replace('_', '-')}"


def refuse_below(args: argparse.Namespace, least: int, *names: str) -> None:
    """Errors: ConfigError for a flag of these names with a number below `least`; one that was left out is none."""
    for name in names:
        if (number := getattr(args, name)) is not None and number < least:
            raise ConfigError(f"{flag_of(name)} is {number} but must be at least {least}")


def add_truncate(parser: argparse._ActionsContainer, longest: str) -> None:
    """`--truncate [N]`, which `cut_at` reads; `longest` is what holds without N."""
    parser.add_argument(
        "--truncate",
        nargs="?",
        type=int,
        const=True,
        metavar="N",
        help=f"cut samples at N positions (N + 1 tokens, the last a label only; default: {longest})",
    )


def cut_at(truncate: int | bool | None, longest: int | None) -> int | None:
    """Where to cut, by the value of `--truncate`; None for nowhere. `longest` is what holds without N.

    Errors: ConfigError for an N below 1, and where neither says a length.
    """
    if truncate is not True:
        if truncate is not None and not 1 <= truncate <= _MOST_POSITIONS:
            raise ConfigError(f"--truncate is {short(truncate)} but must be at least 1, at most {_MOST_POSITIONS:,}")
        return truncate
    if longest is None:
        raise ConfigError("--truncate cuts samples, but nothing says where: give --truncate N, or --max-seq-len N")
    return longest
