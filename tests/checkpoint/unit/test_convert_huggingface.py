"""Hugging Face's folders, of any time and form, become safetensors shards of the same tensors; faults are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.tools.checkpoint.converter import ConversionOutcome, convert, prepare_conversion
from dynapipe_ext.tools.checkpoint.formats import WriterOptions
from dynapipe_ext.tools.checkpoint.huggingface import folder as huggingface
from dynapipe_ext.tools.checkpoint.recognition import is_huggingface
from tests.support.checkpoints import (
    VARIANTS,
    differences,
    edit_json,
    logits,
    saved,
    tensors_in,
    tiny,
    tiny_variant,
    two_layers,
    write_tokenizer,
)

Tensors = dict[str, torch.Tensor]
_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 131, "max_position_embeddings": 64,
}  # fmt: skip
_DEEPSEEK = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "num_experts_per_tok": 8}
_FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "olmo2", "gemma2", "smollm3",
    "granite", "olmoe", "olmo3", "gemma", "starcoder2", "glm", "glm4", "nemotron",
)  # fmt: skip
_LARGER = {
    "glm4_moe": _SMALL | {"first_k_dense_replace": 1}, "gemma3_text": _SMALL, "deepseek_v2": _SMALL | _DEEPSEEK,
    "deepseek_v3": _SMALL | _DEEPSEEK,
}  # fmt: skip
_OTHERS = {
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 131, "n_positions": 64},
    "mt5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 131},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 131},
}
_FACTORS = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPES: list[Any] = [
    None, {}, {"rope_type": "default"}, {"type": "default", "rope_theta": 5e5}, {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 3.0}, {"type": "linear"}, {"rope_type": "llama3"},
    {"rope_type": "llama3", **_FACTORS}, {"rope_type": "llama3", **_FACTORS, "original_max_position_embeddings": 32},
    {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}, {"type": "linear", **_FACTORS},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e4}},
]  # fmt: skip
_FIELDS: dict[str, list[Any]] = {
    "rope_scaling": _ROPES, "rope_parameters": _ROPES, "rope_theta": [None, 1e5], "attention_bias": [True],
    "mlp_bias": [True], "head_dim": [8, 32], "partial_rotary_factor": [0.5, 1.0], "tie_word_embeddings": [True, False],
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh"], "hidden_activation": ["silu"], "rms_norm_eps": [1e-4],
    "num_key_value_heads": [1, 4], "sliding_window": [None, 8], "use_sliding_window": [True], "max_window_layers": [1],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["sliding_attention", "full_attention"]],
    "sliding_window_pattern": [1, 2, 3], "num_experts": [16], "num_local_experts": [16], "n_routed_experts": [32],
    "n_shared_experts": [1], "num_experts_per_tok": [1, 2], "norm_topk_prob": [True, False], "q_lora_rank": [None, 32],
    "moe_intermediate_size": [48], "shared_expert_intermediate_size": [40], "qkv_bias": [False], "n_group": [1, 2],
    "decoder_sparse_step": [2], "mlp_only_layers": [[], [1]], "topk_group": [1, 2], "routed_scaling_factor": [1.0],
    "scoring_func": ["softmax", "sigmoid"], "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "first_k_dense_replace": [0, 1], "hidden_size": [128], "num_attention_heads": [2, 8], "num_hidden_layers": [1, 3],
    "max_position_embeddings": [32], "n_inner": [None, 100], "activation_function": ["relu", "gelu"], "n_head": [2],
    "scale_attn_weights": [False], "layer_norm_epsilon": [1e-4], "feed_forward_proj": ["gated-gelu", "silu", "gelu"],
    "num_decoder_layers": [1], "d_kv": [8], "scale_decoder_outputs": [True, False], "is_gated_act": [True],
    "attn_logit_softcapping": [None, 20.0], "final_logit_softcapping": [None, 10.0], "query_pre_attn_scalar": [16],
    "rope_local_base_freq": [2e4], "original_max_position_embeddings": [16], "intermediate_size": [80],
    "no_rope_layers": [[1, 0], [0, 1], [1, 1]], "no_rope_layer_interval": [1, 2], "clip_qkv": [8.0],
    "use_qk_norm": [True], "use_bias": [False], "norm_epsilon": [1e-4], "norm_eps": [1e-4], "logits_scaling": [2.0],
    "embedding_multiplier": [3], "residual_multiplier": [0.5], "attention_multiplier": [0.1],
    "v_head_dim": [64], "use_bidirectional_attention": [True], "vocab_size": [200],
}  # fmt: skip


def resaved(source: Path, target: Path, shard_bytes: int = 200_000) -> ConversionOutcome:
    own = {"shard_bytes": shard_bytes}
    return convert(prepare_conversion(source, target, "hf", WriterOptions(), source_format="hf", verify=True, **own))


def as_bin(source: Path, target: Path, tensors: Tensors, *, shards: int = 1, zipped: bool = True) -> Path:
    """The folder as it was before safetensors."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    parts = [dict(list(tensors.items())[i::shards]) for i in range(shards)]
    for i, part in enumerate(parts, start=1):
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{i:05d}-of-{shards:05d}.bin"
        torch.save(part, target / name, _use_new_zipfile_serialization=zipped)
        for tensor in part if shards > 1 else ():
            index = target / "pytorch_model.bin.index.json"
            told = json.loads(index.read_text())["weight_map"] if index.exists() else {}
            index.write_text(json.dumps({"weight_map": {**told, tensor: name}}))
    return target


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_comes_back_bit_for_bit_and_loads(variant: str, tmp_path: Path) -> None:
    model = tiny_variant(variant, **two_layers(variant))
    source = saved(model, tmp_path / "source")
    resaved(source, tmp_path / "target")
    assert differences(tensors_in(source), tensors_in(tmp_path / "target")) == []
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 1
    again = type(model).from_pretrained(tmp_path / "target", attn_implementation="eager")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    source = saved(tiny("llama", dtype=dtype), tmp_path / "source")
    resaved(source, tmp_path / "target")
    assert differences(tensors_in(source), tensors_in(tmp_path / "target")) == []


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "plain"])
@pytest.mark.parametrize("shards", [1, 3])
def test_bin_files_become_safetensors(zipped: bool, shards: int, tmp_path: Path) -> None:
    source = saved(tiny("llama"), tmp_path / "source")
    old = as_bin(source, tmp_path / "old", tensors_in(source), shards=shards, zipped=zipped)
    resaved(old, tmp_path / "target")
    assert differences(tensors_in(source), tensors_in(tmp_path / "target")) == []


