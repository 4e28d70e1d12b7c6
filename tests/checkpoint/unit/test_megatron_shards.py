"""Megatron's two layouts without Megatron: cutting and putting together, names, refusals, files that nobody trusts."""

from __future__ import annotations

import argparse
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint.files.stored_tensor import StoredTensor, byte_chunks
from dynapipe_ext.tools.checkpoint.files.torch_file import ArchiveRecord
from dynapipe_ext.tools.checkpoint.formats import TrainingState, WriterOptions
from dynapipe_ext.tools.checkpoint.megatron import dist as megatron_dist
from dynapipe_ext.tools.checkpoint.megatron import legacy as megatron_legacy
from dynapipe_ext.tools.checkpoint.megatron.archive import ArchiveWriter, Planned
from dynapipe_ext.tools.checkpoint.megatron.dist import Chunk, Stored, _unflatten
from dynapipe_ext.tools.checkpoint.megatron.dist_names import StoredKey
from dynapipe_ext.tools.checkpoint.megatron.names import EMBEDDING, MegatronTensor
from dynapipe_ext.tools.checkpoint.megatron.shards import Box, RankLayout, TensorPart, assemble, blocks
from dynapipe_ext.tools.checkpoint.megatron.state import param_groups
from tests.support.checkpoints import VOCAB, differences, tensors_in
from tests.support.megatron_files import Published, convert, edited_metadata, edited_rank, published_in, rank_file

LLAMA = Architecture(
    family="llama",
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    num_query_groups=4,
    head_dim=4,
    ffn_hidden_size=24,
    vocab_size=13,
    max_seq_len=8,
    tied_embeddings=False,
)
FORMATS = ("megatron", "megatron-legacy")
UNEVEN = (1, 3)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published_in(tmp_path_factory.mktemp("published"))


