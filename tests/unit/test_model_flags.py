"""What `--model` and the flags beside it make of a run's settings, and where its trained model goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batch.micro_batches import as_length_array, sample_lengths
from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.launch.cli import main
from dynapipe_ext.launch.job import requested
from dynapipe_ext.launch.job.configured import (
    analytic_costs,
    architecture_of,
    check_fits,
    make_planner,
    settled_steps,
    topology_of,
)
from dynapipe_ext.launch.job.model_folder import dropout_line, prediction_line, random_line, warmup_line
from dynapipe_ext.launch.job.requested import refuse_output
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.step_listeners import WandbRun, require_logger
from tests.support.steps import a_step

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, as far as settings look at it."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA))
    for name in ("model.safetensors", "tokenizer.json"):
        (made / name).touch()
    return made


def settings(arguments: Sequence[str | Path]) -> TrainConfig:
    parser = argparse.ArgumentParser()
    requested.add_arguments(parser)
    return requested.config_from(parser.parse_args([*map(str, arguments)]))


def test_a_models_folder_gives_sizes_weights_tokenizer_and_what_fine_tuning_usually_has(folder: Path) -> None:
    config = settings(["--model", folder])
    assert (config.model.architecture, config.model.init_from, config.data.tokenizer) == (str(folder),) * 3
    assert (config.model.hidden_size, config.model.max_seq_len) == (64, 64)
    assert (config.run.epochs, topology_of(config).world_size) == (1.0, 1)
    assert (config.optimizer.lr, config.optimizer.min_lr, config.optimizer.warmup_fraction) == (2e-5, 2e-6, 0.03)
    assert config.plan.memory_limit_gb > 0
    said = settings(["--model", folder, "--tokenizer", "bytes", "--steps", "7", "--tp", "2", "--lr", "1e-3"])
    assert (said.data.tokenizer, said.run.steps, said.run.epochs, said.topology.tp) == ("bytes", 7, 0.0, 2)
    assert (said.optimizer.lr, said.optimizer.min_lr) == (1e-3, pytest.approx(1e-4))  # in the same proportion


def test_random_weights_are_trained_only_if_they_are_asked_for(folder: Path, tmp_path: Path) -> None:
    """Then at the usual rate, and the run says so; a preset has no weights that could be meant instead."""
    assert "RANDOM" in random_line(settings(["--model", folder, "--from-scratch"]))
    assert random_line(settings(["--model", folder])) == ""
    for words in (["--model", folder / "config.json"], ["--architecture", folder]):
        with pytest.raises(ConfigError, match=r"next to weights, which .* trained: give --model .*/model, or"):
            settings(words)
    (folder / "model.safetensors").unlink()
    (tmp_path / "run.toml").write_text("[model]\nfrom_scratch = true\n[optimizer]\nmin_lr = 2e-4\n")
    for words in (["--model", folder], ["--model", folder / "config.json"], ["--architecture", folder]):
        with pytest.raises(ConfigError, match="has a configuration but no weights: give a folder that has both, or"):
            settings(words)
        for asked in (["--from-scratch"], ["--config", tmp_path / "run.toml"]):
            config = settings([*words, *asked])
            assert (config.model.init_from, config.optimizer) == ("", TrainConfig().optimizer)
            assert random_line(config).startswith(f"RANDOM WEIGHTS: those of {words[1]} are drawn by seed 0")
    assert "RANDOM WEIGHTS: those of gpt2" in random_line(settings(["--architecture", "gpt2"]))
    with pytest.raises(ConfigError, match="from_scratch starts from random weights but init_from is"):
        settings(["--architecture", folder, "--init-from", folder, "--from-scratch"])


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["model.safetensors.index.json"], r"lacks b\.safetensors, which model\.safetensors\.index\.json names: copy"),
        (["pytorch_model.bin.index.json", "a.safetensors"], r"lacks b\.safetensors, which pytorch_model\.bin\.index"),
        (["model-00002-of-00003.safetensors"], "has no index and lacks shards 00001, 00003 of 3: copy them too"),
        (["model.safetensors.incomplete"], r"only \(model\.safetensors\.incomplete\): complete the download"),
        ([".cache/huggingface/download/x.incomplete"], r"only \(x\.incomplete\): complete the download"),
        (["../../blobs/x.incomplete"], r"only \(x\.incomplete\): complete the download"),
        (["model.fp16.safetensors"], r"only \(model\.fp16\.safetensors\): complete the download"),
    ],
)
def test_a_folder_with_a_part_of_its_weights_is_refused(names: list[str], says: str, folder: Path) -> None:
    """Also from scratch: whoever wants random weights has the configuration in a folder of its own."""
    (folder / "model.safetensors").unlink()
    part = folder.parent / "models--x" / "snapshots" / "1"
    part.parent.mkdir(parents=True)
    folder.rename(part)
    for name in names:
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_text(json.dumps({"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}}))
    if "a.safetensors" not in names and names[0].endswith("index.json"):
        (part / "a.safetensors").touch()
    for words in (["--model", part], ["--model", part / "config.json"], ["--architecture", part]):
        for asked in ([], ["--from-scratch"]):
            with pytest.raises(DataError, match=says):
                settings([*words, *asked])


def test_a_run_says_what_it_leaves_out_of_a_models_config(folder: Path) -> None:
    """What transformers would take of the file, or without a word in it, whichever computes the model."""
    data = folder / "data.jsonl"
    config = settings(["--model", folder, "--data", data])
    assert dropout_line(config) == ""
    (folder / "config.json").write_text(json.dumps(LLAMA | {"attention_dropout": 0.2}))
    assert dropout_line(config) == (
        f"dropout: none, though {folder}/config.json has attention_dropout 0.2: [model] dropout of a --config sets one"
        " rate for all"
    )
    assert dropout_line(config.with_values(model={"dropout": 0.1})) == ""
    assert dropout_line(config.with_values(model={"backend": "transformers"})) == dropout_line(config)
    (folder / "config.json").write_text('{"model_type": "gpt2", "embd_pdrop": 0.0}')
    assert prediction_line(str(folder)) == prediction_line("llama-2-7b") == ""
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_nextn_predict_layers": 1}))
    said = f"multi-token prediction: left out, though {folder}/config.json has num_nextn_predict_layers 1"
    assert prediction_line(str(folder)) == said
    (folder / "config.json").write_text('{"model_type": "gpt2", "embd_pdrop": 0.0}')
    assert "has attn_pdrop 0.1, resid_pdrop 0.1: " in dropout_line(settings(["--model", folder, "--data", data]))


def test_a_file_of_settings_is_not_overridden_by_what_is_usual(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nsteps = 3\n[optimizer]\nlr = 1e-4\nmin_lr = 0.0\n")
    config = settings(["--config", tmp_path / "run.toml", "--model", folder])
    assert (config.run.steps, config.run.epochs, config.topology.tp) == (3, 0.0, 2)
    assert (config.optimizer.lr, config.model.init_from) == (1e-4, str(folder))


def test_a_file_that_names_no_rates_leaves_those_of_fine_tuning(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nseed = 1\n")
    o = settings(["--config", file, "--model", folder]).optimizer
    assert (o.lr, o.min_lr, o.warmup_fraction) == (2e-5, 2e-6, 0.03)
    assert settings(["--config", file, "--model", folder, "--lora"]).optimizer.lr == 2e-4
    file.write_text("[optimizer]\nwarmup_steps = 9\n")
    o = settings(["--config", file, "--model", folder]).optimizer
    assert (o.lr, o.warmup_steps, o.warmup_fraction) == (2e-5, 9, TrainConfig().optimizer.warmup_fraction)


def test_a_lowest_rate_alone_leaves_the_rate_of_fine_tuning(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[optimizer]\nmin_lr = 0.0\n")
    o = settings(["--config", file, "--model", folder]).optimizer
    assert (o.lr, o.min_lr, o.warmup_fraction) == (2e-5, 0.0, 0.03)
    file.write_text("[optimizer]\nmin_lr = 1e-3\n")
    with pytest.raises(ConfigError, match=r"min_lr is 0\.001 but must be at most lr, which is 2e-05"):
        settings(["--config", file, "--model", folder])


def test_a_file_keeps_the_length_of_rows_that_it_names(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nmax_seq_len = 32\n")
    for words in (["--model", folder], ["--architecture", folder, "--from-scratch"]):
        assert settings(["--config", file, *words]).model.max_seq_len == 32
    assert settings(["--config", file, "--model", folder, "--truncate", "16"]).model.max_seq_len == 16


def test_a_deepspeed_configuration_replaces_nothing_that_a_file_names(folder: Path, tmp_path: Path) -> None:
    file, engine = tmp_path / "run.toml", tmp_path / "ds.json"
    file.write_text('[optimizer]\nclip_grad = 0.5\nlr = 5e-5\nmin_lr = 0.0\n[model]\ndtype = "bfloat16"\n')
    engine.write_text('{"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}')
    config = settings(["--config", file, "--model", folder, "--deepspeed", engine])
    assert (config.optimizer.clip_grad, config.optimizer.lr, config.model.dtype) == (0.5, 5e-5, "bfloat16")
    config = settings(["--model", folder, "--deepspeed", engine])
    assert (config.optimizer.clip_grad, config.optimizer.lr, config.model.dtype) == (0.0, 1e-4, "float32")


def test_weights_beside_a_tokenizer_of_the_runs_own_texts_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    config = settings(["--architecture", folder, "--init-from", folder, "--data", tmp_path / "texts.jsonl"])
    with pytest.raises(ConfigError, match="know the ids of their own tokenizer, but tokenizer is 'bpe'"):
        requested.refuse_other_ids(config)
    requested.refuse_other_ids(config.with_values(data={"tokenizer": str(folder)}))


def test_what_has_nothing_to_act_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="--backend transformers computes a model of --model or --architecture"):
        requested.refuse_settings(settings(["--backend", "transformers"]), compare=False)


def test_a_warm_up_that_the_run_does_not_outlast_is_said() -> None:
    assert warmup_line(settings(["--steps", "2", "--warmup", "100"])).startswith(
        "note: the warm-up takes 100 steps of 2"
    )
    assert warmup_line(settings(["--steps", "9"])) == warmup_line(settings(["--steps", "9", "--warmup", "0.5"])) == ""


def test_what_model_cannot_mean_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model .* says what --init-from would: leave one of them out"):
        settings(["--model", folder, "--init-from", folder])
    (folder / "run.toml").write_text('[model]\ninit_from = "other"\n')
    with pytest.raises(ConfigError, match=r"says what \[model\] init_from other of .*run\.toml would"):
        settings(["--model", folder, "--config", folder / "run.toml"])
    with pytest.raises(ConfigError, match=r"nowhere has no config\.json: give a model's folder"):
        settings(["--model", "nowhere"])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="has no tokenizer: name the one it was trained with by --tokenizer"):
        settings(["--model", folder])


def test_flags_of_the_optimizer_say_what_their_settings_do() -> None:
    flags = ["--warmup", "0.1", "--betas", "0.9,0.95", "--lr-schedule", "wsd", "--weight-decay", "0"]
    config = settings([*flags, "--dtype", "bf16", "--min-lr", "1e-5"])
    o = config.optimizer
    assert (o.warmup_fraction, o.betas, o.lr_schedule, o.weight_decay) == (0.1, (0.9, 0.95), "wsd", 0.0)
    assert (o.min_lr, config.model.dtype) == (1e-5, "bfloat16")
    assert settings(["--warmup", "12"]).optimizer.warmup_steps == 12
    assert TrainConfig.from_json(config.to_json()) == config
    for flags, said in (
        (["--warmup", "1.5"], "--warmup is 1.5, neither a number of steps nor a part"),
        (["--betas", "0.9"], r"betas is \(0.9,\) but must be two numbers"),
        (["--epochs", "-1"], "epochs is -1.0 but must be at least 0"),
        (["--fields", "q", "a", "b"], "name prompt and response, or only a text"),
    ):
        with pytest.raises(ConfigError, match=said):
            settings(flags)


@pytest.mark.parametrize("epochs", [1.0, 2.5, 3.0])
def test_epochs_are_as_many_steps_as_their_global_batches(epochs: float) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 50)
    config = settings(["--epochs", str(epochs), "--tokens-per-batch", "100", "--seed", "3"])
    counts = [len(GlobalBatches(lengths, tokens_per_batch=100, seed=3, epoch=epoch)) for epoch in range(3)]
    settled = settled_steps(config, as_length_array(lengths))
    whole = int(epochs)
    assert settled.run.steps == sum(counts[:whole]) + (round(0.5 * counts[whole]) if epochs % 1 else 0)
    assert settled.run.epochs == 0
    assert settled_steps(settled, as_length_array(lengths)) == settled


def test_what_does_not_fit_is_told_with_the_ranks_that_it_fits_on(folder: Path) -> None:
    config = settings(["--model", folder, "--memory-limit-gb", "1"])
    costs = analytic_costs(config, architecture_of(config, 131), flops_per_s=1e9, overhead_ns=0)
    lengths = as_length_array([9, 60, 30])
    check_fits(config, costs, lengths)
    small = config.with_values(plan={"memory_limit_gb": 0.0015})
    with pytest.raises(PlanError, match=r"sample 1 with 60 tokens needs .* take tp \d x pp \d, where it") as told:
        check_fits(small, costs, lengths)
    words = str(told.value).split()
    tp, pp = (int(words[words.index(name) + 1].strip(",")) for name in ("tp", "pp"))
    advised = small.with_values(topology={"tp": tp, "pp": pp})
    check_fits(advised, replace(costs, topology=topology_of(advised)), lengths)
    nothing = config.with_values(plan={"memory_limit_gb": 1e-5})
    with pytest.raises(PlanError, match="raise it, raise tp or pp, or lower max_seq_len"):
        check_fits(nothing, costs, lengths)


def test_what_does_not_fit_whole_may_fit_in_pieces(folder: Path) -> None:
    config = settings(["--model", folder, "--memory-limit-gb", "1", "--pieces", "32", "--pp", "2"])
    config = config.with_values(plan={"recompute": "full"})
    costs = analytic_costs(config, architecture_of(config, 131), flops_per_s=1e9, overhead_ns=0)
    lengths = as_length_array([9, 4000, 30])
    assert make_planner(config, costs).pieces == 32
    check_fits(config, costs, lengths)
    least_gb = make_planner(config, costs).plan(sample_lengths([9, 4000, 30])).peak_bytes / 1e9
    tight = config.with_values(plan={"memory_limit_gb": least_gb})
    check_fits(tight, costs, lengths)
    with pytest.raises(PlanError, match="even alone"):
        check_fits(tight.with_values(plan={"pieces": "off"}), costs, lengths)
    with pytest.raises(PlanError, match=r"pieces of one sample need .* raise tp or pp|micro-batch \d+ alone"):
        check_fits(tight.with_values(plan={"memory_limit_gb": least_gb / 2}), costs, lengths)


def test_a_place_that_the_model_cannot_go_to_is_refused_before_the_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    data, run_dir = tmp_path / "texts" / "data.jsonl", tmp_path / "runs" / "mine"
    data.touch()
    config = settings(["--model", folder, "--data", f"{data}=1"])

    def output(place: Path | str, *, overwrite: bool = False) -> None:
        refuse_output(config.with_values(checkpoint={"output": str(place)}), str(run_dir), overwrite=overwrite)

    output(tmp_path / "new")
    (tmp_path / "full").mkdir()
    output(tmp_path / "full")
    (tmp_path / "full" / "notes").touch()
    with pytest.raises(ConfigError, match="full holds something: choose another folder, or lose that by --overwrite"):
        output(tmp_path / "full")
    output(tmp_path / "full", overwrite=True)
    for place in (folder, tmp_path):
        with pytest.raises(ConfigError, match="model, which the run reads: choose another folder"):
            output(place, overwrite=True)
    with pytest.raises(ConfigError, match=r"data\.jsonl, which the run reads: choose another folder"):
        output(tmp_path / "texts", overwrite=True)
    for place in (run_dir, run_dir.parent, run_dir / "checkpoints" / "trained"):
        with pytest.raises(ConfigError, match="is where the run writes what is its own: choose a folder beside"):
            output(place, overwrite=True)
    output(run_dir / "trained")
    with pytest.raises(ConfigError, match="notes is a file"):
        output(tmp_path / "full" / "notes", overwrite=True)
    with pytest.raises(ConfigError, match="is for published models, but the model is in sizes of its own"):
        refuse_output(TrainConfig().with_values(checkpoint={"output": "new"}), "", overwrite=False)


def test_steps_go_to_weights_and_biases_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="wandb is not installed: pip install wandb"):
        require_logger("wandb")
    (tmp_path / "wandb.py").write_text(
        "told = []\n"
        "class Run:\n"
        "    def log(self, values, step): told.append((step, values['train/loss']))\n"
        "    def finish(self): told.append('finished')\n"
        "def init(**given):\n"
        "    told.append(given)\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run = WandbRun(tmp_path, {"a": 1})
    step: Any = a_step(4)
    run.step_done(step)
    run.close()
    told = sys.modules["wandb"].told
    assert told == [{"dir": str(tmp_path), "config": {"a": 1}}, (5, step.loss), "finished"]
    monkeypatch.delitem(sys.modules, "wandb")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--model", "DIR"],
        ["train", "--architecture", "DIR", "--tokenizer", "bytes"],
        ["estimate", "--model", "DIR"],
        ["convert", "DIR", "new", "--to", "megatron"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_folder_of_adapters_is_called_what_it_is(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether peft has written it alone, or beside a config.json and a tokenizer."""
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "my/base", "peft_type": "LORA"}')
    for _ in range(2):
        assert main([str(folder) if word == "DIR" else word for word in words]) == 2
        said = capsys.readouterr().err
        assert f"{folder} holds adapters of peft beside my/base, not a model: merge them into it" in said
        assert f"(dynapipe convert {folder} --merge my/base --output MERGED) and give MERGED" in said
        (folder / "config.json").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (tmp_path / "new").stat()


def test_a_model_with_adapters_beside_its_weights_is_a_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert settings(["--model", folder]).model.init_from == str(folder)
