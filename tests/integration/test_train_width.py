"""`dynapipe train --context-parallel` and `--pieces`: joined ranks, steps of several widths and pieces of long samples
learn what single ranks and whole samples do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.timeline import Span
from dynapipe_ext.tools.account.report import RunReport
from tests.support.given_costs import write_costs
from tests.support.preloaded import Preloaded
from tests.support.trace_files import read_trace_file

STEPS = 4
SETTINGS = f"""
[run]
steps = {STEPS}
[topology]
tp = 1
pp = 2
dp = 2
[model]
num_layers = 4
hidden_size = 32
num_heads = 4
num_query_groups = 2
ffn_hidden_size = 64
max_seq_len = 2048
[data]
path = "texts.jsonl"
tokenizer = "bytes"
tokens_per_batch = 4000
num_workers = 0
[plan]
max_tokens = 2048
split_backward = true
[job]
strict = true
timeout_s = 480
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


def micro_batches_of_steps(run: Path) -> list[int]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [sum(event["num_micro_batches"]) for event in events if "grad_norm" in event]


@pytest.fixture(scope="module")
def runs(preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs on four strict ranks, with a long text every tenth among short ones: `one` of whole samples on
    single ranks, `pieces` with long ones in pieces, and `several`, which goes on from joined ranks."""
    folder = tmp_path_factory.mktemp("runs")
    given = prepared(folder, SETTINGS)
    preloaded.train(*given, "--run-dir", "one", cwd=folder)
    preloaded.train(*given, "--run-dir", "pieces", "--pieces", "400", cwd=folder)
    preloaded.train(*given, "--run-dir", "several", "--context-parallel", "2", "--steps", "2", cwd=folder)
    flags = ["--steps", str(STEPS), "--context-parallel", "auto", "--pieces", "400"]
    preloaded.train("--resume", "several", *flags, cwd=folder)
    return folder


def test_a_run_in_pieces_has_the_losses_of_one_with_whole_samples(runs: Path):
    """`dynapipe train --pieces N`: planned, proven and run on four ranks."""
    whole, pieces = runs / "one", runs / "pieces"
    assert len(learned(whole)) == STEPS
    assert np.allclose(learned(whole), learned(pieces), rtol=1e-6, atol=0)
    assert min(micro_batches_of_steps(pieces)) > 2 * min(micro_batches_of_steps(whole))
    check_pieces_in_traces(whole, pieces)


def test_steps_of_several_widths_learn_what_single_ranks_learn_also_after_a_resume(runs: Path):
    """With long texts in pieces; the run of several widths goes on from a checkpoint of joined ranks, and evaluates."""
    one, several = runs / "one", runs / "several"
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


def check_pieces_in_traces(without: Path, with_pieces: Path) -> None:
    """Measured and simulated actions name the same pieces; whole samples have none."""
    whole, cut = (read_trace_file(run / "trace.json") for run in (without, with_pieces))
    assert not any(span.piece for trace in (*whole.measured, *whole.simulated) for span in trace.spans)
    for measured, simulated in zip(cut.measured, cut.simulated, strict=True):
        named = [{(span.rank, span.label): span.piece for span in trace.spans} for trace in (measured, simulated)]
        assert named[0] == named[1]
        pieces = sorted({piece for piece in named[1].values() if piece}, key=lambda piece: (piece.sample, piece.number))
        assert pieces
        for earlier, later in pairwise(pieces):
            assert later.start == (0 if later.number == 1 else earlier.end)


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
    with pytest.raises(ConfigError, match="context_parallel is 'auto' but bits hold for one degree: name it"):
        TrainConfig().with_values(
            topology={"tp": 1, "dp": 2, "context_parallel": "auto"}, optimizer={"deterministic": True}
        )
