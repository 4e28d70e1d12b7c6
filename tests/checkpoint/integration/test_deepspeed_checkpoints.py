"""Checkpoints of real DeepSpeed engines on two ranks, read tensor by tensor; and ours, loaded by such engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

import torch
import transformers

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint.converter import convert, prepare_conversion
from dynapipe_ext.tools.checkpoint.deepspeed.reader import DeepSpeedReader, open_checkpoint
from dynapipe_ext.tools.checkpoint.formats import StateKind, WriterOptions
from dynapipe_ext.tools.checkpoint.recognition import is_deepspeed
from tests.support.checkpoints import VARIANTS, differences, saved, tensors_in, tiny, tiny_variant, two_layers
from tests.support.deepspeed_ranks import (
    FROZEN,
    PARTITIONED,
    RUNS,
    SMALL,
    Loaded,
    Run,
    batch,
    experts,
    fp32_by_deepspeed,
    load_runs,
    quiet,
    save_pipelines,
    save_runs,
    tied,
    universal_by_deepspeed,
    untied,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the engines of RUNS saved."""
    folder = tmp_path_factory.mktemp("runs")
    save_runs(RUNS, folder)
    return folder


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pipeline engines of two stages saved."""
    folder = tmp_path_factory.mktemp("pipelines")
    save_pipelines(
        {"tied": Run(tied, 1), "untied-bf16": Run(llama_untied, 1, bf16=True), "plain": Run(tied, 0)}, folder
    )
    return folder


def llama_untied() -> Any:
    return tiny("llama", **SMALL)


def truth(folder: Path) -> dict[str, Any]:
    """What the live engine said when it saved."""
    found: dict[str, Any] = torch.load(folder / "truth-0.pt")
    return found


def read_all(reader: DeepSpeedReader, kind: StateKind) -> dict[str, torch.Tensor]:
    """Every tensor by its name on the Hub."""
    reader.check()
    found: dict[str, torch.Tensor] = {}
    for group in tensor_groups(reader.architecture):
        tensors = reader.read(group, kind)
        assert [tuple(tensor.shape) for tensor in tensors.values()] == [info.shape for info in group.tensors]
        assert {tensor.dtype for tensor in tensors.values()} == {reader.dtype(group, kind)}
        found |= tensors
    return found


def on_hub(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a module by their names on the Hub: experts apart, as transformers itself saves them."""
    found = {}
    for name, tensor in tensors.items():
        layer, is_expert, which = name.partition(".mlp.experts.")
        if is_expert:
            for i, expert in enumerate(tensor):
                names, halves = (("w1", "w3"), 2) if which == "gate_up_proj" else (("w2",), 1)
                parts = dict(zip(names, expert.chunk(halves), strict=True))
                found |= {f"{layer}.block_sparse_moe.experts.{i}.{w}.weight": part for w, part in parts.items()}
        else:
            found[name.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight")] = tensor
    return found


def without_copies(tensors: Mapping[str, torch.Tensor], reader: DeepSpeedReader) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (name == "lm_head.weight" and reader.architecture.tied_embeddings)
    }


@pytest.mark.parametrize("name", PARTITIONED)
def test_masters_and_moments_are_those_of_the_live_engine(runs: Path, name: str) -> None:
    reader = open_checkpoint(runs / name)
    assert reader.kinds == ("weight", "master", "exp_avg", "exp_avg_sq")
    expected, frozen = truth(runs / name), RUNS[name].frozen
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        found = read_all(reader, kind)
        assert differences({n: t for n, t in found.items() if n not in frozen}, on_hub(expected[kind])) == []