def test_a_shard_holds_at_most_what_was_asked_and_the_index_says_where(tmp_path: Path) -> None:
    source = saved(tiny("gpt2"), tmp_path / "source")
    resaved(source, tmp_path / "target", shard_bytes=100_000)
    index = json.loads((tmp_path / "target/model.safetensors.index.json").read_text())
    shards = {file.name: load_file(file) for file in (tmp_path / "target").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in shards.values()]
    assert max(sizes) <= 100_000
    assert index["metadata"]["total_size"] == sum(sizes)


def test_one_shard_has_the_plain_name(tmp_path: Path) -> None:
    resaved(saved(tiny("gpt2"), tmp_path / "source"), tmp_path / "target", shard_bytes=10**9)
    assert {file.name for file in (tmp_path / "target").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_tokenizer_and_generation_config_are_carried_byte_for_byte(tmp_path: Path) -> None:
    source = saved(tiny("llama"), tmp_path / "source")
    files = write_tokenizer(source)
    files |= {name: (source / name).read_bytes() for name in ("generation_config.json", "config.json")}
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("about it")
    (source / "optimizer.pt").write_bytes(b"x")
    outcome = resaved(source, tmp_path / "target")
    assert {name: (tmp_path / "target" / name).read_bytes() for name in files} == files
    assert (tmp_path / "target/chat_template.jinja").exists()
    assert any("README.md" in notice and "optimizer.pt" in notice for notice in outcome.notices)


def test_gpt2_without_its_prefix_and_with_masks_is_the_same_model(tmp_path: Path) -> None:
    source = saved(tiny("gpt2"), tmp_path / "source")
    wanted = tensors_in(source)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in wanted.items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).bool() for i in range(4)}
    bare |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(4)}
    outcome = resaved(as_bin(source, tmp_path / "old", bare), tmp_path / "target")
    assert differences(wanted, tensors_in(tmp_path / "target")) == []
    assert any("8 buffers are no weights" in notice for notice in outcome.notices)


