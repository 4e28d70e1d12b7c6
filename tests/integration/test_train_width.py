"""`dynapipe train --context-parallel`: joined ranks, and steps of several widths, learn what single ranks learn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.timeline import Span
from dynapipe_ext.tools.account.report import RunReport
from tests.support.given_costs import write_costs
from tests.support.pieces import SETTINGS
from tests.support.preloaded import Preloaded
from tests.support.trace_files import read_trace_file

STEPS = 4
REST = f"""
[eval]
every = {STEPS}
steps = 1
fraction = 0.1
[checkpoint]
save_every = 2
"""


PAIRS = """
[run]
steps = 3
[model]
num_layers = 2
num_decoder_layers = 2
hidden_size = 32
num_heads = 4
ffn_hidden_size = 64
max_seq_len = 96
tied_embeddings = false
[data]
vocab_size = 300
num_samples = 40
truncate = true
tokens_per_batch = 0
batch_size = 8
num_workers = 0
[topology]
tp = 1
pp = 2
dp = 2
[plan]
layout = "packed"
[job]
strict = true
timeout_s = 480
"""


def prepared(folder: Path, settings: str) -> Sequence[str]:
    """What every run is given: texts of which every tenth is long, settings, costs."""
    texts = [f"{i} long and short " * (100 if i % 10 == 3 else 1 + i % 6) for i in range(80)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "settings.toml").write_text(settings)
    write_costs(TrainConfig.read(folder / "settings.toml"), 258, folder / "costs.json")
    return "--config", "settings.toml", "--costs", "costs.json"


def learned(run: Path) -> list[tuple[float, float]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(event["loss"], event["grad_norm"]) for event in events if "grad_norm" in event]


def replicas_of_steps(run: Path) -> list[int]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [len(event["num_micro_batches"]) for event in events if "grad_norm" in event]


def test_steps_of_several_widths_learn_what_single_ranks_learn_also_after_a_resume(preloaded: Preloaded, tmp_path):
    """On four strict ranks, with long texts in pieces; the run of several widths goes on from a checkpoint of joined
    ranks, and evaluates."""
    settings = SETTINGS.replace("steps = 2", f"steps = {STEPS}") + REST
    given = prepared(tmp_path, settings)
    preloaded.train(*given, "--run-dir", "one", cwd=tmp_path)
    preloaded.train(*given, "--run-dir", "several", "--context-parallel", "2", "--steps", "2", cwd=tmp_path)
    flags = ["--steps", str(STEPS), "--context-parallel", "auto", "--pieces", "400"]
    preloaded.train("--resume", "several", *flags, cwd=tmp_path)
    one, several = tmp_path / "one", tmp_path / "several"
    assert len(learned(one)) == STEPS
    assert np.allclose(learned(one), learned(several), rtol=1e-5, atol=0)
    assert replicas_of_steps(one) == [2] * STEPS
    assert replicas_of_steps(several)[:2] == [1, 1]
    assert set(replicas_of_steps(several)) == {1, 2}
    reports = [RunReport.read(run / "report.json") for run in (one, several)]
    assert reports[0].result.real_tokens_per_step == reports[1].result.real_tokens_per_step
    check_traces(several)


def test_an_encoder_decoder_learns_on_joined_ranks_what_it_learns_on_single_ones(preloaded: Preloaded, tmp_path):
    """In strict order, with rows of pairs."""
    (tmp_path / "settings.toml").write_text(PAIRS)
    write_costs(TrainConfig.read(tmp_path / "settings.toml"), 300, tmp_path / "costs.json")
    given = ["--config", "settings.toml", "--costs", "costs.json"]
    preloaded.train(*given, "--run-dir", "one", cwd=tmp_path)
    preloaded.train(*given, "--run-dir", "two", "--context-parallel", "2", cwd=tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    assert len(learned(one)) == 3
    assert np.allclose(learned(one), learned(two), rtol=1e-5, atol=0)
    assert replicas_of_steps(one) == [2] * 3
    assert replicas_of_steps(two) == [1] * 3


def check_traces(run: Path) -> None:
    """Every rank has spans, measured and simulated; those of joined ranks have the same actions."""
    record = read_trace_file(run / "trace.json")
    for measured, simulated in zip(record.measured, record.simulated, strict=True):
        labels = [actions_of_ranks(trace.spans) for trace in (measured, simulated)]
        assert labels[0] == labels[1]
        assert len(labels[0]) == 4


def actions_of_ranks(spans: Sequence[Span]) -> dict[int, list[str]]:
    actions: dict[int, list[str]] = {}
    for span in spans:
        actions.setdefault(span.rank, []).append(span.label)
    return {rank: sorted(labels) for rank, labels in actions.items()}


def test_bits_hold_for_one_width_so_deterministic_mode_takes_none_that_steps_choose():
    with pytest.raises(
        ConfigError, match=r"context_parallel auto gives steps several degrees, and bits hold for one: name it"
    ):
        TrainConfig().with_values(
            topology={"tp": 1, "dp": 2, "context_parallel": "auto"}, optimizer={"deterministic": True}
        )