@pytest.mark.parametrize("name", PARTITIONED)
def test_masters_are_what_deepspeeds_own_script_puts_together(runs: Path, name: str) -> None:
    if name == "stage1-bf16-optimizer":
        pytest.skip("zero_to_fp32.py refuses what this optimizer saves")
    reader = open_checkpoint(runs / name)
    expected = {key: tensor.float() for key, tensor in fp32_by_deepspeed(runs / name).items()}
    assert differences(read_all(reader, "master"), without_copies(on_hub(expected), reader)) == []


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_the_modules(runs: Path, name: str) -> None:
    """Under stage 3 the files have masters alone: the weight is the master in the module's type."""
    reader, run = open_checkpoint(runs / name), RUNS[name]
    dtype = torch.bfloat16 if run.bf16 else torch.float32
    found = read_all(reader, "weight")
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    if run.stage == 3:
        masters = read_all(reader, "master")
        expected = {key: tensor.to(dtype) for key, tensor in masters.items()}
    else:
        expected = without_copies(on_hub(truth(runs / name)["weight"]), reader)
    assert differences(found, expected) == []


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.frozen])
def test_a_frozen_parameter_keeps_its_weight_and_has_no_moments(runs: Path, name: str) -> None:
    reader = open_checkpoint(runs / name)
    began = {key: tensor.to(torch.bfloat16) for key, tensor in RUNS[name].build().state_dict().items()}
    for key in FROZEN:
        assert torch.equal(read_all(reader, "weight")[key], began[key])
        assert torch.equal(read_all(reader, "master")[key], began[key].float())
        assert not read_all(reader, "exp_avg")[key].any()
    assert any("frozen" in notice and all(key in notice for key in FROZEN) for notice in reader.notices)


@pytest.mark.parametrize("name", ["stage0", "stage0-bf16"])
def test_the_optimizer_of_stage_0_is_mapped_by_the_order_of_parameters(runs: Path, name: str) -> None:
    reader = open_checkpoint(runs / name)
    weights, masters = read_all(reader, "weight"), read_all(reader, "master")
    dtype = torch.bfloat16 if RUNS[name].bf16 else torch.float32
    assert differences(weights, {key: tensor.to(dtype) for key, tensor in masters.items()}) == []
    assert all(tensor.any() for tensor in read_all(reader, "exp_avg").values())


def test_the_place_in_training_is_read(runs: Path) -> None:
    state = open_checkpoint(runs / "stage2").state
    assert state is not None
    assert (state.iteration, state.optimizer_step, state.consumed_samples) == (2, 2, 8)
    assert [group["weight_decay"] for group in state.param_groups] == [0.1, 0.01]
    assert state.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("name", ["stage1", "stage3", "stage2-bf16-frozen", "stage3-bf16-frozen"])
def test_deepspeeds_universal_checkpoint_reads_as_what_it_was_made_from(runs: Path, tmp_path: Path, name: str) -> None:
    universal_by_deepspeed(runs / name, tmp_path / "universal")
    assert is_deepspeed(tmp_path / "universal")
    source, universal = open_checkpoint(runs / name), open_checkpoint(tmp_path / "universal")
    assert universal.kinds == source.kinds
    for kind in source.kinds:
        assert differences(read_all(universal, kind), read_all(source, kind)) == []
    assert universal.state == source.state


def converted(source: Path, destination: Path, target: str = "deepspeed") -> Path:
    convert(prepare_conversion(source, destination, target, WriterOptions(), verify=True))
    return destination


def losses_of(folder: Path) -> list[list[float]]:
    """What the run that was saved had for losses when it went on, by rank."""
    return [torch.load(folder / f"truth-{rank}.pt")["losses"] for rank in range(2)]


def same_state(loaded: Loaded, folder: Path) -> bool:
    expected = truth(folder)
    return all(differences(loaded.states[kind], expected[kind]) == [] for kind in ("master", "exp_avg", "exp_avg_sq"))


def test_engines_go_on_from_a_converted_checkpoint_at_every_stage_and_number_of_ranks(
    runs: Path, tmp_path: Path
) -> None:
    ours = converted(runs / "stage1", tmp_path / "ours")
    with_experts = converted(runs / "stage3-experts", tmp_path / "experts")
    small_groups = {"zero_optimization": {"sub_group_size": 1000}}
    to_load = [*(Run(tied, stage) for stage in (1, 2, 3)), Run(tied, 3, config=small_groups)]
    loads = [(ours, run, {"universal": True}) for run in to_load]
    others = [(with_experts, Run(experts, 2), {"universal": True}), (ours, Run(tied, 0), {"load_module_only": True})]
    *found, experts_found, weights_found = load_runs([*loads, *others], tmp_path)
    first = [pytest.approx(rank[0], abs=2e-6) for rank in losses_of(runs / "stage1")]
    assert [losses[0] for losses in weights_found.losses] == first
    for loaded in found:
        assert same_state(loaded, runs / "stage1")
        assert loaded.groups == [{"lr": 1e-2, "weight_decay": 0.01}]
        assert loaded.losses == [pytest.approx(rank, abs=2e-6) for rank in losses_of(runs / "stage1")]
    assert same_state(experts_found, runs / "stage3-experts")
    assert experts_found.losses == [pytest.approx(rank, abs=2e-6) for rank in losses_of(runs / "stage3-experts")]
    (alone,) = load_runs(loads[1:2], tmp_path, num_ranks=1)
    assert same_state(alone, runs / "stage1")