def test_layers_of_multi_token_prediction_are_left_out_where_that_is_asked(tmp_path: Path) -> None:
    source = saved(tiny("deepseek_v3"), tmp_path / "source", shard_size="1GB")
    wanted = tensors_in(source)
    save_file(
        wanted | {"model.layers.4.eh_proj.weight": torch.ones(4, 8)}, source / "model.safetensors", {"format": "pt"}
    )
    edit_json(source / "config.json", num_nextn_predict_layers=1)
    with pytest.raises(DataError, match=r"1 tensors of multi-token prediction .*eh_proj.*--drop-mtp leaves them out"):
        resaved(source, tmp_path / "target")
    options: dict[str, Any] = {"drop_mtp": True, "verify": True}
    outcome = convert(prepare_conversion(source, tmp_path / "target", "hf", WriterOptions(), **options))
    assert differences(wanted, tensors_in(tmp_path / "target")) == []
    assert any("of multi-token prediction are left out" in notice for notice in outcome.notices)
    assert json.loads((tmp_path / "target" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    again = prepare_conversion(tmp_path / "target", tmp_path / "again", "hf", WriterOptions(), drop_mtp=True)
    nothing = f"{tmp_path / 'target'} has no layers of multi-token prediction: --drop-mtp changed nothing"
    assert [notice for notice in again.notices if "multi-token" in notice] == [nothing]


def test_code_that_a_folder_brings_is_said_not_to_be_followed(tmp_path: Path) -> None:
    source = saved(tiny("llama"), tmp_path / "source")
    edit_json(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (notice,) = (line for line in resaved(source, tmp_path / "target").notices if "auto_map" in line)
    assert "names code of its own (auto_map {'AutoModelForCausalLM': " in notice
    assert notice.endswith("followed is what transformers itself makes of a llama")


def test_rotary_frequencies_are_left_out_by_name(tmp_path: Path) -> None:
    source = saved(tiny("llama"), tmp_path / "source")
    wanted = tensors_in(source)
    more = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(4)}
    resaved(as_bin(source, tmp_path / "old", wanted | more), tmp_path / "target")
    assert differences(wanted, tensors_in(tmp_path / "target")) == []


def test_second_copies_of_tied_weights_are_one_weight(tmp_path: Path) -> None:
    for variant, copies in {
        "llama-tied": ["lm_head.weight"],
        "t5": ["lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
    }.items():
        source = saved(tiny_variant(variant), tmp_path / variant)
        wanted = tensors_in(source)
        own = "shared.weight" if variant == "t5" else "model.embed_tokens.weight"
        more = {name: wanted[own].clone() for name in copies}
        resaved(as_bin(source, tmp_path / f"{variant}-old", wanted | more), tmp_path / f"{variant}-new")
        assert differences(wanted, tensors_in(tmp_path / f"{variant}-new")) == []


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    source = saved(tiny_variant("llama-tied"), tmp_path / "source")
    other = {"lm_head.weight": torch.ones(131, 64)}
    old = as_bin(source, tmp_path / "old", tensors_in(source) | other)
    with pytest.raises(DataError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        resaved(old, tmp_path / "target")


def test_the_files_tell_whether_t5_has_a_head_of_its_own(tmp_path: Path) -> None:
    source = saved(tiny_variant("t5-v1.1"), tmp_path / "source")
    edit_json(source / "config.json", tie_word_embeddings=True)  # as transformers 5 writes it
    resaved(source, tmp_path / "target")
    assert differences(tensors_in(source), tensors_in(tmp_path / "target")) == []
    assert "lm_head.weight" in tensors_in(tmp_path / "target")
    assert not read_config(json.loads((tmp_path / "target/config.json").read_text())).tied_embeddings


def test_the_config_says_the_type_that_the_weights_have(tmp_path: Path) -> None:
    source = saved(tiny("llama", dtype=torch.bfloat16), tmp_path / "source")
    edit_json(source / "config.json", dtype="float32", mine="kept")
    resaved(source, tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert (config["dtype"], config["mine"]) == ("bfloat16", "kept")


def _drop(tensors: Tensors) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"], tensors["model.norm.weight"]


def _add(tensors: Tensors) -> None:
    tensors["model.layers.4.mlp.up_proj.weight"] = torch.ones(2)
    tensors["model.layers.0.self_attn.q_proj.lora_A"] = torch.ones(2)


def _bend(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.ones(7, 64)


def _quantize(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(64, 96, dtype=torch.int8)


def _mix(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(64, 64).half()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_drop, ["model.layers.2.mlp.up_proj.weight [96, 64] is missing", "model.norm.weight [64] is missing"]),
        (
            _add,
            ["model.layers.4.mlp.up_proj.weight [2] is extra", "model.layers.0.self_attn.q_proj.lora_A [2] is extra"],
        ),
        (_bend, ["lm_head.weight is [7, 64], not [131, 64]"]),
        (_quantize, ["model.layers.0.mlp.down_proj.weight stored as torch.int8"]),
        (_mix, ["model.layers.0.self_attn.q_proj.weight", "torch.float16, torch.float32"]),
    ],
)
def test_every_fault_is_named_and_nothing_is_written(
    change: Callable[[Tensors], None], names: list[str], tmp_path: Path
) -> None:
    source = saved(tiny("llama"), tmp_path / "source", shard_size="1GB")
    tensors = tensors_in(source)
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(DataError) as error:
        resaved(source, tmp_path / "target")
    assert all(name in str(error.value) for name in names), error.value
    assert {entry.name for entry in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda told: told.update({"lm_head.weight": "../x.safetensors"}), "outside its folder"),
        (lambda told: told.update({"lm_head.weight": "model-00009-of-00009.safetensors"}), "lacks model-00009"),
        (lambda told: told.pop("lm_head.weight"), "lm_head.weight is in .* but not in model.safetensors.index.json"),
    ],
    ids=["outside", "absent", "unnamed"],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(change: Any, says: str, tmp_path: Path) -> None:
    source = saved(tiny("llama"), tmp_path / "source")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    change(index["weight_map"])
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=says):
        resaved(source, tmp_path / "target")


def test_ranks_make_no_sense_for_a_folder_without_ranks(tmp_path: Path) -> None:
    source = saved(tiny("gpt2"), tmp_path / "source")
    for options in (WriterOptions(tp=2), WriterOptions(pp=2), WriterOptions(layers_per_stage=(4,))):
        with pytest.raises(ConfigError, match="no ranks"):
            prepare_conversion(source, tmp_path / "target", "hf", options, source_format="hf")


def test_a_folder_is_recognised_by_config_and_weights(tmp_path: Path) -> None:
    source = saved(tiny("gpt2"), tmp_path / "source")
    assert is_huggingface(source)
    (source / "config.json").unlink()
    assert not is_huggingface(source)


def test_weights_that_are_there_twice_are_read_as_transformers_does_and_said(tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"of another day")
    reader = huggingface.open_checkpoint(folder)
    reader.check()
    assert any("pytorch_model.bin is not read" in notice for notice in reader.notices)


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", [*_FAMILIES, *_LARGER, *_OTHERS])
def test_a_field_under_any_name_is_what_transformers_makes_of_it_or_refused(family: str) -> None:
    """An architecture that is read is that of what transformers writes of the same fields, defaults included."""
    base = {"model_type": family, "pad_token_id": None} | (_LARGER | _OTHERS).get(family, _SMALL)
    alone = [{name: value} for name, values in _FIELDS.items() for value in values]
    both = [{"rope_scaling": one, "rope_parameters": other} for one, other in product(_ROPES, _ROPES)]
    taken = 0
    for change in [{}, *alone, *both]:
        if (
            family in _OTHERS and family != "gpt2" and "tie_word_embeddings" in change
        ):  # which transformers 5 writes true of each
            continue
        by_type = family in ("gemma3_text", "olmo3")
        if by_type and "type" in (change.get("rope_scaling") or {}):  # which transformers 4 alone takes
            continue
        try:
            found = read_config(base | deepcopy(change))
            whole = CONFIG_MAPPING[family].from_dict(base | deepcopy(change)).to_dict()
        except (ConfigError, KeyError, AttributeError):  # these two are transformers'
            continue
        assert read_config(whole | {"dtype": "float32"}) == found, change
        taken += 1
    assert taken > len(alone) // 2
