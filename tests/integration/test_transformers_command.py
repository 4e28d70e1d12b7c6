"""`dynapipe train --model DIR` of families without a twin in megatron-core, beside a plain loop of transformers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.cli import main
from dynapipe_ext.models.named_models import read_trainable
from dynapipe_ext.settings.train_config import TrainConfig
from tests.integration.test_fine_tuning import (
    BATCH,
    DECAY,
    LEAST,
    LR,
    SAMPLES,
    STEPS,
    global_batches,
    loss_sum,
    num_targets,
    plain_losses,
    samples_of,
)
from tests.integration.test_train_command import report_of
from tests.support.given_costs import write_costs
from tests.support.model_folders import VOCABULARY, write_chats, write_model_tokenizer, write_pairs
from tests.support.preloaded import Preloaded
from tests.support.tiny_models import CONFIGS, tiny_model

RANKS = ("--pp", "2", "--dp", "2", "--placement", "v", "--split-backward")
SAVED = 5


def model_folder(family: str, folder: Path, **settings: float) -> Path:
    config: Any = CONFIGS[family]()
    config.update(settings)
    config.vocab_size, config.max_position_embeddings = VOCABULARY, 128
    model = tiny_model(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)  # the steps then do not drift apart
    model.save_pretrained(folder)
    write_model_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def ran(preloaded_transformers: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run that left `trained`, and from its step SAVED `again` and, on one rank, `moved`.

    The model has soft-capped scores, windows in some layers and tied ends, over stages and replicas.
    """
    folder = tmp_path_factory.mktemp("transformers")
    model_folder("gemma2", folder / "model")
    write_chats(folder / "data.jsonl", SAMPLES)
    count_costs(folder)
    given = ["--model", "model", "--data", "data.jsonl", "--output", "trained", *RANKS, "--strict"]
    given += ["--backend", "transformers"]
    given += ["--run-dir", "run", "--costs", "costs.json", "--memory-limit-gb", "1"]
    given += ["--steps", str(STEPS), "--batch-size", str(BATCH), "--num-workers", "0", "--weight-decay", str(DECAY)]
    given += ["--lr", str(LR), "--min-lr", str(LEAST), "--lr-schedule", "cosine", "--warmup", "0.3"]
    given += ["--betas", "0.9,0.95", "--eval-fraction", "0.2", "--eval-every", str(STEPS)]
    said = preloaded_transformers.train(*given, "--save-every", str(SAVED), cwd=folder)
    written = [file.stat().st_size for file in (folder / "run").glob(f"checkpoints/*{STEPS}/*.safetensors")]
    told = re.search(r"checkpoints: in run/checkpoints every .* \(about (.*) kB each, ", said)
    assert told
    assert float(told[1]) * 1000 == pytest.approx(sum(written), rel=0.1)
    for name, ranks in (("again", RANKS[:0]), ("moved", ("--pp", "1", "--dp", "1", "--placement", "linear"))):
        interrupted(folder / "run", folder / name)
        preloaded_transformers.train("--resume", name, "--output", f"trained-{name}", *ranks, cwd=folder)
    return folder


def count_costs(folder: Path) -> None:
    """Write costs of the model in a folder beside it."""
    named = {"architecture": str(folder / "model"), "backend": "transformers"}
    config = TrainConfig().with_values(model=named, topology={"tp": 1, "pp": 1, "dp": 1})
    write_costs(config, VOCABULARY, folder / "costs.json")


