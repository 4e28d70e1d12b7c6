"""The tests of a suite, imported once for all of its workers, which are forks of the process that does it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from tests.support.preloaded import join_pages


class _Forgetting:
    """pytest leaves a module imported whose import has failed, or skips: as an empty one workers would pass it over."""

    @staticmethod
    def pytest_collectreport(report: pytest.CollectReport) -> None:
        if not report.passed:
            sys.modules.pop(report.nodeid.removesuffix(".py").replace("/", "."), None)


def collect(words: Sequence[str]) -> None:
    """Import the modules of the tests that pytest finds by `words`; workers import the others and say why not."""
    pytest.main([*words, "--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[_Forgetting()])
    join_pages()
