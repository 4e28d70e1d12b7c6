"""Packages keep within their budgets of lines and tokens, and options become no more."""

from __future__ import annotations

import tomllib

from dynapipe_ext.settings.train_config import list_tables
from tests.repo.test_options import PARSERS
from tests.support.size import BUDGET, sizes_of_packages

RECORDED = tomllib.loads(BUDGET.read_text())
PACKAGES = RECORDED["packages"]
_STATES = ("old", "moving", "done")
_SLACK = 1.1  # a package is done within a tenth above its budget


def test_no_package_grows() -> None:
    """What must grow takes its lines from another package, or says in its commit why the budget was wrong."""
    sizes = sizes_of_packages(list(PACKAGES))
    grown = {
        name: (size, PACKAGES[name])
        for name, size in sizes.items()
        if size.lines > PACKAGES[name]["lines"] or size.tokens > PACKAGES[name]["tokens"]
    }
    assert grown == {}


def test_at_most_one_package_is_moving_and_what_is_done_is_within_its_budget() -> None:
    states = {name: package["state"] for name, package in PACKAGES.items()}
    assert {*states.values()} <= {*_STATES}
    assert sum(state == "moving" for state in states.values()) <= 1
    assert [
        name
        for name, state in states.items()
        if state == "done" and PACKAGES[name]["lines"] > _SLACK * PACKAGES[name]["budget"]
    ] == []


def test_options_become_no_more() -> None:
    """An option needs a user who cannot do without it; the program decides what it can decide better."""
    num_flags = {
        name: sum(bool(action.option_strings) and action.dest != "help" for action in parser._actions)
        for name, parser in PARSERS.items()
    }
    assert {name: num for name, num in num_flags.items() if num > RECORDED["flags"][name]} == {}
    num_keys = sum(map(len, list_tables().values()))
    assert num_keys <= RECORDED["keys"]["all"]
