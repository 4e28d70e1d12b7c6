"""`dynapipe train --model DIR --lora` beside a plain loop of peft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dynapipe_ext.errors import DataError
from dynapipe_ext.executor.checkpoints.folder import read_manifest, refuse_other_model
from dynapipe_ext.executor.stages.transformers.parts import parts_of_folder
from dynapipe_ext.executor.stages.transformers.saving import load_adapters, save_parts
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.checkpoint import merge_adapters
from tests.integration.test_fine_tuning import (
    BATCH,
    DECAY,
    LEAST,
    LR,
    SAMPLES,
    STEPS,
    global_batches,
    plain_losses,
    samples_of,
)
from tests.integration.test_train_command import report_of
from tests.integration.test_transformers_command import interrupted, last_tensors, model_folder
from tests.support.given_costs import write_costs
from tests.support.model_folders import VOCABULARY, write_chats
from tests.support.preloaded import Preloaded

peft: Any = pytest.importorskip("peft")
from dynapipe_ext.executor.stages.transformers.adapters import add_adapters  # noqa: E402

AGAIN = ("--output", "wide-adapter", "--overwrite")
RANKS = {
    "alone": (),
    "spread": ("--pp", "2", "--dp", "2", "--placement", "v", "--split-backward"),
    "zero1": ("--deepspeed", "zero1.json", "--pp", "2"),
    "zero3": ("--deepspeed", "zero3.json", "--dp", "2", "--save-every", "5", "--keep-last", "0"),
}


@pytest.fixture(scope="module")
def ran(preloaded_transformers: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run for each of RANKS, and what each has left in NAME-adapter; of a run in 16 bits
    with dropout, `wide`, and what went on from its step 4, `again`."""
    folder = tmp_path_factory.mktemp("lora")
    model_folder("llama", folder / "model")
    write_chats(folder / "data.jsonl", SAMPLES)
    config = TrainConfig().with_values(model={"architecture": str(folder / "model"), "backend": "transformers"})
    config = config.with_values(topology={"tp": 1, "pp": 1, "dp": 1})
    write_costs(config, VOCABULARY, folder / "costs.json")
    given = ["--model", "model", "--data", "data.jsonl", "--costs", "costs.json", "--memory-limit-gb", "1", "--strict"]
    given += ["--batch-size", str(BATCH), "--num-workers", "0", "--lr", str(LR), "--min-lr", str(LEAST), "--lora"]
    long = ["--steps", str(STEPS), "--weight-decay", str(DECAY), "--warmup", "0.3", "--betas", "0.9,0.95"]
    long += ["--lora-r", "4", "--lora-alpha", "16", "--eval-fraction", "0.2", "--eval-every", str(STEPS)]
    for stage in (1, 3):
        file = {"gradient_clipping": "auto", "zero_optimization": {"stage": stage}}
        (folder / f"zero{stage}.json").write_text(json.dumps(file))
    for name, ranks in RANKS.items():
        outputs = ["--run-dir", name, "--output", f"{name}-adapter"]
        said = preloaded_transformers.train(*given, *long, *ranks, *outputs, cwd=folder)
        merge_adapters(folder / f"{name}-adapter", folder / "model", folder / f"{name}-merged")
        assert "lora: 896 weights of adapters train (" in said
        assert "(about 10.8 kB each, " in said  # 12 bytes a weight: of a checkpoint
        assert "rank 4 beside q_proj, v_proj" in said
    wide = ["--lora-target-modules", "all-linear", "--lora-dropout", "0.2", "--dtype", "bf16"]
    wide += ["--steps", "6", "--save-every", "4"]
    preloaded_transformers.train(*given, *wide, "--run-dir", "wide", "--output", "wide-adapter", cwd=folder)
    merge_adapters(folder / "wide-adapter", folder / "model", folder / "wide-merged")
    interrupted(folder / "wide", folder / "again")
    preloaded_transformers.train("--resume", "again", *AGAIN, cwd=folder)
    interrupted(folder / "zero3", folder / "zero3-again")
    preloaded_transformers.train("--resume", "zero3-again", "--output", "zero3-adapter", "--overwrite", cwd=folder)
    return folder


