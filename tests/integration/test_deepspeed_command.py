"""`dynapipe train --deepspeed ds_config.json` beside a plain loop, resumed and converted: ZeRO 3 over replicas, ZeRO 1
over stages and replicas."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers

from dynapipe_ext.errors import DataError, format_bytes
from dynapipe_ext.executor.checkpoints.deepspeed_checkpoint import load_engine
from dynapipe_ext.executor.checkpoints.folder import checkpoints, read_manifest
from dynapipe_ext.launch.cli import main
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.checkpoint import WriterOptions, convert, prepare_conversion
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
from tests.integration.test_transformers_command import interrupted, model_folder
from tests.support.given_costs import write_costs
from tests.support.model_folders import VOCABULARY, write_chats
from tests.support.preloaded import Preloaded
from tests.support.saved_manifests import edit_manifest

SAVED = 5
CPU = torch.device("cpu")
FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.9, 0.95], "weight_decay": DECAY}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
}
RUNS = {
    "zero3": (FILE, ["--dp", "2"]),
    "zero1": (
        FILE | {"zero_optimization": {"stage": 1}},
        ["--dp", "2", "--pp", "2", "--placement", "v", "--split-backward", "--strict"],
    ),
}


@pytest.fixture(scope="module")
def ran(preloaded_transformers: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with the model; of each of RUNS its steps, NAME-trained, and what went on from step SAVED, NAME-again;
    what each said."""
    folder = tmp_path_factory.mktemp("deepspeed")
    model = model_folder("qwen3", folder / "model")
    write_chats(folder / "data.jsonl", SAMPLES)
    named = {"architecture": str(model), "backend": "transformers"}
    config = TrainConfig().with_values(model=named, topology={"tp": 1, "pp": 1, "dp": 1})
    write_costs(config, VOCABULARY, folder / "costs.json")
    given = ["--model", "model", "--data", "data.jsonl", "--deepspeed", "ds.json"]
    given += ["--costs", "costs.json", "--memory-limit-gb", "1", "--num-workers", "0"]
    given += ["--steps", str(STEPS), "--batch-size", str(BATCH), "--save-every", str(SAVED), "--keep-last", "0"]
    given += ["--lr", str(LR), "--min-lr", str(LEAST), "--lr-schedule", "cosine", "--warmup", "0.3"]
    given += ["--eval-fraction", "0.2", "--eval-every", str(STEPS)]
    said = {}
    for name, (file, ranks) in RUNS.items():
        (folder / "ds.json").write_text(json.dumps(file))
        where = ["--run-dir", name, "--output", f"{name}-trained"]
        said[name] = preloaded_transformers.train(*given, *ranks, *where, cwd=folder)
        interrupted(folder / name, folder / f"{name}-again")
        preloaded_transformers.train(
            "--resume", f"{name}-again", "--output", f"{name}-trained", "--overwrite", cwd=folder
        )
    return folder, said


def test_losses_are_those_of_a_plain_loop_and_the_saved_model_is_the_trained_one(
    ran: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = ran
    monkeypatch.chdir(folder)
    train, held_out = samples_of(folder / "zero3")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    expected = plain_losses(model, train, global_batches(len(train)), "cosine")
    assert expected[-1] < expected[0]
    for name in RUNS:
        report = report_of(folder / name)
        assert report["losses"] == pytest.approx(expected, rel=1e-5)
        assert f"(about {format_bytes(12 * model.num_parameters())} each, " in said[name]
        saved = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name}-trained")
        with torch.no_grad():
            total = sum(float(loss_sum(saved, sample)) for sample in held_out)
        assert report["evaluations"][-1]["loss"] == pytest.approx(total / num_targets(held_out), rel=1e-5)
        assert transformers.AutoTokenizer.from_pretrained(folder / f"{name}-trained").chat_template


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_one_that_was_not_interrupted(ran: tuple[Path, dict[str, str]], name: str) -> None:
    folder, _ = ran
    runs = [folder / name, folder / f"{name}-again"]
    whole, resumed = (report_of(run)["losses"] for run in runs)
    assert resumed == whole
    states = [run / "checkpoints" / f"iter_{STEPS:07d}" for run in runs]
    for file in sorted(states[0].glob("*optim_states.pt")):
        first, second = (torch.load(state / file.name, weights_only=False) for state in states)
        for key in ("fp32_flat_groups", "optimizer_state_dict"):
            torch.testing.assert_close(
                first["optimizer_state_dict"].get(key), second["optimizer_state_dict"].get(key), rtol=0, atol=0
            )


def test_settings_of_the_optimizer_that_a_resumed_run_is_given_hold(
    ran: tuple[Path, dict[str, str]], preloaded_transformers: Preloaded
) -> None:
    folder, _ = ran
    params = FILE["optimizer"]["params"] | {"betas": [0.1, 0.2]}  # type: ignore[index]
    file = RUNS["zero1"][0] | {"optimizer": {"type": "AdamW", "params": params}}
    (folder / "other.json").write_text(json.dumps(file))
    interrupted(folder / "zero1", folder / "zero1-other")
    given = ["--resume", "zero1-other", "--deepspeed", "other.json", "--output", "zero1-other-trained"]
    preloaded_transformers.train(*given, cwd=folder)
    before, after = (report_of(folder / name)["losses"] for name in ("zero1", "zero1-other"))
    assert after[: SAVED + 1] == before[: SAVED + 1]
    assert all(one != other for one, other in zip(after[SAVED + 1 :], before[SAVED + 1 :], strict=True))


