"""`dynapipe train --model DIR` of families without a twin in megatron-core, beside a plain loop of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.cli import main
from dynapipe_ext.launch.job import analytic_costs, architecture_of
from dynapipe_ext.models.transformers_sizes import read_trainable
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
    trainings,
)
from tests.integration.test_train_command import report_of
from tests.support.model_folders import VOCABULARY, write_chats, write_model_tokenizer, write_pairs
from tests.support.tiny_models import CONFIGS, tiny_model

RANKS = ("--pp", "2", "--dp", "2", "--placement", "v", "--split-backward")


def model_folder(family: str, folder: Path) -> Path:
    config: Any = CONFIGS[family]()
    config.vocab_size, config.max_position_embeddings = VOCABULARY, 128
    model = tiny_model(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)  # 20 steps then do not drift apart
    model.save_pretrained(folder)
    write_model_tokenizer(folder)
    return folder


def test_losses_and_the_saved_model_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Soft-capped scores, windows in some layers and tied ends, over stages and replicas."""
    model_path, data = model_folder("gemma2", tmp_path / "model"), write_chats(tmp_path / "data.jsonl", SAMPLES)
    named = {"architecture": str(model_path), "backend": "transformers"}
    config = TrainConfig().with_values(model=named, topology={"tp": 1, "pp": 1, "dp": 1})
    costs = analytic_costs(config, architecture_of(config, VOCABULARY), flops_per_s=50e9, overhead_ns=1_000_000)
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(costs)))
    given = ["--model", str(model_path), "--data", str(data), "--output", str(tmp_path / "trained"), *RANKS, "--strict"]
    given += ["--backend", "transformers"]
    given += ["--run-dir", str(tmp_path / "run"), "--costs", str(tmp_path / "costs.json"), "--memory-limit-gb", "1"]
    given += ["--steps", str(STEPS), "--batch-size", str(BATCH), "--num-workers", "0", "--weight-decay", str(DECAY)]
    given += ["--lr", str(LR), "--min-lr", str(LEAST), "--lr-schedule", "cosine", "--warmup", "0.2"]
    given += ["--betas", "0.9,0.95", "--eval-fraction", "0.2", "--eval-every", str(STEPS)]
    assert trainings([given]) == 0

    report, (train, held_out) = report_of(tmp_path / "run"), samples_of(tmp_path / "run")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    assert report["losses"] == pytest.approx(plain_losses(model, train, global_batches(len(train)), "cosine"), rel=1e-5)
    assert report["losses"][-1] < report["losses"][0]
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    with torch.no_grad():
        total = sum(float(loss_sum(saved, sample)) for sample in held_out)
        tokens = held_out[0].tokens[None]
        torch.testing.assert_close(saved(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-4)
    assert report["evaluations"][-1]["loss"] == pytest.approx(total / num_targets(held_out), rel=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "trained").chat_template
    assert (tmp_path / "trained" / "generation_config.json").is_file()


def test_the_backend_follows_from_the_family_unless_it_is_named(tmp_path: Path) -> None:
    for family, computed_by in (("llama", "llama"), ("gemma", "transformers"), ("qwen2", "transformers")):
        CONFIGS[family]().save_pretrained(tmp_path / family)  # this Qwen2 has windows in some layers
        assert read_trainable(str(tmp_path / family), "auto").family == computed_by
    assert read_trainable(str(tmp_path / "llama"), "transformers").family == "transformers"
    with pytest.raises(ConfigError, match="model_type is 'gemma': known are"):
        read_trainable(str(tmp_path / "gemma"), "megatron")
    with pytest.raises(ConfigError, match=r"gpt2 has no config\.json"):
        read_trainable("gpt2", "transformers")


def test_what_runs_of_transformers_do_not_have_is_refused_before_anything_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_folder("gemma2", tmp_path / "model")
    given = ["train", "--model", str(model), "--data", str(write_pairs(tmp_path / "data.jsonl", 3))]
    given += ["--backend", "transformers"]
    assert main([*given, "--tp", "2", "--save-every", "2"]) == 2
    assert "whose runs have no tp, save_every: leave it out" in " ".join(capsys.readouterr().err.split())


def test_a_family_that_nobody_can_cut_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    transformers.GPTNeoXConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model_type is 'gpt_neox': known are llama"):
        read_trainable(str(tmp_path), "auto")
    with pytest.raises(ConfigError, match=r"no layer pattern is known for model_type 'gpt_neox' \(known: gemma"):
        read_trainable(str(tmp_path), "transformers")