def test_a_bf16_engine_goes_on_and_parameter_groups_keep_their_settings(runs: Path, tmp_path: Path) -> None:
    ours = converted(runs / "stage1-bf16", tmp_path / "ours")
    run = Run(untied, 2, bf16=True, two_groups=True)
    (loaded,) = load_runs([(ours, run, {"universal": True})], tmp_path)
    assert same_state(loaded, runs / "stage1-bf16")
    assert loaded.groups == [{"lr": 1e-2, "weight_decay": 0.1}, {"lr": 1e-2, "weight_decay": 0.01}]
    # Products of bf16 depend on where in memory their operands begin: DeepSpeed's own files are no closer.
    assert loaded.losses == [pytest.approx(rank, abs=5e-3) for rank in losses_of(runs / "stage1-bf16")]


def test_weights_alone_load_at_every_stage_with_the_loss_of_transformers(tmp_path: Path) -> None:
    model = tied()
    ours = converted(saved(model, tmp_path / "hf"), tmp_path / "ours")
    expected = []
    for rank in range(2):
        with torch.no_grad():
            expected.append(float(model(input_ids=batch(2, rank), labels=batch(2, rank)).loss))
    alone: list[tuple[Path, Run, dict[str, Any]]] = [(ours, Run(tied, 0), {"load_module_only": True})]
    universal = {"load_module_only": True, "universal": True}
    alone += [(ours, Run(tied, stage, two_groups=stage > 1), universal) for stage in (1, 2, 3)]
    for loaded in load_runs(alone, tmp_path):
        assert [losses[0] for losses in loaded.losses] == pytest.approx(expected, abs=1e-6)
        assert {group["lr"] for group in loaded.groups} == {0.5}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_survives_the_way_through_deepspeed_bit_for_bit(variant: str, tmp_path: Path) -> None:
    model = tiny_variant(variant, **two_layers(variant))
    source = saved(model, tmp_path / "hf", tokenizer=True)
    ours = converted(source, tmp_path / "ours")
    back = converted(ours, tmp_path / "back", "hf")
    assert differences(tensors_in(back), tensors_in(source)) == []
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((back / name).read_text()) == json.loads((source / name).read_text())
    tag = torch.load(ours / "global_step0" / "mp_rank_00_model_states.pt", weights_only=True, mmap=True)
    assert differences(tag["module"], model.state_dict()) == []
    assert {entry.name for entry in (ours / "global_step0" / "zero").iterdir() if entry.is_dir()} == {
        name for name, _ in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["stage3", "stage2-bf16-frozen", "stage3-experts"])
def test_state_survives_the_way_to_universal_bit_for_bit(runs: Path, tmp_path: Path, name: str) -> None:
    source, ours = open_checkpoint(runs / name), open_checkpoint(converted(runs / name, tmp_path / "ours"))
    assert ours.kinds == source.kinds
    for kind in source.kinds:
        assert differences(read_all(ours, kind), read_all(source, kind)) == []
    assert source.state is not None
    assert ours.state is not None
    assert (ours.state.optimizer_step, ours.state.param_groups) == (2, source.state.param_groups)


@pytest.mark.parametrize("name", ["tied", "untied-bf16"])
def test_a_pipelines_layers_and_optimizer_find_their_places(pipelines: Path, name: str) -> None:
    reader = open_checkpoint(pipelines / name)
    expected: dict[str, torch.Tensor] = {}
    for rank in range(2):
        stage = torch.load(pipelines / name / f"truth-{rank}.pt")
        places = {"0": "model", "3": "model.norm", "4": "lm_head", "tied_modules": "model"}
        for key, tensor in stage.items():
            first, _, rest = key.removeprefix("tied_modules.embed.").partition(".")
            number, rest = ("0", key.rpartition("embed.")[2]) if key.startswith("tied") else (first, rest)
            block = number in ("1", "2")
            hub = (
                f"model.layers.{int(number) - 1}.{rest.removeprefix('layer.')}" if block else f"{places[number]}.{rest}"
            )
            expected[hub] = tensor
    assert differences(read_all(reader, "weight"), expected) == []
    masters = {key: tensor.to(torch.bfloat16) for key, tensor in read_all(reader, "master").items()}
    assert differences(masters, {key: tensor.to(torch.bfloat16) for key, tensor in expected.items()}) == []
    assert all(tensor.any() for tensor in read_all(reader, "exp_avg").values())