def test_another_topology_than_the_one_that_saved_is_refused_with_that_one(ran: tuple[Path, dict[str, str]]) -> None:
    tag = ran[0] / "zero1" / "checkpoints" / f"iter_{STEPS:07d}"
    model = read_manifest(tag).run.model
    engine = SimpleNamespace(mp_world_size=1, dp_world_size=4, zero_optimization_stage=lambda: 1, device=CPU)
    with pytest.raises(DataError, match="over pp 2 x dp 2 but this run has pp 1 x dp 4: resume with --pp 2 --dp 2"):
        load_engine(tag, engine, cast(Any, None), model=model)


class Command:
    """What runs a command as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_a_checkpoint_that_would_run_a_command_is_refused_before_it_is_loaded(
    ran: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    tag = tmp_path / f"iter_{STEPS:07d}"
    shutil.copytree(ran[0] / "zero1" / "checkpoints" / tag.name, tag)
    file = max(tag.glob("*model_states.pt"))
    torch.save(torch.load(file, weights_only=False) | {"more": Command(tmp_path / "made")}, file)
    edit_manifest(tag, files={file.name: file.stat().st_size})
    engine: Any = SimpleNamespace(mp_world_size=2, dp_world_size=2, zero_optimization_stage=lambda: 1, device=CPU)
    with pytest.raises(DataError, match=r"names '(posix|os)\.mkdir', which no checkpoint of DeepSpeed's does"):
        load_engine(tag, engine, cast(Any, None), model=read_manifest(tag).run.model)
    file.write_bytes(pickle.dumps(Command(tmp_path / "made")))  # no archive of torch, which the engine would read, too
    edit_manifest(tag, files={file.name: file.stat().st_size})
    with pytest.raises(DataError, match="cannot be read"):
        load_engine(tag, engine, cast(Any, None), model=read_manifest(tag).run.model)
    assert not (tmp_path / "made").exists()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return found


@pytest.mark.parametrize("name", RUNS)
def test_conversion_reads_its_checkpoints_and_gives_the_trained_model(
    ran: tuple[Path, dict[str, str]], name: str, tmp_path: Path
) -> None:
    folder, _ = ran
    convert(prepare_conversion(folder / name / "checkpoints", tmp_path / "hf", "hf", WriterOptions()))
    converted, saved = weights_of(tmp_path / "hf"), weights_of(folder / f"{name}-trained")
    assert converted.keys() == saved.keys()
    for name, weight in saved.items():
        assert torch.equal(converted[name], weight), name


def test_the_weights_of_the_least_validation_loss_are_kept_and_are_the_output(
    ran: tuple[Path, dict[str, str]], preloaded_transformers: Preloaded, tmp_path: Path
) -> None:
    """With a learning rate that is soon too high, under ZeRO 3, which divides them."""
    folder, _ = ran
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    given = ["--model", str(folder / "model"), "--data", str(folder / "data.jsonl"), "--deepspeed", "ds.json"]
    given += ["--run-dir", "run", "--output", "trained", "--dp", "2", "--num-workers", "0", "--memory-limit-gb", "1"]
    given += ["--costs", str(folder / "costs.json"), "--steps", "6", "--batch-size", str(BATCH)]
    given += ["--lr", "0.1", "--lr-schedule", "constant", "--warmup", "0"]
    given += ["--eval-fraction", "0.2", "--eval-every", "2", "--keep-best", "--keep-last", "1"]
    preloaded_transformers.train(*given, cwd=tmp_path)
    best = min(report_of(tmp_path / "run")["evaluations"], key=lambda evaluation: float(evaluation["loss"]))["step"]
    assert best < 6
    root = tmp_path / "run" / "checkpoints"
    assert [tag.name for tag in checkpoints(root)] == [f"iter_{best:07d}", "iter_0000006"]
    assert (root / "latest").read_text() == "iter_0000006"
    of_tags = []
    for tag in checkpoints(root):
        convert(prepare_conversion(tag, tmp_path / tag.name, "hf", WriterOptions()))
        of_tags.append(weights_of(tmp_path / tag.name))
    trained = weights_of(tmp_path / "trained")
    assert all(torch.equal(weight, trained[name]) for name, weight in of_tags[0].items())
    assert not all(torch.equal(weight, trained[name]) for name, weight in of_tags[1].items())


def test_every_field_that_is_not_the_files_is_named(ran: tuple[Path, dict[str, str]]) -> None:
    _, said = ran
    lines = [line for line in said["zero3"].splitlines() if line.startswith("ds.json: ")]
    assert lines == [
        "ds.json: train_micro_batch_size_per_gpu 4 -> 1 (plans cut batches)",
        "ds.json: gradient_accumulation_steps 8 -> 1 (plans cut batches)",
        f"ds.json: optimizer.params.lr 0.5 -> {LR} (by --lr)",
        "ds.json: optimizer.params.torch_adam None -> True (DeepSpeed's Adam would be compiled first)",
    ]


@pytest.mark.parametrize(
    ("file", "flags", "says"),
    [
        ({"fp16": {"enabled": True}}, [], "fp16 is enabled, which runs here cannot follow: take bf16 or fp32"),
        ({"zero_optimization": {"stage": 4}}, [], "zero_optimization.stage is 4 but must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2}}, ["--pp", "2"], "pp is 2 but ZeRO 2 and 3 train without pp"),
        (
            {"zero_optimization": {"stage": 3}},
            ["--schedule", "gpipe"],
            "schedule is 'gpipe' but ZeRO 2 and 3 reduce in each backward",
        ),
        ({}, ["--compare"], "DeepSpeed has one model in a process: leave --compare out"),
        ({}, ["--backend", "megatron"], "an engine trains models of transformers"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_anything_is_prepared(
    file: dict[str, object],
    flags: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder("qwen3", tmp_path / "model")
    Path("ds.json").write_text(json.dumps(file))
    assert main(["train", "--model", "model", "--data", "none.jsonl", "--deepspeed", "ds.json", *flags]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
