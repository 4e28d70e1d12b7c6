"""Every family through every format and layout, bit for bit, with its tokenizer; and what others get wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch import cli
from dynapipe_ext.models.tensors import TensorGroup
from dynapipe_ext.tools.checkpoint.converter import ConversionOutcome, convert, prepare_conversion
from dynapipe_ext.tools.checkpoint.formats import GroupTensors, StateKind, TrainingState, WriterOptions
from dynapipe_ext.tools.checkpoint.huggingface import folder as huggingface
from dynapipe_ext.tools.checkpoint.recognition import recognise
from tests.support import meta_llama
from tests.support.checkpoints import VARIANTS, differences, saved, tensors_in, tiny_variant, unequal
from tests.support.pairs import pairwise_cases

MEGATRON = ("megatron", "megatron-legacy")
T5 = tuple(variant for variant in VARIANTS if variant.startswith("t5"))
DEGREES = (1, 2, 4)
LAYOUTS = [
    *pairwise_cases(tuple(variant for variant in VARIANTS if variant not in T5), MEGATRON, DEGREES, DEGREES),
    *pairwise_cases(T5, ("megatron",), DEGREES, DEGREES),
    *pairwise_cases(T5, ("megatron-legacy",), DEGREES, (1,)),
]
Models = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # power is not cut in these tests


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Folders of tiny models by variant, each made once."""
    folder = tmp_path_factory.mktemp("models")

    def model(variant: str) -> Path:
        if not (folder / variant).exists():
            saved(tiny_variant(variant), folder / variant, shard_size="1GB")
        return folder / variant

    return model


def converted(source: Path, target: Path, to: str, *, verify: bool = False, **options: Any) -> ConversionOutcome:
    return convert(prepare_conversion(source, target, to, WriterOptions(**options), verify=verify))


@pytest.mark.parametrize(("variant", "to", "tp", "pp"), LAYOUTS)
def test_megatron_holds_every_bit(variant: str, to: str, tp: int, pp: int, models: Models, tmp_path: Path) -> None:
    model = models(variant)
    converted(model, tmp_path / "megatron", to, tp=tp, pp=pp)
    found, _ = recognise(tmp_path / "megatron")
    assert found.name == to
    reader = found.open(tmp_path / "megatron")
    reader.check()
    assert unequal(huggingface.open_checkpoint(model), reader) == []


def test_t5_in_the_legacy_layout_has_no_stages(models: Models, tmp_path: Path) -> None:
    for variant in T5:
        with pytest.raises(ConfigError, match="T5 has no pipeline stages"):
            converted(models(variant), tmp_path / "megatron", "megatron-legacy", tp=1, pp=2)


@pytest.mark.parametrize(("variant", "to"), zip(VARIANTS, cycle(MEGATRON)))  # both ways there are above
def test_the_way_there_and_back_gives_the_same_model(variant: str, to: str, models: Models, tmp_path: Path) -> None:
    model = models(variant)
    stages = {} if variant in T5 else {"pp": 2, "layers_per_stage": (1, 3)}
    converted(model, tmp_path / "there", to, tp=2, **stages)
    outcome = converted(tmp_path / "there", tmp_path / "back", "hf", verify=True)
    assert outcome.verified
    assert outcome.notices == ()
    assert differences(tensors_in(model), tensors_in(tmp_path / "back")) == []
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((model / name).read_text())


@pytest.mark.parametrize("to", MEGATRON)
def test_the_command_goes_there_with_uneven_stages_and_back(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tiny_variant("llama-tied"), tmp_path / "model", tokenizer=True)
    there, back = tmp_path / "there", tmp_path / "back"
    assert cli.main(["convert", str(model), str(there), "--to", to, "--tp", "2", "--layers-per-stage", "2,1,1"]) == 0
    assert cli.main(["convert", str(there), str(back), "--to", "hf", "--verify", "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{") :])["source_format"] == to
    assert differences(tensors_in(model), tensors_in(back)) == []
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (back / name).read_bytes() == (model / name).read_bytes()
    assert cli.main(["convert", str(model), str(tmp_path / "no"), "--to", to, "--layers-per-stage", "2,1"]) == 2
    assert "sum to" in capsys.readouterr().err