def interrupted(run: Path, copy: Path) -> None:
    """A run as it was when it had saved its first checkpoint alone."""
    shutil.copytree(run, copy)
    for later in sorted((copy / "checkpoints").glob("iter_*"))[1:]:
        shutil.rmtree(later)


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Weights, masters and moments of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("iter_*"))
    return {name: tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_losses_and_the_saved_model_are_those_of_a_plain_loop(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ran)
    report, (train, held_out) = report_of(ran / "run"), samples_of(ran / "run")
    model = transformers.AutoModelForCausalLM.from_pretrained(ran / "model")
    assert report["losses"] == pytest.approx(plain_losses(model, train, global_batches(len(train)), "cosine"), rel=1e-5)
    assert report["losses"][-1] < report["losses"][0]
    saved = transformers.AutoModelForCausalLM.from_pretrained(ran / "trained")
    with torch.no_grad():
        total = sum(float(loss_sum(saved, sample)) for sample in held_out)
        tokens = held_out[0].tokens[None]
        torch.testing.assert_close(saved(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-4)
    assert report["evaluations"][-1]["loss"] == pytest.approx(total / num_targets(held_out), rel=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(ran / "trained").chat_template
    files = {file.name for file in (ran / "trained").iterdir()}
    assert "generation_config.json" in files
    assert not {"dynapipe.json", "optimizer-0.safetensors"} & files


def test_a_resumed_run_is_the_one_that_was_not_interrupted(ran: Path) -> None:
    assert report_of(ran / "again")["losses"] == report_of(ran / "run")["losses"]
    whole, resumed = last_tensors(ran / "run"), last_tensors(ran / "again")
    assert any(name.startswith("exp_avg_sq.") for name in whole)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_a_run_goes_on_over_other_ranks(ran: Path) -> None:
    whole, moved = report_of(ran / "run")["losses"], report_of(ran / "moved")["losses"]
    assert moved[:SAVED] == whole[:SAVED]
    assert moved[SAVED:] == pytest.approx(whole[SAVED:], rel=1e-5)
    files = {file.name for file in (ran / "moved" / "checkpoints" / f"iter_{STEPS:07d}").iterdir()}
    assert {file for file in files if file.startswith("optimizer")} == {"optimizer-0.safetensors"}


def test_sixteen_bits_and_dropout_go_on_to_the_bit_and_the_best_weights_are_the_output(
    preloaded_transformers: Preloaded, tmp_path: Path
) -> None:
    """Float32 masters, random numbers that go by step and sample, and a learning rate that is soon too high."""
    model_folder("gpt2", tmp_path / "model", resid_pdrop=0.3)
    write_chats(tmp_path / "data.jsonl", SAMPLES)
    count_costs(tmp_path)
    (tmp_path / "dropout.toml").write_text("[model]\ndropout = 0.1\n")
    given = ["--model", "model", "--data", "data.jsonl", "--output", "trained", "--backend", "transformers"]
    given += ["--config", "dropout.toml", "--costs", "costs.json", "--tp", "1"]
    given += ["--run-dir", "run", "--pp", "2", "--num-workers", "0", "--dtype", "bf16", "--memory-limit-gb", "1"]
    given += ["--steps", "6", "--batch-size", str(BATCH), "--lr", "0.1", "--lr-schedule", "constant", "--warmup", "0"]
    given += ["--eval-fraction", "0.2", "--eval-every", "2", "--keep-best", "--save-every", "2", "--keep-last", "0"]
    said = preloaded_transformers.train(*given, cwd=tmp_path)
    assert "dropout: 0.1 as attn_pdrop, embd_pdrop, resid_pdrop of model/config.json" in said
    interrupted(tmp_path / "run", tmp_path / "again")
    preloaded_transformers.train("--resume", "again", "--output", "trained", "--overwrite", cwd=tmp_path)
    assert report_of(tmp_path / "again")["losses"] == report_of(tmp_path / "run")["losses"]
    whole, resumed = last_tensors(tmp_path / "run"), last_tensors(tmp_path / "again")
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16, torch.float32}
    assert any(name.startswith("master.") for name in whole)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    best = min(report_of(tmp_path / "run")["evaluations"], key=lambda evaluation: float(evaluation["loss"]))["step"]
    assert 2 < best < 6
    checkpoint = tmp_path / "run" / "checkpoints" / f"iter_{best:07d}"
    kept, trained = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
        for folder in (checkpoint, tmp_path / "trained")
    )
    assert all(torch.equal(weight, trained[name]) for name, weight in kept.items())


def test_the_backend_follows_from_the_family_unless_it_is_named(tmp_path: Path) -> None:
    for family, computed_by in (("llama", "llama"), ("phi", "transformers"), ("qwen2", "transformers")):
        CONFIGS[family]().save_pretrained(tmp_path / family)  # this Qwen2 has windows in some layers
        assert read_trainable(str(tmp_path / family), "auto").family == computed_by
    assert read_trainable(str(tmp_path / "llama"), "transformers").family == "transformers"
    with pytest.raises(ConfigError, match="model_type is 'phi': known are"):
        read_trainable(str(tmp_path / "phi"), "megatron")
    with pytest.raises(ConfigError, match=r"gpt2 has no config\.json"):
        read_trainable("gpt2", "transformers")


def test_what_runs_of_transformers_do_not_have_is_refused_before_anything_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_folder("gemma2", tmp_path / "model")
    given = ["train", "--model", str(model), "--data", str(write_pairs(tmp_path / "data.jsonl", 3))]
    given += ["--backend", "transformers"]
    assert main([*given, "--tp", "2", "--deterministic"]) == 2
    assert "tp is 2 but transformers computes layers on one rank" in " ".join(capsys.readouterr().err.split())


def test_a_decoder_that_megatron_core_cannot_compute_is_one_of_transformers(tmp_path: Path) -> None:
    transformers.GPTNeoXConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    assert read_trainable(str(tmp_path), "auto").num_layers == 2
    with pytest.raises(ConfigError, match="model_type is 'gpt_neox': known are llama"):
        read_trainable(str(tmp_path), "megatron")
    transformers.BartConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model_type is 'bart': known are llama"):
        read_trainable(str(tmp_path), "auto")


def test_long_samples_run_in_pieces_with_the_losses_of_a_plain_loop(
    preloaded_transformers: Preloaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder("llama", tmp_path / "model")
    write_pairs(tmp_path / "data.jsonl", SAMPLES)
    count_costs(tmp_path)
    given = ["--model", "model", "--data", "data.jsonl", "--backend", "transformers", "--run-dir", "run", "--strict"]
    given += ["--costs", "costs.json"]
    given += ["--pp", "2", "--pieces", "16", "--plan-dir", "plans", "--memory-limit-gb", "1", "--num-workers", "0"]
    given += ["--steps", str(STEPS), "--batch-size", str(BATCH), "--weight-decay", str(DECAY), "--betas", "0.9,0.95"]
    given += ["--lr", str(LR), "--min-lr", str(LEAST), "--lr-schedule", "cosine", "--warmup", "0.3"]
    preloaded_transformers.train(*given, "--eval-fraction", "0.2", "--eval-every", str(STEPS))
    assert any('"carried"' in file.read_text() for file in (tmp_path / "plans").glob("step-*.json"))
    train, _ = samples_of(tmp_path / "run")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    losses = plain_losses(model, train, global_batches(len(train)), "cosine")
    assert report_of(tmp_path / "run")["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("mistral", r"mistral has attention windows \(sliding_window 5\), which do not go on from piece to piece"),
        ("gemma2", "gemma2 has attention windows"),
    ],
)
def test_models_that_do_not_attend_from_piece_to_piece_are_refused(family: str, says: str, tmp_path: Path) -> None:
    CONFIGS[family]().save_pretrained(tmp_path)
    named = {"architecture": str(tmp_path), "backend": "transformers"}
    config = TrainConfig().with_values(model=named)
    with pytest.raises(ConfigError, match=says):
        config.with_values(plan={"pieces": 16})
