"""Jobs to which several things happen end as a clean job does: the same weights, and nothing left behind.

`tests/bench/chaos.py` runs many more of them, over every wait, every process, and every file operation of a save.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.chaos import Cell, ChaosJobs, Command, JobsClosedError, read_faults
from tests.support.faults import Fault
from tests.support.limits import SOON_S
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
                Cell("device.gather_bytes: gather", "kill", "launcher"),  # all steps are done and saved
            ],
            id="plans, the store's memory, the launcher",
        ),
        pytest.param(
            "launch",
            [Cell("optimizer._clip_and_step: all_reduce", "kill", "rank"), Cell("anywhere", "drop", "plan")],
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
    assert outcome.wrong == (), "\n".join(start.stderr for start in outcome.starts)
    assert outcome.evidence is None
    assert outcome.done[0]  # the others need more than time: plans that lie in the store, a planner that has work


def test_of_a_job_that_went_wrong_the_evidence_is_kept_and_its_faults_can_be_done_again(
    jobs: ChaosJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = jobs.clean.losses[0]
    monkeypatch.setattr(jobs, "clean", replace(jobs.clean, losses=(loss + 1, *jobs.clean.losses[1:])))
    monkeypatch.setattr("tests.support.chaos.PAUSE_S", 1e9)  # a launcher that is stopped stays so: the job hangs
    monkeypatch.setattr("tests.support.chaos._MOST_STARTS", 1)
    saved = next(site for site in jobs.sites if site.name == "file: rename .iter_N.part")
    fault = Fault(site=saved.name, rank=saved.rank, count=2, deed="stop", actor="launcher")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(jobs.run, "hangs", "train", [fault])
        while not (jobs.folder / "hangs" / "faults" / "hit-0").exists():
            assert not run.done()
            time.sleep(0.01)
        for limit in ("LIMIT_S", "SOON_S"):
            monkeypatch.setattr(f"tests.support.chaos.{limit}", 0.0)
        outcome = run.result()
    assert outcome.wrong[0] == "it hangs: not ended after 0 s"
    assert outcome.evidence is not None
    assert read_faults(outcome.evidence / "outcome.json") == ("train", (fault,))
    kept = {path.name: path.read_text() for path in outcome.evidence.iterdir()}
    assert re.search(r"^\d+ of \d+ T ", kept["processes-1"], re.MULTILINE)
    assert "step 1 (1/12)" in kept["start-1.log"]
    assert kept["losses"].splitlines()[0] == f"1\t{loss}\t{loss + 1}\tdiffers"
    assert {"iter_0000003.json", "events.jsonl", "files", "hit-0"} <= kept.keys()


def test_jobs_that_are_closed_end_their_runs_at_once(jobs: ChaosJobs) -> None:
    """The last test here: it closes them."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(jobs.run, "given-up", "train", [])
        while not (jobs.folder / "given-up" / "run").exists():
            assert not run.done()
            time.sleep(0.01)
        jobs.close()
        with pytest.raises(JobsClosedError):
            run.result(SOON_S)
