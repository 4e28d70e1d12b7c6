"""A run whose store and planners are killed under it trains on, and learns what a quiet run learns, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.launch.job import analytic_costs, architecture_of
from tests.support.preloaded import Command, Preloaded

pytestmark = pytest.mark.timeout(150)
BYTES_VOCABULARY = 258
TINY = """
[run]
steps = 40
[topology]
tp = 1
pp = 2
dp = 1
[model]
num_layers = 2
hidden_size = 32
num_heads = 2
num_query_groups = 2
ffn_hidden_size = 64
max_seq_len = 128
[data]
num_samples = 80
tokenizer = "bytes"
truncate = true
tokens_per_batch = 1024
num_workers = 0
[job]
timeout_s = 60
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    config = TrainConfig.read(tmp_path / "tiny.toml")
    costs = analytic_costs(config, architecture_of(config, BYTES_VOCABULARY), flops_per_s=50e9, overhead_ns=1_000_000)
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(costs)))
    (tmp_path / "tiny.toml").write_text(f'{TINY}[plan]\ncosts = "{tmp_path / "costs.json"}"\n')
    return tmp_path / "tiny.toml"


def losses(run_dir: Path) -> list[float]:
    found: list[float] = json.loads((run_dir / "report.json").read_text())["losses"]
    return found


def kill_one(command: Command, word: str, at_step: int, events: Path) -> None:
    """Kill a process of the run that has the word in its command line, once so many lines are written."""
    until(lambda: events.exists() and events.read_text().count("\n") > at_step)
    of_run = psutil.Process(command.pid).children(recursive=True)
    (first, *_) = [process for process in of_run if any(word in part for part in process.cmdline())]
    os.kill(first.pid, signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_a_run_outlives_its_server_and_its_planners(preloaded: Preloaded, tiny: Path, tmp_path: Path) -> None:
    """The server twice, as it falls on both a full and an empty store; a planner in between."""
    preloaded.train("--config", str(tiny), "--run-dir", str(tmp_path / "quiet"))
    run_dir = tmp_path / "disturbed"
    words = ["train", "--config", str(tiny), "--run-dir", str(run_dir), "--num-workers", "2"]
    with preloaded.started(words, environment={"GLOO_SOCKET_IFNAME": "lo"}) as command:
        for at_step, word in ((2, "-server"), (10, "planner_process"), (20, "-server")):
            kill_one(command, word, at_step, run_dir / "events.jsonl")
        _, said = command.communicate(100)
    assert command.returncode == 0, said
    assert said.count("the store's server was killed by signal 9: started again") == 2
    assert "planner process" in said
    assert "Traceback" not in said
    assert losses(run_dir) == losses(tmp_path / "quiet")
