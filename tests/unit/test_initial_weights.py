"""Checkpoints that a run cannot start from are refused by name before any rank is forked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch.job.model_folder import open_initial_weights
from dynapipe_ext.models.named_models import read_model
from tests.support.checkpoints import saved, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny("llama"), tmp_path_factory.mktemp("model"), shard_size="1GB")


def test_the_checkpoint_of_the_runs_own_model_is_opened_whatever_its_precision(folder: Path) -> None:
    architecture, _ = read_model(str(folder))
    assert open_initial_weights(str(folder), replace(architecture, dtype="bfloat16")).architecture == architecture


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(folder: Path, tmp_path: Path) -> None:
    architecture, _ = read_model(str(folder))
    other = replace(architecture, rope_theta=5e5, max_seq_len=32)
    with pytest.raises(ConfigError, match=r"another model .* it has max_seq_len 64, not 32; rope_theta 10000\.0, not"):
        open_initial_weights(str(folder), other)
    with pytest.raises(ConfigError, match=r"sizes of its own: name the checkpoint's model by \[model\]"):
        open_initial_weights(str(folder), None)
    with pytest.raises(DataError, match="holds no checkpoint that is known"):
        open_initial_weights(str(tmp_path), architecture)


def test_tensors_that_are_missing_extra_or_misshapen_are_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:5].contiguous()
    save_file({**tensors, "model.second_norm.weight": norm}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    with pytest.raises(DataError) as caught:
        open_initial_weights(str(tmp_path), read_model(str(folder))[0])
    for name in ("model.norm.weight", "model.second_norm.weight", "model.layers.1.mlp.up_proj.weight"):
        assert name in str(caught.value)
