"""`dynapipe compare`: two runs on the same axes, and how they differ in words."""

from __future__ import annotations

import argparse
from pathlib import Path

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.command_parser import add_json, ending
from dynapipe_ext.launch.run.page import read_settings
from dynapipe_ext.tools.account.run_events import EVENTS_FILE, read_events
from dynapipe_ext.tools.account.run_series import RunSoFar
from dynapipe_ext.tools.console import deliver
from dynapipe_ext.tools.show.run_words import NamedRun, difference_sentences, settings_that_differ
from dynapipe_ext.tools.show.runs_compared import compared_table, figures_table, named_apart, write_comparison

_EPILOG = """examples:
  dynapipe compare runs/2026-11-22T01-30-00 runs/latest
  dynapipe compare runs/packed runs/padded --html both.html

A run may go on, or have ended early: what its events.jsonl has is compared.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ending(_EPILOG)
    parser.add_argument("runs", nargs=2, metavar="RUN", help="directory of a run")
    parser.add_argument("--html", metavar="FILE", help="also write a page: both runs on the same axes")
    add_json(parser, "figures and differences")


def run(args: argparse.Namespace) -> int:
    paths = [Path(path) for path in args.runs]
    for path in paths:
        if not (path / EVENTS_FILE).is_file():
            raise ConfigError(f"{path} is no run's directory: it has no {EVENTS_FILE}; give one such as runs/latest")
    names = named_apart([path.resolve() for path in paths])
    one, other = (
        NamedRun(name=name, run=RunSoFar.of(read_events(path / EVENTS_FILE)), settings=read_settings(path))
        for name, path in zip(names, paths, strict=True)
    )
    sentences = list(difference_sentences(one, other))
    if args.html:
        write_comparison(args.html, one, other)
    report = {
        "runs": [str(path) for path in paths],
        "differences": sentences,
        "figures": {name: values for name, *values in figures_table(one, other)},
        "settings": {name: values for name, *values in settings_that_differ(one.settings, other.settings)},
    }
    page = [f"both on the same axes: {args.html}"] if args.html else []
    deliver(args.json, report, compared_table(one, other), "\n".join(sentences), *page)
    return 0
