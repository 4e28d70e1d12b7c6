"""Sources that no program wrote are refused in a sentence of ours, whatever they are made into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dynapipe_ext.errors import DynaPipeError
from dynapipe_ext.tools.checkpoint.converter import convert, prepare_conversion
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor
from dynapipe_ext.tools.checkpoint.formats import WriterOptions
from dynapipe_ext.tools.checkpoint.megatron.legacy_optimizer import RankOptimizer, optimizer_tensors
from tests.support.checkpoints import saved, tiny


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny("llama"), tmp_path_factory.mktemp("hostile") / "hf", shard_size="1GB")


def of_integers(source: Path) -> None:
    (file,) = source.rglob("model_optim_rng.pt")
    tree = torch.load(file, weights_only=False)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    tree["model"][name] = tree["model"][name].to(torch.int32)
    torch.save(tree, file)


def of_a_long_number(source: Path) -> None:
    (source / "latest_checkpointed_iteration.txt").write_text("1" * 5000)


def of_a_nul(source: Path) -> None:
    (source / "latest").write_text("a\0b")


def of_shapes_that_are_none(source: Path) -> None:
    (file,) = source.rglob("mp_rank_00_model_states.pt")
    torch.save(torch.load(file) | {"param_shapes": torch.tensor(3)}, file)


@pytest.mark.parametrize(
    ("first", "spoil", "says"),
    [
        ("megatron-legacy", of_integers, r"torch\.int32 (but|cannot be written)"),
        ("megatron", of_a_long_number, "it must be a number or 'release'"),
        ("deepspeed", of_a_nul, "latest names no folder"),
        ("deepspeed", of_shapes_that_are_none, "field 'param_shapes' is .* but must be a list"),
    ],
)
def test_a_spoilt_source_is_refused(
    first: str, spoil: Callable[[Path], None], says: str, published: Path, tmp_path: Path
) -> None:
    convert(prepare_conversion(published, tmp_path / "source", first, WriterOptions()))
    spoil(tmp_path / "source")
    for target in ("hf", "megatron", "megatron-legacy", "deepspeed"):
        with pytest.raises(DynaPipeError, match=says):
            convert(prepare_conversion(tmp_path / "source", tmp_path / target, target, WriterOptions()))


@pytest.mark.parametrize("numbers", [[0, [1]], [0, 0], [0, None]])
def test_an_optimizer_whose_parameters_have_no_numbers_of_their_own_is_not_carried(
    numbers: list[Any], tmp_path: Path
) -> None:
    weights = {name: StoredTensor(tmp_path, torch.float32, (2, 2), 0) for name in ("a.weight", "b.weight")}
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), next(iter(weights.values())))
    groups = [{"wd_mult": 1.0, "params": numbers}]
    rank = RankOptimizer(tmp_path / "rank" / "file.pt", 0, weights, {"state": {0: moments}, "param_groups": groups})
    assert optimizer_tensors([rank])[0] == {}
    assert "does not number its parameters, each once" in optimizer_tensors([rank])[1][0]