def started(folder: Path, model: Any, place: Path) -> Any:
    """The model with the adapters that a run starts from, as peft loads them to train."""
    parts = parts_of_folder(folder / "model")
    add_adapters(parts, TrainConfig.read(folder / "alone" / "config.toml").lora, seed=0)
    save_parts(parts, place)
    return peft.PeftModel.from_pretrained(model, place, is_trainable=True)


def test_losses_and_the_saved_adapters_are_those_of_a_plain_loop_of_peft_on_any_ranks(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ran)
    train, held_out = samples_of(ran / "alone")
    base = transformers.AutoModelForCausalLM.from_pretrained(ran / "model")
    plain = started(ran, base, tmp_path / "start")
    losses = plain_losses(plain, train, global_batches(len(train)), "cosine")
    assert losses[-1] < losses[0]
    tokens = held_out[0].tokens[None]
    for name in RANKS:
        assert report_of(ran / name)["losses"] == pytest.approx(losses, rel=1e-5)
        model = transformers.AutoModelForCausalLM.from_pretrained(ran / "model")
        loaded = peft.PeftModel.from_pretrained(model, ran / f"{name}-adapter")
        with torch.no_grad():
            torch.testing.assert_close(loaded(tokens).logits, plain(tokens).logits, rtol=1e-3, atol=1e-4)
        whole = transformers.AutoModelForCausalLM.from_pretrained(ran / f"{name}-merged")
        with torch.no_grad():  # in float64, where the weights alone differ
            merged, beside = whole.double()(tokens).logits, loaded.double()(tokens).logits
            torch.testing.assert_close(merged, beside, rtol=0, atol=1e-6)
        assert {"config.json", "tokenizer.json"} <= {file.name for file in (ran / f"{name}-merged").iterdir()}
        files = {file.name for file in (ran / f"{name}-adapter").iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
        assert not {"config.json", "dynapipe.json", "optimizer-0.safetensors"} & files
    told = json.loads((ran / "alone-adapter" / "adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["r"], told["lora_alpha"]) == (str(ran / "model"), 4, 16)
    assert sorted(told["target_modules"]) == ["q_proj", "v_proj"]
    assert transformers.AutoModelForCausalLM.from_pretrained(ran / "alone-adapter").active_adapters() == ["default"]


def test_the_merged_folder_has_the_types_of_the_base_not_of_the_run(ran: Path) -> None:
    assert json.loads((ran / "wide-merged" / "config.json").read_text()) == json.loads(
        (ran / "model" / "config.json").read_text()
    )
    merged, base = (load_file(ran / name / "model.safetensors") for name in ("wide-merged", "model"))
    assert {name: tensor.dtype for name, tensor in merged.items()} == {name: t.dtype for name, t in base.items()}
    assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])


def test_a_resumed_run_is_the_one_that_was_not_interrupted(ran: Path) -> None:
    """In 16 bits, whose masters are in float32, and with dropout, whose random numbers go by step, sample and layer."""
    assert report_of(ran / "again")["losses"] == report_of(ran / "wide")["losses"]
    whole, resumed = last_tensors(ran / "wide"), last_tensors(ran / "again")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    kinds = {name.partition(".")[0] for name in whole}
    assert kinds == {"base_model", "exp_avg", "exp_avg_sq", "master"}
    assert all(".lora_" in name for name in whole)  # the model's own weights are in no checkpoint


def test_a_run_of_adapters_goes_on_beside_its_own_base_alone(
    preloaded_transformers: Preloaded, ran: Path, tmp_path: Path
) -> None:
    """The base has other values in some rows of one matrix; its files are as long as before, and as old."""
    shutil.copytree(ran, tmp_path / "moved")
    base, run = tmp_path / "moved" / "model", tmp_path / "moved" / "again"
    shutil.rmtree(max((run / "checkpoints").glob("iter_*")))
    file = base / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][::3] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    refused = preloaded_transformers.run(["train", "--resume", "again", *AGAIN], cwd=tmp_path / "moved")
    assert refused.returncode == 2
    assert "model has other weight files than when the run of again/checkpoints/" in refused.stderr
    shutil.copyfile(ran / "model" / "model.safetensors", file)  # a copy, of another age
    preloaded_transformers.train("--resume", "again", *AGAIN, cwd=tmp_path / "moved")
    assert report_of(run)["losses"] == report_of(ran / "wide")["losses"]


