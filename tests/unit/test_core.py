"""Which core plans is known, shown, and the compiled one unless a pure build was asked for."""

import os

import pytest

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.core import active_core, native
from dynapipe_ext.launch.commands.doctor import all_checks
from dynapipe_ext.launch.job import settled


def test_the_native_core_is_active_unless_a_pure_build_was_asked_for() -> None:
    asked_pure = os.environ.get("DYNAPIPE_PURE", "").lower() in ("1", "true", "yes", "on")
    assert active_core() == ("python" if asked_pure else "native")
    assert (native is None) == asked_pure


def test_doctor_says_which_core_plans() -> None:
    (check,) = [check for check in all_checks() if check.name == "planning core"]
    assert check.value == active_core()
    assert check.ok == (active_core() == "native")


@pytest.mark.parametrize(
    ("core", "words"), [("native", "plans by the native core"), ("python", "plans by the python core (slower than")]
)
def test_a_job_says_when_it_starts_which_core_plans(monkeypatch: pytest.MonkeyPatch, core: str, words: str) -> None:
    monkeypatch.setattr(settled, "active_core", lambda: core)
    line = settled.ranks_line(Topology(tp=2, pp=2, dp=2))
    assert line.startswith(f"ranks: 8 (TP2 x PP2 x DP2), {words}")
    assert ("dynapipe doctor" in line) == (core == "python")
