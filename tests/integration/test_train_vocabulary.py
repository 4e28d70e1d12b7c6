"""`dynapipe train --vocabulary-parallel`: the same losses whatever lies over pipeline ranks, also after Ctrl-C."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.executor.checkpoints.folder import latest, read_manifest
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.given_costs import write_costs
from tests.support.limits import LIMIT_S
from tests.support.preloaded import Preloaded
from tests.support.tiny_sizes import TINY_SIZES

STEPS = 12
SETTINGS = f"""
[run]
steps = {STEPS}
[topology]
tp = 1
pp = 2
dp = 1
[model]
num_layers = 4
tied_embeddings = false
{TINY_SIZES}max_seq_len = 128
[data]
num_samples = 60
tokenizer = "bytes"
truncate = true
tokens_per_batch = 1024
num_workers = 0
[eval]
every = 6
fraction = 0.25
[plan]
layout = "packed"
max_tokens = 512
[job]
timeout_s = 480
strict = true
"""


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    (tmp_path / "settings.toml").write_text(SETTINGS)
    write_costs(TrainConfig.read(tmp_path / "settings.toml"), 258, tmp_path / "costs.json")
    return ["--config", "settings.toml", "--costs", "costs.json"]


def steps_of(run: Path) -> dict[int, Any]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {event["step"]: event for event in events if "grad_norm" in event}


def test_a_run_ended_by_ctrl_c_goes_on_under_other_parts_to_the_losses_of_a_whole_head(
    preloaded: Preloaded, settings: list[str], tmp_path: Path
) -> None:
    """The head in two parts under a V, with split backwards; then head and embedding in four, of which the first part
    of the chain is all padding (258 ids in 384 rows)."""
    preloaded.train(*settings, "--run-dir", "whole", cwd=tmp_path)
    spread = ["--vocabulary-parallel", "head", "--placement", "v", "--split-backward", "--run-dir", "spread"]
    with preloaded.started(
        ["train", *settings, *spread], cwd=tmp_path, environment={"GLOO_SOCKET_IFNAME": "lo"}
    ) as command:
        for line in command.stderr:
            if line.startswith("step 2 "):
                break
        command.send_signal(signal.SIGINT)
        command.communicate(LIMIT_S)
    saved = read_manifest(latest(tmp_path / "spread" / "checkpoints")).run.step
    assert 2 <= saved < STEPS
    preloaded.train(
        "--resume", "spread", "--vocabulary-parallel", "both", "--placement", "linear", "--pp", "4", cwd=tmp_path
    )
    expected, found = steps_of(tmp_path / "whole"), steps_of(tmp_path / "spread")
    assert len(found) == len(expected) == STEPS
    for step, event in expected.items():
        rel = 1e-6 if step <= 2 else 1e-4  # updates add up what sums in other orders differ by
        assert found[step]["loss"] == pytest.approx(event["loss"], rel=rel), step
        assert found[step]["grad_norm"] == pytest.approx(event["grad_norm"], rel=10 * rel), step
    evaluated = [steps[STEPS]["evaluation"]["loss"] for steps in (expected, found)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