@pytest.mark.parametrize(("to", "dtype"), [("megatron", torch.bfloat16), ("megatron-legacy", torch.float16)])
def test_half_precision_stays_what_it_is(to: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved(tiny_variant("mixtral").to(dtype), tmp_path / "model")
    converted(model, tmp_path / "there", to, tp=2, pp=2)
    converted(tmp_path / "there", tmp_path / "back", "hf")
    assert differences(tensors_in(model), tensors_in(tmp_path / "back")) == []


def test_layouts_and_formats_go_to_one_another(models: Models, tmp_path: Path) -> None:
    steps: list[tuple[str, dict[str, int]]] = [
        ("megatron", {"tp": 4, "pp": 2}),
        ("megatron-legacy", {"tp": 2, "pp": 4}),
        ("deepspeed", {}),
        ("megatron-legacy", {"tp": 1, "pp": 2}),
        ("megatron", {"tp": 2, "pp": 1}),
        ("hf", {}),
    ]
    place = model = models("qwen2-tied")
    for number, (to, layout) in enumerate(steps):
        converted(place, tmp_path / f"{number}", to, verify=True, **layout)
        place = tmp_path / f"{number}"
    assert differences(tensors_in(model), tensors_in(place)) == []


@pytest.mark.parametrize(("to", "ranks"), [("megatron", 1), ("megatron-legacy", 2), ("megatron", 4)])
def test_metas_llama_goes_straight_to_megatron(to: str, ranks: int, tmp_path: Path) -> None:
    whole = meta_llama.weights()
    folder = meta_llama.write(tmp_path / "meta", whole, ranks, rope_theta=500_000.0, use_scaled_rope=True)
    converted(folder, tmp_path / "there", to, tp=2, pp=2)
    converted(folder, tmp_path / "direct", "hf")
    converted(tmp_path / "there", tmp_path / "back", "hf")
    assert differences(tensors_in(tmp_path / "direct"), tensors_in(tmp_path / "back")) == []
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("direct", "back")]
    assert configs[0] == configs[1]
    assert configs[0]["rope_parameters"]["rope_type"] == "llama3"
    assert (tmp_path / "back/tokenizer.model").read_bytes() == b"words"
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")


