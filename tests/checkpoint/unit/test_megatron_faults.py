"""Checkpoints of Megatron with something wrong in them: all of it is named, nothing is dropped, nothing is run."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint import converter
from dynapipe_ext.tools.checkpoint.files.torch_file import ArchiveRecord, read_pickle
from dynapipe_ext.tools.checkpoint.formats import WriterOptions
from dynapipe_ext.tools.checkpoint.megatron import dist as megatron_dist
from dynapipe_ext.tools.checkpoint.megatron import legacy as megatron_legacy
from dynapipe_ext.tools.checkpoint.megatron.names import EMBEDDING, HEAD
from dynapipe_ext.tools.checkpoint.megatron.pickles import read_archive
from dynapipe_ext.tools.checkpoint.recognition import iteration_folder
from tests.support.megatron_files import Published, convert, edited_metadata, edited_rank, published_in, rank_file


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published_in(tmp_path_factory.mktemp("published"))


def test_missing_extra_and_misshapen_tensors_of_torch_dist_are_all_named(published: Published, tmp_path: Path) -> None:
    there = convert(published("qwen2"), tmp_path / "there", "megatron")

    def edit(metadata: Any) -> None:
        entries = metadata.state_dict_metadata
        entries["decoder.layers.mlp.linear_fc9.weight"] = entries["decoder.layers.mlp.linear_fc2.weight"]
        index = next(i for i in metadata.storage_data if i.fqn.endswith("linear_fc2.weight"))
        for chunk in entries["decoder.layers.mlp.linear_fc2.weight"].chunks:
            metadata.storage_data[replace(index, fqn="decoder.layers.mlp.linear_fc9.weight", offset=chunk.offsets)] = (
                metadata.storage_data[index]
            )
        del entries["decoder.final_layernorm.weight"]
        del entries["decoder.layers.self_attention.linear_qkv.bias"]
        entries["output_layer.weight"].size = torch.Size((256, 63))

    reader = megatron_dist.open_checkpoint(edited_metadata(there, edit))
    with pytest.raises(DataError) as caught:
        reader.check()
    message = str(caught.value)
    assert "linear_fc9.weight [4, 64, 96] is extra" in message
    assert "decoder.final_layernorm.weight [64] is missing" in message
    assert all(f"decoder.layers.{i}.self_attention.linear_qkv.bias" in message for i in range(4))
    assert "output_layer.weight is [256, 63], not [256, 64]" in message


def test_a_chunk_that_is_not_there_is_named(published: Published, tmp_path: Path) -> None:
    there = convert(published("qwen2"), tmp_path / "there", "megatron", tp=2)
    edited_metadata(there, lambda m: m.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop())
    reader = megatron_dist.open_checkpoint(there)
    group = next(g for g in tensor_groups(reader.architecture) if (g.kind, g.layer) == ("mlp_out", 3))
    with pytest.raises(DataError, match=r"decoder.layers.3.mlp.linear_fc2.weight has 3,072 values"):
        reader.read(group, "weight")


def test_missing_extra_and_misshapen_tensors_of_a_rank_are_all_named(published: Published, tmp_path: Path) -> None:
    there = convert(published("llama"), tmp_path / "there", "megatron-legacy", tp=2)

    def edit(state: dict[str, Any]) -> None:
        del state["model"]["decoder.layers.2.mlp.linear_fc2.weight"]
        state["model"]["decoder.layers.2.mlp.linear_fc3.weight"] = torch.zeros(2, 3)
        state["model"][HEAD] = torch.zeros(7, 64)

    with pytest.raises(DataError) as caught:
        megatron_legacy.open_checkpoint(edited_rank(there, edit, "mp_rank_01")).check()
    message = str(caught.value)
    assert "decoder.layers.2.mlp.linear_fc2.weight [64, 48] of tensor parallel rank 1 is missing" in message
    assert "decoder.layers.2.mlp.linear_fc3.weight [2, 3] of mp_rank_01 is extra" in message
    assert "output_layer.weight of mp_rank_01 is [7, 64], not [128, 64]" in message


def test_a_rank_without_its_file_is_named(published: Published, tmp_path: Path) -> None:
    there = convert(published("llama"), tmp_path / "there", "megatron-legacy", tp=2, pp=2)
    rank_file(there, "mp_rank_01_000").unlink()
    with pytest.raises(DataError, match="lacks mp_rank_01_000"):
        megatron_legacy.open_checkpoint(there)
    for rank in ("mp_rank_00_001", "mp_rank_01_001"):
        rank_file(there, rank).unlink()
    with pytest.raises(DataError, match="was written by tp 2 x pp 2 ranks, not 1 x 1"):
        megatron_legacy.open_checkpoint(there)


def test_a_copy_of_the_tied_embedding_that_differs_is_refused(published: Published, tmp_path: Path) -> None:
    there = convert(published("llama-tied"), tmp_path / "there", "megatron-legacy", pp=2)
    last = torch.load(rank_file(there, "mp_rank_00_001"), weights_only=False)
    first = torch.load(rank_file(there, "mp_rank_00_000"), weights_only=False)
    assert torch.equal(last["model"][HEAD], first["model"][EMBEDDING])
    edited_rank(there, lambda state: state["model"][HEAD].add_(1), "mp_rank_00_001")
    with pytest.raises(DataError, match="copy of the tied embedding"):
        megatron_legacy.open_checkpoint(there).check()


def test_copies_that_differ_between_ranks_are_said(published: Published, tmp_path: Path) -> None:
    there = convert(published("llama"), tmp_path / "there", "megatron-legacy", tp=2)
    norm = "decoder.layers.1.input_layernorm.weight"
    reader = megatron_legacy.open_checkpoint(
        edited_rank(there, lambda state: state["model"][norm].add_(1), "mp_rank_01")
    )
    reader.check()
    assert any(norm in notice and "rank 0" in notice for notice in reader.notices)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p"),
        ({"rotary_interleaved": True}, "rotary_interleaved"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ({"multi_latent_attention": True}, "multi_latent_attention"),
        ({"expert_model_parallel_size": 2}, "2 expert parallel ranks"),
    ],
)
def test_weights_that_mean_something_else_are_refused(
    changes: dict[str, Any], says: str, published: Published, tmp_path: Path
) -> None:
    there = convert(published("llama"), tmp_path / "there", "megatron-legacy")
    edited_rank(there, lambda state: vars(state["args"]).update(changes))
    with pytest.raises(DataError, match=says):
        megatron_legacy.open_checkpoint(there)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda state: state.update(checkpoint_version=1.0), "checkpoint_version is 1.0"),
        (lambda state: state.update(model={"language_model": {}}), "older than megatron-core"),
        (lambda state: state["model"].update({"decoder.layers.0.mlp.experts.weight1": None}), "GroupedMLP"),
        (lambda state: state.pop("model"), "holds no model"),
    ],
)
def test_rank_files_of_other_kinds_are_refused_by_name(
    edit: Callable[[dict[str, Any]], None], says: str, published: Published, tmp_path: Path
) -> None:
    there = convert(published("llama"), tmp_path / "there", "megatron-legacy")
    with pytest.raises(DataError, match=says):
        megatron_legacy.open_checkpoint(edited_rank(there, edit))


class Evil:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_nothing_that_a_file_names_is_run(published: Published, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    torch.save({"args": argparse.Namespace(vocab_size=3, evil=Evil(mark)), "evil": Evil(mark)}, tmp_path / "common.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": Evil(mark), "torch": torch.float32}))
    found = read_archive(ArchiveRecord(tmp_path / "common.pt"))
    assert found["args"].vocab_size == 3
    assert found["evil"].qualified == "posix.mkdir"
    assert read_pickle(tmp_path / ".metadata")["torch"] is torch.float32
    there = convert(published("llama"), tmp_path / "there", "megatron-legacy")

    def edit(state: dict[str, Any]) -> None:
        state["evil"] = state["args"].odd = Evil(mark)

    edited_rank(there, edit)
    reader = megatron_legacy.open_checkpoint(there)
    assert any("evil" in notice for notice in reader.notices)
    again = converter.prepare_conversion(there, tmp_path / "again", "megatron", WriterOptions())
    assert any("no plain ones are not carried: odd" in notice for notice in again.notices)
    mark.mkdir()  # it was not there


@pytest.mark.parametrize("cut", [0.3, 0.9])
@pytest.mark.parametrize("name", [".metadata", "common.pt", "__1_0.distcp"])
def test_a_file_that_was_cut_is_named(name: str, cut: float, published: Published, tmp_path: Path) -> None:
    there = convert(published("llama"), tmp_path / "there", "megatron")
    path = there / "release" / name
    os.truncate(path, int(cut * path.stat().st_size))
    with pytest.raises(DataError, match=name):
        convert(there, tmp_path / "back", "hf")
    assert not (tmp_path / "back").exists()


def test_a_metadata_that_names_a_file_outside_is_refused(published: Published, tmp_path: Path) -> None:
    there = convert(published("llama"), tmp_path / "there", "megatron")

    def edit(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../../secret"

    with pytest.raises(DataError, match="outside the checkpoint"):
        megatron_dist.open_checkpoint(edited_metadata(there, edit))


def test_the_iteration_is_the_trackers_or_the_only_one(tmp_path: Path) -> None:
    for name in ("iter_0000010", "iter_0000020"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="iter_0000010, iter_0000020"):
        iteration_folder(tmp_path)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text, name in (("10", "iter_0000010"), ("release", "release"), ("20\n", "iter_0000020")):
        tracker.write_text(text)
        assert iteration_folder(tmp_path) == tmp_path / name
    tracker.write_text("ten")
    with pytest.raises(DataError, match="'ten'"):
        iteration_folder(tmp_path)
    assert iteration_folder(tmp_path / "iter_0000010") == tmp_path / "iter_0000010"
