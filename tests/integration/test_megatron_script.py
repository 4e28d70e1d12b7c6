"""Megatron-LM's unchanged pretrain_gpt.py by `python -m dynapipe_ext.megatron`, beside itself without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.megatron_lm_runs import ARGUMENTS, Ran, Run, megatron_lm_runs, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

TP_PP = [*ARGUMENTS, "--mock-data", *["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]]
PP_DP = [
    *ARGUMENTS, "--mock-data", *["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    *["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
]  # fmt: skip
RUNS = (
    Run("tp2 pp2, stock", 4, TP_PP, planned=False),
    Run("tp2 pp2", 4, TP_PP),
    Run("pp2 dp2, stock", 4, PP_DP, planned=False),
    Run("pp2 dp2", 4, [*PP_DP, "--dynapipe-split-backward", "--dynapipe-memory-limit-gb", "1"]),
    Run("cp2", 2, [*ARGUMENTS, "--mock-data", "--context-parallel-size", "2"]),
    Run("help", 1, ["--help"]),
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: Any) -> dict[str, Ran]:
    return megatron_lm_runs(RUNS, tmp_path_factory.mktemp("megatron-lm"), timeout_s=280)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["tp2 pp2", "pp2 dp2"])
def test_each_line_of_the_log_agrees_with_megatrons_own_schedule(ran: dict[str, Ran], name: str) -> None:
    ours, theirs = ran[name], ran[f"{name}, stock"]
    assert ours.status == theirs.status == 0, ours.log[-3000:]
    assert len(ours.losses) == 6
    for column, width in {"lm loss": 2e-6, "grad norm": 2e-3, "learning rate": 0, "consumed samples": 0}.items():
        assert ours.column(column) == pytest.approx(theirs.column(column), abs=width)
    assert ours.validated == pytest.approx(theirs.validated, abs=2e-6)
    assert len(ours.validated) == 2
    assert "dynapipe: " in ours.log
    assert "dynapipe: " not in theirs.log


def test_what_cannot_go_together_ends_the_start_with_one_line(ran: dict[str, Ran]) -> None:
    assert ran["cp2"].status == 2
    for printed in ran["cp2"].printed:
        assert printed.splitlines()[-1].startswith("dynapipe: context_parallel_size is 2")


def test_the_arguments_are_in_the_help_of_the_script(ran: dict[str, Ran]) -> None:
    assert ran["help"].status == 0
    for name in ("--dynapipe-costs", "--dynapipe-memory-limit-gb", "--dynapipe-split-backward", "--seq-length"):
        assert name in ran["help"].log