class Trained(huggingface.HuggingFaceReader):
    """A model with Adam's state, as a training run would leave it."""

    kinds: tuple[StateKind, ...] = ("weight", "master", "exp_avg", "exp_avg_sq")
    state = TrainingState(
        iteration=30,
        optimizer_step=29,
        consumed_samples=480,
        param_groups=({"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8},),
    )

    def dtype(self, group: TensorGroup, kind: StateKind) -> torch.dtype:
        return super().dtype(group, kind) if kind == "weight" else torch.float32

    def read(self, group: TensorGroup, kind: StateKind) -> GroupTensors:
        tensors = super().read(group, "weight")
        if kind == "weight":
            return tensors
        scale = {"master": 1.001, "exp_avg": -0.1, "exp_avg_sq": 1e-4}[kind]
        return {name: tensor.float() * scale for name, tensor in tensors.items()}


@pytest.mark.parametrize("variant", ["llama-tied", "mixtral"])
def test_optimizer_state_goes_from_one_megatron_layout_to_another(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tiny_variant(variant).bfloat16(), tmp_path / "model")
    monkeypatch.setattr(huggingface, "open_checkpoint", Trained)
    steps: list[tuple[str, dict[str, int]]] = [
        ("megatron", {"tp": 2, "pp": 2}),
        ("megatron-legacy", {"tp": 4, "pp": 1}),
        ("deepspeed", {}),
        ("megatron-legacy", {"tp": 1, "pp": 4}),
        ("megatron", {"tp": 1, "pp": 1}),
    ]
    place = model
    for number, (to, layout) in enumerate(steps):
        converted(place, tmp_path / f"{number}", to, verify=True, **layout)
        place = tmp_path / f"{number}"
        reader = recognise(place)[0].open(place)
        assert unequal(Trained(model), reader) == []
        assert reader.state is not None
        left = replace(reader.state, param_groups=(), scheduler={})
        assert left == replace(Trained.state, param_groups=(), scheduler={})
    outcome = converted(place, tmp_path / "end", "hf")
    assert any("master, exp_avg, exp_avg_sq stay behind" in notice for notice in outcome.notices)
    assert any("iteration 30" in notice for notice in outcome.notices)


@pytest.mark.parametrize(
    ("variant", "options", "says"),
    [
        ("mixtral", {"tp": 2, "ep": 2}, ["--expert-model-parallel-size 2"]),
        (
            "qwen3-moe",
            {"pp": 2, "ep": 4, "vpp": 2},
            ["--expert-model-parallel-size 4", "--num-layers-per-virtual-pipeline-stage 1"],
        ),
        ("llama", {"pp": 2, "vpp": 2}, ["--num-layers-per-virtual-pipeline-stage 1"]),
    ],
)
def test_experts_over_ranks_and_stages_within_them_come_back_bit_for_bit(
    variant: str, options: dict[str, int], says: list[str], models: Models, tmp_path: Path
) -> None:
    outcome = converted(models(variant), tmp_path / "there", "megatron", verify=True, **options)
    script = (tmp_path / "there" / "megatron_args.sh").read_text()
    assert all(words in script and words in outcome.usage[0] for words in says)
    ranks = options.get("tp", 1) * options.get("pp", 1) * options.get("ep", 1)
    assert f"--nproc-per-node {ranks} " in script
    arguments = torch.load(tmp_path / "there" / "release" / "common.pt", weights_only=False)["args"]
    assert arguments.expert_model_parallel_size == options.get("ep", 1)
    assert arguments.virtual_pipeline_model_parallel_size == options.get("vpp")
    converted(tmp_path / "there", tmp_path / "back", "hf")
    assert differences(tensors_in(models(variant)), tensors_in(tmp_path / "back")) == []


@pytest.mark.parametrize(
    ("variant", "to", "options", "says"),
    [
        ("llama", "megatron", {"ep": 2}, "--ep 2 must be at least 1, and divide num_experts 0"),
        ("mixtral", "megatron", {"ep": 3}, "divide num_experts 4"),
        (
            "llama",
            "megatron",
            {"vpp": 2},
            "--vpp 2 must be at least 1; above, Megatron needs .* --pp 2 or more, here 1",
        ),
        ("llama", "megatron", {"pp": 2, "vpp": 2, "layers_per_stage": (1, 3)}, "without --layers-per-stage"),
        ("llama", "megatron", {"pp": 2, "vpp": 4}, "--pp 2 x --vpp 4 does not divide 4 layers"),
        ("mixtral", "megatron-legacy", {"ep": 2}, "files of ranks are not written for these: use --to megatron"),
        ("mixtral", "hf", {"ep": 2}, "a Hugging Face folder has no ranks"),
    ],
)
def test_experts_and_stages_that_cannot_be_laid_out_so_are_refused(
    variant: str, to: str, options: dict[str, Any], says: str, models: Models, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        converted(models(variant), tmp_path / "there", to, **options)


@pytest.mark.parametrize("form", ["bin", "megatron", "megatron-legacy", "deepspeed"])
def test_a_flipped_bit_in_a_file_of_torch_save_is_found_by_verify(form: str, models: Models, tmp_path: Path) -> None:
    source = tmp_path / "source"
    if form == "bin":
        source.mkdir()
        (source / "config.json").write_bytes((models("llama-tied") / "config.json").read_bytes())
        torch.save(tensors_in(models("llama-tied")), source / "pytorch_model.bin")
    else:
        converted(models("llama-tied"), source, form)
    converted(source, tmp_path / "good", "hf", verify=True)
    files = [file for file in source.rglob("*") if file.suffix in (".bin", ".pt", ".distcp")]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x40
    largest.write_bytes(content)
    with pytest.raises(DataError, match=rf"{largest.name}: the bytes of .*/data/\d+ are not those that were saved"):
        converted(source, tmp_path / "bad", "hf", verify=True)
    assert not (tmp_path / "bad").exists()
