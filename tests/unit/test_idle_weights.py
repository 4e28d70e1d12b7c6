"""Weights that no text runs through (a tower of images): kept as they are, counted in bytes, and said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.interchange import cost_model_from_json, cost_model_to_json
from dynapipe_ext.executor.stages.transformers.parts import parts_of_folder
from dynapipe_ext.executor.stages.transformers.saving import save_parts
from dynapipe_ext.launch.job.configured import analytic_costs, architecture_of, topology_of, trained_costs
from dynapipe_ext.launch.job.model_folder import idle_line, settled_cut
from dynapipe_ext.models.module_tree import causal_class
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support.checkpoints import differences, tensors_in
from tests.unit.test_cut_proof import FAMILIES

TOWERS = ("vision", "projector")
ONE = [MicroBatch((SampleLength(0, 16),))]


@pytest.fixture(scope="module", params=("float32", "bfloat16"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = FAMILIES["gemma3"]()
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / str(request.param)
    causal_class(config)(config).to(getattr(torch, request.param)).save_pretrained(path)
    return path


def settings(folder: Path, **tables: dict[str, Any]) -> TrainConfig:
    model = {"architecture": str(folder), "init_from": str(folder), "backend": "transformers", "max_seq_len": 64}
    base = TrainConfig().with_values(
        model=model | tables.pop("model", {}), topology={"tp": 1, "pp": 2, "dp": 1}, **tables
    )
    return settled_cut(base, layout_is_named=False)


def is_of_tower(name: str) -> bool:
    return any(tower in name for tower in TOWERS)


def test_a_run_of_16_bits_keeps_the_bits_and_the_width_of_a_tower(folder: Path, tmp_path: Path) -> None:
    parts = [part for rank in range(2) for part in parts_of_folder(folder, Topology(pp=2), rank, dtype=torch.bfloat16)]
    held = {name: value.dtype for name, value in parts[0].model.named_parameters()}
    assert {str(dtype) for name, dtype in held.items() if is_of_tower(name)} == {f"torch.{folder.name}"}
    assert {dtype for name, dtype in held.items() if not is_of_tower(name)} == {torch.bfloat16}
    save_parts(parts, tmp_path / "saved")
    before, after = tensors_in(folder), tensors_in(tmp_path / "saved")
    assert any(is_of_tower(name) for name in before)
    assert not [name for name in differences(before, after) if is_of_tower(name)]
    assert {name: after[name].dtype for name in after if is_of_tower(name)} == {
        name: before[name].dtype for name in before if is_of_tower(name)
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapts", [False, True])
def test_costs_hold_the_bytes_of_a_tower_on_the_first_stage(folder: Path, dtype: str, adapts: bool) -> None:
    lora = {"lora": {"enabled": True, "target_modules": ["q_proj"]}} if adapts else {}
    config = settings(folder, model={"dtype": dtype}, **lora)
    cut, topology = config.model.cut, topology_of(config)
    assert cut is not None
    held, _ = (parts_of_folder(folder, topology, rank, dtype=getattr(torch, dtype)) for rank in range(2))
    tower = [p for name, p in held[0].model.named_parameters() if is_of_tower(name)]
    assert cut.num_idle_weights == sum(p.numel() for p in tower)
    base = analytic_costs(config, architecture_of(config, 61), flops_per_s=1e9, overhead_ns=0)
    headless = replace(config, model=replace(config.model, cut=replace(cut, num_idle_weights=0)))
    without, counted = (trained_costs(one, base, topology) for one in (headless, config))
    before, after = without.evaluate(ONE), counted.evaluate(ONE)
    assert (after.static_bytes - before.static_bytes).tolist() == [sum(p.nbytes for p in tower), 0]
    for name in ("forward_ns", "backward_ns", "weight_ns", "stored_bytes", "working_bytes"):
        assert (getattr(after, name) == getattr(before, name)).all(), name
    assert cost_model_from_json(cost_model_to_json(counted)) == counted
    assert f"{cut.num_idle_weights:,} weights of model.vision_tower" in idle_line(config)
    assert idle_line(headless) == ""


def test_an_engine_that_rounds_a_tower_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    config = settings(folder, model={"dtype": "bfloat16"}, deepspeed={"config": str(tmp_path / "ds.json")})
    rounds = idle_line(config).startswith("note: the engine rounds")
    assert rounds == (folder.name == "float32")
