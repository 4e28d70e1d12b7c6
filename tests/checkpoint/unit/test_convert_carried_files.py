"""A config.json says what the weights are, and keeps what else it said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config, write_config
from dynapipe_ext.models.rope_scaling import RopeScaling
from dynapipe_ext.tools.checkpoint.huggingface.carried_files import carried_files, left_behind, settle_config
from tests.support.checkpoints import VARIANTS, tiny_config

LLAMA = Architecture(
    family="llama", num_layers=2, hidden_size=64, num_heads=8, num_query_groups=4, head_dim=8, ffn_hidden_size=96,
    vocab_size=131, max_seq_len=64, tied_embeddings=False,
)  # fmt: skip


def test_a_config_that_fits_is_left_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**write_config(LLAMA), "mine": [1, 2]}, indent=7))
    before = path.read_bytes()
    settle_config(path, LLAMA, {"eos_token_id": 9})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "changed",
    [
        replace(LLAMA, dtype="bfloat16"),
        replace(LLAMA, tied_embeddings=True),
        replace(LLAMA, rope_scaling=RopeScaling("llama3", 32.0), rope_theta=5e5),
        replace(LLAMA, num_query_groups=8, qkv_bias=True, attention_output_bias=True),
    ],
)
def test_a_config_of_other_weights_is_corrected_and_keeps_the_rest(changed: Architecture, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**write_config(LLAMA), "mine": [1, 2], "architectures": ["Own"]}))
    settle_config(path, changed, {})
    raw = json.loads(path.read_text())
    assert read_config(raw) == changed
    assert (raw["mine"], raw["architectures"]) == ([1, 2], ["Own"])


@pytest.mark.parametrize("family", dict.fromkeys(family for family, _ in VARIANTS.values()))
def test_a_config_keeps_every_field_that_the_weights_do_not_change(family: str, tmp_path: Path) -> None:
    """Also ids of special tokens, which a config that is written anew leaves out."""
    path, ids = tmp_path / "config.json", {"pad_token_id": 5, "bos_token_id": 6, "eos_token_id": 7}
    ids |= {"num_nextn_predict_layers": 1} if family in ("deepseek_v3", "glm4_moe") else {}
    before = json.loads(tiny_config(family).to_json_string(use_diff=False)) | ids | {"mine": [1, 2]}
    path.write_text(json.dumps(before))
    settle_config(path, replace(read_config(before), dtype="bfloat16"), {})
    after = json.loads(path.read_text())
    changed = {name: value for name, value in after.items() if before.get(name, "absent") != value}
    layers = {name: 0 for name in ids if name == "num_nextn_predict_layers"}
    assert changed == {"dtype": "bfloat16", "torch_dtype": "bfloat16", **layers}
    assert after.keys() >= before.keys()


def test_where_there_is_none_one_is_written(tmp_path: Path) -> None:
    settle_config(tmp_path / "folder/config.json", LLAMA, {"eos_token_id": 9})
    raw = json.loads((tmp_path / "folder/config.json").read_text())
    assert read_config(raw) == LLAMA
    assert raw["eos_token_id"] == 9


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_config_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DataError, match=r"config\.json"):
        settle_config(tmp_path / "config.json", LLAMA, {})


def test_files_are_carried_by_name_and_the_others_are_told(tmp_path: Path) -> None:
    carried = [
        "LICENSE",
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "spiece.model",
        "tokenizer.json",
        "vocab.json",
    ]
    weights = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    weights += ["consolidated.safetensors"]
    others = ["README.md", "training_args.bin"]
    for name in [*carried, *weights, *others, ".hidden"]:
        (tmp_path / name).touch()
    (tmp_path / "original").mkdir()
    assert [file.name for file in carried_files(tmp_path)] == sorted(carried)
    assert left_behind(tmp_path) == tuple(sorted([*others, "original/"]))


def test_every_file_of_a_tokenizer_is_carried(tmp_path: Path) -> None:
    names = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json"}
    names |= {"chat_template.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json"}
    for name in (*names, "notes.md"):
        (tmp_path / name).write_text("{}")
    assert {file.name for file in carried_files(tmp_path)} == names
    assert left_behind(tmp_path) == ("notes.md",)