def test_a_pipelines_weights_load_into_transformers(pipelines: Path, tmp_path: Path) -> None:
    hf = converted(pipelines / "plain", tmp_path / "hf", "hf")
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(hf)
    expected = read_all(open_checkpoint(pipelines / "plain"), "weight")
    assert differences(without_copies(model.state_dict(), open_checkpoint(pipelines / "plain")), expected) == []
    assert any("stay" in n or "weights alone" in n for n in open_checkpoint(pipelines / "plain").notices)


def copy_of(source: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of a saved run to break, and its tag."""
    folder = tmp_path / "copy"
    shutil.copytree(source, folder)
    return folder, folder / (folder / "latest").read_text()


RANK_0, RANK_1 = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
STATES = "stage1/global_step2/mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("saved", "files", "says"),
    [
        ("runs/stage1", {RANK_1: ""}, "optimizer states of 2 ranks are needed but rank 1 has none"),
        ("runs/stage3", {RANK_1: ""}, "optimizer states of 2 ranks are needed but rank 1 has none"),
        ("runs/stage3", {RANK_0: "", RANK_1: ""}, "which hold the weights of ZeRO-3"),
        ("runs/stage1", {RANK_1: f"stage2-aligned/global_step2/{RANK_1}"}, "files of two checkpoints are mixed"),
        ("runs/stage1", {"mp_rank_01_model_states.pt": STATES}, r"parallel ranks \(mp_rank_01\).*ds_to_universal"),
        ("runs/stage1", {"layer_0_expert_3_mp_rank_00_model_states.pt": STATES}, r"_expert_3_.*\.pt: experts"),
        ("runs/stage1", {"offloaded_tensors": STATES}, "offloaded to NVMe"),
        (
            "pipelines/tied",
            {"mp_rank_01_model_states.pt": ""},
            "model states of 2 ranks are needed but rank 1 has none",
        ),
    ],
)
def test_files_that_are_absent_mixed_or_of_another_kind_are_refused_by_name(
    saved: str, files: dict[str, str], says: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """`files` of the checkpoint are replaced by others, or removed."""
    fixture, name = saved.split("/")
    place: Path = request.getfixturevalue(fixture)
    folder, tag = copy_of(place / name, tmp_path)
    for file, other in files.items():
        if other:
            shutil.copy(place / other, tag / file)
        else:
            (tag / file).unlink()
    with pytest.raises(DataError, match=says):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("stage1", {"num_hidden_layers": 3}, "layers.2.self_attn.q_proj.weight .24, 20. is missing"),
        ("stage1", {"num_hidden_layers": 1}, "layers.1.mlp.up_proj.weight .37, 20. is extra"),
        ("stage1", {"intermediate_size": 36}, "layers.0.mlp.gate_proj.weight is .37, 20., not .36, 20."),
        ("stage1-bf16", {"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_tensors_that_are_not_those_of_the_config_are_named(
    name: str, changes: dict[str, Any], says: str, runs: Path, tmp_path: Path
) -> None:
    folder, _ = copy_of(runs / name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(DataError, match=says):
        open_checkpoint(folder).check()


def test_what_belongs_to_no_model_here_is_said(runs: Path, tmp_path: Path) -> None:
    folder, tag = copy_of(runs / "stage1", tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"no config.json.*copy the model's into"):
        open_checkpoint(folder)
    (folder / "latest").write_text("global_step9")
    with pytest.raises(DataError, match="latest names no folder"):
        open_checkpoint(folder)
    assert is_deepspeed(tag)
    assert not is_deepspeed(tmp_path)


def test_a_layer_whose_place_cannot_be_told_is_refused_by_name(pipelines: Path, tmp_path: Path) -> None:
    folder, tag = copy_of(pipelines / "tied", tmp_path)
    torch.save({"adapter.weight": torch.zeros(3, 4)}, tag / "layer_05-model_states.pt")
    with pytest.raises(DataError, match=r"layer_05-model_states.pt: what adapter.weight \[3, 4\] is cannot be told"):
        open_checkpoint(folder)
    (tag / "layer_05-model_states.pt").unlink()
    (tag / "layer_02-model_states.pt").unlink()
    with pytest.raises(DataError, match=r"1 layer files hold a block of llama \(layer_01.*config.json says 2"):
        open_checkpoint(folder)