def round_trip(source: Path, folder: Path, to: str, **options: Any) -> list[str]:
    """Names of tensors that differ after the way there and back."""
    there = convert(source, folder / "there", to, **options)
    return differences(tensors_in(source), tensors_in(convert(there, folder / "back", "hf")))


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 4), (2, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])
def test_every_spread_over_ranks_comes_back(name: str, tp: int, pp: int, published: Published, tmp_path: Path) -> None:
    there = convert(published(name), tmp_path / "1", "megatron-legacy", tp=tp, pp=pp, verify=True)
    other = convert(there, tmp_path / "2", "megatron", tp=5 - tp if tp in (1, 4) else 2, pp=pp, verify=True)
    back = convert(other, tmp_path / "3", "hf")
    assert differences(tensors_in(published(name)), tensors_in(back)) == []


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    tp=st.sampled_from([1, 2, 4]),
    parts=st.sampled_from([1, 2]),
    across=st.booleans(),
    padding=st.integers(0, 3),
)
@settings(max_examples=60)
def test_what_ranks_hold_makes_up_the_whole_again(
    rows: int, columns: int, tp: int, parts: int, across: bool, padding: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, columns = rows * tp * 2, columns * tp
    vocabulary = not across and parts == 1
    real = max(1, rows - padding) if vocabulary else rows
    tensor = MegatronTensor("x", (real, columns), int(across), 1 if across else parts, vocabulary)
    whole = torch.randn(real, columns)
    layout = RankLayout(LLAMA, tp, (4,), rows)
    folder = tmp_path_factory.mktemp("ranks")
    boxes = []
    for rank in range(tp):
        held = torch.cat(
            [block for _, block in blocks(tensor, [TensorPart(tensor, 0, whole)], layout.spans(tensor, rank))]
        )
        assert tuple(held.shape) == layout.local_shape(tensor)
        (folder / str(rank)).write_bytes(b"".join(map(bytes, byte_chunks(held))))
        stored = StoredTensor(folder / str(rank), held.dtype, tuple(held.shape), 0)
        row = 0
        for begin, end in layout.spans(tensor, rank):
            if across:
                boxes.append(Box((0, begin), stored))
            else:
                part = replace(stored, shape=(end - begin, columns), offset=row * columns * 4)
                boxes.append(Box((begin, 0), part))
                row += end - begin
    assert torch.equal(assemble("x", tensor.shape, boxes, clip_rows=vocabulary), whole)
    if tp > 1:
        with pytest.raises(DataError, match="x has"):
            assemble("x", tensor.shape, boxes[:-1] + boxes[:1], clip_rows=vocabulary)


def test_rows_of_padding_are_zeros(published: Published, tmp_path: Path) -> None:
    there = convert(published("llama"), tmp_path / "there", "megatron-legacy", tp=4)
    ranks = [
        torch.load(there / "release" / f"mp_rank_{r:02d}" / "model_optim_rng.pt", weights_only=False) for r in range(4)
    ]
    whole = torch.cat([rank["model"][EMBEDDING] for rank in ranks])
    assert whole.shape[0] == 512
    assert not whole[VOCAB:].any()
    assert ranks[0]["args"].padded_vocab_size == 512
    assert ranks[0]["args"].vocab_size == VOCAB


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": 3}, "--tp 3 does not divide num_heads 4"),
        ({"tp": 0}, "--tp 0"),
        ({"pp": 3}, "--pp 3 does not divide 4 layers"),
        ({"pp": 0}, "--pp 0"),
        ({"pp": 2, "layers_per_stage": (1, 2)}, "sum to 4 layers; these sum to 3"),
        ({"pp": 3, "layers_per_stage": (2, 2)}, "must be --pp 3 numbers"),
        ({"pp": 2, "layers_per_stage": (5, -1)}, "at least 0"),
        ({"vocab_divisible_by": 0}, "vocab_divisible_by is 0"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RankLayout.of(LLAMA, WriterOptions(**options))


def test_query_groups_that_ranks_cannot_share_are_refused() -> None:
    six = replace(LLAMA, num_heads=12, num_query_groups=4, head_dim=8, ffn_hidden_size=96)
    with pytest.raises(ConfigError, match="--tp 6: num_query_groups 4 must divide tp 6 or be a multiple of it"):
        RankLayout.of(six, WriterOptions(tp=6))
    with pytest.raises(ConfigError, match="--tp 4: num_query_groups 2 must be a multiple of tp 4: ranks that share"):
        RankLayout.of(replace(LLAMA, num_query_groups=2, qk_norm=True, qk_norm_whole=True), WriterOptions(tp=4))
    with pytest.raises(ConfigError, match="the 20 rows of queries, keys and values must divide over tp 8"):
        RankLayout.of(replace(LLAMA, num_heads=8, num_query_groups=1, head_dim=2), WriterOptions(tp=8))


def test_virtual_stages_go_round_the_pipeline(published: Published, tmp_path: Path) -> None:
    there = convert(published("llama-tied"), tmp_path / "there", "megatron-legacy", pp=4)
    stages = [torch.load(rank_file(there, f"mp_rank_00_{i:03d}"), weights_only=False) for i in range(4)]
    for rank in range(2):
        state = {**stages[rank], "model0": stages[rank]["model"], "model1": stages[rank + 2]["model"]}
        del state["model"]
        state["args"].pipeline_model_parallel_size = 2
        torch.save(state, rank_file(there, f"mp_rank_00_{rank:03d}"))
    for rank in (2, 3):
        rank_file(there, f"mp_rank_00_{rank:03d}").unlink()
    back = convert(there, tmp_path / "back", "hf")
    assert differences(tensors_in(published("llama-tied")), tensors_in(back)) == []


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "qwen3", "t5"])
def test_layers_of_transformer_engine_are_written_and_read(name: str, published: Published, tmp_path: Path) -> None:
    assert round_trip(published(name), tmp_path, "megatron-legacy", tp=2, impl="transformer_engine") == []
    model = torch.load(rank_file(tmp_path / "there"), weights_only=False)["model"]
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in model
    assert not any("input_layernorm" in key for key in model)
    assert ("decoder.layers.0.mlp.experts.linear_fc1.weight3" in model) == (name == "mixtral")


def test_without_a_config_the_arguments_say_which_model(published: Published, tmp_path: Path) -> None:
    there = convert(published("qwen2"), tmp_path / "there", "megatron-legacy")
    (there / "huggingface" / "config.json").unlink()
    for file in (there / "huggingface").iterdir():
        file.unlink()
    reader = megatron_legacy.open_checkpoint(there)
    assert tensor_groups(reader.architecture)
    assert reader.architecture.vocab_size == VOCAB
    assert not any("padding" in notice for notice in reader.notices)
    edited_rank(there, lambda state: setattr(state["args"], "vocab_size", None))
    reader = megatron_legacy.open_checkpoint(there)
    assert reader.architecture.vocab_size == 256
    assert "padding included" in reader.notices[0]
    edited_rank(there, lambda state: state.pop("args"))
    with pytest.raises(DataError, match="does not say which model it is"):
        megatron_legacy.open_checkpoint(there)