def test_plans_know_what_layers_store_under_the_adapters(
    preloaded_transformers: Preloaded, ran: Path, tmp_path: Path
) -> None:
    """What all weights store would be half as much again under these; dropout's factors and kept inputs come on top."""
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 8, "num_attention_heads": 4}
    model_folder("llama", tmp_path / "model", **sizes)
    given = ["--model", "model", "--data", str(ran / "data.jsonl"), "--memory-limit-gb", "1", "--num-workers", "0"]
    given += ["--tokens-per-batch", "4096", "--steps", "2", "--lora", "--strict"]
    for name, more in {"few": (), "all": ("--lora-target-modules", "all-linear", "--lora-dropout", "0.1")}.items():
        preloaded_transformers.train(*given, *more, "--run-dir", name, cwd=tmp_path)
        peaks = report_of(tmp_path / name)["peak_bytes"]
        assert 0.85 * peaks["predicted"][0] <= peaks["measured"][0] <= peaks["predicted"][0], name


def test_under_deepspeed_too_and_its_checkpoints_hold_the_adapters_alone(ran: Path) -> None:
    assert report_of(ran / "zero3-again")["losses"] == report_of(ran / "zero3")["losses"]
    tag = ran / "zero3-again" / "checkpoints" / f"iter_{STEPS:07d}"
    model = torch.load(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    assert all(".lora_" in name for name in model["module"])
    assert not model["frozen_param_fragments"]


def test_adapters_start_from_seed_and_name_without_effect_and_read_those_of_another(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ran)
    lora, alone = (TrainConfig.read(ran / name / "config.toml").lora for name in ("wide", "alone"))
    (whole,), (other,) = parts_of_folder(ran / "model"), parts_of_folder(ran / "model")
    add_adapters([whole], lora, seed=3)
    add_adapters([other], lora, seed=4)
    trained = {name: weight for name, weight in whole.model.named_parameters() if weight.requires_grad}
    assert all(".lora_" in name for name in trained)
    assert {bool(weight.any()) for name, weight in trained.items() if ".lora_B." in name} == {False}
    drawn = {name: weight for name, weight in other.model.named_parameters() if ".lora_A." in name}
    assert not any(torch.equal(weight, trained[name]) for name, weight in drawn.items())
    save_parts([whole], tmp_path / "whole")
    load_adapters(tmp_path / "whole", [other])
    assert all(torch.equal(weight, trained[name]) for name, weight in other.model.named_parameters() if name in trained)
    with pytest.raises(DataError, match=r"has no base_model\.model\.model\..*\.lora_A\.weight of shape \[8, "):
        load_adapters(ran / "alone-adapter", [other])
    held = read_manifest(max((ran / "alone" / "checkpoints").glob("iter_*"))).run.model
    with pytest.raises(DataError, match="holds another model: lora "):
        refuse_other_model(held, {**held, "lora": held["lora"] | {"r": 3}}, ran)
    saved = load_file(ran / "alone-adapter" / "adapter_model.safetensors")
    assert 4 * alone.num_weights_a_block == sum(weight.numel() for weight in saved.values())
