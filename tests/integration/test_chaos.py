"""Jobs to which several things happen end as a clean job does: the same weights, and nothing left behind.

`tests/bench/chaos.py` runs many more of them, over every wait, every process, and every file operation of a save.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos import Cell, ChaosJobs, Command
from tests.support.preloaded import Preloaded


@pytest.fixture(scope="module")
def jobs(preloaded: Preloaded) -> Iterator[ChaosJobs]:
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as folder:  # short: a socket's path must fit
        yield ChaosJobs(preloaded, Path(folder, "jobs"))


@pytest.mark.parametrize(
    ("command", "cells"),
    [
        pytest.param(
            "train",
            [
                Cell("stage.finalize_grads: all_reduce", "kill", "store"),
                Cell("transfer: receive", "kill", "planner"),
                Cell("file: rename .iter_N.part", "kill", "rank"),
            ],
            id="store, planner, a rank in a save",
        ),
        pytest.param(
            "train",
            [
                Cell("anywhere", "fill", "memory for a while"),
                Cell("anywhere", "corrupt", "plan"),
                Cell("variant_run.gather_bytes: gather", "kill", "launcher"),  # all steps are done and saved
            ],
            id="plans, the store's memory, the launcher",
        ),
        pytest.param(
            "launch",
            [Cell("optimizer.update: all_reduce", "kill", "rank"), Cell("anywhere", "drop", "plan")],
            id="plans, a rank that a launched job replaces",
        ),
    ],
)
def test_a_job_that_meets_faults_ends_as_one_that_does_not(
    jobs: ChaosJobs, command: Command, cells: list[Cell]
) -> None:
    chance = random.Random(0)
    name = "-".join(cell.deed for cell in cells)
    outcome = jobs.run(name, command, [jobs.fault(cell, chance) for cell in cells])
    assert outcome.wrong == (), "\n".join(start.said for start in outcome.starts)
    assert outcome.done[0]  # the others need more than time: plans that lie in the store, a planner that has work
