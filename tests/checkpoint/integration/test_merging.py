"""Adapters of peft merged into their base: the logits are those of peft, merged and unmerged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch import cli
from dynapipe_ext.tools.checkpoint.huggingface.merging import merge_adapters
from tests.support.checkpoints import differences, edit_json, logits, saved, tensors_in, tiny

peft: Any = pytest.importorskip("peft")

_PROJECTIONS = ["q_proj", "v_proj", "down_proj"]
# Of a configuration: its name, the family, changes of the model, and peft's own words.
ADAPTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {}, {"target_modules": _PROJECTIONS}),
    "rank-stabilised": ("llama", {}, {"target_modules": "all-linear", "use_rslora": True}),
    "dora": ("llama", {}, {"target_modules": _PROJECTIONS, "use_dora": True}),
    "dora-gpt2": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True}),
    "gpt2": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "patterns": (
        "qwen3",
        {},
        {
            "target_modules": _PROJECTIONS,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7},
            "alpha_pattern": {"v_proj": 3, r"model\.layers\.2\.self_attn\.q_proj": 40},
        },
    ),
    "saved-whole": ("llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "input_layernorm"]}),
    "saved-whole-tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "biases": ("qwen2", {}, {"target_modules": ["q_proj"], "bias": "all"}),
    "biases-of-lora": ("qwen2", {}, {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "embedding": ("llama", {}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "head": ("llama", {}, {"target_modules": ["q_proj", "lm_head"]}),
    "embedding-tied": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "fused": ("phi3", {}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
}


def trained(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path, Any]:
    """The base's folder, that of adapters which have an effect, and peft's model of both."""
    family, changes, words = ADAPTERS[name]
    base = saved(tiny(family, dtype=dtype, **changes), folder / "base", tokenizer=True)
    torch.manual_seed(1)
    words = {"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM", **words}
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**words))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.015 * torch.randn_like(weight))
    model.save_pretrained(folder / "adapter")
    return base, folder / "adapter", model.eval()


def wide(model: Any) -> torch.Tensor:
    """Logits computed in float64: what differs then is the weights, not how they are multiplied."""
    return logits(model.double().eval())


def logits_of(folder: Path) -> torch.Tensor:
    return wide(transformers.AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_merged_model_says_what_the_unmerged_says(name: str, tmp_path: Path) -> None:
    base, adapter, model = trained(tmp_path, name)
    outcome = merge_adapters(adapter, base, tmp_path / "merged", shard_bytes=150_000)
    unmerged, merged = wide(model), logits_of(tmp_path / "merged")
    assert float((merged - unmerged).abs().max()) <= 1e-6
    assert float((unmerged - logits_of(base)).abs().max()) > 0.01
    if name != "embedding-tied":  # there peft's own merging changes the head with the embedding
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        whole = peft.PeftModel.from_pretrained(plain, adapter).merge_and_unload()
        assert float((wide(whole) - merged).abs().max()) <= 1e-6
    assert any("head is written beside" in notice for notice in outcome.notices) == name.endswith("tied")
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("name", ["plain", "dora", "gpt2", "embedding", "fused"])
def test_only_the_rounding_of_weights_parts_the_merged_from_the_unmerged(name: str, tmp_path: Path) -> None:
    """Of a base in float64, which rounds a billion times less, nothing is left of it."""
    base, adapter, model = trained(tmp_path, name, torch.float64)
    merge_adapters(adapter, base, tmp_path / "merged")
    unmerged = wide(model)
    merged = wide(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64))
    assert float((merged - unmerged).abs().max()) <= 1e-13 * float(unmerged.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_merged_weights_have_the_types_and_bits_of_pefts(dtype: torch.dtype, tmp_path: Path) -> None:
    base, adapter, _ = trained(tmp_path, "plain", dtype)
    merge_adapters(adapter, base, tmp_path / "merged")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    whole = peft.PeftModel.from_pretrained(plain, adapter).merge_and_unload()
    assert differences(tensors_in(tmp_path / "merged"), whole.state_dict()) == []


def test_the_command_merges_from_bin_files_and_names_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, _ = trained(tmp_path, "plain")
    merge_adapters(adapter, base, tmp_path / "merged")
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    edit_json(adapter / "adapter_config.json", base_model_name_or_path="someone/another")
    words = ["convert", str(adapter), "--merge", str(base), "--output", str(tmp_path / "again"), "--json"]
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out[printed.out.index("{") :])
    assert (report["format"], report["adapters"]) == ("hf", 12)
    assert "names someone/another as its base" in printed.err
    assert differences(tensors_in(tmp_path / "merged"), tensors_in(tmp_path / "again")) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["OUT", "--tp", "2"], "--merge writes one Hugging Face folder: leave out --tp"),
        (["OUT", "--to", "megatron"], "--to megatron: --merge writes a Hugging Face folder, convert that next"),
        ([], "give the folder to make once, as DST or by --output DST"),
        (["OUT", "--output", "OUT"], "give the folder to make once"),
    ],
)
def test_what_a_merge_cannot_heed_is_refused(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [str(tmp_path / "merged") if flag == "OUT" else flag for flag in flags]
    assert cli.main(["convert", str(tmp_path), *places, "--merge", str(tmp_path)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_conversion_without_a_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", str(tmp_path), str(tmp_path / "x")]) == 2
    assert "give the format to write by --to hf or megatron" in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return trained(tmp_path_factory.mktemp("plain"), "plain")[:2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': only LORA is merged here"),
        ({"use_qalora": True}, r"asks for use_qalora \(True\), which is not known here"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "asks for target_parameters"),
        ({"trainable_token_indices": [3]}, "asks for trainable_token_indices"),
        ({"alora_invocation_tokens": [1, 2]}, "asks for alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base"),
        ({"lora_alpha": "many"}, "lora_alpha of .* is 'many'"),
        ({"r": 99}, "says that .* has rank 99, but its A has 4 rows"),
        ({"use_dora": True}, "has no magnitude where use_dora is True"),
    ],
)
def test_adapters_that_merge_otherwise_are_refused_by_name(
    change: dict[str, Any], says: str, plain: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = plain
    (tmp_path / "adapter").mkdir()
    for file in adapter.iterdir():
        (tmp_path / "adapter" / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "adapter" / "adapter_config.json", **change)
    with pytest.raises(ConfigError, match=says):
        merge_adapters(tmp_path / "adapter", base, tmp_path / "merged")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda t, q: t.update({q.replace("q_proj", "w_proj"): t.pop(q)}),
            "q_proj has B where both A and B are needed",
        ),
        (
            lambda t, q: t.update({n.replace("q_proj", "w_proj"): t.pop(n) for n in sorted(t) if "layers.0" in n}),
            r"model.layers.0.self_attn.w_proj.weight is no tensor of it",
        ),
        (
            lambda t, q: t.update({q: torch.ones(4, 7)}),
            r"layers.0.self_attn.q_proj.weight is \[64, 64\] beside adapters of 7 inputs and 64 outputs",
        ),
        (
            lambda t, q: t.update({"base_model.model.lm_head.weight": torch.ones(140, 64)}),
            r"lm_head.weight is \[140, 64\], where the base has \[131, 64\]",
        ),
    ],
    ids=["half", "unknown", "misshapen", "resized"],
)
def test_adapters_without_their_module_are_named(
    change: Any, says: str, plain: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = plain
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(DataError, match=says):
        merge_adapters(tmp_path / "adapter", base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_merge_that_was_killed_begins_anew(plain: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = plain
    with pytest.raises(KeyboardInterrupt):
        merge_adapters(adapter, base, tmp_path / "merged", advance=interrupt)
    (tmp_path / "merged.partial" / "model-00007-of-00009.safetensors").write_bytes(b"x")
    merge_adapters(adapter, base, tmp_path / "merged")
    names = {file.name for file in (tmp_path / "merged").iterdir()}
    assert "model.safetensors" in names
    assert not [name for name in names if "00007" in name or "dynapipe" in name]
    with pytest.raises(ConfigError, match="merged exists"):
        merge_adapters(adapter, base, tmp_path / "merged")


def interrupt(_num_bytes: int) -> None:
    raise KeyboardInterrupt


def test_a_merge_touches_nothing_but_what_a_merge_has_begun(plain: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = (Path(shutil.copytree(source, tmp_path / source.name)) for source in plain)
    unfinished = tmp_path / "out.partial"
    unfinished.mkdir()
    (unfinished / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"out\.partial exists and is no unfinished conversion: remove it"):
        merge_adapters(adapter, base, tmp_path / "out")
    assert (unfinished / "notes.txt").read_text() == "mine"
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for destination, said in (
        (base / "in", "lies inside .*base"),
        (adapter / "in", "lies inside .*adapter"),
        (tmp_path / "dangling", "dangling exists"),
    ):
        with pytest.raises(ConfigError, match=said):
            merge_adapters(adapter, base, destination)
    for source in (base, adapter):
        before, moved = set(os.listdir(source)), source.rename(tmp_path / "other.partial")
        with pytest.raises(ConfigError, match="lies inside the unfinished"):
            merge_adapters(*(moved if one == source else one for one in (adapter, base)), tmp_path / "other")
        assert set(os.listdir(moved)) == before
        moved.rename(source)