def test_weights_alone_are_a_release_that_names_no_optimizer(published: Published, tmp_path: Path) -> None:
    there = convert(published("llama"), tmp_path / "there", "megatron", tp=2, layers=UNEVEN)
    assert (there / "latest_checkpointed_iteration.txt").read_text() == "release"
    common = torch.load(there / "release" / "common.pt", weights_only=False)
    arguments = common["args"]
    assert (common["iteration"], arguments.no_save_optim, arguments.no_save_rng) == (0, True, True)
    assert (arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size) == (2, 2)
    assert arguments.pipeline_model_parallel_layout == "Et*1|t*3L"
    assert {f.name for f in (there / "huggingface").iterdir()} >= {
        "config.json",
        "tokenizer.json",
        "generation_config.json",
    }
    assert json.loads((there / "release" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


@pytest.mark.parametrize("to", FORMATS)
def test_buffers_of_the_distributed_optimizer_are_said_to_stay_behind(
    to: str, published: Published, tmp_path: Path
) -> None:
    there = convert(published("llama"), tmp_path / "there", to)
    reader: Any
    if to == "megatron":

        def edit(metadata: Any) -> None:
            name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.param"
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
            index = next(i for i in metadata.storage_data if i.fqn == "decoder.final_layernorm.weight")
            metadata.storage_data[replace(index, fqn=name)] = metadata.storage_data[index]

        reader = megatron_dist.open_checkpoint(edited_metadata(there, edit))
    else:
        edited_rank(there, lambda state: state.update(optimizer={"optimizer": {"param_groups": []}}))
        reader = megatron_legacy.open_checkpoint(there)
    reader.check()
    assert reader.kinds == ("weight",)
    assert any("--dist-ckpt-optim-fully-reshardable" in notice for notice in reader.notices)


def test_flat_shards_of_older_distributed_optimizers_are_put_back(tmp_path: Path) -> None:
    tensor = MegatronTensor("x", (3, 6), 0, vocabulary=True)
    whole = torch.cat([torch.randn(3, 6), torch.zeros(1, 6)])
    chunks = []
    for row in range(2):
        for column in range(2):
            flat = whole[2 * row : 2 * row + 2, 3 * column : 3 * column + 3].reshape(1, 1, 6).clone()
            for begin, end in ((0, 4), (4, 6)):
                path = tmp_path / f"{row}{column}{begin}"
                torch.save(flat[..., begin:end].clone(), path)
                chunks.append(Chunk((row, column, begin), (1, 1, end - begin), ArchiveRecord(path)))
    stored = Stored.of((2, 2, 6), torch.float32, chunks)
    assert torch.equal(_unflatten(tensor, stored, StoredKey("x", (), (), (3, 6))), whole[:3])


def test_an_archive_is_what_torch_reads_and_nothing_when_it_fails(tmp_path: Path) -> None:
    first, second = Planned(torch.bfloat16, (3, 5)), Planned(torch.float32, (2,))
    value = {"a": first, "same": first, "b": [second, None, 1.5], "args": argparse.Namespace(x=1), "s": torch.ones(1)}
    a, b = torch.randn(3, 5).bfloat16(), torch.randn(2)
    with pytest.raises(RuntimeError, match="1 planned"), ArchiveWriter(tmp_path / "file.pt", value) as archive:
        archive.write(first, [a])
    with pytest.raises(KeyError), ArchiveWriter(tmp_path / "file.pt", value) as archive:
        archive.write(Planned(torch.float32, (1,)), [b])
    assert list(tmp_path.iterdir()) == []
    with ArchiveWriter(tmp_path / "file.pt", value) as archive:
        archive.write(second, [b])
        archive.write(first, [a[:1], a[1:]])
    for mapped in (False, True):
        found = torch.load(tmp_path / "file.pt", weights_only=False, mmap=mapped)
        assert torch.equal(found["a"], a)
        assert torch.equal(found["b"][0], b)
        assert found["args"].x == 1
        assert found["a"].data_ptr() == found["same"].data_ptr()
        assert not mapped or found["a"].data_ptr() % 64 == 0
    with zipfile.ZipFile(tmp_path / "file.pt") as archive_file:
        assert archive_file.testzip() is None


def test_t5_has_no_pipeline_stages_in_rank_files(published: Published, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="T5 has no pipeline stages"):
        convert(published("t5"), tmp_path / "there", "megatron-legacy", pp=2)


def test_groups_of_expert_parallel_ranks_become_those_of_one() -> None:
    groups = [
        {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": True, "is_decoupled_lr": False, "lr": 3.0},
        {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 1.0},
        {"wd_mult": 0.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 2.0},
    ]
    found = param_groups(TrainingState(param_groups=tuple(groups)))
    assert [(group["wd_mult"], group["lr"], group["is_expert_parallel"]) for group in found] == [
        (1.0, 1.0, False),
        (0.0, 2.0, False),
    ]
    other = param_groups(TrainingState(param_groups=({"lr": 5.0, "betas": (0.8, 0.9), "weight_decay": 0.2, "x": 1},)))
    assert [(group["wd_mult"], group["lr"], group["weight_decay"]) for group in other] == [
        (1.0, 5.0, 0.2),
        (0.0, 5.0, 0.0),
    ]
