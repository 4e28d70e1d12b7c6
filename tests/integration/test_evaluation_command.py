"""`dynapipe train` with evaluation: the validation loss of any topology, in runs whose training it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynapipe_ext.executor.checkpoints.folder import checkpoints, read_manifest
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.account.report import RunReport
from dynapipe_ext.tools.account.run_events import read_events
from tests.support.given_costs import write_costs
from tests.support.preloaded import Preloaded
from tests.support.tiny_sizes import TINY_SIZES

SETTINGS = f"""
[run]
steps = 5
[topology]
tp = 2
pp = 2
dp = 1
[model]
num_layers = 2
{TINY_SIZES}max_seq_len = 256
[data]
num_samples = 60
tokenizer = "bpe"
vocab_size = 300
truncate = true
tokens_per_batch = 1024
[checkpoint]
save_every = 1
keep_last = 1
keep_best = true
[job]
timeout_s = 480
strict = true
"""


def with_costs(folder: Path) -> list[str]:
    """The flags of a run by the settings in a folder, and costs."""
    write_costs(TrainConfig.read(folder / "settings.toml"), 300, folder / "costs.json")
    return ["--config", "settings.toml", "--costs", "costs.json"]


def test_validation_losses_are_those_of_one_process_and_training_keeps_its_bits(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text(SETTINGS)
    held_out = tmp_path / "held.jsonl"
    pairs = [{"input": f"reverse {'ab' * (1 + i % 9)}", "target": f"{'ba' * (1 + i % 9)}"} for i in range(40)]
    held_out.write_text("\n".join(map(json.dumps, pairs)) + "\n")
    settings, evaluated = with_costs(tmp_path), ["--eval-every", "2", "--eval-data", "held.jsonl"]
    said = preloaded.train(*settings, "--run-dir", "runs/four", *evaluated, cwd=tmp_path)
    in_line = ["--num-workers", "0"]
    preloaded.train(*settings, *in_line, "--run-dir", "runs/plain", cwd=tmp_path)
    alone = [*in_line, "--tp", "1", "--pp", "1", "--layout", "padded"]
    preloaded.train(*settings, "--run-dir", "runs/one", *alone, *evaluated, cwd=tmp_path)

    four, plain, one = (RunReport.read(tmp_path / "runs" / name / "report.json") for name in ("four", "plain", "one"))
    assert four.result.losses == plain.result.losses
    assert [done.number for done in four.result.evaluations] == [2, 4, 5]
    assert {(done.num_samples, done.real_tokens) for done in four.result.evaluations} == {
        (40, four.result.evaluations[0].real_tokens)
    }
    assert [done.loss for done in four.result.evaluations] == pytest.approx(
        [done.loss for done in one.result.evaluations], rel=1e-5
    )
    assert len({done.loss for done in four.result.evaluations}) == 3
    assert plain.result.evaluations == ()
    ((_, steps),) = read_events(tmp_path / "runs" / "four" / "events.jsonl").variants
    assert tuple(done.evaluation for done in steps if done.evaluation) == four.result.evaluations
    assert f"after step 5: validation loss {four.result.evaluations[2].loss:.4f} over 40 samples" in said

    losses = {done.number: done.loss for done in four.result.evaluations}
    kept = [read_manifest(folder).run for folder in checkpoints(tmp_path / "runs" / "four" / "checkpoints")]
    assert {run.step: run.validation_loss for run in kept} == {
        step: losses[step] for step in (min(losses, key=losses.__getitem__), 5)
    }


def test_a_run_with_a_part_held_out_goes_on_with_the_same_part_and_refuses_another(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text(SETTINGS.replace("tp = 2", "tp = 1").replace("dp = 1", "dp = 2"))
    flags = ["--run-dir", "runs/part", "--eval-every", "3", "--eval-steps", "1", "--eval-fraction", "0.25"]
    preloaded.train(*with_costs(tmp_path), *flags, "--num-workers", "0", cwd=tmp_path)
    anew = "so the best counts anew from here"
    assert anew not in preloaded.train("--resume", "runs/part", "--steps", "6", cwd=tmp_path)
    result = RunReport.read(tmp_path / "runs" / "part" / "report.json").result
    assert [done.number for done in result.evaluations] == [3, 5, 6]
    assert len({done.num_samples for done in result.evaluations}) == 1
    kept = [tmp_path / "runs" / "part" / name for name in ("config.toml", "events.jsonl", "report.json")]
    before = [file.read_bytes() for file in kept]
    other = ["train", "--resume", "runs/part", "--steps", "8", "--eval-fraction", "0.5"]
    refused = preloaded.run(other, cwd=tmp_path)
    assert refused.returncode == 2
    assert "resume with the same data and settings" in " ".join(refused.stderr.split())
    assert [file.read_bytes() for file in kept] == before
    assert anew in preloaded.train("--resume", "runs/part", "--steps", "7", "--eval-steps", "2", cwd=tmp_path)
    left = checkpoints(tmp_path / "runs" / "part" / "checkpoints")
    assert [read_manifest(folder).run.step for folder in left] == [7]  # the best of its kind, and the last
