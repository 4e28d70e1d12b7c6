"""`dynapipe convert` from end to end: killed, interrupted, out of space, refused, compared, and within its memory."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.launch import cli
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.tools.checkpoint import converter
from dynapipe_ext.tools.checkpoint.formats import WriterOptions
from dynapipe_ext.tools.checkpoint.huggingface import folder as huggingface
from dynapipe_ext.tools.checkpoint.recognition import TARGETS
from tests.support.checkpoints import saved, tensors_in, tiny
from tests.support.conversion_command import SHARD_BYTES, run, to_hf
from tests.support.conversion_peak import largest_group_bytes, make_models, measured, total_bytes
from tests.support.limits import LIMIT_S

MB = 1_000_000


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(converter.shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    assert to_hf(origin, tmp_path / "target") == 2
    assert "kB more, but its disk has 100 B: free some" in capsys.readouterr().err
    assert not list((tmp_path / "target.partial").glob("*.safetensors"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("largest_bytes", [3_000, 33_333])
def test_a_file_that_may_not_grow_is_said_plainly_and_the_work_goes_on(
    target: str, largest_bytes: int, origin: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a full disk or quota is: in torch.save it comes back as a RuntimeError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, before[1]))
    try:
        assert run(origin, tmp_path / "target", "--to", target) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written, the disk or the quota is full" in capfd.readouterr().err
    assert run(origin, tmp_path / "target", "--to", target, "--verify") == 0


def test_a_type_that_differs_between_stacked_layers_is_refused_where_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("llama")
    model.model.layers[2].mlp.down_proj.to(torch.bfloat16)
    source = saved(model, tmp_path / "source")
    assert run(source, tmp_path / "target", "--to", "megatron") == 2
    assert "layers.2.mlp_out is torch.bfloat16 but layers.0.mlp_out is torch.float32" in capsys.readouterr().err
    assert run(source, tmp_path / "target", "--to", "megatron-legacy", "--verify") == 0


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_said_plainly(
    code: int, origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code), str(tmp_path / "target.partial"))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert to_hf(origin, tmp_path / "target") == 2
    assert f"cannot be used ({os.strerror(code)})" in capsys.readouterr().err


def test_places_that_cannot_be_are_refused(origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    cases = {
        (origin, tmp_path / "there"): "exists: choose another DST",
        (origin, origin / "below"): "lies inside",
        (origin, origin): "exists",
        (tmp_path / "nowhere", tmp_path / "target"): "does not exist",
        (origin / "config.json", tmp_path / "target"): "is a file",
        (origin.parent, tmp_path / "target"): f"is no checkpoint but holds {origin.name}, which is: give {origin}",
        (tmp_path / "there", tmp_path / "target"): "holds no checkpoint that is known",
        (origin, tmp_path / "file/below"): "cannot be used (Not a directory)",
    }
    for (place, target), says in cases.items():
        assert to_hf(place, target) == 2
        assert says in capsys.readouterr().err
    assert {entry.name for entry in tmp_path.iterdir()} == {"there", "file"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--to", "hf", "--tp", "2"], "leave out --tp"),
        (["--to", "hf", "--layers-per-stage", "2,2"], "leave out --layers-per-stage"),
        (["--to", "deepspeed", "--pp", "2"], "leave out --pp"),
        (["--to", "megatron", "--layers-per-stage", "2,2", "--pp", "4"], "has 2 stages but --pp is 4"),
        (["--to", "megatron", "--max-shard-gb", "1"], "--max-shard-gb is for --to hf"),
        (["--to", "hf", "--max-shard-gb", "-1"], "must be above 0"),
        (["--to", "megatron", "--transformer-impl", "local"], "--transformer-impl is for --to megatron-legacy"),
    ],
)
def test_options_that_cannot_be_heeded_are_refused(
    flags: list[str], says: str, origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(origin, tmp_path / "target", *flags) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_verify_names_the_tensor_that_a_faulty_writer_spoilt(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = huggingface.write_safetensors

    def spoilt(path: Path, specs: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> Any:
        def values() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if name == "model.layers.1.self_attn.k_proj.weight":
                    tensor[3, 5] = -tensor[3, 5]
                yield name, tensor

        return write(path, specs, values())

    monkeypatch.setattr(huggingface, "write_safetensors", spoilt)
    assert to_hf(origin, tmp_path / "target", "--verify") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "in 1 tensors: model.layers.1.self_attn.k_proj.weight (weight)" in said
    assert not (tmp_path / "target").exists()


def test_a_writer_that_would_drop_a_tensor_is_stopped(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = huggingface._shards
    monkeypatch.setattr(huggingface, "_shards", lambda *args: [shards(*args)[0][:-1], *shards(*args)[1:]])
    with pytest.raises(DataError, match=r"the target has no place for layers\.\d\.\w+"):
        converter.prepare_conversion(origin, tmp_path / "target", "hf", WriterOptions(), shard_bytes=SHARD_BYTES)
    monkeypatch.setattr(huggingface, "_shards", shards)
    monkeypatch.setattr(huggingface.HuggingFaceWriter, "write", lambda self, piece, origin: {})
    conversion = converter.prepare_conversion(
        origin, tmp_path / "target", "hf", WriterOptions(), shard_bytes=SHARD_BYTES
    )
    with pytest.raises(DataError, match=r"was written without embedding \(weight\)"):
        converter.convert(conversion)


def test_the_outcome_is_json_on_standard_output_alone(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert to_hf(origin, tmp_path / "target", "--verify", "--json") == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert (report["family"], report["tensors"], report["pieces"], report["verified"]) == ("llama", 39, 3, True)
    assert report["parameters"] == sum(tensor.numel() for tensor in tensors_in(origin).values())
    assert "hf to hf, MB: 2/2 (100 %)" in printed.err


def test_the_outcome_is_a_table_for_people(origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert to_hf(origin, tmp_path / "target") == 0
    printed = capsys.readouterr().out
    assert "140,224" in printed
    assert "no (--verify)" in printed


@pytest.mark.parametrize("verify", [False, True])
def test_progress_ends_where_it_said_it_would(verify: bool, origin: Path, tmp_path: Path) -> None:
    conversion = converter.prepare_conversion(
        origin, tmp_path / "target", "hf", WriterOptions(), verify=verify, shard_bytes=SHARD_BYTES
    )
    steps: list[int] = []
    converter.convert(conversion, steps.append)
    assert sum(steps) == conversion.total_bytes
    assert max(steps) < conversion.total_bytes / 5


def test_help_has_examples_and_needs_no_torch() -> None:
    script = "import sys; from dynapipe_ext.launch.commands import convert; assert 'torch' not in sys.modules\n"
    script += "import argparse; parser = argparse.ArgumentParser(); convert.add_arguments(parser)\n"
    script += "parser.print_help(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert "dynapipe convert llama-3-8b-hf" in done.stdout
    assert all(name in done.stdout for name in TARGETS)


def test_memory_holds_one_group_of_tensors_and_not_the_model_in_any_direction(tmp_path: Path) -> None:
    architecture = Architecture(
        family="llama", num_layers=6, hidden_size=1024, num_heads=8, num_query_groups=4, head_dim=128,
        ffn_hidden_size=4096, vocab_size=4000, max_seq_len=128, tied_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    folders = make_models(tmp_path, "model", architecture)
    # Far less than 200 MB, so that a model of this size shows whether more than a group is held.
    allowed = 1.3 * largest_group_bytes(architecture) + 105 * MB
    assert total_bytes(architecture) > 1.6 * allowed
    steps = [
        ("model", "megatron", ("--tp", "2", "--pp", "2")),
        ("megatron", "megatron-legacy", ("--tp", "1", "--pp", "3")),
        ("megatron-legacy", "hf", ("--verify",)),
    ]
    for origin, to, flags in steps:
        peak = measured(folders, origin, to, "--to", to, *flags)
        assert peak.own_bytes <= allowed, f"{origin} to {to}: {peak.own_bytes / MB:.0f} MB"


def test_legacy_files_are_named_for_the_layers_that_will_load_them(origin: Path, tmp_path: Path) -> None:
    for implementation in ("local", "transformer_engine"):
        target = str(tmp_path / implementation)
        flags = ["--to", "megatron-legacy", "--transformer-impl", implementation, "--verify"]
        assert cli.main(["convert", str(origin), target, *flags]) == 0
        back = tmp_path / f"{implementation}-back"
        assert cli.main(["convert", target, str(back), "--to", "hf"]) == 0
        here, there = tensors_in(origin), tensors_in(back)
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in here)


def test_a_destination_inside_the_source_is_refused_through_links_too(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(origin)
    for source, inside in ((tmp_path / "link", origin / "inside"), (origin, tmp_path / "link" / "inside")):
        assert cli.main(["convert", str(source), str(inside), "--to", "megatron"]) == 2
        assert "choose a DST outside the source" in capsys.readouterr().err
        assert not (origin / "inside").exists()
